// Attention over bf16 tensors on a CPU: products of bf16 with fp32 sums, a softmax in fp32, and
// no score ever written to memory. Forward and backward work tile by tile, on 64 queries and 64
// keys. Everything is transposed: a row is a key (or a channel), and the lanes of a vector are
// queries. The maximum and the sum of a softmax are then plain vector operations, without a
// reduction across lanes.
//
// A product multiplies pairs: A is read one pair at a time (two neighbours of a row, 32 bits) and
// broadcast; B is packed so that a vector holds one pair for each of 16 columns.
#include "vectors.h"

namespace {

constexpr int TILE = 64;  // queries and keys of a tile
constexpr int VECTORS = TILE / LANES;

// to[c][row] = from[row][c] for `rows` rows of `columns` words (a multiple of 8); rows beyond, up
// to the next multiple of 16, become zeros.
void transpose(const uint32_t* from, int64_t from_stride, int rows, int columns, uint32_t* to,
               int64_t to_stride) {
    Words r[LANES];
    for (int row = 0; row < rows; row += LANES)
        for (int c = 0; c < columns; c += LANES) {
            const int wide = columns - c < LANES ? columns - c : LANES;
            for (int i = 0; i < LANES; i++) {
                r[i] = Words{};
                if (row + i >= rows) continue;
                const uint32_t* at = from + (row + i) * from_stride + c;
                if (wide == LANES)
                    r[i] = load<Words>(at);
                else
                    std::memcpy(&r[i], at, 32);
            }
            transpose16(r);
            for (int i = 0; i < wide; i++) store(to + (c + i) * to_stride + row, r[i]);
        }
}

// to[i][c] = the pair (from[2 i][c], from[2 i + 1][c]); a row beyond `rows` counts as zeros.
void interleave(const uint16_t* from, int64_t stride, int rows, int columns, uint32_t* to,
                int64_t to_stride) {
    for (int row = 0; row < rows; row += 2)
        for (int c = 0; c < columns; c += LANES) {
            Words low = words(load<Halves>(from + row * stride + c));
            Words high{};
            if (row + 1 < rows)
                high = words(load<Halves>(from + (row + 1) * stride + c));
            store(to + row / 2 * to_stride + c, low | (high << 16));
        }
}

// C[rows][16 N] (+)= A[rows][2 count] B[count][16 N]
template <int ROWS, int N>
inline void product_block(const uint16_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride,
                          int count, float* c, int64_t c_stride, bool add) {
    Floats sum[ROWS][N];
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < N; j++)
            sum[i][j] = add ? load<Floats>(c + i * c_stride + j * LANES) : Floats{};
    for (int p = 0; p < count; p++) {
        Words column[N];
        for (int j = 0; j < N; j++) column[j] = load<Words>(b + p * b_stride + j * LANES);
        for (int i = 0; i < ROWS; i++) {
            uint32_t pair = load<uint32_t>(a + i * a_stride + 2 * p);
            for (int j = 0; j < N; j++) sum[i][j] = dot(sum[i][j], pair, column[j]);
        }
    }
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < N; j++) store(c + i * c_stride + j * LANES, sum[i][j]);
}

template <int N>
void product_columns(const uint16_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride,
                     int rows, int count, float* c, int64_t c_stride, bool add) {
#if defined(__AVX512F__)
    constexpr int BLOCK = 6;  // 24 sums, 4 columns and a pair: 29 of 32 registers
#else
    constexpr int BLOCK = 1;  // 16 registers of half the width
#endif
    int i = 0;
    for (; i + BLOCK <= rows; i += BLOCK)
        product_block<BLOCK, N>(a + i * a_stride, a_stride, b, b_stride, count, c + i * c_stride,
                                c_stride, add);
    for (; i + 2 <= rows; i += 2)
        product_block<2, N>(a + i * a_stride, a_stride, b, b_stride, count, c + i * c_stride,
                            c_stride, add);
    if (i < rows)
        product_block<1, N>(a + i * a_stride, a_stride, b, b_stride, count, c + i * c_stride,
                            c_stride, add);
}

void product(const uint16_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride, int rows,
             int columns, int count, float* c, int64_t c_stride, bool add) {
    int j = 0;
    for (; j + 64 <= columns; j += 64)
        product_columns<4>(a, a_stride, b + j, b_stride, rows, count, c + j, c_stride, add);
    for (; j + 32 <= columns; j += 32)
        product_columns<2>(a, a_stride, b + j, b_stride, rows, count, c + j, c_stride, add);
    if (j < columns)
        product_columns<1>(a, a_stride, b + j, b_stride, rows, count, c + j, c_stride, add);
}

}  // namespace

