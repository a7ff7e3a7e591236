// Products of attention in bf16, summed in fp32, two terms at a time (vdpbf16ps).
#pragma once

#ifdef __AVX512BF16__

#include <algorithm>
#include <cstring>

#include "attention_vec.h"

namespace minisgl {

alignas(64) inline const uint16_t kZeroRow[256] = {};

inline int pair_at(const uint16_t* p) {
  int pair;
  std::memcpy(&pair, p, 4);
  return pair;
}

// scores[i][16 queries] of kKeys keys; queries [dim / 2][stride] pairs of dimensions.
template <int kKeys>
inline void score_pairs(const uint16_t* const* keys, const uint32_t* queries, int64_t stride, int64_t dim,
                        float* scores, int64_t score_stride) {
  __m512 sum[kKeys];
  for (auto& x : sum) x = _mm512_setzero_ps();
  for (int64_t d = 0; d < dim; d += 2) {
    const __m512i q = _mm512_loadu_si512(queries + d / 2 * stride);
#pragma GCC unroll 8
    for (int i = 0; i < kKeys; ++i)
      sum[i] = _mm512_dpbf16_ps(sum[i], (__m512bh)q, (__m512bh)_mm512_set1_epi32(pair_at(keys[i] + d)));
  }
  for (int i = 0; i < kKeys; ++i) store(scores + i * score_stride, sum[i]);
}

// Keys or values that are wanted soon: asked for in the order in which they lie, some lines at a time, while others are
// computed with. So the processor sees what comes next and asks for more at once than a program can.
struct Wanted {
  const uint16_t* pages;
  const int64_t* places;  // of tokens, in `pages`
  int64_t tokens, values;  // of each token, side by side
  int64_t lines;           // at a time
  int64_t done = 0;        // values of the first token

  void fetch() {
    for (int64_t i = 0; i < lines && tokens > 0; ++i) {
      _mm_prefetch(reinterpret_cast<const char*>(pages + *places + done), _MM_HINT_T1);
      done += 32;
      if (done >= values) done = 0, ++places, --tokens;
    }
  }
};

// out[m][16 · kVecs] += weights of kRows queries · values; weights [pairs][stride], values: two rows a pair.
template <int kRows, int kVecs>
inline void value_pairs(const uint32_t* weights, int64_t stride, const uint16_t* const* values, int64_t offset,
                        int64_t pairs, float* out, int64_t out_stride, Wanted& wanted) {
  __m512 sum[kRows][kVecs];
  for (int m = 0; m < kRows; ++m)
    for (int j = 0; j < kVecs; ++j) sum[m][j] = load(out + m * out_stride + j * 16);
  for (int64_t i = 0; i < pairs; ++i) {
    wanted.fetch();
    __m512i v[kVecs];
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j)
      v[j] = interleave16(values[2 * i] + offset + 16 * j, values[2 * i + 1] + offset + 16 * j);
#pragma GCC unroll 4
    for (int m = 0; m < kRows; ++m) {
      const __m512i weight = _mm512_set1_epi32(static_cast<int>(weights[i * stride + m]));
#pragma GCC unroll 4
      for (int j = 0; j < kVecs; ++j) sum[m][j] = _mm512_dpbf16_ps(sum[m][j], (__m512bh)v[j], (__m512bh)weight);
    }
  }
  for (int m = 0; m < kRows; ++m)
    for (int j = 0; j < kVecs; ++j) store(out + m * out_stride + j * 16, sum[m][j]);
}

template <int kRows>
inline void value_pair_rows(const uint32_t* weights, int64_t stride, const uint16_t* const* values, int64_t pairs,
                            int64_t dim, float* out, Wanted& wanted) {
  int64_t d = 0;
  for (; d + 64 <= dim; d += 64)
    value_pairs<kRows, 4>(weights, stride, values, d, pairs, out + d, dim, wanted);
  for (; d < dim; d += 16) value_pairs<kRows, 1>(weights, stride, values, d, pairs, out + d, dim, wanted);
}

// out [rows, dim] += weightsᵀ · values. A row's sum is the same whatever the rows beside it.
inline void add_value_pairs(const uint32_t* weights, int64_t stride, const uint16_t* const* values, int64_t pairs,
                            int64_t dim, float* out, int64_t rows, Wanted& wanted) {
  for (int64_t m = 0; m < rows; m += 4) {
    const auto* from = weights + m;
    float* to = out + m * dim;
    switch (std::min<int64_t>(rows - m, 4)) {
      case 4: value_pair_rows<4>(from, stride, values, pairs, dim, to, wanted); break;
      case 3: value_pair_rows<3>(from, stride, values, pairs, dim, to, wanted); break;
      case 2: value_pair_rows<2>(from, stride, values, pairs, dim, to, wanted); break;
      case 1: value_pair_rows<1>(from, stride, values, pairs, dim, to, wanted); break;
    }
  }
}

// Columns of queries [dim / 2][stride] from rows of dim values: column c from rows[c]. Columns from count on are zeros,
// and so are dimensions up to a whole 32. columns is a multiple of 16.
inline void pack_pairs(const uint16_t* const* rows, int64_t count, int64_t dim, uint32_t* to, int64_t stride,
                       int64_t columns) {
  for (int64_t d = 0; d < dim; d += 32) {
    const __mmask32 mask = dim - d >= 32 ? 0xffffffffu : 0xffffu;
    for (int64_t c = 0; c < columns; c += 16) {
      __m512i block[16];
      for (int64_t i = 0; i < 16; ++i)
        block[i] = c + i < count ? _mm512_maskz_loadu_epi16(mask, rows[c + i] + d) : _mm512_setzero_si512();
      transpose16(block);
      for (int64_t i = 0; i < 16; ++i) _mm512_storeu_si512(to + (d / 2 + i) * stride + c, block[i]);
    }
  }
}

}  // namespace minisgl

#endif
