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
constexpr int kTileDepth = kBf16Depth, kTileBytes = 1024, kLine = 64;
constexpr int64_t kChunkBytes = 1 << 20;  // of x, which then stay in the second cache while the strips pass
constexpr int64_t kAhead = 8;             // tiles of a strip that one block asks for before it needs them

using Sums = float[2 * kTileRows][2 * kStrip];

// Asks for the cache lines from `at` on, so many for each tile of depth.
struct Ahead {
  const char* at;
  int64_t lines;
};

// One or two strips, the second behind the first.
struct Strips {
  const char* weight;
  int64_t tiles;  // of depth

  int64_t bytes() const { return tiles * kTileBytes; }
};

// x · strips → sums. x streams past: of many rows it would push the strips out of the first cache.
template <int kRowTiles, int kStrips>
void multiply(const uint16_t* x, int64_t x_stride, const Strips& strips, Ahead ahead, Sums& sums) {
  constexpr int64_t kSumBytes = sizeof(sums[0]);
  constexpr bool kLower = kRowTiles > 1, kRight = kStrips > 1;
  constexpr auto kWhere = kLower ? _MM_HINT_T1 : _MM_HINT_T0;  // many rows: the first cache holds this pair of strips
  _tile_zero(0);
  if constexpr (kRight) _tile_zero(1);
  if constexpr (kLower) _tile_zero(2);
  if constexpr (kLower && kRight) _tile_zero(3);
  const int64_t x_bytes = x_stride * 2;
  const uint16_t* lower = x + kTileRows * x_stride;
  for (int64_t tile = 0; tile < strips.tiles; ++tile) {
    for (int64_t line = 0; line < ahead.lines; ++line) _mm_prefetch(ahead.at + line * kLine, kWhere);
    ahead.at += ahead.lines * kLine;
    const char* weight = strips.weight + tile * kTileBytes;
    _tile_loadd(6, weight, 64);
    _tile_stream_loadd(4, x + tile * kTileDepth, x_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kRight) {
      _tile_loadd(7, weight + strips.bytes(), 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kLower) {
      _tile_stream_loadd(5, lower + tile * kTileDepth, x_bytes);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (kRight) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, &sums[0][0], kSumBytes);
  if constexpr (kRight) _tile_stored(1, &sums[0][kStrip], kSumBytes);
  if constexpr (kLower) _tile_stored(2, &sums[kTileRows][0], kSumBytes);
  if constexpr (kLower && kRight) _tile_stored(3, &sums[kTileRows][kStrip], kSumBytes);
}

__m512 widened(__m256i bf16) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16), 16)); }

