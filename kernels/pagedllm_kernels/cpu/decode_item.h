// What a thread works with while it attends one query over a stretch of positions.
#pragma once

#include "attention.h"

namespace pagedllm {

constexpr int64_t kAhead = 32;     // rows between asking for one and using it
constexpr int64_t kPartHeads = 4;  // heads of one KV head that are worked on together, at most: a part

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
  std::vector<bf16> pairs;            // the query as tiles take it
  std::vector<float> sums;            // scores as tiles give them
  int64_t num_heads() const { return (kv_last - kv_first) * group; }
  int64_t num_parts() const { return (kv_last - kv_first) * ((group + kPartHeads - 1) / kPartHeads); }
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

// Whether the CPU multiplies pairs of what the KV is made of: queries and weights then are of its type too.
template <typename T>
constexpr bool kMixesPairs =
#if defined(__AVX512BF16__)
    std::is_same_v<T, bf16>;
#else
    false;
#endif

// Calls a function for each part of the item.
template <typename T, typename F>
void for_heads(const DecodeItem<T>& w, F f) {
  for (int64_t kv = w.kv_first; kv < w.kv_last; kv++)
    for (int64_t done = 0; done < w.group; done += kPartHeads)
      f(kv, (kv - w.kv_first) * w.group + done, std::min(kPartHeads, w.group - done));
}

// As for_heads, with the number of heads known when this is compiled.
template <typename T, typename F>
void for_known_heads(const DecodeItem<T>& w, F f) {
  for_heads(w, [&](int64_t kv, int64_t head, int64_t heads) {
    if (heads == 4) f(kv, head, std::integral_constant<int, 4>{});
    else if (heads == 3) f(kv, head, std::integral_constant<int, 3>{});
    else if (heads == 2) f(kv, head, std::integral_constant<int, 2>{});
    else f(kv, head, std::integral_constant<int, 1>{});
  });
}

}  // namespace pagedllm
