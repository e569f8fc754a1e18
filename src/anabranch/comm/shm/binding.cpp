// Where Python meets the verbs: checks tensors, turns rows into bytes, lets other threads run meanwhile.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <optional>

#include "../../ops/cpu/isa.h"
#include "../../ops/cpu/maker.h"
#include "channel.h"

namespace nb = nanobind;

namespace anabranch::shm {
namespace {

using anabranch::Maker;
using anabranch::Reader;
using anabranch::Tensor;
using anabranch::refuse;
using anabranch::text;

void check_signals() {
  nb::gil_scoped_acquire held;
  if (PyErr_CheckSignals()) throw nb::python_error();
}

void read_nonce(nb::bytes given, uint64_t nonce[2]) {
  if (given.size() != 16) throw nb::value_error("a nonce has 16 bytes");
  memcpy(nonce, given.c_str(), 16);
}

class World {
 public:
  World(nb::object memory, nb::handle tensor_type, int rank, int world, uint64_t slot, nb::bytes nonce_, double deadline,
        double spin, const std::string& isa, int threads)
      : reader_(tensor_type), maker_(tensor_type), memory_(memory), kernels_(kernels_of(isa)), threads_(threads < 1 ? 1 : threads) {
    const Tensor t = reader_.read(memory, "join", "memory");
    uint64_t nonce[2];
    read_nonce(nonce_, nonce);
    const nb::gil_scoped_release unlocked;
    region_ = std::make_unique<Region>(t.bytes(), t.size(0), rank, world, slot, nonce, deadline, spin);
    region_->interrupted = check_signals;
  }

  Region& region() { return *region_; }
  const Reader& reader() const { return reader_; }
  const Maker& maker() const { return maker_; }
  const Kernels* kernels() const { return kernels_; }
  int threads() const { return threads_; }

 private:
  Reader reader_;
  Maker maker_;
  nb::object memory_;  // keeps the mapping
  const Kernels* kernels_;
  int threads_;
  std::unique_ptr<Region> region_;
};

// One run of elements; a tensor of none may have any strides.
bool one_run(const Tensor& t) {
  for (int i = 0; i < t.ndim; ++i)
    if (!t.size(i)) return true;
  return t.dense(0);
}

// A dense tensor whose rows are moved whole; of an input in other strides, a copy.
struct RowsOf : Tensor {
  int64_t row_bytes;
  nb::object kept;

  RowsOf(const Reader& reader, nb::handle object, const char* op, const char* name, bool input = true)
      : Tensor(reader.read(object, op, name)), row_bytes(itemsize()) {
    if (input && ndim && !one_run(*this)) {
      kept = object.attr("contiguous")();
      static_cast<Tensor&>(*this) = reader.read(kept, op, name);
    }
    need(ndim >= 1 && one_run(*this), "it must be dense and have rows");
    for (int i = 1; i < ndim; ++i) row_bytes *= size(i);
  }
  int64_t nbytes() const { return size(0) * row_bytes; }
};

// The type in which a tensor's elements are summed here, if they can be.
std::optional<Type> summed_type(const Tensor& t) {
  if (t.f32()) return Type::f32;
  if (t.is(kBfloat, 16)) return Type::bf16;
  if (t.is(kFloat, 16)) return Type::f16;
  return std::nullopt;
}

// Where each member's rows are among rows of one size, how many they are, and how many this member's.
struct Cut {
  std::vector<Span> parts;
  int64_t rows, mine;
};

class Group {
 public:
  Group(World& world, const std::vector<int>& members)
      : reader_(world.reader()), maker_(world.maker()), channel_(make(world, members)) {}

  void barrier() {
    const nb::gil_scoped_release unlocked;
    channel_.barrier();
  }

  // Every verb writes to `out` where one is given, and returns it or a new tensor. Those that sum return
  // none, before they begin, for a dtype that they cannot sum.

  nb::object all_gather(nb::handle x_, nb::handle counts, nb::object given) {
    const RowsOf x(reader_, x_, "all_gather", "x");
    const Cut& cut = cut_rows(counts, x, first_);
    x.need(x.size(0) == cut.mine, "its rows are not counts[me]");
    nb::object result = given.is_none() ? maker_.empty(x, cut.rows) : given;
    const RowsOf out = output(result, x, "all_gather", cut.rows);
    const nb::gil_scoped_release unlocked;
    channel_.all_gather(x.bytes(), out.bytes(), cut.parts);
    return result;
  }

