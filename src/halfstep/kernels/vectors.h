// Vectors of 16 lanes in the compiler's own notation, and the arithmetic that all kernels share:
// bf16 numbers as the high halves of fp32 numbers, rounding to nearest even, 2^x.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 16;
constexpr float LOG2E = 1.44269504088896340736f;

typedef float Floats __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

template <class V, class P>
inline V load(const P* from) {
    V value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

template <class V, class P>
inline void store(P* to, V value) {
    std::memcpy(to, &value, sizeof value);
}

inline Floats all(float x) { return Floats{} + x; }

inline Floats choose(Ints mask, Floats a, Floats b) {
    return (Floats)(((Ints)a & mask) | ((Ints)b & ~mask));
}

inline Floats largest(Floats a, Floats b) { return a > b ? a : b; }

// 16 bits as the low halves of words, and back; GCC by itself takes several instructions.
inline Words words(Halves x) {
#if defined(__AVX512F__)
    return (Words)_mm512_cvtepu16_epi32((__m256i)x);
#else
    return __builtin_convertvector(x, Words);
#endif
}

inline Halves low_halves(Words x) {
#if defined(__AVX512F__)
    return (Halves)_mm512_cvtepi32_epi16((__m512i)x);
#else
    return __builtin_convertvector(x, Halves);
#endif
}

// fp32 to bf16, to nearest even, in the high half of each word. A NaN that came from bf16 numbers
// or from arithmetic stays one.
inline Words rounded(Floats x) {
    Words bits = (Words)x;
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
}

inline Halves halves(Floats x) {
#if defined(__AVX512BF16__)
    return (Halves)_mm512_cvtneps_pbh((__m512)x);
#else
    return low_halves(rounded(x) >> 16);
#endif
}

// Two rows as pairs: the first in the low halves.
inline Words pairs(Floats first, Floats second) {
#if defined(__AVX512BF16__)
    return words(halves(first)) | (words(halves(second)) << 16);
#else
    return (rounded(first) >> 16) | rounded(second);
#endif
}

inline float widened(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// 2^x for x in [-126, 126], within 2 units of fp32's last place.
// Source: the Taylor series of 2^f for |f| <= 1/2, whose next term is below 2^-26.
inline Floats exp2_near(Floats x) {
    Floats whole = (x + 12582912.0f) - 12582912.0f;
    Floats f = x - whole;
    Floats p = all(1.5403530393381609954e-4f);
    p = p * f + 1.3333558146428443423e-3f;
    p = p * f + 9.6181291076284771619e-3f;
    p = p * f + 5.5504108664821579953e-2f;
    p = p * f + 2.4022650695910071233e-1f;
    p = p * f + 6.9314718055994530942e-1f;
    p = p * f + 1.0f;
    return (Floats)((Ints)p + (__builtin_convertvector(whole, Ints) << 23));
}

// 2^x for x <= 0: 0 below 2^-126 and for -inf, NaN for NaN.
inline Floats exp2_(Floats x) {
    Ints gone = x < -126.0f;
    Floats value = exp2_near(choose(gone, Floats{}, x));
    return (Floats)((Ints)value & ~gone);
}

// bf16 and fp32 numbers as fp32 lanes, whichever they are.
inline Floats widen(Halves x) { return (Floats)(words(x) << 16); }

inline Floats read(const uint16_t* from) { return widen(load<Halves>(from)); }
inline Floats read(const float* from) { return load<Floats>(from); }
inline void write(uint16_t* to, Floats x) { store(to, halves(x)); }
inline void write(float* to, Floats x) { store(to, x); }

// The first `count` lanes; the others are `fill`.
template <class T>
inline Floats read_some(const T* from, int count, float fill) {
    T some[LANES];
    std::memcpy(some, from, sizeof(T) * count);
    Floats found = read(some);
    for (int i = count; i < LANES; i++) found[i] = fill;
    return found;
}

template <class T>
inline void write_some(T* to, int count, Floats x) {
    T some[LANES];
    write(some, x);
    std::memcpy(to, some, sizeof(T) * count);
}

inline float sum_of(Floats x) {
    float total = 0;
    for (int i = 0; i < LANES; i++) total += x[i];
    return total;
}

const Ints COUNT = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// 32 random bits for each lane, of a seed and three positions alone, so that a backward draws
// what the forward drew. Source: the finalizer of MurmurHash3, twice.
inline Words mixed(Words x) {
    x ^= x >> 16;
    x *= 0x85ebca6bu;
    x ^= x >> 13;
    x *= 0xc2b2ae35u;
    x ^= x >> 16;
    return x;
}

inline Words random_bits(uint64_t seed, uint32_t a, Words b, uint32_t c) {
    Words x = mixed(b + ((uint32_t)seed ^ a * 0x9e3779b9u));
    return mixed(x ^ (c * 0x85ebca77u + (uint32_t)(seed >> 32)));
}

// `inverse` where dropout keeps a number, 0 where its bits fall below the probability.
inline Floats kept(Words bits, float probability, float inverse) {
    Words threshold = Words{} + (uint32_t)(probability * 4294967296.0);
    return (Floats)((Ints)all(inverse) & (Ints)(bits >= threshold));
}

// The sum of two products a column, in fp32; a pair is two bf16 numbers, the first in the low half.
inline Floats dot(Floats sum, uint32_t pair, Words columns) {
#if defined(__AVX512BF16__)
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)pair),
                                    (__m512bh)columns);
#else
    uint32_t low = pair << 16, high = pair & 0xffff0000u;
    float first, second;
    std::memcpy(&first, &low, 4);
    std::memcpy(&second, &high, 4);
    return sum + first * (Floats)(columns << 16) + second * (Floats)(columns & 0xffff0000u);
#endif
}

// 16 words of two vectors by their constant positions in both.
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLED(a, b, ...) __builtin_shuffle(a, b, Ints{__VA_ARGS__})
#endif

// 16 x 16 words, rows become columns: rows that are 1, 2, 4 and 8 apart exchange halves.
inline void transpose16(Words r[LANES]) {
    for (int i = 0; i < LANES; i += 2) {
        Words a = r[i], b = r[i + 1];
        r[i] = SHUFFLED(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
        r[i + 1] = SHUFFLED(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
    }
    for (int i = 0; i < LANES; i += (i & 1) ? 3 : 1) {
        Words a = r[i], b = r[i + 2];
        r[i] = SHUFFLED(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
        r[i + 2] = SHUFFLED(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    }
    for (int i = 0; i < LANES; i += (i & 3) == 3 ? 5 : 1) {
        Words a = r[i], b = r[i + 4];
        r[i] = SHUFFLED(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
        r[i + 4] = SHUFFLED(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    }
    for (int i = 0; i < 8; i++) {
        Words a = r[i], b = r[i + 8];
        r[i] = SHUFFLED(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
        r[i + 8] = SHUFFLED(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    }
}

}  // namespace
