// Choosing a token as sampling.py defines it: the largest logit, or the largest with noise (the Gumbel-max trick), without
// the noise of tokens that cannot win.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "vec.h"

namespace pagedllm {

// The largest of count values; the lowest index among equals. A NaN is never it, unless there is nothing else.
inline int64_t first_largest(const float* values, int64_t count) {
  const f32x16 lowest = splat(-std::numeric_limits<float>::infinity());
  f32x16 best[4] = {lowest, lowest, lowest, lowest};
  int64_t i = 0;
  for (; i + 4 * kLanes <= count; i += 4 * kLanes)
    for (int j = 0; j < 4; j++) {
      f32x16 v = load(values + i + j * kLanes);
      best[j] = v > best[j] ? v : best[j];
    }
  for (int j = 1; j < 4; j++) best[0] = best[j] > best[0] ? best[j] : best[0];
  float largest = highest(best[0]);
  for (; i < count; i++) largest = std::max(largest, values[i]);
  int64_t index = std::find(values, values + count, largest) - values;
  return index < count ? index : 0;
}

inline u32x16 mix_bits(u32x16 bits) {
  bits = (bits ^ (bits >> 16)) * 0x85EBCA6Bu;
  bits = (bits ^ (bits >> 13)) * 0xC2B2AE35u;
  return bits ^ (bits >> 16);
}

// The token with the largest score, scaled + noise; the lowest id among equals. A token beats the best score so far only
// if its uniform number u is above exp(-exp(-x)), x being how far its noise must lift it; that is at least 1 - exp(-x).
// So a token with 1 - u above exp(-x) needs no logarithm, which leaves some dozens of them in a vocabulary.
inline int64_t draw_token(const float* scaled, int64_t vocab_size, uint32_t first_key, uint32_t second_key) {
  constexpr float kSlack = 1.001f;  // for what float32 rounds
  const u32x16 lane{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  double best = -std::numeric_limits<double>::infinity();
  int64_t token = 0;
  for (int64_t i = 0; i < vocab_size; i += kLanes) {
    int64_t count = std::min<int64_t>(kLanes, vocab_size - i);
    f32x16 x = splat(-std::numeric_limits<float>::infinity());
    if (count == kLanes) x = load(scaled + i);
    else std::memcpy(&x, scaled + i, count * sizeof(float));
    u32x16 bits = mix_bits(mix_bits((lane + uint32_t(i)) * 0x9E3779B9u + first_key) ^ second_key);
    f32x16 rest = __builtin_convertvector(~bits, f32x16) * 0x1p-32f;  // 1 - u, less half a unit
    // Before there is a best score every token is looked at, unless it was removed.
    f32x16 reach = exp(x - float(best)) * kSlack;
    if (std::isinf(best)) reach = x < -std::numeric_limits<float>::max() ? splat(0.0f) : splat(2.0f);
    i32x16 may_win = rest < reach;
    uint64_t any = 0, words[8];
    std::memcpy(words, &may_win, sizeof words);
    for (uint64_t word : words) any |= word;
    if (!any) continue;
    for (int64_t j = 0; j < count; j++) {
      if (!may_win[j]) continue;
      double score = double(x[j]) - std::log(-std::log((double(bits[j]) + 0.5) / 4294967296.0));
      if (score > best) best = score, token = i + j;
    }
  }
  return token;
}

}  // namespace pagedllm
