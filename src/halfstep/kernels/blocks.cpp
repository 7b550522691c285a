// Rounds a matrix to a format whose numbers share scales, and multiplies by the scales again, in one
// pass over its memory: what formats/blocks.py defines in torch's operations, bit for bit. A block is
// a rectangle of `high` rows and `wide` columns; a band is a row of blocks, and a batch 16 blocks of
// it side by side, one in each lane. Nothing here may be contracted to a fused multiply-add, or the
// bits differ. At the end are the product of such matrices whose blocks have fp32 scales, and the
// scaling of a product by those of its operands.
#include <type_traits>
#include <vector>

#include "vectors.h"

namespace {

constexpr uint32_t ABS = 0x7fffffffu, INF = 0x7f800000u;
constexpr float LARGEST = 3.40282346638528859812e38f;
constexpr int64_t LONG = 4096;  // how much of a tensor that is one block a thread takes at a time
constexpr int MIXED = 16;       // tokens that a Hadamard matrix mixes

enum Kind { FP32, BF16 };
enum Rule { FLOOR, RCEIL, AMAX, TWO_LEVEL, GIVEN };

struct Element {
    int32_t mantissa, least;  // stored mantissa bits; the exponent field of the smallest normal number
    float top;                // the largest number
};

// What blocks.py hands over; its fields are those of _Job there.
struct Job {
    const void* x;
    void* out;
    float* left;     // the scales that are left: one for each block (AMAX), or one of the tensor
    int64_t given, rows, columns;  // rows of x; those of out, of which the further ones are zero
    int64_t high, wide;            // of a block; 0: the whole tensor is one
    const float* signs;            // of the tokens that a Hadamard matrix mixes first; or null
    Element element;
    int32_t kind, out_kind, rule;
    int32_t scaled;        // whether AMAX multiplies by the scales of the blocks, and leaves none
    int32_t has_amax;      // whether `amax` stands for the tensor's largest magnitude
    float amax;
    int32_t random;        // whether `key` rounds stochastically
    uint32_t key;
    int32_t threads;
};

// A scale: to the grid; back from it, into the result; what is left over. One block in each lane.
struct Scales {
    Floats encode, decode, left;
};

struct Outer {
    float scale, inverse;
};

inline float float_of(uint32_t bits) { float x; std::memcpy(&x, &bits, 4); return x; }
inline Words magnitude(Floats x) { return (Words)x & ABS; }
inline Words larger(Words a, Words b) { return a > b ? a : b; }

inline Words mix(Words x) {  // as in precision/masters/rounding.py
    x ^= x >> 16; x *= 0x7FEB352Du; x ^= x >> 15; x *= 0x846CA68Bu; return x ^ (x >> 16);
}

inline Floats floor_of(Floats x) {  // of 0 <= x < 2^23, or NaN
    Floats near = (x + 0x1p23f) - 0x1p23f;
    return near - (near > x ? all(1.0f) : Floats{});
}

// The element format, and the random bits that round to it, in registers.
template <bool kRandom>
struct Grid {
    Floats top, bottom;
    Ints least;
    int32_t mantissa;
    uint32_t key;

    Grid(Element e, uint32_t key)
        : top(all(e.top)), bottom(all(-e.top)), least(Ints{} + e.least), mantissa(e.mantissa), key(key) {}

