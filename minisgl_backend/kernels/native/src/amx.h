// The tile registers of AMX. The kernel's leave to use them is asked for before this level is loaded (levels.py).
#pragma once

#ifdef __AMX_BF16__

#include <immintrin.h>

#include <cstdint>

namespace minisgl {

// What ldtilecfg reads. A tile whose rows are 0 is not there.
struct alignas(64) TileShapes {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int tile_rows, int tile_row_bytes) {
    rows[tile] = static_cast<uint8_t>(tile_rows);
    row_bytes[tile] = static_cast<uint16_t>(tile_rows ? tile_row_bytes : 0);
  }
};

// Clears all tiles. Not _tile_loadconfig: of gcc 12 it says that eight bytes are read, and the stores of the other 56
// may then come after it.
inline void load_shapes(const TileShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes) : "memory"); }

// Between plain stores and a tile's load of the same memory: gcc 12 does not know what the load reads.
inline void stores_are_done() { asm volatile("" ::: "memory"); }

}  // namespace minisgl

#endif
