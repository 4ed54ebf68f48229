// Attention of one sequence's newest tokens over its paged KV. Scores and sums are float32.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "vec.h"

namespace pagedllm {

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

}  // namespace pagedllm
