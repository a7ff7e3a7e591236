// Rows of one token. A row's keys are cut into pieces, a piece goes block by block past all KV heads of its part, and
// the group of query heads of a KV head go together: keys and values are read once, in the order in which they lie.
#include <cstring>

#include "amx.h"
#include "attention.h"
#include "attention_bf16.h"
#include "attention_fp32.h"
#include "attention_softmax.h"

namespace minisgl {
namespace {

constexpr int64_t kBlock = 64, kTileKeys = 16;

// The keys of a row that attend: positions low … high - 1, cut where `piece` says.
struct Row {
  int64_t index, low, high, aligned, piece, pieces;

  Row(const Attention& a, int64_t member) : index(a.members[member]) {
    high = a.starts[index] + 1;
    low = a.window && high > a.window ? high - a.window : 0;
    aligned = low / kTileKeys * kTileKeys;
    const int64_t length = high - aligned;
    piece = std::max(kLeastPiece, rounded_up((length + kMostPieces - 1) / kMostPieces, kBlock));
    pieces = (length + piece - 1) / piece;
  }

  Span keys(int64_t number) const {
    const int64_t begin = aligned + number * piece;
    return {begin, std::min(begin + piece, high)};
  }
};

struct Block {
  int64_t first, keys;  // positions from `first` on
  int64_t hidden;       // of them before the window
  int64_t places[kBlock];

  Block(const Attention& a, const Row& row, int64_t at, int64_t end)
      : first(at), keys(std::min(kBlock, end - at)), hidden(std::max<int64_t>(row.low - at, 0)) {
    places_of(a, row.index, first, keys, places);
  }
};

// One piece of a row, for some of the KV heads.
struct Item {
  int64_t member;
  Row row;
  int64_t number;
  Span heads;

  Span keys() const { return row.keys(number); }
};

// The share of a KV head, number `head` of `heads`, in asking for the block that comes next.
struct Next {
  const Block& block;
  int64_t head, heads, dim;

#ifdef __AVX512BF16__
  // pages: where this head's values of a token begin, of keys or of values.
  Wanted keys_of(const uint16_t* pages) const {
    const int64_t from = block.keys * head / heads, to = block.keys * (head + 1) / heads;
    return {pages - head * dim, block.places + from, to - from, heads * dim, dim / 16};
  }
#endif
};

// What queries of a KV head have come to.
struct Columns {
  int64_t width;              // queries of a KV head, rounded up to whole vectors
  float *most, *total, *out;  // [width], [width], [group, dim]
};

// Arithmetic in fp32, whatever is stored.
template <class Type>
struct Widened {
  using Value = Type;
  static constexpr bool kPairs = false;
  static constexpr int64_t kWidth = kLanes;
  static int64_t query_floats(const Attention& a, int64_t width) { return a.dim * width; }
  static int64_t work_floats(const Attention& a, int64_t width) { return kBlock * (a.dim + width); }

  static void pack(const Attention& a, const Value* q, float* to, int64_t width) {
    std::fill(to, to + a.dim * width, 0.0f);
    for (int64_t g = 0; g < a.group(); ++g)
      for (int64_t d = 0; d < a.dim; ++d) to[d * width + g] = value_of(q[g * a.q_head + d]);
  }

  static void rows_at(const Value* pages, const Block& block, int64_t from, int64_t dim, float* work,
                      const float** rows) {
    for (int64_t i = from; i < block.keys; ++i) {
      if constexpr (sizeof(Value) == 4) {
        rows[i] = pages + block.places[i];
      } else {
        widen_row<Type>(pages + block.places[i], dim, work + i * dim);
        rows[i] = work + i * dim;
      }
    }
  }

  static void add(const Attention& a, const Value* k, const Value* v, const Block& block, const Next&,
                  const Seen& seen, bool masked, const ScoreRule& rule, const float* queries, float* work,
                  const Columns& columns) {
    float *scores = work, *wide = work + kBlock * columns.width;
    const float* rows[kBlock];
    rows_at(k, block, 0, a.dim, wide, rows);
    const int64_t width = columns.width;
    for (int64_t c = 0; c < width; c += kLanes)
      score_keys<1>(rows, block.keys, queries + c, width, a.dim, scores + c, width);
    for (int64_t c = 0; c < width; c += kLanes) {
      float shrink[kLanes];
      float *most = columns.most + c, *total = columns.total + c;
      const bool shrinks = masked ? weigh<true>(scores + c, width, seen, 0, rule, most, total, shrink)
                                  : weigh<false>(scores + c, width, seen, 0, rule, most, total, shrink);
      if (!shrinks) continue;
      for (int64_t g = c; g < std::min(c + kLanes, a.group()); ++g)
        for (int64_t d = 0; d < a.dim; d += kLanes)
          store(columns.out + g * a.dim + d, load(columns.out + g * a.dim + d) * vec(shrink[g - c]));
    }
    rows_at(v, block, block.hidden, a.dim, wide, rows);
    add_values(scores + block.hidden * width, width, rows + block.hidden, block.keys - block.hidden, a.dim,
               columns.out, a.group());
  }
};

#ifdef __AVX512BF16__

// bf16 as it is.
struct Paired {
  using Value = uint16_t;
  static constexpr bool kPairs = true;  // keys come in twos
  static constexpr int64_t kWidth = 16;
  static int64_t query_floats(const Attention& a, int64_t width) { return rounded_up(a.dim, 32) / 2 * width; }
  static int64_t work_floats(const Attention& a, int64_t width) {
    return kBlock * width + kBlock / 2 * width + kBlock * rounded_up(a.dim, 32) / 2;
  }

