// How a tensor's numbers are spread over the binary exponents, in one pass over its memory: a count
// for each exponent of fp32, zeros, infinities, NaN, the largest finite magnitude and the sum of the
// finite squares in fp64. bf16 numbers are the high halves of fp32 numbers: their fields are alike.
#include <vector>

#include "vectors.h"

namespace {

constexpr int BLOCK = 4096;            // elements that stay in the first-level cache between passes
constexpr int COPIES = 8, FIELDS = 512;  // equal fields in a row do not wait; the sign is counted too
// Positions in a row (exponents.py): zeros, exponents from -149 to 127, infinities, NaN, the sum of
// squares, the largest magnitude; 282 is Python's; how many mantissa bits are in use. Field f of a normal number stands for the exponent f - 127.
constexpr int ZEROS = 0, OF_FIELD = 23, INFINITE = 278, NOT_A_NUMBER = 279;
constexpr int SQUARES = 280, LARGEST = 281, DIGITS = 283, COUNTS = 280;

typedef double Doubles __attribute__((vector_size(64)));
typedef float EightFloats __attribute__((vector_size(32)));
typedef uint32_t EightWords __attribute__((vector_size(32)));
typedef uint16_t EightHalves __attribute__((vector_size(16)));
typedef uint16_t ManyHalves __attribute__((vector_size(64)));

inline float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

struct Single {
    typedef uint32_t Bits;
    typedef Words Lanes;
    static constexpr int SHIFT = 23;
    static constexpr uint32_t MAGNITUDE = 0x7fffffffu, INF = 0x7f800000u, NORMAL = 0x00800000u;
    static EightFloats read(const uint32_t* from) { return load<EightFloats>(from); }
    static uint32_t wide(uint32_t bits) { return bits; }
};

struct Brain {
    typedef uint16_t Bits;
    typedef ManyHalves Lanes;
    static constexpr int SHIFT = 7;
    static constexpr uint16_t MAGNITUDE = 0x7fff, INF = 0x7f80, NORMAL = 0x0080;
    static EightFloats read(const uint16_t* from) {
        return (EightFloats)(__builtin_convertvector(load<EightHalves>(from), EightWords) << 16);
    }
    static uint32_t wide(uint16_t bits) { return (uint32_t)bits << 16; }
};

struct Tally {
    uint32_t tables[COPIES][FIELDS] = {};
    uint64_t counts[COUNTS] = {};
    uint64_t tabled = 0;
    double squares = 0;
    float largest = 0;
    uint32_t used = 0;  // the bits that are set in any number

    // The tables count in 32 bits, so they are emptied before they can be full. What they have at
    // the two ends of the fields, `block` has counted itself.
    void empty() {
        for (auto& table : tables)
            for (int f = 0; f < FIELDS; f++) {
                const int field = f & 255;
                if (field > 0 && field < 255) counts[OF_FIELD + field] += table[f];
                table[f] = 0;
            }
        tabled = 0;
    }

    template <class F>
    void block(const typename F::Bits* x, int count) {
        typedef typename F::Bits Bits;
        typedef typename F::Lanes Lanes;
        if ((tabled += count) > 0xffff0000u) {
            empty();
            tabled = count;
        }
        constexpr int WIDTH = sizeof(Lanes) / sizeof(Bits);
        const Bits magnitude = F::MAGNITUDE, normal = F::NORMAL, one = 1;
        Lanes most{}, none{}, small{}, any{};
        Doubles sums[WIDTH / 8] = {};
        int i = 0;
        for (; i + WIDTH <= count; i += WIDTH) {
            Lanes m = load<Lanes>(x + i) & magnitude;
            most = m > most ? m : most;
            none -= (Lanes)(m == 0);
            any |= m;
            small |= (Lanes)(m - one < (Bits)(normal - one));  // subnormal: 0 wraps around
            for (int part = 0; part < WIDTH / 8; part++) {
                Doubles d = __builtin_convertvector(F::read(x + i + 8 * part), Doubles);
                sums[part] += d * d;
            }
        }
        Bits top = 0, tiny = 0;
        for (int lane = 0; lane < WIDTH; lane++) {
            if (most[lane] > top) top = most[lane];
            tiny |= small[lane];
            used |= F::wide(any[lane]);
            counts[ZEROS] += none[lane];
        }
        double total = 0;
        for (auto& sum : sums)
            for (int lane = 0; lane < 8; lane++) total += sum[lane];
        for (; i < count; i++) {
            const Bits m = x[i] & magnitude;
            if (m > top) top = m;
            tiny |= m > 0 && m < normal;
            used |= F::wide(m);
            counts[ZEROS] += m == 0;
            total += squared(F::wide(m));
        }
        if (tiny)
            for (int at = 0; at < count; at++) {
                const uint32_t m = F::wide(x[at] & magnitude);
                if (m > 0 && m < Single::NORMAL) counts[1 + 31 - __builtin_clz(m)]++;  // 2^-149: 1
            }
        if (top >= F::INF) {  // rare: the largest and the sum are those of the finite numbers
            top = 0, total = 0;
            for (int at = 0; at < count; at++) {
                const Bits m = x[at] & magnitude;
                if (m >= F::INF) {
                    counts[m == F::INF ? INFINITE : NOT_A_NUMBER]++;
                    continue;
                }
                if (m > top) top = m;
                total += squared(F::wide(m));
            }
        }
        squares += total;
        if (as_float(F::wide(top)) > largest) largest = as_float(F::wide(top));
        fields_of<F>(x, count);
    }

