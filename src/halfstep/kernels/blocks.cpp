// Rounds a matrix to a format whose numbers share scales, and multiplies by the scales again, in one
// pass over its memory: what formats/blocks.py defines in torch's operations, bit for bit. A block is
// a rectangle of `high` rows and `wide` columns; a band is a row of blocks. Nothing here may be
// contracted to a fused multiply-add, or the bits differ.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr uint32_t ABS = 0x7fffffffu, INF = 0x7f800000u;
constexpr float LARGEST = 3.40282346638528859812e38f;

enum Kind { FP32, BF16 };
enum Rule { FLOOR, RCEIL, AMAX, TWO_LEVEL, GIVEN };

inline uint32_t bits_of(float x) { uint32_t b; std::memcpy(&b, &x, 4); return b; }
inline float float_of(uint32_t b) { float x; std::memcpy(&x, &b, 4); return x; }

inline uint32_t mix(uint32_t x) {  // as in precision/masters/rounding.py
    x ^= x >> 16; x *= 0x7FEB352Du; x ^= x >> 15; x *= 0x846CA68Bu; return x ^ (x >> 16);
}

struct Element {
    int32_t mantissa, least;  // stored mantissa bits; the exponent field of the smallest normal number
    float top;                // the largest number
};

// A number's neighbour in the element format: to the nearest, or by 24 random bits.
template <bool kRandom>
inline float rounded(float y, Element e, uint32_t noise) {
    y = y > e.top ? e.top : y;
    y = y < -e.top ? -e.top : y;
    const uint32_t bits = bits_of(y), magnitude = bits & ABS;
    int32_t field = (int32_t)(magnitude >> 23);
    field = field < e.least ? e.least : field;
    const float steps = float_of(magnitude) * float_of((uint32_t)(254 + e.mantissa - field) << 23);
    float whole;
    if (kRandom) {
        whole = std::floor(steps);
        whole += (float)(noise >> 8) * 0x1p-24f < steps - whole ? 1.0f : 0.0f;
    } else {
        whole = std::rint(steps);
    }
    const float result = whole * float_of((uint32_t)(field - e.mantissa) << 23);
    return float_of(bits_of(result) | (bits & ~ABS));
}

struct Scale {
    float encode, decode, left;  // to the grid; back from it, into the result; what is left over
};

inline float power(int32_t code) { return float_of(code ? (uint32_t)code << 23 : 0x400000u); }

struct Job {
    Element element;
    int32_t rule;
    float outer, rest;      // TWO_LEVEL: the scale of the tensor, and its reciprocal
    float encode, decode;   // GIVEN: for every block
    uint32_t key;
};

inline Scale scale_of(uint32_t magnitude, const Job& job) {
    const float nan = NAN, amax = float_of(magnitude), top = job.element.top;
    if (magnitude >= INF) return {nan, nan, nan};
    if (job.rule == FLOOR || job.rule == RCEIL) {
        int32_t code = (int32_t)(magnitude >> 23) - ((int32_t)(bits_of(top) >> 23) - 127);
        if (job.rule == RCEIL) {
            const uint32_t wanted = bits_of(amax * (float)(1.0 / (double)top));
            const uint32_t fraction = wanted & 0x7fffffu;
            code = (int32_t)(wanted >> 23);
            code += code == 0 ? fraction > 0x400000u : fraction != 0;
        }
        code = code < 0 ? 0 : code;
        return {power(254 - code), power(code), 1.0f};
    }
    if (job.rule == AMAX) {
        const double counted = (double)amax < 1e-12 ? 1e-12 : (double)amax;
        const float encode = (float)((double)top / counted);
        return {encode, 1.0f, 1.0f / encode};
    }
    if (job.rule == TWO_LEVEL) {
        const Element e4m3 = {3, 121, 448.0f};
        const float wanted = amax * (job.outer * (float)(1.0 / (double)top));
        const float decode = rounded<false>(wanted, e4m3, 0);
        const float encode = 1.0f / (decode * job.rest);
        return {encode > LARGEST ? LARGEST : encode, decode, 1.0f};
    }
    return {job.encode, job.decode, 1.0f};
}

