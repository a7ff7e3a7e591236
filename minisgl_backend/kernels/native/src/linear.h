// The product of rows with a packed weight: out = x · weightᵀ + bias.
//
// A packed weight lies in strips of 16 outputs, padded with zeros to whole strips and, in bf16, to a depth of 32 values:
//
//   fp32 [strips][depth][16]          one row of a strip is a vector of 16 outputs' values at one depth
//   bf16 [strips][depth / 2][16][2]   the same for two depths, as vdpbf16ps and the tiles of AMX take them
//
// Each number is the sum over depth in one fixed order, whatever the number of rows, parts and threads.
#pragma once

#include <cstdint>

#include "launch.h"

namespace minisgl {

constexpr int kStrip = 16;       // outputs
constexpr int kBf16Depth = 32;   // bf16 weights are padded to a multiple

struct Linear {
  const void* x;        // [rows, depth]
  int64_t x_stride;     // values from row to row
  const void* weight;   // packed, 64 bytes aligned
  const void* bias;     // [outputs] of x's dtype, or nullptr
  void* out;            // [rows, outputs] of x's dtype
  int64_t out_stride;   // values
  int64_t rows, depth, outputs;

  int64_t strips() const { return (outputs + kStrip - 1) / kStrip; }
};

void linear_fp32(const Linear& linear, Part part);
void linear_bf16(const Linear& linear, Part part);

#ifdef __AMX_BF16__
void linear_bf16_tiles(const Linear& linear, Part part);
#endif

}  // namespace minisgl
