// What a network does between its products, one pass over memory each: activations, norms and the
// softmax cross-entropy, from 16-bit or fp32 numbers, computed in fp32.
#if defined(__AVX512F__)
#include <immintrin.h>
#endif
#include "vectors.h"

namespace {

inline Floats exp_(Floats x) { return exp2_(x * LOG2E); }  // for x <= 0

inline Floats within(Floats x, float low, float high) {
    x = x < low ? all(low) : x;
    return x > high ? all(high) : x;
}

inline Floats reciprocal(Floats x) {
#if defined(__AVX512F__)
    Floats guess = (Floats)_mm512_rcp14_ps((__m512)x);
    return guess * (2.0f - x * guess);  // one step of Newton's: 28 bits
#else
    return 1.0f / x;
#endif
}

// 1 / (1 + 2^-x) for |x| <= 126, within 2^-20 of itself.
inline Floats sigmoid2(Floats x) { return reciprocal(1.0f + exp2_near(-x)); }

inline Floats sigmoid(Floats x) { return sigmoid2(within(x * LOG2E, -126.0f, 126.0f)); }

constexpr float TANH_SCALE = 0.79788456080286535588f, TANH_CUBE = 0.044715f;

inline Floats gelu_tanh(Floats x) {
    x = x < -90.0f ? all(-90.0f) : x;  // where a sigmoid has long been 0
    // (1 + tanh u) / 2 is the sigmoid of 2 u
    return x * sigmoid(2.0f * TANH_SCALE * x * (1.0f + TANH_CUBE * x * x));
}

inline Floats gelu_tanh_slope(Floats x) {
    x = within(x, -80.0f, 80.0f);  // where it has long been 0 or 1
    Floats s = sigmoid(2.0f * TANH_SCALE * x * (1.0f + TANH_CUBE * x * x));
    return s + 2.0f * x * s * (1.0f - s) * TANH_SCALE * (1.0f + 3.0f * TANH_CUBE * x * x);
}

// Calls work(start, end) for chunks of 4,096 elements, which the threads share.
template <class F>
void for_chunks(int64_t count, int threads, F work) {
    constexpr int64_t CHUNK = 4096;
#pragma omp parallel for num_threads(threads) if (count > 4 * CHUNK)
    for (int64_t start = 0; start < count; start += CHUNK)
        work(start, start + CHUNK < count ? start + CHUNK : count);
}

// Calls work(at, count) for each vector of a row; `count` is below 16 in the last one alone.
template <class F>
inline void for_vectors(int64_t columns, F work) {
    int64_t c = 0;
    for (; c + LANES <= columns; c += LANES) work(c, LANES);
    if (c < columns) work(c, (int)(columns - c));
}

template <class T>
inline Floats part(const T* from, int count, float fill = 0) {
    return count == LANES ? read(from) : read_some(from, count, fill);
}

template <class T>
inline void put(T* to, int count, Floats x) {
    if (count == LANES)
        write(to, x);
    else
        write_some(to, count, x);
}

template <class T>
void dropout(const T* x, T* y, float p, float scale, uint64_t seed, int64_t count, int threads) {
    for_chunks(count, threads, [=](int64_t start, int64_t end) {
        for_vectors(end - start, [&](int64_t c, int n) {
            const int64_t at = start + c;
            Words bits = random_bits(seed, (uint32_t)(at >> 32), (Words)COUNT + (uint32_t)at, 0);
            put(y + at, n, part(x + at, n) * kept(bits, p, scale));
        });
    });
}

// What a block adds to a stream: `total` becomes x + added + shift, with a shift for each column.
template <class X>
struct Addition {
    const uint16_t* added;  // null: nothing is added
    const float* shift;
    X* total;
};

template <class X, class Y>
void norm_rows(const X* x, Addition<X> sum, const float* gain, const float* bias, float epsilon,
               Y* y, float* mean, float* inverse, int64_t rows, int64_t columns, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * columns > 16384)
    for (int64_t r = 0; r < rows; r++) {
        const X* row = x + r * columns;
        if (sum.added) {
            X* total = sum.total + r * columns;
            for_vectors(columns, [&](int64_t c, int n) {
                Floats a = part(sum.added + r * columns + c, n) + part(sum.shift + c, n);
                put(total + c, n, part(row + c, n) + a);
            });
            row = total;
        }
        if (!y) continue;
        float centre = 0;
        if (mean) {
            Floats sum{};
            for_vectors(columns, [&](int64_t c, int n) { sum += part(row + c, n); });
            mean[r] = centre = sum_of(sum) / columns;
        }
        Floats squares{};
        for_vectors(columns, [&](int64_t c, int n) {
            Floats d = part(row + c, n, centre) - centre;
            squares += d * d;
        });
        const float over = 1 / std::sqrt(sum_of(squares) / columns + epsilon);
        inverse[r] = over;
        for_vectors(columns, [&](int64_t c, int n) {
            Floats value = (part(row + c, n) - centre) * over;
            if (gain) value *= part(gain + c, n);
            if (bias) value += part(bias + c, n);
            put(y + r * columns + c, n, value);
        });
    }
}