  nb::object reduce_scatter(nb::handle x_, nb::handle counts, nb::object given) {
    const RowsOf x(reader_, x_, "reduce_scatter", "x");
    const Cut& cut = cut_rows(counts, x, first_);
    x.need(x.size(0) == cut.rows, "its rows are not sum(counts)");
    const std::optional<Type> type = summed_type(x);
    if (!type) return nb::none();
    nb::object result = given.is_none() ? maker_.empty(x, cut.mine) : given;
    const RowsOf out = output(result, x, "reduce_scatter", cut.mine);
    const nb::gil_scoped_release unlocked;
    channel_.reduce_scatter(*type, x.bytes(), out.bytes(), cut.parts);
    return result;
  }

  nb::object all_reduce(nb::handle x_, nb::object given) {
    const RowsOf x(reader_, x_, "all_reduce", "x");
    const std::optional<Type> type = summed_type(x);
    if (!type) return nb::none();
    nb::object result = given.is_none() ? maker_.empty(x, x.size(0)) : given;
    const RowsOf out = output(result, x, "all_reduce", x.size(0));
    const nb::gil_scoped_release unlocked;
    channel_.all_reduce(*type, x.bytes(), out.bytes(), x.nbytes());
    return result;
  }

  nb::object all_to_all(nb::handle x_, nb::handle send_, nb::handle recv_, nb::object given) {
    const RowsOf x(reader_, x_, "all_to_all", "x");
    const Cut &send = cut_rows(send_, x, first_), &recv = cut_rows(recv_, x, second_);
    x.need(x.size(0) == send.rows, "its rows are not sum(send)");
    if (send.mine != recv.mine) refuse("all_to_all", "send[me] and recv[me] differ");
    nb::object result = given.is_none() ? maker_.empty(x, recv.rows) : given;
    const RowsOf out = output(result, x, "all_to_all", recv.rows);
    const nb::gil_scoped_release unlocked;
    channel_.all_to_all(x.bytes(), out.bytes(), send.parts, recv.parts);
    return result;
  }

  nb::object broadcast(nb::handle x_, int root, nb::object given) {
    const RowsOf x(reader_, x_, "broadcast", "x");
    if (root < 0 || root >= channel_.size()) refuse("broadcast", "no member " + text(root));
    nb::object result = given.is_none() ? maker_.empty(x, x.size(0)) : given;
    const RowsOf out = output(result, x, "broadcast", x.size(0));
    const nb::gil_scoped_release unlocked;
    channel_.broadcast(x.bytes(), out.bytes(), x.nbytes(), root);
    return result;
  }

  nb::object merge_partials(nb::handle out_, nb::handle lse_, nb::handle sink_) {
    const char* op = "merge_partials";
    const Tensor out = reader_.read(out_, op, "out").need_dims(3), lse = reader_.read(lse_, op, "lse").need_dims(2);
    lse.need(lse.f32(), "it must be float32");
    out.need(out.dense(2), "its last dim must have stride 1");
    out.need(out.size(1) % channel_.size() == 0, "its heads do not divide over the members");
    lse.need(lse.size(0) == out.size(0) && lse.size(1) == out.size(1), "it must be out's shape less the last dim");
    Partials p{};
    const std::optional<Type> type = summed_type(out);
    if (!type) out.wrong("float32, bfloat16 and float16 can be merged");
    p.type = *type;
    p.rows = out.size(0);
    p.heads = out.size(1) / channel_.size();
    p.width = out.size(2);
    if (!sink_.is_none()) {
      const Tensor sink = reader_.read(sink_, op, "sink");
      sink.need(sink.ndim == 1 && sink.f32() && sink.size(0) == p.heads && sink.dense(0),
                "it must be dense float32, one per own head");
      p.sink = sink.as<const float>();
    }
    int64_t shape[] = {p.rows, p.heads, p.width};
    nb::object merged = maker_.empty(out, 3, shape);
    p.out = out.bytes();
    p.lse = lse.as<const float>();
    p.merged = reader_.read(merged, op, "merged").bytes();
    for (int i = 0; i < 2; ++i) p.out_bytes[i] = out.stride_bytes(i), p.lse_stride[i] = lse.stride(i);
    const nb::gil_scoped_release unlocked;
    channel_.merge_partials(p);
    return merged;
  }

  // Offsets in the world's memory, of out [rows, heads] x row_bytes and of lse, where the next
  // merge_partials finds them; none when they do not fit.
  nb::object lend(int64_t rows, int64_t heads, int64_t row_bytes) {
    if (!channel_.partials_fit(rows, heads, row_bytes)) return nb::none();
    uint64_t at;
    {
      const nb::gil_scoped_release unlocked;
      at = region_->offset(channel_.lend());
    }
    return nb::make_tuple(at + Channel::partials_at(rows, heads), at);
  }

