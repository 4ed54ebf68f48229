// Attention of one sequence's newest tokens over its paged KV. Scores and sums are float32.
//
// Few queries (decode) are bound by reading KV: each key and value row is read once for all query heads that share it.
// Many queries (prefill) are bound by arithmetic: KV is unpacked into float32 tiles that many rows use, with an online
// softmax (Milakov and Gimelshein, 2018, arXiv 1805.02867) over the tiles, as in FlashAttention (arXiv 2205.14135).
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "vec.h"

namespace pagedllm {

constexpr int64_t kTileTokens = 64;    // KV tokens of a prefill tile: 4 vectors of scores
constexpr int64_t kTileQueries = 32;   // queries that share an unpacked KV tile
constexpr int64_t kChunk = 64;         // head_dim is taken in pieces of 4 vectors
constexpr int64_t kAhead = 16;         // rows between asking for one and using it
constexpr float kMinusInf = -std::numeric_limits<float>::infinity();

template <typename T>
struct AttentionArgs {
  const T* query;  // [num_tokens, query_stride]: heads side by side
  const T* keys;   // [num_blocks, block_size, num_kv_heads, head_dim]
  const T* values;
  T* output;             // [num_tokens, num_heads * head_dim]
  const int32_t* tables;  // [num_seqs, table_stride]
  int64_t query_stride, table_stride;
  int64_t num_heads, num_kv_heads, head_dim, block_size;
  float scale, soft_cap;  // soft_cap 0: none
  int64_t window;         // 0: none; else a query sees this many positions, its own included
};

// A sequence's rows and positions.
struct Span {
  int64_t first_row, query_len, seq_len;
  const int32_t* table;
};

inline float capped(float score, float cap) { return cap > 0 ? cap * std::tanh(score / cap) : score; }

// Lane i of the result is the sum of v[i].
inline f32x16 sum_each(f32x16 v[16]) {
  typedef i32x16 m;
  for (int i = 0; i < 8; i++)
    v[i] = __builtin_shuffle(v[2 * i], v[2 * i + 1], m{0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30}) +
           __builtin_shuffle(v[2 * i], v[2 * i + 1], m{1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31});
  for (int i = 0; i < 4; i++)
    v[i] = __builtin_shuffle(v[2 * i], v[2 * i + 1], m{0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29}) +
           __builtin_shuffle(v[2 * i], v[2 * i + 1], m{2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31});
  for (int i = 0; i < 2; i++)
    v[i] = __builtin_shuffle(v[2 * i], v[2 * i + 1], m{0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27}) +
           __builtin_shuffle(v[2 * i], v[2 * i + 1], m{4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31});
  return __builtin_shuffle(v[0], v[1], m{0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23}) +
         __builtin_shuffle(v[0], v[1], m{8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31});
}

// What is left of a stretch of KV for one row: the largest score, the sum of exponentials below it, and their mix of
// values. Stretches are merged by rescaling to the larger maximum.
struct Partial {
  float max, sum;
};

// Where each of some positions has its row, in elements from the start of either cache. Walking block by block costs no
// division per row.
template <typename T>
void find_rows(const AttentionArgs<T>& a, const Span& s, int64_t begin, int64_t end, int64_t* rows) {
  int64_t step = a.num_kv_heads * a.head_dim, block = begin / a.block_size, inside = begin % a.block_size;
  for (int64_t position = begin; position < end; block++, inside = 0) {
    int64_t row = (int64_t(s.table[block]) * a.block_size + inside) * step;
    int64_t last = std::min(end, (block + 1) * a.block_size);
    for (; position < last; position++, row += step) *rows++ = row;
  }
}

// --- Decode ---
//
// A work item is one query, a stretch of positions and some KV heads: all of them if there is work enough for every
// thread, because their rows lie side by side in memory and what is bound by memory wants to read it in order. It takes
// the positions in groups of 16, while the next group's rows are on their way.

template <typename T>
struct DecodeItem {
  const T* query;   // of the first head
  int64_t kv_first, kv_last, group, count;
  std::vector<int64_t> rows;
  int64_t stride;                     // positions, rounded up to whole vectors; what is beyond weighs nothing
  std::vector<float> scores, mixed;   // per head: [stride] and [head_dim]
  std::vector<float> wide;            // the query in float32
  std::vector<bf16> rounded;          // the weights in bfloat16
  int64_t num_heads() const { return (kv_last - kv_first) * group; }
};

// Asks for a row of one KV head ahead of time. Between other work, not in bursts: a burst fills the queue of misses, and
// then everything waits.
template <typename T>
inline void prefetch_row(const T* row, int64_t head_dim) {
  for (int64_t d = 0; d < head_dim; d += 64 / int64_t(sizeof(T))) __builtin_prefetch(row + d);
}

// Scores of R heads of one KV head with up to 16 keys: lane j of out[r] belongs to rows[j].
template <typename T, int R>
void dot_keys(const AttentionArgs<T>& a, const T* keys, const T* query, const float* wide, const int64_t* rows,
              int64_t lanes, f32x16* out) {
  f32x16 sums[R][kLanes] = {};
#if defined(__AVX512BF16__)
  if constexpr (std::is_same_v<T, bf16>) {
    for (int64_t j = 0; j < lanes; j++) {
      prefetch_row(keys + rows[j + kAhead], a.head_dim);
      __m512 acc[R];
      for (int r = 0; r < R; r++) acc[r] = _mm512_setzero_ps();
      int64_t d = 0;
      for (; d + 32 <= a.head_dim; d += 32) {
        __m512bh key = (__m512bh)_mm512_loadu_si512(keys + rows[j] + d);
        for (int r = 0; r < R; r++)
          acc[r] = _mm512_dpbf16_ps(acc[r], key, (__m512bh)_mm512_loadu_si512(query + r * a.head_dim + d));
      }
      for (int r = 0; r < R; r++) {
        sums[r][j] = (f32x16)acc[r];
        if (d < a.head_dim) sums[r][j] += load(keys + rows[j] + d) * load(wide + r * a.head_dim + d);
      }
    }
    for (int r = 0; r < R; r++) out[r] = sum_each(sums[r]);
    return;
  }
#endif
  for (int64_t j = 0; j < lanes; j++) {
    prefetch_row(keys + rows[j + kAhead], a.head_dim);
    for (int64_t d = 0; d < a.head_dim; d += kLanes) {
      f32x16 key = load(keys + rows[j] + d);
      for (int r = 0; r < R; r++) sums[r][j] += key * load(wide + r * a.head_dim + d);
    }
  }
  for (int r = 0; r < R; r++) out[r] = sum_each(sums[r]);
}

// mixed[r] += sum over rows of weight * value, for R heads of one KV head.
template <typename T, int R>
void mix_values(const AttentionArgs<T>& a, const T* values, const int64_t* rows, int64_t count, const float* weights,
                const bf16* rounded, int64_t stride, float* mixed) {
  for (int64_t i = 0; i < count; i++) prefetch_row(values + rows[i + kAhead], a.head_dim);
  int64_t d0 = 0;
#if defined(__AVX512BF16__)
  // Pairs of rows, interleaved so that one instruction adds both: weights are rounded to bfloat16, as flash attention
  // does in this precision, while their sum is not. Interleaving goes by lanes of 128 bits: of each eight outputs, the
  // first four end in `low`, the others in `high`.
  if constexpr (std::is_same_v<T, bf16>) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    for (; d0 + 32 <= a.head_dim; d0 += 32) {
      __m512 low[R], high[R];
      for (int r = 0; r < R; r++) low[r] = high[r] = _mm512_setzero_ps();
      for (int64_t i = 0; i < count; i += 2) {
        __m512i x = _mm512_loadu_si512(values + rows[i] + d0);
        __m512i y = i + 1 < count ? _mm512_loadu_si512(values + rows[i + 1] + d0) : x;  // its weight is 0
        __m512bh even = (__m512bh)_mm512_unpacklo_epi16(x, y), odd = (__m512bh)_mm512_unpackhi_epi16(x, y);
        for (int r = 0; r < R; r++) {
          int32_t pair;
          std::memcpy(&pair, rounded + r * stride + i, 4);
          __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
          low[r] = _mm512_dpbf16_ps(low[r], even, both);
          high[r] = _mm512_dpbf16_ps(high[r], odd, both);
        }
      }
      for (int r = 0; r < R; r++) {
        float* out = mixed + r * a.head_dim + d0;
        store(out, load(out) + (f32x16)_mm512_permutex2var_ps(low[r], first, high[r]));
        store(out + 16, load(out + 16) + (f32x16)_mm512_permutex2var_ps(low[r], second, high[r]));
      }
    }
  }
#endif
  for (; d0 < a.head_dim; d0 += kLanes) {
    f32x16 sums[R] = {};
    for (int64_t i = 0; i < count; i++) {
      f32x16 value = load(values + rows[i] + d0);
      for (int r = 0; r < R; r++) sums[r] += value * weights[r * stride + i];
    }
    for (int r = 0; r < R; r++) store(mixed + r * a.head_dim + d0, load(mixed + r * a.head_dim + d0) + sums[r]);
  }
}

