// Kernels of what lies around attention: rms_norm, gated, linear, run_experts. See ops/signatures.py
// for what they mean. Products are fp32 sums of fp32 products whatever the dtype; what is stored is rounded once.
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
    for (; i + 2 * W <= a.width; i += 2 * W) ANABRANCH_EACH (u, 2) {
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

// R rows against C rows of weights, U registers of each at a time: to[c * R + r] = x_r . w_c. Meanwhile
// the rows of weights `ahead`, unless null, are fetched.
template <int R, int C, int U, class T>
ANABRANCH_INLINE void dots(const float* const* x, const T* const* w, int64_t width, float* to,
                           const T* const* ahead = nullptr) {
  vf sum[C][R][U] = {};
  const auto step = [&](int64_t i, int u, int n) {
    vf part[C];
    ANABRANCH_EACH (c, C) part[c] = load_up_to(w[c] + i, n);
    ANABRANCH_EACH (r, R) {
      const vf v = load_up_to(x[r] + i, n);
      ANABRANCH_EACH (c, C) sum[c][r][u] += v * part[c];
    }
  };
  int64_t i = 0;
  for (; i + U * W <= width; i += U * W) {
    if (ahead) ANABRANCH_EACH (c, C) __builtin_prefetch(ahead[c] + i);
    ANABRANCH_EACH (u, U) step(i + u * W, u, W);
  }
  for (; i < width; i += W) step(i, 0, left_of(i, width));
  ANABRANCH_EACH (c, C) ANABRANCH_EACH (r, R) {
      for (int u = 1; u < U; ++u) sum[c][r][0] += sum[c][r][u];
      to[c * R + r] = sum_lanes(sum[c][r][0]);
    }
}

constexpr int kTogether = W == 16 ? 8 : 4;  // rows whose sums with three rows of weights fit the registers

// All rows against C rows of weights, some at a time: to[c * count + i]. All but the first have the weights
// in a cache; their time is used to fetch the next ones, `ahead`.
template <int C, class T>
void dots_of(const float* const* x, int64_t count, const T* const* w, int64_t width, float* to,
             const T* const* ahead = nullptr) {
  float few[C * kTogether];
  int64_t i = 0;
  const auto keep = [&](int n) {
    for (int c = 0; c < C; ++c)
      for (int r = 0; r < n; ++r) to[c * count + i + r] = few[c * n + r];
    i += n;
  };
  for (; i + kTogether <= count;) {
    dots<kTogether, C, 1>(x + i, w, width, few, i ? ahead : nullptr);
    keep(kTogether);
  }
  for (; i + 4 <= count;) dots<4, C, 1>(x + i, w, width, few), keep(4);
  for (; i + 2 <= count;) dots<2, C, 2>(x + i, w, width, few), keep(2);
  for (; i < count;) dots<1, C, 4>(x + i, w, width, few), keep(1);
}

constexpr int kColumns = 3;  // rows of weights at a time: a row of x is read once for each

struct LinearJob {
  const LinearArgs& args;
  int64_t parts;
  const float** rows;  // [rows] of x in fp32
  float* room;         // kColumns * rows floats per worker
};

// Copies of 16-bit rows in fp32; fp32 rows are used where they lie.
template <class T>
void widen_rows(const char* x, int64_t count, int64_t dim, int64_t stride, const int64_t* pick, float* wide,
                const float** rows) {
  for (int64_t p = 0; p < count; ++p) {
    const T* from = (const T*)x + (pick ? pick[p] : p) * stride;
    rows[p] = wide ? wide + p * dim : (const float*)from;
    for (int64_t i = 0; wide && i < dim; i += W) {
      const int n = left_of(i, dim);
      store_up_to(wide + p * dim + i, load_up_to(from + i, n), n);
    }
  }
}

template <class T>
void linear_columns(const LinearJob& job, float* room, int64_t from, int64_t to) {
  const LinearArgs& a = job.args;
  const T *weight = (const T*)a.weight, *bias = (const T*)a.bias;
  for (int64_t c = from; c < to; c += kColumns) {
    const int64_t last = c + kColumns <= to ? c + kColumns - 1 : to - 1;
    const T *w[kColumns], *ahead[kColumns];
    for (int k = 0; k < kColumns; ++k) {
      w[k] = weight + (c + k < last ? c + k : last) * a.weight_stride;
      ahead[k] = weight + (last + 1 + k < to ? last + 1 + k : last) * a.weight_stride;
    }
    dots_of<kColumns>(job.rows, a.rows, w, a.width, room, ahead);
    for (int64_t d = c; d <= last; ++d) {
      const float extra = bias ? load_part(bias + d, 1)[0] : 0.0f;
      for (int64_t row = 0; row < a.rows; ++row)
        store_part((T*)a.out + row * a.columns + d, broadcast(room[(d - c) * a.rows + row] + extra), 1);
    }
  }
}

template <class T>
void linear_of(LinearJob& job, float* wide) {
  const LinearArgs& a = job.args;
  widen_rows<T>(a.x, a.rows, a.width, a.x_stride, nullptr, wide, job.rows);
  const auto task = [](void* context, int worker, int64_t i) {
    const LinearJob& j = *static_cast<LinearJob*>(context);
    const int64_t n = j.args.columns;
    linear_columns<T>(j, j.room + worker * kColumns * j.args.rows, n * i / j.parts, n * (i + 1) / j.parts);
  };
  run_tasks(a.threads, job.parts, task, &job);
}

void linear(const LinearArgs& a) {
  const bool narrow = a.type != Type::f32;
  LinearJob job{a, pieces(a.threads, a.columns * a.width * (narrow ? 2 : 4)), nullptr, nullptr};
  const int64_t floats = job.parts * kColumns * a.rows + (narrow ? a.rows * a.width : 0);
  char* memory = (char*)malloc(a.rows * sizeof(float*) + floats * sizeof(float));
  job.rows = (const float**)memory;
  job.room = (float*)(job.rows + a.rows);
  float* wide = narrow ? job.room + job.parts * kColumns * a.rows : nullptr;
  switch (a.type) {
    case Type::f32:
      linear_of<float>(job, wide);
      break;
    case Type::bf16:
      linear_of<Bf16>(job, wide);
      break;
    case Type::f16:
      linear_of<Half>(job, wide);
      break;
  }
  free(memory);
}

// ---- run_experts

struct ExpertsJob {
  const ExpertsArgs& args;
  int64_t parts;
  const float** rows;    // [pairs] the pair's row of x
  const float** hidden;  // [pairs] what the pair's gate left, width wide
  float* inside;         // behind `hidden`
  float* total;          // [rows, dim]
  float* room;           // 2 * pairs floats per worker
};

// The hidden columns [from, to) of every pair.
template <class T>
void hidden_columns(const ExpertsJob& job, float* room, int64_t from, int64_t to) {
  const ExpertsArgs& a = job.args;
  for (int64_t e = 0; e < a.experts; ++e) {
    const int64_t begin = a.begin[e], count = a.begin[e + 1] - begin;
    if (!count) continue;
    const T* weights = (const T*)a.gate_up + e * a.gate_up_stride[0];
    const T* bias = a.gate_up_bias ? (const T*)a.gate_up_bias + e * 2 * a.width : nullptr;
    for (int64_t j = from; j < to; ++j) {
      const T* w[] = {weights + j * a.gate_up_stride[1], weights + (a.width + j) * a.gate_up_stride[1]};
      dots_of<2>(job.rows + begin, count, w, a.dim, room);
      const float g = bias ? load_part(bias + j, 1)[0] : 0.0f;
      const float up = bias ? load_part(bias + a.width + j, 1)[0] : 0.0f;
      for (int64_t p = 0; p < count; ++p) {
        room[p] += g;
        room[count + p] += up;
      }
      for (int64_t p = 0; p < count; p += W) {
        const int n = left_of(p, count);
        float out[W];
        store(out, gate<T>(a.gate, load_part(room + p, n), load_part(room + count + p, n)));
        for (int q = 0; q < n; ++q) job.inside[(begin + p + q) * a.width + j] = out[q];
      }
    }
  }
}

// The output columns [from, to) of every row, expert by expert.
template <class T>
void output_columns(const ExpertsJob& job, float* room, int64_t from, int64_t to) {
  const ExpertsArgs& a = job.args;
  for (int64_t row = 0; row < a.rows; ++row)
    memset(job.total + row * a.dim + from, 0, (to - from) * sizeof(float));
  for (int64_t e = 0; e < a.experts; ++e) {
    const int64_t begin = a.begin[e], count = a.begin[e + 1] - begin;
    if (!count) continue;
    const T* weights = (const T*)a.down + e * a.down_stride[0];
    const T* bias = a.down_bias ? (const T*)a.down_bias + e * a.dim : nullptr;
    for (int64_t c = from; c < to; c += 2) {
      const int64_t last = c + 1 < to ? c + 1 : c;
      const T* w[] = {weights + c * a.down_stride[1], weights + last * a.down_stride[1]};
      dots_of<2>(job.hidden + begin, count, w, a.width, room);
      for (int64_t d = c; d <= last; ++d) {
        const float extra = bias ? load_part(bias + d, 1)[0] : 0.0f;
        const float* sums = room + (d - c) * count;
        for (int64_t p = 0; p < count; ++p)
          job.total[a.row[begin + p] * a.dim + d] += a.weight[begin + p] * (sums[p] + extra);
      }
    }
  }
  for (int64_t row = 0; row < a.rows; ++row)
    for (int64_t i = from; i < to; i += W) {
      const int n = left_of(i, to);
      store_up_to((T*)a.out + row * a.dim + i, load_up_to(job.total + row * a.dim + i, n), n);
    }
}

template <class T>
void experts_of(ExpertsJob& job, float* wide) {
  const ExpertsArgs& a = job.args;
  widen_rows<T>(a.x, a.pairs, a.dim, a.x_stride, a.row, wide, job.rows);
  for (int64_t p = 0; p < a.pairs; ++p) job.hidden[p] = job.inside + p * a.width;
  const auto first = [](void* context, int worker, int64_t i) {
    const ExpertsJob& j = *static_cast<ExpertsJob*>(context);
    const int64_t n = j.args.width;
    hidden_columns<T>(j, j.room + worker * 2 * j.args.pairs, n * i / j.parts, n * (i + 1) / j.parts);
  };
  const auto second = [](void* context, int worker, int64_t i) {
    const ExpertsJob& j = *static_cast<ExpertsJob*>(context);
    const int64_t n = j.args.dim;
    output_columns<T>(j, j.room + worker * 2 * j.args.pairs, n * i / j.parts, n * (i + 1) / j.parts);
  };
  run_tasks(a.threads, job.parts, first, &job);
  run_tasks(a.threads, job.parts, second, &job);
}

void run_experts(const ExpertsArgs& a) {
  const int64_t size = a.type == Type::f32 ? 4 : 2;
  ExpertsJob job{a, pieces(a.threads, a.experts * a.width * a.dim * 3 * size), nullptr, nullptr, nullptr,
                 nullptr, nullptr};
  const int64_t wide = a.type == Type::f32 ? 0 : a.pairs * a.dim;
  const int64_t floats = a.pairs * a.width + a.rows * a.dim + job.parts * 2 * a.pairs + wide;
  char* memory = (char*)malloc(2 * a.pairs * sizeof(float*) + floats * sizeof(float));
  job.rows = (const float**)memory;
  job.hidden = job.rows + a.pairs;
  job.inside = (float*)(job.hidden + a.pairs);
  job.total = job.inside + a.pairs * a.width;
  job.room = job.total + a.rows * a.dim;
  float* widened = wide ? job.room + job.parts * 2 * a.pairs : nullptr;
  switch (a.type) {
    case Type::f32:
      experts_of<float>(job, widened);
      break;
    case Type::bf16:
      experts_of<Bf16>(job, widened);
      break;
    case Type::f16:
      experts_of<Half>(job, widened);
      break;
  }
  free(memory);
}

}  // namespace