  static void pack(const Attention& a, const Value* q, float* to, int64_t width) {
    const uint16_t* rows[256];
    for (int64_t g = 0; g < a.group(); ++g) rows[g] = q + g * a.q_head;
    pack_pairs(rows, a.group(), a.dim, reinterpret_cast<uint32_t*>(to), width, width);
  }

#ifdef __AMX_BF16__
  // Keys are the left operand, as they lie in their pages, 16 to a tile.
  static void scores_of(const Attention& a, const Value* k, const Block& block, const uint32_t* queries, int64_t width,
                        float* scores, uint16_t* copy) {
    const int64_t deep = rounded_up(a.dim, 32), tiles = (block.keys + kTileKeys - 1) / kTileKeys;
    const bool in_place = a.page_size % kTileKeys == 0 && a.dim == deep;
    const uint16_t* keys[kBlock / kTileKeys] = {copy, copy, copy, copy};
    int64_t key_bytes = 2 * deep;
    if (in_place) {  // a tile is in one page, of which it may read more than the row has filled
      key_bytes = 2 * a.token_values();
      for (int64_t t = 0; t < tiles; ++t) keys[t] = k + block.places[t * kTileKeys];
    } else {
      std::memset(copy, 0, tiles * kTileKeys * deep * 2);
      for (int64_t i = 0; i < block.keys; ++i) std::memcpy(copy + i * deep, k + block.places[i], 2 * a.dim);
      for (int64_t t = 0; t < tiles; ++t) keys[t] = copy + t * kTileKeys * deep;
    }
    for (int64_t t = tiles; t < kBlock / kTileKeys; ++t) keys[t] = keys[0];
    stores_are_done();
    for (int64_t c = 0; c < width; c += 16) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int64_t d = 0; d < deep; d += 32) {
        _tile_loadd(7, queries + d / 2 * width + c, width * 4);
        _tile_loadd(4, keys[0] + d, key_bytes);
        _tile_loadd(5, keys[1] + d, key_bytes);
        _tile_dpbf16ps(0, 4, 7);
        _tile_dpbf16ps(1, 5, 7);
        _tile_loadd(4, keys[2] + d, key_bytes);
        _tile_loadd(5, keys[3] + d, key_bytes);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
      }
      _tile_stored(0, scores + c, width * 4);
      _tile_stored(1, scores + 16 * width + c, width * 4);
      _tile_stored(2, scores + 32 * width + c, width * 4);
      _tile_stored(3, scores + 48 * width + c, width * 4);
    }
    stores_are_done();
  }
#else
  static void scores_of(const Attention& a, const Value* k, const Block& block, const uint32_t* queries, int64_t width,
                        float* scores, uint16_t*) {
    const uint16_t* keys[kBlock];
    for (int64_t i = 0; i < rounded_up(block.keys, 8); ++i) keys[i] = i < block.keys ? k + block.places[i] : kZeroRow;
    for (int64_t c = 0; c < width; c += 16)
      for (int64_t i = 0; i < block.keys; i += 8)
        score_pairs<8>(keys + i, queries + c, width, a.dim, scores + i * width + c, width);
  }
#endif