template <typename T, int R>
void score_heads(const AttentionArgs<T>& a, DecodeItem<T>& w, int64_t kv_head, int64_t head, int64_t begin) {
  int64_t lanes = std::min<int64_t>(kLanes, w.count - begin);
  f32x16 products[R];
  dot_keys<T, R>(a, a.keys + kv_head * a.head_dim, w.query + head * a.head_dim, w.wide.data() + head * a.head_dim,
                 w.rows.data() + begin, lanes, products);
  for (int r = 0; r < R; r++) {
    f32x16 row = products[r] * a.scale;
    if (a.soft_cap > 0)
      for (int64_t j = 0; j < lanes; j++) row[j] = capped(row[j], a.soft_cap);
    for (int64_t j = lanes; j < kLanes; j++) row[j] = kMinusInf;
    store(w.scores.data() + (head + r) * w.stride + begin, row);
  }
}

template <typename T, int R>
void mix_heads(const AttentionArgs<T>& a, DecodeItem<T>& w, int64_t kv_head, int64_t head, int64_t begin) {
  int64_t offset = head * w.stride + begin;
  mix_values<T, R>(a, a.values + kv_head * a.head_dim, w.rows.data() + begin,
                   std::min<int64_t>(kLanes, w.count - begin), w.scores.data() + offset, w.rounded.data() + offset,
                   w.stride, w.mixed.data() + head * a.head_dim);
}

