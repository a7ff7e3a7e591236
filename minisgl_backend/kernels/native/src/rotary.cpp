#include "launch.h"
#include "norm.h"

namespace minisgl {
namespace {

template <class T>
void widen_row(const T* from, int64_t size, float* to) {
  map(size, to, [&](int64_t at, int64_t n) { return load_up_to(from + at, n); });
}

template <class T>
void copy_row(const T* from, int64_t size, T* to) {
  std::memcpy(to, from, size * sizeof(T));
}

// Pairs of dimension i with i + pairs.
template <class T>
void rotate_halves(const float* x, const float* cos, const float* sin, int64_t pairs, T* to) {
  for (int64_t at = 0; at < pairs; at += kLanes) {
    const int64_t n = pairs - at < kLanes ? pairs - at : kLanes;
    const Vec c = load_up_to(cos + at, n), s = load_up_to(sin + at, n);
    const Vec a = load_up_to(x + at, n), b = load_up_to(x + pairs + at, n);
    const Vec low = a * c - b * s, high = b * c + a * s;
    if (n == kLanes) {
      store(to + at, low);
      store(to + pairs + at, high);
    } else {
      store(to + at, low, n);
      store(to + pairs + at, high, n);
    }
  }
}

// Pairs of dimension 2i with 2i + 1: rotated side by side in memory, then stored together.
template <class T>
void rotate_neighbours(const float* x, const float* cos, const float* sin, int64_t pairs, T* to) {
  float turned[kMostDim];
  for (int64_t i = 0; i < pairs; ++i) {
    turned[2 * i] = x[2 * i] * cos[i] - x[2 * i + 1] * sin[i];
    turned[2 * i + 1] = x[2 * i + 1] * cos[i] + x[2 * i] * sin[i];
  }
  map(2 * pairs, to, [&](int64_t at, int64_t n) { return load_up_to(turned + at, n); });
}

// One head of one token.
template <class T>
void turn(const T* from, int64_t dim, NormWeight norm, const Rotary& rotary, int64_t token, T* to) {
  if (norm.data == nullptr && rotary.cos == nullptr) return copy_row(from, dim, to);
  alignas(64) float wide[kMostDim];
  widen_row(from, dim, wide);
  if (norm.data != nullptr) scale_row<T>(wide, inverse_rms(wide, dim, norm.eps), norm, dim, wide);
  int64_t done = 0;
  if (rotary.cos != nullptr) {
    const int64_t at = token * rotary.pairs;
    const auto rotate = rotary.interleaved ? rotate_neighbours<T> : rotate_halves<T>;
    rotate(wide, rotary.cos + at, rotary.sin + at, rotary.pairs, to);
    done = 2 * rotary.pairs;
  }
  map(dim - done, to + done, [&](int64_t at, int64_t n) { return load_up_to(wide + done + at, n); });
}

template <class T>
const T* head_of(const Vectors& x, int64_t token, int64_t head) {
  return static_cast<const T*>(x.data) + token * x.outer_stride + head * x.inner_stride;
}

template <class T>
T* place_of(const Places& places, int64_t token, int64_t head, int64_t dim) {
  const int64_t place = places.places == nullptr ? token : places.places[token];
  return static_cast<T*>(places.data) + place * places.stride + head * dim;
}

}  // namespace

void rotate(Dtype dtype, Rotary rotary, Vectors q, NormWeight q_norm, void* q_out, Vectors k, NormWeight k_norm,
            Places k_out, Vectors v, Places v_out) {
  const int64_t dim = q.size, values = v.data == nullptr ? 0 : v.inner, each = q.inner + k.inner + values;
  by_dtype(dtype, [=](auto kind) {
    using T = decltype(kind);
    const auto kernel = [=](Part part) {
      const Span items = share(q.outer * each, part);
      for (int64_t item = items.begin; item < items.end; ++item) {
        const int64_t token = item / each, head = item % each;
        if (head < q.inner) {
          T* to = static_cast<T*>(q_out) + (token * q.inner + head) * dim;
          turn(head_of<T>(q, token, head), dim, q_norm, rotary, token, to);
        } else if (head < q.inner + k.inner) {
          const int64_t own = head - q.inner;
          turn(head_of<T>(k, token, own), dim, k_norm, rotary, token, place_of<T>(k_out, token, own, dim));
        } else {
          const int64_t own = head - q.inner - k.inner;
          copy_row(head_of<T>(v, token, own), dim, place_of<T>(v_out, token, own, dim));
        }
      }
    };
    launch(kernel, most_parts(q.outer * each * dim));
  });
}

}  // namespace minisgl
