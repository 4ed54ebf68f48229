// Matrix products whose weights are read once and in order, which is what few rows are bound by.
#pragma once

#include <algorithm>

#include "vec.h"

namespace pagedllm {

// --- bfloat16 on CPUs that multiply it ---
//
// The weight lies in panels of 32 outputs: for each pair of inputs, the pairs of all 32 side by side (two registers).
// A tile of up to 12 rows keeps its sums in registers while it walks down a panel, so a panel comes from memory once and
// then from cache. Blocks of rows bound what has to stay there.

constexpr int64_t kPanel = 32;
constexpr int kTileRows = 12;

inline int64_t num_panels(int64_t num_out) { return (num_out + kPanel - 1) / kPanel; }

// Panel p of a row-major weight [num_out, depth]; outputs past the end are zero.
inline void pack_panel(const bf16* weight, bf16* packed, int64_t num_out, int64_t depth, int64_t p) {
  bf16* panel = packed + p * kPanel * depth;
  for (int64_t i = 0; i < kPanel; i++) {
    int64_t n = p * kPanel + i;
    for (int64_t k = 0; k < depth; k++) panel[(k / 2 * kPanel + i) * 2 + k % 2] = n < num_out ? weight[n * depth + k] : bf16{0};
  }
}

#if defined(__AVX512BF16__)

template <typename O>
struct PanelArgs {
  const bf16* x;  // [rows, depth]
  const bf16* panel;
  const float* bias;  // [count] or null
  O out;              // [rows, stride], at the panel's first output
  int64_t depth, stride, count;
};

// Where products are added to what is there.
struct Sum {
  float* values;
  Sum operator+(int64_t i) const { return {values + i}; }
};

inline void store_first(bf16* out, __m512 v, __mmask16 lanes) {
  _mm256_mask_storeu_epi16(out, lanes, (__m256i)_mm512_cvtneps_pbh(v));
}
inline void store_first(float* out, __m512 v, __mmask16 lanes) { _mm512_mask_storeu_ps(out, lanes, v); }
inline void store_first(Sum out, __m512 v, __mmask16 lanes) {
  store_first(out.values, _mm512_add_ps(_mm512_maskz_loadu_ps(lanes, out.values), v), lanes);
}

template <typename O, int R>
void multiply_panel(const PanelArgs<O>& a, int64_t row) {
  __m512 sums[R][2];
  __m512 start[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  if (a.bias)
    for (int j = 0; j < 2; j++) {
      int64_t left = std::clamp<int64_t>(a.count - 16 * j, 0, 16);
      start[j] = _mm512_maskz_loadu_ps(__mmask16((1u << left) - 1), a.bias + 16 * j);
    }
  for (int r = 0; r < R; r++)
    for (int j = 0; j < 2; j++) sums[r][j] = start[j];
  const bf16* x = a.x + row * a.depth;
  for (int64_t k = 0; k < a.depth / 2; k++) {
    __m512bh low = (__m512bh)_mm512_loadu_si512(a.panel + k * 64);
    __m512bh high = (__m512bh)_mm512_loadu_si512(a.panel + k * 64 + 32);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      int32_t pair;
      std::memcpy(&pair, x + r * a.depth + 2 * k, 4);
      __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
      sums[r][0] = _mm512_dpbf16_ps(sums[r][0], low, both);
      sums[r][1] = _mm512_dpbf16_ps(sums[r][1], high, both);
    }
  }
  for (int r = 0; r < R; r++)
    for (int j = 0; j < 2; j++) {
      int64_t left = std::clamp<int64_t>(a.count - 16 * j, 0, 16);
      store_first(a.out + (row + r) * a.stride + 16 * j, sums[r][j], __mmask16((1u << left) - 1));
    }
}

// Rows [begin, end) of one panel, in tiles of nearly equal height.
template <typename O>
void multiply_rows_of_panel(const PanelArgs<O>& a, int64_t begin, int64_t end) {
  using Tile = void (*)(const PanelArgs<O>&, int64_t);
  static constexpr Tile kTiles[kTileRows + 1] = {
      nullptr,           multiply_panel<O, 1>, multiply_panel<O, 2>, multiply_panel<O, 3>,  multiply_panel<O, 4>,
      multiply_panel<O, 5>, multiply_panel<O, 6>, multiply_panel<O, 7>, multiply_panel<O, 8>,  multiply_panel<O, 9>,
      multiply_panel<O, 10>, multiply_panel<O, 11>, multiply_panel<O, 12>};
  int64_t tiles = (end - begin + kTileRows - 1) / kTileRows;
  for (int64_t i = 0; i < tiles; i++) {
    int64_t first = begin + (end - begin) * i / tiles, last = begin + (end - begin) * (i + 1) / tiles;
    kTiles[last - first](a, first);
  }
}

#endif

// --- Any type and CPU: up to 4 rows, one row of the weight after the other ---

constexpr int kMaxGemvRows = 4;

template <typename T, int M>
void gemv_rows(const T* x, const T* weight, float* out, int64_t depth, int64_t num_out, int64_t n0, int64_t n1) {
  for (int64_t n = n0; n < n1; n++) {
    const T* line = weight + n * depth;
    // Two sums per row, so that one multiplication need not wait for the one before it.
    f32x16 sums[M][2] = {};
    int64_t k = 0;
    for (; k + 2 * kLanes <= depth; k += 2 * kLanes)
      for (int j = 0; j < 2; j++) {
        f32x16 w = load(line + k + j * kLanes);
        for (int m = 0; m < M; m++) sums[m][j] += w * load(x + m * depth + k + j * kLanes);
      }
    for (int m = 0; m < M; m++) {
      float total = sum(sums[m][0] + sums[m][1]);
      for (int64_t j = k; j < depth; j++) total += to_float(line[j]) * to_float(x[m * depth + j]);
      out[m * num_out + n] = total;
    }
  }
}

}  // namespace pagedllm