// Calls a function for up to 4 heads of one KV head at a time, for each KV head of the item.
template <typename T, typename F>
void for_heads(const DecodeItem<T>& w, F f) {
  for (int64_t kv = w.kv_first; kv < w.kv_last; kv++)
    for (int64_t done = 0; done < w.group; done += 4)
      f(kv, (kv - w.kv_first) * w.group + done, std::min<int64_t>(4, w.group - done));
}

// Positions [begin, end) for one query row. partial is [heads], acc is [heads, head_dim], not normalised yet.
template <typename T>
void decode_stretch(const AttentionArgs<T>& a, const Span& s, int64_t row, int64_t kv_first, int64_t kv_last,
                    int64_t begin, int64_t end, Partial* partial, float* acc) {
  static thread_local DecodeItem<T> w;
  w.group = a.num_heads / a.num_kv_heads, w.kv_first = kv_first, w.kv_last = kv_last;
  w.query = a.query + row * a.query_stride + kv_first * w.group * a.head_dim;
  w.count = end - begin;
  w.rows.resize(w.count + kAhead);  // the last ones only for asking ahead: the last row again
  find_rows(a, s, begin, end, w.rows.data());
  std::fill(w.rows.begin() + w.count, w.rows.end(), w.rows[w.count - 1]);
  int64_t size = w.num_heads() * a.head_dim;
  w.stride = (w.count + kLanes - 1) / kLanes * kLanes;
  w.scores.resize(w.num_heads() * w.stride), w.rounded.resize(w.num_heads() * w.stride);
  w.wide.resize(size), w.mixed.assign(size, 0.0f);
  for (int64_t d = 0; d < size; d += kLanes) store(w.wide.data() + d, load(w.query + d));
  for (int64_t i = 0; i < w.count; i += kLanes) {
    for_heads(w, [&](int64_t kv, int64_t head, int64_t heads) {
      (heads == 4 ? score_heads<T, 4> : heads == 3 ? score_heads<T, 3> : heads == 2 ? score_heads<T, 2>
                                                                                   : score_heads<T, 1>)(a, w, kv, head, i);
    });
  }
  for (int64_t h = 0; h < w.num_heads(); h++) {
    float* line = w.scores.data() + h * w.stride;
    f32x16 highest = load(line);
    for (int64_t i = kLanes; i < w.stride; i += kLanes) {
      f32x16 next = load(line + i);
      highest = next > highest ? next : highest;
    }
    float best = highest[0];
    for (int i = 1; i < kLanes; i++) best = std::max(best, float(highest[i]));
    f32x16 total = {};
    for (int64_t i = 0; i < w.stride; i += kLanes) {
      f32x16 weight = exp(load(line + i) - best);
      store(line + i, weight);
      store(w.rounded.data() + h * w.stride + i, weight);
      total += weight;
    }
    partial[h] = {best, sum(total)};
  }
  for (int64_t i = 0; i < w.count; i += kLanes) {
    for_heads(w, [&](int64_t kv, int64_t head, int64_t heads) {
      (heads == 4 ? mix_heads<T, 4> : heads == 3 ? mix_heads<T, 3> : heads == 2 ? mix_heads<T, 2>
                                                                               : mix_heads<T, 1>)(a, w, kv, head, i);
    });
  }
  std::copy(w.mixed.begin(), w.mixed.end(), acc);
}

