// Few queries over their KV, which is bound by reading it: each key and value row is read once for all query heads that
// share it.
//
// A work item is one query, a stretch of positions and some KV heads: all of them if there is work enough for every
// thread, because their rows lie side by side in memory and what is bound by memory wants to read it in order. It takes
// the positions in groups, while the next group's rows are on their way.
#pragma once

#include "attention.h"

namespace pagedllm {

constexpr int64_t kAhead = 32;  // rows between asking for one and using it

template <typename T>
struct DecodeItem {
  const T* query;   // of the first head
  int64_t kv_first, kv_last, group, count;
  std::vector<int64_t> rows;          // [stride]
  std::vector<const T*> ahead[2];     // [stride]: what to ask for at each position, while keys and while values are read
  int64_t stride;                     // positions, rounded up to whole vectors: the last one again, which weighs nothing
  std::vector<float> scores, mixed;   // per head: [stride] and [head_dim]
  std::vector<float> wide;            // the query in float32
  std::vector<bf16> rounded;          // the weights in bfloat16
  int64_t num_heads() const { return (kv_last - kv_first) * group; }
};

// A head's size: known when this is compiled if D is not 0.
template <int D>
inline int64_t dim_of(int64_t head_dim) {
  return D > 0 ? D : head_dim;
}

// Asks for a row of one KV head ahead of time, into the second level of cache: the first one has room for few misses at
// a time, which is why asking there reads random blocks at half the speed. Between other work, not in bursts.
template <int D, typename T>
inline void prefetch_row(const T* row, int64_t head_dim) {
  for (int64_t d = 0; d < dim_of<D>(head_dim); d += 64 / int64_t(sizeof(T))) __builtin_prefetch(row + d, 0, 2);
}

#if defined(__AVX512BF16__)

// In each lane of 128 bits of the result, the sum of what v[0], v[1], v[2] and v[3] have there.
inline __m512 sum_lanes(const __m512 v[4]) {
  __m512 first = _mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
  __m512 second = _mm512_add_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
  __m512d a = _mm512_castps_pd(first), b = _mm512_castps_pd(second);
  return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
}

// Four results of sum_lanes to the sums of 16 vectors.
inline __m512 join_lanes(const __m512 v[4]) {
  __m512 first = _mm512_add_ps(_mm512_shuffle_f32x4(v[0], v[1], 0x88), _mm512_shuffle_f32x4(v[0], v[1], 0xDD));
  __m512 second = _mm512_add_ps(_mm512_shuffle_f32x4(v[2], v[3], 0x88), _mm512_shuffle_f32x4(v[2], v[3], 0xDD));
  return _mm512_add_ps(_mm512_shuffle_f32x4(first, second, 0x88), _mm512_shuffle_f32x4(first, second, 0xDD));
}

// Some of 32 elements: the first `count`, if those are fewer; else zeros.
inline __m512i load_some(const bf16* p, int64_t count) {
  return count >= 32 ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi16(~0u >> (32 - count), p);
}

// dot_keys in bfloat16, four keys at a time, whose sums stay in registers.
template <int R, int D>
void dot_keys_bf16(const bf16* keys, const bf16* query, int64_t head_dim, const int64_t* rows, const bf16* const* ahead,
                   int64_t offset, float (*out)[kLanes]) {
  const int64_t dim = dim_of<D>(head_dim);
  __m512 quads[R][4];
#pragma GCC unroll 4
  for (int64_t j = 0; j < 4; j++) {
    const bf16* key[4];
    for (int k = 0; k < 4; k++) {
      key[k] = keys + rows[4 * j + k];
      prefetch_row<D>(ahead[4 * j + k] + offset, dim);
    }
    __m512 sums[R][4];
    for (int r = 0; r < R; r++)
      for (int k = 0; k < 4; k++) sums[r][k] = _mm512_setzero_ps();
#pragma GCC unroll 4
    for (int64_t d = 0; d < dim; d += 32) {
      __m512i part[4];
      for (int k = 0; k < 4; k++) part[k] = load_some(key[k] + d, dim - d);
      for (int r = 0; r < R; r++) {
        __m512bh q = (__m512bh)load_some(query + r * dim + d, dim - d);
        for (int k = 0; k < 4; k++) sums[r][k] = _mm512_dpbf16_ps(sums[r][k], (__m512bh)part[k], q);
      }
    }
    for (int r = 0; r < R; r++) quads[r][j] = sum_lanes(sums[r]);
  }
  for (int r = 0; r < R; r++) store(out[r], (f32x16)join_lanes(quads[r]));
}

#endif

// Whether the CPU multiplies pairs of what the KV is made of: queries and weights then are of its type too.
template <typename T>
constexpr bool kMixesPairs =
#if defined(__AVX512BF16__)
    std::is_same_v<T, bf16>;
#else
    false;
#endif

// Scores of R heads of one KV head with 16 keys: lane j of out[r] belongs to rows[j].
template <typename T, int R, int D>
void dot_keys(const T* keys, const T* query, const float* wide, int64_t head_dim, const int64_t* rows,
              const T* const* ahead, int64_t offset, float (*out)[kLanes]) {
#if defined(__AVX512BF16__)
  if constexpr (std::is_same_v<T, bf16>) {
    dot_keys_bf16<R, D>(keys, query, head_dim, rows, ahead, offset, out);
    return;
  }
#endif
  const int64_t dim = dim_of<D>(head_dim);
  // As many keys at a time as leave all sums in 16 registers.
  constexpr int kKeys = R <= 3 ? 4 : R <= 6 ? 2 : 1;
  for (int64_t j = 0; j < kLanes; j += kKeys) {
    const T* key[kKeys];
    for (int k = 0; k < kKeys; k++) {
      key[k] = keys + rows[j + k];
      prefetch_row<D>(ahead[j + k] + offset, dim);
    }
    native sums[R][kKeys] = {};
    for (int64_t d = 0; d < dim; d += kNative) {
      native part[kKeys];
      for (int k = 0; k < kKeys; k++) part[k] = load_native(key[k] + d);
      for (int r = 0; r < R; r++) {
        native q = load_native(wide + r * dim + d);
        for (int k = 0; k < kKeys; k++) sums[r][k] += part[k] * q;
      }
    }
    for (int r = 0; r < R; r++)
      for (int k = 0; k < kKeys; k++) out[r][j + k] = sum_native(sums[r][k]);
  }
}

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
void score_heads(const AttentionArgs<T>& a, DecodeItem<T>& w, int64_t kv_head, int64_t head, int64_t begin) {
  const int64_t dim = dim_of<D>(a.head_dim);
  float products[R][kLanes];
  dot_keys<T, R, D>(a.keys + kv_head * dim, w.query + head * dim, w.wide.data() + head * dim, dim, w.rows.data() + begin,
                    w.ahead[0].data() + begin, kv_head * dim, products);
  for (int r = 0; r < R; r++) {
    float* row = w.scores.data() + (head + r) * w.stride + begin;
    store(row, load(products[r]) * a.scale);
    if (a.soft_cap > 0)
      for (int64_t j = 0; j < kLanes; j++) row[j] = capped(row[j], a.soft_cap);
    for (int64_t j = w.count - begin; j < kLanes; j++) row[j] = kMinusInf;
  }
}

template <typename T, int R, int D>
void mix_heads(const AttentionArgs<T>& a, DecodeItem<T>& w, int64_t kv_head, int64_t head, int64_t begin) {
  const int64_t dim = dim_of<D>(a.head_dim), first = head * w.stride + begin;
  mix_values<T, R, D>({a.values + kv_head * dim, w.rows.data() + begin, w.ahead[1].data() + begin, kv_head * dim,
                       w.scores.data() + first, w.rounded.data() + first, w.stride, w.mixed.data() + head * dim, dim});
}

// Calls a function for up to 4 heads of one KV head at a time, for each KV head of the item.
template <typename T, typename F>
void for_heads(const DecodeItem<T>& w, F f) {
  for (int64_t kv = w.kv_first; kv < w.kv_last; kv++)
    for (int64_t done = 0; done < w.group; done += 4)
      f(kv, (kv - w.kv_first) * w.group + done, std::min<int64_t>(4, w.group - done));
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
  for (int64_t i = 0; i < w.stride; i += kLanes)
    for_heads(w, [&](int64_t kv, int64_t head, int64_t heads) {
      (heads == 4   ? score_heads<T, 4, D>
       : heads == 3 ? score_heads<T, 3, D>
       : heads == 2 ? score_heads<T, 2, D>
                    : score_heads<T, 1, D>)(a, w, kv, head, i);
    });
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
    for_heads(w, [&](int64_t kv, int64_t head, int64_t heads) {
      (heads == 4   ? mix_heads<T, 4, D>
       : heads == 3 ? mix_heads<T, 3, D>
       : heads == 2 ? mix_heads<T, 2, D>
                    : mix_heads<T, 1, D>)(a, w, kv, head, i);
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
