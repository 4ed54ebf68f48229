// How weights lie in memory for products that read them once and in order, which is what few rows are bound by.
#pragma once

#include <algorithm>

#include "vec.h"

namespace pagedllm {

// The weight lies in panels of 32 outputs: for each input, the weights of all 32 side by side; in bfloat16 the inputs go
// in pairs, so that a pair fills 32 bits. A tile of a few rows keeps its sums in registers while it walks down a panel,
// so a panel comes from memory once and then from cache. Blocks of rows bound what has to stay there.

constexpr int64_t kPanel = 32;

inline int64_t num_panels(int64_t num_out) { return (num_out + kPanel - 1) / kPanel; }

// Panel p of a row-major weight [num_out, depth]; outputs past the end are zero.
template <typename T>
void pack_panel(const T* weight, T* packed, int64_t num_out, int64_t depth, int64_t p) {
  constexpr int64_t kGroup = 4 / sizeof(T);
  T* panel = packed + p * kPanel * depth;
  for (int64_t i = 0; i < kPanel; i++) {
    int64_t n = p * kPanel + i;
    for (int64_t k = 0; k < depth; k++)
      panel[(k / kGroup * kPanel + i) * kGroup + k % kGroup] = n < num_out ? weight[n * depth + k] : T{};
  }
}

template <typename T, typename O>
struct PanelArgs {
  const T* x;  // [rows, depth]
  const T* panel;
  const float* bias;  // [count] or null
  O out;              // [rows, stride], at the panel's first output
  int64_t depth, stride, count;
  const T* next = nullptr;  // the panel that comes after this one, if it is in memory and worth asking for ahead of time
};

// Where products are added to what is there.
struct Sum {
  float* values;
  Sum operator+(int64_t i) const { return {values + i}; }
};

#if defined(__AVX512BF16__)

// Of a vector, the lanes that the mask names.
inline void store_first(bf16* out, __m512 v, __mmask16 lanes) {
  _mm256_mask_storeu_epi16(out, lanes, (__m256i)_mm512_cvtneps_pbh(v));
}
inline void store_first(float* out, __m512 v, __mmask16 lanes) { _mm512_mask_storeu_ps(out, lanes, v); }
inline void store_first(Sum out, __m512 v, __mmask16 lanes) {
  store_first(out.values, _mm512_add_ps(_mm512_maskz_loadu_ps(lanes, out.values), v), lanes);
}

#endif

}  // namespace pagedllm
