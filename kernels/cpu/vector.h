// One vector type of the instruction set that this file is compiled for, and what the kernels do with it.
//
// GCC's vector extension, which clang shares, so that the same source is built once for each instruction set;
// intrinsics only where numbers are widened or narrowed, which GCC 12 takes apart lane by lane. Every sum has one fixed
// order, whatever is computed beside it.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

namespace sluice {

#if defined(__AVX512F__)
constexpr int LANES = 16;
constexpr uint16_t ALL = 0xffff;  // lanes; forms without a mask make GCC 12 warn of what is not so
#else
constexpr int LANES = 8;
#endif

constexpr int64_t LINE = 64;  // bytes that one fetch from memory brings

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t IntVec __attribute__((vector_size(LANES * 4)));

inline Vec load(const float* from) {
  Vec v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

// bfloat16: the upper half of a float32.
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

// Rounded to bfloat16, halves to even. NaN stays NaN.
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

// The lower bytes.
inline void store(int8_t* to, IntVec v) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_maskz_cvtepi32_epi8(ALL, (__m512i)v));
#else
  typedef int8_t Bytes8 __attribute__((vector_size(LANES)));
  const Bytes8 narrow = __builtin_convertvector(v, Bytes8);
  std::memcpy(to, &narrow, sizeof narrow);
#endif
}

// The nearest integers of numbers below 2^22, halves to even: the sum's last bit is the unit there.
inline IntVec nearest(Vec x) {
  const Vec unit = Vec{} + 12582912.0f, shifted = x + unit;
  IntVec bits, base;
  std::memcpy(&bits, &shifted, sizeof bits);
  std::memcpy(&base, &unit, sizeof base);
  return bits - base;
}

// A load from memory does it all. `Vec{} + x` would be a sum, for the sake of -0, and a shuffle besides: both in the
// ports that products need.
inline Vec broadcast(float x) {
#if defined(__AVX512F__)
  return (Vec)_mm512_set1_ps(x);
#else
  return (Vec)_mm256_set1_ps(x);
#endif
}

// Lane `lane` of the lower or upper halves of groups of 2 * WIDTH lanes of two vectors, side by side.
template <int WIDTH>
constexpr int half_of(int lane, bool upper) {
  return lane / WIDTH * 2 * WIDTH + lane % WIDTH + (upper ? WIDTH : 0);
}

template <int WIDTH, typename Lanes, int... LANE>
inline Lanes add_halves(Lanes a, Lanes b, std::integer_sequence<int, LANE...>) {
  return __builtin_shufflevector(a, b, half_of<WIDTH>(LANE, false)...) +
         __builtin_shufflevector(a, b, half_of<WIDTH>(LANE, true)...);
}

// Sums of the lanes of LANES vectors: lane i of the result is that of v[i]. Halves are added to halves, as in `sum`.
template <int WIDTH = LANES / 2, typename Lanes>
inline Lanes sums(Lanes* v) {
  for (int i = 0; i < WIDTH; ++i)
    v[i] = add_halves<WIDTH>(v[2 * i], v[2 * i + 1], std::make_integer_sequence<int, LANES>());
  if constexpr (WIDTH > 1) return sums<WIDTH / 2>(v);
  return v[0];
}

template <int WIDTH, typename Lanes, int... LANE>
inline Lanes greater_halves(Lanes a, Lanes b, std::integer_sequence<int, LANE...>) {
  const Lanes lower = __builtin_shufflevector(a, b, half_of<WIDTH>(LANE, false)...);
  const Lanes upper = __builtin_shufflevector(a, b, half_of<WIDTH>(LANE, true)...);
  return lower > upper ? lower : upper;
}

// The greatest lanes of LANES vectors, likewise.
template <int WIDTH = LANES / 2, typename Lanes>
inline Lanes greatests(Lanes* v) {
  for (int i = 0; i < WIDTH; ++i)
    v[i] = greater_halves<WIDTH>(v[2 * i], v[2 * i + 1], std::make_integer_sequence<int, LANES>());
  if constexpr (WIDTH > 1) return greatests<WIDTH / 2>(v);
  return v[0];
}

// Swaps what lies off the diagonal of squares of 2 * WIDTH lanes of two vectors that are WIDTH apart.
template <int WIDTH, int... LANE>
inline void swap_halves(Vec& a, Vec& b, std::integer_sequence<int, LANE...>) {
  const Vec first = __builtin_shufflevector(a, b, (LANE & WIDTH ? LANES + LANE - WIDTH : LANE)...);
  b = __builtin_shufflevector(a, b, (LANE & WIDTH ? LANES + LANE : LANE + WIDTH)...);
  a = first;
}

// LANES vectors as columns of a square become its rows.
template <int WIDTH = LANES / 2>
inline void transpose(Vec* v) {
  for (int i = 0; i < LANES; ++i)
    if ((i & WIDTH) == 0) swap_halves<WIDTH>(v[i], v[i + WIDTH], std::make_integer_sequence<int, LANES>());
  if constexpr (WIDTH > 1) transpose<WIDTH / 2>(v);
}

// Sum of the lanes, always halved in the same way.
inline float sum(Vec v) {
  float lanes[LANES];
  store(lanes, v);
  for (int width = LANES / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
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

// The greatest of the lanes.
template <int WIDTH = LANES / 2>
inline float greatest(Vec v) {
  v = greater_halves<WIDTH>(v, std::make_integer_sequence<int, LANES>());
  if constexpr (WIDTH > 1) return greatest<WIDTH / 2>(v);
  return v[0];
}

// e^x to two units in the last place (Cephes' polynomial); 0 below -87, as softmax wants it. NaN stays NaN.
inline Vec exp(Vec x) {
  const Vec clamped = x < -87.0f ? broadcast(-87.0f) : (x > 88.0f ? broadcast(88.0f) : x);
  const Vec scaled = clamped * 1.44269504088896341f;
  const Vec half = scaled < 0.0f ? broadcast(-0.5f) : broadcast(0.5f);
  const IntVec power = __builtin_convertvector(scaled + half, IntVec);
  const Vec whole = __builtin_convertvector(power, Vec);
  const Vec r = clamped - whole * 0.693359375f + whole * 2.12194440e-4f;
  Vec p = broadcast(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const Vec mantissa = p * r * r + r + 1.0f;
  const IntVec bits = (power + 127) << 23;
  Vec two_to_power;
  std::memcpy(&two_to_power, &bits, sizeof bits);
  const Vec result = x < -87.0f ? Vec{} : mantissa * two_to_power;
  return x == x ? result : x;
}

// tanh(x) to three units in the last place (Cephes' polynomial where x is small). NaN stays NaN.
inline Vec tanh(Vec x) {
  const Vec size = absolute(x), z = x * x;
  const Vec large = 1.0f - 2.0f / (exp(size + size) + 1.0f);
  Vec p = broadcast(-5.70498872745e-3f);
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  const Vec small = p * z * x + x;
  return size < 0.625f ? small : (x < 0.0f ? -large : large);
}

// 1 / root mean square of a row.
inline float norm_scale(const float* x, int64_t k, float eps) {
  Vec squares{};
  int64_t i = 0;
  for (; i + LANES <= k; i += LANES) squares += load(x + i) * load(x + i);
  float total = sum(squares);
  for (; i < k; ++i) total += x[i] * x[i];
  return 1.0f / std::sqrt(total / static_cast<float>(k) + eps);
}

}  // namespace sluice
