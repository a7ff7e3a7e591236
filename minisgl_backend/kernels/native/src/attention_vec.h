// What attention computes with vectors beyond vec.h. NaN stays NaN everywhere.
#pragma once

#include "vec.h"

#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // of what gcc 12's own header leaves undefined
#pragma GCC diagnostic ignored "-Wuninitialized"

namespace minisgl {

#ifdef __AVX512F__

inline bool same(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_NEQ_UQ) == 0; }

// low < position <= high in each lane ? x : otherwise.
inline Vec if_between(int32_t position, const int32_t* low, const int32_t* high, Vec x, Vec otherwise) {
  const __m512i at = _mm512_set1_epi32(position);
  const __mmask16 above = _mm512_cmplt_epi32_mask(_mm512_loadu_si512(low), at);
  return _mm512_mask_blend_ps(_mm512_mask_cmple_epi32_mask(above, at, _mm512_loadu_si512(high)), otherwise, x);
}

#else

inline bool same(Vec a, Vec b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_NEQ_UQ)) == 0; }

inline Vec if_between(int32_t position, const int32_t* low, const int32_t* high, Vec x, Vec otherwise) {
  const __m256i at = _mm256_set1_epi32(position);
  const __m256i above = _mm256_cmpgt_epi32(at, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(low)));
  const __m256i behind = _mm256_cmpgt_epi32(at, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(high)));
  return _mm256_blendv_ps(otherwise, x, _mm256_castsi256_ps(_mm256_andnot_si256(behind, above)));
}

#endif

// sum · 2^whole where 2^x is a normal number, else 0: a subnormal result takes a processor a hundred cycles.
#ifdef __AVX512F__
inline Vec power(Vec sum, Vec whole, Vec x) {
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, vec(-126.0f), _CMP_NLT_UQ), sum, whole);
}
#else
inline Vec power(Vec sum, Vec whole, Vec) {  // an exponent field of 0 is the number 0
  const __m256i field = _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127));
  return sum * _mm256_castsi256_ps(_mm256_slli_epi32(field, 23));
}
#endif

// 2^x for x <= 0. Coefficients: Cephes (Moshier 1987), 1e-7 of the result.
inline Vec exp2_of(Vec x) {
  x = max(vec(-127.0f), x);  // NaN stands second: that one is taken
  const Vec whole = nearest(x), part = x - whole;
  Vec sum = vec(1.535336188319500e-4f);
  sum = fma(sum, part, vec(1.339887440266574e-3f));
  sum = fma(sum, part, vec(9.618437357674640e-3f));
  sum = fma(sum, part, vec(5.550332471162809e-2f));
  sum = fma(sum, part, vec(2.402264791363012e-1f));
  sum = fma(sum, part, vec(6.931472028550421e-1f));
  sum = fma(sum, part, vec(1.0f));
  return power(sum, whole, x);
}

inline float value_of(float x) { return x; }
inline float value_of(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline float value_of(fp16 x) { return _cvtsh_ss(x.bits); }

template <class T>
bool is_finite_row(const T* row, int64_t dim) {
  for (int64_t d = 0; d < dim; d += kLanes) {
    const Vec x = load(row + d);
    if (!same(x - x, vec(0.0f))) return false;
  }
  return true;
}

#ifdef __AVX512BF16__

// The same within 1e-4 of the result, for what is then rounded to bf16: a third of its operations.
inline Vec coarse_exp2_of(Vec x) {
  const Vec part = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // x less the whole below it
  Vec sum = fma(vec(7.8024523e-2f), part, vec(2.2606716e-1f));
  sum = fma(sum, part, vec(6.9583356e-1f));
  sum = fma(sum, part, vec(9.9992522e-1f));
  return power(sum, x, x);  // which takes the whole below x itself
}

// rows[i] are vectors of 16 numbers of 32 bits → column i in rows[i].
inline void transpose16(__m512i rows[16]) {
  __m512i t[16];
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    rows[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    rows[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    rows[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    rows[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    rows[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    rows[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    rows[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    rows[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

// Of 32 numbers of 16 bits: each of the first half, and then its like in the second.
inline __m512i halves_in_turn(__m512i both) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, both);
}

// a0 b0 a1 b1 … of 16 bf16 each.
inline __m512i interleave16(const uint16_t* a, const uint16_t* b) {
  const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a));
  const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b));
  return halves_in_turn(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
}

// Two vectors of fp32 rounded to bf16, side by side in each lane: a in the low half.
inline __m512i pair_of(Vec a, Vec b) { return halves_in_turn((__m512i)_mm512_cvtne2ps_pbh(b, a)); }

#endif

}  // namespace minisgl
