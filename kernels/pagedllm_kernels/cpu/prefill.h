// Many queries over their KV, which is bound by arithmetic: KV is unpacked into tiles that many rows use, with an online
// softmax (Milakov and Gimelshein, 2018, arXiv 1805.02867) over the tiles, as in FlashAttention (arXiv 2205.14135).
#pragma once

#include "attention.h"
#include "linear.h"

namespace pagedllm {

constexpr int64_t kTileTokens = 64;   // KV tokens of a tile: 4 vectors of scores
constexpr int64_t kTileQueries = 64;  // queries that share an unpacked KV tile
constexpr int64_t kChunk = 64;        // head_dim is taken in pieces of 4 vectors

inline int64_t padded_dim(int64_t dim) { return (dim + kChunk - 1) / kChunk * kChunk; }

// Rows that go through scores, weights and the mix of values together: all of that stays in the first level of cache.
constexpr int64_t kStripRows = kRowUnit > 1 ? kRowUnit : 4 * kTileRows;

// scores [rows, kTileTokens] = query [rows, dim] times keys, in panels of tokens.
template <typename T>
void score_panels(const T* query, const T* keys, float* scores, int64_t rows, int64_t dim) {
  for (int64_t i = 0; i < kTileTokens; i += kPanel)
    multiply_rows_of_panel(PanelArgs<T, float*>{query, keys + i * dim, nullptr, scores + i, dim, kTileTokens, kPanel}, 0,
                           rows);
}

// output [rows, padded_dim] += weights [rows, kTileTokens] times values, in panels of outputs.
template <typename T>
void mix_panels(const T* weights, const T* values, float* output, int64_t rows, int64_t dim) {
  for (int64_t d = 0; d < dim; d += kPanel)
    multiply_rows_of_panel(PanelArgs<T, Sum>{weights, values + d * kTileTokens, nullptr, Sum{output + d}, kTileTokens,
                                             padded_dim(dim), std::min(kPanel, dim - d)},
                           0, rows);
}

// A tile's products in float32: keys and values become panels like those of a weight. scores and weights are those of a
// strip, [kStripRows, kTileTokens], and the same memory.
template <typename T>
class FloatTile {
 public:
  float* scores() { return scores_.data(); }
  float* weights() { return scores_.data(); }

  void start(int64_t rows, int64_t dim) {
    dim_ = dim;
    query_.resize(rows * dim), keys_.resize(dim * kTileTokens), scores_.resize(kStripRows * kTileTokens);
    values_.assign(num_panels(dim) * kPanel * kTileTokens, 0.0f);
  }

  void set_queries(int64_t row, const T* source, int64_t size) {
    for (int64_t d = 0; d < size; d += kLanes) store(query_.data() + row * dim_ + d, load(source + d));
  }

  // Takes the keys and values of count tokens. What is past them becomes 0, and not what an earlier tile left there: a
  // weight of 0 times that must not be NaN.
  void unpack(const T* keys, const T* values, const int64_t* rows, int64_t count) {
    for (int64_t i = 0; i < kTileTokens; i++) {
      float* key = keys_.data() + i / kPanel * kPanel * dim_ + i % kPanel;
      for (int64_t d = 0; d < dim_; d++) key[d * kPanel] = i < count ? to_float(keys[rows[i] + d]) : 0.0f;
      for (int64_t d = 0; d < dim_; d += kLanes)
        store(values_.data() + d / kPanel * kPanel * kTileTokens + i * kPanel + d % kPanel,
              i < count ? load(values + rows[i] + d) : f32x16{});
    }
  }

  void score(int64_t row, int64_t rows) { score_panels(query_.data() + row * dim_, keys_.data(), scores(), rows, dim_); }
  void mix(int64_t rows, float* output) { mix_panels(weights(), values_.data(), output, rows, dim_); }

