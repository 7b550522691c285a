// One optimizer step of many tensors on a CPU, in one pass over memory.
//
// reference.py, rules.py, moments.py and precision/masters/rounding.py define every operation; the
// results here have the same bits, which requires -ffp-contract=off (no fused multiply-add).
//
// A few blocks of 128 elements are decoded into fp32 arrays on the stack, updated and stored again.
// The arrays stay in the L1 cache. So weight formats, moment formats and update rules need one
// routine each, not one for every combination. fp32 data is updated in place. All loops are simple,
// so that the compiler can vectorise them.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int64_t kBlock = 128;
constexpr int64_t kStage = 4 * kBlock;   // elements decoded at a time
constexpr int64_t kChunk = 64 * kBlock;  // elements in a thread's unit of work
constexpr uint32_t kAbs = 0x7FFFFFFFu, kInf = 0x7F800000u, kQuiet = 0x7FC00000u;

constexpr uint8_t kBroken = 255;  // the top of a block with a NaN

enum Dtype { kFp32 = 0, kBf16 = 1, kFp16 = 2 };
enum Update { kNearest, kSplit, kSplit24, kKahan, kStochastic };  // as in rounding.py's ROUNDING
enum Moments { kMomentsFp32 = 0, kMomentsBf16 = 1, kMoments8 = 2 };
enum Rule { kAdamW = 0, kSgd = 1, kLion = 2, kDirected = 3 };

inline uint32_t bits_of(float x) { uint32_t b; std::memcpy(&b, &x, 4); return b; }
inline float float_of(uint32_t b) { float x; std::memcpy(&x, &b, 4); return x; }

inline uint32_t mix(uint32_t x) {
  x ^= x >> 16; x *= 0x7FEB352Du; x ^= x >> 15; x *= 0x846CA68Bu; return x ^ (x >> 16);
}

inline uint32_t canonical(uint32_t b) { return (b & kAbs) > kInf ? ((b & ~kAbs) | kQuiet) : b; }

inline uint16_t bf16_nearest(float x) {  // ties to even, as IEEE 754
  uint32_t b = bits_of(x);
  uint32_t rounded = (b + 0x7FFFu + ((b >> 16) & 1u)) >> 16;
  return (b & kAbs) > kInf ? 0x7FC0u : static_cast<uint16_t>(rounded);
}

inline bool infinite(uint16_t h) { return (h & 0x7F80u) == 0x7F80u; }

inline float bf16_float(uint16_t h) { return float_of(static_cast<uint32_t>(h) << 16); }

inline float kahan_sum(uint16_t weight, uint16_t residual) {  // keeps the sign of a weight of -0
  const float sum = bf16_float(weight) + bf16_float(residual);
  return (residual & 0x7FFFu) ? sum : bf16_float(weight);
}

// The split never gives a weight of 0 a negative remainder, so here the user has written the 0.
inline float joined(uint16_t weight, int32_t low) {
  const int32_t own = (weight & 0x7FFFu) ? low : std::max(low, 0);
  return float_of((static_cast<uint32_t>(weight) << 16) + static_cast<uint32_t>(own));
}

inline float fp16_float(uint16_t h) {  // times 2^112, the bias difference; exact for subnormals
  uint32_t magnitude = static_cast<uint32_t>(h & 0x7FFFu) << 13;
  float scaled = float_of(magnitude) * 5.192296858534828e33f;
  uint32_t b = magnitude >= 0x0F800000u ? (magnitude | kInf) : bits_of(scaled);
  return float_of(b | (static_cast<uint32_t>(h & 0x8000u) << 16));
}

// Adds `noise` to the magnitude bits and clears the low bits; finite numbers stay finite.
inline uint32_t cut(uint32_t b, uint32_t noise, uint32_t low) {
  uint32_t m = b & kAbs;
  uint32_t r = (m + (noise & low)) & ~low;
  uint32_t top = kInf - (low + 1);
  r = r > top ? top : r;
  return (b & ~kAbs) | (m < kInf ? r : m);
}

}  // namespace

extern "C" {

struct HalfstepTask {
  void* weight;
  void* remainder;
  const void* gradient;
  void* moment[2];
  uint8_t* top[2];
  int64_t count;
  uint32_t stream;  // the weight's random stream; the moments' is stream + 1
};

struct HalfstepPlan {
  int32_t rule, weight_dtype, gradient_dtype, update, moments, moment_count;
  uint32_t seed, step;
  float multiplier;
  float constant[8];
};

}  // extern "C"

