// Normalisation, rotary embedding and activations, one row or token at a time.
#pragma once

#include <algorithm>
#include <cmath>

#include "vec.h"

namespace pagedllm {

// out = x / sqrt(mean(x^2) + eps) * weight, with x += delta first if there is a delta.
template <typename D, typename W, typename O>
void add_rms_norm_row(float* x, const D* delta, const W* weight, O* out, int64_t size, float eps) {
  f32x16 squares = {};
  for (int64_t i = 0; i < size; i += kLanes) {
    f32x16 v = load(x + i);
    if (delta) {
      v += load(delta + i);
      store(x + i, v);
    }
    squares += v * v;
  }
  float factor = 1.0f / std::sqrt(sum(squares) / float(size) + eps);
  for (int64_t i = 0; i < size; i += kLanes) store(out + i, load(x + i) * factor * load(weight + i));
}

// Rotates one head in place: pairs (i, i + dim / 2) by the angle whose cosine and sine the table row holds.
template <typename T>
void rope_head(T* head, const float* table, int64_t dim) {
  int64_t half = dim / 2, i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    f32x16 a = load(head + i), b = load(head + half + i), c = load(table + i), s = load(table + half + i);
    store(head + i, a * c - b * s);
    store(head + half + i, b * c + a * s);
  }
  for (; i < half; i++) {
    float a = to_float(head[i]), b = to_float(head[half + i]), c = table[i], s = table[half + i];
    store_one(head + i, a * c - b * s);
    store_one(head + half + i, b * c + a * s);
  }
}

// Rotates the queries and keys of one token, and stores its keys and values in its slot.
template <typename T>
void rope_store_row(T* row, const float* table, T* keys, T* values, int64_t slot, int64_t num_heads, int64_t num_kv,
                    int64_t dim) {
  for (int64_t h = 0; h < num_heads + num_kv; h++) rope_head(row + h * dim, table, dim);
  const T* key = row + num_heads * dim;
  std::copy(key, key + num_kv * dim, keys + slot * num_kv * dim);
  std::copy(key + num_kv * dim, key + 2 * num_kv * dim, values + slot * num_kv * dim);
}

template <typename T, typename O>
void silu_mul_row(const T* gate, const T* up, O* out, int64_t size) {
  for (int64_t i = 0; i < size; i += kLanes) {
    f32x16 g = load(gate + i);
    store(out + i, g / (exp(-g) + 1.0f) * load(up + i));
  }
}

// gelu(x) by tanh, written as x * sigmoid(2 u), which is the same and needs one exponential.
template <typename T, typename O>
void gelu_tanh_mul_row(const T* gate, const T* up, O* out, int64_t size) {
  for (int64_t i = 0; i < size; i += kLanes) {
    f32x16 g = load(gate + i);
    f32x16 u = 1.5957691216057308f * (g + 0.044715f * g * g * g);  // 2 * sqrt(2 / pi)
    store(out + i, g / (exp(-u) + 1.0f) * load(up + i));
  }
}

}  // namespace pagedllm