extern "C" {

// Strides count elements; the last dimension is contiguous. `mask` is added to the scores, in fp32;
// a stride of 0 broadcasts.
struct Attention {
    const uint16_t *query, *key, *value;
    const float* mask;
    uint16_t* out;
    float* lse;  // log of the sum of exponentials, base 2, [batch, heads, queries]
    const uint16_t* grad_out;
    uint16_t *grad_query, *grad_key, *grad_value;
    int64_t query_stride[3], key_stride[3], value_stride[3], out_stride[3];  // batch, head, position
    int64_t grad_out_stride[3], grad_query_stride[3], grad_key_stride[3], grad_value_stride[3];
    int64_t mask_stride[4];  // batch, head, query, key
    int64_t batch, heads, key_heads, queries, keys;
    int32_t channels, causal;  // channels: a multiple of 16
    float scale;
    float dropout;  // the probability with which a weight is dropped
    uint64_t seed;
};
}

namespace {

inline int smaller(int64_t a, int64_t b) { return (int)(a < b ? a : b); }

// Memory of one thread, aligned to a vector; freed with the object.
struct Scratch {
    char* base;
    size_t used = 0;
    explicit Scratch(size_t bytes) : base((char*)std::aligned_alloc(64, (bytes + 63) / 64 * 64)) {}
    ~Scratch() { std::free(base); }
    template <class T>
    T* take(size_t count) {
        T* found = (T*)(base + used);
        used += (count * sizeof(T) + 63) / 64 * 64;
        return found;
    }
};

// What the scores of a tile become before the softmax: scaled (in base 2), masked, causal.
void finish_scores(const Attention& a, int64_t b, int64_t h, int64_t q0, int queries, int64_t k0,
                   int keys, float* scores) {
    const float scale = a.scale * LOG2E;
    const bool diagonal = a.causal && k0 + keys > q0;
    for (int k = 0; k < keys; k++)
        for (int v = 0; v < VECTORS; v++) {
            float* at = scores + k * TILE + v * LANES;
            Floats s = load<Floats>(at) * scale;
            if (a.mask) {
                const float* m = a.mask + b * a.mask_stride[0] + h * a.mask_stride[1] +
                                 (q0 + v * LANES) * a.mask_stride[2] + (k0 + k) * a.mask_stride[3];
                if (!a.mask_stride[2]) {
                    s += *m * LOG2E;
                } else {
                    Floats added{};
                    for (int i = 0; i < LANES && v * LANES + i < queries; i++)
                        added[i] = m[i * a.mask_stride[2]];
                    s += added * LOG2E;
                }
            }
            if (diagonal) {
                Ints seen = COUNT + (int)(q0 + v * LANES - k0 - k) >= 0;
                s = choose(seen, s, all(-INFINITY));
            }
            store(at, s);
        }
}

inline Floats kept(const Attention& a, uint32_t head, int64_t q0, int v, int64_t key, float inverse) {
    Words query = (Words)COUNT + (uint32_t)(q0 + v * LANES);
    return kept(random_bits(a.seed, head, query, (uint32_t)key), a.dropout, inverse);
}

void forward_tile(const Attention& a, int64_t b, int64_t h, int64_t q0, const uint16_t* value_t,
                  int64_t value_t_stride, uint32_t* query_t, float* scores, uint32_t* weights,
                  float* out_t) {
    const int channels = a.channels, queries = smaller(TILE, a.queries - q0);
    const int64_t group = a.heads / a.key_heads;
    const uint16_t* query = a.query + b * a.query_stride[0] + h * a.query_stride[1];
    const uint16_t* key = a.key + b * a.key_stride[0] + h / group * a.key_stride[1];
    const float inverse = a.dropout > 0 ? 1 / (1 - a.dropout) : 1;
    if (queries < TILE) std::memset(query_t, 0, sizeof(uint32_t) * channels / 2 * TILE);
    for (int q = 0; q < queries; q += LANES)  // in words: half as many as channels
        transpose((const uint32_t*)(query + (q0 + q) * a.query_stride[2]), a.query_stride[2] / 2,
                  smaller(LANES, queries - q), channels / 2, query_t + q, TILE);
    Floats top[VECTORS], total[VECTORS];
    for (int v = 0; v < VECTORS; v++) top[v] = all(-INFINITY), total[v] = Floats{};
    std::memset(out_t, 0, sizeof(float) * channels * TILE);
    const int64_t end = a.causal ? smaller(a.keys, q0 + queries) : a.keys;
    for (int64_t k0 = 0; k0 < end; k0 += TILE) {
        const int keys = smaller(TILE, end - k0);
        product(key + k0 * a.key_stride[2], a.key_stride[2], query_t, TILE, keys, TILE,
                channels / 2, scores, TILE, false);
        finish_scores(a, b, h, q0, queries, k0, keys, scores);
        Floats shift[VECTORS];
        for (int v = 0; v < VECTORS; v++) {
            Floats most = top[v];
            for (int k = 0; k < keys; k++)
                most = largest(load<Floats>(scores + k * TILE + v * LANES), most);
            shift[v] = choose(most == -INFINITY, Floats{}, most);  // of a query that sees nothing
            Floats factor = exp2_(top[v] - shift[v]);
            total[v] *= factor;
            for (int d = 0; k0 && d < channels; d++) {
                float* at = out_t + d * TILE + v * LANES;
                store(at, load<Floats>(at) * factor);
            }
            top[v] = most;
        }
        for (int k = 0; k < keys; k += 2)
            for (int v = 0; v < VECTORS; v++) {
                const float* at = scores + k * TILE + v * LANES;
                Floats first = exp2_(load<Floats>(at) - shift[v]), second{};
                if (k + 1 < keys) second = exp2_(load<Floats>(at + TILE) - shift[v]);
                total[v] += first + second;
                if (a.dropout > 0) {
                    uint32_t head = (uint32_t)(b * a.heads + h);
                    first *= kept(a, head, q0, v, k0 + k, inverse);
                    second *= kept(a, head, q0, v, k0 + k + 1, inverse);
                }
                store(weights + k / 2 * TILE + v * LANES, pairs(first, second));
            }
        product(value_t + k0, value_t_stride, weights, TILE, channels, TILE, (keys + 1) / 2, out_t,
                TILE, true);
    }
    float* lse = a.lse + (b * a.heads + h) * a.queries + q0;
    for (int v = 0; v < VECTORS; v++) {
        Floats over = choose(total[v] == 0, Floats{}, 1.0f / total[v]);
        for (int i = 0; i < LANES && v * LANES + i < queries; i++)
            lse[v * LANES + i] = total[v][i] == 0 ? INFINITY : top[v][i] + std::log2(total[v][i]);
        for (int d = 0; d < channels; d += LANES) {
            Words r[LANES];
            for (int i = 0; i < LANES; i++)
                r[i] = (Words)(load<Floats>(out_t + (d + i) * TILE + v * LANES) * over);
            transpose16(r);
            for (int i = 0; i < LANES && v * LANES + i < queries; i++)
                store(a.out + b * a.out_stride[0] + h * a.out_stride[1] +
                          (q0 + v * LANES + i) * a.out_stride[2] + d,
                      halves((Floats)r[i]));
        }
    }
}

// rows x channels of bf16 as channels x rows; the rows beyond, up to the next even one, are zeros.
// `work` holds rows / 2 x channels words.
void transpose_halves(const uint16_t* from, int64_t stride, int rows, int channels, uint16_t* to,
                      int64_t to_stride, uint32_t* work) {
    interleave(from, stride, rows, channels, work, channels);
    transpose(work, channels, (rows + 1) / 2, channels, (uint32_t*)to, to_stride / 2);
}

inline int64_t padded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

void forward_head(const Attention& a, int64_t b, int64_t key_head) {
    const int64_t keys = padded(a.keys, 32), group = a.heads / a.key_heads;
    const int channels = a.channels;
    Scratch scratch(4 * channels * keys + 6 * channels * TILE + 6 * TILE * TILE + 1024);
    uint16_t* value_t = scratch.take<uint16_t>(channels * keys);
    uint32_t* work = scratch.take<uint32_t>(channels * keys / 2);
    uint32_t* query_t = scratch.take<uint32_t>(channels / 2 * TILE);
    float* scores = scratch.take<float>(TILE * TILE);
    uint32_t* weights = scratch.take<uint32_t>(TILE * TILE / 2);
    float* out_t = scratch.take<float>(channels * TILE);
    const uint16_t* value = a.value + b * a.value_stride[0] + key_head * a.value_stride[1];
    transpose_halves(value, a.value_stride[2], (int)a.keys, channels, value_t, keys, work);
    for (int64_t h = key_head * group; h < (key_head + 1) * group; h++)
        for (int64_t q0 = 0; q0 < a.queries; q0 += TILE)
            forward_tile(a, b, h, q0, value_t, keys, query_t, scores, weights, out_t);
}

// The gradients of all heads that share one head of keys and values.
struct Backward {
    const Attention& a;
    int64_t b, key_head;
    int64_t queries, keys;  // padded to whole tiles
    Scratch scratch;
    uint16_t* key_t;               // channels x keys
    uint32_t *query_t, *grad_t;    // a tile after the other, each channels / 2 x TILE: pairs of channels
    uint32_t *query_p, *grad_p;    // queries / 2 x channels: pairs of queries
    float *grad_query_t;           // a tile after the other, each channels x TILE
    float *delta, *lse;
    float *scores, *grad_weights, *grad_key, *grad_value;
    uint16_t *weights, *grad_scores;
    uint32_t *grad_scores_p, *work;

