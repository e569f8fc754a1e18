// Attention kernels: over a paged pool (decode) and over rows (prefill).
//
// Owns how the work is cut into tasks: decode by row and by stretch of its entries, prefill by KV head
// and block of query rows. The arithmetic is flash.h's. See ops/signatures.py for what they mean.
#pragma once

#include "flash.h"
#include "kernels.h"
#include "team.h"

namespace {

using namespace anabranch;

// ---- decode over pages

struct Stretch {  // entries [begin, end) of a row; one of `siblings` in whose order the row is joined
  int64_t row, begin, end, first_sibling, siblings;
};

struct PagedJob {
  const PagedArgs& args;
  const Stretch* stretches;
  float* room;     // per worker
  float* parts;    // per stretch, of rows with siblings: acc, peak, total of every head
  int* remaining;  // per row
  int64_t room_floats, part_floats;
};

int64_t part_size(const PagedArgs& a) { return a.heads * (padded(a.value_width) + 2); }

// Where up to E entries of a stretch lie, from entry `at` on; returns how many.
template <class T>
int entries_at(const PagedArgs& a, const Stretch& s, int64_t at, const T** entry) {
  const int32_t* table = a.table + s.row * a.table_stride;
  const int n = s.end - at < E ? (int)(s.end > at ? s.end - at : 0) : E;
  for (int e = 0; e < n; ++e) {
    const int64_t i = at + e;
    entry[e] = (const T*)a.pool + (table[i / a.page_slots] * a.page_slots + i % a.page_slots) * a.slot_stride;
  }
  return n;
}

template <class T>
void attend_stretch(const PagedArgs& a, const Stretch& s, Flash& f) {
  const T* q = (const T*)a.q + s.row * a.q_stride[0];
  for (int64_t i = 0; i < a.heads; ++i) take_query(f, i, q + a.groups.order[i] * a.q_stride[1]);
  f.clear();
  const T *entry[E], *next[E];
  int n = entries_at<T>(a, s, s.begin, entry);
  for (int64_t at = s.begin; n; at += E) {
    const int n_next = entries_at<T>(a, s, at + E, next);
    Ahead ahead{{},
                a.value_base * (int64_t)sizeof(T),
                a.key_width * (int64_t)sizeof(T),
                a.value_base ? a.value_width * (int64_t)sizeof(T) : 0,
                n_next};
    for (int g = 0; g < a.groups.kv_heads; ++g) {
      const int first = a.groups.begin[g], count = a.groups.begin[g + 1] - first;
      if (!count) continue;
      const T *k[E], *v[E];
      for (int e = 0; e < n; ++e) {
        k[e] = entry[e] + g * a.kv_step;
        v[e] = k[e] + a.value_base;
      }
      for (int e = 0; e < n_next; ++e) ahead.k[e] = (const char*)(next[e] + g * a.kv_step);
      attend_block(f, first, count, k, v, n, nullptr, &ahead);
    }
    memcpy(entry, next, sizeof entry);
    n = n_next;
  }
}

template <class T>
void finish_row(const PagedArgs& a, int64_t row, const float* acc, const float* peak, const float* total) {
  for (int64_t i = 0; i < a.heads; ++i) {
    const int head = a.groups.order[i];
    const int64_t at = row * a.heads + head;
    finish(peak[i], total[i], acc + i * padded(a.value_width), a.value_width,
           a.sink ? a.sink + head : nullptr, (T*)a.out + at * a.value_width, a.lse + at);
  }
}

template <class T>
void paged_task(void* context, int worker, int64_t index) {
  const PagedJob& job = *static_cast<PagedJob*>(context);
  const PagedArgs& a = job.args;
  const Stretch& s = job.stretches[index];
  Flash f(job.room + worker * job.room_floats, a.heads, a.key_width, a.value_width, a.scale);
  attend_stretch<T>(a, s, f);
  if (s.siblings == 1) return finish_row<T>(a, s.row, f.acc, f.peak, f.total);
  const int64_t width = padded(a.value_width), acc_floats = a.heads * width;
  float* part = job.parts + index * job.part_floats;
  memcpy(part, f.acc, acc_floats * sizeof(float));
  memcpy(part + acc_floats, f.peak, a.heads * sizeof(float));
  memcpy(part + acc_floats + a.heads, f.total, a.heads * sizeof(float));
  if (__atomic_sub_fetch(job.remaining + s.row, 1, __ATOMIC_ACQ_REL)) return;
  // The last of the row joins all parts, in their order whoever comes last.
  float* sum = job.parts + s.first_sibling * job.part_floats;
  for (int64_t j = 1; j < s.siblings; ++j) {
    const float* other = sum + j * job.part_floats;
    for (int64_t i = 0; i < a.heads; ++i)
      join(other[acc_floats + i], other[acc_floats + a.heads + i], other + i * width, sum + acc_floats + i,
           sum + acc_floats + a.heads + i, sum + i * width, width);
  }
  finish_row<T>(a, s.row, sum, sum + acc_floats, sum + acc_floats + a.heads);
}

int64_t length(const PagedArgs& a, int64_t row) {
  const int64_t begin = a.start ? a.start[row] : 0;
  return a.lens[row] > begin ? a.lens[row] - begin : 0;
}

// Cut the rows so that every thread has work, into stretches of at least one block; returns their
// number and, where `out` is given, writes them.
int64_t cut(const PagedArgs& a, int threads, Stretch* out, int* remaining) {
  int64_t total = 0;
  for (int64_t t = 0; t < a.rows; ++t) total += length(a, t);
  int64_t longest = threads == 1 ? INT64_MAX : (total + 2 * threads - 1) / (2 * threads);
  if (longest < E) longest = E;
  int64_t count = 0;
  for (int64_t t = 0; t < a.rows; ++t) {
    const int64_t begin = a.start ? a.start[t] : 0, seen = length(a, t);
    const int64_t n = seen <= longest ? 1 : (seen + longest - 1) / longest;
    for (int64_t j = 0; j < n && out; ++j)
      out[count + j] = {t, begin + seen * j / n, begin + seen * (j + 1) / n, count, n};
    if (out) remaining[t] = (int)n;
    count += n;
  }
  return count;
}

constexpr int64_t kSerialProducts = 1 << 17;  // multiply-adds not worth waking a team for

void attend_paged(const PagedArgs& a) {
  int64_t entries = 0;
  for (int64_t t = 0; t < a.rows; ++t) entries += length(a, t);
  const int64_t products = entries * a.heads * (a.key_width + a.value_width);
  const int threads = products < kSerialProducts ? 1 : a.threads;
  const int64_t count = cut(a, threads, nullptr, nullptr);
  PagedJob job{a, nullptr, nullptr, nullptr, nullptr, 0, 0};
  job.room_floats = Flash::floats(a.heads, a.key_width, a.value_width);
  job.part_floats = part_size(a);
  Stretch* stretches = (Stretch*)malloc(count * sizeof(Stretch));
  job.remaining = (int*)malloc((a.rows + 1) * sizeof(int));
  job.room = (float*)malloc(threads * job.room_floats * sizeof(float));
  job.parts = count == a.rows ? nullptr : (float*)malloc(count * job.part_floats * sizeof(float));
  cut(a, threads, stretches, job.remaining);
  job.stretches = stretches;
  switch (a.type) {
    case Type::f32:
      run_tasks(threads, count, paged_task<float>, &job);
      break;
    case Type::bf16:
      run_tasks(threads, count, paged_task<Bf16>, &job);
      break;
    case Type::f16:
      run_tasks(threads, count, paged_task<Half>, &job);
      break;
  }
  free(stretches);
  free(job.remaining);
  free(job.room);
  free(job.parts);
}

// ---- prefill over rows

constexpr int64_t kVectors = 96;  // query vectors of a task: what one widened block of keys serves

struct RowsJob {
  const RowsArgs& args;
  int64_t rows_per_task, row_blocks, room_floats;
  const int64_t *low, *high;  // per block of keys: the least and the greatest position
  float* room;                // per worker
  uint8_t* seen;              // per worker, [rows_per_task, E]
};

// The keys of block `block` that some row of [from, to) sees, as indices; `seen` is filled unless every
// row sees every key, which `*all` tells.
int visible_keys(const RowsJob& job, int64_t block, int64_t from, int64_t to, int64_t q_low, int64_t q_high,
                 uint8_t* seen, int64_t* keys, bool* all) {
  const RowsArgs& a = job.args;
  const int64_t low = job.low[block], high = job.high[block];
  if (low > q_high || (a.window && high <= q_low - a.window)) return 0;
  const int64_t begin = block * E, end = begin + E < a.keys ? begin + E : a.keys;
  *all = high <= q_low && (!a.window || low > q_high - a.window);
  int n = 0;
  for (int64_t s = begin; s < end; ++s) {
    bool some = *all;
    for (int64_t t = from; t < to && !*all; ++t) {
      const int64_t behind = a.q_pos[t] - a.k_pos[s];
      const bool sees = behind >= 0 && (!a.window || behind < a.window);
      seen[(t - from) * E + n] = sees;
      some |= sees;
    }
    keys[n] = s;
    n += some;  // a key no row sees is overwritten by the next: it may hold NaN
  }
  return n;
}

template <class T>
void rows_task(void* context, int worker, int64_t index) {
  const RowsJob& job = *static_cast<RowsJob*>(context);
  const RowsArgs& a = job.args;
  // Head by head, as its keys and values stay in a cache. The last rows see the most keys: they go first, so
  // that no thread is left with them at the end.
  const int64_t g = index / job.row_blocks, block = job.row_blocks - 1 - index % job.row_blocks;
  const int64_t from = block * job.rows_per_task;
  const int64_t to = from + job.rows_per_task < a.rows ? from + job.rows_per_task : a.rows;
  const int first = a.groups.begin[g], heads = a.groups.begin[g + 1] - first;
  const int* order = a.groups.order + first;
  if (!heads) return;
  Flash f(job.room + worker * job.room_floats, (to - from) * heads, a.key_width, a.value_width, a.scale);
  f.clear();
  int64_t q_low = INT64_MAX, q_high = INT64_MIN;
  for (int64_t t = from; t < to; ++t) {
    q_low = a.q_pos[t] < q_low ? a.q_pos[t] : q_low;
    q_high = a.q_pos[t] > q_high ? a.q_pos[t] : q_high;
    for (int j = 0; j < heads; ++j)
      take_query(f, (t - from) * heads + j, (const T*)a.q + t * a.q_stride[0] + order[j] * a.q_stride[1]);
  }
  uint8_t* seen = job.seen + worker * job.rows_per_task * E;
  const Mask mask{seen, heads};
  for (int64_t b = 0; b * E < a.keys; ++b) {
    int64_t keys[E];
    bool all;
    const int n = visible_keys(job, b, from, to, q_low, q_high, seen, keys, &all);
    if (!n) continue;
    const T *k[E], *v[E];
    for (int e = 0; e < n; ++e) {
      k[e] = (const T*)a.k + keys[e] * a.k_stride[0] + g * a.k_stride[1];
      v[e] = (const T*)a.v + keys[e] * a.v_stride[0] + g * a.v_stride[1];
    }
    attend_block(f, 0, f.vectors, k, v, n, all ? nullptr : &mask, nullptr);
  }
  for (int64_t i = 0; i < f.vectors; ++i) {
    const int64_t at = (from + i / heads) * a.heads + order[i % heads];
    finish(f.peak[i], f.total[i], f.acc + i * padded(a.value_width), a.value_width,
           a.sink ? a.sink + order[i % heads] : nullptr, (T*)a.out + at * a.value_width, a.lse + at);
  }
}

void attend_rows(const RowsArgs& a) {
  const int64_t products = a.rows * a.keys * a.heads * (a.key_width + a.value_width);
  const int threads = products < kSerialProducts ? 1 : a.threads;
  int64_t most = 1;
  for (int g = 0; g < a.groups.kv_heads; ++g) {
    const int64_t heads = a.groups.begin[g + 1] - a.groups.begin[g];
    most = heads > most ? heads : most;
  }
  RowsJob job{a, kVectors / most < 1 ? 1 : kVectors / most, 0, 0, nullptr, nullptr, nullptr, nullptr};
  job.row_blocks = (a.rows + job.rows_per_task - 1) / job.rows_per_task;
  job.room_floats = Flash::floats(job.rows_per_task * most, a.key_width, a.value_width);
  const int64_t blocks = (a.keys + E - 1) / E;
  int64_t* bounds = (int64_t*)malloc((2 * blocks + 1) * sizeof(int64_t));
  for (int64_t b = 0; b < blocks; ++b) {
    bounds[b] = INT64_MAX, bounds[blocks + b] = INT64_MIN;
    for (int64_t s = b * E; s < b * E + E && s < a.keys; ++s) {
      bounds[b] = a.k_pos[s] < bounds[b] ? a.k_pos[s] : bounds[b];
      bounds[blocks + b] = a.k_pos[s] > bounds[blocks + b] ? a.k_pos[s] : bounds[blocks + b];
    }
  }
  job.low = bounds, job.high = bounds + blocks;
  job.room = (float*)malloc(threads * job.room_floats * sizeof(float));
  job.seen = (uint8_t*)malloc(threads * job.rows_per_task * E);
  const int64_t count = job.row_blocks * a.groups.kv_heads;
  switch (a.type) {
    case Type::f32:
      run_tasks(threads, count, rows_task<float>, &job);
      break;
    case Type::bf16:
      run_tasks(threads, count, rows_task<Bf16>, &job);
      break;
    case Type::f16:
      run_tasks(threads, count, rows_task<Half>, &job);
      break;
  }
  free(bounds);
  free(job.room);
  free(job.seen);
}

}  // namespace
