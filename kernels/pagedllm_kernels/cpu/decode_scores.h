// Scores of one query over a stretch of positions: each key is read once for all heads that share it.
#pragma once

#include "decode_item.h"
#include "tiles.h"

namespace pagedllm {

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

// Products [begin, end) of a head to scores; those past the stretch weigh nothing.
template <typename T>
void finish_scores(const AttentionArgs<T>& a, DecodeItem<T>& w, int64_t head, int64_t begin, int64_t end) {
  float* row = w.scores.data() + head * w.stride;
  for (int64_t i = begin; i < end; i += kLanes) store(row + i, load(row + i) * a.scale);
  if (a.soft_cap > 0)
    for (int64_t i = begin; i < end; i++) row[i] = capped(row[i], a.soft_cap);
  for (int64_t i = std::max(begin, w.count); i < end; i++) row[i] = kMinusInf;
}

template <typename T, int R, int D>
void score_heads(const AttentionArgs<T>& a, DecodeItem<T>& w, int64_t kv_head, int64_t head, int64_t begin) {
  const int64_t dim = dim_of<D>(a.head_dim);
  float products[R][kLanes];
  dot_keys<T, R, D>(a.keys + kv_head * dim, w.query + head * dim, w.wide.data() + head * dim, dim, w.rows.data() + begin,
                    w.ahead[0].data() + begin, kv_head * dim, products);
  for (int r = 0; r < R; r++) {
    store(w.scores.data() + (head + r) * w.stride + begin, load(products[r]));
    finish_scores(a, w, head + r, begin, begin + kLanes);
  }
}

#if defined(__AMX_BF16__)

// By tiles, 16 keys are rows as they lie in the cache, and the queries of a part are columns. The sums of a key
// lie side by side; they are turned only when all are there, because what a tile has just stored is slow to load.

// Queries of a part by pairs of dimensions, [head_dim / 2, kPartHeads] pairs; zeros where there are fewer heads.
inline void pair_queries(const bf16* query, bf16* pairs, int64_t heads, int64_t dim) {
  for (int64_t d = 0; d < dim; d += 2)
    for (int64_t h = 0; h < kPartHeads; h++)
      for (int64_t k = 0; k < 2; k++) pairs[(d * kPartHeads) + 2 * h + k] = h < heads ? query[h * dim + d + k] : bf16{};
}

// Lane j of out[h] is sums[j][h].
inline void turn_sums(const float (*sums)[kPartHeads], f32x16 out[kPartHeads]) {
  __m512 v[4];
  for (int i = 0; i < 4; i++) v[i] = _mm512_loadu_ps(sums[4 * i]);
  for (int i = 0; i < 2; i++) {
    // Heads 2 i and 2 i + 1 of the first eight keys and of the others.
    __m512i lanes = (__m512i)(i32x16{0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29} + 2 * i);
    __m512d first = _mm512_castps_pd(_mm512_permutex2var_ps(v[0], lanes, v[1]));
    __m512d second = _mm512_castps_pd(_mm512_permutex2var_ps(v[2], lanes, v[3]));
    out[2 * i] = (f32x16)_mm512_shuffle_f64x2(first, second, 0x44);
    out[2 * i + 1] = (f32x16)_mm512_shuffle_f64x2(first, second, 0xEE);
  }
}

template <int D>
void score_by_tiles(const AttentionArgs<bf16>& a, DecodeItem<bf16>& w) {
  const int64_t dim = dim_of<D>(a.head_dim), key_bytes = a.num_kv_heads * dim * sizeof(bf16);
  w.pairs.resize(w.num_parts() * dim * kPartHeads), w.sums.resize(w.num_parts() * w.stride * kPartHeads);
  int64_t part = 0;
  for_heads(w, [&](int64_t, int64_t head, int64_t heads) {
    pair_queries(w.query + head * dim, &w.pairs[part++ * dim * kPartHeads], heads, dim);
  });
  TileScope::set_up_scores();
  for (int64_t i = 0; i < w.stride; i += kLanes) {
    part = 0;
    for_heads(w, [&](int64_t kv, int64_t, int64_t) {
      const bf16 *keys = a.keys + w.rows[i] + kv * dim, *pairs = &w.pairs[part * dim * kPartHeads];
      _tile_zero(0);
      for (int64_t d = 0; d < dim; d += kTileDepth) {
        _tile_loadd(1, keys + d, key_bytes);
        _tile_loadd(2, pairs + d * kPartHeads, 4 * kPartHeads);
        _tile_dpbf16ps(0, 1, 2);
      }
      _tile_stored(0, &w.sums[(part++ * w.stride + i) * kPartHeads], 4 * kPartHeads);
      for (int64_t j = 0; j < kLanes; j++) prefetch_row<D>(w.ahead[0][i + j] + kv * dim, dim);
    });
  }
  part = 0;
  for_heads(w, [&](int64_t, int64_t head, int64_t heads) {
    for (int64_t i = 0; i < w.stride; i += kLanes) {
      f32x16 turned[kPartHeads];
      turn_sums(reinterpret_cast<const float(*)[kPartHeads]>(&w.sums[(part * w.stride + i) * kPartHeads]), turned);
      for (int64_t h = 0; h < heads; h++) store(&w.scores[(head + h) * w.stride + i], turned[h]);
    }
    part++;
  });
  for (int64_t h = 0; h < w.num_heads(); h++) finish_scores(a, w, h, 0, w.stride);
}

#endif

// Scores of all heads of the item; begin is the position of its first row.
template <typename T, int D>
void score_stretch(const AttentionArgs<T>& a, DecodeItem<T>& w, int64_t begin) {
#if defined(__AMX_BF16__)
  // Sixteen keys lie one below the other if no block ends among them. This goes by positions, not by where blocks happen
  // to lie: the same sequence gets the same bits wherever it is.
  if constexpr (std::is_same_v<T, bf16>)
    if (has_tiles() && a.head_dim % kTileDepth == 0 && a.block_size % kLanes == 0 && begin % kLanes == 0)
      return score_by_tiles<D>(a, w);
#endif
  for (int64_t i = 0; i < w.stride; i += kLanes)
    for_known_heads(w, [&](int64_t kv, int64_t head, auto heads) {
      score_heads<T, decltype(heads)::value, D>(a, w, kv, head, i);
    });
}

}  // namespace pagedllm
