#include "norm.h"

#include "launch.h"

namespace minisgl {
namespace {

template <class T>
void norm_rows(Span rows, Vectors x, NormWeight weight, T* out, const T* added, T* sum) {
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const int64_t outer = row / x.inner, inner = row % x.inner;
    const T* from = static_cast<const T*>(x.data) + outer * x.outer_stride + inner * x.inner_stride;
    if (added != nullptr) {
      const T* more = added + row * x.size;
      map(x.size, sum + row * x.size,
          [&](int64_t at, int64_t n) { return load_up_to(from + at, n) + load_up_to(more + at, n); });
      from = sum + row * x.size;
    }
    scale_row<T>(from, inverse_rms(from, x.size, weight.eps), weight, x.size, out + row * x.size);
  }
}

}  // namespace

void rms_norm(Dtype dtype, Vectors x, NormWeight weight, void* out, const void* added, void* sum) {
  const int64_t rows = x.outer * x.inner;
  by_dtype(dtype, [=](auto kind) {
    using T = decltype(kind);
    const auto kernel = [=](Part part) {
      norm_rows<T>(share(rows, part), x, weight, static_cast<T*>(out), static_cast<const T*>(added), static_cast<T*>(sum));
    };
    launch(kernel, most_parts(rows * x.size));
  });
}

}  // namespace minisgl
