#include <limits>
#include <optional>

#include "attention.h"
#include "buffers.h"
#include "ops.h"

namespace minisgl {
namespace {

Stored stored(const at::Tensor& x) {
  switch (x.scalar_type()) {
    case at::kFloat: return Stored::fp32;
    case at::kBFloat16: return Stored::bf16;
    case at::kHalf: return Stored::fp16;
    default: TORCH_CHECK(false, "attention: ", x.scalar_type(), " is none of fp32, bf16, fp16");
  }
}

const int64_t* indices(const at::Tensor& x, int64_t dims, const char* name) {
  TORCH_CHECK(x.scalar_type() == at::kLong && x.dim() == dims && x.is_contiguous(), "attention: ", name, " is no int64 [",
              dims == 2 ? "rows, columns]" : "rows]", " without gaps");
  return x.const_data_ptr<int64_t>();
}

void check_pages(const at::Tensor& k_pages, const at::Tensor& v_pages) {
  TORCH_CHECK(k_pages.dim() == 4 && k_pages.is_contiguous() && v_pages.is_contiguous() &&
                  k_pages.sizes() == v_pages.sizes() && k_pages.scalar_type() == v_pages.scalar_type(),
              "attention: pages are [pages, page_size, kv_heads, head_dim] without gaps, keys' as values'");
}

void check_tokens(const at::Tensor& x, const at::Tensor& pages, int64_t heads, const char* name) {
  TORCH_CHECK(x.dim() == 3 && x.size(1) == heads && x.size(2) == pages.size(3) && x.stride(2) == 1 &&
                  x.scalar_type() == pages.scalar_type(),
              "attention: ", name, " ", x.sizes(), " does not go with pages ", pages.sizes());
}

// Of the rows of one step, each.
void check_rows(const at::Tensor& starts, const at::Tensor& lengths, const at::Tensor& begins,
                const at::Tensor& page_tables) {
  TORCH_CHECK(lengths.sizes() == starts.sizes() && begins.sizes() == starts.sizes() &&
                  page_tables.size(0) == starts.size(0),
              "attention: starts ", starts.sizes(), ", lengths ", lengths.sizes(), ", begins ", begins.sizes(),
              " and page_tables ", page_tables.sizes(), " differ in rows");
}

// Where the step's tokens are stored: page · page_size + offset of each, in the rows' order. A replay looks at no row
// again: who writes the rows of a recorded step keeps within what it was recorded with.
void fill_places(const at::Tensor& places, const at::Tensor& starts, const at::Tensor& lengths,
                 const at::Tensor& begins, const at::Tensor& page_tables, int64_t page_size) {
  indices(places, 1, "places");
  auto* to = places.mutable_data_ptr<int64_t>();
  const auto *from = indices(starts, 1, "starts"), *count = indices(lengths, 1, "lengths");
  const auto *begin = indices(begins, 1, "begins"), *tables = indices(page_tables, 2, "page_tables");
  check_rows(starts, lengths, begins, page_tables);
  const int64_t rows = starts.size(0), columns = page_tables.size(1);
  for (int64_t row = 0; row < rows; ++row) {
    TORCH_CHECK(from[row] >= 0 && from[row] + count[row] <= columns * page_size && begin[row] >= 0 &&
                    begin[row] + count[row] <= places.size(0),
                "attention: row ", row, " of ", count[row], " tokens from ", from[row], " on, number ", begin[row],
                " of the batch, goes beyond ", columns, " pages or ", places.size(0), " tokens");
  }
  launch(
      [=](Part part) {
        const Span mine = share(rows, part);
        for (int64_t row = mine.begin; row < mine.end; ++row) {
          const int64_t* table = tables + row * columns;
          for (int64_t i = 0; i < count[row]; ++i) {
            const int64_t position = from[row] + i;
            to[begin[row] + i] = table[position / page_size] * page_size + position % page_size;
          }
        }
      },
      1);
}

// Token t's key and value to places[t].
void write_kv(const at::Tensor& k_pages, const at::Tensor& v_pages, const at::Tensor& k, const at::Tensor& v,
              const at::Tensor& places) {
  check_pages(k_pages, v_pages);
  check_tokens(k, k_pages, k_pages.size(2), "k");
  check_tokens(v, v_pages, k_pages.size(2), "v");
  const int64_t* place = indices(places, 1, "places");
  TORCH_CHECK(places.size(0) == k.size(0) && k.size(0) == v.size(0), "attention: k, v and places differ in tokens");
  const int64_t heads = k.size(1), bytes = k.size(2) * k.element_size(), size = k.element_size(), tokens = k.size(0);
  const at::Tensor *from[2] = {&k, &v}, *pages[2] = {&k_pages, &v_pages};
  for (int i = 0; i < 2; ++i) {
    const auto* x = static_cast<const char*>(from[i]->const_data_ptr());
    auto* to = static_cast<char*>(pages[i]->mutable_data_ptr());
    const int64_t token_bytes = from[i]->stride(0) * size, head_bytes = from[i]->stride(1) * size;
    launch(
        [=](Part part) {
          const Span mine = share(tokens, part);
          for (int64_t t = mine.begin; t < mine.end; ++t)
            for (int64_t h = 0; h < heads; ++h)
              std::memcpy(to + (place[t] * heads + h) * bytes, x + t * token_bytes + h * head_bytes, bytes);
        },
        std::max<int64_t>(1, tokens * heads * bytes / 16384));
  }
}

// Of rows of one token (singles) and of several (chunks), each given by its index in starts, lengths, begins and
// page_tables. → [tokens, heads, head_dim], new. Keys and values are in the pages already.
at::Tensor attend(const at::Tensor& q, const at::Tensor& k_pages, const at::Tensor& v_pages, const at::Tensor& starts,
                  const at::Tensor& lengths, const at::Tensor& begins, const at::Tensor& page_tables,
                  const at::Tensor& singles, const at::Tensor& chunks, double scale, int64_t window, double softcap,
                  const std::optional<at::Tensor>& sinks) {
  check_pages(k_pages, v_pages);
  check_tokens(q, k_pages, q.size(1), "q");
  const int64_t heads = q.size(1), kv_heads = k_pages.size(2), dim = k_pages.size(3), page_size = k_pages.size(1);
  TORCH_CHECK(dim % 16 == 0 && dim >= 16 && dim <= 256, "attention: head_dim is ", dim, ", not 16, 32 … 256");
  TORCH_CHECK(heads % kv_heads == 0 && heads / kv_heads <= 256, "attention: ", heads, " heads of ", kv_heads);
  TORCH_CHECK(scale > 0 && softcap >= 0 && window >= 0, "attention: scale, softcap or window is negative, or scale 0");
  TORCH_CHECK(!sinks || (sinks->is_contiguous() && sinks->numel() == heads), "attention: sinks are not [heads]");
  const at::Tensor out = empty({q.size(0), heads, dim}, q.scalar_type());

  Attention a{};
  a.type = stored(q);
  a.heads = heads, a.kv_heads = kv_heads, a.dim = dim, a.page_size = page_size;
  a.k_pages = k_pages.const_data_ptr(), a.v_pages = v_pages.const_data_ptr();
  a.q = q.const_data_ptr(), a.q_token = q.stride(0), a.q_head = q.stride(1);
  a.out = out.mutable_data_ptr();
  a.starts = indices(starts, 1, "starts"), a.lengths = indices(lengths, 1, "lengths");
  a.begins = indices(begins, 1, "begins"), a.tables = indices(page_tables, 2, "page_tables");
  a.table_columns = page_tables.size(1);
  check_rows(starts, lengths, begins, page_tables);
  a.scale = static_cast<float>(scale), a.softcap = static_cast<float>(softcap), a.window = window;
  if (sinks) {
    a.sinks = sinks->const_data_ptr();
    a.sinks_type = stored(*sinks);
  }
  if (singles.size(0)) {
    a.members = indices(singles, 1, "singles"), a.count = singles.size(0);
    a.most_pieces = most_pieces(a);
    at::Tensor partial;
    if (a.most_pieces > 1) {
      partial = empty({partial_floats(a)}, at::kFloat);
      a.partial = partial.mutable_data_ptr<float>();
    }
    launch([a](Part part) { attend_pieces(a, part); }, a.count * kv_heads * a.most_pieces);
    if (a.most_pieces > 1) launch([a](Part part) { join_pieces(a, part); }, a.count * heads);
  }
  if (chunks.size(0)) {
    a.members = indices(chunks, 1, "chunks"), a.count = chunks.size(0);
    launch([a](Part part) { attend_chunks(a, part); });
  }
  return out;
}

}  // namespace

MINISGL_OPERATORS(m) {
  define(m,
         "fill_places(Tensor(a!) places, Tensor starts, Tensor lengths, Tensor begins, Tensor page_tables, "
         "int page_size) -> ()",
         fill_places);
  define(m, "write_kv(Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor k, Tensor v, Tensor places) -> ()", write_kv);
  define(m,
         "attend(Tensor q, Tensor k_pages, Tensor v_pages, Tensor starts, Tensor lengths, Tensor begins, "
         "Tensor page_tables, Tensor singles, Tensor chunks, float scale, int window, float softcap, Tensor? sinks) "
         "-> Tensor",
         attend);
}

}  // namespace minisgl
