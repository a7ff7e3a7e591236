// The bf16 product on AMX tiles, for any number of rows.
//
// Blocks of 32 rows and two strips in eight tiles: four sums, two of x, two of the weight. A tile of the weight is
// 1 KiB that lies together. Fewer rows are smaller tiles, not padding: one row reads nothing but the weight, and
// what a row's numbers are does not depend on its neighbours.
#ifdef __AMX_BF16__

#include <immintrin.h>

#include <algorithm>

#include "amx.h"
#include "linear.h"
#include "padded_rows.h"

namespace minisgl {
namespace {

constexpr int kTileRows = 16, kBlockRows = 2 * kTileRows;
constexpr int kTileDepth = kBf16Depth, kTileBytes = 1024;
constexpr int64_t kChunkRows = 256;  // of x, which then stay in the second cache while all strips pass
constexpr int64_t kAhead = 8;        // tiles of a strip that are asked for before they are needed

// One strip pair's walk over depth.
struct Strips {
  const char* first;  // the second follows `bytes` later
  int64_t bytes, tiles;
  const char* next;  // the pair that comes after
};

inline void prefetch_tile(const Strips& strips, int64_t tile, int64_t strip) {
  const int64_t ahead = tile + std::min(kAhead, strips.tiles);
  const char* pair = ahead < strips.tiles ? strips.first : strips.next - strips.tiles * kTileBytes;
  const char* at = pair + strip * strips.bytes + ahead * kTileBytes;
  for (int line = 0; line < kTileBytes; line += 64) _mm_prefetch(at + line, _MM_HINT_T0);
}

// sums of kRowTiles x kStrips tiles → sums[row tile * 2 + strip]. kPrefetch: the weight comes from memory.
template <int kRowTiles, int kStrips, bool kPrefetch>
void multiply(const uint16_t* x, int64_t x_stride, const Strips& strips, float (*sums)[kTileRows * kStrip]) {
  _tile_zero(0);
  if constexpr (kStrips > 1) _tile_zero(1);
  if constexpr (kRowTiles > 1) _tile_zero(2);
  if constexpr (kRowTiles > 1 && kStrips > 1) _tile_zero(3);
  const int64_t x_bytes = x_stride * 2;
  const uint16_t* lower = x + kTileRows * x_stride;
  for (int64_t tile = 0; tile < strips.tiles; ++tile) {
    const char* weight = strips.first + tile * kTileBytes;
    if constexpr (kPrefetch) prefetch_tile(strips, tile, 0);
    _tile_loadd(6, weight, 64);
    _tile_loadd(4, x + tile * kTileDepth, x_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kStrips > 1) {
      if constexpr (kPrefetch) prefetch_tile(strips, tile, 1);
      _tile_loadd(7, weight + strips.bytes, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kRowTiles > 1) {
      _tile_loadd(5, lower + tile * kTileDepth, x_bytes);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (kStrips > 1) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums[0], 64);
  if constexpr (kStrips > 1) _tile_stored(1, sums[1], 64);
  if constexpr (kRowTiles > 1) _tile_stored(2, sums[2], 64);
  if constexpr (kRowTiles > 1 && kStrips > 1) _tile_stored(3, sums[3], 64);
}

// Rounds `rows` rows of one tile of sums into `columns` columns of out.
void write(const float* sums, int64_t rows, const uint16_t* bias, uint16_t* out, int64_t out_stride, int64_t columns) {
  const __mmask16 mask = static_cast<__mmask16>((1u << columns) - 1);
  __m512 added = _mm512_setzero_ps();
  if (bias) {
    const __m256i stored = _mm256_maskz_loadu_epi16(mask, bias);
    added = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(stored), 16));
  }
  for (int64_t row = 0; row < rows; ++row) {
    __m512 sum = _mm512_load_ps(sums + row * kStrip);
    if (bias) sum = _mm512_add_ps(sum, added);
    _mm256_mask_storeu_epi16(out + row * out_stride, mask, (__m256i)_mm512_cvtneps_pbh(sum));
  }
}

TileShapes shapes_of(int64_t rows) {
  const int upper = static_cast<int>(std::min<int64_t>(rows, kTileRows));
  const int lower = static_cast<int>(std::clamp<int64_t>(rows - kTileRows, 0, kTileRows));
  TileShapes shapes;
  for (int tile : {0, 1, 4}) shapes.set(tile, upper, 64);
  for (int tile : {2, 3, 5}) shapes.set(tile, lower, 64);
  for (int tile : {6, 7}) shapes.set(tile, 16, 64);
  return shapes;
}

struct Task {
  const Linear& linear;
  const uint16_t* x;  // of the chunk's first row
  int64_t x_stride, row, rows;  // the chunk
  int64_t strip, strips;        // one or two

