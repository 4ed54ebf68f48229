// Few queries over their KV, which is bound by reading it: each key and value row is read once for all query heads that
// share it.
//
// A work item is one query, a stretch of positions and some KV heads: all of them if there is work enough for every
// thread, because their rows lie side by side in memory and what is bound by memory wants to read it in order. It takes
// the positions in groups, while the next group's rows are on their way.
#pragma once

#include "decode_scores.h"

namespace pagedllm {

// What mix_values works on: R heads of one KV head over 16 rows.
template <typename T>
struct MixArgs {
  const T* values;
  const int64_t* rows;
  const T* const* ahead;  // what to ask for meanwhile, from `offset` on
  int64_t offset;
  const float* weights;  // [R, stride]
  const bf16* rounded;   // the same in bfloat16, where values are mixed by those
  int64_t stride;
  float* mixed;  // [R, dim], added to
  int64_t dim;
};

// W registers of outputs from d0 on.
template <typename T, int R, int W>
void mix_outputs(const MixArgs<T>& m, int64_t d0) {
  native sums[R][W];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < W; v++) sums[r][v] = load_native(m.mixed + r * m.dim + d0 + v * kNative);
  for (int64_t i = 0; i < kLanes; i++) {
    native value[W];
    for (int v = 0; v < W; v++) value[v] = load_native(m.values + m.rows[i] + d0 + v * kNative);
    for (int r = 0; r < R; r++) {
      native weight = m.weights[r * m.stride + i] - native{};
      for (int v = 0; v < W; v++) sums[r][v] += value[v] * weight;
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < W; v++) std::memcpy(m.mixed + r * m.dim + d0 + v * kNative, &sums[r][v], sizeof(native));
}

#if defined(__AVX512BF16__)

// 32 * W outputs from d0 on, in pairs of rows, interleaved so that one instruction adds both: weights are rounded to
// bfloat16, as flash attention does in this precision, while their sum is not. Interleaving goes by lanes of 128 bits: of
// each eight outputs, the first four end in `low`, the others in `high`.
template <int R, int W>
void mix_pairs(const MixArgs<bf16>& m, int64_t d0) {
  __m512 low[R][W], high[R][W];
  for (int r = 0; r < R; r++)
    for (int w = 0; w < W; w++) low[r][w] = high[r][w] = _mm512_setzero_ps();
  for (int64_t i = 0; i < kLanes; i += 2) {
    const bf16 *first = m.values + m.rows[i] + d0, *second = m.values + m.rows[i + 1] + d0;
    for (int j = 0; j < 2; j++) prefetch_row<32 * W>(m.ahead[i + j] + m.offset + d0, 32 * W);
    __m512bh even[W], odd[W];
    for (int w = 0; w < W; w++) {
      __m512i x = _mm512_loadu_si512(first + 32 * w), y = _mm512_loadu_si512(second + 32 * w);
      even[w] = (__m512bh)_mm512_unpacklo_epi16(x, y), odd[w] = (__m512bh)_mm512_unpackhi_epi16(x, y);
    }
    for (int r = 0; r < R; r++) {
      int32_t pair;
      std::memcpy(&pair, m.rounded + r * m.stride + i, 4);
      __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
      for (int w = 0; w < W; w++) {
        low[r][w] = _mm512_dpbf16_ps(low[r][w], even[w], both);
        high[r][w] = _mm512_dpbf16_ps(high[r][w], odd[w], both);
      }
    }
  }
  const __m512i lower = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i upper = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  for (int r = 0; r < R; r++)
    for (int w = 0; w < W; w++) {
      float* out = m.mixed + r * m.dim + d0 + 32 * w;
      store(out, load(out) + (f32x16)_mm512_permutex2var_ps(low[r][w], lower, high[r][w]));
      store(out + 16, load(out + 16) + (f32x16)_mm512_permutex2var_ps(low[r][w], upper, high[r][w]));
    }
}

#endif

// mixed[r] += sum over rows of weight * value.
template <typename T, int R, int D>
void mix_values(const MixArgs<T>& m) {
  const int64_t dim = dim_of<D>(m.dim);
  int64_t d0 = 0;
#if defined(__AVX512BF16__)
  if constexpr (std::is_same_v<T, bf16>) {
    for (; d0 + 64 <= dim; d0 += 64) mix_pairs<R, 2>(m, d0);
    for (; d0 + 32 <= dim; d0 += 32) mix_pairs<R, 1>(m, d0);
  }
#endif
  for (int64_t i = 0; d0 < dim && i < kLanes; i++) prefetch_row<0>(m.ahead[i] + m.offset + d0, dim - d0);
  constexpr int kWidth = R <= 3 ? 4 : 2;  // as many registers of outputs as leave all sums in 16
  for (; d0 + kWidth * kNative <= dim; d0 += kWidth * kNative) mix_outputs<T, R, kWidth>(m, d0);
  for (; d0 < dim; d0 += kNative) mix_outputs<T, R, 1>(m, d0);
}

template <typename T, int R, int D>
void mix_heads(const AttentionArgs<T>& a, DecodeItem<T>& w, int64_t kv_head, int64_t head, int64_t begin) {
  const int64_t dim = dim_of<D>(a.head_dim), first = head * w.stride + begin;
  mix_values<T, R, D>({a.values + kv_head * dim, w.rows.data() + begin, w.ahead[1].data() + begin, kv_head * dim,
                       w.scores.data() + first, w.rounded.data() + first, w.stride, w.mixed.data() + head * dim, dim});
}

// What to ask for meanwhile: from the keys on to the values, and from those to the keys of the stretch that comes next.
template <typename T>
void plan_ahead(const AttentionArgs<T>& a, DecodeItem<T>& w, const Span& next, int64_t next_begin, int64_t next_end) {
  int64_t following[kAhead], num_following = std::min(next_end - next_begin, kAhead);
  find_rows(a, next, next_begin, next_begin + num_following, following);
  for (auto& ahead : w.ahead) ahead.resize(w.stride);
  for (int64_t i = 0; i < w.stride; i++) {
    int64_t later = i + kAhead, past = later - w.stride;
    w.ahead[0][i] = past < 0 ? a.keys + w.rows[later] : a.values + w.rows[std::min(past, w.stride - 1)];
    w.ahead[1][i] = past < 0 ? a.values + w.rows[later] : a.keys + following[std::min(past, num_following - 1)];
  }
}

// A stretch of one row: positions [begin, end) of a sequence.
struct Stretch {
  Span span;
  int64_t begin, end;
};

// One query row over a stretch; next is the one that this thread will probably read after it. partial is [heads], acc is
// [heads, head_dim], not normalised yet.
template <typename T, int D>
void decode_stretch_of(const AttentionArgs<T>& a, DecodeItem<T>& w, const Stretch& stretch, const Stretch& next,
                       int64_t row, int64_t kv_first, int64_t kv_last, Partial* partial, float* acc) {
  w.group = a.num_heads / a.num_kv_heads, w.kv_first = kv_first, w.kv_last = kv_last;
  w.query = a.query + row * a.query_stride + kv_first * w.group * a.head_dim;
  w.count = stretch.end - stretch.begin;
  w.stride = (w.count + kLanes - 1) / kLanes * kLanes;
  w.rows.resize(w.stride);
  find_rows(a, stretch.span, stretch.begin, stretch.end, w.rows.data());
  std::fill(w.rows.begin() + w.count, w.rows.end(), w.rows[w.count - 1]);
  plan_ahead(a, w, next.span, next.begin, next.end);
  int64_t size = w.num_heads() * a.head_dim;
  w.scores.resize(w.num_heads() * w.stride), w.rounded.resize(w.num_heads() * w.stride);
  w.wide.resize(size), w.mixed.assign(size, 0.0f);
  if constexpr (!kMixesPairs<T>)
    for (int64_t d = 0; d < size; d += kLanes) store(w.wide.data() + d, load(w.query + d));
  score_stretch<T, D>(a, w, stretch.begin);
  for (int64_t h = 0; h < w.num_heads(); h++) {
    float* line = w.scores.data() + h * w.stride;
    f32x16 largest = load(line);
    for (int64_t i = kLanes; i < w.stride; i += kLanes) {
      f32x16 next = load(line + i);
      largest = next > largest ? next : largest;
    }
    float best = highest(largest);
    f32x16 total = {};
    for (int64_t i = 0; i < w.stride; i += kLanes) {
      f32x16 weight = exp(load(line + i) - best);
      store(line + i, weight);
      if constexpr (kMixesPairs<T>) store(w.rounded.data() + h * w.stride + i, weight);
      total += weight;
    }
    partial[h] = {best, sum(total)};
  }
  for (int64_t i = 0; i < w.stride; i += kLanes)
    for_known_heads(w, [&](int64_t kv, int64_t head, auto heads) {
      mix_heads<T, decltype(heads)::value, D>(a, w, kv, head, i);
    });
  std::copy(w.mixed.begin(), w.mixed.end(), acc);
}

// decode_stretch_of the head's size. What a thread works with is looked up here, once.
template <typename T>
void decode_stretch(const AttentionArgs<T>& a, const Stretch& stretch, const Stretch& next, int64_t row,
                    int64_t kv_first, int64_t kv_last, Partial* partial, float* acc) {
  static thread_local DecodeItem<T> item;
  auto run = a.head_dim == 64    ? decode_stretch_of<T, 64>
             : a.head_dim == 128 ? decode_stretch_of<T, 128>
                                 : decode_stretch_of<T, 0>;
  run(a, item, stretch, next, row, kv_first, kv_last, partial, acc);
}

}  // namespace pagedllm
