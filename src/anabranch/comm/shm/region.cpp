#include "region.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>

#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace anabranch::shm {
namespace {

constexpr uint64_t kMagic = 0x31686372616e616eull;
constexpr int64_t kTick = 50'000'000;      // ns of sleep between two looks at the peer
constexpr double kDefaultSpin = 30e-6;     // a futex wake costs about as much, on bare metal
constexpr int64_t kMostSpin = 480'000;     // ns
constexpr int64_t kSoon = 1'000'000;       // ns: a sleep this short was hardly worth it
constexpr uint64_t kPage = 4096;
constexpr const char* kFar = "runs on another host, which shared memory does not reach";

constexpr uint64_t up(uint64_t n, uint64_t unit) { return (n + unit - 1) / unit * unit; }

int64_t now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000ll + t.tv_nsec;
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb");
#endif
}

// The low half of a counter is what the kernel compares: it changes at every post.
uint32_t* futex_word(std::atomic<uint64_t>& counter) {
  static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);
  return reinterpret_cast<uint32_t*>(&counter);
}

void sleep_on(std::atomic<uint64_t>& counter, uint64_t seen) {
  const timespec tick{0, kTick};
  syscall(SYS_futex, futex_word(counter), FUTEX_WAIT, static_cast<uint32_t>(seen), &tick, nullptr, 0);
}

int watch(int pid) {
#ifdef SYS_pidfd_open
  return static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
#else
  return -1;
#endif
}

bool ended(int pidfd, int pid) {
  if (pidfd < 0) return kill(pid, 0) && errno == ESRCH;
  pollfd p{pidfd, POLLIN, 0};
  return poll(&p, 1, 0) > 0;
}

std::string seconds_text(double seconds) {
  char text[32];
  snprintf(text, sizeof text, "%g s", seconds);
  return text;
}

uint64_t group_bytes(size_t members, uint64_t slot) {
  return up(members * kLine, kPage) + members * 2 * up(slot, kPage);
}

}  // namespace

std::string ranks_text(const std::vector<int>& members) {
  std::string text = "(";
  for (size_t i = 0; i < members.size(); ++i) text += (i ? ", " : "") + std::to_string(members[i]);
  return text + ")";
}

uint64_t Region::needed(int world, uint64_t slot) {
  // a rank is in at most 16 groups (subsets of four axes); the same again to spare
  return up(sizeof(Header), kPage) + 32 * (world * kPage + group_bytes(world, slot));
}

void Region::format(char* base, uint64_t bytes, int world, uint64_t slot, const uint64_t nonce[2]) {
  auto* header = new (base) Header{};  // the file is zeros: every count starts there
  header->nonce[0] = nonce[0];
  header->nonce[1] = nonce[1];
  header->bytes = bytes;
  header->slot = slot;
  header->world = static_cast<uint32_t>(world);
  header->next = up(sizeof(Header), kPage);
  header->magic.store(kMagic, std::memory_order_release);
}

// Rank 0 made the header, or will.
void Region::await_header(uint64_t bytes, int world, const uint64_t nonce[2]) const {
  const int64_t end = now() + static_cast<int64_t>(deadline_ * 1e9);
  while (header_->magic.load(std::memory_order_acquire) != kMagic) {
    if (now() > end) throw Broken("joining: rank 0 did not come within " + seconds_text(deadline_) + "; it ended, or " + kFar);
    usleep(200);
  }
  if (memcmp(header_->nonce, nonce, 16))
    throw std::invalid_argument("the shared memory belongs to another run; pass the launcher's endpoint on unchanged");
  if (header_->bytes != bytes || header_->world != static_cast<uint32_t>(world))
    throw std::invalid_argument("the shared memory was made for " + std::to_string(header_->world) + " ranks and " +
                                std::to_string(header_->bytes) + " bytes, not for " + std::to_string(world) + " and " +
                                std::to_string(bytes));
}