    Backward(const Attention& a, int64_t b, int64_t key_head)
        : a(a), b(b), key_head(key_head), queries(padded(a.queries, TILE)),
          keys(padded(a.keys, TILE)),
          scratch(a.channels * (14 * queries + 2 * keys + 2 * (queries > keys ? queries : keys) +
                                8 * keys) + 8 * queries + 14 * TILE * TILE + 4096) {
        const int64_t channels = a.channels;
        key_t = scratch.take<uint16_t>(channels * keys);
        query_t = scratch.take<uint32_t>(channels / 2 * queries);
        grad_t = scratch.take<uint32_t>(channels / 2 * queries);
        query_p = scratch.take<uint32_t>(channels / 2 * queries);
        grad_p = scratch.take<uint32_t>(channels / 2 * queries);
        grad_query_t = scratch.take<float>(channels * queries);
        delta = scratch.take<float>(queries);
        lse = scratch.take<float>(queries);
        grad_key = scratch.take<float>(channels * keys);
        grad_value = scratch.take<float>(channels * keys);
        scores = scratch.take<float>(TILE * TILE);
        grad_weights = scratch.take<float>(TILE * TILE);
        weights = scratch.take<uint16_t>(TILE * TILE);
        grad_scores = scratch.take<uint16_t>(TILE * TILE);
        grad_scores_p = scratch.take<uint32_t>(TILE * TILE / 2);
        work = scratch.take<uint32_t>(channels / 2 * (queries > keys ? queries : keys));
    }