inline uint16_t bf16(float x) {  // ties to even
    const uint32_t b = bits_of(x), up = (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
    return (uint16_t)((b & ABS) > INF ? 0x7fc0u : up);
}

inline void put(float* to, float x) { *to = x; }
inline void put(uint16_t* to, float x) { *to = bf16(x); }
inline float get(const float* from) { return *from; }
inline float get(const uint16_t* from) { return float_of((uint32_t)*from << 16); }

// The largest magnitudes of a band's blocks, as bits: NaN is above infinity, and that above all.
template <int kWide, class T>
void largest_of(const T* x, int64_t high, int64_t columns, int64_t wide, uint32_t* most) {
    if (kWide) wide = kWide;
    std::memset(most, 0, 4 * (columns / wide));
    for (int64_t row = 0; row < high; row++, x += columns) {
        if (kWide == 1) {
            for (int64_t c = 0; c < columns; c++) {
                const uint32_t m = bits_of(get(x + c)) & ABS;
                most[c] = m > most[c] ? m : most[c];
            }
            continue;
        }
        for (int64_t g = 0; g < columns / wide; g++) {
            uint32_t top = most[g];
            for (int64_t c = 0; c < wide; c++) {
                const uint32_t m = bits_of(get(x + g * wide + c)) & ABS;
                top = m > top ? m : top;
            }
            most[g] = top;
        }
    }
}

template <int kWide, bool kRandom, class T, class Out>
void round_band(const T* x, Out* out, int64_t high, int64_t columns, int64_t wide, const Job& job,
                const float* encode, const float* decode, uint32_t first) {
    if (kWide) wide = kWide;
    const Element element = job.element;
    for (int64_t row = 0; row < high; row++, x += columns, out += columns, first += columns) {
        if (kWide == 1) {
            for (int64_t c = 0; c < columns; c++) {
                const uint32_t noise = kRandom ? mix((first + (uint32_t)c) ^ job.key) : 0;
                put(out + c, rounded<kRandom>(get(x + c) * encode[c], element, noise) * decode[c]);
            }
            continue;
        }
        for (int64_t g = 0; g < columns / wide; g++) {
            const float by = encode[g], back = decode[g];
            for (int64_t c = g * wide; c < (g + 1) * wide; c++) {
                const uint32_t noise = kRandom ? mix((first + (uint32_t)c) ^ job.key) : 0;
                put(out + c, rounded<kRandom>(get(x + c) * by, element, noise) * back);
            }
        }
    }
}

template <int kWide, class T, class Out>
void run(const T* x, Out* out, float* left, int64_t rows, int64_t columns, int64_t high, int64_t wide,
         const Job& job, bool random, int32_t threads) {
    const int64_t bands = rows / high, groups = columns / wide;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        std::vector<uint32_t> most(groups);
        std::vector<float> encode(groups), decode(groups);
#pragma omp for
        for (int64_t band = 0; band < bands; band++) {
            const int64_t at = band * high * columns;
            if (job.rule != GIVEN) largest_of<kWide>(x + at, high, columns, wide, most.data());
            for (int64_t g = 0; g < groups; g++) {
                const Scale scale = scale_of(most[g], job);
                encode[g] = scale.encode, decode[g] = scale.decode;
                if (left) left[band * groups + g] = scale.left;
            }
            auto* band_of = random ? round_band<kWide, true, T, Out> : round_band<kWide, false, T, Out>;
            band_of(x + at, out + at, high, columns, wide, job, encode.data(), decode.data(),
                    (uint32_t)at);
        }
    }
}

template <class T, class Out>
void by_width(const T* x, Out* out, float* left, int64_t rows, int64_t columns, int64_t high,
              int64_t wide, const Job& job, bool random, int32_t threads) {
    auto* chosen = wide == 1 ? run<1, T, Out> : wide == 16 ? run<16, T, Out>
                 : wide == 32 ? run<32, T, Out> : wide == 128 ? run<128, T, Out> : run<0, T, Out>;
    chosen(x, out, left, rows, columns, high, wide, job, random, threads);
}

}  // namespace

extern "C" {

// The largest magnitude of the blocks whose numbers are all finite; `all_finite` says if all are.
float halfstep_largest(const void* x, int32_t kind, int64_t rows, int64_t columns, int64_t high,
                       int64_t wide, int32_t* all_finite, int32_t threads) {
    uint32_t most = 0;
    int32_t finite = 1;
#pragma omp parallel num_threads(threads) reduction(max : most) reduction(min : finite) if (threads > 1)
    {
        std::vector<uint32_t> found(columns / wide);
#pragma omp for
        for (int64_t band = 0; band < rows / high; band++) {
            const int64_t at = band * high * columns;
            auto over = [&](auto* from) {
                auto* chosen = wide == 1 ? largest_of<1, std::remove_pointer_t<decltype(from)>>
                                         : largest_of<0, std::remove_pointer_t<decltype(from)>>;
                chosen(from, high, columns, wide, found.data());
            };
            if (kind == FP32) over((float*)x + at); else over((uint16_t*)x + at);
            for (uint32_t m : found) {
                if (m >= INF) finite = 0;
                else if (m > most) most = m;
            }
        }
    }
    *all_finite = finite;
    return float_of(most);
}

void halfstep_round_blocks(const void* x, int32_t kind, void* out, int32_t out_kind, float* left,
                           int64_t rows, int64_t columns, int64_t high, int64_t wide, int32_t mantissa,
                           int32_t least, float top, int32_t rule, float outer, float rest,
                           float encode, float decode, int32_t random, uint32_t key, int32_t threads) {
    const Job job = {{mantissa, least, top}, rule, outer, rest, encode, decode, key};
    auto to = [&](auto* from) {
        if (out_kind == FP32)
            by_width(from, (float*)out, left, rows, columns, high, wide, job, random, threads);
        else
            by_width(from, (uint16_t*)out, left, rows, columns, high, wide, job, random, threads);
    };
    if (kind == FP32) to((const float*)x); else to((const uint16_t*)x);
}
}
