// One memory file that all ranks of a model copy map: who is here, and where each group's slots lie.
//
// Owns the file's layout, the handshake, the allocation of groups and the wait with its deadline.
// Knows no verb. Offsets instead of pointers, as every process maps the file elsewhere; the file has
// no name and ends with its last process.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace anabranch::shm {

constexpr int kMaxRanks = 64;     // members of a group are one word's bits
constexpr int kMaxGroups = 2048;  // subsets of 4 axes x 64 ranks, and some to spare
constexpr int kCpuWords = 16;     // masks of up to 1024 cores
constexpr uint64_t kLine = 64;

// A collective that did not complete; becomes Python's CommError.
struct Broken : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// What a member has posted: a count of slices, ever growing, and what the last two were. Sleepers
// are the threads that wait in the kernel for `posted` to change.
struct alignas(kLine) Line {
  std::atomic<uint64_t> posted;
  std::atomic<uint32_t> sleepers;
  struct Note {
    uint32_t verb, rounds;
    uint64_t bytes;
  } note[2];
};
static_assert(sizeof(Line) == kLine && std::atomic<uint64_t>::is_always_lock_free);

struct alignas(kLine) RankRecord {
  std::atomic<uint32_t> taken;
  int32_t pid;
  uint64_t nonce[2];
  uint64_t cpus[kCpuWords];
};

struct alignas(32) GroupEntry {
  std::atomic<uint64_t> members;  // published last
  uint64_t offset;
};

struct Header {
  std::atomic<uint64_t> magic;  // set last
  uint64_t nonce[2];
  uint64_t bytes, slot;
  uint32_t world;
  alignas(kLine) std::atomic<uint64_t> next;  // first byte no group has
  std::atomic<uint32_t> groups;
  alignas(kLine) Line arrived;
  alignas(kLine) std::atomic<uint32_t> failed;  // rank + 1 of the first that failed
  RankRecord ranks[kMaxRanks];
  GroupEntry table[kMaxGroups];
};

// Who waits for whom, in which verb: for the message when it does not end.
struct Where {
  const char* verb;
  const std::vector<int>* members;
  int peer;  // rank
};

class Region {
 public:
  // Bytes of a file for `world` ranks with slots of `slot` bytes: sparse, only what is touched counts.
  static uint64_t needed(int world, uint64_t slot);
  // Joins as `rank` of `world`, and returns when all have; rank 0 writes the header of a file of zeros.
  // spin: seconds, or less than 0 for what suits the cores. Throws std::invalid_argument for a file of
  // another run, Broken when a rank does not come within `deadline` seconds.
  Region(char* base, uint64_t bytes, int rank, int world, uint64_t slot, const uint64_t nonce[2], double deadline,
         double spin);
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  // The group's memory: lines of all members, then their slots. Same bytes for every member.
  char* group(const std::vector<int>& members, int me);
  uint64_t slot_bytes() const { return header_->slot; }
  uint64_t offset(const char* p) const { return p - base_; }
  int rank() const { return rank_; }
  int world() const { return static_cast<int>(header_->world); }
  double spin_seconds() const { return spin_ * 1e-9; }

  // Returns once line.posted >= count; throws Broken past the deadline or when the peer is gone.
  void wait(Line& line, uint64_t count, const Where& where) const {
    if (line.posted.load(std::memory_order_acquire) < count) wait_long(line, count, where);
  }
  static void post(Line& line, uint64_t count);
  // Tells every rank that waits, now or later, that `rank` will not come.
  void fail(int rank) const;

  // Called now and then in long waits, outside any lock: may throw to end the wait.
  void (*interrupted)() = nullptr;

 private:
  void wait_long(Line& line, uint64_t count, const Where& where) const;
  std::string trouble(int peer) const;
  std::string peer_state(int rank) const;
  static void format(char* base, uint64_t bytes, int world, uint64_t slot, const uint64_t nonce[2]);
  void await_header(uint64_t bytes, int world, const uint64_t nonce[2]) const;
  void measure_spin(double spin);

  Header* header_;
  char* base_;
  int rank_;
  double deadline_;
  int64_t least_spin_ = 0;    // nanoseconds
  mutable int64_t spin_ = 0;  // now: longer after sleeps that were short
  int pidfds_[kMaxRanks];
  std::vector<uint64_t> asked_;  // groups this rank has asked for
};

std::string ranks_text(const std::vector<int>& members);

}  // namespace anabranch::shm
