// Vectors of fp32 as wide as the instruction set, and the 16-bit floats they are loaded from.
//
// Owns the only code that knows register widths. Included once per instruction set, inside an
// anonymous namespace, so that nothing compiled for a wide set can be linked into a narrow one.
// For the same reason no standard template is used in files that include it.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

#define ANABRANCH_INLINE inline __attribute__((always_inline))
// A loop over an array of registers: only unrolled does it stay in registers.
#define ANABRANCH_EACH(i, n) _Pragma("GCC unroll 16") for (int i = 0; i < (n); ++i)

// Keeps a loaded vector in its register, where the compiler would rather load it at every use.
#if defined(__x86_64__)
#define ANABRANCH_KEEP(x) __asm__("" : "+v"(x))
#else
#define ANABRANCH_KEEP(x)
#endif

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));

struct Bf16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

ANABRANCH_INLINE vf broadcast(float x) { return x - vf{}; }  // x - 0 is x; 0 + x is not, for -0
ANABRANCH_INLINE vf select(vi mask, vf a, vf b) { return mask ? a : b; }
ANABRANCH_INLINE vf larger(vf a, vf b) { return select(a > b, a, b); }

ANABRANCH_INLINE vf load(const float* p) {
  vf x;
  memcpy(&x, p, sizeof x);
  return x;
}
ANABRANCH_INLINE void store(float* p, vf x) { memcpy(p, &x, sizeof x); }

// 16-bit lanes to 32-bit ones and back (only the low halves count). The compiler's own conversion of
// wide vectors takes several shuffles where these instructions do.
#if defined(__AVX512F__)
ANABRANCH_INLINE vu widen16(vh x) { return (vu)_mm512_cvtepu16_epi32((__m256i)x); }
ANABRANCH_INLINE vh narrow16(vu x) { return (vh)_mm512_cvtepi32_epi16((__m512i)x); }
#elif defined(__AVX2__)
ANABRANCH_INLINE vu widen16(vh x) { return (vu)_mm256_cvtepu16_epi32((__m128i)x); }
ANABRANCH_INLINE vh narrow16(vu x) {
  const __m256i halves = _mm256_packus_epi32((__m256i)x, (__m256i)x);
  return (vh)_mm256_castsi256_si128(_mm256_permute4x64_epi64(halves, 0x88));
}
#else
ANABRANCH_INLINE vu widen16(vh x) { return __builtin_convertvector(x, vu); }
ANABRANCH_INLINE vh narrow16(vu x) { return __builtin_convertvector(x, vh); }
#endif

ANABRANCH_INLINE vf load(const Bf16* p) {
  vh x;
  memcpy(&x, p, sizeof x);
  return (vf)(widen16(x) << 16);
}

// Its upper 16 bits are x as bf16: rounded to nearest even in integers; a NaN stays a NaN (its payload
// could else round to infinity).
ANABRANCH_INLINE vu bf16_above(vf x) {
  const vu u = (vu)x;
  return x != x ? u | 0x400000u : u + 0x7fffu + ((u >> 16) & 1u);
}
ANABRANCH_INLINE void store(Bf16* p, vf x) {
  const vh y = narrow16(bf16_above(x) >> 16);
  memcpy(p, &y, sizeof y);
}

