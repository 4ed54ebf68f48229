// Matrix products whose weights are read once and in order, which is what few rows are bound by.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "tiles.h"

namespace pagedllm {

// --- Any CPU: tiles as high as there are registers for, two registers wide ---

#if defined(__AVX512F__)
constexpr int kTileRows = 12;
#else
constexpr int kTileRows = 6;
#endif
constexpr int kTileOutputs = 2 * kNative;

template <typename T>
void store_first(T* out, const float* line, int64_t count) {
  for (int64_t i = 0; i < count; i++) store_one(out + i, line[i]);
}
inline void store_first(Sum out, const float* line, int64_t count) {
  for (int64_t i = 0; i < count; i++) out.values[i] += line[i];
}

// sums[r] += x[r, k] * the weights of input k; in bfloat16 of the inputs 2 k and 2 k + 1.
template <int R>
inline void multiply_input(native sums[R][2], const float* x, const float* weights, int64_t depth, int64_t k) {
  native low = load_native(weights + k * kPanel), high = load_native(weights + k * kPanel + kNative);
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) {
    native value = x[r * depth + k] - native{};
    sums[r][0] += low * value;
    sums[r][1] += high * value;
  }
}
template <int R>
inline void multiply_input(native sums[R][2], const float* x, const bf16* weights, int64_t depth, int64_t k) {
  native_bits low = load_pairs(weights + 2 * k * kPanel), high = load_pairs(weights + 2 * (k * kPanel + kNative));
  native low_first = first_of(low), high_first = first_of(high);
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) {
    native value = x[r * depth + 2 * k] - native{};
    sums[r][0] += low_first * value;
    sums[r][1] += high_first * value;
  }
  native low_second = second_of(low), high_second = second_of(high);
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) {
    native value = x[r * depth + 2 * k + 1] - native{};
    sums[r][0] += low_second * value;
    sums[r][1] += high_second * value;
  }
}

// Some rows as floats: they are read once for every output, and so converted before. Valid until the thread's next call.
inline const float* as_floats(const float* x, int64_t) { return x; }
inline const float* as_floats(const bf16* x, int64_t size) {
  static thread_local std::vector<float> floats;
  floats.resize(size);
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store(&floats[i], load(x + i));
  for (; i < size; i++) floats[i] = to_float(x[i]);
  return floats.data();
}

template <typename T, typename O, int R>
void multiply_tile(const PanelArgs<T, O>& a, int64_t row) {
  constexpr int64_t kGroup = 4 / sizeof(T);
  const float* x = as_floats(a.x + row * a.depth, R * a.depth);
  for (int64_t first = 0; first < a.count; first += kTileOutputs) {
    int64_t count = std::min<int64_t>(a.count - first, kTileOutputs);
    native sums[R][2] = {};
    for (int64_t k = 0; k < a.depth / kGroup; k++) multiply_input<R>(sums, x, a.panel + first * kGroup, a.depth, k);
    for (int r = 0; r < R; r++) {
      float line[kTileOutputs];
      std::memcpy(line, sums[r], sizeof line);
      for (int64_t i = 0; a.bias && i < count; i++) line[i] += a.bias[first + i];
      store_first(a.out + (row + r) * a.stride + first, line, count);
    }
  }
}

// --- bfloat16 on CPUs that multiply it: the panel's two registers at once ---

#if defined(__AVX512BF16__)

template <typename O, int R>
void multiply_bf16_tile(const PanelArgs<bf16, O>& a, int64_t row) {
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

#endif

template <typename T, typename O, int R>
void multiply_panel(const PanelArgs<T, O>& a, int64_t row) {
#if defined(__AVX512BF16__)
  if constexpr (std::is_same_v<T, bf16>) return multiply_bf16_tile<O, R>(a, row);
#endif
  multiply_tile<T, O, R>(a, row);
}

// Calls the function for tiles of R rows, with R known when it is compiled.
template <typename T, typename O, int R = kTileRows>
void multiply_rows(const PanelArgs<T, O>& a, int64_t row, int64_t count) {
  if constexpr (R > 1) {
    if (count < R) return multiply_rows<T, O, R - 1>(a, row, count);
  }
  multiply_panel<T, O, R>(a, row);
}

// Where block i of some rows begins, if there are so many blocks: whole tiles, where tiles have a height of their own.
inline int64_t block_begin(int64_t num_rows, int64_t i, int64_t num_blocks) {
  int64_t units = (num_rows + kRowUnit - 1) / kRowUnit;
  return std::min(num_rows, units * i / num_blocks * kRowUnit);
}

// Rows [begin, end) of one panel, in tiles of nearly equal height. A TileScope must live.
template <typename T, typename O>
void multiply_rows_of_panel(const PanelArgs<T, O>& a, int64_t begin, int64_t end) {
#if defined(__AMX_BF16__)
  if constexpr (std::is_same_v<T, bf16>)
    if (has_tiles() && a.depth % kTileDepth == 0) return multiply_panel_by_tiles(a, begin, end);
#endif
  int64_t tiles = (end - begin + kTileRows - 1) / kTileRows;
  for (int64_t i = 0; i < tiles; i++) {
    int64_t first = begin + (end - begin) * i / tiles, last = begin + (end - begin) * (i + 1) / tiles;
    multiply_rows(a, first, last - first);
  }
}

}  // namespace pagedllm
