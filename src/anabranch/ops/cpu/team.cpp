#include "team.h"

#include <dlfcn.h>

#include <atomic>

namespace anabranch {
namespace {

using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

// The entry point GCC's OpenMP gives compiled code; LLVM's and Intel's runtimes have it too.
Parallel parallel() {
  static const Parallel found = reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  return found;
}

struct Loop {
  std::atomic<int64_t> next{0};
  std::atomic<int> workers{0};
  int64_t count;
  Task task;
  void* context;
};

void member(void* data) {
  Loop& loop = *static_cast<Loop*>(data);
  const int worker = loop.workers.fetch_add(1, std::memory_order_relaxed);
  for (;;) {
    const int64_t i = loop.next.fetch_add(1, std::memory_order_relaxed);
    if (i >= loop.count) return;
    loop.task(loop.context, worker, i);
  }
}

constexpr int64_t kPieceBytes = 128 << 10;  // below this a handoff costs more than it gains

}  // namespace

void run_tasks(int threads, int64_t count, Task task, void* context) {
  const int64_t wanted = threads < count ? threads : count;
  Loop loop;
  loop.count = count;
  loop.task = task;
  loop.context = context;
  if (wanted > 1 && parallel()) {
    parallel()(member, &loop, static_cast<unsigned>(wanted), 0);
  } else {
    member(&loop);
  }
}

const char* team_name() { return parallel() ? "openmp" : "none"; }

int pieces(int threads, int64_t bytes) {
  const int64_t worth = bytes / kPieceBytes;
  return worth < 2 ? 1 : static_cast<int>(worth < threads ? worth : threads);
}

}  // namespace anabranch
