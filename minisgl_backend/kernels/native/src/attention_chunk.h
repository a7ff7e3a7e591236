// How rows of several tokens are cut: into tiles of some tokens, each with the query heads of one KV head as columns.
#pragma once

#include "attention.h"

namespace minisgl {

// Queries of `tokens` tokens, those of one KV head: column c is token c / group, head c % group.
struct QueryTile {
  int64_t row, token, tokens;  // token: its first in the batch
  int64_t position;            // of that token
  int64_t kv_head;

  // Positions that some of them see.
  Span keys(int64_t window) const {
    return {window ? std::max<int64_t>(position - window + 1, 0) : 0, position + tokens};
  }
};

inline int64_t tile_tokens(const Attention& a) {
  return std::clamp<int64_t>(256 / a.group() / 16 * 16, 16, 128);
}

// Calls work(tile) for the part's tiles: a share by the pairs of tokens and keys that there are.
template <class Work>
void share_tiles(const Attention& a, Part part, Work work) {
  const int64_t most = tile_tokens(a);
  auto each = [&](auto&& visit) {
    for (int64_t member = 0; member < a.count; ++member) {
      const int64_t row = a.members[member];
      for (int64_t at = 0; at < a.lengths[row]; at += most) {
        const int64_t tokens = std::min(most, a.lengths[row] - at);
        QueryTile tile{row, a.begins[row] + at, tokens, a.starts[row] + at, 0};
        const Span keys = tile.keys(a.window);
        visit(tile, (keys.end - keys.begin + 32) * tokens);
      }
    }
  };
  int64_t all = 0;
  each([&](const QueryTile&, int64_t cost) { all += cost * a.kv_heads; });
  const Span mine = share(all, part);
  int64_t at = 0;
  each([&](QueryTile tile, int64_t cost) {
    for (tile.kv_head = 0; tile.kv_head < a.kv_heads; ++tile.kv_head, at += cost)
      if (mine.begin <= at && at < mine.end) work(tile);
  });
}

// low < position <= high: what each column sees. Columns behind the last see what the last one sees.
inline void sights_of(const Attention& a, const QueryTile& tile, int64_t columns, int32_t* low, int32_t* high) {
  for (int64_t c = 0; c < columns; ++c) {
    const int64_t position = tile.position + std::min(c / a.group(), tile.tokens - 1);
    low[c] = static_cast<int32_t>(a.window ? std::max<int64_t>(position - a.window, -1) : -1);
    high[c] = static_cast<int32_t>(position);
  }
}

#ifdef __AMX_BF16__
void attend_bf16_tiles(const Attention& attention, Part part);
#endif

}  // namespace minisgl
