// The kernels that go over a step's numbers one by one. Each call is one launch; the references in torch are
// kernels/norm.py, activation.py and rotary.py, whose roundings between two operations are kept.
#pragma once

#include <cstdint>

#include "launch.h"
#include "vec.h"

namespace minisgl {

enum class Dtype { fp32, bf16, fp16 };

template <class F>
void by_dtype(Dtype dtype, F run) {
  switch (dtype) {
    case Dtype::fp32: return run(float{});
    case Dtype::bf16: return run(bf16{});
    case Dtype::fp16: return run(fp16{});
  }
}

// Vectors [outer, inner, size] of numbers, where they lie. Strides count numbers; those of a vector are side by side.
struct Vectors {
  const void* data;
  int64_t outer, inner, size;
  int64_t outer_stride, inner_stride;
};

// weight [size], of x's dtype or (wide) fp32, which changes where is rounded: kernels/norm.py.
struct NormWeight {
  const void* data = nullptr;  // nullptr: there is no norm
  bool wide = false;
  float eps = 0;
};

// out [outer, inner, size] = rms norm of x. With `added`, of x's shape and both without gaps: sum = x + added first,
// rounded to the dtype, and out is the norm of that.
void rms_norm(Dtype dtype, Vectors x, NormWeight weight, void* out, const void* added, void* sum);

enum class Activation { silu, gelu_tanh };

// out [outer, size] = activation(gate) · up. inner is 1.
void gated(Dtype dtype, Activation activation, Vectors gate, Vectors up, void* out);

constexpr int64_t kMostDim = 1024;  // of a head

struct Rotary {
  const float* cos = nullptr;  // [tokens, pairs], at the tokens' positions; nullptr: nothing is rotated
  const float* sin = nullptr;
  int64_t pairs = 0;  // rotated dimensions / 2
  bool interleaved = false;
};

// Where keys or values [tokens, heads, head_dim] go: token t's to place places[t], or t without places.
struct Places {
  void* data;
  const int64_t* places;
  int64_t stride;  // numbers from place to place
};

// q_out [tokens, heads, head_dim] = rotated, normalised q; k and v to their places, k as q is. v.data may be nullptr.
void rotate(Dtype dtype, Rotary rotary, Vectors q, NormWeight q_norm, void* q_out, Vectors k, NormWeight k_norm,
            Places k_out, Vectors v, Places v_out);

// n numbers of rows, in int32 or int64.
struct Index {
  const void* data;
  bool wide;
  int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

// out [n, size] = table[index[i] - own.begin, :] · factor; zeros where index[i] is not in `own`. table: `inner` is 1.
void take_rows(Dtype dtype, Vectors table, Index index, Span own, int64_t n, float factor, void* out);

// out = x + y, n numbers.
void add(Dtype dtype, const void* x, const void* y, int64_t n, void* out);

// out = tanh(x / cap) · cap, n numbers.
void softcap(Dtype dtype, const void* x, int64_t n, float cap, void* out);

// Kernels are cut into no more parts than this for so many numbers: a part costs a microsecond to hand out.
inline int64_t most_parts(int64_t numbers) { return numbers / 4096 > 1 ? numbers / 4096 : 1; }

// Calls each(at, x) for a span of numbers, a register at a time; each gives what is stored at `to + at`.
template <class T, class F>
void map(int64_t n, T* to, F each) {
  int64_t at = 0;
  for (; at + kLanes <= n; at += kLanes) store(to + at, each(at, kLanes));
  if (at < n) store(to + at, each(at, n - at), n - at);
}

template <class T>
Vec load_up_to(const T* from, int64_t n) {
  return n == kLanes ? load(from) : load(from, n);
}

}  // namespace minisgl