    static double squared(uint32_t bits) { return (double)as_float(bits) * as_float(bits); }

    template <class F>
    void fields_of(const typename F::Bits* x, int count) {
        constexpr int EACH = 8 / sizeof(typename F::Bits), WIDTH = 64 / EACH;
        int i = 0;
        for (; i + 8 <= count; i += 8)
            for (int w = 0; w < 8 / EACH; w++) {
                const uint64_t word = load<uint64_t>(x + i + w * EACH);
                for (int part = 0; part < EACH; part++)
                    tables[w * EACH + part][(word >> (part * WIDTH + F::SHIFT)) & 511]++;
            }
        for (; i < count; i++) tables[0][x[i] >> F::SHIFT]++;
    }
};

// An fp16 number as an fp32 one, without arithmetic on subnormal numbers, which a thread may flush.
inline uint32_t of_fp16(uint16_t half) {
    const uint32_t magnitude = half & 0x7fffu, field = magnitude >> 10;
    uint32_t bits = (magnitude << 13) + (112u << 23);
    const float shifted = as_float((magnitude << 13) + (113u << 23)) - as_float(113u << 23);
    uint32_t small;
    std::memcpy(&small, &shifted, 4);
    bits = field == 0 ? small : bits;
    bits = field == 31 ? bits + (112u << 23) : bits;
    return bits | (uint32_t)(half & 0x8000u) << 16;
}

enum Kind { FP32, BF16, FP16 };

inline uint32_t as_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

// The numbers at `start`, less others if there are any, as the bits of fp32 numbers.
void wide_block(const void* x, const void* less, int32_t kind, int64_t start, int count,
                uint32_t* to) {
    if (kind == FP32) {
        const float *a = (const float*)x + start, *b = (const float*)less + start;
        for (int i = 0; i < count; i++) to[i] = as_bits(a[i] - b[i]);
        return;
    }
    const uint16_t *a = (const uint16_t*)x + start, *b = less ? (const uint16_t*)less + start : a;
    if (kind == BF16) {
        for (int i = 0; i < count; i++)
            to[i] = as_bits(widened(a[i]) - widened(b[i]));
    } else if (less) {
        for (int i = 0; i < count; i++)
            to[i] = as_bits(as_float(of_fp16(a[i])) - as_float(of_fp16(b[i])));
    } else {
        for (int i = 0; i < count; i++) to[i] = of_fp16(a[i]);
    }
}

}  // namespace

extern "C" {

// Adds the counts and the sum of `count` numbers to `row`, and raises its largest magnitude; with
// `less`, those of the differences x - less in fp32. The numbers are divided among the threads in the
// same way each time, so the sum is the same, too.
void halfstep_exponents(const void* x, const void* less, int32_t kind, int64_t count, double* row,
                        int32_t threads) {
    const int64_t blocks = (count + BLOCK - 1) / BLOCK;
    if (threads > blocks) threads = blocks > 0 ? (int32_t)blocks : 1;
    std::vector<Tally> tallies(threads);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int t = 0; t < threads; t++) {
        Tally& tally = tallies[t];
        for (int64_t b = blocks * t / threads; b < blocks * (t + 1) / threads; b++) {
            const int64_t start = b * BLOCK;
            const int some = (int)(start + BLOCK < count ? BLOCK : count - start);
            if (!less && kind == FP32) {
                tally.block<Single>((const uint32_t*)x + start, some);
            } else if (!less && kind == BF16) {
                tally.block<Brain>((const uint16_t*)x + start, some);
            } else {
                uint32_t wide[BLOCK];
                wide_block(x, less, kind, start, some, wide);
                tally.block<Single>(wide, some);
            }
        }
        tally.empty();
    }
    for (Tally& tally : tallies) {
        for (int c = 0; c < COUNTS; c++) row[c] += (double)tally.counts[c];
        row[SQUARES] += tally.squares;
        if (tally.largest > row[LARGEST]) row[LARGEST] = tally.largest;
        const double digits = tally.used & 0x1fff ? 23 : tally.used & 0xffff ? 10 : 7;
        if (digits > row[DIGITS]) row[DIGITS] = digits;
    }
}
}
