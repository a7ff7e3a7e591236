// Rows of several tokens in bf16 on AMX tiles.
//
// Scores are keys · queries and values are transposed, values · weights: columns stay queries from the first product to
// the last, and what rounds weights to bf16 also lays them out as the second product's right operand.
#ifdef __AMX_BF16__

#include <utility>

#include "amx.h"
#include "attention_bf16.h"
#include "attention_chunk.h"
#include "attention_softmax.h"

namespace minisgl {
namespace {

constexpr int64_t kBlock = 128, kColumns = 32, kSide = 16, kDeep = 32;  // keys; queries that meet them; of a tile

// Everything of one tile of queries: its memory, and the steps.
class Tile {
 public:
  Tile(const Attention& a, const QueryTile& tile)
      : a_(a),
        tile_(tile),
        rule_(a),
        queries_(tile.tokens * a.group()),
        columns_(rounded_up(queries_, kColumns)),
        deep_(rounded_up(a.dim, kDeep)) {
    struct Tag {};
    const int64_t block_floats = kBlock * (kColumns + kColumns / 2 + deep_ / 2) + a.dim * kBlock / 2;
    float* at = scratch<Tag>(columns_ * (deep_ / 2 + a.dim + 4) + block_floats);
    auto take = [&](int64_t floats) { return std::exchange(at, at + floats); };
    q_ = reinterpret_cast<uint32_t*>(take(deep_ / 2 * columns_));
    out_ = take(a.dim * columns_);
    scores_ = take(kBlock * kColumns);
    weights_ = reinterpret_cast<uint32_t*>(take(kBlock / 2 * kColumns));
    keys_ = reinterpret_cast<uint16_t*>(take(kBlock * deep_ / 2));
    values_ = reinterpret_cast<uint16_t*>(take(a.dim * kBlock / 2));
    most_ = take(columns_);
    total_ = take(columns_);
    low_ = reinterpret_cast<int32_t*>(take(columns_));
    high_ = reinterpret_cast<int32_t*>(take(columns_));
  }

  void attend() {
    read_queries();
    sights_of(a_, tile_, columns_, low_, high_);
    clear_columns(most_, total_, columns_);
    std::fill(out_, out_ + a_.dim * columns_, 0.0f);
    const Span keys = tile_.keys(a_.window);
    for (int64_t first = keys.begin / kBlock * kBlock; first < keys.end; first += kBlock)
      add_block(first, std::min(kBlock, keys.end - first));
    write();
  }

 private:
  void read_queries() {
    const auto* q = static_cast<const uint16_t*>(a_.q) + tile_.kv_head * a_.group() * a_.q_head;
    const uint16_t* rows[kSide];
    for (int64_t c = 0; c < columns_; c += kSide) {
      const int64_t count = std::clamp<int64_t>(queries_ - c, 0, kSide);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t token = tile_.token + (c + i) / a_.group();
        rows[i] = q + token * a_.q_token + (c + i) % a_.group() * a_.q_head;
      }
      pack_pairs(rows, count, a_.dim, q_ + c, columns_, kSide);
    }
  }

  void add_block(int64_t first, int64_t count) {
    int64_t places[kBlock];
    uint8_t broken[kBlock] = {};
    places_of(a_, tile_.row, first, count, places);
    const int64_t offset = tile_.kv_head * a_.dim, last = tile_.position + tile_.tokens - 1;
    copy_keys(static_cast<const uint16_t*>(a_.k_pages) + offset, places, count);
    const bool edge = first + count - 1 > tile_.position || (a_.window && first <= last - a_.window);
    const auto* values = static_cast<const uint16_t*>(a_.v_pages) + offset;
    const bool any_broken = turn_values(values, places, count, edge, broken);
    for (int64_t column = 0; column < columns_; column += kColumns) {
      const int32_t nearest = high_[column], farthest = high_[column + kColumns - 1];
      if (first > farthest || (a_.window && first + count - 1 <= low_[column])) continue;
      const int64_t keys = rounded_up(std::min<int64_t>(count, farthest + 1 - first), kDeep);
      const bool masked = any_broken || first + keys - 1 > nearest || first <= low_[column + kColumns - 1];
      const Seen seen{keys, static_cast<int32_t>(first), low_, high_, any_broken ? broken : nullptr};
      score(column, keys);
      for (int64_t c = 0; c < kColumns; c += kSide)
        masked ? weigh_columns<true>(seen, column, c) : weigh_columns<false>(seen, column, c);
      add_values(column, keys);
    }
  }

