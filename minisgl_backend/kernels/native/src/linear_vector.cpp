// The product on vectors: fp32, and bf16 where there are no tiles.
//
// A block of rows times some strips is kept in registers while depth passes; each sum is one chain of multiply-adds
// in the order of depth. Few rows take more strips at a time: that many chains hide one another's latency.
#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "linear.h"
#include "padded_rows.h"

namespace minisgl {
namespace {

// 16 fp32 values.
#ifdef __AVX512F__
struct Lanes {
  __m512 all;
};
inline Lanes zeros() { return {_mm512_setzero_ps()}; }
inline Lanes load(const float* from) { return {_mm512_loadu_ps(from)}; }
inline void store(float* to, Lanes lanes) { _mm512_storeu_ps(to, lanes.all); }
inline Lanes multiply_add(Lanes sum, Lanes weight, float x) {
  return {_mm512_fmadd_ps(weight.all, _mm512_set1_ps(x), sum.all)};
}
#else
struct Lanes {
  __m256 low, high;
};
inline Lanes zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Lanes load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
inline void store(float* to, Lanes lanes) {
  _mm256_storeu_ps(to, lanes.low);
  _mm256_storeu_ps(to + 8, lanes.high);
}
inline Lanes multiply_add(Lanes sum, Lanes weight, float x) {
  const __m256 all = _mm256_set1_ps(x);
  return {_mm256_fmadd_ps(weight.low, all, sum.low), _mm256_fmadd_ps(weight.high, all, sum.high)};
}
#endif

// What is multiplied: `Value`, of which `kDeep` lie side by side in a strip's row.
struct Fp32 {
  using Value = float;
  using Weight = Lanes;
  static constexpr int kDeep = 1, kPadding = 1;
  static Weight load_weight(const Value* from) { return load(from); }
  static Lanes add_product(Lanes sum, Weight weight, const Value* x) { return multiply_add(sum, weight, *x); }
  static float widen(Value value) { return value; }
  static Value round(float value) { return value; }
};

inline float bf16_value(uint16_t stored) {
  const uint32_t bits = uint32_t{stored} << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline uint16_t bf16_rounded(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (value != value) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

struct Bf16 {
  using Value = uint16_t;
  static constexpr int kDeep = 2, kPadding = kBf16Depth;
  static float widen(Value value) { return bf16_value(value); }
  static Value round(float value) { return bf16_rounded(value); }
#ifdef __AVX512BF16__
  using Weight = __m512bh;
  static Weight load_weight(const Value* from) { return (__m512bh)_mm512_loadu_si512(from); }
  static Lanes add_product(Lanes sum, Weight weight, const Value* x) {
    int pair;
    std::memcpy(&pair, x, 4);
    return {_mm512_dpbf16_ps(sum.all, weight, (__m512bh)_mm512_set1_epi32(pair))};
  }
#else
  struct Weight {
    Lanes even, odd;  // depths
  };
  static Weight load_weight(const Value* from) {
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 16));
    return {pair(first(low), first(high)), pair(second(low), second(high))};
  }
  static Lanes add_product(Lanes sum, Weight weight, const Value* x) {
    return multiply_add(multiply_add(sum, weight.even, bf16_value(x[0])), weight.odd, bf16_value(x[1]));
  }
  static __m256 first(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
  static __m256 second(__m256i pairs) {
    return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
  }
#ifdef __AVX512F__
  static Lanes pair(__m256 low, __m256 high) {
    return {_mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1)};
  }
#else
  static Lanes pair(__m256 low, __m256 high) { return {low, high}; }
#endif
#endif
};

#ifdef __AVX512F__
constexpr int kMostRows = 12, kFewRows = 4;  // with two strips; with four: 24 and 16 sums in 32 registers
constexpr int kStripsOfMany = 2, kStripsOfFew = 4;
#else
constexpr int kMostRows = 4, kFewRows = 1;  // with one strip; with four: 8 sums in 16 registers
constexpr int kStripsOfMany = 1, kStripsOfFew = 4;
#endif

template <class Kind>
struct Block {
  using Value = typename Kind::Value;
  const Value* x;
  int64_t x_stride;
  const Value* weight;  // of the first strip
  int64_t strip_values, rows_of_strip;
  const Value* bias;  // of the first strip, or nullptr
  Value* out;
  int64_t out_stride, columns;  // of all strips, the last may be narrower
};

// sums [rows][strips][16] → out, with the bias, rounded.
template <class Kind>
__attribute__((noinline)) void write(const Block<Kind>& block, const float* sums, int rows, int strips) {
  for (int row = 0; row < rows; ++row) {
    typename Kind::Value* out = block.out + row * block.out_stride;
    const float* of_row = sums + row * strips * kStrip;
    for (int64_t column = 0; column < block.columns; ++column) {
      const float added = block.bias ? of_row[column] + Kind::widen(block.bias[column]) : of_row[column];
      out[column] = Kind::round(added);
    }
  }
}

template <class Kind, int kRows, int kStrips>
void multiply(const Block<Kind>& block) {
  constexpr int64_t kAhead = 2048 / sizeof(typename Kind::Value);  // values of a strip asked for early
  Lanes sums[kRows][kStrips];
#pragma GCC unroll 12
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
    for (int strip = 0; strip < kStrips; ++strip) sums[row][strip] = zeros();
  }
  const auto* x = block.x;
  const auto* weight = block.weight;
  for (int64_t deep = 0; deep < block.rows_of_strip; ++deep) {
    typename Kind::Weight weights[kStrips];
#pragma GCC unroll 4
    for (int strip = 0; strip < kStrips; ++strip) {
      const auto* at = weight + strip * block.strip_values;
      if constexpr (kRows <= kFewRows) _mm_prefetch(at + kAhead, _MM_HINT_T0);
      weights[strip] = Kind::load_weight(at);
    }
#pragma GCC unroll 12
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
      for (int strip = 0; strip < kStrips; ++strip) {
        sums[row][strip] = Kind::add_product(sums[row][strip], weights[strip], x + row * block.x_stride);
      }
    }
    x += Kind::kDeep;
    weight += Kind::kDeep * kStrip;
  }
  alignas(64) float stored[kRows][kStrips][kStrip];
#pragma GCC unroll 12
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
    for (int strip = 0; strip < kStrips; ++strip) store(stored[row][strip], sums[row][strip]);
  }
  write(block, stored[0][0], kRows, kStrips);
}