// --- Prefill ---

// Four rows of a tile product: out[r][0..63] = sum over k of left[r][k] * right[k][0..63].
template <bool kAccumulate>
inline void multiply_rows(const float* left, int64_t left_stride, const float* right, int64_t right_stride, int64_t depth,
                          float* out, int64_t out_stride, int rows) {
  f32x16 acc[4][4];
  for (int r = 0; r < 4; r++)
    for (int v = 0; v < 4; v++)
      acc[r][v] = kAccumulate && r < rows ? load(out + r * out_stride + v * kLanes) : f32x16{};
  const float* lines[4];
  for (int r = 0; r < 4; r++) lines[r] = left + std::min(r, rows - 1) * left_stride;
  for (int64_t k = 0; k < depth; k++) {
    f32x16 x[4];
    for (int v = 0; v < 4; v++) x[v] = load(right + k * right_stride + v * kLanes);
    for (int r = 0; r < 4; r++) {
      f32x16 factor = splat(lines[r][k]);
      for (int v = 0; v < 4; v++) acc[r][v] += factor * x[v];
    }
  }
  for (int r = 0; r < rows; r++)
    for (int v = 0; v < 4; v++) store(out + r * out_stride + v * kLanes, acc[r][v]);
}

struct PrefillScratch {
  int64_t rows[kTileTokens];
  std::vector<float> query, keys, values, scores, output;
  std::vector<Partial> state;
};

template <typename T>
void unpack_tile(const AttentionArgs<T>& a, const Span& s, int64_t kv_head, int64_t begin, int64_t count, int64_t padded,
                 PrefillScratch& w) {
  find_rows(a, s, begin, begin + count, w.rows);
  for (int64_t i = 0; i < kTileTokens; i++) {
    float* value = w.values.data() + i * padded;
    if (i >= count) {
      // A weight of 0 times what an earlier tile left here must not be NaN.
      std::fill(value, value + padded, 0.0f);
      for (int64_t d = 0; d < a.head_dim; d++) w.keys[d * kTileTokens + i] = 0.0f;
      continue;
    }
    const T* key = a.keys + w.rows[i] + kv_head * a.head_dim;
    for (int64_t d = 0; d < a.head_dim; d++) w.keys[d * kTileTokens + i] = to_float(key[d]);
    const T* source = a.values + w.rows[i] + kv_head * a.head_dim;
    for (int64_t d = 0; d < a.head_dim; d += kLanes) store(value + d, load(source + d));
  }
}

