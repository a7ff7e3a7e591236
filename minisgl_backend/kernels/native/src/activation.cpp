#include "launch.h"
#include "pointwise.h"

namespace minisgl {
namespace {

constexpr int64_t kBlock = 512;  // numbers: what one row of few is cut into

// x · sigmoid(y): silu where y is x.
inline Vec times_sigmoid(Vec x, Vec y) { return x / (vec(1.0f) + exp(vec(0.0f) - y)); }

inline Vec activate(Activation activation, Vec x) {
  if (activation == Activation::silu) return times_sigmoid(x, x);
  // 0.5 · (1 + tanh(u)) = sigmoid(2 · u), without the difference of two numbers that are nearly one.
  const Vec inner = x * fma(x * x, vec(0.044715f), vec(1.0f));
  return times_sigmoid(x, inner * vec(1.59576912f));
}

}  // namespace

void gated(Dtype dtype, Activation activation, Vectors gate, Vectors up, void* out) {
  const int64_t blocks = (gate.size + kBlock - 1) / kBlock;
  by_dtype(dtype, [=](auto kind) {
    using T = decltype(kind);
    const auto kernel = [=](Part part) {
      const Span items = share(gate.outer * blocks, part);
      for (int64_t item = items.begin; item < items.end; ++item) {
        const int64_t row = item / blocks, begin = item % blocks * kBlock;
        const int64_t size = gate.size - begin < kBlock ? gate.size - begin : kBlock;
        const T* g = static_cast<const T*>(gate.data) + row * gate.outer_stride + begin;
        const T* u = static_cast<const T*>(up.data) + row * up.outer_stride + begin;
        map(size, static_cast<T*>(out) + row * gate.size + begin, [&](int64_t at, int64_t n) {
          return rounded<T>(activate(activation, load_up_to(g + at, n))) * load_up_to(u + at, n);
        });
      }
    };
    launch(kernel, most_parts(4 * gate.outer * gate.size));  // an exponential is dearer than a sum
  });
}

void softcap(Dtype dtype, const void* x, int64_t n, float cap, void* out) {
  const int64_t blocks = (n + kBlock - 1) / kBlock;
  by_dtype(dtype, [=](auto kind) {
    using T = decltype(kind);
    const auto kernel = [=](Part part) {
      const Span items = share(blocks, part);
      const int64_t begin = items.begin * kBlock, end = items.end * kBlock < n ? items.end * kBlock : n;
      const T* from = static_cast<const T*>(x) + begin;
      map(end - begin, static_cast<T*>(out) + begin, [&](int64_t at, int64_t count) {
        return rounded<T>(tanh(rounded<T>(load_up_to(from + at, count) / vec(cap)))) * vec(cap);
      });
    };
    launch(kernel, most_parts(4 * n));
  });
}

}  // namespace minisgl