  static void add(const Attention& a, const Value* k, const Value* v, const Block& block, const Next& next,
                  const Seen& seen, bool masked, const ScoreRule& rule, const float* queries, float* work,
                  const Columns& columns) {
    const int64_t width = columns.width;
    float* scores = work;
    auto* pairs = reinterpret_cast<uint32_t*>(work + kBlock * width);
    auto* copy = reinterpret_cast<uint16_t*>(work + kBlock * width + kBlock / 2 * width);
    scores_of(a, k, block, reinterpret_cast<const uint32_t*>(queries), width, scores, copy);
    Wanted keys = next.keys_of(k), values = next.keys_of(v);
    const auto fetch_keys = [&keys](int64_t) { keys.fetch(); };
    for (int64_t c = 0; c < width; c += 16) {
      float shrink[16];
      float *most = columns.most + c, *total = columns.total + c, *from = scores + c;
      const bool shrinks =
          masked ? weigh_pairs<true>(from, width, seen, 0, rule, most, total, shrink, pairs + c, width, fetch_keys)
                 : weigh_pairs<false>(from, width, seen, 0, rule, most, total, shrink, pairs + c, width, fetch_keys);
      if (!shrinks) continue;
      for (int64_t g = c; g < std::min(c + 16, a.group()); ++g)
        for (int64_t d = 0; d < a.dim; d += 16)
          store(columns.out + g * a.dim + d, load(columns.out + g * a.dim + d) * vec(shrink[g - c]));
    }
    const uint16_t* rows[kBlock];
    for (int64_t i = 0; i < seen.keys; ++i)  // a weight of 0 does not hide what is not finite
      rows[i] = i < block.hidden || i >= block.keys ? kZeroRow : v + block.places[i];
    add_value_pairs(pairs, width, rows, seen.keys / 2, a.dim, columns.out, a.group(), values);
  }
};

#endif

// Where a piece's result is kept: [member][piece][head] of (dim values, most, total).
float* partial_of(const Attention& a, int64_t member, int64_t piece, int64_t head) {
  return a.partial + ((member * a.most_pieces + piece) * a.heads + head) * (a.dim + 2);
}

template <class Type>
void write_row(const Attention& a, int64_t token, int64_t head, const float* values, float factor) {
  auto* out = static_cast<Type*>(a.out) + (token * a.heads + head) * a.dim;
  for (int64_t d = 0; d < a.dim; d += kLanes) store(out + d, load(values + d) * vec(factor));
}

// The queries of one item, block by block.
template <class Type, class Math>
class PieceAttention {
 public:
  PieceAttention(const Attention& a, const Item& item)
      : a_(a),
        item_(item),
        rule_(a),
        group_(a.group()),
        width_(rounded_up(group_, Math::kWidth)),
        query_floats_(rounded_up(Math::query_floats(a, width_), 16)),
        head_floats_(query_floats_ + 2 * width_ + group_ * a.dim) {
    struct Tag {};
    const int64_t count = item.heads.end - item.heads.begin;
    heads_ = scratch<Tag>(count * head_floats_ + 2 * width_ + Math::work_floats(a, width_));
    low_ = reinterpret_cast<int32_t*>(heads_ + count * head_floats_);
    work_ = heads_ + count * head_floats_ + 2 * width_;
  }

  // next: where the keys are that will be wanted after this item's.
  void attend(const Item* next) {
    begin();
    const Span keys = item_.keys();
    Block block(a_, item_.row, keys.begin, keys.end);
    for (;;) {
      const int64_t then = block.first + kBlock;
      const bool last = then >= keys.end;
      const Item& source = last && next ? *next : item_;
      const Span rest = last && next ? next->keys() : Span{then, keys.end};
      const Block after(a_, source.row, last && !next ? keys.end : rest.begin, rest.end);
      add(block, after);
      if (last) break;
      block = after;
    }
    finish();
  }

 private:
  using Value = typename Math::Value;

  float* queries_of(int64_t head) const { return heads_ + (head - item_.heads.begin) * head_floats_; }
  Columns columns_of(int64_t head) const {
    float* at = queries_of(head) + query_floats_;
    return {width_, at, at + width_, at + 2 * width_};
  }

  void begin() {
    const auto* q = static_cast<const Value*>(a_.q) + a_.begins[item_.row.index] * a_.q_token;
    for (int64_t head = item_.heads.begin; head < item_.heads.end; ++head) {
      Math::pack(a_, q + head * group_ * a_.q_head, queries_of(head), width_);
      const Columns columns = columns_of(head);
      clear_columns(columns.most, columns.total, width_);
      std::fill(columns.out, columns.out + group_ * a_.dim, 0.0f);
    }
    std::fill(low_, low_ + width_, static_cast<int32_t>(item_.row.low - 1));
    std::fill(low_ + width_, low_ + 2 * width_, static_cast<int32_t>(item_.row.high - 1));
  }

  void add(const Block& block, const Block& next) {
    const int64_t taken = Math::kPairs ? rounded_up(block.keys, 2) : block.keys;
    const bool masked = block.hidden > 0 || taken > block.keys;
    const Seen seen{taken, static_cast<int32_t>(block.first), low_, low_ + width_, nullptr};
    for (int64_t head = item_.heads.begin; head < item_.heads.end; ++head) {
      const auto* k = static_cast<const Value*>(a_.k_pages) + head * a_.dim;
      const auto* v = static_cast<const Value*>(a_.v_pages) + head * a_.dim;
      const int64_t heads = item_.heads.end - item_.heads.begin;
      const Next wanted{next, head - item_.heads.begin, heads, a_.dim};
      Math::add(a_, k, v, block, wanted, seen, masked, rule_, queries_of(head), work_, columns_of(head));
    }
  }