    // A number's neighbour: to the nearest, or by 24 random bits of the element's position.
    Floats neighbour(Floats y, uint32_t position) const {
        y = y > top ? top : y;
        y = y < bottom ? bottom : y;
        const Words size = magnitude(y), sign = (Words)y & ~ABS;
        Ints field = (Ints)(size >> 23);
        field = field < least ? least : field;
        Floats result;
        if (kRandom) {
            const Words noise = mix(((Words)COUNT + position) ^ key) >> 8;
            const Floats steps = (Floats)size * (Floats)((254 + mantissa - field) << 23);
            const Floats whole = floor_of(steps), one = all(1.0f);
            const Floats part = __builtin_convertvector((Ints)noise, Floats) * 0x1p-24f;
            const Floats up = part < steps - whole ? one : Floats{};
            result = (whole + up) * (Floats)((field - mantissa) << 23);
        } else {  // at 2^23 gaps, fp32 itself rounds to a whole number of them, ties to even
            const Floats far = (Floats)((field + (23 - mantissa)) << 23);
            result = ((Floats)size + far) - far;
        }
        return (Floats)((Words)result | sign);
    }
};

inline Floats power(Ints code) {  // 2^(code - 127)
    return (Floats)(code == 0 ? Ints{} + 0x400000 : code << 23);
}

// The scale of a tensor whose largest magnitude is `amax`: BlockFormat.of_tensor.
inline Outer of_tensor(float amax, const Job& job) {
    float scale;
    if (job.rule == TWO_LEVEL) {
        scale = 448.0f * job.element.top / amax;
        scale = amax == 0 ? 1.0f : scale > LARGEST ? LARGEST : scale;
    } else {
        const double counted = (double)amax < 1e-12 ? 1e-12 : (double)amax;
        scale = (float)((double)job.element.top / counted);
    }
    return {scale, 1.0f / scale};
}

inline Scales scales_of(Words most, const Job& job, Outer outer) {
    const Floats amax = (Floats)most, one = all(1.0f);
    const float top = job.element.top, part = (float)(1.0 / (double)top);
    Scales s = {one, one, one};
    if (job.rule == FLOOR || job.rule == RCEIL) {
        Ints code = (Ints)(most >> 23) - ((Ints)((Words)all(top) >> 23) - 127);
        if (job.rule == RCEIL) {
            const Ints wanted = (Ints)(amax * part), fraction = wanted & 0x7fffff;
            code = wanted >> 23;
            code -= code == 0 ? fraction > 0x400000 : fraction != 0;
        }
        code = code < 0 ? Ints{} : code;
        s = {power(254 - code), power(code), one};
    } else if (job.rule == AMAX) {
        for (int i = 0; i < LANES; i++) {
            const Outer own = of_tensor(amax[i], job);
            s.encode[i] = own.scale, s.left[i] = own.inverse;
        }
        if (job.scaled) s.decode = s.left;
    } else if (job.rule == TWO_LEVEL) {
        const Element e4m3 = {3, 121, 448.0f};
        s.decode = Grid<false>(e4m3, 0).neighbour(amax * (outer.scale * part), 0);
        s.encode = 1.0f / (s.decode * outer.inverse);
        s.encode = s.encode > LARGEST ? all(LARGEST) : s.encode;
    } else {
        return {all(outer.scale), one, one};
    }
    const Words lost = (Words{} + INF) <= most;
    const Floats nan = all(NAN);
    return {lost ? nan : s.encode, lost ? nan : s.decode, lost ? nan : s.left};
}

inline void put(float* to, Floats x, int count) {
    count == LANES ? store(to, x) : write_some(to, count, x);
}

inline void put(uint16_t* to, Floats x, int count) {
    // to nearest even; vectors.h lets the CPU convert, which flushes numbers below 2^-126
    const Floats near = x != x ? all(NAN) : (Floats)rounded(x);
    const Halves half = low_halves((Words)near >> 16);
    if (count == LANES) store(to, half);
    else std::memcpy(to, &half, sizeof(uint16_t) * count);
}

template <class T>
inline Floats get(const T* from, int count) {
    return count == LANES ? read(from) : read_some(from, count, 0.0f);
}

// The largest lane of each of 16 vectors, in their order.
inline Words tops(Words (&each)[LANES]) {
    for (int left = LANES; left > 1; left /= 2)
        for (int i = 0; i < left / 2; i++) {
            const Words a = each[2 * i], b = each[2 * i + 1];
            each[i] = larger(
                SHUFFLED(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
                SHUFFLED(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31));
        }
    return each[0];
}

// Tokens multiplied by the Hadamard matrix, in the order of sums that precision/low_bit/hadamard.py
// defines, and rounded to bf16.
inline void mix_tokens(Floats* rows, const float* signs) {
    for (int i = 0; i < MIXED; i++) rows[i] *= signs[i];
    for (int half = 1; half < MIXED; half *= 2)
        for (int i = 0; i < MIXED; i++) {
            if (i & half) continue;
            const Floats a = rows[i], b = rows[i + half];
            rows[i] = a + b, rows[i + half] = a - b;
        }
    for (int i = 0; i < MIXED; i++) rows[i] = (Floats)rounded(rows[i]);
}

// 16 blocks of one column each, in registers or the nearest cache.
template <class T>
struct Columns {
    const T* x;
    const Job& job;
    std::vector<Floats> rows;

    Columns(const Job& job) : x((const T*)job.x), job(job), rows(job.high) {}

    int64_t blocks() const { return job.columns; }

    Words largest(int64_t band, int64_t first, int count) {
        const int64_t top = band * job.high;
        for (int64_t i = 0; i < job.high; i++) {
            const bool there = top + i < job.given;
            rows[i] = there ? get(x + (top + i) * job.columns + first, count) : Floats{};
        }
        if (job.signs) mix_tokens(rows.data(), job.signs);
        Words most{};
        for (const Floats& row : rows) most = larger(most, magnitude(row));
        return most;
    }

    template <bool kRandom, class Out>
    void round(Out* out, int64_t band, int64_t first, int count, const Scales& s) {
        const Grid<kRandom> grid(job.element, job.key);
        int64_t at = band * job.high * job.columns + first;
        for (const Floats& row : rows) {
            put(out + at, grid.neighbour(row * s.encode, (uint32_t)at) * s.decode, count);
            at += job.columns;
        }
    }
};

// 16 blocks whose rows are numbers side by side.
template <class T>
struct Rectangles {
    const T* x;
    const Job& job;

    Rectangles(const Job& job) : x((const T*)job.x), job(job) {}

    int64_t blocks() const { return (job.columns + job.wide - 1) / job.wide; }

    template <class F>
    inline void each(int64_t band, int64_t block, F visit) const {
        const int64_t columns = job.columns, begin = block * job.wide, rest = columns - begin;
        const int64_t wide = job.wide < rest ? job.wide : rest;
        int64_t row = band * job.high * columns + begin;
        for (int64_t i = job.high; i > 0; i--, row += columns) {
            int64_t at = row;
            for (; at + LANES <= row + wide; at += LANES) visit(at, LANES);
            if (at < row + wide) visit(at, (int)(row + wide - at));
        }
    }

    Words largest(int64_t band, int64_t first, int count) {
        Words most[LANES] = {};
        for (int i = 0; i < count; i++)
            each(band, first + i, [&](int64_t at, int n) {
                most[i] = larger(most[i], magnitude(get(x + at, n)));
            });
        return tops(most);
    }

    template <bool kRandom, class Out>
    void round(Out* out, int64_t band, int64_t first, int count, const Scales& s) {
        const Grid<kRandom> grid(job.element, job.key);
        for (int i = 0; i < count; i++) {
            const Floats encode = all(s.encode[i]), decode = all(s.decode[i]);
            each(band, first + i, [&](int64_t at, int n) {
                put(out + at, grid.neighbour(get(x + at, n) * encode, (uint32_t)at) * decode, n);
            });
        }
    }
};

// The largest magnitude of the blocks whose numbers are all finite, or NaN's bits where `strict` and
// some number is not.
template <class Blocks>
uint32_t largest_of(const Job& job, bool strict) {
    uint32_t most = 0;
    const int64_t bands = job.rows / job.high, blocks = Blocks(job).blocks();
#pragma omp parallel num_threads(job.threads) reduction(max : most) if (job.threads > 1)
    {
        Blocks own(job);
        Words found{};
#pragma omp for collapse(2)
        for (int64_t band = 0; band < bands; band++)
            for (int64_t first = 0; first < blocks; first += LANES) {
                const int count = (int)(blocks - first < LANES ? blocks - first : LANES);
                const Words top = own.largest(band, first, count);
                found = larger(found, strict ? top : top & (Words)(top < INF));
            }
        for (int i = 0; i < LANES; i++) most = found[i] > most ? found[i] : most;
    }
    return most;
}

template <class Blocks, bool kRandom, class Out>
void round_all(const Job& job, Outer outer) {
    const int64_t bands = job.rows / job.high, blocks = Blocks(job).blocks();
#pragma omp parallel num_threads(job.threads) if (job.threads > 1)
    {
        Blocks own(job);
#pragma omp for collapse(2)
        for (int64_t band = 0; band < bands; band++)
            for (int64_t first = 0; first < blocks; first += LANES) {
                const int count = (int)(blocks - first < LANES ? blocks - first : LANES);
                const Words most = job.rule == GIVEN ? Words{} : own.largest(band, first, count);
                const Scales s = scales_of(most, job, outer);
                if (job.rule == AMAX && !job.scaled)
                    std::memcpy(job.left + band * blocks + first, &s.left, 4 * count);
                own.template round<kRandom>((Out*)job.out, band, first, count, s);
            }
    }
}

// Numbers in a row, whatever the matrix's shape.
inline Job in_a_row(Job job) {
    job.columns *= job.rows;
    job.rows = job.given = job.high = 1;
    job.wide = LONG;
    return job;
}

// The scale of the tensor; its inverse is left. Blocks that are not finite do not count, as their
// own scales are NaN, but one block that is everything has no other scale.
template <class Blocks, class T>
Outer outer_of(const Job& job) {
    uint32_t most = INF;
    if (!job.signs && job.given == job.rows) most = largest_of<Rectangles<T>>(in_a_row(job), true);
    if (most >= INF && job.rule == TWO_LEVEL) most = largest_of<Blocks>(job, false);
    Outer outer = of_tensor(job.has_amax ? job.amax : float_of(most), job);
    if (most >= INF) outer = {NAN, NAN};
    *job.left = outer.inverse;
    return outer;
}

template <class Blocks, class T>
void run(const Job& job) {
    const bool tensor = job.rule == TWO_LEVEL || job.rule == GIVEN;
    const Outer outer = tensor ? outer_of<Blocks, T>(job) : Outer{1.0f, 1.0f};
    auto to = [&](auto* out) {
        typedef std::remove_pointer_t<decltype(out)> Out;
        if (job.random) round_all<Blocks, true, Out>(job, outer);
        else round_all<Blocks, false, Out>(job, outer);
    };
    if (job.out_kind == FP32) to((float*)job.out);
    else to((uint16_t*)job.out);
}

template <class T>
void by_shape(const Job& job) {
    if (job.rule == GIVEN) run<Rectangles<T>, T>(in_a_row(job));
    else if (job.wide == 1) run<Columns<T>, T>(job);
    else run<Rectangles<T>, T>(job);
}

// A product's tile, whose sums stay in registers; and how many rows of A are packed together.
constexpr int TILE_ROWS = 12, TILE_VECTORS = 2, TILE_COLUMNS = TILE_VECTORS * LANES, TOGETHER = 48;

// What blocks.py hands over; its fields are those of _Product there. A matrix is (rows, K), of bf16
// numbers that are adjacent along K (`along`) or along its rows.
struct Product {
    const uint16_t *a, *b, *bias;   // (M, K), (N, K), (N,) or null
    const float *a_scales, *b_scales;  // (M, K / length) and (N, K / length), with these strides
    uint16_t* out;                     // (M, N)
    int64_t m, n, k, length;
    int64_t a_row, a_block, b_row, b_block;
    int32_t a_along, b_along, threads;
};

// Pairs along K of some rows, each a word: `to[pair * width + row]`; further rows are 0.
void pack(const uint16_t* from, bool along, int64_t rows, int64_t k, int64_t first, int64_t width,
          uint32_t* to) {
    for (int64_t begin = 0; begin < width; begin += LANES) {
        const int64_t at = first + begin, left = rows - at;
        const int count = (int)(left < 0 ? 0 : left < LANES ? left : LANES);
        if (!along) {
            for (int64_t p = 0; p < k / 2; p++) {
                const uint16_t* row = from + 2 * p * rows + at;
                const Words low = (Words)get(row, count), high = (Words)get(row + rows, count);
                store(to + p * width + begin, (low >> 16) | high);
            }
            continue;
        }
        for (int64_t p = 0; p < k / 2; p += LANES) {
            Words words[LANES] = {};
            for (int i = 0; i < count; i++) words[i] = load<Words>(from + (at + i) * k + 2 * p);
            transpose16(words);
            for (int i = 0; i < LANES; i++) store(to + (p + i) * width + begin, words[i]);
        }
    }
}

// 12 rows of A times 32 columns of B, packed, whose scales multiply the sums of each block.
inline void tile(const Product& job, const uint32_t* a, const uint32_t* b, const float* scales,
                 int64_t row, int64_t column) {
    Floats total[TILE_ROWS][TILE_VECTORS] = {};
    const int64_t pairs = job.length / 2;
    const int rows = (int)(job.m - row < TILE_ROWS ? job.m - row : TILE_ROWS);
    for (int64_t block = 0; block < job.k / job.length; block++) {
        Floats sum[TILE_ROWS][TILE_VECTORS] = {};
        for (int64_t p = block * pairs; p < (block + 1) * pairs; p++) {
            const Words left = load<Words>(b + p * TILE_COLUMNS);
            const Words right = load<Words>(b + p * TILE_COLUMNS + LANES);
#pragma GCC unroll 12
            for (int i = 0; i < TILE_ROWS; i++) {
                const uint32_t pair = a[p * TOGETHER + i];
                sum[i][0] = dot(sum[i][0], pair, left);
                sum[i][1] = dot(sum[i][1], pair, right);
            }
        }
        for (int i = 0; i < rows; i++) {
            const float own = job.a_scales[(row + i) * job.a_row + block * job.a_block];
            for (int v = 0; v < TILE_VECTORS; v++)
                total[i][v] += sum[i][v] * own * read(scales + block * TILE_COLUMNS + v * LANES);
        }
    }
    for (int i = 0; i < rows; i++)
        for (int v = 0; v < TILE_VECTORS; v++) {
            const int64_t at = column + v * LANES, left = job.n - at;
            if (left <= 0) continue;
            const int count = (int)(left < LANES ? left : LANES);
            const Floats bias = job.bias ? get(job.bias + at, count) : Floats{};
            put(job.out + (row + i) * job.n + at, job.bias ? total[i][v] + bias : total[i][v], count);
        }
}

}  // namespace

extern "C" {

void halfstep_round_blocks(const Job* job) {
    if (job->kind == FP32) by_shape<float>(*job);
    else by_shape<uint16_t>(*job);
}

// A product in bf16, times the scales of its operands and plus a bias, rounded once: in place.
void halfstep_scale_rows(uint16_t* y, int64_t rows, int64_t columns, const float* left,
                         const float* right, const uint16_t* bias, int32_t threads) {
    const float a = left ? *left : 1.0f, b = right ? *right : 1.0f;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++) {
        uint16_t* at = y + row * columns;
        for (int64_t c = 0; c < columns; c += LANES) {
            const int count = (int)(columns - c < LANES ? columns - c : LANES);
            Floats wide = get(at + c, count) * a * b;
            if (bias) wide += get(bias + c, count);
            put(at + c, wide, count);
        }
    }
}

// Whether products of bf16 numbers run on instructions of their own here.
int32_t halfstep_has_dot() {
#if defined(__AVX512BF16__)
    return 1;
#else
    return 0;
#endif
}

// A B^T in bf16, whose sums over each block of K are scaled and added up in fp32.
void halfstep_product_by_blocks(const Product* given) {
    const Product& job = *given;
    const int64_t groups = (job.m + TOGETHER - 1) / TOGETHER, pairs = job.k / 2;
    const int64_t panels = (job.n + TILE_COLUMNS - 1) / TILE_COLUMNS, blocks = job.k / job.length;
    std::vector<uint32_t> a(groups * TOGETHER * pairs), b(panels * TILE_COLUMNS * pairs);
    std::vector<float> scales(panels * TILE_COLUMNS * blocks);
#pragma omp parallel num_threads(job.threads) if (job.threads > 1)
    {
#pragma omp for nowait
        for (int64_t row = 0; row < groups * TOGETHER; row += TOGETHER)
            pack(job.a, job.a_along, job.m, job.k, row, TOGETHER, a.data() + row * pairs);
#pragma omp for
        for (int64_t at = 0; at < panels * TILE_COLUMNS; at += TILE_COLUMNS) {
            pack(job.b, job.b_along, job.n, job.k, at, TILE_COLUMNS, b.data() + at * pairs);
            float* to = scales.data() + at * blocks;
            for (int64_t block = 0; block < blocks; block++, to += TILE_COLUMNS)
                for (int64_t i = 0; i < TILE_COLUMNS && at + i < job.n; i++)
                    to[i] = job.b_scales[(at + i) * job.b_row + block * job.b_block];
        }
#pragma omp for
        for (int64_t group = 0; group < groups * TOGETHER; group += TOGETHER)
            for (int64_t at = 0; at < panels * TILE_COLUMNS; at += TILE_COLUMNS)
                for (int64_t row = group; row < group + TOGETHER && row < job.m; row += TILE_ROWS)
                    tile(job, a.data() + group * pairs + row - group, b.data() + at * pairs,
                         scales.data() + at * blocks, row, at);
    }
}
}
