// How a kernel runs: in parts, on torch's OpenMP threads, now, and again when a recording of it is replayed.
#pragma once

#include <climits>
#include <cstdint>
#include <functional>
#include <memory>

namespace minisgl {

// A kernel does part `index` of `count`. Parts need nothing of one another, and which thread does a part, or into how
// many the work is cut, changes no number.
struct Part {
  int index, count;
};

// A closure over plain pointers, sizes and strides: no tensors, no exceptions, no allocation in its hot part
// (thread-local scratch is fine). What changes from step to step is read from memory when it runs.
using Kernel = std::function<void(Part)>;

// Runs the kernel on at::get_num_threads() parts, but no more than `most_parts`: work too small to share names 1.
// While this thread records, the kernel is kept as well. Work in two phases is two launches.
void launch(Kernel kernel, int64_t most_parts = INT_MAX);

// A place that the recording of this thread frees with itself, empty at first; nullptr where this thread does not record.
std::shared_ptr<void>* recording_pool();

// Holds `object` until the recording of this thread is freed; does nothing where there is none.
void keep(std::shared_ptr<void> object);

struct Span {
  int64_t begin, end;
};

// The items of a part, where `items` are dealt out evenly and in order.
inline Span share(int64_t items, Part part) {
  const int64_t each = items / part.count, rest = items % part.count;
  const int64_t begin = part.index * each + (part.index < rest ? part.index : rest);
  return {begin, begin + each + (part.index < rest ? 1 : 0)};
}

}  // namespace minisgl
