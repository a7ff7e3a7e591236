// The operators of pointwise.h: what is given is checked, what is made is new.
#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>

#include "best.h"
#include "buffers.h"
#include "dtype_of.h"
#include "ops.h"
#include "pointwise.h"

namespace minisgl {
namespace {

using at::Tensor;
using Maybe = std::optional<Tensor>;

// x [tokens, size] or [tokens, heads, size], the last dimension without gaps.
Vectors vectors(const Tensor& x, const char* op) {
  TORCH_CHECK(x.dim() == 2 || x.dim() == 3, op, ": ", x.dim(), " dimensions instead of 2 or 3");
  TORCH_CHECK(x.size(-1) <= 1 || x.stride(-1) == 1, op, ": gaps in the last dimension");
  const bool heads = x.dim() == 3;
  return {x.const_data_ptr(), x.size(0), heads ? x.size(1) : 1, x.size(-1), x.stride(0), heads ? x.stride(1) : 0};
}

void check_alike(const Tensor& x, const Tensor& y, const char* op) {
  TORCH_CHECK(x.scalar_type() == y.scalar_type() && x.sizes() == y.sizes(), op, ": ", x.scalar_type(), x.sizes(),
              " beside ", y.scalar_type(), y.sizes());
}

NormWeight norm_weight(const Tensor& x, const Tensor& weight, double eps, const char* op) {
  TORCH_CHECK(weight.is_contiguous() && weight.dim() == 1 && weight.size(0) == x.size(-1), op, ": weight",
              weight.sizes(), " for vectors of ", x.size(-1));
  const bool wide = weight.scalar_type() != x.scalar_type();
  TORCH_CHECK(!wide || weight.scalar_type() == at::kFloat, op, ": a weight of ", weight.scalar_type(), " for ",
              x.scalar_type());
  return {weight.const_data_ptr(), wide, static_cast<float>(eps)};
}

Tensor rms_norm_op(const Tensor& x, const Tensor& weight, double eps) {
  Tensor out = empty(x.sizes(), x.scalar_type());
  rms_norm(dtype_of(x, "rms_norm"), vectors(x, "rms_norm"), norm_weight(x, weight, eps, "rms_norm"),
           out.mutable_data_ptr(), nullptr, nullptr);
  return out;
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& added, const Tensor& weight, double eps) {
  const char* op = "add_rms_norm";
  check_alike(x, added, op);
  TORCH_CHECK(x.is_contiguous() && added.is_contiguous(), op, ": gaps");
  Tensor sum = empty(x.sizes(), x.scalar_type()), out = empty(x.sizes(), x.scalar_type());
  rms_norm(dtype_of(x, op), vectors(x, op), norm_weight(x, weight, eps, op), out.mutable_data_ptr(),
           added.const_data_ptr(), sum.mutable_data_ptr());
  return {sum, out};
}

Tensor gated_op(const Tensor& gate, const Tensor& up, Activation activation, const char* op) {
  check_alike(gate, up, op);
  TORCH_CHECK(gate.dim() == 2, op, ": ", gate.dim(), " dimensions instead of 2");
  Tensor out = empty(gate.sizes(), gate.scalar_type());
  gated(dtype_of(gate, op), activation, vectors(gate, op), vectors(up, op), out.mutable_data_ptr());
  return out;
}

Tensor silu_mul(const Tensor& gate, const Tensor& up) { return gated_op(gate, up, Activation::silu, "silu_mul"); }

Tensor gelu_tanh_mul(const Tensor& gate, const Tensor& up) {
  return gated_op(gate, up, Activation::gelu_tanh, "gelu_tanh_mul");
}

// cos, sin [tokens, 1, pairs].
Rotary rotary_of(const Tensor& q, const Maybe& cos, const Maybe& sin, bool interleaved, const char* op) {
  if (!cos) return {};
  TORCH_CHECK(sin, op, ": cos without sin");
  check_alike(*cos, *sin, op);
  const int64_t pairs = cos->size(-1);
  TORCH_CHECK(cos->scalar_type() == at::kFloat && cos->is_contiguous() && sin->is_contiguous() &&
                  cos->numel() == q.size(0) * pairs && 2 * pairs <= q.size(-1),
              op, ": cos and sin", cos->sizes(), " for ", q.sizes());
  return {cos->const_data_ptr<float>(), sin->const_data_ptr<float>(), pairs, interleaved};
}

// x [tokens, heads, head_dim], as many tokens and dimensions as q.
Vectors heads_of(const Tensor& q, const Tensor& x, const char* op) {
  TORCH_CHECK(q.dim() == 3 && x.dim() == 3 && x.size(0) == q.size(0) && x.size(2) == q.size(2) &&
                  x.scalar_type() == q.scalar_type(),
              op, ": ", x.scalar_type(), x.sizes(), " beside ", q.scalar_type(), q.sizes());
  TORCH_CHECK(q.size(2) <= kMostDim, op, ": head_dim ", q.size(2), "; up to ", kMostDim, " is built");
  return vectors(x, op);
}

// pages [pages, page_size, kv_heads, head_dim].
Places places_of(const Tensor& x, const Tensor& pages, const Tensor& places, const char* op) {
  TORCH_CHECK(pages.dim() == 4 && pages.is_contiguous() && pages.scalar_type() == x.scalar_type() &&
                  pages.size(2) == x.size(1) && pages.size(3) == x.size(2),
              op, ": pages", pages.sizes(), " for ", x.sizes());
  TORCH_CHECK(places.scalar_type() == at::kLong && places.is_contiguous() && places.numel() == x.size(0), op,
              ": a place in int64 for each token");
  return {pages.mutable_data_ptr(), places.const_data_ptr<int64_t>(), x.size(1) * x.size(2)};
}

NormWeight maybe_norm(const Tensor& x, const Maybe& weight, double eps, const char* op) {
  return weight ? norm_weight(x, *weight, eps, op) : NormWeight{};
}

std::tuple<Tensor, Tensor> rotate_op(const Tensor& q, const Tensor& k, const Maybe& cos, const Maybe& sin,
                                     bool interleaved, const Maybe& q_weight, const Maybe& k_weight, double eps) {
  const char* op = "rotate";
  const Vectors queries = heads_of(q, q, op), keys = heads_of(q, k, op);
  Tensor q_out = empty(q.sizes(), q.scalar_type()), k_out = empty(k.sizes(), k.scalar_type());
  rotate(dtype_of(q, op), rotary_of(q, cos, sin, interleaved, op), queries,
         maybe_norm(q, q_weight, eps, op), q_out.mutable_data_ptr(), keys, maybe_norm(k, k_weight, eps, op),
         {k_out.mutable_data_ptr(), nullptr, k.size(1) * k.size(2)}, {}, {});
  return {q_out, k_out};
}

Tensor rotate_and_write(const Tensor& q, const Tensor& k, const Tensor& v, const Maybe& cos, const Maybe& sin,
                        bool interleaved, const Maybe& q_weight, const Maybe& k_weight, double eps,
                        const Tensor& k_pages, const Tensor& v_pages, const Tensor& places) {
  const char* op = "rotate_and_write";
  const Vectors queries = heads_of(q, q, op), keys = heads_of(q, k, op), values = heads_of(q, v, op);
  Tensor out = empty(q.sizes(), q.scalar_type());
  rotate(dtype_of(q, op), rotary_of(q, cos, sin, interleaved, op), queries,
         maybe_norm(q, q_weight, eps, op), out.mutable_data_ptr(), keys, maybe_norm(k, k_weight, eps, op),
         places_of(k, k_pages, places, op), values, places_of(v, v_pages, places, op));
  return out;
}

Index index_of(const Tensor& table, const Tensor& index, const char* op) {
  TORCH_CHECK(table.dim() == 2 && index.dim() == 1, op, ": table", table.sizes(), ", index", index.sizes());
  const bool wide = index.scalar_type() == at::kLong;
  TORCH_CHECK((wide || index.scalar_type() == at::kInt) && index.is_contiguous(), op,
              ": the index is int32 or int64, without gaps");
  return {index.const_data_ptr(), wide};
}

Tensor taken(const Tensor& table, const Tensor& index, Index rows, Span own, double factor, const char* op) {
  Tensor out = empty({index.numel(), table.size(1)}, table.scalar_type());
  take_rows(dtype_of(table, op), vectors(table, op), rows, own, index.numel(), static_cast<float>(factor),
            out.mutable_data_ptr());
  return out;
}

Tensor take_own_rows(const Tensor& table, const Tensor& index, int64_t first, int64_t rows, double factor) {
  const char* op = "take_own_rows";
  TORCH_CHECK(0 <= rows && rows <= table.size(0), op, ": ", rows, " rows of ", table.size(0));
  return taken(table, index, index_of(table, index, op), {first, first + rows}, factor, op);
}

Tensor take_rows_op(const Tensor& table, const Tensor& index, double factor) {
  const char* op = "take_rows";
  const Index rows = index_of(table, index, op);
  for (int64_t i = 0; i < index.numel(); ++i) {
    TORCH_CHECK_INDEX(0 <= rows[i] && rows[i] < table.size(0), op, ": row ", rows[i], " of ", table.size(0));
  }
  return taken(table, index, rows, {0, table.size(0)}, factor, op);
}

Tensor add_op(const Tensor& x, const Tensor& y) {
  check_alike(x, y, "add");
  TORCH_CHECK(x.is_contiguous() && y.is_contiguous(), "add: gaps");
  Tensor out = empty(x.sizes(), x.scalar_type());
  add(dtype_of(x, "add"), x.const_data_ptr(), y.const_data_ptr(), x.numel(), out.mutable_data_ptr());
  return out;
}

Tensor softcap_op(const Tensor& x, double cap) {
  TORCH_CHECK(x.is_contiguous(), "softcap: gaps");
  Tensor out = empty(x.sizes(), x.scalar_type());
  softcap(dtype_of(x, "softcap"), x.const_data_ptr(), x.numel(), static_cast<float>(cap), out.mutable_data_ptr());
  return out;
}

std::tuple<Tensor, Tensor> best_of_rows_op(const Tensor& x) {
  const char* op = "best_of_rows";
  TORCH_CHECK(x.dim() == 2 && x.size(1) > 0, op, ": ", x.sizes(), " instead of rows of numbers");
  Tensor best = empty({x.size(0)}, at::kFloat), places = empty({x.size(0)}, at::kLong);
  best_of_rows(dtype_of(x, op), vectors(x, op), best.mutable_data_ptr<float>(), places.mutable_data_ptr<int64_t>());
  return {best, places};
}

}  // namespace

MINISGL_OPERATORS(m) {
  define(m, "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", rms_norm_op);
  define(m, "add_rms_norm(Tensor x, Tensor added, Tensor weight, float eps) -> (Tensor, Tensor)", add_rms_norm);
  define(m, "silu_mul(Tensor gate, Tensor up) -> Tensor", silu_mul);
  define(m, "gelu_tanh_mul(Tensor gate, Tensor up) -> Tensor", gelu_tanh_mul);
  define(m,
         "rotate(Tensor q, Tensor k, Tensor? cos, Tensor? sin, bool interleaved, Tensor? q_weight, Tensor? k_weight, "
         "float eps) -> (Tensor, Tensor)",
         rotate_op);
  define(m,
         "rotate_and_write(Tensor q, Tensor k, Tensor v, Tensor? cos, Tensor? sin, bool interleaved, Tensor? q_weight, "
         "Tensor? k_weight, float eps, Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor places) -> Tensor",
         rotate_and_write);
  define(m, "take_own_rows(Tensor table, Tensor index, int first, int rows, float factor) -> Tensor", take_own_rows);
  define(m, "take_rows(Tensor table, Tensor index, float factor) -> Tensor", take_rows_op);
  define(m, "add(Tensor x, Tensor y) -> Tensor", add_op);
  define(m, "softcap(Tensor x, float cap) -> Tensor", softcap_op);
  define(m, "best_of_rows(Tensor x) -> (Tensor, Tensor)", best_of_rows_op);
}

}  // namespace minisgl