  // Side by side, zeros behind the last up to whole steps.
  void copy_keys(const uint16_t* keys, const int64_t* places, int64_t count) {
    for (int64_t i = 0; i < rounded_up(count, kDeep); ++i) {
      for (int64_t d = 0; d < a_.dim; d += kDeep) {
        const __mmask32 mask = i >= count ? 0 : a_.dim - d >= kDeep ? 0xffffffffu : 0xffffu;
        const uint16_t* from = i < count ? keys + places[i] + d : kZeroRow;
        _mm512_storeu_si512(keys_ + i * deep_ + d, _mm512_maskz_loadu_epi16(mask, from));
      }
    }
  }

  // values_[d][key]. At an edge, where not all columns see all keys, those that are not finite are marked and left out.
  bool turn_values(const uint16_t* values, const int64_t* places, int64_t count, bool edge, uint8_t* broken) {
    const uint16_t* rows[kBlock];
    bool any_broken = false;
    const int64_t keys = rounded_up(count, kDeep);
    for (int64_t i = 0; i < keys; ++i) {
      rows[i] = i < count ? values + places[i] : kZeroRow;
      if (!edge || is_finite_row(reinterpret_cast<const bf16*>(rows[i]), a_.dim)) continue;
      rows[i] = kZeroRow;
      broken[i] = any_broken = true;
    }
    for (int64_t key = 0; key < keys; key += kDeep) {
      for (int64_t d = 0; d < a_.dim; d += kSide) {
        __m512i block[kSide];
        for (int64_t i = 0; i < kSide; ++i) block[i] = interleave16(rows[key + 2 * i] + d, rows[key + 2 * i + 1] + d);
        transpose16(block);
        for (int64_t i = 0; i < kSide; ++i) _mm512_storeu_si512(values_ + (d + i) * kBlock + key, block[i]);
      }
    }
    return any_broken;
  }

  // Tiles 0 to 3, two above two, gain two tiles of rows times two of columns.
  static void add_products(const uint16_t* rows, int64_t row_values, const uint32_t* columns, int64_t column_pairs) {
    _tile_loadd(4, rows, row_values * 2);
    _tile_loadd(6, columns, column_pairs * 4);
    _tile_loadd(7, columns + kSide, column_pairs * 4);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, rows + kSide * row_values, row_values * 2);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }

