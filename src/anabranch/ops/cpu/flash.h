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
// latency of an FMA and, with the H + 1 operands, fit 16 registers.
constexpr int tile_width(int h) { return h == 1 ? 8 : h == 4 ? 2 : 4; }

constexpr int64_t padded(int64_t width) { return (width + W - 1) / W * W; }

// The state of `vectors` query vectors and the room a block needs; every row is padded to registers.
struct Flash {
  int64_t vectors, key_width, value_width;
  float* q;  // [vectors, padded(key_width)], times the scale, zeros behind
  float* acc;  // [vectors, padded(value_width)], not yet divided by total
  float* peak;  // [vectors] the largest score so far
  float* total;  // [vectors] sum of exp(score - peak)
  float* scores;  // [vectors, E]
  float* keys;  // [E, padded(key_width)]
  float* values;  // [E, padded(value_width)]

  static int64_t floats(int64_t vectors, int64_t key_width, int64_t value_width) {
    const int64_t one = padded(key_width) + padded(value_width);
    return vectors * (one + E + 2) + E * one + 3 * W;
  }

  Flash(float* room, int64_t vectors_, int64_t key_width_, int64_t value_width_)
      : vectors(vectors_), key_width(key_width_), value_width(value_width_) {
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

// scores[h][e] = q[h] . k[e] for H query vectors and K keys.
template <int H, int K, class T>
ANABRANCH_INLINE void score_tile(const float* q, int64_t q_step, const T* const* k, int64_t width,
                                 float* scores) {
  vf acc[H][K];
  ANABRANCH_UNROLL for (int h = 0; h < H; ++h)
    ANABRANCH_UNROLL for (int e = 0; e < K; ++e) acc[h][e] = vf{};
  int64_t i = 0;
  for (; i + W <= width; i += W) {
    vf x[H];
    ANABRANCH_UNROLL for (int h = 0; h < H; ++h) {
      x[h] = load(q + h * q_step + i);
      ANABRANCH_KEEP(x[h]);
    }
    ANABRANCH_UNROLL for (int e = 0; e < K; ++e) {
      const vf y = load(k[e] + i);
      ANABRANCH_UNROLL for (int h = 0; h < H; ++h) acc[h][e] += x[h] * y;
    }
  }
  if (i < width) {
    ANABRANCH_UNROLL for (int e = 0; e < K; ++e) {
      const vf y = load_part(k[e] + i, (int)(width - i));
      ANABRANCH_UNROLL for (int h = 0; h < H; ++h) acc[h][e] += load(q + h * q_step + i) * y;
    }
  }
  if constexpr (K % 4 == 0) {
    ANABRANCH_UNROLL for (int h = 0; h < H; ++h)
      ANABRANCH_UNROLL for (int e = 0; e < K; e += 4)
        sum_lanes_of_4(acc[h][e], acc[h][e + 1], acc[h][e + 2], acc[h][e + 3], scores + h * E + e);
  } else if constexpr (H == 4) {
    ANABRANCH_UNROLL for (int e = 0; e < K; ++e) {
      float sums[4];
      sum_lanes_of_4(acc[0][e], acc[1][e], acc[2][e], acc[3][e], sums);
      ANABRANCH_UNROLL for (int h = 0; h < H; ++h) scores[h * E + e] = sums[h];
    }
  } else {
    ANABRANCH_UNROLL for (int h = 0; h < H; ++h)
      ANABRANCH_UNROLL for (int e = 0; e < K; ++e) scores[h * E + e] = sum_lanes(acc[h][e]);
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
void score_strip(const float* q, int64_t q_step, const T* const* k, int n, int64_t width, float* scores,
                 const Ahead* ahead) {
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
  ANABRANCH_UNROLL for (int h = 0; h < H; ++h)
    ANABRANCH_UNROLL for (int j = 0; j < V; ++j) sum[h][j] = load(acc + h * acc_step + at + j * W);
  for (int e = 0; e < n; ++e) {
    vf w[H];
    ANABRANCH_UNROLL for (int h = 0; h < H; ++h) {
      w[h] = broadcast(weight[h * E + e]);
      ANABRANCH_KEEP(w[h]);
    }
    ANABRANCH_UNROLL for (int j = 0; j < V; ++j) {
      const vf x = kTail ? load_part(v[e] + at, left) : load(v[e] + at + j * W);
      ANABRANCH_UNROLL for (int h = 0; h < H; ++h) sum[h][j] += w[h] * x;
    }
  }
  ANABRANCH_UNROLL for (int h = 0; h < H; ++h)
    ANABRANCH_UNROLL for (int j = 0; j < V; ++j) store(acc + h * acc_step + at + j * W, sum[h][j]);
}

template <int H, class T>
void value_strip(const float* weight, const T* const* v, int n, int64_t width, float* acc, int64_t acc_step) {
  constexpr int V = tile_width(H);
  int64_t i = 0;
  for (; i + V * W <= width; i += V * W) value_tile<H, V, false>(weight, v, n, i, W, acc, acc_step);
  for (; i + W <= width; i += W) value_tile<H, 1, false>(weight, v, n, i, W, acc, acc_step);
  if (i < width) value_tile<H, 1, true>(weight, v, n, i, (int)(width - i), acc, acc_step);
}

// Fold a vector's n new scores (in place: they become weights) into its running softmax.
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

template <class T>
void attend_tiles(Flash& f, int64_t first, int64_t count, const T* const* k, const T* const* v, int n,
                  int64_t key_width, int64_t value_width, const Mask* mask, const Ahead* ahead) {
  const int64_t q_step = padded(f.key_width), acc_step = padded(f.value_width);
  for (int64_t h = first; h < first + count; h += 4) {
    const float* q = f.q + h * q_step;
    float* s = f.scores + h * E;
    float* acc = f.acc + h * acc_step;
    const int tile = first + count - h < 4 ? (int)(first + count - h) : 4;
    switch (tile) {
      case 1: score_strip<1>(q, q_step, k, n, key_width, s, h == first ? ahead : nullptr); break;
      case 2: score_strip<2>(q, q_step, k, n, key_width, s, h == first ? ahead : nullptr); break;
      case 3: score_strip<3>(q, q_step, k, n, key_width, s, h == first ? ahead : nullptr); break;
      default: score_strip<4>(q, q_step, k, n, key_width, s, h == first ? ahead : nullptr); break;
    }
    for (int j = 0; j < tile; ++j) {
      if (mask) {
        const uint8_t* seen = mask->seen + (h + j - first) / mask->per_row * E;
        for (int e = 0; e < n; ++e) s[j * E + e] = seen[e] ? s[j * E + e] : -INFINITY;
      }
      fold(s + j * E, n, f.peak + h + j, f.total + h + j, acc + j * acc_step, acc_step);
    }
    switch (tile) {
      case 1: value_strip<1>(s, v, n, value_width, acc, acc_step); break;
      case 2: value_strip<2>(s, v, n, value_width, acc, acc_step); break;
      case 3: value_strip<3>(s, v, n, value_width, acc, acc_step); break;
      default: value_strip<4>(s, v, n, value_width, acc, acc_step); break;
    }
  }
}

// n keys and values against query vectors [first, first + count). When more than one tile of vectors
// shares 16-bit keys they are widened once; values that begin where their keys do share the copy.
template <class T>
void attend_block(Flash& f, int64_t first, int64_t count, const T* const* k, const T* const* v, int n,
                  const Mask* mask, const Ahead* ahead) {
  if (sizeof(T) == sizeof(float) || count <= 4)
    return attend_tiles(f, first, count, k, v, n, f.key_width, f.value_width, mask, ahead);
  const int64_t k_step = padded(f.key_width), v_step = padded(f.value_width);
  const bool shared = k[0] == v[0] && k[n - 1] == v[n - 1] && f.value_width <= f.key_width;
  const float *wide_k[E], *wide_v[E];
  for (int e = 0; e < n; ++e) {
    widen(k[e], f.key_width, 1.0f, f.keys + e * k_step);
    if (!shared) widen(v[e], f.value_width, 1.0f, f.values + e * v_step);
    wide_k[e] = f.keys + e * k_step;
    wide_v[e] = shared ? wide_k[e] : f.values + e * v_step;
  }
  attend_tiles(f, first, count, wide_k, wide_v, n, k_step, f.value_width, mask, ahead);
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