// The instance for `rows` of at most kRows.
template <class Kind, int kRows, int kStrips>
void multiply_rows(const Block<Kind>& block, int64_t rows) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return multiply_rows<Kind, kRows - 1, kStrips>(block, rows);
  }
  multiply<Kind, kRows, kStrips>(block);
}

template <class Kind>
class Product {
 public:
  using Value = typename Kind::Value;

  explicit Product(const Linear& linear)
      : linear_(linear), x_(static_cast<const Value*>(linear.x)), stride_(linear.x_stride) {
    padded_ = (linear.depth + Kind::kPadding - 1) / Kind::kPadding * Kind::kPadding;
    if constexpr (Kind::kPadding > 1) {
      if (padded_ != linear.depth) {
        x_ = padded_rows(x_, stride_, linear.rows, linear.depth, padded_);
        stride_ = padded_;
      }
    }
  }

  void run(Part part) const {
    const bool few = linear_.rows <= kFewRows;
    const int64_t width = few ? kStripsOfFew : kStripsOfMany;
    const Span groups = share((linear_.strips() + width - 1) / width, part);
    const int64_t end = std::min(groups.end * width, linear_.strips());
    int64_t strip = groups.begin * width;
    for (; strip + width <= end; strip += width) {
      few ? strips<kFewRows, kStripsOfFew>(strip) : strips<kMostRows, kStripsOfMany>(strip);
    }
    for (; strip < end; ++strip) strips<kMostRows, 1>(strip);
  }

 private:
  template <int kRows, int kStrips>
  void strips(int64_t strip) const {
    const int64_t column = strip * kStrip;
    Block<Kind> block{x_,
                      stride_,
                      static_cast<const Value*>(linear_.weight) + column * padded_,
                      kStrip * padded_,
                      padded_ / Kind::kDeep,
                      linear_.bias ? static_cast<const Value*>(linear_.bias) + column : nullptr,
                      static_cast<Value*>(linear_.out) + column,
                      linear_.out_stride,
                      std::min<int64_t>(linear_.outputs - column, kStrips * kStrip)};
    for (int64_t row = 0; row < linear_.rows; row += kRows) {
      multiply_rows<Kind, kRows, kStrips>(block, std::min<int64_t>(linear_.rows - row, kRows));
      block.x += kRows * stride_;
      block.out += kRows * linear_.out_stride;
    }
  }

  const Linear& linear_;
  const Value* x_;
  int64_t stride_, padded_;
};

}  // namespace

void linear_fp32(const Linear& linear, Part part) { Product<Fp32>(linear).run(part); }

void linear_bf16(const Linear& linear, Part part) { Product<Bf16>(linear).run(part); }

}  // namespace minisgl
