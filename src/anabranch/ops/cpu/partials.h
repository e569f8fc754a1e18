// The exchange's kernels: pack_partials and merge_partials. See ops/signatures.py for what they
// mean. The wire's layout is in the strides alone: no branch knows it.
#pragma once

#include <stdlib.h>

#include "kernels.h"
#include "simd.h"
#include "team.h"

namespace {

using namespace anabranch;

struct PackJob {
  const PackArgs& args;
  int64_t parts;
};

void pack_task(void* context, int, int64_t i) {
  const PackJob& job = *static_cast<PackJob*>(context);
  const PackArgs& a = job.args;
  for (int64_t n = 0; n < a.members; ++n) {
    for (int64_t b = a.rows * i / job.parts; b < a.rows * (i + 1) / job.parts; ++b) {
      for (int64_t j = 0; j < a.heads; ++j) {
        const int64_t head = n * a.heads + j;
        memcpy(a.dst_out + n * a.dst_out_bytes[0] + b * a.dst_out_bytes[1] + j * a.dst_out_bytes[2],
               a.out + b * a.out_bytes[0] + head * a.out_bytes[1], a.row_bytes);
        a.dst_lse[n * a.dst_lse_stride[0] + b * a.dst_lse_stride[1] + j * a.dst_lse_stride[2]] =
            a.lse[b * a.lse_stride[0] + head * a.lse_stride[1]];
      }
    }
  }
}

void pack_partials(const PackArgs& a) {
  PackJob job{a, pieces(a.threads, a.rows * a.members * a.heads * a.row_bytes)};
  run_tasks(a.threads, job.parts, pack_task, &job);
}

// Member n's weight of one head before normalising, written to weight[n]; returns their sum and
// the shift that was taken off every lse.
float shard_weights(const MergeArgs& a, int64_t b, int64_t j, float* weight, float* shift) {
  const float* lse = a.lse + b * a.lse_stride[1] + j * a.lse_stride[2];
  const auto counted = [](float z) { return isfinite(z) ? z : -INFINITY; };
  const float sink = a.sink ? counted(a.sink[j * a.sink_stride]) : -INFINITY;
  float peak = sink;
  for (int64_t n = 0; n < a.members; ++n) {
    weight[n] = counted(lse[n * a.lse_stride[0]] * a.to_natural);
    peak = weight[n] > peak ? weight[n] : peak;
  }
  *shift = peak == -INFINITY ? 0.0f : peak;
  float total = 0.0f;
  for (int64_t n = 0; n < a.members; ++n) total += weight[n] = expf(weight[n] - *shift);
  return total + expf(sink - *shift);
}

// The weighted sum at elements [i, i + V*W) of one head, V registers at a time; a shard of weight 0
// is not read, as its payload may be NaN.
template <int V, class T, class O>
ANABRANCH_INLINE void merge_span(const MergeArgs& a, const char* from, const float* weight, float scale,
                                 int64_t i, O* out) {
  vf total[V];
  ANABRANCH_EACH (v, V) total[v] = vf{};
  for (int64_t n = 0; n < a.members; ++n) {
    if (!(weight[n] > 0.0f)) continue;
    const T* x = (const T*)(from + n * a.partials_bytes[0]) + i;
    const vf w = broadcast(weight[n]);
    ANABRANCH_EACH (v, V) total[v] += w * load(x + v * W);
  }
  ANABRANCH_EACH (v, V) store(out + i + v * W, total[v] * scale);
}

template <class T, class O>
void merge_head(const MergeArgs& a, int64_t b, int64_t j, float* weight) {
  float shift;
  const float total = shard_weights(a, b, j, weight, &shift);
  const float scale = total > 0.0f ? 1.0f / total : 0.0f;
  const char* from = a.partials + b * a.partials_bytes[1] + j * a.partials_bytes[2];
  O* out = (O*)(a.out + b * a.out_bytes[0] + j * a.out_bytes[1]);
  int64_t i = 0;
  for (; i + 4 * W <= a.width; i += 4 * W) merge_span<4, T, O>(a, from, weight, scale, i, out);
  for (; i + W <= a.width; i += W) merge_span<1, T, O>(a, from, weight, scale, i, out);
  if (i < a.width) {
    vf sum = {};
    for (int64_t n = 0; n < a.members; ++n)
      if (weight[n] > 0.0f)
        sum += weight[n] * load_part((const T*)(from + n * a.partials_bytes[0]) + i, (int)(a.width - i));
    store_part(out + i, sum * scale, (int)(a.width - i));
  }
  a.lse_out[b * a.lse_out_stride[0] + j * a.lse_out_stride[1]] =
      total > 0.0f ? logf(total) + shift : -INFINITY;
}

struct MergeJob {
  const MergeArgs& args;
  int64_t parts;
  float* weights;  // members floats per worker
};

template <class T, class O>
void merge_rows(const MergeArgs& a, int64_t from, int64_t to, float* weight) {
  for (int64_t b = from; b < to; ++b)
    for (int64_t j = 0; j < a.heads; ++j) merge_head<T, O>(a, b, j, weight);
}

void merge_task(void* context, int worker, int64_t i) {
  const MergeJob& job = *static_cast<MergeJob*>(context);
  const MergeArgs& a = job.args;
  const int64_t from = a.rows * i / job.parts, to = a.rows * (i + 1) / job.parts;
  float* weight = job.weights + worker * a.members;
  const bool wide = a.out_type == Type::f32;
  switch (a.type) {
    case Type::f32:
      merge_rows<float, float>(a, from, to, weight);
      break;
    case Type::bf16:
      wide ? merge_rows<Bf16, float>(a, from, to, weight) : merge_rows<Bf16, Bf16>(a, from, to, weight);
      break;
    case Type::f16:
      wide ? merge_rows<Half, float>(a, from, to, weight) : merge_rows<Half, Half>(a, from, to, weight);
      break;
  }
}

void merge_partials(const MergeArgs& a) {
  const int64_t size = a.type == Type::f32 ? 4 : 2;
  MergeJob job{a, pieces(a.threads, a.members * a.rows * a.heads * a.width * size), nullptr};
  float few[64];
  const int64_t needed = job.parts * a.members;
  job.weights = needed <= 64 ? few : (float*)malloc(needed * sizeof(float));
  run_tasks(a.threads, job.parts, merge_task, &job);
  if (job.weights != few) free(job.weights);
}

}  // namespace