// The gradients of gain and bias are sums over rows, and so is that of a shift added before: each of
// `threads` blocks of rows adds up its own, in `sums` (threads x 3 x columns, zeros before), for the
// caller to add. `passed`, if not null, is the gradient that went past the norm; grad_x includes it.
template <class X, class Y>
void norm_rows_backward(const X* x, const float* gain, const Y* grad, const X* passed,
                        const float* mean, const float* inverse, X* grad_x, float* sums,
                        int64_t rows, int64_t columns, int threads) {
    const int64_t block = (rows + threads - 1) / threads;
#pragma omp parallel for num_threads(threads)
    for (int t = 0; t < threads; t++) {
        float *gain_sum = sums + 3 * t * columns, *bias_sum = gain_sum + columns;
        float* shift_sum = bias_sum + columns;
        for (int64_t r = t * block; r < (t + 1) * block && r < rows; r++) {
            const X* row = x + r * columns;
            const Y* g = grad + r * columns;
            const float centre = mean ? mean[r] : 0, over = inverse[r];
            Floats plain{}, along{};
            for_vectors(columns, [&](int64_t c, int n) {
                Floats value = (part(row + c, n, centre) - centre) * over, d = part(g + c, n);
                put(gain_sum + c, n, part(gain_sum + c, n) + d * value);
                put(bias_sum + c, n, part(bias_sum + c, n) + d);
                if (gain) d *= part(gain + c, n);
                plain += d;
                along += d * value;
            });
            const float share = mean ? sum_of(plain) / columns : 0, turn = sum_of(along) / columns;
            for_vectors(columns, [&](int64_t c, int n) {
                Floats value = (part(row + c, n, centre) - centre) * over, d = part(g + c, n);
                if (gain) d *= part(gain + c, n);
                d = (d - share - value * turn) * over;
                if (passed) {
                    d += part(passed + r * columns + c, n);
                    put(shift_sum + c, n, part(shift_sum + c, n) + d);
                }
                put(grad_x + r * columns + c, n, d);
            });
        }
    }
}

inline float number(uint16_t x) { return widened(x); }
inline float number(float x) { return x; }

template <class T>
void losses(const T* logits, int64_t stride, const int64_t* targets, int64_t ignored, float* loss,
            float* base, int64_t rows, int64_t columns, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * columns > 16384)
    for (int64_t r = 0; r < rows; r++) {
        const T* row = logits + r * stride;
        Floats most = all(-INFINITY), sum{};
        for_vectors(columns, [&](int64_t c, int n) {
            most = largest(part(row + c, n, -INFINITY), most);
        });
        float top = -INFINITY;
        for (int i = 0; i < LANES; i++) top = most[i] > top ? most[i] : top;
        const float shift = top == -INFINITY ? 0 : top;
        for_vectors(columns, [&](int64_t c, int n) {
            sum += exp_(part(row + c, n, -INFINITY) - shift);
        });
        // apart, since a sum near 1 would be lost in a large shift
        base[2 * r] = shift;
        base[2 * r + 1] = std::log(sum_of(sum));
        loss[r] = targets[r] == ignored ? 0 : base[2 * r + 1] - (number(row[targets[r]]) - shift);
    }
}

template <class T>
void errors(const T* logits, int64_t stride, const int64_t* targets, const float* base,
            const float* scale, T* grad, int64_t grad_stride, int64_t rows, int64_t columns,
            int threads) {
#pragma omp parallel for num_threads(threads) if (rows * columns > 16384)
    for (int64_t r = 0; r < rows; r++) {
        const T* row = logits + r * stride;
        T* to = grad + r * grad_stride;
        const float s = scale[r], shift = base[2 * r], log_sum = base[2 * r + 1];
        if (s == 0) {  // an ignored target
            std::memset(to, 0, sizeof(T) * columns);
            continue;
        }
        const int64_t target = targets[r];
        // p - 1 as an expm1, where p is near 1
        const float right = s * std::expm1(number(row[target]) - shift - log_sum);
        for_vectors(columns, [&](int64_t c, int n) {
            // a rounded sum may leave a probability a little above 1, which exp2_ would not take
            Floats log_p = part(row + c, n) - shift - log_sum;
            put(to + c, n, exp_(choose(log_p > 0.0f, Floats{}, log_p)) * s);
        });
        write_some(to + target, 1, all(right));
    }
}

}  // namespace

