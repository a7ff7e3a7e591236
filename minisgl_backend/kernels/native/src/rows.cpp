#include "launch.h"
#include "pointwise.h"

namespace minisgl {

void take_rows(Dtype dtype, Vectors table, Index index, Span own, int64_t n, float factor, void* out) {
  by_dtype(dtype, [=](auto kind) {
    using T = decltype(kind);
    const auto kernel = [=](Part part) {
      const Span rows = share(n, part);
      for (int64_t row = rows.begin; row < rows.end; ++row) {
        const int64_t number = index[row];
        T* to = static_cast<T*>(out) + row * table.size;
        if (number < own.begin || number >= own.end) {
          std::memset(to, 0, table.size * sizeof(T));
          continue;
        }
        const T* from = static_cast<const T*>(table.data) + (number - own.begin) * table.outer_stride;
        if (factor == 1.0f) {
          std::memcpy(to, from, table.size * sizeof(T));
        } else {
          map(table.size, to, [&](int64_t at, int64_t count) { return load_up_to(from + at, count) * vec(factor); });
        }
      }
    };
    launch(kernel, most_parts(n * table.size));
  });
}

void add(Dtype dtype, const void* x, const void* y, int64_t n, void* out) {
  by_dtype(dtype, [=](auto kind) {
    using T = decltype(kind);
    const auto kernel = [=](Part part) {
      const Span span = share(n, part);
      const T* a = static_cast<const T*>(x) + span.begin;
      const T* b = static_cast<const T*>(y) + span.begin;
      map(span.end - span.begin, static_cast<T*>(out) + span.begin,
          [&](int64_t at, int64_t count) { return load_up_to(a + at, count) + load_up_to(b + at, count); });
    };
    launch(kernel, most_parts(n));
  });
}

}  // namespace minisgl
