// How a source registers its operators: MINISGL_OPERATORS(m) { define(m, "name(Tensor x) -> Tensor", function); }
//
// They are torch.ops.minisgl_LEVEL.name: libraries of several levels can be in one process. The dispatcher holds no GIL.
// Compiling torch/library.h takes six seconds, so kernels live in other sources than operators.
#pragma once

#include <torch/library.h>

#define MINISGL_OPERATORS_IN(name, m) TORCH_LIBRARY_FRAGMENT(name, m)
#define MINISGL_OPERATORS(m) MINISGL_OPERATORS_IN(MINISGL_NAMESPACE, m)

namespace minisgl {

// For tensors on the CPU, and of no gradient.
template <class Function>
void define(torch::Library& m, const char* schema, Function* function) {
  m.def(schema, torch::dispatch(c10::DispatchKey::CPU, function));
}

}  // namespace minisgl
