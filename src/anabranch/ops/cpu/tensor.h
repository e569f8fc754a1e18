// Tensors as the kernels need them, read through DLPack's C exchange API, and what is said of wrong ones.
//
// Owns the only contact with the array library: the DLPack structs (the fields of its specification,
// version 1.3) and the checks every op shares. No header of the array library is needed to build.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>
#include <string>

namespace anabranch {

namespace nb = nanobind;

struct DlTensor {
  void* data;
  struct {
    int32_t type, id;
  } device;
  int32_t ndim;
  struct {
    uint8_t code, bits;
    uint16_t lanes;
  } dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

// A tensor with its memory's end: the deleter is called when nobody uses it any more.
struct DlManaged {
  uint32_t version[2];
  void* context;
  void (*deleter)(DlManaged*);
  uint64_t flags;
  DlTensor tensor;
};

struct DlExchangeApi {
  struct {
    uint32_t major, minor;
    void* previous;
  } header;
  void* allocate;
  void* managed_from_object;
  int (*managed_to_object)(DlManaged* managed, void** object);
  int (*borrow_from_object)(void* object, DlTensor* out);
  void* current_stream;
};

enum DlCode : uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4 };
constexpr int32_t kCpu = 1;

[[noreturn]] inline void refuse(const char* op, const std::string& why) {
  throw nb::value_error((std::string(op) + ": " + why).c_str());
}

inline std::string text(int64_t number) { return std::to_string(number); }

// A borrowed tensor: valid while its Python object is, which is at least the call.
struct Tensor : DlTensor {
  const char* op;
  const char* name;

  int64_t size(int dim) const { return shape[dim]; }
  int64_t stride(int dim) const { return strides[dim]; }
  int64_t itemsize() const { return dtype.bits / 8; }
  int64_t stride_bytes(int dim) const { return strides[dim] * itemsize(); }
  char* bytes() const { return static_cast<char*>(data) + byte_offset; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(bytes());
  }

  bool is(DlCode code, int bits) const { return dtype.code == code && dtype.bits == bits; }
  bool f32() const { return is(kFloat, 32); }
  bool same_dtype(const Tensor& t) const { return dtype.code == t.dtype.code && dtype.bits == t.dtype.bits; }
  bool fp8() const { return dtype.bits == 8 && dtype.code > kBfloat; }

  // Every dim from `from` on is one run of elements; strides of a tensor without elements say nothing.
  bool dense(int from) const {
    int64_t expected = 1;
    bool run = true;
    for (int i = ndim - 1; i >= from; expected *= shape[i--]) run &= shape[i] == 1 || strides[i] == expected;
    return run || std::any_of(shape, shape + ndim, [](int64_t n) { return n == 0; });
  }

  std::string dims() const {
    std::string s = "(";
    for (int i = 0; i < ndim; ++i) s += (i ? ", " : "") + text(shape[i]);
    return s + ")";
  }
  std::string type() const {
    const char* kind = dtype.code == kInt      ? "int"
                       : dtype.code == kUInt   ? "uint"
                       : dtype.code == kFloat  ? "float"
                       : dtype.code == kBfloat ? "bfloat"
                                               : "other";
    return kind + text(dtype.bits);
  }
  std::string described() const { return std::string(name) + " is " + dims() + " " + type(); }

  [[noreturn]] void wrong(const std::string& remedy) const { refuse(op, described() + "; " + remedy); }
  const Tensor& need(bool good, const char* remedy) const {
    if (!good) wrong(remedy);
    return *this;
  }
  const Tensor& need_dims(int n) const {
    if (ndim != n) wrong("it must have " + text(n) + " dims");
    return *this;
  }
};

// The functions by which a tensor type is read and made; they live as long as the type.
inline const DlExchangeApi* exchange_api(nb::handle tensor_type) {
  nb::object capsule = tensor_type.attr("__dlpack_c_exchange_api__");
  const auto* api = static_cast<const DlExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (!api) throw nb::python_error();
  if (api->header.major != 1 || !api->borrow_from_object || !api->managed_to_object)
    throw nb::value_error("the tensor type speaks another major version of DLPack than 1");
  return api;
}

// Turns Python objects into tensors; made once from the tensor type, so a call only follows a pointer.
class Reader {
 public:
  explicit Reader(nb::handle tensor_type)
      : type_(reinterpret_cast<PyTypeObject*>(tensor_type.ptr())), borrow_(exchange_api(tensor_type)->borrow_from_object) {}

  bool is_tensor(nb::handle object) const { return PyObject_TypeCheck(object.ptr(), type_); }

  Tensor read(nb::handle object, const char* op, const char* name) const {
    if (!is_tensor(object)) refuse(op, std::string(name) + " is no tensor");
    Tensor t;
    t.op = op;
    t.name = name;
    if (borrow_(object.ptr(), &t)) {
      nb::python_error cause;
      nb::raise_from(cause, PyExc_ValueError, "%s: %s is no tensor in plain memory", op, name);
    }
    if (t.device.type != kCpu) t.wrong("it is not on the CPU; bind the ops of its device");
    return t;
  }

 private:
  PyTypeObject* type_;
  int (*borrow_)(void*, DlTensor*);
};

}  // namespace anabranch