// Rounds rows of sums into `columns` of out, of which there are 32 or fewer.
void write(const Sums& sums, int64_t rows, const uint16_t* bias, uint16_t* out, int64_t out_stride, int64_t columns) {
  const __mmask32 mask = columns < 32 ? (__mmask32{1} << columns) - 1 : ~__mmask32{0};
  __m512 left = _mm512_setzero_ps(), right = left;
  if (bias) {
    const __m512i stored = _mm512_maskz_loadu_epi16(mask, bias);
    left = widened(_mm512_castsi512_si256(stored));
    right = widened(_mm512_extracti64x4_epi64(stored, 1));
  }
  for (int64_t row = 0; row < rows; ++row) {
    __m512 low = _mm512_load_ps(sums[row]), high = _mm512_load_ps(sums[row] + kStrip);
    if (bias) low = _mm512_add_ps(low, left), high = _mm512_add_ps(high, right);
    _mm512_mask_storeu_epi16(out + row * out_stride, mask, (__m512i)_mm512_cvtne2ps_pbh(high, low));
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

// Some rows of x, while strips pass.
class Chunk {
 public:
  Chunk(const Linear& linear, int64_t row, int64_t rows)
      : linear_(linear), tiles_((linear.depth + kTileDepth - 1) / kTileDepth), rows_(rows), stride_(linear.x_stride) {
    x_ = static_cast<const uint16_t*>(linear.x) + row * stride_;
    out_ = static_cast<uint16_t*>(linear.out) + row * linear.out_stride;
    if (linear.depth % kTileDepth) {
      x_ = padded_rows(x_, stride_, rows, linear.depth, tiles_ * kTileDepth);
      stride_ = tiles_ * kTileDepth;
      stores_are_done();
    }
    whole_ = shapes_of(kBlockRows);
    rest_ = shapes_of(rows % kBlockRows);
    load_shapes(rows < kBlockRows ? rest_ : whole_);
  }

  // The pair of strips from `strip` on, or the last one.
  void multiply_pair(int64_t strip) const {
    const Strips strips{static_cast<const char*>(linear_.weight) + strip * tiles_ * kTileBytes, tiles_};
    const int64_t blocks = (rows_ + kBlockRows - 1) / kBlockRows;
    if (blocks == 1) return block(strip, strips, 0, soon(strip, strips));
    const bool two_shapes = rows_ % kBlockRows != 0;
    if (two_shapes) load_shapes(whole_);
    Ahead ahead = next_pair(strip, strips, blocks);
    for (int64_t at = 0; at < blocks; ++at, ahead.at += ahead.lines * kLine * tiles_) {
      if (two_shapes && at + 1 == blocks) load_shapes(rest_);
      block(strip, strips, at * kBlockRows, ahead);
    }
  }

 private:
  // Where one block is all: a few tiles further in the strips themselves, which lie in the order in which they are read.
  Ahead soon(int64_t strip, const Strips& strips) const {
    const bool both = strip + 1 < linear_.strips();
    return {strips.weight + kAhead * (both ? 2 : 1) * kTileBytes, (both ? 2 : 1) * kTileBytes / kLine};
  }

  // Where there are several: the next pair, a piece in each block.
  Ahead next_pair(int64_t strip, const Strips& strips, int64_t blocks) const {
    if (strip + 2 >= linear_.strips()) return {nullptr, 0};
    return {strips.weight + 2 * strips.bytes(), (2 * kTileBytes / kLine + blocks - 1) / blocks};
  }

  void block(int64_t strip, const Strips& strips, int64_t row, Ahead ahead) const {
    alignas(64) Sums sums;
    const int64_t rows = std::min<int64_t>(rows_ - row, kBlockRows);
    const uint16_t* x = x_ + row * stride_;
    const int64_t column = strip * kStrip, columns = std::min<int64_t>(linear_.outputs - column, 2 * kStrip);
    uint16_t* out = out_ + row * linear_.out_stride + column;
    for (int64_t at = 0; at < rows; ++at) __builtin_prefetch(out + at * linear_.out_stride, 1);
    const bool pair = strip + 1 < linear_.strips();
    if (rows > kTileRows) {
      pair ? multiply<2, 2>(x, stride_, strips, ahead, sums) : multiply<2, 1>(x, stride_, strips, ahead, sums);
    } else {
      pair ? multiply<1, 2>(x, stride_, strips, ahead, sums) : multiply<1, 1>(x, stride_, strips, ahead, sums);
    }
    const uint16_t* bias = linear_.bias ? static_cast<const uint16_t*>(linear_.bias) + column : nullptr;
    write(sums, rows, bias, out, linear_.out_stride, columns);
  }

  const Linear& linear_;
  const int64_t tiles_, rows_;
  int64_t stride_;
  const uint16_t* x_;
  uint16_t* out_;
  TileShapes whole_, rest_;
};

// Rows of a chunk: as many as the cache holds, fewer where the parts would not find enough to do.
int64_t chunk_rows(const Linear& linear, int64_t pairs, int64_t parts) {
  const int64_t row_bytes = linear.depth * 2;
  int64_t chunks = std::max<int64_t>((linear.rows * row_bytes + kChunkBytes - 1) / kChunkBytes, 1);
  while (chunks * pairs < 4 * parts && linear.rows / chunks > 2 * kBlockRows) chunks *= 2;
  const int64_t rows = (linear.rows + chunks - 1) / chunks;
  return (rows + kBlockRows - 1) / kBlockRows * kBlockRows;
}

}  // namespace

void linear_bf16_tiles(const Linear& linear, Part part) {
  const int64_t pairs = (linear.strips() + 1) / 2, rows = chunk_rows(linear, pairs, part.count);
  const Span span = share((linear.rows + rows - 1) / rows * pairs, part);
  for (int64_t at = span.begin; at < span.end;) {
    const int64_t row = at / pairs * rows, end = std::min(span.end, (at / pairs + 1) * pairs);
    const Chunk chunk(linear, row, std::min(linear.rows - row, rows));
    for (; at < end; ++at) chunk.multiply_pair(at % pairs * 2);
  }
  _tile_release();
}

}  // namespace minisgl

#endif
