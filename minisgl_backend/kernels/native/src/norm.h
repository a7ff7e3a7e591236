// One vector's RMS norm, for whoever has it at hand.
#pragma once

#include <cmath>
#include <type_traits>

#include "pointwise.h"

namespace minisgl {

// 1 / sqrt(mean(x²) + eps). Four sums at a time, in an order that depends on nothing but the size.
template <class T>
float inverse_rms(const T* x, int64_t size, float eps) {
  Vec sums[4] = {vec(0), vec(0), vec(0), vec(0)};
  int64_t at = 0;
  for (; at + 4 * kLanes <= size; at += 4 * kLanes) {
    for (int i = 0; i < 4; ++i) {
      const Vec v = load(x + at + i * kLanes);
      sums[i] = fma(v, v, sums[i]);
    }
  }
  for (int i = 0; at < size; at += kLanes, ++i) {
    const Vec v = load_up_to(x + at, size - at < kLanes ? size - at : kLanes);
    sums[i] = fma(v, v, sums[i]);
  }
  return 1.0f / std::sqrt(sum((sums[0] + sums[1]) + (sums[2] + sums[3])) / static_cast<float>(size) + eps);
}

// x rounded to X, unless it is stored as that at once.
template <class X, class T>
Vec settled(Vec x) {
  if constexpr (std::is_same_v<X, T>) return x;
  return rounded<X>(x);
}

// to = x · factor · weight, with the roundings of kernels/norm.py: X is the model's dtype, T that of x and `to`.
template <class X, class T>
void scale_row(const T* x, float factor, NormWeight weight, int64_t size, T* to) {
  if (weight.wide) {
    const auto* w = static_cast<const float*>(weight.data);
    map(size, to, [&](int64_t at, int64_t n) {
      return settled<X, T>(load_up_to(x + at, n) * vec(factor) * load_up_to(w + at, n));
    });
  } else {
    const auto* w = static_cast<const X*>(weight.data);
    map(size, to, [&](int64_t at, int64_t n) {
      return settled<X, T>(rounded<X>(load_up_to(x + at, n) * vec(factor)) * load_up_to(w + at, n));
    });
  }
}

}  // namespace minisgl
