// Many queries over their KV, which is bound by arithmetic: KV is unpacked into float32 tiles that many rows use, with
// an online softmax (Milakov and Gimelshein, 2018, arXiv 1805.02867) over the tiles, as in FlashAttention (arXiv
// 2205.14135).
#pragma once

#include "attention.h"

namespace pagedllm {

constexpr int64_t kTileTokens = 64;   // KV tokens of a prefill tile: 4 vectors of scores
constexpr int64_t kTileQueries = 32;  // queries that share an unpacked KV tile
constexpr int64_t kChunk = 64;        // head_dim is taken in pieces of 4 vectors

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
