// Kernels of what lies around attention: rms_norm, gated, linear, run_experts. See ops/signatures.py
// for what they mean. Sums are fp32 whatever the dtype, and what is stored is rounded once.
#pragma once

#include <stdlib.h>

#include "kernels.h"
#include "simd.h"
#include "team.h"

namespace {

using namespace anabranch;

struct SpanJob {
  const void* args;
  int64_t rows, parts;
};

// Calls rows(args, from, to) over pieces of [0, rows).
template <class Args, void (*rows)(const Args&, int64_t, int64_t)>
void over_rows(const Args& a, int64_t count, int64_t bytes) {
  SpanJob job{&a, count, pieces(a.threads, bytes)};
  const auto task = [](void* context, int, int64_t i) {
    const SpanJob& j = *static_cast<SpanJob*>(context);
    rows(*static_cast<const Args*>(j.args), j.rows * i / j.parts, j.rows * (i + 1) / j.parts);
  };
  run_tasks(a.threads, job.parts, task, &job);
}

ANABRANCH_INLINE int left_of(int64_t i, int64_t n) { return n - i < W ? (int)(n - i) : W; }

template <class T>
ANABRANCH_INLINE vf load_up_to(const T* p, int n) {
  return n == W ? load(p) : load_part(p, n);
}

template <class T>
ANABRANCH_INLINE void store_up_to(T* p, vf x, int n) {
  n == W ? store(p, x) : store_part(p, x, n);
}

template <class T>
ANABRANCH_INLINE vf rounded(vf x) {
  T few[W];
  store(few, x);
  return load(few);
}

// ---- rms_norm

template <class T>
void norm_rows(const NormArgs& a, int64_t from, int64_t to) {
  const T* weight = (const T*)a.weight;
  for (int64_t row = from; row < to; ++row) {
    const T* x = (const T*)a.x + row * a.x_stride;
    T* out = (T*)a.out + row * a.width;
    vf squares[2] = {};
    int64_t i = 0;
    for (; i + 2 * W <= a.width; i += 2 * W)
      ANABRANCH_EACH (u, 2) {
        const vf v = load(x + i + u * W);
        squares[u] += v * v;
      }
    for (; i < a.width; i += W) {
      const vf v = load_up_to(x + i, left_of(i, a.width));
      squares[0] += v * v;
    }
    const float scale = 1.0f / sqrtf(sum_lanes(squares[0] + squares[1]) / (float)a.width + a.eps);
    for (i = 0; i < a.width; i += W) {
      const int n = left_of(i, a.width);
      const vf unit = rounded<T>(load_up_to(x + i, n) * scale);  // before the weight is applied
      store_up_to(out + i, unit * load_up_to(weight + i, n), n);
    }
  }
}

void norm_any(const NormArgs& a, int64_t from, int64_t to) {
  switch (a.type) {
    case Type::f32:
      return norm_rows<float>(a, from, to);
    case Type::bf16:
      return norm_rows<Bf16>(a, from, to);
    case Type::f16:
      return norm_rows<Half>(a, from, to);
  }
}

void rms_norm(const NormArgs& a) { over_rows<NormArgs, norm_any>(a, a.rows, a.rows * a.width * 4); }

// ---- gated

// act(g) * (up + shift) with act(g) = g * sigmoid(alpha * g), both cut at the limit first. The factors
// are rounded to T, as the released models' code leaves them.
template <class T>
ANABRANCH_INLINE vf gate(const Gate& k, vf g, vf up) {
  g = select(g > k.limit, broadcast(k.limit), g);
  up = select(up > k.limit, broadcast(k.limit), select(up < -k.limit, broadcast(-k.limit), up));
  const vf z = g * k.alpha;
  const vf e = exp_negative(select(z > 0.0f, -z, z));
  return rounded<T>(g * select(z > 0.0f, broadcast(1.0f), e) / (1.0f + e)) * rounded<T>(up + k.shift);
}

template <class T>
void gate_rows(const GatedArgs& a, int64_t from, int64_t to) {
  for (int64_t row = from; row < to; ++row) {
    const T* both = (const T*)a.both + row * a.both_stride;
    T* out = (T*)a.out + row * a.width;
    for (int64_t i = 0; i < a.width; i += W) {
      const int n = left_of(i, a.width);
      store_up_to(out + i, gate<T>(a.gate, load_up_to(both + i, n), load_up_to(both + a.width + i, n)), n);
    }
  }
}

void gate_any(const GatedArgs& a, int64_t from, int64_t to) {
  switch (a.type) {
    case Type::f32:
      return gate_rows<float>(a, from, to);
    case Type::bf16:
      return gate_rows<Bf16>(a, from, to);
    case Type::f16:
      return gate_rows<Half>(a, from, to);
  }
}

void gated(const GatedArgs& a) { over_rows<GatedArgs, gate_any>(a, a.rows, a.rows * a.width * 12); }

// ---- linear

// What one instruction of a product with weights of T multiplies: `size` elements of a row, which is kept
// as Row, with as many weights.
template <class T>
struct Operand {
  typedef float Row;
  typedef vf Vector;
  static constexpr int size = W;
  template <class U>
  static ANABRANCH_INLINE vf load(const U* p, int n) {
    return load_up_to(p, n);
  }
  static ANABRANCH_INLINE vf add(vf sum, vf x, vf w) { return sum + x * w; }
};
#if defined(__AVX512BF16__)
template <>
struct Operand<Bf16> {  // two products a lane and instruction, and nothing to be widened
  typedef Bf16 Row;
  typedef __m512bh Vector;
  static constexpr int size = 2 * W;
  static ANABRANCH_INLINE __m512bh load(const Bf16* p, int n) {
    return (__m512bh)(n == size ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi16((1u << n) - 1, p));
  }
  static ANABRANCH_INLINE vf add(vf sum, __m512bh x, __m512bh w) {
    return (vf)_mm512_dpbf16_ps((__m512)sum, x, w);
  }
};
#endif
template <class T>
using RowOf = typename Operand<T>::Row;
template <class T>
constexpr bool kWidened = sizeof(RowOf<T>) != sizeof(T);  // whether rows of T are copied to be multiplied

// R rows against C rows of weights over [from, to) of the width, U registers of each at a time: lane by
// lane, lanes[c * stride + r] grows by x_r . w_c. Meanwhile the rows of weights `ahead`, unless
// null, are fetched.
template <int R, int C, int U, class T>
ANABRANCH_INLINE void dots(const RowOf<T>* const* x, const T* const* w, int64_t from, int64_t to,
                           float* lanes, int64_t stride, const T* const* ahead) {
  typedef Operand<T> O;
  vf sum[C][R][U] = {};
  const auto step = [&](int64_t i, int u, int n) {
    typename O::Vector part[C];
    ANABRANCH_EACH (c, C) part[c] = O::load(w[c] + i, n);
    ANABRANCH_EACH (r, R) {
      const typename O::Vector v = O::load(x[r] + i, n);
      ANABRANCH_EACH (c, C) sum[c][r][u] = O::add(sum[c][r][u], v, part[c]);
    }
  };
  int64_t i = from;
  for (; i + U * O::size <= to; i += U * O::size) {
    if (ahead) {
      ANABRANCH_EACH (c, C) __builtin_prefetch(ahead[c] + i);
    }
    ANABRANCH_EACH (u, U) step(i + u * O::size, u, O::size);
  }
  for (; i < to; i += O::size) step(i, 0, to - i < O::size ? (int)(to - i) : O::size);
  ANABRANCH_EACH (c, C)
    ANABRANCH_EACH (r, R) {
      float* const kept = lanes + (c * stride + r) * W;
      for (int u = 1; u < U; ++u) sum[c][r][0] += sum[c][r][u];
      store(kept, load(kept) + sum[c][r][0]);
    }
}

constexpr int kTogether = W == 16 ? 8 : 4;  // rows whose sums with three rows of weights fit the registers

// All rows against C rows of weights over [from, to) of the width, some at a time. All but the first have
// the weights in a cache: the time of the second is used to fetch the next ones, `ahead`; with `eager` that
// of the only one too, where pieces of rows are too short for the processor's own fetching.
template <int C, class T>
void dots_of(const RowOf<T>* const* x, int64_t count, const T* const* w, int64_t from, int64_t to,
             float* lanes, const T* const* ahead, bool eager) {
  const int64_t second = eager && count <= kTogether ? 0 : kTogether;
  int64_t i = 0;
  const auto fetched = [&] { return i == second ? ahead : nullptr; };
  for (; i + kTogether <= count; i += kTogether)
    dots<kTogether, C, 1>(x + i, w, from, to, lanes + i * W, count, fetched());
  for (; i + 4 <= count; i += 4) dots<4, C, 1>(x + i, w, from, to, lanes + i * W, count, fetched());
  for (; i + 2 <= count; i += 2) dots<2, C, 2>(x + i, w, from, to, lanes + i * W, count, fetched());
  for (; i < count; ++i) dots<1, C, 4>(x + i, w, from, to, lanes + i * W, count, fetched());
}

// Bytes of x that stay in the nearest cache beside weights, where a piece of them is worth that: with
// narrower registers the sums take as long as fetching them again.
constexpr int64_t kNear = W == 16 ? 16 << 10 : int64_t(1) << 40;
constexpr int64_t kLanes = 8 << 10;  // bytes of sums that do, too

// Floats that the products of `count` rows with C rows of weights at a time need.
template <int C>
int64_t room_of(int64_t count) {
  const int64_t least = C * count * W, some = kLanes / sizeof(float);
  return (least > some ? least : some) + C * count;
}

// done(t, sums) for every t of [0, tuples): sums[c * count + r] is x_r . w_c of the C rows of weights, a
// tuple, that at(t, w) tells. Where the rows of x are more than the nearest cache holds, the width is gone
// through in pieces, and a piece of x stays there for a group of tuples.
template <int C, class T, class At, class Done>
void products_of(const RowOf<T>* const* x, int64_t count, int64_t width, int64_t tuples, float* room,
                 const At& at, const Done& done) {
  if (!count) return;
  const int64_t near = kNear / sizeof(RowOf<T>) / count / 64 * 64;
  const int64_t depth = width <= near ? width : near < 256 ? 256 : near;
  const int64_t size = C * count, fit = kLanes / sizeof(float) / W / size;
  const int64_t group = depth == width || fit < 1 ? 1 : fit;
  float *const lanes = room + size, *const sums = room;
  for (int64_t g = 0; g < tuples; g += group) {
    const int64_t end = g + group < tuples ? g + group : tuples;
    memset(lanes, 0, (end - g) * size * W * sizeof(float));
    for (int64_t k = 0; k < width; k += depth) {
      const int64_t to = k + depth < width ? k + depth : width;
      for (int64_t t = g; t < end; ++t) {
        const T *w[C], *ahead[C];
        at(t, w);
        // What comes next: this piece of the next tuple, the group's next piece, the next group's first.
        const bool same = t + 1 < end, next = !same && to < width;
        at(same ? t + 1 : next ? g : end < tuples ? end : t, ahead);
        ANABRANCH_EACH (c, C) ahead[c] += same ? 0 : next ? depth : -k;
        dots_of<C>(x, count, w, k, to, lanes + (t - g) * size * W, ahead, depth < width);
      }
    }
    for (int64_t t = g; t < end; ++t) {
      for (int64_t i = 0; i < size; ++i) sums[i] = sum_lanes(load(lanes + ((t - g) * size + i) * W));
      done(t, sums);
    }
  }
}

constexpr int kColumns = 3;  // rows of weights at a time: a row of x is read once for each

template <class T>
struct LinearJob {
  const LinearArgs& args;
  int64_t parts;
  const RowOf<T>** rows;  // [rows] of x
  int64_t room_size;
  float* room;  // room_size floats per worker
};

// Where rows of x lie as they are multiplied: copied to `wide`, or where they are.
template <class T>
void place_rows(const char* x, int64_t count, int64_t dim, int64_t stride, const int64_t* pick,
                RowOf<T>* wide, const RowOf<T>** rows) {
  for (int64_t p = 0; p < count; ++p) {
    const T* from = (const T*)x + (pick ? pick[p] : p) * stride;
    rows[p] = kWidened<T> ? wide + p * dim : (const RowOf<T>*)from;
    for (int64_t i = 0; kWidened<T> && i < dim; i += W) {
      const int n = left_of(i, dim);
      store_up_to(wide + p * dim + i, load_up_to(from + i, n), n);
    }
  }
}

template <class T>
void linear_columns(const LinearJob<T>& job, float* room, int64_t from, int64_t to) {
  const LinearArgs& a = job.args;
  const T *weight = (const T*)a.weight, *bias = (const T*)a.bias;
  const auto at = [&](int64_t t, const T** w) {
    for (int k = 0; k < kColumns; ++k) {
      const int64_t c = from + t * kColumns + k;
      w[k] = weight + (c < to ? c : to - 1) * a.weight_stride;
    }
  };
  const auto done = [&](int64_t t, const float* sums) {
    for (int64_t k = 0, d = from + t * kColumns; k < kColumns && d < to; ++k, ++d) {
      const float extra = bias ? load_part(bias + d, 1)[0] : 0.0f;
      for (int64_t row = 0; row < a.rows; ++row)
        store_part((T*)a.out + row * a.columns + d, broadcast(sums[k * a.rows + row] + extra), 1);
    }
  };
  products_of<kColumns, T>(job.rows, a.rows, a.width, (to - from + kColumns - 1) / kColumns, room, at, done);
}

template <class T>
void linear_of(const LinearArgs& a) {
  LinearJob<T> job{a, pieces(a.threads, a.columns * a.width * (int64_t)sizeof(T)), nullptr,
                   room_of<kColumns>(a.rows), nullptr};
  const int64_t wide = kWidened<T> ? a.rows * a.width : 0;
  char* memory = (char*)malloc(a.rows * sizeof(void*) + job.parts * job.room_size * sizeof(float) +
                               wide * sizeof(RowOf<T>));
  job.rows = (const RowOf<T>**)memory;
  job.room = (float*)(job.rows + a.rows);
  place_rows<T>(a.x, a.rows, a.width, a.x_stride, nullptr, (RowOf<T>*)(job.room + job.parts * job.room_size),
                job.rows);
  const auto task = [](void* context, int worker, int64_t i) {
    const LinearJob<T>& j = *static_cast<LinearJob<T>*>(context);
    const int64_t n = j.args.columns;
    linear_columns<T>(j, j.room + worker * j.room_size, n * i / j.parts, n * (i + 1) / j.parts);
  };
  run_tasks(a.threads, job.parts, task, &job);
  free(memory);
}

void linear(const LinearArgs& a) {
  switch (a.type) {
    case Type::f32:
      return linear_of<float>(a);
    case Type::bf16:
      return linear_of<Bf16>(a);
    case Type::f16:
      return linear_of<Half>(a);
  }
}

// ---- run_experts

template <class T>
struct ExpertsJob {
  const ExpertsArgs& args;
  int64_t parts;
  const RowOf<T>** rows;    // [pairs] the pair's row of x
  const RowOf<T>** hidden;  // [pairs] what the pair's gate left, width wide
  RowOf<T>* inside;         // behind `hidden`
  float* total;             // [rows, dim]
  int64_t room_size;
  float* room;  // room_size floats per worker
};

// The hidden columns [from, to) of every pair.
template <class T>
void hidden_columns(const ExpertsJob<T>& job, float* room, int64_t from, int64_t to) {
  const ExpertsArgs& a = job.args;
  for (int64_t e = 0; e < a.experts; ++e) {
    const int64_t begin = a.begin[e], count = a.begin[e + 1] - begin;
    if (!count) continue;
    const T* weights = (const T*)a.gate_up + e * a.gate_up_stride[0];
    const T* bias = a.gate_up_bias ? (const T*)a.gate_up_bias + e * 2 * a.width : nullptr;
    const auto at = [&](int64_t t, const T** w) {
      w[0] = weights + (from + t) * a.gate_up_stride[1];
      w[1] = w[0] + a.width * a.gate_up_stride[1];
    };
    const auto done = [&](int64_t t, float* sums) {
      const int64_t j = from + t;
      const float g = bias ? load_part(bias + j, 1)[0] : 0.0f;
      const float up = bias ? load_part(bias + a.width + j, 1)[0] : 0.0f;
      for (int64_t p = 0; p < count; p += W) {
        const int n = left_of(p, count);
        RowOf<T> out[W];
        store(out, gate<T>(a.gate, load_part(sums + p, n) + g, load_part(sums + count + p, n) + up));
        for (int q = 0; q < n; ++q) job.inside[(begin + p + q) * a.width + j] = out[q];
      }
    };
    products_of<2, T>(job.rows + begin, count, a.dim, to - from, room, at, done);
  }
}

// The output columns [from, to) of every row, expert by expert.
template <class T>
void output_columns(const ExpertsJob<T>& job, float* room, int64_t from, int64_t to) {
  const ExpertsArgs& a = job.args;
  for (int64_t row = 0; row < a.rows; ++row)
    memset(job.total + row * a.dim + from, 0, (to - from) * sizeof(float));
  for (int64_t e = 0; e < a.experts; ++e) {
    const int64_t begin = a.begin[e], count = a.begin[e + 1] - begin;
    if (!count) continue;
    const T* weights = (const T*)a.down + e * a.down_stride[0];
    const T* bias = a.down_bias ? (const T*)a.down_bias + e * a.dim : nullptr;
    const auto at = [&](int64_t t, const T** w) {
      const int64_t c = from + 2 * t;
      w[0] = weights + c * a.down_stride[1];
      w[1] = c + 1 < to ? w[0] + a.down_stride[1] : w[0];
    };
    const auto done = [&](int64_t t, const float* sums) {
      for (int64_t d = from + 2 * t; d < from + 2 * t + 2 && d < to; ++d, sums += count) {
        const float extra = bias ? load_part(bias + d, 1)[0] : 0.0f;
        for (int64_t p = 0; p < count; ++p)
          job.total[a.row[begin + p] * a.dim + d] += a.weight[begin + p] * (sums[p] + extra);
      }
    };
    products_of<2, T>(job.hidden + begin, count, a.width, (to - from + 1) / 2, room, at, done);
  }
  for (int64_t row = 0; row < a.rows; ++row)
    for (int64_t i = from; i < to; i += W) {
      const int n = left_of(i, to);
      store_up_to((T*)a.out + row * a.dim + i, load_up_to(job.total + row * a.dim + i, n), n);
    }
}

template <class T>
void experts_of(const ExpertsArgs& a) {
  ExpertsJob<T> job{a,
                    pieces(a.threads, a.experts * a.width * a.dim * 3 * (int64_t)sizeof(T)),
                    nullptr,
                    nullptr,
                    nullptr,
                    nullptr,
                    room_of<2>(a.pairs),
                    nullptr};
  const int64_t floats = a.rows * a.dim + job.parts * job.room_size;
  const int64_t kept = a.pairs * (a.width + (kWidened<T> ? a.dim : 0));
  char* memory =
      (char*)malloc(2 * a.pairs * sizeof(void*) + floats * sizeof(float) + kept * sizeof(RowOf<T>));
  job.rows = (const RowOf<T>**)memory;
  job.hidden = job.rows + a.pairs;
  job.total = (float*)(job.hidden + a.pairs);
  job.room = job.total + a.rows * a.dim;
  job.inside = (RowOf<T>*)(job.room + job.parts * job.room_size);
  place_rows<T>(a.x, a.pairs, a.dim, a.x_stride, a.row, job.inside + a.pairs * a.width, job.rows);
  for (int64_t p = 0; p < a.pairs; ++p) job.hidden[p] = job.inside + p * a.width;
  const auto first = [](void* context, int worker, int64_t i) {
    const ExpertsJob<T>& j = *static_cast<ExpertsJob<T>*>(context);
    const int64_t n = j.args.width;
    hidden_columns<T>(j, j.room + worker * j.room_size, n * i / j.parts, n * (i + 1) / j.parts);
  };
  const auto second = [](void* context, int worker, int64_t i) {
    const ExpertsJob<T>& j = *static_cast<ExpertsJob<T>*>(context);
    const int64_t n = j.args.dim;
    output_columns<T>(j, j.room + worker * j.room_size, n * i / j.parts, n * (i + 1) / j.parts);
  };
  run_tasks(a.threads, job.parts, first, &job);
  run_tasks(a.threads, job.parts, second, &job);
  free(memory);
}

void run_experts(const ExpertsArgs& a) {
  switch (a.type) {
    case Type::f32:
      return experts_of<float>(a);
    case Type::bf16:
      return experts_of<Bf16>(a);
    case Type::f16:
      return experts_of<Half>(a);
  }
}

}  // namespace
