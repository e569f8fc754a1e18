// The heart of attention: one block of keys and values against many query vectors, with the running
// softmax of each.
//
// Owns the register tiles and the running state. Knows nothing of pages, positions or threads:
// callers hand it pointers to the block's keys and values, which lie wherever they lie.
#pragma once

#include <stdlib.h>

#include "simd.h"

namespace {

constexpr int E = 64;  // keys of a block

// How many keys (or registers of a value) a tile takes for H query vectors: 8 to 12 accumulators hide the
// latency of an FMA and, with the H + 1 operands, fit 16 registers (32 where there are 32).
constexpr int tile_width(int h) { return h == 1 ? 8 : h == 4 && W < 16 ? 2 : 4; }

constexpr int64_t padded(int64_t width, int64_t to = W) { return (width + to - 1) / to * to; }

// How a register of a query meets a register of a key of type T. In general both are widened to fp32
// and the query carries the scale of the scores.
template <class T>
struct Dot {
  using Query = float;
  using Register = vf;
  static constexpr int kElements = W;
  static constexpr bool kNative = false;  // 16-bit products: the scale is left to the scores
  static ANABRANCH_INLINE vf query(const float* p) { return load(p); }
  static ANABRANCH_INLINE vf key(const T* p) { return load(p); }
  static ANABRANCH_INLINE vf key_part(const T* p, int n) { return load_part(p, n); }
  static ANABRANCH_INLINE vf add(vf sum, vf a, vf b) { return sum + a * b; }
};

#if defined(__AVX512BF16__)
// Pairs of bf16 products added to fp32 lanes: exact products, twice the rate, nothing to widen.
template <>
struct Dot<Bf16> {
  using Query = Bf16;
  using Register = __m512i;
  static constexpr int kElements = 2 * W;
  static constexpr bool kNative = true;
  static ANABRANCH_INLINE __m512i query(const Bf16* p) { return _mm512_loadu_si512(p); }
  static ANABRANCH_INLINE __m512i key(const Bf16* p) { return _mm512_loadu_si512(p); }
  static ANABRANCH_INLINE __m512i key_part(const Bf16* p, int n) {
    return _mm512_maskz_loadu_epi16(~__mmask32(0) >> (32 - n), p);
  }
  static ANABRANCH_INLINE vf add(vf sum, __m512i a, __m512i b) {
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  }
};
#endif

// The state of `vectors` query vectors and the room a block needs; every row is padded to registers.
struct Flash {
  int64_t vectors, key_width, value_width;
  float scale;
  float* q;       // [vectors] of Dot<T>::Query in whole registers, zeros behind the key width
  float* acc;     // [vectors, padded(value_width)], not yet divided by total
  float* peak;    // [vectors] the largest score so far
  float* total;   // [vectors] sum of exp(score - peak)
  float* scores;  // [vectors, E]
  float* keys;    // [E, padded(key_width)]
  float* values;  // [E, padded(value_width)]

  static int64_t floats(int64_t vectors, int64_t key_width, int64_t value_width) {
    const int64_t one = padded(key_width) + padded(value_width);
    return vectors * (one + E + 2) + E * one + 3 * W;
  }

  Flash(float* room, int64_t vectors_, int64_t key_width_, int64_t value_width_, float scale_)
      : vectors(vectors_), key_width(key_width_), value_width(value_width_), scale(scale_) {
    q = room;
    acc = q + vectors * padded(key_width);
    scores = acc + vectors * padded(value_width);
    keys = scores + vectors * E;
    values = keys + E * padded(key_width);
    peak = values + E * padded(value_width);
    total = peak + vectors;
  }

