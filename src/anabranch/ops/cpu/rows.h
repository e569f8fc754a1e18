// Row kernels: copy_rows and sum_members. See ops/signatures.py for what they mean.
#pragma once

#include "kernels.h"
#include "simd.h"
#include "team.h"

namespace {

using namespace anabranch;

void copy_span(const CopyRowsArgs& a, int64_t from, int64_t to) {
  if (a.dst_stride_bytes == a.row_bytes && a.src_stride_bytes == a.row_bytes) {
    memcpy(a.dst + from * a.row_bytes, a.src + from * a.row_bytes, (to - from) * a.row_bytes);
    return;
  }
  for (int64_t i = from; i < to; ++i)
    memcpy(a.dst + i * a.dst_stride_bytes, a.src + i * a.src_stride_bytes, a.row_bytes);
}

struct CopyJob {
  const CopyRowsArgs& args;
  int64_t parts;
};

void copy_task(void* context, int, int64_t i) {
  const CopyJob& job = *static_cast<CopyJob*>(context);
  copy_span(job.args, job.args.rows * i / job.parts, job.args.rows * (i + 1) / job.parts);
}

void copy_rows(const CopyRowsArgs& a) {
  CopyJob job{a, pieces(a.threads, a.rows * a.row_bytes)};
  if (job.parts == 1) return copy_span(a, 0, a.rows);
  run_tasks(a.threads, job.parts, copy_task, &job);
}

// One row of the sum, in member order for every element.
template <class T>
void sum_row(const SumArgs& a, int64_t row) {
  T* out = (T*)(a.out + row * a.out_stride_bytes);
  int64_t i = 0;
  for (; i + 4 * W <= a.row; i += 4 * W) {
    const T* first = (const T*)(a.parts[0] + row * a.stride_bytes[0]) + i;
    Two x = load_two(first), y = load_two(first + 2 * W);
    for (int64_t n = 1; n < a.members; ++n) {
      const T* part = (const T*)(a.parts[n] + row * a.stride_bytes[n]) + i;
      const Two more_x = load_two(part), more_y = load_two(part + 2 * W);
      x.a += more_x.a, x.b += more_x.b, y.a += more_y.a, y.b += more_y.b;
    }
    store_two(out + i, x);
    store_two(out + i + 2 * W, y);
  }
  for (; i < a.row; i += W) {
    const int left = a.row - i < W ? (int)(a.row - i) : W;
    vf total = {};
    for (int64_t n = 0; n < a.members; ++n) {
      const vf x = load_part((const T*)(a.parts[n] + row * a.stride_bytes[n]) + i, left);
      total = n ? total + x : x;
    }
    store_part(out + i, total, left);
  }
}

struct SumJob {
  const SumArgs& args;
  int64_t parts;
};

void sum_task(void* context, int, int64_t i) {
  const SumJob& job = *static_cast<SumJob*>(context);
  const SumArgs& a = job.args;
  for (int64_t row = a.rows * i / job.parts; row < a.rows * (i + 1) / job.parts; ++row) {
    switch (a.type) {
      case Type::f32:
        sum_row<float>(a, row);
        break;
      case Type::bf16:
        sum_row<Bf16>(a, row);
        break;
      case Type::f16:
        sum_row<Half>(a, row);
        break;
    }
  }
}

void sum_members(const SumArgs& a) {
  const int64_t size = a.type == Type::f32 ? 4 : 2;
  SumJob job{a, pieces(a.threads, a.members * a.rows * a.row * size)};
  run_tasks(a.threads, job.parts, sum_task, &job);
}

}  // namespace
