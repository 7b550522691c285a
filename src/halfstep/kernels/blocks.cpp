// Rounding to block formats on a CPU, in two passes: the largest magnitude of each block, and, once
// the scales are known, every number divided by its block's scale, rounded to the grid of a narrow
// format and multiplied back. A matrix is (rows, columns); a block is so many of each.
#include "vectors.h"

namespace {

// bf16 numbers are stored exactly where `narrow` holds them: subnormal ones, too, which the
// processor's own instruction would flush.
inline void keep(uint16_t* to, Floats x) {
    store(to, __builtin_convertvector(rounded(x) >> 16, Halves));
}
inline void keep(float* to, Floats x) { store(to, x); }

inline Floats magnitude(Floats x) { return (Floats)((Words)x & 0x7fffffffu); }

// The larger one; of numbers that are not finite, one that is not.
inline Floats larger(Floats a, Floats b) {
    return (Floats)((Words)a > (Words)b ? (Words)a : (Words)b);
}

struct Grid {
    int mantissa;       // bits
    float top;          // the largest number
    uint32_t least;     // the exponent field of the smallest normal number, in place
    uint32_t key;       // of the random bits
    bool stochastic;
};

// 32 random bits for each lane, of a key and element numbers. Source: lowbias32, as random_bits of
// halfstep.precision.masters.rounding.
inline Words bits_of(uint32_t key, Words x) {
    x ^= key;
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x ^ (x >> 16);
}

// A number of the narrow grid for each lane. Adding 2^23 gaps leaves whole gaps, to nearest even.
inline Floats on_grid(Floats y, const Grid& grid, uint32_t at) {
    const Words sign = (Words)y & 0x80000000u;
    Floats size = magnitude(y);
    size = size > grid.top ? all(grid.top) : size;  // NaN stays
    Words field = (Words)size & 0x7f800000u;
    field = field < grid.least ? Words{} + grid.least : field;
    if (!grid.stochastic) {
        const Floats many = (Floats)(field + ((uint32_t)(23 - grid.mantissa) << 23));
        size = (size + many) - many;
    } else {
        const uint32_t shift = (uint32_t)grid.mantissa << 23;
        const Floats gap = (Floats)(field - shift);
        // a power of two, and so is what divides by it
        const Floats steps = size * (Floats)((254u << 23) + shift - field);
        const Floats below = __builtin_convertvector(__builtin_convertvector(steps, Ints), Floats);
        const Words drawn = bits_of(grid.key, (Words)COUNT + at) >> 8;
        const Floats noise = __builtin_convertvector((Ints)drawn, Floats) * 0x1p-24f;
        const Ints up = noise < steps - below;
        const Floats found = (below + (Floats)(up & (Ints)all(1.0f))) * gap;
        size = choose(size == size, found, size);
    }
    return (Floats)((Words)size | sign);
}

inline uint32_t bits(float x) {
    uint32_t found;
    std::memcpy(&found, &x, 4);
    return found;
}

typedef uint32_t Eight __attribute__((vector_size(32)));
typedef uint32_t Four __attribute__((vector_size(16)));

// The larger half of a vector, word by word.
template <class Half, class Whole>
inline Half folded(Whole x) {
    Half both[2];
    std::memcpy(both, &x, sizeof x);
    return both[0] > both[1] ? both[0] : both[1];
}

// The largest of 16 magnitudes, or one that is not finite.
inline float largest_lane(Floats most) {
    const Four four = folded<Four>(folded<Eight>((Words)most));
    const uint32_t a = four[0] > four[1] ? four[0] : four[1];
    const uint32_t b = four[2] > four[3] ? four[2] : four[3];
    const uint32_t word = a > b ? a : b;
    float found;
    std::memcpy(&found, &word, 4);
    return found;
}

// The largest magnitudes of the blocks in `high` rows, whose block's width is `wide`.
template <class T>
void largest_of(const T* x, int64_t high, int64_t columns, int64_t wide, float* out) {
    if (wide == 1) {
        for (int64_t c = 0; c + LANES <= columns; c += LANES) {
            Floats most{};
            for (int64_t r = 0; r < high; r++)
                most = larger(most, magnitude(read(x + r * columns + c)));
            store(out + c, most);
        }
        for (int64_t c = columns / LANES * LANES; c < columns; c++) {
            Floats most{};
            for (int64_t r = 0; r < high; r++)
                most = larger(most, magnitude(read_some(x + r * columns + c, 1, 0)));
            out[c] = most[0];
        }
        return;
    }
    for (int64_t b = 0; b * wide < columns; b++) {
        Floats most{};
        const int64_t end = (b + 1) * wide < columns ? (b + 1) * wide : columns;
        for (int64_t r = 0; r < high; r++) {
            const T* row = x + r * columns;
            int64_t c = b * wide;
            for (; c + LANES <= end; c += LANES) most = larger(most, magnitude(read(row + c)));
            if (c < end) most = larger(most, magnitude(read_some(row + c, (int)(end - c), 0)));
        }
        out[b] = largest_lane(most);
    }
}

template <class T>
void find_largest(const T* x, int64_t rows, int64_t columns, int64_t high, int64_t wide, float* out,
                  int threads) {
    const int64_t blocks = (columns + wide - 1) / wide;
#pragma omp parallel for num_threads(threads) if (rows * columns > 16384)
    for (int64_t r = 0; r < rows; r += high)
        largest_of(x + r * columns, r + high < rows ? high : rows - r, columns, wide,
                   out + r / high * blocks);
}

template <class T, class Y>
void round_blocks(const T* x, int64_t rows, int64_t columns, int64_t high, int64_t wide,
                  const float* encode, const float* decode, Grid grid, Y* y, int threads) {
    const int64_t blocks = (columns + wide - 1) / wide;
#pragma omp parallel for num_threads(threads) if (rows * columns > 16384)
    for (int64_t r = 0; r < rows; r++) {
        const T* from = x + r * columns;
        Y* to = y + r * columns;
        const float *enc = encode + r / high * blocks, *dec = decode + r / high * blocks;
        auto put = [&](int64_t c, int count, Floats by, Floats back) {
            const Floats found = count == LANES ? read(from + c) : read_some(from + c, count, 0);
            const Floats value = on_grid(found * by, grid, (uint32_t)(r * columns + c)) * back;
            if (count == LANES) {
                keep(to + c, value);
            } else {
                Y some[LANES];
                keep(some, value);
                std::memcpy(to + c, some, sizeof(Y) * count);
            }
        };
        if (wide == 1) {
            int64_t c = 0;
            for (; c + LANES <= columns; c += LANES)
                put(c, LANES, load<Floats>(enc + c), load<Floats>(dec + c));
            if (c < columns) {
                const int count = (int)(columns - c);
                put(c, count, read_some(enc + c, count, 1), read_some(dec + c, count, 1));
            }
            continue;
        }
        for (int64_t b = 0; b < blocks; b++) {
            const int64_t end = (b + 1) * wide < columns ? (b + 1) * wide : columns;
            const Floats by = all(enc[b]), back = all(dec[b]);
            int64_t c = b * wide;
            for (; c + LANES <= end; c += LANES) put(c, LANES, by, back);
            if (c < end) put(c, (int)(end - c), by, back);
        }
    }
}

// A power of two of each code of e8m0, whose 255 is NaN and whose 0 is subnormal in fp32.
inline Floats power(Ints code) {
    const Ints normal = code << 23;
    const Ints found = code == 0 ? Ints{} + 0x400000 : normal;
    return (Floats)(code == 255 ? Ints{} + 0x7fc00000 : found);
}

// What brings blocks of these largest magnitudes into the range of their format, and back.
// Source: the rules of halfstep.formats.blocks, which give the same numbers bit for bit.
inline void scales_of(Floats most, int rule, float top, float outer, Floats* encode,
                      Floats* decode) {
    const Ints size = (Ints)most, finite = (size & 0x7f800000) < 0x7f800000;
    if (rule == 2) {  // two-level
        const Grid e4m3{3, 448.0f, (uint32_t)(127 - 6) << 23, 0, false};
        Floats wanted = most * (outer * (1.0f / top));
        wanted = wanted > 448.0f ? all(448.0f) : wanted;
        const Floats code = choose(finite, on_grid(wanted, e4m3, 0), all(NAN));
        const Floats by = 1.0f / (code * (1.0f / outer));
        *decode = code;
        *encode = by > 3.4028234663852886e38f ? all(3.4028234663852886e38f) : by;
        return;
    }
    Ints code;
    if (rule == 1) {  // rceil
        const Ints wanted = (Ints)(most * (1.0f / top)), field = wanted >> 23 & 255;
        const Ints fraction = wanted & 0x7fffff;
        const Ints more = field == 0 ? fraction > 0x400000 : fraction != 0;
        code = field - more;  // a comparison that holds is -1
    } else {  // floor
        code = (size >> 23) - (int)(bits(top) >> 23) + 127;
        code = code < 0 ? Ints{} : code;
    }
    code = finite ? code : Ints{} + 255;
    *decode = power(code);
    *encode = power(code == 255 ? code : 254 - code);
}

}  // namespace

