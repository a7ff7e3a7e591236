// The dtype of a tensor, for operators whose kernels go by `by_dtype`.
#pragma once

#include <ATen/core/Tensor.h>

#include "pointwise.h"

namespace minisgl {

inline Dtype dtype_of(const at::Tensor& x, const char* op) {
  switch (x.scalar_type()) {
    case at::kFloat: return Dtype::fp32;
    case at::kBFloat16: return Dtype::bf16;
    case at::kHalf: return Dtype::fp16;
    default: TORCH_CHECK(false, op, ": dtype ", x.scalar_type(), "; fp32, bf16 and fp16 are built");
  }
}

}  // namespace minisgl
