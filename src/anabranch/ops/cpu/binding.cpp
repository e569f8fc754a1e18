// The one place where Python meets the kernels: checks shapes, dtypes and strides, then hands over
// pointers. What is refused is what ops/reference refuses.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cassert>
#include <cstring>
#include <vector>

#include "isa.h"
#include "team.h"
#include "tensor.h"

namespace nb = nanobind;

namespace anabranch {
namespace {

constexpr int64_t kWord = 4;               // bytes: an fp32 lse must be addressable behind a row
constexpr int64_t kQuickBytes = 64 << 10;  // below this, letting other threads run costs more than the work

// Lets other Python threads run while a kernel works, when the work is long enough to matter.
class Unlocked {
 public:
  explicit Unlocked(int64_t bytes) : state_(bytes > kQuickBytes ? PyEval_SaveThread() : nullptr) {}
  ~Unlocked() {
    if (state_) PyEval_RestoreThread(state_);
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyThreadState* state_;
};

Type float_type(const Tensor& t) {
  if (t.f32()) return Type::f32;
  if (t.is(kBfloat, 16)) return Type::bf16;
  if (t.is(kFloat, 16)) return Type::f16;
  t.wrong("it must be float32, bfloat16 or float16");
}

bool same_shape(const Tensor& a, const Tensor& b, int from = 0) {
  if (a.ndim != b.ndim) return false;
  for (int i = from; i < a.ndim; ++i)
    if (a.size(i) != b.size(i)) return false;
  return true;
}

int64_t product(const Tensor& t, int from) {
  int64_t n = 1;
  for (int i = from; i < t.ndim; ++i) n *= t.size(i);
  return n;
}

// Query heads sorted by KV head (a counting sort keeps their order within one).
struct Groups {
  std::vector<int> order, begin;

  Groups(const Tensor& map, int64_t heads, int64_t kv_heads) : order(heads), begin(kv_heads + 1) {
    map.need(map.ndim == 1 && map.size(0) == heads && map.is(kInt, 32),
             "it must be int32, one per query head");
    const int32_t* kv = map.as<const int32_t>();
    for (int64_t h = 0; h < heads; ++h) {
      const int32_t g = kv[h * map.stride(0)];
      if (g < 0 || g >= kv_heads)
        refuse(map.op, "kv_map names KV head " + text(g) + ", there are " + text(kv_heads));
      ++begin[g + 1];
    }
    for (int64_t g = 0; g < kv_heads; ++g) begin[g + 1] += begin[g];
    std::vector<int> next(begin);
    for (int64_t h = 0; h < heads; ++h) order[next[kv[h * map.stride(0)]]++] = static_cast<int>(h);
  }

  // One KV head for all.
  explicit Groups(int64_t heads) : order(heads), begin{0, static_cast<int>(heads)} {
    for (int64_t h = 0; h < heads; ++h) order[h] = static_cast<int>(h);
  }

  HeadGroups view() const { return {static_cast<int>(begin.size()) - 1, order.data(), begin.data()}; }
};

class Provider {
 public:
  Provider(const std::string& isa, int threads, nb::handle tensor_type)
      : kernels_(kernels_of(isa)), threads_(threads < 1 ? 1 : threads), reader_(tensor_type) {}

  void copy_rows(nb::handle dst_, nb::handle src_, nb::handle offset_, nb::handle count_,
                 nb::str direction) const;
  void sum_members(nb::handle parts_, nb::handle out_) const;
  void pack_partials(nb::handle out_, nb::handle lse_, nb::handle dst_out_, nb::handle dst_lse_) const;
  void merge_partials(nb::handle partials_, nb::handle lse_, bool base2, nb::handle sink_, nb::handle out_,
                      nb::handle lse_out_) const;
  void attend_paged_gqa(nb::handle q, nb::handle pool, nb::handle table, nb::handle lens, int64_t page_slots,
                        nb::handle kv_map, float scale, nb::handle start, nb::handle sink, nb::handle out,
                        nb::handle lse) const;
  void attend_paged_mla(nb::handle q, nb::handle pool, nb::handle table, nb::handle lens, int64_t page_slots,
                        int64_t value_width, float scale, nb::handle start, nb::handle sink, nb::handle out,
                        nb::handle lse) const;
  void attend_rows(nb::handle q_, nb::handle k_, nb::handle v_, nb::handle q_pos_, nb::handle k_pos_,
                   nb::handle kv_map_, float scale, int64_t window, nb::handle sink_, nb::handle out_,
                   nb::handle lse_) const;
  void rms_norm(nb::handle x_, nb::handle weight_, float eps, nb::handle out_) const;
  void gated(nb::handle both_, float limit, float alpha, float shift, nb::handle out_) const;
  void linear(nb::handle x_, nb::handle weight_, nb::handle bias_, nb::handle out_) const;
  void run_experts(nb::handle x_, nb::handle ids_, nb::handle weights_, int64_t first, nb::handle gate_up_,
                   nb::handle down_, float limit, float alpha, float shift, nb::handle gate_up_bias_,
                   nb::handle down_bias_, nb::handle out_) const;

