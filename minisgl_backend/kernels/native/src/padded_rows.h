// Rows whose depth is no whole number of blocks, copied to where zeros follow them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace minisgl {

// [rows, depth] → [rows, padded] in memory of this thread, valid until its next call.
inline const uint16_t* padded_rows(const uint16_t* x, int64_t stride, int64_t rows, int64_t depth, int64_t padded) {
  static thread_local std::vector<uint16_t> scratch;
  if (static_cast<int64_t>(scratch.size()) < rows * padded) scratch.resize(rows * padded);
  for (int64_t row = 0; row < rows; ++row) {
    uint16_t* to = scratch.data() + row * padded;
    std::copy_n(x + row * stride, depth, to);
    std::fill(to + depth, to + padded, uint16_t{0});
  }
  return scratch.data();
}

}  // namespace minisgl
