// The vector type of the instruction set that this file is compiled for, and the operations on it.
//
// Uses the vector extension of GCC and clang, so that one source is built once for each instruction set. Intrinsics
// stand only where numbers are widened or narrowed, which GCC 12 otherwise compiles lane by lane. Every sum has one
// fixed order, which does not depend on the rest of the batch.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

namespace sluice {

#if defined(__AVX512F__)
constexpr int LANES = 16;
constexpr uint16_t ALL = 0xffff;  // mask of all lanes; intrinsics without a mask cause false warnings of GCC 12
#else
constexpr int LANES = 8;
#endif

constexpr int64_t LINE = 64;  // bytes of a cache line

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t IntVec __attribute__((vector_size(LANES * 4)));

inline Vec load(const float* from) {
  Vec v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

// Loads bfloat16 numbers: each is the upper half of a float32.
inline Vec load(const uint16_t* from) {
#if defined(__AVX512F__)
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  const IntVec bits = (IntVec)_mm512_maskz_cvtepu16_epi32(ALL, halves) << 16;
#else
  const IntVec bits = (IntVec)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))) << 16;
#endif
  Vec v;
  std::memcpy(&v, &bits, sizeof v);
  return v;
}

inline Vec load(const int8_t* from) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  const IntVec levels = (IntVec)_mm512_maskz_cvtepi8_epi32(ALL, bytes);
#else
  const IntVec levels = (IntVec)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#endif
  return __builtin_convertvector(levels, Vec);
}

// float16, two bytes each.
inline Vec load_half(const uint8_t* from) {
#if defined(__AVX512F__)
  return (Vec)_mm512_maskz_cvtph_ps(ALL, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#else
  return (Vec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#endif
}

inline void store(float* to, Vec v) { std::memcpy(to, &v, sizeof v); }

// Rounds to bfloat16, ties to even, and stores. NaN stays NaN.
inline void store(uint16_t* to, Vec v) {
  IntVec bits;
  std::memcpy(&bits, &v, sizeof bits);
  const IntVec rounded = bits + 0x7fff + ((bits >> 16) & 1), words = (v == v ? rounded : IntVec{} + 0x7fc00000) >> 16;
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_maskz_cvtepi32_epi16(ALL, (__m512i)words));
#else
  const __m256i pairs = _mm256_packs_epi32((__m256i)words, (__m256i)words);  // exact: words have 16 bits and a sign
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(_mm256_permute4x64_epi64(pairs, 0x08)));
#endif
}

inline void store(int32_t* to, IntVec v) { std::memcpy(to, &v, sizeof v); }

// Stores the low byte of each lane.
inline void store(int8_t* to, IntVec v) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_maskz_cvtepi32_epi8(ALL, (__m512i)v));
#else
  typedef int8_t Bytes8 __attribute__((vector_size(LANES)));
  const Bytes8 narrow = __builtin_convertvector(v, Bytes8);
  std::memcpy(to, &narrow, sizeof narrow);
#endif
}

// Rounds numbers below 2^22 to the nearest integers, ties to even: adding 1.5 · 2^23 leaves no bits below the unit.
inline IntVec nearest(Vec x) {
  const Vec unit = Vec{} + 12582912.0f, shifted = x + unit;
  IntVec bits, base;
  std::memcpy(&bits, &shifted, sizeof bits);
  std::memcpy(&base, &unit, sizeof base);
  return bits - base;
}

// Sets vectors to zero one by one, in registers. Of an array with an initialiser, GCC 12 clears the memory, by an
// instruction that takes long to begin.
template <int ROWS, int NUM>
inline void clear(Vec (&rows)[ROWS][NUM]) {
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < NUM; ++v) rows[r][v] = Vec{};
}

// Compiles to one broadcasting load. `Vec{} + x` would compile to an addition (because of -0) and a shuffle, on the
// ports that multiplications need.
inline Vec broadcast(float x) {
#if defined(__AVX512F__)
  return (Vec)_mm512_set1_ps(x);
#else
  return (Vec)_mm256_set1_ps(x);
#endif
}

// Returns the source of lane `lane` when the lower (or upper) halves of each group of 2 * WIDTH lanes of two vectors
// are concatenated.
template <int WIDTH>
constexpr int half_of(int lane, bool upper) {
  return lane / WIDTH * 2 * WIDTH + lane % WIDTH + (upper ? WIDTH : 0);
}

template <int WIDTH, typename Lanes, int... LANE>
inline Lanes add_halves(Lanes a, Lanes b, std::integer_sequence<int, LANE...>) {
  return __builtin_shufflevector(a, b, half_of<WIDTH>(LANE, false)...) +
         __builtin_shufflevector(a, b, half_of<WIDTH>(LANE, true)...);
}