 private:
  int64_t integer(nb::handle value, const char* name) const;
  const float* sink(nb::handle object, const char* op, int64_t heads) const;
  PagedArgs paged(const char* op, nb::handle q_, nb::handle pool_, nb::handle table_, nb::handle lens_,
                  int64_t page_slots, nb::handle start_, nb::handle sink_) const;
  void attend_paged(PagedArgs& args, const Tensor& out, const Tensor& lse) const;

  const Kernels* kernels_;
  int threads_;
  Reader reader_;
};

// ---- rows

int64_t Provider::integer(nb::handle value, const char* name) const {
  const char* op = "copy_rows";
  if (PyLong_CheckExact(value.ptr())) {
    const int64_t n = PyLong_AsLongLong(value.ptr());
    if (n == -1 && PyErr_Occurred()) throw nb::python_error();
    return n;
  }
  if (reader_.is_tensor(value)) {
    const Tensor t = reader_.read(value, op, name);
    if (t.ndim == 0 && t.is(kInt, 32)) return *t.as<const int32_t>();
    if (t.ndim == 0 && t.is(kInt, 64)) return *t.as<const int64_t>();
  }
  refuse(op, std::string(name) + " must be an int or a 0-dim int32/int64 tensor on the CPU");
}

void Provider::copy_rows(nb::handle dst_, nb::handle src_, nb::handle offset_, nb::handle count_,
                         nb::str direction) const {
  const char* op = "copy_rows";
  const Tensor dst = reader_.read(dst_, op, "dst"), src = reader_.read(src_, op, "src");
  const bool scatter = !std::strcmp(direction.c_str(), "scatter");
  if (!scatter && std::strcmp(direction.c_str(), "gather"))
    refuse(op, std::string("direction '") + direction.c_str() + "'; use 'scatter' or 'gather'");
  if (!dst.ndim || !src.ndim) refuse(op, "a 0-dim tensor has no rows; give at least one dim");
  if (!same_shape(dst, src, 1) || !dst.same_dtype(src))
    refuse(op, dst.described() + ", " + src.described() + "; past dim 0 they must be alike");
  dst.need(dst.dense(1), "past dim 0 it must be dense (rows are copied whole, along dim 0 only)");
  src.need(src.dense(1), "past dim 0 it must be dense (rows are copied whole, along dim 0 only)");
  const int64_t offset = integer(offset_, "offset"), count = integer(count_, "count");
  const Tensor &window = scatter ? src : dst, &plain = scatter ? dst : src;
  const int64_t low = offset < 0 ? -offset : 0;
  int64_t high = count < plain.size(0) ? count : plain.size(0);
  if (offset > window.size(0) - high) high = window.size(0) - offset;
  if (high <= low) return;
  CopyRowsArgs a;
  a.rows = high - low;
  a.row_bytes = product(dst, 1) * dst.itemsize();
  a.dst_stride_bytes = dst.stride_bytes(0);
  a.src_stride_bytes = src.stride_bytes(0);
  a.dst = dst.bytes() + (low + (scatter ? 0 : offset)) * a.dst_stride_bytes;
  a.src = src.bytes() + (low + (scatter ? offset : 0)) * a.src_stride_bytes;
  a.threads = threads_;
  const Unlocked unlocked(a.rows * a.row_bytes);
  kernels_->copy_rows(a);
}

void Provider::sum_members(nb::handle parts_, nb::handle out_) const {
  const char* op = "sum_members";
  const Tensor out = reader_.read(out_, op, "out");
  out.need(out.ndim >= 1, "it must have rows");
  SumArgs a;
  a.type = float_type(out);
  std::vector<char*> pointers;
  std::vector<int64_t> strides;
  const auto add = [&](const Tensor& part, int dims) {
    bool alike = part.ndim - dims == out.ndim && part.same_dtype(out);
    for (int i = 0; alike && i < out.ndim; ++i) alike = part.size(i + dims) == out.size(i);
    if (!alike) refuse(op, part.described() + ", " + out.described() + "; all must be alike");
    part.need(part.dense(dims + 1), "past dim 0 of each part it must be dense");
    for (int64_t n = 0; n < (dims ? part.size(0) : 1); ++n) {
      pointers.push_back(part.bytes() + (dims ? n * part.stride_bytes(0) : 0));
      strides.push_back(part.stride_bytes(dims));
    }
  };
  if (reader_.is_tensor(parts_)) {
    add(reader_.read(parts_, op, "parts"), 1);
  } else {
    for (nb::handle part : parts_) add(reader_.read(part, op, "part"), 0);
  }
  if (pointers.empty()) refuse(op, "no parts; give one per member");
  out.need(out.dense(1), "past dim 0 it must be dense");
  a.parts = pointers.data();
  a.stride_bytes = strides.data();
  a.out = out.bytes();
  a.out_stride_bytes = out.stride_bytes(0);
  a.members = static_cast<int64_t>(pointers.size());
  a.rows = out.size(0);
  a.row = product(out, 1);
  a.threads = threads_;
  const Unlocked unlocked(a.members * a.rows * a.row * out.itemsize());
  kernels_->sum_members(a);
}

// ---- partials

void Provider::pack_partials(nb::handle out_, nb::handle lse_, nb::handle dst_out_,
                             nb::handle dst_lse_) const {
  const char* op = "pack_partials";
  const Tensor out = reader_.read(out_, op, "out").need_dims(3),
               lse = reader_.read(lse_, op, "lse").need_dims(2);
  const Tensor dst_out = reader_.read(dst_out_, op, "dst_out").need_dims(4);
  const Tensor dst_lse = reader_.read(dst_lse_, op, "dst_lse").need_dims(3);
  lse.need(lse.f32(), "it must be float32");
  dst_lse.need(dst_lse.f32(), "it must be float32");
  if (!dst_out.same_dtype(out) && !(out.fp8() && dst_out.is(kUInt, 8)))
    refuse(op, out.described() + ", " + dst_out.described() + "; their dtypes must be the same");
  const int64_t rows = out.size(0), group = out.size(1), width = out.size(2), members = dst_out.size(0);
  if (!members || group % members)
    refuse(op, text(group) + " heads do not divide over " + text(members) + " members");
  if (width * out.itemsize() % kWord)
    refuse(op, "D " + text(width) + " x " + text(out.itemsize()) + " bytes is not a multiple of the word, " +
                   text(kWord) + " bytes");
  out.need(out.dense(2), "its last dim must have stride 1");
  dst_out.need(dst_out.dense(3), "its last dim must have stride 1");
  if (rows > dst_out.size(1))
    refuse(op, text(rows) + " rows do not fit a buffer of " + text(dst_out.size(1)));
  const int64_t heads = group / members;
  bool match =
      lse.size(0) == rows && lse.size(1) == group && dst_out.size(2) == heads && dst_out.size(3) == width;
  for (int i = 0; i < 3; ++i) match = match && dst_lse.size(i) == dst_out.size(i);
  if (!match)
    refuse(op, out.described() + ", " + lse.described() + ", " + dst_out.described() + ", " +
                   dst_lse.described() + "; dst_out must be [" + text(members) + ", >=" + text(rows) + ", " +
                   text(heads) + ", " + text(width) + "], dst_lse the same less the last dim");
  PackArgs a;
  a.out = out.bytes();
  a.lse = lse.as<const float>();
  a.dst_out = dst_out.bytes();
  a.dst_lse = dst_lse.as<float>();
  a.members = members;
  a.rows = rows;
  a.heads = heads;
  a.row_bytes = width * out.itemsize();
  for (int i = 0; i < 2; ++i) a.out_bytes[i] = out.stride_bytes(i), a.lse_stride[i] = lse.stride(i);
  for (int i = 0; i < 3; ++i)
    a.dst_out_bytes[i] = dst_out.stride_bytes(i), a.dst_lse_stride[i] = dst_lse.stride(i);
  a.threads = threads_;
  const Unlocked unlocked(rows * group * a.row_bytes);
  kernels_->pack_partials(a);
}

void Provider::merge_partials(nb::handle partials_, nb::handle lse_, bool base2, nb::handle sink_,
                              nb::handle out_, nb::handle lse_out_) const {
  const char* op = "merge_partials";
  const Tensor partials = reader_.read(partials_, op, "partials").need_dims(4);
  const Tensor lse = reader_.read(lse_, op, "lse").need_dims(3);
  const Tensor out = reader_.read(out_, op, "out").need_dims(3);
  const Tensor lse_out = reader_.read(lse_out_, op, "lse_out").need_dims(2);
  MergeArgs a;
  a.type = float_type(partials);
  a.out_type = float_type(out);
  out.need(a.out_type == a.type || a.out_type == Type::f32, "it must be of the partials' dtype or float32");
  lse.need(lse.f32(), "it must be float32");
  lse_out.need(lse_out.f32(), "it must be float32");
  partials.need(partials.dense(3), "its last dim must have stride 1");
  out.need(out.dense(2), "its last dim must have stride 1");
  for (int i = 0; i < 3; ++i) {
    lse.need(lse.size(i) == partials.size(i), "it must be the partials' shape less the last dim");
    out.need(out.size(i) == partials.size(i + 1), "it must be the partials' shape less the first dim");
    lse_out.need(i == 2 || lse_out.size(i) == lse.size(i + 1),
                 "it must be the lse's shape less the first dim");
    a.partials_bytes[i] = partials.stride_bytes(i);
    a.lse_stride[i] = lse.stride(i);
  }
  a.sink = nullptr;
  a.sink_stride = 1;
  if (!sink_.is_none()) a.sink = sink(sink_, op, partials.size(2));
  a.partials = partials.bytes();
  a.lse = lse.as<const float>();
  a.out = out.bytes();
  a.lse_out = lse_out.as<float>();
  a.members = partials.size(0);
  a.rows = partials.size(1);
  a.heads = partials.size(2);
  a.width = partials.size(3);
  for (int i = 0; i < 2; ++i) a.out_bytes[i] = out.stride_bytes(i), a.lse_out_stride[i] = lse_out.stride(i);
  a.to_natural = base2 ? 0.693147180559945309f : 1.0f;
  a.threads = threads_;
  const Unlocked unlocked(product(partials, 0) * partials.itemsize());
  kernels_->merge_partials(a);
}

// ---- attention

const float* Provider::sink(nb::handle object, const char* op, int64_t heads) const {
  const Tensor t = reader_.read(object, op, "sink");
  t.need(t.ndim == 1 && t.f32() && t.size(0) == heads && t.dense(0),
         "it must be dense float32, one per head");
  return t.as<const float>();
}

PagedArgs Provider::paged(const char* op, nb::handle q_, nb::handle pool_, nb::handle table_,
                          nb::handle lens_, int64_t page_slots, nb::handle start_, nb::handle sink_) const {
  const Tensor q = reader_.read(q_, op, "q").need_dims(3),
               pool = reader_.read(pool_, op, "pool").need_dims(2);
  const Tensor table = reader_.read(table_, op, "page_table").need_dims(2);
  const Tensor lens = reader_.read(lens_, op, "lens").need_dims(1);
  PagedArgs a;
  a.type = float_type(q);
  q.need(q.dense(2), "its last dim must have stride 1");
  pool.need(pool.dense(1), "its last dim must have stride 1");
  pool.need(pool.same_dtype(q), "it must be of q's dtype");
  a.rows = q.size(0);
  a.heads = q.size(1);
  table.need(table.size(0) == a.rows && table.is(kInt, 32) && table.dense(1),
             "it must be int32, a dense row per row of q");
  lens.need(lens.size(0) == a.rows && lens.is(kInt, 32) && lens.dense(0),
            "it must be dense int32, one per row of q");
  a.lens = lens.as<const int32_t>();
  a.start = nullptr;
  if (!start_.is_none()) {
    const Tensor start = reader_.read(start_, op, "start").need_dims(1);
    start.need(start.size(0) == a.rows && start.is(kInt, 32) && start.dense(0),
               "it must be dense int32, one per row of q");
    a.start = start.as<const int32_t>();
  }
  if (page_slots < 1) refuse(op, "page_slots " + text(page_slots) + "; at least 1 is needed");
  a.q = q.bytes();
  a.pool = pool.bytes();
  a.slot_stride = pool.stride(0);
  a.table = table.as<const int32_t>();
  a.table_stride = table.stride(0);
  a.page_slots = page_slots;
  for (int i = 0; i < 2; ++i) a.q_stride[i] = q.stride(i);
  const int64_t pages = pool.size(0) / page_slots;
  for (int64_t t = 0; t < a.rows; ++t) {
    const int64_t begin = a.start ? a.start[t] : 0, end = a.lens[t];
    if (begin < 0 || end > table.size(1) * page_slots)
      refuse(op, "entries " + text(begin) + " to " + text(end) + " of row " + text(t) + " are not within " +
                     text(table.size(1)) + " pages of " + text(page_slots) + " slots");
    for (int64_t p = begin / page_slots; p * page_slots < end && begin < end; ++p) {
      const int32_t page = a.table[t * a.table_stride + p];
      if (page < 0 || page >= pages)
        refuse(op, "page " + text(page) + " of row " + text(t) + " is outside the pool's " + text(pages));
    }
  }
  a.sink = sink_.is_none() ? nullptr : sink(sink_, op, a.heads);
  a.threads = threads_;
  return a;
}

void Provider::attend_paged(PagedArgs& a, const Tensor& out, const Tensor& lse) const {
  out.need(out.ndim == 3 && out.size(0) == a.rows && out.size(1) == a.heads && out.size(2) == a.value_width &&
               float_type(out) == a.type && out.dense(0),
           "it must be dense [rows, heads, value width] of q's dtype");
  lse.need(lse.ndim == 2 && lse.size(0) == a.rows && lse.size(1) == a.heads && lse.f32() && lse.dense(0),
           "it must be dense float32 [rows, heads]");
  a.out = out.bytes();
  a.lse = lse.as<float>();
  const Unlocked unlocked(INT64_MAX);
  kernels_->attend_paged(a);
}

void Provider::attend_paged_gqa(nb::handle q_, nb::handle pool_, nb::handle table, nb::handle lens,
                                int64_t page_slots, nb::handle kv_map, float scale, nb::handle start,
                                nb::handle sink, nb::handle out, nb::handle lse) const {
  const char* op = "attend_paged_gqa";
  PagedArgs a = paged(op, q_, pool_, table, lens, page_slots, start, sink);
  const int64_t width = reader_.read(q_, op, "q").size(2), entry = reader_.read(pool_, op, "pool").size(1);
  if (!width || !entry || entry % (2 * width))
    refuse(op, "an entry of " + text(entry) + " elements is not [2, kv_heads, " + text(width) + "]");
  const Groups groups(reader_.read(kv_map, op, "kv_map"), a.heads, entry / (2 * width));
  a.groups = groups.view();
  a.key_width = a.value_width = a.kv_step = width;
  a.value_base = entry / 2;
  a.scale = scale;
  attend_paged(a, reader_.read(out, op, "out"), reader_.read(lse, op, "lse"));
}

void Provider::attend_paged_mla(nb::handle q_, nb::handle pool_, nb::handle table, nb::handle lens,
                                int64_t page_slots, int64_t value_width, float scale, nb::handle start,
                                nb::handle sink, nb::handle out, nb::handle lse) const {
  const char* op = "attend_paged_mla";
  PagedArgs a = paged(op, q_, pool_, table, lens, page_slots, start, sink);
  const int64_t width = reader_.read(q_, op, "q").size(2), entry = reader_.read(pool_, op, "pool").size(1);
  if (width != entry || value_width < 1 || value_width > entry)
    refuse(op, "q is " + text(width) + " wide, entries " + text(entry) + ", the value " + text(value_width) +
                   "; q and entries must be alike, the value within them");
  const Groups groups(a.heads);
  a.groups = groups.view();
  a.key_width = width;
  a.value_width = value_width;
  a.kv_step = a.value_base = 0;
  a.scale = scale;
  attend_paged(a, reader_.read(out, op, "out"), reader_.read(lse, op, "lse"));
}

std::vector<int64_t> positions(const Tensor& t, int64_t count) {
  t.need(t.ndim == 1 && t.size(0) == count && (t.is(kInt, 32) || t.is(kInt, 64)),
         "it must be int32 or int64, one position per row");
  std::vector<int64_t> p(count);
  for (int64_t i = 0; i < count; ++i)
    p[i] = t.is(kInt, 32) ? t.as<const int32_t>()[i * t.stride(0)] : t.as<const int64_t>()[i * t.stride(0)];
  return p;
}

void Provider::attend_rows(nb::handle q_, nb::handle k_, nb::handle v_, nb::handle q_pos_, nb::handle k_pos_,
                           nb::handle kv_map_, float scale, int64_t window, nb::handle sink_, nb::handle out_,
                           nb::handle lse_) const {
  const char* op = "attend_rows";
  const Tensor q = reader_.read(q_, op, "q").need_dims(3), k = reader_.read(k_, op, "k").need_dims(3);
  const Tensor v = reader_.read(v_, op, "v").need_dims(3);
  RowsArgs a;
  a.type = float_type(q);
  if (!k.same_dtype(q) || !v.same_dtype(q) || q.size(2) != k.size(2) || k.size(0) != v.size(0) ||
      k.size(1) != v.size(1))
    refuse(op, q.described() + ", " + k.described() + ", " + v.described() +
                   "; they must be [T, H, Dq], [S, kv_heads, Dq], [S, kv_heads, Dv] of one dtype");
  for (const Tensor* t : {&q, &k, &v}) t->need(t->dense(2), "its last dim must have stride 1");
  a.rows = q.size(0), a.heads = q.size(1), a.keys = k.size(0);
  a.key_width = q.size(2), a.value_width = v.size(2);
  const std::vector<int64_t> q_pos = positions(reader_.read(q_pos_, op, "q_pos"), a.rows);
  const std::vector<int64_t> k_pos = positions(reader_.read(k_pos_, op, "k_pos"), a.keys);
  const Groups groups(reader_.read(kv_map_, op, "kv_map"), a.heads, k.size(1));
  a.groups = groups.view();
  a.q = q.bytes(), a.k = k.bytes(), a.v = v.bytes();
  for (int i = 0; i < 2; ++i)
    a.q_stride[i] = q.stride(i), a.k_stride[i] = k.stride(i), a.v_stride[i] = v.stride(i);
  a.q_pos = q_pos.data(), a.k_pos = k_pos.data();
  a.window = window;
  a.sink = sink_.is_none() ? nullptr : sink(sink_, op, a.heads);
  a.scale = scale;
  const Tensor out = reader_.read(out_, op, "out"), lse = reader_.read(lse_, op, "lse");
  assert(out.dense(0) && lse.dense(0) && float_type(out) == a.type && lse.f32());
  a.out = out.bytes();
  a.lse = lse.as<float>();
  a.threads = threads_;
  const Unlocked unlocked(INT64_MAX);
  kernels_->attend_rows(a);
}

// ---- feed-forward

void Provider::rms_norm(nb::handle x_, nb::handle weight_, float eps, nb::handle out_) const {
  const char* op = "rms_norm";
  const Tensor x = reader_.read(x_, op, "x"), weight = reader_.read(weight_, op, "weight").need_dims(1);
  const Tensor out = reader_.read(out_, op, "out");
  NormArgs a;
  a.type = float_type(x);
  x.need(x.ndim >= 1 && x.size(x.ndim - 1) == weight.size(0), "its last dim must be the weight's length");
  x.need(x.ndim == 2 ? x.dense(1) : x.dense(0), "it must be rows, each dense, or dense as a whole");
  weight.need(weight.same_dtype(x) && weight.dense(0), "it must be dense, of x's dtype");
  assert(out.dense(0) && same_shape(out, x));
  a.x = x.bytes(), a.weight = weight.bytes(), a.out = out.bytes();
  a.width = weight.size(0);
  a.rows = product(x, 0) / (a.width ? a.width : 1);
  a.x_stride = x.ndim == 2 ? x.stride(0) : a.width;
  a.eps = eps;
  a.threads = threads_;
  const Unlocked unlocked(a.rows * a.width * x.itemsize());
  kernels_->rms_norm(a);
}

void Provider::gated(nb::handle both_, float limit, float alpha, float shift, nb::handle out_) const {
  const char* op = "gated";
  const Tensor both = reader_.read(both_, op, "both").need_dims(2), out = reader_.read(out_, op, "out");
  GatedArgs a;
  a.type = float_type(both);
  both.need(both.size(1) % 2 == 0 && both.dense(1), "it must be dense rows of gate and up columns");
  a.gate = {limit, alpha, shift};
  a.rows = both.size(0), a.width = both.size(1) / 2, a.both_stride = both.stride(0);
  assert(out.dense(0) && out.size(0) == a.rows && out.size(1) == a.width);
  a.both = both.bytes(), a.out = out.bytes();
  a.threads = threads_;
  const Unlocked unlocked(a.rows * a.width * both.itemsize());
  kernels_->gated(a);
}

void Provider::linear(nb::handle x_, nb::handle weight_, nb::handle bias_, nb::handle out_) const {
  const char* op = "linear";
  const Tensor x = reader_.read(x_, op, "x").need_dims(2), weight = reader_.read(weight_, op, "weight");
  const Tensor out = reader_.read(out_, op, "out");
  LinearArgs a;
  a.type = float_type(x);
  x.need(x.dense(1), "its rows must be dense");
  weight.need(weight.ndim == 2 && weight.same_dtype(x) && weight.size(1) == x.size(1) && weight.dense(1),
              "it must be [out, in] of x's dtype, rows dense, as wide as x");
  a.bias = nullptr;
  if (!bias_.is_none()) {
    const Tensor bias = reader_.read(bias_, op, "bias");
    bias.need(bias.ndim == 1 && bias.same_dtype(x) && bias.size(0) == weight.size(0) && bias.dense(0),
              "it must be dense, of x's dtype, one per output");
    a.bias = bias.bytes();
  }
  a.rows = x.size(0), a.width = x.size(1), a.columns = weight.size(0);
  assert(out.dense(0) && out.size(0) == a.rows && out.size(1) == a.columns);
  a.x = x.bytes(), a.weight = weight.bytes(), a.out = out.bytes();
  a.x_stride = x.stride(0), a.weight_stride = weight.stride(0);
  a.threads = threads_;
  const Unlocked unlocked(a.columns * a.width * x.itemsize());
  kernels_->linear(a);
}

void Provider::run_experts(nb::handle x_, nb::handle ids_, nb::handle weights_, int64_t first,
                           nb::handle gate_up_, nb::handle down_, float limit, float alpha, float shift,
                           nb::handle gate_up_bias_, nb::handle down_bias_, nb::handle out_) const {
  const char* op = "run_experts";
  const Tensor x = reader_.read(x_, op, "x").need_dims(2), out = reader_.read(out_, op, "out");
  const Tensor ids = reader_.read(ids_, op, "ids").need_dims(2);
  const Tensor weights = reader_.read(weights_, op, "weights").need_dims(2);
  const Tensor gate_up = reader_.read(gate_up_, op, "gate_up").need_dims(3);
  const Tensor down = reader_.read(down_, op, "down").need_dims(3);
  ExpertsArgs a;
  a.type = float_type(x);
  a.rows = x.size(0), a.dim = x.size(1), a.experts = down.size(0), a.width = down.size(2);
  x.need(x.dense(1), "its rows must be dense");
  ids.need(ids.is(kInt, 64) && ids.size(0) == a.rows && ids.dense(0), "it must be dense int64 [rows, k]");
  weights.need(weights.f32() && same_shape(weights, ids) && weights.dense(0),
               "it must be dense float32, one per id");
  if (!gate_up.same_dtype(x) || !down.same_dtype(x) || gate_up.size(0) != a.experts ||
      gate_up.size(1) != 2 * a.width || gate_up.size(2) != a.dim || down.size(1) != a.dim)
    refuse(op, x.described() + ", " + gate_up.described() + ", " + down.described() +
                   "; they must be [rows, d], [experts, 2 * w, d], [experts, d, w] of one dtype");
  gate_up.need(gate_up.dense(2), "its last dim must have stride 1");
  down.need(down.dense(2), "its last dim must have stride 1");
  const auto bias = [&](nb::handle object, const char* name, int64_t width) -> const char* {
    if (object.is_none()) return nullptr;
    const Tensor t = reader_.read(object, op, name);
    t.need(t.ndim == 2 && t.same_dtype(x) && t.size(0) == a.experts && t.size(1) == width && t.dense(0),
           "it must be dense, of x's dtype, a row per expert");
    return t.bytes();
  };
  a.gate_up_bias = bias(gate_up_bias_, "gate_up_bias", 2 * a.width);
  a.down_bias = bias(down_bias_, "down_bias", a.dim);
  const int64_t k = ids.size(1), *id = ids.as<const int64_t>();
  const float* given = weights.as<const float>();
  std::vector<int64_t> begin(a.experts + 1), row;
  std::vector<float> weight;
  const auto local = [&](int64_t i) { return id[i] >= first && id[i] < first + a.experts; };
  for (int64_t i = 0; i < a.rows * k; ++i)
    if (local(i)) ++begin[id[i] - first + 1];
  for (int64_t e = 0; e < a.experts; ++e) begin[e + 1] += begin[e];
  a.pairs = begin[a.experts];
  row.resize(a.pairs), weight.resize(a.pairs);
  std::vector<int64_t> next(begin);
  for (int64_t i = 0; i < a.rows * k; ++i)
    if (local(i)) {
      const int64_t at = next[id[i] - first]++;
      row[at] = i / k, weight[at] = given[i];
    }
  assert(out.dense(0) && same_shape(out, x));
  a.gate = {limit, alpha, shift};
  a.x = x.bytes(), a.gate_up = gate_up.bytes(), a.down = down.bytes(), a.out = out.bytes();
  a.x_stride = x.stride(0);
  for (int i = 0; i < 2; ++i) a.gate_up_stride[i] = gate_up.stride(i), a.down_stride[i] = down.stride(i);
  a.begin = begin.data(), a.row = row.data(), a.weight = weight.data();
  a.threads = threads_;
  const Unlocked unlocked(a.experts * a.width * a.dim * x.itemsize());
  kernels_->run_experts(a);
}

}  // namespace
}  // namespace anabranch

NB_MODULE(_cpu, m) {
  using anabranch::Provider;
  m.doc() = "The compiled CPU kernels; see anabranch.ops.cpu.provider.";
  m.def("team_name", &anabranch::team_name);
  m.def("has_tiles", &anabranch::has_tiles);
  m.def("isas", [] {
    int count;
    const anabranch::Isa* all = anabranch::isas(&count);
    nb::list names;
    for (int i = 0; i < count; ++i) names.append(nb::make_tuple(all[i].name, all[i].runnable));
    return names;
  });
  nb::class_<Provider>(m, "Provider")
      .def(nb::init<const std::string&, int, nb::handle>())
      .def("copy_rows", &Provider::copy_rows, nb::arg("dst"), nb::arg("src"), nb::arg("offset"),
           nb::arg("count"), nb::arg("direction"))
      .def("sum_members", &Provider::sum_members)
      .def("pack_partials", &Provider::pack_partials, nb::arg("out"), nb::arg("lse"), nb::arg("dst_out"),
           nb::arg("dst_lse"))
      .def("merge_partials", &Provider::merge_partials, nb::arg("partials"), nb::arg("lse"), nb::arg("base2"),
           nb::arg("sink").none(), nb::arg("out"), nb::arg("lse_out"))
      .def("attend_paged_gqa", &Provider::attend_paged_gqa, nb::arg("q"), nb::arg("pool"),
           nb::arg("page_table"), nb::arg("lens"), nb::arg("page_slots"), nb::arg("kv_map"), nb::arg("scale"),
           nb::arg("start").none(), nb::arg("sink").none(), nb::arg("out"), nb::arg("lse"))
      .def("attend_paged_mla", &Provider::attend_paged_mla, nb::arg("q"), nb::arg("pool"),
           nb::arg("page_table"), nb::arg("lens"), nb::arg("page_slots"), nb::arg("value_width"),
           nb::arg("scale"), nb::arg("start").none(), nb::arg("sink").none(), nb::arg("out"), nb::arg("lse"))
      .def("attend_rows", &Provider::attend_rows, nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("q_pos"),
           nb::arg("k_pos"), nb::arg("kv_map"), nb::arg("scale"), nb::arg("window"), nb::arg("sink").none(),
           nb::arg("out"), nb::arg("lse"))
      .def("rms_norm", &Provider::rms_norm)
      .def("gated", &Provider::gated)
      .def("linear", &Provider::linear, nb::arg("x"), nb::arg("weight"), nb::arg("bias").none(),
           nb::arg("out"))
      .def("run_experts", &Provider::run_experts, nb::arg("x"), nb::arg("ids"), nb::arg("weights"),
           nb::arg("first"), nb::arg("gate_up"), nb::arg("down"), nb::arg("limit"), nb::arg("alpha"),
           nb::arg("shift"), nb::arg("gate_up_bias").none(), nb::arg("down_bias").none(), nb::arg("out"));
}
