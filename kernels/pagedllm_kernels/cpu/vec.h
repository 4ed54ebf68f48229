// Sixteen floats at a time, as a type of the compiler's own: GCC and Clang turn it into AVX-512, AVX2, NEON or plain
// code, whatever the flags allow, so that every kernel is written once.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace pagedllm {

constexpr int kLanes = 16;
typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

struct bf16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

// x - 0 is x, which a compiler may use; x + 0 is not where x is -0.
inline f32x16 splat(float x) { return x - f32x16{}; }

inline f32x16 load(const float* p) {
  f32x16 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline f32x16 load(const bf16* p) {
  u16x16 half;
  std::memcpy(&half, p, sizeof half);
  return (f32x16)(__builtin_convertvector(half, u32x16) << 16);
}

inline void store(float* p, f32x16 v) { std::memcpy(p, &v, sizeof v); }
// As many floats as a register of this CPU holds: for loops that must keep many sums in registers.
#if defined(__AVX512F__)
constexpr int kNative = 16;
#elif defined(__AVX__)
constexpr int kNative = 8;
#else
constexpr int kNative = 4;
#endif
typedef float native __attribute__((vector_size(4 * kNative)));
typedef uint32_t native_bits __attribute__((vector_size(4 * kNative)));

inline native load_native(const float* p) {
  native v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline native load_native(const bf16* p) {
  typedef uint16_t half_bits __attribute__((vector_size(2 * kNative)));
  half_bits half;
  std::memcpy(&half, p, sizeof half);
  return (native)(__builtin_convertvector(half, native_bits) << 16);
}
// Two bfloat16 in each lane; the first is in the lower half.
inline native_bits load_pairs(const bf16* p) {
  native_bits v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline float sum_native(native v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#elif defined(__AVX__)
  __m128 half = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
#else
  float total = 0;
  for (int i = 0; i < kNative; i++) total += v[i];
  return total;
#endif
}
inline native first_of(native_bits pairs) { return (native)(pairs << 16); }
inline native second_of(native_bits pairs) { return (native)(pairs & 0xFFFF0000u); }

// Rounds to nearest even, as torch does; NaN stays NaN because its quiet bit survives the addition or is set.
inline void store(bf16* p, f32x16 v) {
#if defined(__AVX512BF16__)
  __m256bh half = _mm512_cvtneps_pbh((__m512)v);
  std::memcpy(p, &half, sizeof half);
#else
  u32x16 bits = (u32x16)v;
  u32x16 rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  u32x16 is_nan = (u32x16)(v != v);
  rounded = (rounded & ~is_nan) | (((bits >> 16) | 0x40) & is_nan);
  u16x16 half = __builtin_convertvector(rounded, u16x16);
  std::memcpy(p, &half, sizeof half);
#endif
}
inline void store_one(float* p, float x) { *p = x; }
inline void store_one(bf16* p, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  p->bits = x != x ? uint16_t((bits >> 16) | 0x40) : uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

inline float sum(f32x16 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float total = 0;
  f32x16 w = v + __builtin_shuffle(v, i32x16{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7});
  for (int i = 0; i < 8; i++) total += w[i];
  return total;
#endif
}

inline float highest(f32x16 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  native parts[kLanes / kNative];
  std::memcpy(parts, &v, sizeof v);
  native best = parts[0];
  for (int i = 1; i < kLanes / kNative; i++) best = parts[i] > best ? parts[i] : best;
  float result = best[0];
  for (int i = 1; i < kNative; i++) result = best[i] > result ? best[i] : result;
  return result;
#endif
}

// 2^r for |r| <= 1/2, with a relative error below 2e-9 before rounding: a least-maximum fit (Remez, 1934).
inline f32x16 exp2_fraction(f32x16 r) {
  f32x16 p = splat(1.5345810970757157e-4f);
  p = p * r + 1.3399930903688073e-3f;
  p = p * r + 9.618489071726799e-3f;
  p = p * r + 5.550328642129898e-2f;
  p = p * r + 2.4022646248340607e-1f;
  p = p * r + 6.931471824645996e-1f;
  return p * r + 1.0f;
}

// 2^x for x <= 0, by 2^n * 2^r; relative error below 2e-7. NaN stays NaN. Below -126 the result is 0 (a masked score), and
// not what comes from underflow, for which some CPUs take hundreds of cycles.
inline f32x16 exp2_below(f32x16 x) {
#if defined(__AVX512F__)
  __m512 v = (__m512)x, n = _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT);
  __mmask16 is_normal = _mm512_cmp_ps_mask(v, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  return (f32x16)_mm512_maskz_scalef_ps(is_normal, (__m512)exp2_fraction((f32x16)_mm512_sub_ps(v, n)), n);
#else
  const f32x16 lowest = splat(-126.0f);
  i32x16 underflow = x < lowest;
  x = underflow ? lowest : x;
  f32x16 n = x + 12582912.0f - 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  f32x16 result = (f32x16)((i32x16)exp2_fraction(x - n) + (__builtin_convertvector(n, i32x16) << 23));
  return underflow ? f32x16{} : result;
#endif
}

// e^x by 2^n * 2^r; relative error below 2e-7. NaN stays NaN. Below -87 the result is 0, as above.
inline f32x16 exp(f32x16 x) {
  constexpr float kLog2e = 1.44269504088896341f;
#if defined(__AVX512F__)
  constexpr float kLog2eRest = 1.925963033500e-8f;  // what its rounding left
  __m512 v = _mm512_min_ps(_mm512_set1_ps(200.0f), (__m512)x);
  __mmask16 is_normal = _mm512_cmp_ps_mask(v, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
  __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(v, _mm512_set1_ps(kLog2e)), _MM_FROUND_TO_NEAREST_INT);
  __m512 r = _mm512_fmsub_ps(v, _mm512_set1_ps(kLog2e), n);
  r = _mm512_fmadd_ps(v, _mm512_set1_ps(kLog2eRest), r);
  return (f32x16)_mm512_maskz_scalef_ps(is_normal, (__m512)exp2_fraction((f32x16)r), n);
#else
  const f32x16 lowest = splat(-87.0f);
  i32x16 underflow = x < lowest;
  x = underflow ? lowest : x;
  x = x > 88.0f ? splat(88.0f) : x;
  f32x16 shifted = x * kLog2e + 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  f32x16 n = shifted - 12582912.0f;
  f32x16 r = x - n * 0.693145751953125f - n * 1.42860682030941723e-6f;  // ln 2 in two parts
  i32x16 exponent = __builtin_convertvector(n, i32x16);
  f32x16 result = (f32x16)((i32x16)exp2_fraction(r * kLog2e) + (exponent << 23));
  return underflow ? f32x16{} : result;
#endif
}

}  // namespace pagedllm