    void run() {
        const int channels = a.channels;
        const int64_t group = a.heads / a.key_heads;
        const uint16_t* key = a.key + b * a.key_stride[0] + key_head * a.key_stride[1];
        const uint16_t* value = a.value + b * a.value_stride[0] + key_head * a.value_stride[1];
        transpose_halves(key, a.key_stride[2], (int)a.keys, channels, key_t, keys, work);
        std::memset(grad_key, 0, sizeof(float) * channels * keys);
        std::memset(grad_value, 0, sizeof(float) * channels * keys);
        for (int64_t h = key_head * group; h < (key_head + 1) * group; h++) {
            prepare(h);
            for (int64_t k0 = 0; k0 < a.keys; k0 += TILE)
                for (int64_t q0 = a.causal ? k0 : 0; q0 < a.queries; q0 += TILE)
                    tile(h, q0, k0, key + k0 * a.key_stride[2], value + k0 * a.value_stride[2]);
            write_grad_query(h);
        }
        write(grad_key, a.scale, a.grad_key, a.grad_key_stride);
        write(grad_value, 1, a.grad_value, a.grad_value_stride);
    }

    // What each query and its gradient are needed as, and the sum of gradient times output.
    void prepare(int64_t h) {
        const int channels = a.channels;
        const uint16_t* query = a.query + b * a.query_stride[0] + h * a.query_stride[1];
        const uint16_t* grad = a.grad_out + b * a.grad_out_stride[0] + h * a.grad_out_stride[1];
        const uint16_t* out = a.out + b * a.out_stride[0] + h * a.out_stride[1];
        const int64_t query_step = a.query_stride[2], grad_step = a.grad_out_stride[2];
        std::memset(grad_query_t, 0, sizeof(float) * channels * queries);
        for (int64_t q0 = 0; q0 < a.queries; q0 += TILE) {
            const int count = smaller(TILE, a.queries - q0);
            uint32_t *query_tile = query_t + channels / 2 * q0, *grad_tile = grad_t + channels / 2 * q0;
            uint32_t *query_pairs = query_p + channels / 2 * q0, *grad_pairs = grad_p + channels / 2 * q0;
            if (count < TILE)
                for (uint32_t* part : {query_tile, grad_tile, query_pairs, grad_pairs})
                    std::memset(part, 0, sizeof(uint32_t) * channels / 2 * TILE);
            for (int q = 0; q < count; q += LANES) {
                const int some = smaller(LANES, count - q);
                transpose((const uint32_t*)(query + (q0 + q) * query_step), query_step / 2, some,
                          channels / 2, query_tile + q, TILE);
                transpose((const uint32_t*)(grad + (q0 + q) * grad_step), grad_step / 2, some,
                          channels / 2, grad_tile + q, TILE);
            }
            interleave(query + q0 * query_step, query_step, count, channels, query_pairs, channels);
            interleave(grad + q0 * grad_step, grad_step, count, channels, grad_pairs, channels);
        }
        for (int64_t q = 0; q < queries; q++) {
            Floats sum{};
            if (q < a.queries)
                for (int d = 0; d < channels; d += LANES)
                    sum += read(grad + q * grad_step + d) * read(out + q * a.out_stride[2] + d);
            delta[q] = sum_of(sum);
            // of queries beyond the last the weights are zeros
            lse[q] = q < a.queries ? a.lse[(b * a.heads + h) * a.queries + q] : INFINITY;
        }
    }

