// What the ranks of one machine say to one another through memory that all of them have mapped: see distributed/shared.py.
//
//   [mailbox of rank 0] … [mailbox of rank n - 1]  [slots of even rounds: rank 0 … n - 1]  [slots of odd rounds: …]
//
// A round: every rank writes a piece into its slot and says so in its mailbox, waits for all others' word, and reads
// their slots. Who begins round k + 2 has read all of round k + 1, for which every rank had read all of round k: two sets
// of slots are enough. All ranks go through the same rounds, so each counts them by itself, in its own mailbox.
#pragma once

#include <cstdint>

#include "pointwise.h"

namespace minisgl {

struct Exchange {
  uint8_t* memory;  // zeros at the first round
  int64_t rank, ranks, slot_bytes;
  double patience_s;  // with a rank that does not come: then this process ends, with a line
};

constexpr int64_t kMailboxBytes = 128;

inline int64_t exchange_bytes(int64_t ranks, int64_t slot_bytes) { return ranks * (kMailboxBytes + 2 * slot_bytes); }

// x += the other ranks' x, n numbers: summed in fp32, in the order of the ranks, so all have the same.
void add_up(Dtype dtype, Exchange exchange, void* x, int64_t n);

// out [rows, columns]: the ranks' x [rows, width] side by side, as far as there are columns. Widths in bytes.
void join_columns(Exchange exchange, const void* x, int64_t rows, int64_t width, int64_t columns, void* out);

// x = rank 0's x.
void from_first(Exchange exchange, void* x, int64_t bytes);

}  // namespace minisgl
