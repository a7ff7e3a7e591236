// Rows of several tokens in fp32 arithmetic, whatever is stored: what the tiles of AMX do not do.
#include "attention_chunk.h"

#include <utility>

#include "attention_fp32.h"
#include "attention_softmax.h"

namespace minisgl {
namespace {

constexpr int64_t kBlock = 64, kColumns = 4 * kLanes;  // keys, and queries that meet them at once

// The rows of a block of keys or values, in fp32.
template <class Type>
void rows_at(const Type* pages, const int64_t* places, int64_t count, int64_t dim, float* memory,
             const float** rows) {
  for (int64_t i = 0; i < count; ++i) {
    if constexpr (sizeof(Type) == 4) {
      rows[i] = pages + places[i];
    } else {
      widen_row<Type>(pages + places[i], dim, memory + i * dim);
      rows[i] = memory + i * dim;
    }
  }
}

alignas(64) const float kZeros[256] = {};

// Everything of one tile: its memory, and the steps.
template <class Type>
class Tile {
 public:
  Tile(const Attention& a, const QueryTile& tile)
      : a_(a), tile_(tile), rule_(a), queries_(tile.tokens * a.group()), columns_(rounded_up(queries_, kColumns)) {
    struct Tag {};
    float* at = scratch<Tag>(columns_ * (2 * a.dim + 4) + kBlock * (kColumns + 2 * a.dim));
    auto take = [&](int64_t floats) { return std::exchange(at, at + floats); };
    q_ = take(a.dim * columns_);
    out_ = take(a.dim * columns_);
    most_ = take(columns_);
    total_ = take(columns_);
    low_ = reinterpret_cast<int32_t*>(take(columns_));
    high_ = reinterpret_cast<int32_t*>(take(columns_));
    scores_ = take(kBlock * kColumns);
    wide_k_ = take(kBlock * a.dim);
    wide_v_ = take(kBlock * a.dim);
  }

  void attend() {
    read_queries();
    sights_of(a_, tile_, columns_, low_, high_);
    clear_columns(most_, total_, columns_);
    std::fill(out_, out_ + queries_ * a_.dim, 0.0f);
    const Span keys = tile_.keys(a_.window);
    for (int64_t first = keys.begin / kBlock * kBlock; first < keys.end; first += kBlock)
      add_block(first, std::min(kBlock, keys.end - first));
    write();
  }

 private:
  using Value = Type;

  void read_queries() {
    const auto* q = static_cast<const Value*>(a_.q) + tile_.kv_head * a_.group() * a_.q_head;
    for (int64_t c = 0; c < columns_; ++c) {
      const Value* from = q + (tile_.token + c / a_.group()) * a_.q_token + c % a_.group() * a_.q_head;
      for (int64_t d = 0; d < a_.dim; ++d) q_[d * columns_ + c] = c < queries_ ? value_of(from[d]) : 0.0f;
    }
  }

  void add_block(int64_t first, int64_t count) {
    int64_t places[kBlock];
    uint8_t broken[kBlock] = {};
    const float *keys[kBlock], *values[kBlock];
    places_of(a_, tile_.row, first, count, places);
    const int64_t offset = tile_.kv_head * a_.dim;
    rows_at<Type>(static_cast<const Value*>(a_.k_pages) + offset, places, count, a_.dim, wide_k_, keys);
    rows_at<Type>(static_cast<const Value*>(a_.v_pages) + offset, places, count, a_.dim, wide_v_, values);
    const int64_t last = tile_.position + tile_.tokens - 1;
    bool any_broken = false;
    if (first + count - 1 > tile_.position || (a_.window && first <= last - a_.window)) {
      for (int64_t i = 0; i < count; ++i) {  // a weight of 0 does not hide them
        if (is_finite_row(values[i], a_.dim)) continue;
        broken[i] = any_broken = true;
        values[i] = kZeros;
      }
    }
    for (int64_t column = 0; column < queries_; column += kColumns) {
      const int64_t end = std::min(column + kColumns, queries_);
      const int32_t nearest = high_[column], farthest = high_[end - 1];
      if (first > farthest || (a_.window && first + count - 1 <= low_[column])) continue;
      const int64_t seen_keys = std::min<int64_t>(count, farthest + 1 - first);
      const bool masked = any_broken || first + seen_keys - 1 > nearest || first <= low_[end - 1];
      const Seen seen{seen_keys, static_cast<int32_t>(first), low_, high_, any_broken ? broken : nullptr};
      score_keys<4>(keys, seen_keys, q_ + column, columns_, a_.dim, scores_, kColumns);
      for (int64_t c = 0; c < kColumns && column + c < queries_; c += kLanes)
        masked ? weigh_columns<true>(seen, column, c) : weigh_columns<false>(seen, column, c);
      add_values(scores_, kColumns, values, seen_keys, a_.dim, out_ + column * a_.dim, end - column);
    }
  }

  template <bool kMasked>
  void weigh_columns(const Seen& seen, int64_t column, int64_t c) {
    float shrink[kLanes];
    const int64_t at = column + c;
    if (!weigh<kMasked>(scores_ + c, kColumns, seen, at, rule_, most_ + at, total_ + at, shrink)) return;
    for (int64_t i = 0; i < kLanes && at + i < queries_; ++i) {
      if (shrink[i] == 1.0f) continue;
      float* out = out_ + (at + i) * a_.dim;
      for (int64_t d = 0; d < a_.dim; d += kLanes) store(out + d, load(out + d) * vec(shrink[i]));
    }
  }

  void write() {
    for (int64_t c = 0; c < queries_; ++c) {
      const int64_t head = tile_.kv_head * a_.group() + c % a_.group(), token = tile_.token + c / a_.group();
      const float factor = share_of_total(most_[c], total_[c], a_.sinks, sink_of(a_, head));
      auto* out = static_cast<Value*>(a_.out) + (token * a_.heads + head) * a_.dim;
      for (int64_t d = 0; d < a_.dim; d += kLanes) store(out + d, load(out_ + c * a_.dim + d) * vec(factor));
    }
  }

  const Attention& a_;
  const QueryTile& tile_;
  const ScoreRule rule_;
  const int64_t queries_, columns_;
  float *q_, *out_;  // [dim, columns], [queries, dim]
  float *most_, *total_;
  int32_t *low_, *high_;
  float *scores_;  // [block, kColumns]
  float *wide_k_, *wide_v_;
};

template <class Type>
void attend_share(const Attention& a, Part part) {
  share_tiles(a, part, [&](const QueryTile& tile) { Tile<Type>(a, tile).attend(); });
}

}  // namespace

void attend_chunks(const Attention& a, Part part) {
  switch (a.type) {
    case Stored::fp32: return attend_share<float>(a, part);
    case Stored::fp16: return attend_share<fp16>(a, part);
    case Stored::bf16:
#ifdef __AMX_BF16__
      return attend_bf16_tiles(a, part);
#else
      return attend_share<bf16>(a, part);
#endif
  }
}

}  // namespace minisgl
