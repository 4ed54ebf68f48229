// Reading memory in order.
#pragma once

#include "vec.h"

namespace pagedllm {

// The sum of all words, four registers at a time so that no addition waits for the one before it.
inline uint32_t sum_words(const uint32_t* p, int64_t count) {
  u32x16 sums[4] = {};
  int64_t i = 0;
  for (; i + 64 <= count; i += 64)
    for (int j = 0; j < 4; j++) {
      u32x16 v;
      std::memcpy(&v, p + i + j * kLanes, sizeof v);
      sums[j] += v;
    }
  u32x16 all = sums[0] + sums[1] + sums[2] + sums[3];
  uint32_t total = 0;
  for (int j = 0; j < kLanes; j++) total += all[j];
  for (; i < count; i++) total += p[i];
  return total;
}

}  // namespace pagedllm