  void score(int64_t column, int64_t keys) {
    stores_are_done();
    for (int64_t key = 0; key < keys; key += 2 * kSide) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int64_t d = 0; d < deep_; d += kDeep) {
        add_products(keys_ + key * deep_ + d, deep_, q_ + d / 2 * columns_ + column, columns_);
      }
      float* to = scores_ + key * kColumns;
      _tile_stored(0, to, kColumns * 4);
      _tile_stored(1, to + kSide, kColumns * 4);
      _tile_stored(2, to + kSide * kColumns, kColumns * 4);
      _tile_stored(3, to + kSide * kColumns + kSide, kColumns * 4);
    }
    stores_are_done();
  }

  template <bool kMasked>
  void weigh_columns(const Seen& seen, int64_t column, int64_t c) {
    float shrink[kSide];
    const int64_t at = column + c;
    if (!weigh_pairs<kMasked>(scores_ + c, kColumns, seen, at, rule_, most_ + at, total_ + at, shrink, weights_ + c,
                              kColumns, [](int64_t) {}))
      return;
    const Vec less = load(shrink);
    for (int64_t d = 0; d < a_.dim; ++d) {
      float* out = out_ + d * columns_ + at;
      store(out, load(out) * less);
    }
  }

  void add_values(int64_t column, int64_t keys) {
    stores_are_done();
    const int64_t stride = columns_ * 4;
    int64_t d = 0;
    for (; d + 2 * kSide <= a_.dim; d += 2 * kSide) {
      float *upper = out_ + d * columns_ + column, *lower = upper + kSide * columns_;
      _tile_loadd(0, upper, stride);
      _tile_loadd(1, upper + kSide, stride);
      _tile_loadd(2, lower, stride);
      _tile_loadd(3, lower + kSide, stride);
      for (int64_t key = 0; key < keys; key += kDeep) {
        add_products(values_ + d * kBlock + key, kBlock, weights_ + key / 2 * kColumns, kColumns);
      }
      _tile_stored(0, upper, stride);
      _tile_stored(1, upper + kSide, stride);
      _tile_stored(2, lower, stride);
      _tile_stored(3, lower + kSide, stride);
    }
    if (d < a_.dim) add_last_values(d, column, keys);
    stores_are_done();
  }

  // 16 dimensions, where their number is odd times 16.
  void add_last_values(int64_t d, int64_t column, int64_t keys) {
    float* out = out_ + d * columns_ + column;
    _tile_loadd(0, out, columns_ * 4);
    _tile_loadd(1, out + kSide, columns_ * 4);
    for (int64_t key = 0; key < keys; key += kDeep) {
      const uint32_t* weights = weights_ + key / 2 * kColumns;
      _tile_loadd(4, values_ + d * kBlock + key, kBlock * 2);
      _tile_loadd(6, weights, kColumns * 4);
      _tile_loadd(7, weights + kSide, kColumns * 4);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, out, columns_ * 4);
    _tile_stored(1, out + kSide, columns_ * 4);
  }

  void write() {
    for (int64_t c = 0; c < queries_; c += kSide) {
      const int64_t count = std::min(kSide, queries_ - c);
      alignas(64) float factors[kSide] = {};
      uint16_t* to[kSide];
      for (int64_t i = 0; i < count; ++i) {
        const int64_t token = tile_.token + (c + i) / a_.group();
        const int64_t head = tile_.kv_head * a_.group() + (c + i) % a_.group();
        factors[i] = share_of_total(most_[c + i], total_[c + i], a_.sinks, sink_of(a_, head));
        to[i] = static_cast<uint16_t*>(a_.out) + (token * a_.heads + head) * a_.dim;
      }
      for (int64_t d = 0; d < a_.dim; d += kSide) {
        __m512i block[kSide];
        for (int64_t i = 0; i < kSide; ++i)
          block[i] = _mm512_castps_si512(load(out_ + (d + i) * columns_ + c) * load(factors));
        transpose16(block);
        for (int64_t i = 0; i < count; ++i) store(reinterpret_cast<bf16*>(to[i]) + d, _mm512_castsi512_ps(block[i]));
      }
    }
  }

  const Attention& a_;
  const QueryTile& tile_;
  const ScoreRule rule_;
  const int64_t queries_, columns_, deep_;
  uint32_t* q_;       // [deep / 2, columns] pairs
  float* out_;        // [dim, columns]
  float* scores_;     // [block, kColumns]
  uint32_t* weights_; // [block / 2, kColumns] pairs
  uint16_t* keys_;    // [block, deep]
  uint16_t* values_;  // [dim, block]
  float *most_, *total_;
  int32_t *low_, *high_;
};

}  // namespace

void attend_bf16_tiles(const Attention& a, Part part) {
  TileShapes shapes;
  for (int tile = 0; tile < 8; ++tile) shapes.set(tile, kSide, 64);
  load_shapes(shapes);
  share_tiles(a, part, [&](const QueryTile& tile) { Tile(a, tile).attend(); });
}

}  // namespace minisgl

#endif