  Strips walk() const {
    const int64_t tiles = (linear.depth + kTileDepth - 1) / kTileDepth;
    const char* first = static_cast<const char*>(linear.weight) + strip * tiles * kTileBytes;
    return {first, tiles * kTileBytes, tiles, first + 2 * tiles * kTileBytes};
  }
};

template <bool kPrefetch>
void block(const Task& task, const Strips& strips, int64_t row, int64_t rows) {
  alignas(64) float sums[4][kTileRows * kStrip];
  const uint16_t* x = task.x + row * task.x_stride;
  if (rows > kTileRows) {
    task.strips > 1 ? multiply<2, 2, kPrefetch>(x, task.x_stride, strips, sums)
                    : multiply<2, 1, kPrefetch>(x, task.x_stride, strips, sums);
  } else {
    task.strips > 1 ? multiply<1, 2, kPrefetch>(x, task.x_stride, strips, sums)
                    : multiply<1, 1, kPrefetch>(x, task.x_stride, strips, sums);
  }
  const Linear& linear = task.linear;
  for (int64_t strip = 0; strip < task.strips; ++strip) {
    const int64_t column = (task.strip + strip) * kStrip;
    const int64_t columns = std::min<int64_t>(linear.outputs - column, kStrip);
    const uint16_t* bias = linear.bias ? static_cast<const uint16_t*>(linear.bias) + column : nullptr;
    for (int64_t from = 0; from < rows; from += kTileRows) {
      uint16_t* out = static_cast<uint16_t*>(linear.out) + (task.row + row + from) * linear.out_stride + column;
      const float* sum = sums[(from ? 2 : 0) + strip];
      write(sum, std::min<int64_t>(rows - from, kTileRows), bias, out, linear.out_stride, columns);
    }
  }
}

// All rows of a chunk with one strip or two. The first block brings the strips into the cache.
void multiply_chunk(const Task& task, const TileShapes& whole, const TileShapes& rest) {
  const Strips strips = task.walk();
  const int64_t whole_rows = task.rows - task.rows % kBlockRows;
  if (whole_rows) {
    if (whole_rows < task.rows) load_shapes(whole);
    block<true>(task, strips, 0, kBlockRows);
    for (int64_t row = kBlockRows; row < whole_rows; row += kBlockRows) block<false>(task, strips, row, kBlockRows);
    if (whole_rows == task.rows) return;
    load_shapes(rest);
    block<false>(task, strips, whole_rows, task.rows - whole_rows);
  } else {
    block<true>(task, strips, 0, task.rows);
  }
}

}  // namespace

void linear_bf16_tiles(const Linear& linear, Part part) {
  const int64_t pairs = (linear.strips() + 1) / 2, chunks = (linear.rows + kChunkRows - 1) / kChunkRows;
  const int64_t padded = (linear.depth + kTileDepth - 1) / kTileDepth * kTileDepth;
  const Span span = share(chunks * pairs, part);
  const TileShapes whole = shapes_of(kBlockRows);
  TileShapes rest;
  Task task{linear, nullptr, linear.x_stride, 0, 0, 0, 0};
  for (int64_t at = span.begin, chunk = -1; at < span.end; ++at) {
    if (at / pairs != chunk) {
      chunk = at / pairs;
      task.row = chunk * kChunkRows;
      task.rows = std::min<int64_t>(linear.rows - task.row, kChunkRows);
      task.x = static_cast<const uint16_t*>(linear.x) + task.row * linear.x_stride;
      if (padded != linear.depth) {
        task.x = padded_rows(task.x, linear.x_stride, task.rows, linear.depth, padded);
        task.x_stride = padded;
        stores_are_done();
      }
      rest = shapes_of(task.rows % kBlockRows);
      load_shapes(task.rows >= kBlockRows ? whole : rest);
    }
    task.strip = at % pairs * 2;
    task.strips = std::min<int64_t>(linear.strips() - task.strip, 2);
    multiply_chunk(task, whole, rest);
  }
  _tile_release();
}

}  // namespace minisgl

#endif
