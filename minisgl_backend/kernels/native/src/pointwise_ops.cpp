#include <cstring>

#include "buffers.h"
#include "launch.h"
#include "ops.h"

namespace minisgl {
namespace {

at::Tensor copy(const at::Tensor& x) {
  TORCH_CHECK(x.is_contiguous(), "copy: x is not contiguous");
  at::Tensor out = empty(x.sizes(), x.scalar_type());
  const auto* from = static_cast<const char*>(x.const_data_ptr());
  auto* to = static_cast<char*>(out.mutable_data_ptr());
  const auto bytes = static_cast<int64_t>(x.nbytes());
  launch([=](Part part) {
    const Span span = share(bytes, part);
    std::memcpy(to + span.begin, from + span.begin, span.end - span.begin);
  });
  return out;
}

}  // namespace

MINISGL_OPERATORS(m) { define(m, "copy(Tensor x) -> Tensor", copy); }

}  // namespace minisgl
