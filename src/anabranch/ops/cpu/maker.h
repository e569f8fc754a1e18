// New tensors for results, wrapped through DLPack's C exchange API around memory that is used again.
//
// Owns a pool of blocks: a block returns to it when the last view of its tensor goes, on whatever thread.
// Making a tensor so costs half of what a call of the array library's own allocation does.
#pragma once

#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "tensor.h"

namespace anabranch {

// Blocks of four sizes an octave, a few of each kept, and not more than kRoom bytes: memory that the system
// gives anew costs more to touch than the copy that goes there.
class Pool {
 public:
  static constexpr int kLeast = 8, kMost = 26;  // log2 of the bytes: 256 to 64 Mi
  static constexpr size_t kKept = 4, kRoom = size_t{128} << 20;

  static int size_class(int64_t bytes) {
    int n = bytes >> kLeast ? 4 * (63 - kLeast - __builtin_clzll(bytes)) : 0;  // the octave's first
    while (bytes_of(n) < bytes) ++n;
    return n;
  }
  static int64_t bytes_of(int size) { return int64_t{4 + size % 4} << (kLeast - 2 + size / 4); }

  ~Pool() {
    for (auto& blocks : free_)
      for (void* block : blocks) std::free(block);
  }

  void* take(int size) {
    if (size < kClasses) {
      const std::lock_guard<std::mutex> held(mutex_);
      auto& blocks = free_[size];
      if (!blocks.empty()) {
        void* block = blocks.back();
        blocks.pop_back();
        room_ += bytes_of(size);
        return block;
      }
    }
    void* block = std::aligned_alloc(64, bytes_of(size));
    if (!block) throw std::bad_alloc();
    return block;
  }

  void give_back(void* block, int size) {
    if (size < kClasses) {
      const std::lock_guard<std::mutex> held(mutex_);
      auto& blocks = free_[size];
      if (blocks.size() < kKept && bytes_of(size) <= room_) {
        room_ -= bytes_of(size);
        return blocks.push_back(block);
      }
    }
    std::free(block);
  }

 private:
  static constexpr int kClasses = 4 * (kMost - kLeast) + 1;
  std::mutex mutex_;
  std::vector<void*> free_[kClasses];
  int64_t room_ = kRoom;
};

class Maker {
 public:
  explicit Maker(nb::handle tensor_type) : wrap_(exchange_api(tensor_type)->managed_to_object) {}

  // Uninitialised, like x in dtype and trailing dims.
  nb::object empty(const Tensor& x, int64_t rows) const {
    int64_t shape[kMaxDims];
    if (x.ndim > kMaxDims) x.wrong("it has too many dims");
    for (int i = 0; i < x.ndim; ++i) shape[i] = i ? x.size(i) : rows;
    return empty(x, x.ndim, shape);
  }

  nb::object empty(const Tensor& like, int ndim, const int64_t* shape) const {
    int64_t elements = 1;
    for (int i = 0; i < ndim; ++i) elements *= shape[i];
    const int size = Pool::size_class(sizeof(Header) + elements * like.itemsize());
    auto* block = new (pool_->take(size)) Header{};
    block->pool = pool_;
    block->size = size;
    DlTensor& t = block->managed.tensor;
    t = like;
    t.data = block + 1;
    t.ndim = ndim;
    t.shape = block->shape;
    t.strides = block->strides;
    t.byte_offset = 0;
    for (int64_t i = ndim - 1, run = 1; i >= 0; run *= shape[i--]) {
      block->shape[i] = shape[i];
      block->strides[i] = run;
    }
    block->managed.version[0] = 1;
    block->managed.deleter = release;
    void* object = nullptr;
    if (wrap_(&block->managed, &object)) {
      release(&block->managed);
      if (!PyErr_Occurred()) PyErr_NoMemory();
      throw nb::python_error();
    }
    return nb::steal(static_cast<PyObject*>(object));
  }

 private:
  static constexpr int kMaxDims = 8;

  struct alignas(64) Header {
    DlManaged managed;
    int64_t shape[kMaxDims], strides[kMaxDims];
    std::shared_ptr<Pool> pool;
    int size;
  };

  static void release(DlManaged* managed) {
    auto* block = reinterpret_cast<Header*>(managed);
    const std::shared_ptr<Pool> pool = std::move(block->pool);
    const int size = block->size;
    block->~Header();
    pool->give_back(block, size);
  }

  int (*wrap_)(DlManaged*, void**);
  std::shared_ptr<Pool> pool_ = std::make_shared<Pool>();
};

}  // namespace anabranch