  void clear() {
    memset(acc, 0, vectors * padded(value_width) * sizeof(float));
    memset(total, 0, vectors * sizeof(float));
    for (int64_t i = 0; i < vectors; ++i) peak[i] = -INFINITY;
  }
};

// width elements to fp32, times a factor, zeros up to the padded width.
template <class T>
void widen(const T* from, int64_t width, float factor, float* to) {
  int64_t i = 0;
  for (; i + W <= width; i += W) store(to + i, load(from + i) * factor);
  if (i < width) store(to + i, load_part(from + i, (int)(width - i)) * factor);
}

template <class T>
int64_t query_step(const Flash& f) {
  return padded(f.key_width, Dot<T>::kElements);
}

template <class T>
typename Dot<T>::Query* query_at(const Flash& f, int64_t i) {
  return (typename Dot<T>::Query*)f.q + i * query_step<T>(f);
}

// Take query vector i.
template <class T>
void take_query(Flash& f, int64_t i, const T* q) {
  if constexpr (Dot<T>::kNative) {
    memcpy(query_at<T>(f, i), q, f.key_width * sizeof(T));
    memset(query_at<T>(f, i) + f.key_width, 0, (query_step<T>(f) - f.key_width) * sizeof(T));
  } else {
    widen(q, f.key_width, f.scale, query_at<T>(f, i));
  }
}

// scores[h][e] = q[h] . k[e] for H query vectors and K keys.
template <int H, int K, class T>
ANABRANCH_INLINE void score_tile(const typename Dot<T>::Query* q, int64_t q_step, const T* const* k,
                                 int64_t width, float* scores) {
  using D = Dot<T>;
  vf acc[H][K];
  ANABRANCH_EACH (h, H)
    ANABRANCH_EACH (e, K) acc[h][e] = vf{};
  int64_t i = 0;
  for (; i + D::kElements <= width; i += D::kElements) {
    typename D::Register x[H];
    ANABRANCH_EACH (h, H) {
      x[h] = D::query(q + h * q_step + i);
      ANABRANCH_KEEP(x[h]);
    }
    ANABRANCH_EACH (e, K) {
      const typename D::Register y = D::key(k[e] + i);
      ANABRANCH_EACH (h, H) acc[h][e] = D::add(acc[h][e], x[h], y);
    }
  }
  if (i < width) {
    ANABRANCH_EACH (e, K) {
      const typename D::Register y = D::key_part(k[e] + i, (int)(width - i));
      ANABRANCH_EACH (h, H) acc[h][e] = D::add(acc[h][e], D::query(q + h * q_step + i), y);
    }
  }
  if constexpr (K % 4 == 0) {
    ANABRANCH_EACH (h, H)
      ANABRANCH_EACH (i, K / 4)
        sum_lanes_of_4(acc[h][4 * i], acc[h][4 * i + 1], acc[h][4 * i + 2], acc[h][4 * i + 3],
                       scores + h * E + 4 * i);
  } else if constexpr (H == 4) {
    ANABRANCH_EACH (e, K) {
      float sums[4];
      sum_lanes_of_4(acc[0][e], acc[1][e], acc[2][e], acc[3][e], sums);
      ANABRANCH_EACH (h, H) scores[h * E + e] = sums[h];
    }
  } else {
    ANABRANCH_EACH (h, H)
      ANABRANCH_EACH (e, K) scores[h * E + e] = sum_lanes(acc[h][e]);
  }
}

// The keys a caller will pass next, to be fetched while these are worked on: they lie in short pieces
// that the processor does not foresee.
struct Ahead {
  const char* k[E];
  int64_t value_offset, key_bytes, value_bytes;
  int n;