  void finish() const {
    for (int64_t head = item_.heads.begin * group_; head < item_.heads.end * group_; ++head) {
      const Columns columns = columns_of(head / group_);
      const int64_t g = head % group_;
      const float *values = columns.out + g * a_.dim, most = columns.most[g], total = columns.total[g];
      if (item_.row.pieces == 1) {
        const float factor = share_of_total(most, total, a_.sinks, sink_of(a_, head));
        write_row<Type>(a_, a_.begins[item_.row.index], head, values, factor);
      } else {
        float* to = partial_of(a_, item_.member, item_.number, head);
        std::copy_n(values, a_.dim, to);
        to[a_.dim] = most;
        to[a_.dim + 1] = total;
      }
    }
  }

  const Attention& a_;
  const Item& item_;
  const ScoreRule rule_;
  const int64_t group_, width_, query_floats_, head_floats_;
  float* heads_;  // of each: queries, most, total, out
  int32_t* low_;  // and high
  float* work_;
};

// The part's share by keys: pieces in order, each KV head of one by itself if need be.
std::vector<Item>& items_of(const Attention& a, Part part) {
  static thread_local std::vector<Item> items;
  items.clear();
  int64_t all_keys = 0, at = 0;
  for (int64_t member = 0; member < a.count; ++member) {
    const Row row(a, member);
    all_keys += row.high - row.aligned;
  }
  const Span mine = share(all_keys * a.kv_heads, part);
  for (int64_t member = 0; member < a.count && at < mine.end; ++member) {
    const Row row(a, member);
    for (int64_t number = 0; number < row.pieces; ++number) {
      const Span keys = row.keys(number);
      const int64_t length = keys.end - keys.begin;
      auto head_at = [&](int64_t key) {  // the first that begins there or later
        return std::clamp<int64_t>((key - at + length - 1) / length, 0, a.kv_heads);
      };
      const Span heads{mine.begin > at ? head_at(mine.begin) : 0, mine.end > at ? head_at(mine.end) : 0};
      if (heads.begin < heads.end) items.push_back({member, row, number, heads});
      at += length * a.kv_heads;
    }
  }
  return items;
}

template <class Type, class Math>
void attend_share(const Attention& a, Part part) {
  const std::vector<Item>& items = items_of(a, part);
  for (size_t i = 0; i < items.size(); ++i)
    PieceAttention<Type, Math>(a, items[i]).attend(i + 1 < items.size() ? &items[i + 1] : nullptr);
}

template <class Type>
void join_share(const Attention& a, Part part) {
  struct Tag {};
  float* values = scratch<Tag>(a.dim);
  const Span span = share(a.count * a.heads, part);
  for (int64_t item = span.begin; item < span.end; ++item) {
    const int64_t member = item / a.heads, head = item % a.heads;
    const Row row(a, member);
    if (row.pieces == 1) continue;
    float most = -FLT_MAX, total = 0;
    for (int64_t number = 0; number < row.pieces; ++number)
      most = std::max(most, partial_of(a, member, number, head)[a.dim]);
    std::fill(values, values + a.dim, 0.0f);
    for (int64_t number = 0; number < row.pieces; ++number) {
      const float* from = partial_of(a, member, number, head);
      const float weight = std::exp2(from[a.dim] - most);
      total += from[a.dim + 1] * weight;
      for (int64_t d = 0; d < a.dim; d += kLanes) store(values + d, fma(load(from + d), vec(weight), load(values + d)));
    }
    write_row<Type>(a, a.begins[row.index], head, values,
                    share_of_total(most, total, a.sinks, sink_of(a, head)));
  }
}

}  // namespace

void attend_pieces(const Attention& a, Part part) {
#ifdef __AMX_BF16__
  TileShapes shapes;
  for (int tile = 0; tile < 8; ++tile) shapes.set(tile, 16, 64);
  if (a.type == Stored::bf16) load_shapes(shapes);
#endif
  switch (a.type) {
    case Stored::fp32: return attend_share<float, Widened<float>>(a, part);
    case Stored::fp16: return attend_share<fp16, Widened<fp16>>(a, part);
    case Stored::bf16:
#ifdef __AVX512BF16__
      return attend_share<bf16, Paired>(a, part);
#else
      return attend_share<bf16, Widened<bf16>>(a, part);
#endif
  }
}

void join_pieces(const Attention& a, Part part) {
  switch (a.type) {
    case Stored::fp32: return join_share<float>(a, part);
    case Stored::fp16: return join_share<fp16>(a, part);
    case Stored::bf16: return join_share<bf16>(a, part);
  }
}

}  // namespace minisgl