namespace {

uint32_t random_key(const HalfstepPlan& p, uint32_t stream) {  // as in rounding.py
  return mix(mix(mix(p.seed) ^ p.step) ^ stream);
}

void read_gradient(const void* from, int32_t dtype, int64_t at, int n, float multiplier, float* g) {
  if (dtype == kFp32) {
    const float* x = static_cast<const float*>(from) + at;
    for (int i = 0; i < n; ++i) g[i] = x[i] * multiplier;
  } else if (dtype == kBf16) {
    const uint16_t* x = static_cast<const uint16_t*>(from) + at;
    for (int i = 0; i < n; ++i) g[i] = bf16_float(x[i]) * multiplier;
  } else {
    const uint16_t* x = static_cast<const uint16_t*>(from) + at;
    for (int i = 0; i < n; ++i) g[i] = fp16_float(x[i]) * multiplier;
  }
}

// The sum of a chunk's squares: in fp32 (16 partial sums) within a block, in fp64 over blocks.
double square_sum(const void* from, int32_t dtype, int64_t first, int64_t last) {
  alignas(64) float g[kBlock];
  double total = 0.0;
  for (int64_t at = first; at < last; at += kBlock) {
    const int n = static_cast<int>(std::min(kBlock, last - at));
    read_gradient(from, dtype, at, n, 1.0f, g);
    for (int i = n; i < kBlock; ++i) g[i] = 0.0f;
    float sums[16] = {0.0f};
    for (int j = 0; j < kBlock; j += 16)
      for (int i = 0; i < 16; ++i) sums[i] += g[j + i] * g[j + i];
    for (int i = 0; i < 16; ++i) total += sums[i];
  }
  return total;
}

void read_master(const HalfstepTask& t, const HalfstepPlan& p, int64_t at, int n, float* w) {
  const uint16_t* h = static_cast<const uint16_t*>(t.weight) + at;
  if (p.update == kSplit) {
    const int16_t* r = static_cast<const int16_t*>(t.remainder) + at;
    for (int i = 0; i < n; ++i) w[i] = joined(h[i], r[i]);
  } else if (p.update == kSplit24) {
    const int8_t* r = static_cast<const int8_t*>(t.remainder) + at;
    for (int i = 0; i < n; ++i) w[i] = joined(h[i], static_cast<int32_t>(r[i]) * 256);
  } else if (p.update == kKahan) {
    const uint16_t* r = static_cast<const uint16_t*>(t.remainder) + at;
    for (int i = 0; i < n; ++i) {  // if the sum rounds to another weight, the user wrote this one
      const float sum = kahan_sum(h[i], r[i]);
      w[i] = bf16_float(bf16_nearest(sum)) == bf16_float(h[i]) ? sum : bf16_float(h[i]);
    }
  } else {
    for (int i = 0; i < n; ++i) w[i] = bf16_float(h[i]);
  }
}

void write_master(const HalfstepTask& t, const HalfstepPlan& p, int64_t at, int n, const float* w) {
  uint16_t* h = static_cast<uint16_t*>(t.weight) + at;
  const uint32_t first = static_cast<uint32_t>(at), key = random_key(p, t.stream);
  if (p.update == kSplit) {
    int16_t* r = static_cast<int16_t*>(t.remainder) + at;
    for (int i = 0; i < n; ++i) {
      uint32_t b = canonical(bits_of(w[i]));
      h[i] = static_cast<uint16_t>((b + 0x8000u) >> 16);
      r[i] = static_cast<int16_t>(b);
    }
  } else if (p.update == kSplit24) {
    int8_t* r = static_cast<int8_t*>(t.remainder) + at;
    for (int i = 0; i < n; ++i) {
      uint32_t noise = mix((first + i) ^ key);
      uint32_t c = cut(canonical(bits_of(w[i])), noise, 0xFFu) >> 8;
      h[i] = static_cast<uint16_t>((c + 0x80u) >> 8);
      r[i] = static_cast<int8_t>(c);
    }
  } else if (p.update == kStochastic) {
    for (int i = 0; i < n; ++i) {
      uint32_t noise = mix((first + i) ^ key);
      h[i] = static_cast<uint16_t>(cut(canonical(bits_of(w[i])), noise, 0xFFFFu) >> 16);
    }
  } else if (p.update == kKahan) {
    uint16_t* r = static_cast<uint16_t*>(t.remainder) + at;
    for (int i = 0; i < n; ++i) {
      const uint16_t first = bf16_nearest(w[i]);
      const uint16_t lost = infinite(first) ? 0 : bf16_nearest(w[i] - bf16_float(first));
      const float held = kahan_sum(first, lost);
      const uint16_t high = bf16_nearest(held);
      h[i] = high;
      r[i] = infinite(high) ? 0 : bf16_nearest(held - bf16_float(high));
    }
  } else {
    for (int i = 0; i < n; ++i) h[i] = bf16_nearest(w[i]);
  }
}

template <bool kSigned>
void read_codes(const uint8_t* x, uint8_t top, int n, float* m) {
  if (top == kBroken) {
    for (int i = 0; i < n; ++i) m[i] = float_of(kQuiet);
    return;
  }
  const uint32_t base = (top + 1u) * 8u - (kSigned ? 127u : 255u);
  for (int i = 0; i < n; ++i) {
    uint32_t code = kSigned ? (x[i] & 0x7Fu) : x[i];
    uint32_t b = code ? (code + base) << 20 : 0u;
    m[i] = float_of(kSigned ? (b | ((x[i] & 0x80u) << 24)) : b);
  }
}

template <bool kSigned>
uint8_t write_codes(uint8_t* x, int n, const float* m, const uint32_t* random) {
  const int shift = kSigned ? 0 : 12;
  uint32_t largest = 0;
  for (int i = 0; i < n; ++i) {
    uint32_t b = bits_of(m[i]) & kAbs;
    largest = b > largest ? b : largest;
  }
  const bool broken = largest > kInf;
  largest = std::min(largest, 0x7F6FFFFFu);
  const uint32_t exponent = std::max(largest >> 23, 32u);
  const int32_t base = static_cast<int32_t>((exponent + 1u) * 8u - (kSigned ? 127u : 255u));
  const uint32_t lowest = static_cast<uint32_t>(base + 1) << 20;
  const float smallest = float_of(lowest);
  for (int i = 0; i < n; ++i) {
    const uint32_t b = bits_of(m[i]);
    uint32_t magnitude = b & kAbs;
    magnitude = magnitude > 0x7F6FFFFFu ? 0x7F6FFFFFu : magnitude;
    const uint32_t noise = (random[i] >> shift) & 0xFFFFFu;
    int32_t code = static_cast<int32_t>((magnitude + noise) >> 20) - base;
    if (kSigned) {
      const float draw = static_cast<float>(static_cast<int32_t>(noise)) * 9.5367431640625e-07f;
      const int32_t kept = draw * smallest < float_of(b & kAbs) ? 1 : 0;
      code = magnitude < lowest ? kept : code;
    } else {
      code = magnitude < lowest ? 1 : code;
    }
    code = magnitude ? code : 0;
    x[i] = static_cast<uint8_t>(kSigned ? (static_cast<uint32_t>(code) | ((b >> 24) & 0x80u))
                                        : static_cast<uint32_t>(code));
  }
  return broken ? kBroken : static_cast<uint8_t>(exponent);
}

// Decodes a moment that is not fp32. `which` is 0 for the first, signed moment, 1 for the second.
void read_moment(const HalfstepTask& t, const HalfstepPlan& p, int which, int64_t at, int n,
                 float* m) {
  if (p.moments == kMomentsBf16) {
    const uint16_t* x = static_cast<const uint16_t*>(t.moment[which]) + at;
    for (int i = 0; i < n; ++i) m[i] = bf16_float(x[i]);
    return;
  }
  for (int64_t b = 0; b < n; b += kBlock) {
    const uint8_t* x = static_cast<const uint8_t*>(t.moment[which]) + at + b;
    const int length = static_cast<int>(std::min(kBlock, n - b));
    const uint8_t top = t.top[which][(at + b) / kBlock];
    which ? read_codes<false>(x, top, length, m + b) : read_codes<true>(x, top, length, m + b);
  }
}

void write_moment(const HalfstepTask& t, const HalfstepPlan& p, int which, int64_t at, int n,
                  const float* m, const uint32_t* random) {
  if (p.moments == kMomentsBf16) {
    uint16_t* x = static_cast<uint16_t*>(t.moment[which]) + at;
    const int shift = which ? 12 : 0;
    for (int i = 0; i < n; ++i)
      x[i] = static_cast<uint16_t>(cut(canonical(bits_of(m[i])), random[i] >> shift, 0xFFFFu) >> 16);
    return;
  }
  for (int64_t b = 0; b < n; b += kBlock) {
    uint8_t* x = static_cast<uint8_t*>(t.moment[which]) + at + b;
    const int length = static_cast<int>(std::min(kBlock, n - b));
    t.top[which][(at + b) / kBlock] = which ? write_codes<false>(x, length, m + b, random + b)
                                            : write_codes<true>(x, length, m + b, random + b);
  }
}

void move(const HalfstepPlan& p, int n, float* __restrict w, float* __restrict g,
          float* __restrict m, float* __restrict v) {
  const float* c = p.constant;
  if (p.rule == kAdamW) {
    const float beta1 = c[0], rest1 = c[1], beta2 = c[2], rest2 = c[3];
    const float decay = c[4], size = c[5], correction = c[6], eps = c[7];
    for (int i = 0; i < n; ++i) {
      m[i] = m[i] * beta1 + g[i] * rest1;
      v[i] = v[i] * beta2 + (g[i] * rest2) * g[i];
      w[i] = w[i] * decay - (m[i] / (std::sqrt(v[i]) * correction + eps)) * size;
    }
  } else if (p.rule == kSgd) {
    const float momentum = c[0], fresh = c[1], decay = c[2], lr = c[3], direct = c[4], through = c[5];
    for (int i = 0; i < n; ++i) {
      g[i] = g[i] + w[i] * decay;
      m[i] = m[i] * momentum + g[i] * fresh;
      w[i] = w[i] - (g[i] * direct + m[i] * through) * lr;
    }
  } else if (p.rule == kDirected) {
    const float decay = c[0], size = c[1];
    for (int i = 0; i < n; ++i) w[i] = w[i] * decay - g[i] * size;
  } else {
    const float beta1 = c[0], rest1 = c[1], beta2 = c[2], rest2 = c[3], decay = c[4], lr = c[5];
    for (int i = 0; i < n; ++i) {
      const float u = m[i] * beta1 + g[i] * rest1;
      const float sign = static_cast<float>(u > 0.0f) - static_cast<float>(u < 0.0f);
      w[i] = w[i] * decay - sign * lr;
      m[i] = m[i] * beta2 + g[i] * rest2;
    }
  }
}

void stage(const HalfstepTask& t, const HalfstepPlan& p, int64_t at, int n) {
  alignas(64) float own_w[kStage], g[kStage], own_m[kStage], own_v[kStage];
  alignas(64) uint32_t random[kStage];
  const bool wide_w = p.weight_dtype == kFp32, wide = p.moments == kMomentsFp32;
  const bool first = p.moment_count > 0, second = p.moment_count > 1;
  float* w = wide_w ? static_cast<float*>(t.weight) + at : own_w;
  float* m = wide && first ? static_cast<float*>(t.moment[0]) + at : own_m;
  float* v = wide && second ? static_cast<float*>(t.moment[1]) + at : own_v;
  read_gradient(t.gradient, p.gradient_dtype, at, n, p.multiplier, g);
  if (!wide_w) read_master(t, p, at, n, w);
  if (!wide && first) {
    read_moment(t, p, 0, at, n, m);
    if (second) read_moment(t, p, 1, at, n, v);
  }
  move(p, n, w, g, m, v);
  if (!wide_w) write_master(t, p, at, n, w);
  if (!wide && first) {
    const uint32_t from = static_cast<uint32_t>(at);
    const uint32_t key = random_key(p, t.stream + 1);
    for (int i = 0; i < n; ++i) random[i] = mix((from + i) ^ key);
    write_moment(t, p, 0, at, n, m, random);
    if (second) write_moment(t, p, 1, at, n, v, random);
  }
}

}  // namespace