extern "C" {

void halfstep_scales(const float* most, int64_t count, int32_t rule, float top, float outer,
                     float* encode, float* decode) {
    for (int64_t i = 0; i < count; i += LANES) {
        const int some = count - i < LANES ? (int)(count - i) : LANES;
        Floats by, back;
        scales_of(read_some(most + i, some, 0), rule, top, outer, &by, &back);
        std::memcpy(encode + i, &by, sizeof(float) * some);
        std::memcpy(decode + i, &back, sizeof(float) * some);
    }
}

void halfstep_largest(const void* x, int32_t low, int64_t rows, int64_t columns, int64_t high,
                      int64_t wide, float* out, int32_t threads) {
    if (low)
        find_largest((const uint16_t*)x, rows, columns, high, wide, out, threads);
    else
        find_largest((const float*)x, rows, columns, high, wide, out, threads);
}

void halfstep_round_blocks(const void* x, int32_t low, int64_t rows, int64_t columns, int64_t high,
                           int64_t wide, const float* encode, const float* decode,
                           int32_t mantissa, float top, int32_t least, int32_t stochastic,
                           uint32_t key, void* y, int32_t low_out, int32_t threads) {
    const Grid grid{mantissa, top, (uint32_t)(127 + least) << 23, key, stochastic != 0};
    auto run = [&](auto* from, auto* to) {
        round_blocks(from, rows, columns, high, wide, encode, decode, grid, to, threads);
    };
    if (low && low_out)
        run((const uint16_t*)x, (uint16_t*)y);
    else if (low)
        run((const uint16_t*)x, (float*)y);
    else if (low_out)
        run((const float*)x, (uint16_t*)y);
    else
        run((const float*)x, (float*)y);
}
}