// Sums the lanes of NUM vectors, a power of two: lane i of the result is the sum of v[i % NUM], added in the order of
// `sum`.
template <int NUM = LANES, int WIDTH = LANES / 2, typename Lanes>
inline Lanes sums(Lanes* v) {
  constexpr int LEFT = NUM > 1 ? NUM / 2 : 1;
  for (int i = 0; i < LEFT; ++i)
    v[i] = add_halves<WIDTH>(v[2 * i], v[NUM > 1 ? 2 * i + 1 : 0], std::make_integer_sequence<int, LANES>());
  if constexpr (WIDTH > 1) return sums<LEFT, WIDTH / 2>(v);
  return v[0];
}

template <int WIDTH, typename Lanes, int... LANE>
inline Lanes greater_halves(Lanes a, Lanes b, std::integer_sequence<int, LANE...>) {
  const Lanes lower = __builtin_shufflevector(a, b, half_of<WIDTH>(LANE, false)...);
  const Lanes upper = __builtin_shufflevector(a, b, half_of<WIDTH>(LANE, true)...);
  return lower > upper ? lower : upper;
}

// The maxima of NUM vectors, a power of two: lane i of the result is the greatest lane of v[i % NUM].
template <int NUM = LANES, int WIDTH = LANES / 2, typename Lanes>
inline Lanes greatests(Lanes* v) {
  constexpr int LEFT = NUM > 1 ? NUM / 2 : 1;
  for (int i = 0; i < LEFT; ++i)
    v[i] = greater_halves<WIDTH>(v[2 * i], v[NUM > 1 ? 2 * i + 1 : 0], std::make_integer_sequence<int, LANES>());
  if constexpr (WIDTH > 1) return greatests<LEFT, WIDTH / 2>(v);
  return v[0];
}

template <int... LANE>
inline IntVec numbered(std::integer_sequence<int, LANE...>) {
  return IntVec{LANE...};
}

// Returns the first NUM lanes of `v`, and the lanes of `others` behind them.
template <int NUM>
inline Vec first_lanes(Vec v, Vec others) {
  return numbered(std::make_integer_sequence<int, LANES>()) < NUM ? v : others;
}

// One step of a transposition: swaps the blocks off the diagonal in squares of 2 * WIDTH lanes, of two rows that are
// WIDTH apart.
template <int WIDTH, int... LANE>
inline void swap_halves(Vec& a, Vec& b, std::integer_sequence<int, LANE...>) {
  const Vec first = __builtin_shufflevector(a, b, (LANE & WIDTH ? LANES + LANE - WIDTH : LANE)...);
  b = __builtin_shufflevector(a, b, (LANE & WIDTH ? LANES + LANE : LANE + WIDTH)...);
  a = first;
}

// Transposes a square of LANES vectors in place.
template <int WIDTH = LANES / 2>
inline void transpose(Vec* v) {
  for (int i = 0; i < LANES; ++i)
    if ((i & WIDTH) == 0) swap_halves<WIDTH>(v[i], v[i + WIDTH], std::make_integer_sequence<int, LANES>());
  if constexpr (WIDTH > 1) transpose<WIDTH / 2>(v);
}

// Sums the lanes: the upper half is added to the lower, until one lane is left.
inline float sum(Vec v) {
  float lanes[LANES];
  store(lanes, v);
  for (int width = LANES / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
}

// Returns a mask: bit i is set if lane i is true. Lanes are all ones or all zeros.
inline uint32_t bits_of(IntVec lanes) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)lanes, (__m512i)lanes);
#else
  return static_cast<uint32_t>(_mm256_movemask_ps((__m256)lanes));
#endif
}

inline Vec absolute(Vec x) { return x > -x ? x : -x; }

inline Vec greater(Vec a, Vec b) { return a > b ? a : b; }

inline IntVec greater(IntVec a, IntVec b) { return a > b ? a : b; }

// Of a number without its sign: in the order of magnitudes, an infinity above all numbers and NaN above that.
inline IntVec magnitude_bits(Vec x) {
  IntVec bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits & 0x7fffffff;
}

template <int WIDTH, int... LANE>
inline Vec greater_halves(Vec v, std::integer_sequence<int, LANE...>) {
  return greater(v, __builtin_shufflevector(v, v, (LANE ^ WIDTH)...));
}

// Returns the greatest lane.
template <int WIDTH = LANES / 2>
inline float greatest(Vec v) {
  v = greater_halves<WIDTH>(v, std::make_integer_sequence<int, LANES>());
  if constexpr (WIDTH > 1) return greatest<WIDTH / 2>(v);
  return v[0];
}

// Returns 1 / sqrt(mean square + eps) of a row.
inline float norm_scale(const float* x, int64_t k, float eps) {
  Vec squares{};
  int64_t i = 0;
  for (; i + LANES <= k; i += LANES) squares += load(x + i) * load(x + i);
  float total = sum(squares);
  for (; i < k; ++i) total += x[i] * x[i];
  return 1.0f / std::sqrt(total / static_cast<float>(k) + eps);
}

}  // namespace sluice
