// The table of kernels one instruction set provides, and the arguments they take.
//
// Owns the seam between binding.cpp (which checks tensors) and kernels.cpp (which sees pointers and
// strides). Strides are in elements, of bytes where the name says so. Nothing here is checked again.
#pragma once

#include <cstddef>
#include <cstdint>

namespace anabranch {

enum class Type { f32, bf16, f16 };

struct CopyRowsArgs {
  char* dst;
  const char* src;
  int64_t rows, row_bytes, dst_stride_bytes, src_stride_bytes;
  int threads;
};

struct SumArgs {
  Type type;
  char* const* parts;           // one pointer per member
  const int64_t* stride_bytes;  // of a row, per member
  char* out;
  int64_t members, rows, row, out_stride_bytes;
  int threads;
};

struct PackArgs {
  const char* out;  // [B, N*h, D] bytes
  const float* lse;
  char* dst_out;  // [N, B, h, D] bytes
  float* dst_lse;
  int64_t members, rows, heads, row_bytes;
  int64_t out_bytes[2], lse_stride[2];          // of B, of a head
  int64_t dst_out_bytes[3], dst_lse_stride[3];  // of N, B, h
  int threads;
};

struct MergeArgs {
  Type type, out_type;
  const char* partials;
  const float* lse;
  const float* sink;  // or null
  char* out;
  float* lse_out;
  int64_t members, rows, heads, width, sink_stride;
  int64_t partials_bytes[3], lse_stride[3];  // of N, B, h
  int64_t out_bytes[2], lse_out_stride[2];   // of B, h
  float to_natural;                          // factor that makes the lse a natural log
  int threads;
};

// Query heads sorted by their KV head: those of KV head g are order[begin[g]] .. order[begin[g + 1] - 1].
struct HeadGroups {
  int kv_heads;
  const int* order;
  const int* begin;
};

struct PagedArgs {
  Type type;
  HeadGroups groups;
  int64_t rows, heads, key_width, value_width;
  const char* q;
  int64_t q_stride[2];  // of a row, of a head
  const char* pool;
  int64_t slot_stride, kv_step, value_base;  // elements of a slot, between KV heads, before the values
  const int32_t* table;
  int64_t table_stride, page_slots;
  const int32_t* lens;
  const int32_t* start;  // or null
  const float* sink;     // or null
  float scale;
  char* out;   // [rows, heads, value_width], dense
  float* lse;  // [rows, heads], dense
  int threads;
};

struct RowsArgs {
  Type type;
  HeadGroups groups;
  int64_t rows, keys, heads, key_width, value_width;
  const char *q, *k, *v;
  int64_t q_stride[2], k_stride[2], v_stride[2];  // of a row, of a head
  const int64_t *q_pos, *k_pos;
  int64_t window;     // 0: none
  const float* sink;  // or null
  float scale;
  char* out;   // [rows, heads, value_width], dense
  float* lse;  // [rows, heads], dense
  int threads;
};

struct NormArgs {
  Type type;
  const char *x, *weight;
  char* out;  // [rows, width], dense
  int64_t rows, width, x_stride;
  float eps;
  int threads;
};

// act(g) * (up + shift), act(g) = g * sigmoid(alpha * g); both are cut at limit (infinite: not at all).
struct Gate {
  float limit, alpha, shift;
};

struct GatedArgs {
  Type type;
  Gate gate;
  const char* both;  // [rows, 2 * width]: gate columns, then up columns
  char* out;         // [rows, width], dense
  int64_t rows, width, both_stride;
  int threads;
};

struct LinearArgs {
  Type type;
  const char *x, *weight;  // [rows, width], [columns, width]
  const char* bias;        // dense, or null
  char* out;               // [rows, columns], dense
  int64_t rows, width, columns, x_stride, weight_stride;
  int threads;
};

// Pairs of a row and an expert, sorted by expert: those of expert e are begin[e] .. begin[e + 1] - 1.
struct ExpertsArgs {
  Type type;
  Gate gate;
  const char* x;        // [rows, dim]
  const char* gate_up;  // [experts, 2 * width, dim]
  const char* down;     // [experts, dim, width]
  const char *gate_up_bias, *down_bias;  // dense, or null
  char* out;                             // [rows, dim], dense
  int64_t rows, dim, width, experts, pairs;
  int64_t x_stride, gate_up_stride[2], down_stride[2];
  const int64_t *begin, *row;  // [experts + 1], [pairs]
  const float* weight;         // [pairs]
  int threads;
};

struct Kernels {
  void (*copy_rows)(const CopyRowsArgs&);
  void (*sum_members)(const SumArgs&);
  void (*pack_partials)(const PackArgs&);
  void (*merge_partials)(const MergeArgs&);
  void (*attend_paged)(const PagedArgs&);
  void (*attend_rows)(const RowsArgs&);
  void (*rms_norm)(const NormArgs&);
  void (*gated)(const GatedArgs&);
  void (*linear)(const LinearArgs&);
  void (*run_experts)(const ExpertsArgs&);
};

}  // namespace anabranch
