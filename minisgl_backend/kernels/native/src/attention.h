// Paged attention: what its kernels are told. Everything that changes from step to step is behind a pointer.
//
// Numbers of a row depend on nothing but the row: its keys are cut at places that its own length gives, and the parts
// of a kernel take whole pieces.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "launch.h"

namespace minisgl {

enum class Stored { fp32, bf16, fp16 };

// The pages of a layer, [pages, page_size, kv_heads, dim], and the rows of a step.
struct Attention {
  Stored type;
  int64_t heads, kv_heads, dim, page_size;
  const void *k_pages, *v_pages;

  const void* q;  // [tokens, heads, dim]
  int64_t q_token, q_head;  // strides in values
  void* out;  // [tokens, heads, dim], contiguous

  const int64_t *starts, *lengths, *begins;  // of each row; begins: its first token in the batch
  const int64_t* tables;                     // [rows, table_columns]
  int64_t table_columns;
  const int64_t* members;  // the rows that this kernel is for
  int64_t count;           // of members

  float scale, softcap;
  int64_t window;      // 0: none
  const void* sinks;   // [heads] or nullptr
  Stored sinks_type;
  int64_t most_pieces;  // that a row can have here, in decode
  float* partial;       // what pieces come to, see partial_floats; nullptr where no row can have two

  int64_t group() const { return heads / kv_heads; }
  int64_t token_values() const { return kv_heads * dim; }
};

constexpr int64_t kMostPieces = 16;  // of a row's keys, in decode

// Decode: pieces of rows first; then, where some row can have several, what they give together.
void attend_pieces(const Attention& attention, Part part);
void join_pieces(const Attention& attention, Part part);
// The keys of a piece, where a row sees `seen` of them; a row of no more has one.
constexpr int64_t kLeastPiece = 256;
inline int64_t most_pieces(const Attention& a) {
  const int64_t keys = a.table_columns * a.page_size, seen = a.window ? std::min(keys, a.window + 15) : keys;
  return std::min((seen + kLeastPiece - 1) / kLeastPiece, kMostPieces);
}
inline int64_t partial_floats(const Attention& a) { return a.count * a.most_pieces * a.heads * (a.dim + 2); }

// Rows of any length, with or without a prefix.
void attend_chunks(const Attention& attention, Part part);

// Memory of this thread, 64 bytes aligned, valid until its next call with the same tag.
template <class Tag>
float* scratch(int64_t floats) {
  static thread_local std::vector<float> memory;
  if (static_cast<int64_t>(memory.size()) < floats + 16) memory.resize(floats + 16);
  return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
}

inline int64_t rounded_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// Where the keys of positions first … first + count - 1 lie, in values from the pages' begin.
inline void places_of(const Attention& a, int64_t row, int64_t first, int64_t count, int64_t* places) {
  const int64_t* table = a.tables + row * a.table_columns;
  const int64_t values = a.token_values();
  int64_t page = first / a.page_size, offset = first % a.page_size;
  for (int64_t i = 0; i < count; ++page, offset = 0) {
    const int64_t end = std::min(count, i + a.page_size - offset);
    int64_t place = (table[page] * a.page_size + offset) * values;
    for (; i < end; ++i, place += values) places[i] = place;
  }
}

}  // namespace minisgl
