#include "buffers.h"
#include "launch.h"
#include "linear.h"
#include "ops.h"

namespace minisgl {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

void check(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias, int64_t outputs) {
  const auto dtype = x.scalar_type();
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kBFloat16, "linear: x is ", dtype, ", not fp32 or bf16");
  TORCH_CHECK(x.dim() == 2 && (x.size(1) == 1 || x.stride(1) == 1), "linear: x is not [rows, depth], rows contiguous");
  const bool bf16 = dtype == at::kBFloat16;
  const int64_t strips = (outputs + kStrip - 1) / kStrip, depth = x.size(1);
  const int64_t deep = bf16 ? (depth + kBf16Depth - 1) / kBf16Depth * kBf16Depth / 2 : depth;
  const auto shape = bf16 ? std::vector<int64_t>{strips, deep, kStrip, 2} : std::vector<int64_t>{strips, deep, kStrip};
  TORCH_CHECK(weight.scalar_type() == dtype && weight.sizes() == at::IntArrayRef(shape) && weight.is_contiguous(),
              "linear: weight is ", weight.scalar_type(), " ", weight.sizes(), ", not ", dtype, " ",
              at::IntArrayRef(shape), ", contiguous");
  TORCH_CHECK(reinterpret_cast<uintptr_t>(weight.const_data_ptr()) % 64 == 0, "linear: weight is not 64 bytes aligned");
  TORCH_CHECK(!bias || (bias->scalar_type() == dtype && bias->dim() == 1 && bias->size(0) == outputs &&
                        bias->is_contiguous()),
              "linear: bias is not [", outputs, "] of x's dtype, contiguous");
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias, int64_t outputs) {
  check(x, weight, bias, outputs);
  at::Tensor out = empty({x.size(0), outputs}, x.scalar_type());
  if (x.size(0) == 0 || outputs == 0) return out;
  keep(weight);
  if (bias) keep(*bias);
  const Linear product{x.const_data_ptr(),
                       x.stride(0),
                       weight.const_data_ptr(),
                       bias ? bias->const_data_ptr() : nullptr,
                       out.mutable_data_ptr(),
                       outputs,
                       x.size(0),
                       x.size(1),
                       outputs};
  if (x.scalar_type() == at::kFloat) {
    launch([=](Part part) { linear_fp32(product, part); });
  } else {
#ifdef __AMX_BF16__
    launch([=](Part part) { linear_bf16_tiles(product, part); });
#else
    launch([=](Part part) { linear_bf16(product, part); });
#endif
  }
  return out;
}

}  // namespace

MINISGL_OPERATORS(m) { define(m, "linear(Tensor x, Tensor weight, Tensor? bias, int outputs) -> Tensor", linear); }

}  // namespace minisgl
