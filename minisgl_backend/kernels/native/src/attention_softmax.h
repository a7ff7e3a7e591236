// The softmax of columns of scores, block by block of keys with a running maximum (Milakov and Gimelshein 2018).
//
// Keys are rows and queries columns, so that a vector holds one key's scores with many queries and nothing is summed
// across lanes.
#pragma once

#include <cfloat>
#include <cmath>

#include "attention.h"
#include "attention_vec.h"

namespace minisgl {

constexpr float kLog2E = 1.44269504088896340736f;

// From a product to an exponent of two.
struct ScoreRule {
  float factor;      // of what the cap has left
  float inner, cap;  // cap 0: none, else score = cap · tanh(inner · product)

  explicit ScoreRule(const Attention& a)
      : factor(a.softcap ? 1.0f : a.scale * kLog2E),
        inner(a.softcap ? a.scale / a.softcap : 0.0f),
        cap(a.softcap * kLog2E) {}
};

// Keys of a block, as some columns see them: key i is at position first + i, seen by column c if
// low[c] < first + i <= high[c]. broken: keys whose values are not finite, which have been taken out; or nullptr.
struct Seen {
  int64_t keys;
  int32_t first;
  const int32_t *low, *high;
  const uint8_t* broken;
};

// The state of columns: largest exponent, sum of weights.
inline void clear_columns(float* most, float* total, int64_t columns) {
  std::fill(most, most + columns, -FLT_MAX);  // finite: -inf less -inf is not a number
  std::fill(total, total + columns, 0.0f);
}

// One key's scores as the cap and the mask leave them, which are stored if they change.
template <bool kMasked, bool kCapped>
inline Vec score_at(float* at, int64_t key, const Seen& seen, int64_t column, const ScoreRule& rule) {
  Vec score = load(at);
  if (kCapped) score = tanh(score * vec(rule.inner)) * vec(rule.cap);
  if (kMasked) {
    if (seen.broken && seen.broken[key]) score = vec(NAN);
    const auto position = static_cast<int32_t>(seen.first + key);
    score = if_between(position, seen.low + column, seen.high + column, score, vec(-INFINITY));
  }
  if (kMasked || kCapped) store(at, score);
  return score;
}

template <bool kMasked, bool kCapped>
inline Vec largest_score(float* scores, int64_t stride, const Seen& seen, int64_t column, const ScoreRule& rule) {
  Vec a = vec(-INFINITY), b = a, c = a, d = a;
  auto score = [&](int64_t key) {
    return score_at<kMasked, kCapped>(scores + key * stride, key, seen, column, rule);
  };
  int64_t key = 0;
  for (; key + 4 <= seen.keys; key += 4) {
    a = max(score(key), a);
    b = max(score(key + 1), b);
    c = max(score(key + 2), c);
    d = max(score(key + 3), d);
  }
  for (; key < seen.keys; ++key) a = max(score(key), a);
  return max(max(a, b), max(c, d));
}

// Takes a block's largest score into the state → by how much less all counts that came before.
inline Vec raise(Vec top, const ScoreRule& rule, float* most, float* total) {
  const Vec before = load(most), now = max(top * vec(rule.factor), before);
  const Vec shrink = exp2_of(before - now);
  store(most, now);
  store(total, load(total) * shrink);
  return shrink;
}

// Scores → weights, where they lie. shrink [lanes] → whether some of it is not 1.
template <bool kMasked>
inline bool weigh(float* scores, int64_t stride, const Seen& seen, int64_t column, const ScoreRule& rule, float* most,
                  float* total, float* shrink) {
  const Vec top = rule.cap ? largest_score<kMasked, true>(scores, stride, seen, column, rule)
                           : largest_score<kMasked, false>(scores, stride, seen, column, rule);
  const Vec less = raise(top, rule, most, total);
  store(shrink, less);
  const Vec factor = vec(rule.factor), lowered = vec(0.0f) - load(most);
  Vec sum = vec(0.0f);
  for (int64_t key = 0; key < seen.keys; ++key) {
    float* at = scores + key * stride;
    const Vec weight = exp2_of(fma(load(at), factor, lowered));
    store(at, weight);
    sum = sum + weight;
  }
  store(total, load(total) + sum);
  return !same(less, vec(1.0f));
}

#ifdef __AVX512BF16__

// The same for an even number of keys, with weights in bf16: pairs[i * pair_stride + lane] holds keys 2i and 2i + 1.
// Calls meanwhile(key) for each even one.
template <bool kMasked, class Meanwhile>
inline bool weigh_pairs(float* scores, int64_t stride, const Seen& seen, int64_t column, const ScoreRule& rule,
                        float* most, float* total, float* shrink, uint32_t* pairs, int64_t pair_stride,
                        Meanwhile meanwhile) {
  const Vec top = rule.cap ? largest_score<kMasked, true>(scores, stride, seen, column, rule)
                           : largest_score<kMasked, false>(scores, stride, seen, column, rule);
  const Vec less = raise(top, rule, most, total);
  store(shrink, less);
  const Vec factor = vec(rule.factor), lowered = vec(0.0f) - load(most);
  Vec sum_even = vec(0.0f), sum_odd = sum_even;
  for (int64_t key = 0; key < seen.keys; key += 2) {
    meanwhile(key);
    const Vec even = coarse_exp2_of(fma(load(scores + key * stride), factor, lowered));
    const Vec odd = coarse_exp2_of(fma(load(scores + (key + 1) * stride), factor, lowered));
    sum_even = sum_even + even;
    sum_odd = sum_odd + odd;
    _mm512_storeu_si512(pairs + key / 2 * pair_stride, pair_of(even, odd));
  }
  store(total, load(total) + (sum_even + sum_odd));
  return !same(less, vec(1.0f));
}

#endif

// What a column's values are to be multiplied by: one part of the sum of all weights, the sink's among them.
inline float share_of_total(float most, float total, bool has_sink, float sink) {
  if (!has_sink) return 1.0f / total;
  const float exponent = sink * kLog2E, top = std::max(most, std::max(exponent, -FLT_MAX));
  return std::exp2(most - top) / (total * std::exp2(most - top) + std::exp2(exponent - top));
}

inline float sink_of(const Attention& a, int64_t head) {
  if (!a.sinks) return 0;
  switch (a.sinks_type) {
    case Stored::fp32: return static_cast<const float*>(a.sinks)[head];
    case Stored::bf16: return value_of(static_cast<const bf16*>(a.sinks)[head]);
    case Stored::fp16: return value_of(static_cast<const fp16*>(a.sinks)[head]);
  }
  __builtin_unreachable();
}

}  // namespace minisgl