 private:
  Channel make(World& world, const std::vector<int>& members) {
    int me = -1;
    for (size_t i = 0; i < members.size(); ++i) {
      if (members[i] < 0 || members[i] >= world.region().world() || (i && members[i] <= members[i - 1]))
        throw nb::value_error(("members " + ranks_text(members) + ": they must be ranks in order").c_str());
      if (members[i] == world.region().rank()) me = static_cast<int>(i);
    }
    if (me < 0 || members.size() < 2)
      throw nb::value_error(("members " + ranks_text(members) + ": this rank and at least one more").c_str());
    region_ = &world.region();
    const nb::gil_scoped_release unlocked;
    return Channel(world.region(), members, me, world.kernels(), world.threads());
  }

  RowsOf output(nb::handle object, const RowsOf& x, const char* op, int64_t rows) const {
    const RowsOf out(reader_, object, op, "out", false);
    if (out.row_bytes != x.row_bytes || !out.same_dtype(x) || out.size(0) != rows)
      refuse(op, out.described() + ", " + x.described() + "; out must have " + text(rows) + " of such rows");
    return out;
  }

  const Cut& cut_rows(nb::handle counts, const RowsOf& x, Cut& cut) const {
    const nb::object fast = nb::steal(PySequence_Fast(counts.ptr(), "counts are a sequence"));
    if (!fast.is_valid()) throw nb::python_error();
    if (PySequence_Fast_GET_SIZE(fast.ptr()) != channel_.size())
      throw nb::value_error("counts: one number of rows per member is needed");
    cut.parts.resize(channel_.size());
    cut.rows = 0;
    for (int i = 0; i < channel_.size(); ++i) {
      const int64_t rows = PyLong_AsLongLong(PySequence_Fast_GET_ITEM(fast.ptr(), i));
      if (rows < 0) {
        if (PyErr_Occurred()) throw nb::python_error();
        throw nb::value_error("counts: rows cannot be negative");
      }
      if (i == channel_.me()) cut.mine = rows;
      cut.parts[i] = {cut.rows * x.row_bytes, rows * x.row_bytes};
      cut.rows += rows;
    }
    return cut;
  }

  const Reader& reader_;
  const Maker& maker_;
  Region* region_ = nullptr;
  Channel channel_;
  Cut first_, second_;
};

}  // namespace
}  // namespace anabranch::shm

NB_MODULE(_shm, m) {
  using namespace anabranch::shm;
  using namespace nb::literals;
  nb::object comm_error = nb::module_::import_("anabranch.comm.group").attr("CommError");
  nb::register_exception_translator(
      [](const std::exception_ptr& p, void* type) {
        try {
          std::rethrow_exception(p);
        } catch (const Broken& e) {
          PyErr_SetString(static_cast<PyObject*>(type), e.what());
        }
      },
      comm_error.release().ptr());
  m.def("needed", &Region::needed, "world"_a, "slot"_a);
  nb::class_<World>(m, "World")
      .def(nb::init<nb::object, nb::handle, int, int, uint64_t, nb::bytes, double, double, const std::string&, int>(), "memory"_a,
           "tensor_type"_a, "rank"_a, "world"_a, "slot"_a, "nonce"_a, "deadline"_a, "spin"_a, "isa"_a, "threads"_a)
      .def("fail", [](World& w) { w.region().fail(w.region().rank()); })
      .def_prop_ro("spin_seconds", [](World& w) { return w.region().spin_seconds(); });
  nb::class_<Group>(m, "Group")
      .def(nb::init<World&, const std::vector<int>&>(), "world"_a, "members"_a, nb::keep_alive<1, 2>())
      .def("barrier", &Group::barrier)
      .def("all_gather", &Group::all_gather, "x"_a, "counts"_a, "out"_a.none() = nb::none())
      .def("reduce_scatter", &Group::reduce_scatter, "x"_a, "counts"_a, "out"_a.none() = nb::none())
      .def("all_reduce", &Group::all_reduce, "x"_a, "out"_a.none() = nb::none())
      .def("all_to_all", &Group::all_to_all, "x"_a, "send"_a, "recv"_a, "out"_a.none() = nb::none())
      .def("broadcast", &Group::broadcast, "x"_a, "root"_a, "out"_a.none() = nb::none())
      .def("merge_partials", &Group::merge_partials, "out"_a, "lse"_a, "sink"_a.none())
      .def("lend", &Group::lend, "rows"_a, "heads"_a, "row_bytes"_a);
}