    void tile(int64_t h, int64_t q0, int64_t k0, const uint16_t* key, const uint16_t* value) {
        const int channels = a.channels, count = smaller(TILE, a.keys - k0);
        const float inverse = a.dropout > 0 ? 1 / (1 - a.dropout) : 1;
        product(key, a.key_stride[2], query_t + channels / 2 * q0, TILE, count, TILE, channels / 2,
                scores, TILE, false);
        finish_scores(a, b, h, q0, smaller(TILE, a.queries - q0), k0, count, scores);
        product(value, a.value_stride[2], grad_t + channels / 2 * q0, TILE, count, TILE,
                channels / 2, grad_weights, TILE, false);
        for (int k = 0; k < count; k += 2)
            for (int v = 0; v < VECTORS; v++) {
                Floats ds[2] = {};
                for (int i = 0; i < 2 && k + i < count; i++) {
                    const int at = (k + i) * TILE + v * LANES;
                    Floats p = exp2_(load<Floats>(scores + at) - load<Floats>(lse + q0 + v * LANES));
                    Floats dp = load<Floats>(grad_weights + at), used = p;
                    if (a.dropout > 0) {
                        Floats factor = kept(a, (uint32_t)(b * a.heads + h), q0, v, k0 + k + i, inverse);
                        dp *= factor;
                        used *= factor;
                    }
                    ds[i] = p * (dp - load<Floats>(delta + q0 + v * LANES));
                    store(weights + at, halves(used));
                    store(grad_scores + at, halves(ds[i]));
                }
                store(grad_scores_p + k / 2 * TILE + v * LANES, pairs(ds[0], ds[1]));
            }
        product(weights, TILE, grad_p + channels / 2 * q0, channels, count, channels, TILE / 2,
                grad_value + k0 * channels, channels, true);
        product(grad_scores, TILE, query_p + channels / 2 * q0, channels, count, channels, TILE / 2,
                grad_key + k0 * channels, channels, true);
        product(key_t + k0, keys, grad_scores_p, TILE, channels, TILE, (count + 1) / 2,
                grad_query_t + channels * q0, TILE, true);
    }

    void write_grad_query(int64_t h) {
        for (int64_t q0 = 0; q0 < a.queries; q0 += LANES) {
            const float* tile = grad_query_t + a.channels * (q0 / TILE * TILE) + q0 % TILE;
            for (int d = 0; d < a.channels; d += LANES) {
                Words r[LANES];
                for (int i = 0; i < LANES; i++)
                    r[i] = (Words)(load<Floats>(tile + (d + i) * TILE) * a.scale);
                transpose16(r);
                for (int i = 0; i < LANES && q0 + i < a.queries; i++)
                    store(a.grad_query + b * a.grad_query_stride[0] + h * a.grad_query_stride[1] +
                              (q0 + i) * a.grad_query_stride[2] + d,
                          halves((Floats)r[i]));
            }
        }
    }

    void write(const float* from, float factor, uint16_t* to, const int64_t* stride) {
        for (int64_t k = 0; k < a.keys; k++)
            for (int d = 0; d < a.channels; d += LANES)
                store(to + b * stride[0] + key_head * stride[1] + k * stride[2] + d,
                      halves(load<Floats>(from + k * a.channels + d) * factor));
    }
};

}  // namespace

extern "C" {

void halfstep_attention(const Attention* a, int32_t threads) {
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(threads)
    for (int64_t b = 0; b < a->batch; b++)
        for (int64_t h = 0; h < a->key_heads; h++) forward_head(*a, b, h);
}

void halfstep_attention_backward(const Attention* a, int32_t threads) {
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(threads)
    for (int64_t b = 0; b < a->batch; b++)
        for (int64_t h = 0; h < a->key_heads; h++) Backward(*a, b, h).run();
}
}
