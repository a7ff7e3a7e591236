// Products of attention in fp32: of keys with queries, and of weights with values. Each number is a sum in the order of
// its terms, however many rows are taken at once.
#pragma once

#include "attention_vec.h"

namespace minisgl {

// scores[i * score_stride + c] = keys[i] · query c, for kKeys keys and kVecs vectors of queries [dim][stride].
template <int kKeys, int kVecs>
inline void score_tile(const float* const* keys, const float* queries, int64_t stride, int64_t dim, float* scores,
                       int64_t score_stride) {
  Vec sum[kKeys][kVecs];
  for (auto& row : sum)
    for (Vec& x : row) x = vec(0.0f);
  for (int64_t d = 0; d < dim; ++d) {
    Vec q[kVecs];
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j) q[j] = load(queries + d * stride + j * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < kKeys; ++i) {
      const Vec k = vec(keys[i][d]);
#pragma GCC unroll 4
      for (int j = 0; j < kVecs; ++j) sum[i][j] = fma(k, q[j], sum[i][j]);
    }
  }
  for (int i = 0; i < kKeys; ++i)
    for (int j = 0; j < kVecs; ++j) store(scores + i * score_stride + j * kLanes, sum[i][j]);
}

template <int kVecs>
inline void score_keys(const float* const* keys, int64_t count, const float* queries, int64_t stride, int64_t dim,
                       float* scores, int64_t score_stride) {
  constexpr int kKeys = kVecs == 1 ? 8 : 4;
  int64_t i = 0;
  for (; i + kKeys <= count; i += kKeys)
    score_tile<kKeys, kVecs>(keys + i, queries, stride, dim, scores + i * score_stride, score_stride);
  for (; i < count; ++i)
    score_tile<1, kVecs>(keys + i, queries, stride, dim, scores + i * score_stride, score_stride);
}

// out[m][…] += Σ weights[i][m] · values[i][…], for kRows queries and kVecs vectors of the head.
template <int kRows, int kVecs>
inline void value_tile(const float* weights, int64_t weight_stride, const float* const* values, int64_t offset,
                       int64_t count, float* out, int64_t out_stride) {
  Vec sum[kRows][kVecs];
  for (int m = 0; m < kRows; ++m)
    for (int j = 0; j < kVecs; ++j) sum[m][j] = load(out + m * out_stride + j * kLanes);
  for (int64_t i = 0; i < count; ++i) {
    Vec v[kVecs];
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j) v[j] = load(values[i] + offset + j * kLanes);
#pragma GCC unroll 4
    for (int m = 0; m < kRows; ++m) {
      const Vec weight = vec(weights[i * weight_stride + m]);
#pragma GCC unroll 4
      for (int j = 0; j < kVecs; ++j) sum[m][j] = fma(weight, v[j], sum[m][j]);
    }
  }
  for (int m = 0; m < kRows; ++m)
    for (int j = 0; j < kVecs; ++j) store(out + m * out_stride + j * kLanes, sum[m][j]);
}

constexpr int kValueVecs = kLanes == 16 ? 4 : 2;

template <int kRows>
inline void value_rows(const float* weights, int64_t weight_stride, const float* const* values, int64_t count,
                       int64_t dim, float* out) {
  int64_t d = 0;
  for (; d + kValueVecs * kLanes <= dim; d += kValueVecs * kLanes)
    value_tile<kRows, kValueVecs>(weights, weight_stride, values, d, count, out + d, dim);
  for (; d < dim; d += kLanes) value_tile<kRows, 1>(weights, weight_stride, values, d, count, out + d, dim);
}

// out [rows, dim] += weightsᵀ · values, weights [count][weight_stride].
inline void add_values(const float* weights, int64_t weight_stride, const float* const* values, int64_t count,
                       int64_t dim, float* out, int64_t rows) {
  int64_t m = 0;
  for (; m + 4 <= rows; m += 4) value_rows<4>(weights + m, weight_stride, values, count, dim, out + m * dim);
  for (; m < rows; ++m) value_rows<1>(weights + m, weight_stride, values, count, dim, out + m * dim);
}

// Stored values → fp32. dim is a multiple of 16.
template <class Type>
inline void widen_row(const Type* from, int64_t dim, float* to) {
  for (int64_t d = 0; d < dim; d += kLanes) store(to + d, load(from + d));
}

}  // namespace minisgl
