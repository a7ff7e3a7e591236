#include "best.h"

#include <algorithm>
#include <limits>

#include "launch.h"

namespace minisgl {
namespace {

constexpr int64_t kBlock = 1024;  // looked through once more, if the largest number is in it

struct Lanes {
  explicit Lanes(Vec x) { store(values, x); }
  float values[kLanes];
};

// A register of a row's numbers. Where one is NaN min takes its second.
template <class T>
Vec number(const T* x) {
  return min(load(x), vec(std::numeric_limits<float>::infinity()));
}

// The registers of n numbers, which are at least kLanes, begin here; the last ones overlap.
inline int64_t begin_of(int64_t at, int64_t n) { return at + kLanes <= n ? at : n - kLanes; }

template <class T>
float largest(const T* x, int64_t n) {
  Vec most = vec(-std::numeric_limits<float>::infinity());
  for (int64_t at = 0; at < n; at += kLanes) most = max(number(x + begin_of(at, n)), most);
  float best = -std::numeric_limits<float>::infinity();
  for (const float value : Lanes(most).values) best = value > best ? value : best;
  return best;
}

// Where `best`, which is there, first stands.
template <class T>
int64_t place_of(float best, const T* x, int64_t n) {
  for (int64_t at = 0;; at += kLanes) {
    const Lanes lanes(number(x + begin_of(at, n)));
    for (int64_t i = 0; i < kLanes; ++i) {
      if (lanes.values[i] == best) return begin_of(at, n) + i;
    }
  }
}

template <class T>
void best_of_row(const T* x, int64_t n, float* best, int64_t* place) {
  T padded[kLanes];
  if (n < kLanes) {
    for (int64_t i = 0; i < kLanes; ++i) padded[i] = x[i < n ? i : 0];
    x = padded;
    n = kLanes;
  }
  int64_t first = 0;  // of the block with the best
  *best = largest(x, std::min(n, kBlock));
  for (int64_t at = kBlock; at < n; at += kBlock) {
    const int64_t begin = std::min(at, n - kLanes);
    const float found = largest(x + begin, std::min(n - begin, kBlock));
    if (found > *best) {
      *best = found;
      first = begin;
    }
  }
  *place = first + place_of(*best, x + first, std::min(n - first, kBlock));
}

}  // namespace

void best_of_rows(Dtype dtype, Vectors x, float* best, int64_t* places) {
  by_dtype(dtype, [=](auto kind) {
    using T = decltype(kind);
    const auto kernel = [=](Part part) {
      const Span rows = share(x.outer, part);
      for (int64_t row = rows.begin; row < rows.end; ++row) {
        best_of_row(static_cast<const T*>(x.data) + row * x.outer_stride, x.size, best + row, places + row);
      }
    };
    launch(kernel, most_parts(x.outer * x.size / 8));  // eight times as quick as what most_parts reckons with
  });
}

}  // namespace minisgl
