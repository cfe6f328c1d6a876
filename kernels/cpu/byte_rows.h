// LANES keys or values of a cache in int8, as vectors: their numbers by rows, and their scales side by side.
#pragma once

#include "queries.h"

namespace sluice {

#if defined(__AVX512F__)

constexpr int64_t CHUNK = LINE;  // numbers of a row that a vector holds

// Rows of DIM numbers, or of `dim` if DIM is 0. Where all lie behind each other from the start of a line, whole lines
// are read, since a row with its scale is one lane longer than a number of lines: row j begins at lane j of a line, and
// its scale is lane j of the line behind its numbers. Other rows are read one by one.
template <int64_t DIM>
class ByteRows {
 public:
  [[gnu::always_inline]] ByteRows(const int8_t* const* rows, int64_t dim) : rows_(rows), first_(rows[0]), dim_(dim) {
    is_even_ = DIM > 0 && reinterpret_cast<uintptr_t>(first_) % LINE == 0 &&
               rows[LANES - 1] - first_ == (LANES - 1) * width<int8_t>(DIM);
  }

  // Reads the numbers [d, d + CHUNK) of each row; those behind the last one are zero.
  [[gnu::always_inline]] void read(int64_t d, __m512i* to) const {
    Vec unused;
    read(d, to, unused);
  }

  // Does the same, and reads the scales where this is the last chunk.
  [[gnu::always_inline]] void read(int64_t d, __m512i* to, Vec& scales) const {
    if (is_even_) {
      __m512i behind[LANES];
      read_lines<0>(d, to, behind);
      if (d + CHUNK == DIM) scales = diagonal(behind);
      return;
    }
    const __mmask64 within = d + CHUNK <= dim() ? ~0ull : (1ull << (dim() - d)) - 1;
#pragma GCC unroll 16
    for (int j = 0; j < LANES; ++j) to[j] = _mm512_maskz_loadu_epi8(within, rows_[j] + d);
    if (d + CHUNK >= dim()) scales = scales_one_by_one();
  }

  [[gnu::always_inline]] Vec scales() const {
    if (!is_even_) return scales_one_by_one();
    __m512i behind[LANES];
#pragma GCC unroll 16
    for (int j = 0; j < LANES; ++j) behind[j] = _mm512_load_si512(first_ + (j + 1) * DIM);
    return diagonal(behind);
  }

  // Prefetches the lines of the chunk at `d`; the calls for all chunks prefetch the whole rows. A core waits where more
  // lines are asked for at once than it can have on their way. Inlined before the compiler could find that a call has
  // no effect.
  [[gnu::always_inline]] void prefetch(int64_t d) const {
    if (is_even_) {
      const int64_t past = d + CHUNK < DIM ? (d + CHUNK) * LANES : DIM * LANES + LINE;
#pragma GCC unroll 65
      for (int64_t at = d * LANES; at < past; at += LINE) __builtin_prefetch(first_ + at);
      return;
    }
    for (int j = 0; j < LANES; ++j) fetch(rows_[j], d, dim());
  }

 private:
  [[gnu::always_inline]] int64_t dim() const { return DIM > 0 ? DIM : dim_; }

  // `behind`: the lines that follow the beginnings of the rows' numbers from `d` on.
  template <int ROW>
  [[gnu::always_inline]] void read_lines(int64_t d, __m512i* to, __m512i* behind) const {
    const int8_t* from = first_ + d + ROW * DIM;
    const __m512i line = DIM == CHUNK && ROW > 0 ? behind[ROW > 0 ? ROW - 1 : 0] : _mm512_load_si512(from);
    behind[ROW] = _mm512_load_si512(from + LINE);
    to[ROW] = ROW == 0 ? line : _mm512_maskz_alignr_epi32(ALL, behind[ROW], line, ROW);
    if constexpr (ROW + 1 < LANES) read_lines<ROW + 1>(d, to, behind);
  }

  // Returns lane j of each vector j.
  [[gnu::always_inline]] static Vec diagonal(__m512i* v) {
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) v[j] = _mm512_mask_blend_epi32(0xaaaa, v[2 * j], v[2 * j + 1]);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) v[j] = _mm512_mask_blend_epi32(0xcccc, v[2 * j], v[2 * j + 1]);
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) v[j] = _mm512_mask_blend_epi32(0xf0f0, v[2 * j], v[2 * j + 1]);
    return (Vec)_mm512_mask_blend_epi32(0xff00, v[0], v[1]);
  }

  [[gnu::noinline]] Vec scales_one_by_one() const {
    float by[LANES];
    for (int j = 0; j < LANES; ++j) by[j] = scale_of(rows_[j], dim());
    return load(by);
  }

  const int8_t* const* rows_;
  const int8_t* first_;
  int64_t dim_;
  bool is_even_;
};

#endif

}  // namespace sluice
