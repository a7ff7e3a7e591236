// One register of fp32 numbers, and how bf16 and fp16 come into it and leave it. AVX-512 or AVX2, by the level.
//
// Numbers are those of torch: bf16 is rounded to the nearest, ties to even, subnormal numbers stay, NaN stays NaN.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <limits>

namespace minisgl {

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

#ifdef __AVX512F__

using Vec = __m512;
constexpr int kLanes = 16;

inline Vec vec(float x) { return _mm512_set1_ps(x); }
inline Vec min(Vec x, Vec y) { return _mm512_min_ps(x, y); }
inline Vec max(Vec x, Vec y) { return _mm512_max_ps(x, y); }
inline Vec fma(Vec x, Vec y, Vec z) { return _mm512_fmadd_ps(x, y, z); }
inline Vec nearest(Vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline float sum(Vec x) { return _mm512_reduce_add_ps(x); }
inline Vec absolute(Vec x) { return _mm512_abs_ps(x); }
inline Vec with_sign(Vec x, Vec of) { return _mm512_or_ps(x, _mm512_and_ps(of, vec(-0.0f))); }  // x >= 0

// a < b ? yes : no.
inline Vec if_less(Vec a, Vec b, Vec yes, Vec no) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}

// x · 2^n, for whole n.
inline Vec scale(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }

inline __mmask16 first(int64_t n) { return static_cast<__mmask16>((1u << n) - 1); }
inline Vec widen(__m256i x, bf16) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
inline Vec widen(__m256i x, fp16) { return _mm512_cvtph_ps(x); }
inline __m256i narrow(Vec x, fp16) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline __m256i narrow(Vec x, bf16) {
#ifdef __AVX512BF16__  // which takes subnormal numbers for zeros
  constexpr int kSubnormal = 0x20;
  if (__builtin_expect(_mm512_fpclass_ps_mask(x, kSubnormal) == 0, 1)) return (__m256i)_mm512_cvtneps_pbh(x);
#endif
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0)));
}

inline Vec load(const float* from) { return _mm512_loadu_ps(from); }
inline Vec load(const float* from, int64_t n) { return _mm512_maskz_loadu_ps(first(n), from); }
inline void store(float* to, Vec x) { _mm512_storeu_ps(to, x); }
inline void store(float* to, Vec x, int64_t n) { _mm512_mask_storeu_ps(to, first(n), x); }

template <class T>
Vec load(const T* from) {
  return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)), T{});
}
template <class T>
Vec load(const T* from, int64_t n) {
  return widen(_mm256_maskz_loadu_epi16(first(n), from), T{});
}
template <class T>
void store(T* to, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow(x, T{}));
}
template <class T>
void store(T* to, Vec x, int64_t n) {
  _mm256_mask_storeu_epi16(to, first(n), narrow(x, T{}));
}

#else

using Vec = __m256;
constexpr int kLanes = 8;

inline Vec vec(float x) { return _mm256_set1_ps(x); }
inline Vec min(Vec x, Vec y) { return _mm256_min_ps(x, y); }
inline Vec max(Vec x, Vec y) { return _mm256_max_ps(x, y); }
inline Vec fma(Vec x, Vec y, Vec z) { return _mm256_fmadd_ps(x, y, z); }
inline Vec nearest(Vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec absolute(Vec x) { return _mm256_andnot_ps(vec(-0.0f), x); }
inline Vec with_sign(Vec x, Vec of) { return _mm256_or_ps(x, _mm256_and_ps(of, vec(-0.0f))); }
inline Vec if_less(Vec a, Vec b, Vec yes, Vec no) { return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
inline float sum(Vec x) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// x · 2^n, for whole n from -252 to 254: in two steps, since 2^n itself may be no number.
inline Vec scale(Vec x, Vec n) {
  const __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1), bias = _mm256_set1_epi32(127);
  const auto power = [bias](__m256i k) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(k, bias), 23)); };
  return _mm256_mul_ps(_mm256_mul_ps(x, power(half)), power(_mm256_sub_epi32(whole, half)));
}

inline Vec widen(__m128i x, bf16) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
inline Vec widen(__m128i x, fp16) { return _mm256_cvtph_ps(x); }
inline __m128i narrow(Vec x, fp16) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline __m128i narrow(Vec x, bf16) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i kept = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
  return _mm_packus_epi32(_mm256_castsi256_si128(kept), _mm256_extracti128_si256(kept, 1));
}

inline Vec load(const float* from) { return _mm256_loadu_ps(from); }
inline void store(float* to, Vec x) { _mm256_storeu_ps(to, x); }

template <class T>
Vec load(const T* from) {
  return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)), T{});
}
template <class T>
void store(T* to, Vec x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), narrow(x, T{}));
}
template <class T>
Vec load(const T* from, int64_t n) {
  T all[kLanes] = {};
  std::memcpy(all, from, n * sizeof(T));
  return load(static_cast<const T*>(all));
}
template <class T>
void store(T* to, Vec x, int64_t n) {
  T all[kLanes];
  store(static_cast<T*>(all), x);
  std::memcpy(to, all, n * sizeof(T));
}

#endif

// What a number becomes on its way through memory of type T.
template <class T>
Vec rounded(Vec x) {
  return widen(narrow(x, T{}), T{});
}
template <>
inline Vec rounded<float>(Vec x) {
  return x;
}

// e^x within two units in the last place; NaN stays, what is beyond the range becomes 0 or infinity.
// Cody and Waite 1980: x = n · ln 2 + r, and a polynomial in |r| <= ln 2 / 2.
inline Vec exp(Vec x) {
  // Kept within what `scale` can do. The bound stands second: where an operand is NaN, that one is taken.
  const Vec bounded = min(vec(89.0f), max(vec(-104.0f), x));
  const Vec n = nearest(bounded * vec(1.44269504f));
  const Vec r = fma(n, vec(-1.42860677e-6f), fma(n, vec(-0.693145752f), bounded));
  Vec p = fma(r, vec(1.0f / 5040), vec(1.0f / 720));
  p = fma(p, r, vec(1.0f / 120));
  p = fma(p, r, vec(1.0f / 24));
  p = fma(p, r, vec(1.0f / 6));
  p = fma(p, r, vec(0.5f));
  p = fma(p, r, vec(1.0f));
  p = fma(p, r, vec(1.0f));
  return scale(p, n);
}

// By the exponential, and below 1, where that would lose digits, by Lambert's continued fraction.
inline Vec tanh(Vec x) {
  const Vec square = x * x;
  const Vec above = fma(fma(square + vec(378.0f), square, vec(17325.0f)), square, vec(135135.0f));
  const Vec below = fma(fma(fma(vec(28.0f), square, vec(3150.0f)), square, vec(62370.0f)), square, vec(135135.0f));
  const Vec small = x * above / below;
  const Vec e = exp(absolute(x) * vec(-2.0f));
  const Vec large = with_sign((vec(1.0f) - e) / (vec(1.0f) + e), x);
  return if_less(absolute(x), vec(1.0f), small, large);
}

}  // namespace minisgl