  ANABRANCH_INLINE void fetch(int from, int to) const {
    for (int e = from; e < to && e < n; ++e) {
      for (int64_t i = 0; i < key_bytes; i += 64) __builtin_prefetch(k[e] + i);
      for (int64_t i = 0; i < value_bytes; i += 64) __builtin_prefetch(k[e] + value_offset + i);
    }
  }
};

template <int H, class T>
void score_strip(const typename Dot<T>::Query* q, int64_t q_step, const T* const* k, int n, int64_t width,
                 float* scores, const Ahead* ahead) {
  constexpr int K = tile_width(H);
  int e = 0;
  for (; e + K <= n; e += K) {
    if (ahead) ahead->fetch(e, e + K);
    score_tile<H, K>(q, q_step, k + e, width, scores + e);
  }
  for (; e < n; ++e) score_tile<H, 1>(q, q_step, k + e, width, scores + e);
}

// acc[h] += sum over e of weight[h][e] * v[e], at V registers of elements, or `left` < W at a tail.
template <int H, int V, bool kTail, class T>
ANABRANCH_INLINE void value_tile(const float* weight, const T* const* v, int n, int64_t at, int left,
                                 float* acc, int64_t acc_step) {
  vf sum[H][V];
  ANABRANCH_EACH (h, H)
    ANABRANCH_EACH (j, V) sum[h][j] = load(acc + h * acc_step + at + j * W);
  for (int e = 0; e < n; ++e) {
    vf w[H];
    ANABRANCH_EACH (h, H) {
      w[h] = broadcast(weight[h * E + e]);
      ANABRANCH_KEEP(w[h]);
    }
    ANABRANCH_EACH (j, V) {
      const vf x = kTail ? load_part(v[e] + at, left) : load(v[e] + at + j * W);
      ANABRANCH_EACH (h, H) sum[h][j] += w[h] * x;
    }
  }
  ANABRANCH_EACH (h, H)
    ANABRANCH_EACH (j, V) store(acc + h * acc_step + at + j * W, sum[h][j]);
}

template <int H, class T>
void value_strip(const float* weight, const T* const* v, int n, int64_t width, float* acc, int64_t acc_step) {
  constexpr int V = tile_width(H);
  int64_t i = 0;
  for (; i + V * W <= width; i += V * W) value_tile<H, V, false>(weight, v, n, i, W, acc, acc_step);
  for (; i + W <= width; i += W) value_tile<H, 1, false>(weight, v, n, i, W, acc, acc_step);
  if (i < width) value_tile<H, 1, true>(weight, v, n, i, (int)(width - i), acc, acc_step);
}

#if defined(__AVX512BF16__)
// Values as pairs: word (e, i) holds element i of values 2e and 2e + 1, so that one instruction adds both.
// [(n + 1) / 2, padded(width)]; a value that is not there is zeros.
inline void pair_values(const Bf16* const* v, int n, int64_t width, uint32_t* pairs) {
  const int64_t step = padded(width);
  for (int e = 0; e < n; e += 2) {
    for (int64_t i = 0; i < width; i += W) {
      const int left = width - i < W ? (int)(width - i) : W;
      const vu even = (vu)load_part(v[e] + i, left) >> 16;
      const vu odd = e + 1 < n ? (vu)load_part(v[e + 1] + i, left) : vu{};
      store((float*)pairs + e / 2 * step + i, (vf)(even | odd));
    }
  }
}

// acc[h] += sum over pairs of weight[h] * value, at V registers of elements.
template <int H, int V>
ANABRANCH_INLINE void pair_tile(const float* weight, const uint32_t* pairs, int n, int64_t step, int64_t at,
                                float* acc, int64_t acc_step) {
  vf sum[H][V];
  ANABRANCH_EACH (h, H)
    ANABRANCH_EACH (j, V) sum[h][j] = load(acc + h * acc_step + at + j * W);
  for (int e = 0; 2 * e < n; ++e) {
    __m512i w[H];
    ANABRANCH_EACH (h, H) w[h] = _mm512_set1_epi32(((const int*)(weight + h * E))[e]);
    ANABRANCH_EACH (j, V) {
      const __m512i x = _mm512_loadu_si512(pairs + e * step + at + j * W);
      ANABRANCH_EACH (h, H) sum[h][j] = Dot<Bf16>::add(sum[h][j], w[h], x);
    }
  }
  ANABRANCH_EACH (h, H)
    ANABRANCH_EACH (j, V) store(acc + h * acc_step + at + j * W, sum[h][j]);
}

template <int H>
void pair_strip(float* weight, const uint32_t* pairs, int n, int64_t width, float* acc, int64_t acc_step) {
  constexpr int V = tile_width(H);
  for (int h = 0; h < H; ++h)  // in place: a weight's bf16 lies before its fp32
    for (int e = 0; e < (n + W - 1) / W * W; e += W)
      store((Bf16*)(weight + h * E) + e, load(weight + h * E + e));
  const int64_t step = padded(width);
  int64_t i = 0;
  for (; i + V * W <= step; i += V * W) pair_tile<H, V>(weight, pairs, n, step, i, acc, acc_step);
  for (; i < step; i += W) pair_tile<H, 1>(weight, pairs, n, step, i, acc, acc_step);
}
#endif

// Fold a vector's n new scores into its running softmax; in place they become weights.
inline void fold(float* scores, int n, float* peak, float* total, float* acc, int64_t acc_width) {
  const int filled = (n + W - 1) / W * W;
  for (int e = n; e < filled; ++e) scores[e] = -INFINITY;
  vf most = load(scores);
  for (int e = W; e < filled; e += W) most = larger(most, load(scores + e));
  const float block_peak = max_lanes(most);
  const float new_peak = block_peak > *peak ? block_peak : *peak;
  const float shift = new_peak == -INFINITY ? 0.0f : new_peak;
  vf sum = {};
  for (int e = 0; e < filled; e += W) {
    const vf p = exp_negative(load(scores + e) - shift);
    store(scores + e, p);
    sum += p;
  }
  if (new_peak > *peak) {
    const float keep = expf(*peak - shift);
    *total *= keep;
    for (int64_t i = 0; i < acc_width; i += W) store(acc + i, load(acc + i) * keep);
    *peak = new_peak;
  }
  *total += sum_lanes(sum);
}

// Which of a block's keys each query row sees: byte [row, E], rows of `per_row` vectors.
struct Mask {
  const uint8_t* seen;
  int64_t per_row;
};

template <int H, class T>
void attend_strip(Flash& f, int64_t h, int64_t first, const T* const* k, const T* const* v,
                  [[maybe_unused]] const uint32_t* pairs, int n, const Mask* mask, const Ahead* ahead) {
  const int64_t acc_step = padded(f.value_width);
  float *s = f.scores + h * E, *acc = f.acc + h * acc_step;
  score_strip<H>(query_at<T>(f, h), query_step<T>(f), k, n, f.key_width, s, h == first ? ahead : nullptr);
  for (int j = 0; j < H; ++j) {
    float* row = s + j * E;
    if constexpr (Dot<T>::kNative)
      for (int e = 0; e < n; ++e) row[e] *= f.scale;
    if (mask) {
      const uint8_t* seen = mask->seen + (h + j - first) / mask->per_row * E;
      for (int e = 0; e < n; ++e) row[e] = seen[e] ? row[e] : -INFINITY;
    }
    fold(row, n, f.peak + h + j, f.total + h + j, acc + j * acc_step, acc_step);
  }
#if defined(__AVX512BF16__)
  if (pairs) return pair_strip<H>(s, pairs, n, f.value_width, acc, acc_step);
#endif
  value_strip<H>(s, v, n, f.value_width, acc, acc_step);
}

template <class T>
void attend_strips(Flash& f, int64_t first, int64_t count, const T* const* k, const T* const* v,
                   const uint32_t* pairs, int n, const Mask* mask, const Ahead* ahead) {
  int64_t h = first;
  for (; h + 4 <= first + count; h += 4) attend_strip<4>(f, h, first, k, v, pairs, n, mask, ahead);
  switch (first + count - h) {
    case 3:
      return attend_strip<3>(f, h, first, k, v, pairs, n, mask, ahead);
    case 2:
      return attend_strip<2>(f, h, first, k, v, pairs, n, mask, ahead);
    case 1:
      return attend_strip<1>(f, h, first, k, v, pairs, n, mask, ahead);
  }
}

// n keys and values against query vectors [first, first + count). What more than one strip of vectors
// shares is prepared once: values as pairs where there are native products, else both widened (values that
// begin where their keys do share the copy).
template <class T>
void attend_block(Flash& f, int64_t first, int64_t count, const T* const* k, const T* const* v, int n,
                  const Mask* mask, const Ahead* ahead) {
  if (sizeof(T) == sizeof(float) || count <= 4)
    return attend_strips(f, first, count, k, v, nullptr, n, mask, ahead);
  if constexpr (Dot<T>::kNative) {
    pair_values(v, n, f.value_width, (uint32_t*)f.values);
    attend_strips(f, first, count, k, v, (const uint32_t*)f.values, n, mask, ahead);
  } else {
    const int64_t k_step = padded(f.key_width), v_step = padded(f.value_width);
    const bool shared = k[0] == v[0] && k[n - 1] == v[n - 1] && f.value_width <= f.key_width;
    const float *wide_k[E], *wide_v[E];
    for (int e = 0; e < n; ++e) {
      widen(k[e], f.key_width, 1.0f, f.keys + e * k_step);
      if (!shared) widen(v[e], f.value_width, 1.0f, f.values + e * v_step);
      wide_k[e] = f.keys + e * k_step;
      wide_v[e] = shared ? wide_k[e] : f.values + e * v_step;
    }
    attend_strips<float>(f, first, count, wide_k, wide_v, nullptr, n, mask, ahead);
  }
}

// Another state of one vector, over other keys, joined into (peak, total, acc).
inline void join(float other_peak, float other_total, const float* other, float* peak, float* total,
                 float* acc, int64_t acc_width) {
  const float top = other_peak > *peak ? other_peak : *peak;
  if (top == -INFINITY) return;
  const float a = expf(*peak - top), b = expf(other_peak - top);
  *total = *total * a + other_total * b;
  *peak = top;
  for (int64_t i = 0; i < acc_width; i += W) store(acc + i, load(acc + i) * a + load(other + i) * b);
}

// The finished vector: a sink joins as a score without a value; nothing seen gives (0, -inf).
template <class T>
void finish(float peak, float total, const float* acc, int64_t width, const float* sink, T* out, float* lse) {
  float factor = 1.0f;
  if (sink) {
    const float top = *sink > peak ? *sink : peak;
    factor = expf(peak - top);
    total = total * factor + expf(*sink - top);
    peak = top;
  }
  const float scale = total > 0.0f ? factor / total : 0.0f;
  int64_t i = 0;
  for (; i + W <= width; i += W) store(out + i, load(acc + i) * scale);
  if (i < width) store_part(out + i, load(acc + i) * scale, (int)(width - i));
  *lse = total > 0.0f ? peak + logf(total) : -INFINITY;
}

}  // namespace