// Scores of a row to weights, with the state and the output of earlier tiles rescaled to the new maximum.
template <typename T>
void weigh_row(const AttentionArgs<T>& a, float* scores, int64_t first, int64_t last, Partial& state, float* output) {
  float best = state.max;
  for (int64_t i = 0; i < kTileTokens; i++) {
    bool visible = i >= first && i <= last;
    scores[i] = visible ? capped(scores[i] * a.scale, a.soft_cap) : kMinusInf;
    best = std::max(best, scores[i]);
  }
  if (best == kMinusInf) {  // nothing visible yet: below a window
    std::fill(scores, scores + kTileTokens, 0.0f);
    return;
  }
  float shrink = std::exp(state.max - best);
  f32x16 total = {};
  for (int64_t i = 0; i < kTileTokens; i += kLanes) {
    f32x16 weight = exp(load(scores + i) - best);
    store(scores + i, weight);
    total += weight;
  }
  state = {best, state.sum * shrink + sum(total)};
  if (shrink != 1.0f)
    for (int64_t d = 0; d < a.head_dim; d += kLanes) store(output + d, load(output + d) * shrink);
}

// Queries [q0, q1) of a sequence, all query heads of one KV head.
template <typename T>
void prefill_tile(const AttentionArgs<T>& a, const Span& s, int64_t kv_head, int64_t q0, int64_t q1) {
  static thread_local PrefillScratch w;
  int64_t group = a.num_heads / a.num_kv_heads, dim = a.head_dim, rows = (q1 - q0) * group;
  int64_t padded = (dim + kChunk - 1) / kChunk * kChunk;
  w.query.resize(rows * dim), w.keys.resize(dim * kTileTokens), w.values.resize(kTileTokens * padded);
  w.scores.resize(rows * kTileTokens);
  w.output.assign(rows * padded, 0.0f);
  w.state.assign(rows, Partial{kMinusInf, 0.0f});
  std::fill(w.values.begin(), w.values.end(), 0.0f);
  for (int64_t q = q0; q < q1; q++) {
    const T* source = a.query + (s.first_row + q) * a.query_stride + kv_head * group * dim;
    for (int64_t d = 0; d < group * dim; d += kLanes) store(w.query.data() + (q - q0) * group * dim + d, load(source + d));
  }
  int64_t offset = s.seq_len - s.query_len;  // position of query 0
  int64_t begin = a.window > 0 ? std::max<int64_t>(0, offset + q0 - a.window + 1) : 0;
  for (int64_t t = begin / kTileTokens * kTileTokens; t < offset + q1; t += kTileTokens) {
    int64_t count = std::min(kTileTokens, s.seq_len - t);
    unpack_tile(a, s, kv_head, t, count, padded, w);
    for (int64_t r = 0; r < rows; r += 4)
      multiply_rows<false>(w.query.data() + r * dim, dim, w.keys.data(), kTileTokens, dim,
                           w.scores.data() + r * kTileTokens, kTileTokens, int(std::min<int64_t>(4, rows - r)));
    for (int64_t r = 0; r < rows; r++) {
      int64_t position = offset + q0 + r / group;
      int64_t first = a.window > 0 ? position - a.window + 1 - t : 0;
      weigh_row(a, w.scores.data() + r * kTileTokens, first, position - t, w.state[r], w.output.data() + r * padded);
    }
    for (int64_t r = 0; r < rows; r += 4)
      for (int64_t d = 0; d < padded; d += kChunk)
        multiply_rows<true>(w.scores.data() + r * kTileTokens, kTileTokens, w.values.data() + d, padded, count,
                            w.output.data() + r * padded + d, padded, int(std::min<int64_t>(4, rows - r)));
  }
  for (int64_t r = 0; r < rows; r++) {
    T* target = a.output + (s.first_row + q0 + r / group) * a.num_heads * dim + (kv_head * group + r % group) * dim;
    f32x16 norm = splat(1.0f / w.state[r].sum);
    for (int64_t d = 0; d < dim; d += kLanes) store(target + d, load(w.output.data() + r * padded + d) * norm);
  }
}

}  // namespace pagedllm
