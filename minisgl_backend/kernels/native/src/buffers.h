// Where operators get the tensors that they make.
#pragma once

#include <ATen/core/Tensor.h>

namespace minisgl {

// A new contiguous CPU tensor, not initialised, 64 bytes aligned. While this thread records, it is of the recording's
// pool: it stays where it is for every replay, and what is let go of is used again for what comes after in the same
// recording. Otherwise large tensors come from a pool of the process, which keeps what is let go of for the next. Every
// tensor that an operator makes comes from here.
at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype);

// Holds a tensor until the recording of this thread is freed: what a kernel reads and nobody else is sure to hold.
void keep(const at::Tensor& tensor);

}  // namespace minisgl
