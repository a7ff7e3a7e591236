// The operators of exchange.h. `memory` is mapped by all ranks; the recording and the caller keep it.
#include <ATen/core/Tensor.h>

#include "buffers.h"
#include "dtype_of.h"
#include "exchange.h"
#include "ops.h"

namespace minisgl {
namespace {

using at::Tensor;

Exchange exchange_of(const Tensor& memory, int64_t rank, int64_t ranks, double patience_s, const char* op) {
  TORCH_CHECK(memory.scalar_type() == at::kByte && memory.is_contiguous() && memory.dim() == 1, op, ": memory in bytes");
  TORCH_CHECK(0 <= rank && rank < ranks, op, ": rank ", rank, " of ", ranks);
  const int64_t slots = memory.numel() - ranks * kMailboxBytes, slot_bytes = slots / (2 * ranks) / 64 * 64;
  TORCH_CHECK(slot_bytes > 0 && reinterpret_cast<uintptr_t>(memory.data_ptr()) % kMailboxBytes == 0, op, ": ",
              memory.numel(), " bytes of memory for ", ranks, " ranks");
  return {memory.mutable_data_ptr<uint8_t>(), rank, ranks, slot_bytes, patience_s};
}

void add_up_op(const Tensor& x, const Tensor& memory, int64_t rank, int64_t ranks, double patience_s) {
  const char* op = "add_up";
  TORCH_CHECK(x.is_contiguous(), op, ": gaps");
  add_up(dtype_of(x, op), exchange_of(memory, rank, ranks, patience_s, op), x.mutable_data_ptr(), x.numel());
}

Tensor join_columns_op(const Tensor& x, int64_t columns, const Tensor& memory, int64_t rank, int64_t ranks,
                       double patience_s) {
  const char* op = "join_columns";
  TORCH_CHECK(x.dim() == 2 && x.is_contiguous(), op, ": ", x.sizes(), " is no matrix without gaps");
  TORCH_CHECK(0 < columns && columns <= ranks * x.size(1), op, ": ", columns, " columns of ", ranks, " · ", x.size(1));
  Tensor out = empty({x.size(0), columns}, x.scalar_type());
  const int64_t bytes = x.element_size();
  join_columns(exchange_of(memory, rank, ranks, patience_s, op), x.const_data_ptr(), x.size(0), x.size(1) * bytes,
               columns * bytes, out.mutable_data_ptr());
  return out;
}

void from_first_op(const Tensor& x, const Tensor& memory, int64_t rank, int64_t ranks, double patience_s) {
  const char* op = "from_first";
  TORCH_CHECK(x.is_contiguous(), op, ": gaps");
  from_first(exchange_of(memory, rank, ranks, patience_s, op), x.mutable_data_ptr(), x.nbytes());
}

}  // namespace

MINISGL_OPERATORS(m) {
  define(m, "add_up(Tensor(a!) x, Tensor memory, int rank, int ranks, float patience_s) -> ()", add_up_op);
  define(m,
         "join_columns(Tensor x, int columns, Tensor memory, int rank, int ranks, float patience_s) -> Tensor",
         join_columns_op);
  define(m, "from_first(Tensor(a!) x, Tensor memory, int rank, int ranks, float patience_s) -> ()", from_first_op);
}

}  // namespace minisgl