extern "C" {

// out = gelu(x), or grad * gelu'(x) where `grad` is given; `out` may be `x` or `grad`.
void halfstep_gelu_tanh(const uint16_t* x, const uint16_t* grad, uint16_t* out, int64_t count,
                        int32_t threads) {
    for_chunks(count, threads, [=](int64_t start, int64_t end) {
        int64_t i = start;
        for (; i + LANES <= end; i += LANES) {
            Floats v = read(x + i);
            write(out + i, grad ? read(grad + i) * gelu_tanh_slope(v) : gelu_tanh(v));
        }
        if (int rest = (int)(end - i)) {
            Floats v = read_some(x + i, rest, 0);
            Floats y = grad ? read_some(grad + i, rest, 0) * gelu_tanh_slope(v) : gelu_tanh(v);
            write_some(out + i, rest, y);
        }
    });
}

// y = x * scale, or 0 with probability p, drawn from the seed and an element's index; y may be x.
void halfstep_dropout(const void* x, int32_t is_bf16, void* y, float p, float scale, uint64_t seed,
                      int64_t count, int32_t threads) {
    if (is_bf16)
        dropout((const uint16_t*)x, (uint16_t*)y, p, scale, seed, count, threads);
    else
        dropout((const float*)x, (float*)y, p, scale, seed, count, threads);
}

// The tanh GELU of rows of x + bias, a bias for each column. With `grad`, each of `threads` blocks of
// rows adds up the columns of its results in `sums` (threads x columns, zeros before).
void halfstep_gelu_tanh_rows(const uint16_t* x, const float* bias, const uint16_t* grad,
                             uint16_t* out, float* sums, int64_t rows, int64_t columns,
                             int32_t threads) {
    const int64_t block = (rows + threads - 1) / threads;
#pragma omp parallel for num_threads(threads)
    for (int t = 0; t < threads; t++)
        for (int64_t r = t * block; r < (t + 1) * block && r < rows; r++)
            for_vectors(columns, [&](int64_t c, int n) {
                const int64_t at = r * columns + c;
                Floats v = part(x + at, n) + part(bias + c, n);
                if (grad) {
                    v = part(grad + at, n) * gelu_tanh_slope(v);
                    float* sum = sums + t * columns + c;
                    put(sum, n, part(sum, n) + v);
                } else {
                    v = gelu_tanh(v);
                }
                put(out + at, n, v);
            });
}

// y = (x - mean) / sqrt(variance + epsilon) * gain + bias over the last dimension; without `mean`
// the root mean square takes the place of the deviation. `gain` and `bias` may be null. With `added`
// the norm is that of x + added + shift, which is written to `total`; `y` may be null then.
void halfstep_norm(const void* x, int32_t x_is_bf16, const uint16_t* added, const float* shift,
                   void* total, const float* gain, const float* bias, float epsilon, void* y,
                   int32_t y_is_bf16, float* mean, float* inverse, int64_t rows, int64_t columns,
                   int32_t threads) {
#define NORM(X, Y)                                                                               \
    norm_rows((const X*)x, Addition<X>{added, shift, (X*)total}, gain, bias, epsilon, (Y*)y, mean, \
              inverse, rows, columns, threads)
    if (x_is_bf16)
        y_is_bf16 ? NORM(uint16_t, uint16_t) : NORM(uint16_t, float);
    else
        y_is_bf16 ? NORM(float, uint16_t) : NORM(float, float);
#undef NORM
}

void halfstep_norm_backward(const void* x, int32_t x_is_bf16, const float* gain, const void* grad,
                            int32_t grad_is_bf16, const void* passed, const float* mean,
                            const float* inverse, void* grad_x, float* sums, int64_t rows,
                            int64_t columns, int32_t threads) {
#define NORM(X, Y)                                                                            \
    norm_rows_backward((const X*)x, gain, (const Y*)grad, (const X*)passed, mean, inverse,      \
                       (X*)grad_x, sums, rows, columns, threads)
    if (x_is_bf16)
        grad_is_bf16 ? NORM(uint16_t, uint16_t) : NORM(uint16_t, float);
    else
        grad_is_bf16 ? NORM(float, uint16_t) : NORM(float, float);
#undef NORM
}

// loss[r] = log sum exp(logits[r]) - logits[r][target]; 0 where the target is `ignored`. Targets are
// in range: rows.py looks. base[r] holds the largest logit, and the logarithm of the sum of
// exponentials of what the others are below it.
void halfstep_cross_entropy(const void* logits, int32_t is_bf16, int64_t stride,
                            const int64_t* targets, int64_t ignored, float* loss, float* base,
                            int64_t rows, int64_t columns, int32_t threads) {
    if (is_bf16)
        losses((const uint16_t*)logits, stride, targets, ignored, loss, base, rows, columns, threads);
    else
        losses((const float*)logits, stride, targets, ignored, loss, base, rows, columns, threads);
}

// grad = scale[r] * (softmax(logits[r]) - [target]), in place where `grad` is `logits`.
void halfstep_cross_entropy_backward(const void* logits, int32_t is_bf16, int64_t stride,
                                     const int64_t* targets, const float* base, const float* scale,
                                     void* grad, int64_t grad_stride, int64_t rows,
                                     int64_t columns, int32_t threads) {
    if (is_bf16)
        errors((const uint16_t*)logits, stride, targets, base, scale, (uint16_t*)grad, grad_stride,
               rows, columns, threads);
    else
        errors((const float*)logits, stride, targets, base, scale, (float*)grad, grad_stride, rows,
               columns, threads);
}
}