 private:
  int64_t dim_ = 0;
  std::vector<float> query_, keys_, values_, scores_;
};

#if defined(__AVX512BF16__)

// Exchanges rows and columns of sixteen vectors of 32-bit words (Eklundh, 1972).
template <int kStep>
inline void transpose(i32x16 v[16]) {
  const i32x16 lane{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const i32x16 low = (lane & kStep) != 0 ? lane - kStep + 16 : lane, high = (lane & kStep) != 0 ? lane + 16 : lane + kStep;
  for (int i = 0; i < 16; i++) {
    if (i & kStep) continue;
    i32x16 a = v[i], b = v[i + kStep];
    v[i] = __builtin_shuffle(a, b, low);
    v[i + kStep] = __builtin_shuffle(a, b, high);
  }
  if constexpr (kStep < 8) transpose<2 * kStep>(v);
}

// A tile's products in bfloat16: keys, and values by pairs of tokens, become panels like those of a weight. Weights are
// rounded to bfloat16, as flash attention does in this precision, while their sum is not.
class PanelTile {
 public:
  float* scores() { return scores_.data(); }
  bf16* weights() { return weights_.data(); }

  void start(int64_t rows, int64_t dim) {
    dim_ = dim;
    query_.resize(rows * dim), scores_.resize(kStripRows * kTileTokens), weights_.resize(kStripRows * kTileTokens);
    keys_.resize(dim * kTileTokens), values_.resize(num_panels(dim) * kPanel * kTileTokens);
  }

  void set_queries(int64_t row, const bf16* source, int64_t size) {
    std::copy(source, source + size, query_.data() + row * dim_);
  }

  void unpack(const bf16* keys, const bf16* values, const int64_t* rows, int64_t count) {
    for (int64_t i = 0; i < kTileTokens; i += 16)
      for (int64_t d = 0; d < dim_; d += 32) unpack_keys(keys + d, rows + i, count - i, i, d);
    for (int64_t i = 0; i < kTileTokens; i += 2)
      for (int64_t d = 0; d < dim_; d += kPanel) {
        __m512i even = load_part(values + d, rows, i, count, d), odd = load_part(values + d, rows, i + 1, count, d);
        bf16* pairs = values_.data() + d * kTileTokens + i * kPanel;
        _mm512_storeu_si512(pairs, _mm512_permutex2var_epi16(even, interleaved(0), odd));
        _mm512_storeu_si512(pairs + 32, _mm512_permutex2var_epi16(even, interleaved(16), odd));
      }
  }

  void score(int64_t row, int64_t rows) { score_panels(query_.data() + row * dim_, keys_.data(), scores(), rows, dim_); }
  void mix(int64_t rows, float* output) { mix_panels(weights(), values_.data(), output, rows, dim_); }

 private:
  // 32 elements of a row, or what is left of it; zeros for tokens past the end.
  __m512i load_part(const bf16* base, const int64_t* rows, int64_t i, int64_t count, int64_t d) const {
    if (i >= count) return _mm512_setzero_si512();
    return _mm512_maskz_loadu_epi16(dim_ - d >= 32 ? ~0u : 0xFFFFu, base + rows[i]);
  }

  void unpack_keys(const bf16* keys, const int64_t* rows, int64_t count, int64_t token, int64_t d) {
    i32x16 v[16];
    for (int i = 0; i < 16; i++) v[i] = (i32x16)load_part(keys, rows, i, count, d);
    transpose<1>(v);
    bf16* panel = keys_.data() + token / kPanel * kPanel * dim_;
    for (int64_t i = 0; i < std::min<int64_t>(16, (dim_ - d) / 2); i++)
      std::memcpy(panel + (d / 2 + i) * kPanel * 2 + token % kPanel * 2, &v[i], sizeof v[i]);
  }

  // Element i + first of one vector, then of another, and so on.
  static __m512i interleaved(int first) {
    i32x16 lane{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return (__m512i)((lane + first) | ((lane + first + 32) << 16));
  }

  int64_t dim_ = 0;
  std::vector<bf16> query_, keys_, values_, weights_;
  std::vector<float> scores_;
};

template <typename T>
using PrefillTile = std::conditional_t<std::is_same_v<T, bf16>, PanelTile, FloatTile<T>>;
#else
template <typename T>
using PrefillTile = FloatTile<T>;
#endif

// What a row has seen: its largest score, in units of ln 2, and the sum of powers of two below it, in parts.
struct Running {
  f32x16 sums;
  float max;
};

// Scores of a row to weights, with the state and the output of earlier tiles rescaled to the new maximum. The row sees
// the tokens from first to last of the tile. Weights may take the place of the scores.
template <bool kIsCapped, typename T, typename W>
inline void weigh_row(const AttentionArgs<T>& a, const float* scores, W* weights, int64_t first, int64_t last,
                      Running& state, float* output) {
  constexpr int kVectors = kTileTokens / kLanes;
  constexpr float kLog2e = 1.44269504088896341f;
  const i32x16 lanes{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  f32x16 x[kVectors], largest = splat(kMinusInf);
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; v++) {
    x[v] = load(scores + v * kLanes) * (kIsCapped ? a.scale : a.scale * kLog2e);
    if constexpr (kIsCapped)
      for (int i = 0; i < kLanes; i++) x[v][i] = capped(x[v][i], a.soft_cap) * kLog2e;
    if (first > 0 || last < kTileTokens - 1) {
      i32x16 token = lanes + v * kLanes;
      x[v] = (token >= int32_t(first)) & (token <= int32_t(last)) ? x[v] : splat(kMinusInf);
    }
    largest = x[v] > largest ? x[v] : largest;
  }
  float best = std::max(state.max, highest(largest));
  if (best == kMinusInf) {  // nothing visible yet: below a window
    for (int v = 0; v < kVectors; v++) store(weights + v * kLanes, f32x16{});
    return;
  }
  f32x16 total = {};
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; v++) {
    f32x16 weight = exp2_below(x[v] - best);
    store(weights + v * kLanes, weight);
    total += weight;
  }
  bool is_higher = best > state.max && state.max != kMinusInf;  // what is 0 yet needs no shrinking
  float shrink = is_higher ? std::exp2(state.max - best) : 1.0f;
  state = {state.sums * shrink + total, best};
  if (is_higher)
    for (int64_t d = 0; d < a.head_dim; d += kLanes) store(output + d, load(output + d) * shrink);
}

// What a thread works with. (Not inlined where it is looked up: compilers would look it up in every loop.)
template <typename T>
struct PrefillItem {
  PrefillTile<T> tile;
  std::vector<float> output;  // [rows, padded_dim]
  std::vector<Running> state;
};

template <typename T>
[[gnu::noinline]] void prefill_tile_with(const AttentionArgs<T>& a, PrefillItem<T>& w, const Span& s, int64_t kv_head,
                                         int64_t q0, int64_t q1) {
  int64_t group = a.num_heads / a.num_kv_heads, dim = a.head_dim, rows = (q1 - q0) * group, padded = padded_dim(dim);
  w.tile.start(rows, dim);
  w.output.assign(rows * padded, 0.0f);
  w.state.assign(rows, Running{{}, kMinusInf});
  for (int64_t q = q0; q < q1; q++)
    w.tile.set_queries((q - q0) * group, a.query + (s.first_row + q) * a.query_stride + kv_head * group * dim,
                       group * dim);
  int64_t offset = s.seq_len - s.query_len;  // position of query 0
  int64_t begin = a.window > 0 ? std::max<int64_t>(0, offset + q0 - a.window + 1) : 0;
  for (int64_t t = begin / kTileTokens * kTileTokens; t < offset + q1; t += kTileTokens) {
    int64_t count = std::min(kTileTokens, s.seq_len - t), places[kTileTokens];
    find_rows(a, s, t, t + count, places);
    w.tile.unpack(a.keys + kv_head * dim, a.values + kv_head * dim, places, count);
    int64_t last_of_first = offset + q0 - t;  // the last token that the first query sees
    for (int64_t row = 0; row < rows; row += kStripRows) {
      int64_t count_rows = std::min(kStripRows, rows - row);
      if (last_of_first + (row + count_rows - 1) / group < 0) continue;  // the whole strip comes before the tile
      w.tile.score(row, count_rows);
      for (int64_t r = 0; r < count_rows; r++) {
        int64_t last = last_of_first + (row + r) / group, first = a.window > 0 ? last - a.window + 1 : 0;
        float *scores = w.tile.scores() + r * kTileTokens, *output = w.output.data() + (row + r) * padded;
        auto* weights = w.tile.weights() + r * kTileTokens;
        if (a.soft_cap > 0) weigh_row<true>(a, scores, weights, first, last, w.state[row + r], output);
        else weigh_row<false>(a, scores, weights, first, last, w.state[row + r], output);
      }
      w.tile.mix(count_rows, w.output.data() + row * padded);
    }
  }
  for (int64_t q = q0, r = 0; q < q1; q++) {
    T* target = a.output + ((s.first_row + q) * a.num_heads + kv_head * group) * dim;
    for (int64_t end = r + group; r < end; r++, target += dim) {
      f32x16 norm = splat(1.0f / sum(w.state[r].sums));
      for (int64_t d = 0; d < dim; d += kLanes) store(target + d, load(w.output.data() + r * padded + d) * norm);
    }
  }
}

// Queries [q0, q1) of a sequence, all query heads of one KV head. What a thread works with is looked up here, once.
template <typename T>
void prefill_tile(const AttentionArgs<T>& a, const Span& s, int64_t kv_head, int64_t q0, int64_t q1) {
  static thread_local PrefillItem<T> item;
  prefill_tile_with(a, item, s, kv_head, q0, q1);
}

}  // namespace pagedllm