extern "C" void halfstep_step(const HalfstepTask* tasks, int64_t task_count,
                              const HalfstepPlan* plan, int32_t threads) {
  int64_t chunks = 0;
  for (int64_t i = 0; i < task_count; ++i) chunks += (tasks[i].count + kChunk - 1) / kChunk;
  if (chunks < 2) threads = 1;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t part = 0; part < threads; ++part) {
    // Part `part` of `threads` takes chunks [from, to) of all tensors laid end to end.
    const int64_t from = chunks * part / threads, to = chunks * (part + 1) / threads;
    int64_t before = 0;
    for (int64_t i = 0; i < task_count; ++i) {
      const HalfstepTask& t = tasks[i];
      const int64_t own = (t.count + kChunk - 1) / kChunk;
      const int64_t begin = std::max(from, before), end = std::min(to, before + own);
      if (begin < end) {
        const int64_t last = std::min((end - before) * kChunk, t.count);
        for (int64_t at = (begin - before) * kChunk; at < last; at += kStage)
          stage(t, *plan, at, static_cast<int>(std::min(kStage, last - at)));
      }
      before += own;
    }
  }
}

// The sum of all squares. Chunk sums are added in a fixed order, whatever the number of threads.
extern "C" double halfstep_square_sum(const void* const* tensors, const int64_t* counts,
                                      const int32_t* dtypes, int64_t tensor_count,
                                      int32_t threads) {
  double total = 0.0;
  for (int64_t i = 0; i < tensor_count; ++i) {
    const int64_t chunks = (counts[i] + kChunk - 1) / kChunk;
    std::vector<double> sums(static_cast<size_t>(chunks));
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && chunks > 7)
    for (int64_t c = 0; c < chunks; ++c)
      sums[static_cast<size_t>(c)] =
          square_sum(tensors[i], dtypes[i], c * kChunk, std::min((c + 1) * kChunk, counts[i]));
    for (double sum : sums) total += sum;
  }
  return total;
}