#if defined(__AVX512F__)
ANABRANCH_INLINE vf load(const Half* p) { return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
ANABRANCH_INLINE void store(Half* p, vf x) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(__F16C__)
ANABRANCH_INLINE vf load(const Half* p) { return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
ANABRANCH_INLINE void store(Half* p, vf x) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
}
#else
// Half = sign, 5 exponent bits (bias 15), 10 mantissa bits: moved into fp32's place, then scaled by
// 2^112 to mend the bias; subnormals come out right, infinity and NaN need their exponent refilled.
ANABRANCH_INLINE vf load(const Half* p) {
  vh raw;
  memcpy(&raw, p, sizeof raw);
  const vu h = widen16(raw);
  const vf scaled = (vf)((h & 0x7fffu) << 13) * 0x1p112f;
  const vu special = (vu)((h & 0x7c00u) == 0x7c00u) & 0x7f800000u;
  return (vf)((vu)scaled | special | ((h & 0x8000u) << 16));
}
// Above the normal range: infinity (or NaN); within: round in integers; below: an fp32 addition
// whose ulp is the half's subnormal ulp does the rounding.
ANABRANCH_INLINE void store(Half* p, vf x) {
  const vu u = (vu)x & 0x7fffffffu, sign = ((vu)x >> 16) & 0x8000u;
  const vu normal = (u - (112u << 23) + 0xfffu + ((u >> 13) & 1u)) >> 13;
  const vu subnormal = (vu)((vf)u + 0.5f) - (uint32_t)0x3f000000u;
  const vu big = ((vu)(u > 0x7f800000u) & 0x200u) | 0x7c00u;
  const vu is_big = (vu)(u >= 0x477ff000u), is_small = (vu)(u < 0x38800000u);
  const vu y = (is_big & big) | (~is_big & ((is_small & subnormal) | (~is_small & normal)));
  const vh h = narrow16(y | sign);
  memcpy(p, &h, sizeof h);
}
#endif

// 2 * W elements in an order of the type's own, for what treats all alike: of 16-bit pairs in one lane
// the even and the odd ones, as that takes no shuffle.
struct Two {
  vf a, b;
};
template <class T>
ANABRANCH_INLINE Two load_two(const T* p) {
  return {load(p), load(p + W)};
}
template <class T>
ANABRANCH_INLINE void store_two(T* p, Two x) {
  store(p, x.a);
  store(p + W, x.b);
}
ANABRANCH_INLINE Two load_two(const Bf16* p) {
  vu x;
  memcpy(&x, p, sizeof x);
  return {(vf)(x << 16), (vf)(x & 0xffff0000u)};
}
ANABRANCH_INLINE void store_two(Bf16* p, Two x) {
  const vu y = bf16_above(x.a) >> 16 | (bf16_above(x.b) & 0xffff0000u);
  memcpy(p, &y, sizeof y);
}

// The first n < W elements, zeros behind them: nothing past them is touched.
template <class T>
ANABRANCH_INLINE vf load_part(const T* p, int n) {
  T few[W] = {};
  memcpy(few, p, n * sizeof(T));
  return load(few);
}

template <class T>
ANABRANCH_INLINE void store_part(T* p, vf x, int n) {
  T few[W];
  store(few, x);
  memcpy(p, few, n * sizeof(T));
}

ANABRANCH_INLINE float sum_lanes(vf x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#elif defined(__AVX2__)
  const __m128 half = _mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
  const __m128 pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
#else
  return (x[0] + x[2]) + (x[1] + x[3]);
#endif
}

// The four sums at once: to[i] = sum of x_i.
ANABRANCH_INLINE void sum_lanes_of_4(vf x0, vf x1, vf x2, vf x3, float* to) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
#define ANABRANCH_FOLD(x) \
  _mm256_add_ps(_mm512_castps512_ps256((__m512)x), _mm512_extractf32x8_ps((__m512)x, 1))
#else
#define ANABRANCH_FOLD(x) (__m256) x
#endif
  const __m256 pairs = _mm256_hadd_ps(ANABRANCH_FOLD(x0), ANABRANCH_FOLD(x1));
  const __m256 others = _mm256_hadd_ps(ANABRANCH_FOLD(x2), ANABRANCH_FOLD(x3));
  const __m256 fours = _mm256_hadd_ps(pairs, others);
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(fours), _mm256_extractf128_ps(fours, 1)));
#undef ANABRANCH_FOLD
#else
  to[0] = sum_lanes(x0), to[1] = sum_lanes(x1), to[2] = sum_lanes(x2), to[3] = sum_lanes(x3);
#endif
}

ANABRANCH_INLINE float max_lanes(vf x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#elif defined(__AVX2__)
  const __m128 half = _mm_max_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
  const __m128 pair = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(pair, _mm_movehdup_ps(pair)));
#else
  const float a = x[0] > x[1] ? x[0] : x[1], b = x[2] > x[3] ? x[2] : x[3];
  return a > b ? a : b;
#endif
}

// e^x for x <= 0 within 2 ulp, 0 below -87 (where fp32 turns subnormal) and for -inf: 2^n * e^r with
// |r| <= ln2/2, e^r by its Taylor series to degree 7 (the next term is 1e-8 of the result).
ANABRANCH_INLINE vf exp_negative(vf x) {
  const vf bounded = larger(x, broadcast(-87.0f));
  const vf magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const vf n = (bounded * 1.44269504f + magic) - magic;
  const vf r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;
  vf y = broadcast(1.0f / 5040);
  y = y * r + 1.0f / 720;
  y = y * r + 1.0f / 120;
  y = y * r + 1.0f / 24;
  y = y * r + 1.0f / 6;
  y = y * r + 0.5f;
  y = y * r + 1.0f;
  y = y * r + 1.0f;
  const vi power = (__builtin_convertvector(n, vi) + 127) << 23;
  return select(x < -87.0f, vf{}, y * (vf)power);
}

}  // namespace
