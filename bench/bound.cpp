// A plain copy, flag and add between two pinned processes: what a two-rank sum costs at least.
//
// Prints one JSON line a size: median microseconds of a round in which each process copies its bytes into
// memory that both map, sets a flag, waits for the other's and adds the other's floats to its own. `stored`
// uses ordinary stores, `streamed` stores that pass the cache. Of the bench's own; the package has no use of it.
#include <sys/mman.h>
#include <sys/wait.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int kBlocks = 101, kRounds = 16;

struct alignas(128) Flag {
  std::atomic<uint64_t> posted;
};

void pin(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  sched_setaffinity(0, sizeof set, &set);
}

void await(const Flag& flag, uint64_t count) {
  while (flag.posted.load(std::memory_order_acquire) < count) {
#if defined(__x86_64__)
    _mm_pause();
#endif
  }
}

void stream(float* to, const float* from, size_t n) {
#if defined(__x86_64__)
  for (size_t i = 0; i < n; i += 4) _mm_stream_ps(to + i, _mm_loadu_ps(from + i));
  _mm_sfence();
#else
  memcpy(to, from, n * sizeof(float));
#endif
}

// Two slots a process, by turns, so that one wait a round suffices.
double run(int me, Flag* flags, float* slots, size_t n, bool streamed, uint64_t& count) {
  std::vector<float> own(n, 1.0f), sum(n);
  std::vector<double> taken;
  for (int block = 0; block < kBlocks; ++block) {
    const auto start = std::chrono::steady_clock::now();
    for (int round = 0; round < kRounds; ++round) {
      ++count;
      float* mine = slots + (2 * me + count % 2) * n;
      const float* theirs = slots + (2 * !me + count % 2) * n;
      if (streamed)
        stream(mine, own.data(), n);
      else
        memcpy(mine, own.data(), n * sizeof(float));
      flags[me].posted.store(count, std::memory_order_release);
      await(flags[!me], count);
      for (size_t i = 0; i < n; ++i) sum[i] = own[i] + theirs[i];
      __asm__ volatile("" : : "r"(sum.data()) : "memory");
    }
    taken.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count() / kRounds);
  }
  std::nth_element(taken.begin(), taken.begin() + kBlocks / 2, taken.end());
  return taken[kBlocks / 2];
}

}  // namespace

// bound CORE CORE BYTES...
int main(int count, char** words) {
  if (count < 4) return 2;
  constexpr size_t kMost = 4 << 20;
  char* memory = static_cast<char*>(
      mmap(nullptr, 4096 + 4 * kMost, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  if (memory == MAP_FAILED) return 1;
  auto* flags = reinterpret_cast<Flag*>(memory);
  const int me = fork() ? 0 : 1;
  pin(atoi(words[1 + me]));
  uint64_t turn = 0;
  for (int i = 3; i < count; ++i) {
    const size_t n = strtoull(words[i], nullptr, 10) / sizeof(float);
    if (n % 4 || n * sizeof(float) > kMost) return 2;
    float* slots = reinterpret_cast<float*>(memory + 4096);
    const double stored = run(me, flags, slots, n, false, turn), streamed = run(me, flags, slots, n, true, turn);
    if (me == 0) printf("{\"bytes\": %zu, \"stored_us\": %.2f, \"streamed_us\": %.2f}\n", n * 4, stored, streamed);
  }
  if (me == 0) wait(nullptr);
}