Region::Region(char* base, uint64_t bytes, int rank, int world, uint64_t slot, const uint64_t nonce[2], double deadline,
               double spin)
    : header_(reinterpret_cast<Header*>(base)), base_(base), rank_(rank), deadline_(deadline) {
  for (int& fd : pidfds_) fd = -1;
  if (world < 1 || world > kMaxRanks || rank < 0 || rank >= world || bytes < needed(world, slot))
    throw std::invalid_argument("rank " + std::to_string(rank) + " of " + std::to_string(world) + " with " +
                                std::to_string(bytes) + " bytes; at most 64 ranks, and needed() bytes");
  if (rank == 0) format(base, bytes, world, slot, nonce);
  await_header(bytes, world, nonce);
  RankRecord& mine = header_->ranks[rank];
  if (mine.taken.exchange(1))
    throw std::invalid_argument("rank " + std::to_string(rank) + " has already joined this segment");
  mine.pid = getpid();
  cpu_set_t cores;
  CPU_ZERO(&cores);
  sched_getaffinity(0, sizeof cores, &cores);
  for (int c = 0; c < kCpuWords * 64 && c < CPU_SETSIZE; ++c)
    if (CPU_ISSET(c, &cores)) mine.cpus[c / 64] |= 1ull << (c % 64);
  memcpy(mine.nonce, nonce, 16);  // the peers' half of the handshake
  header_->arrived.posted.fetch_add(1);
  syscall(SYS_futex, futex_word(header_->arrived.posted), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
  const int64_t end = now() + static_cast<int64_t>(deadline * 1e9);
  for (uint64_t seen; (seen = header_->arrived.posted.load()) < static_cast<uint64_t>(world);) {
    if (now() > end) {
      std::string missing;
      for (int r = 0; r < world; ++r)
        if (memcmp(header_->ranks[r].nonce, nonce, 16)) missing += (missing.empty() ? "" : ", ") + std::to_string(r);
      throw Broken("joining: rank " + missing + " did not come within " + seconds_text(deadline) +
                   "; it ended, or " + kFar);
    }
    sleep_on(header_->arrived.posted, seen);
  }
  for (int r = 0; r < world; ++r)
    if (header_->ranks[r].pid != getpid()) pidfds_[r] = watch(header_->ranks[r].pid);
  measure_spin(spin);
}

Region::~Region() {
  for (int fd : pidfds_)
    if (fd >= 0) close(fd);
}

// Spinning helps only where every rank has a core: else the spinner holds up whom it waits for.
void Region::measure_spin(double spin) {
  int cores = 0;
  for (int w = 0; w < kCpuWords; ++w) {
    uint64_t any = 0;
    for (int r = 0; r < world(); ++r) any |= header_->ranks[r].cpus[w];
    cores += __builtin_popcountll(any);
  }
  if (spin < 0) spin = world() > cores ? 0 : kDefaultSpin;
  least_spin_ = spin_ = static_cast<int64_t>(spin * 1e9);
}

// Member 0 takes the memory and publishes it; the k-th group a rank asks for among the same members is
// the k-th published, so that two instances never share an epoch.
char* Region::group(const std::vector<int>& members, int me) {
  uint64_t mask = 0, before = 0;
  for (int r : members) mask |= 1ull << r;
  for (uint64_t m : asked_) before += m == mask;
  asked_.push_back(mask);
  const uint64_t bytes = group_bytes(members.size(), header_->slot);
  if (me == 0) {
    const uint64_t offset = header_->next.fetch_add(bytes);
    const uint32_t index = header_->groups.fetch_add(1);
    if (offset + bytes > header_->bytes || index >= kMaxGroups)
      throw Broken("shared memory of " + std::to_string(header_->bytes) + " bytes has no room for " +
                   std::to_string(index + 1) + " groups; make the groups of one model copy once");
    header_->table[index].offset = offset;
    header_->table[index].members.store(mask, std::memory_order_release);
    return base_ + offset;
  }
  const int64_t end = now() + static_cast<int64_t>(deadline_ * 1e9);
  for (;;) {
    uint64_t left = before;
    for (const GroupEntry& entry : header_->table) {
      if (entry.members.load(std::memory_order_acquire) != mask) continue;
      if (!left--) return base_ + entry.offset;
    }
    std::string why = trouble(members[0]);
    if (now() > end) why = "rank " + std::to_string(members[0]) + " did not within " + seconds_text(deadline_);
    if (!why.empty()) throw Broken("opening group " + ranks_text(members) + ": " + why);
    usleep(200);
  }
}

void Region::post(Line& line, uint64_t count) {
  line.posted.store(count);     // sequentially consistent, as is the sleeper's count:
  if (line.sleepers.load())     // either it is seen here, or the sleeper sees the post
    syscall(SYS_futex, futex_word(line.posted), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

// Where a wake takes longer than the spin (a virtual core that had halted), two ranks that once slept would
// sleep at every wait from then on: each is woken too late for the other's spin. So a sleep that ended soon
// makes the next spin longer, and one that did not takes that back.
void Region::wait_long(Line& line, uint64_t count, const Where& where) const {
  if (spin_) {
    const int64_t end = now() + spin_;
    do {
      for (int i = 0; i < 32; ++i) {
        if (line.posted.load(std::memory_order_acquire) >= count) return;
        relax();
      }
    } while (now() < end);
  }
  const int64_t start = now();
  for (;;) {
    line.sleepers.fetch_add(1);
    const uint64_t seen = line.posted.load();
    if (seen < count) sleep_on(line.posted, seen);
    line.sleepers.fetch_sub(1);
    if (line.posted.load(std::memory_order_acquire) >= count) {
      spin_ = now() - start < kSoon ? std::min(2 * spin_, std::max(kMostSpin, least_spin_)) : least_spin_;
      return;
    }
    if (now() - start < kTick) continue;
    if (interrupted) interrupted();
    std::string why = trouble(where.peer);
    if (why.empty() && now() - start > deadline_ * 1e9) {
      fail(where.peer);
      why = "rank " + std::to_string(where.peer) + " (" + peer_state(where.peer) + ") did not come within " +
            seconds_text(deadline_);
    }
    // looked at last: a peer may post, then end
    if (!why.empty() && line.posted.load(std::memory_order_acquire) < count)
      throw Broken(std::string(where.verb) + " among ranks " + ranks_text(*where.members) + ": " + why);
  }
}

std::string Region::peer_state(int rank) const {
  const int pid = header_->ranks[rank].pid;
  char path[64], text[512];
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  std::string state = "unknown";
  if (FILE* f = fopen(path, "r")) {
    const size_t n = fread(text, 1, sizeof text - 1, f);
    fclose(f);
    text[n] = 0;
    if (const char* end = strrchr(text, ')'); end && end[1]) state = std::string(1, end[2]);
  }
  return "process " + std::to_string(pid) + ", state " + state;
}

// Empty while the peer may still come. What ends one wait is left for all others to name.
std::string Region::trouble(int peer) const {
  const int pid = header_->ranks[peer].pid;
  if (pid != getpid() && ended(pidfds_[peer], pid)) {
    fail(peer);
    return "rank " + std::to_string(peer) + " (process " + std::to_string(pid) + ") has ended";
  }
  if (const uint32_t failed = header_->failed.load()) return "rank " + std::to_string(failed - 1) + " failed";
  return "";
}

void Region::fail(int rank) const {
  uint32_t none = 0;
  header_->failed.compare_exchange_strong(none, static_cast<uint32_t>(rank) + 1);
}

}  // namespace anabranch::shm
