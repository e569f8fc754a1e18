// The verbs of one group over shared memory.
//
// Protocol: every member owns a line and two slots. A verb is a run of slices; slice k goes into slot
// k % 2 and is posted by setting the line to k, the only flag there is. A member writes slice k once all
// peers have posted k - 1, as each of them has by then read slice k - 2, which lay in the same slot. So
// one wait per slice suffices, and what was read of slice k stays in place until this member posts
// k + 1. All members post every slice of every verb, also those that have nothing to send.
#pragma once

#include <cstdint>
#include <vector>

#include "../../ops/cpu/kernels.h"
#include "region.h"

namespace anabranch::shm {

// Bytes: where a run starts and how long it is.
struct Span {
  int64_t at, bytes;
};

struct Partials {
  Type type;
  const char* out;  // [rows, members * heads, width]
  const float* lse;  // [rows, members * heads]
  const float* sink;  // [heads] or null
  char* merged;  // [rows, heads, width], dense
  int64_t rows, heads, width;
  int64_t out_bytes[2], lse_stride[2];  // of a row, of a head
};

class Channel {
 public:
  Channel(Region& region, std::vector<int> members, int me, const Kernels* kernels, int threads);

  int size() const { return n_; }
  int me() const { return me_; }

  void barrier();
  // parts[m]: where member m's bytes belong in out.
  void all_gather(const char* x, char* out, const std::vector<Span>& parts);
  // parts[m]: what of x member m sums.
  void reduce_scatter(Type type, const char* x, char* out, const std::vector<Span>& parts);
  void all_reduce(Type type, const char* x, char* out, int64_t bytes);
  void all_to_all(const char* x, char* out, const std::vector<Span>& send, const std::vector<Span>& recv);
  void broadcast(const char* x, char* out, int64_t bytes, int root);
  void merge_partials(const Partials& p);

  // This member's slot of the next slice, to be written by the caller before the verb that posts it.
  char* lend();
  // Where partials of the whole group [rows, heads, width] lie in a slot; their lse is at its start.
  static int64_t partials_at(int64_t rows, int64_t heads) { return (rows * heads * 4 + 63) / 64 * 64; }
  bool partials_fit(int64_t rows, int64_t heads, int64_t row_bytes) const {
    return partials_at(rows, heads) + rows * heads * row_bytes <= slot_;
  }

 private:
  struct Slice {
    const char* verb;
    uint64_t number;
    Line::Note note;
  };

  Slice begin(const char* verb, uint32_t id, uint64_t bytes, uint64_t rounds = 0);
  void post(const Slice& s);
  void await(const Slice& s, int peer) const;
  void await_all(const Slice& s) const;
  [[noreturn]] void disagree(const Slice& s, int peer, const std::string& theirs, const std::string& mine) const;
  char* slot(int member, uint64_t number) const;
  void copy(char* to, const char* from, int64_t bytes) const;
  void sum(Type type, const std::vector<const char*>& parts, char* out, int64_t bytes) const;
  void all_reduce_small(Type type, const char* x, char* out, int64_t bytes);
  void merge_round(const Partials& p, int64_t row, int64_t rows, int64_t head, int64_t heads);
  void pack(const Partials& p, char* slot, int64_t row, int64_t rows, int64_t head, int64_t heads, bool own) const;

  Region& region_;
  const std::vector<int> members_;
  const int n_, me_;
  const Kernels* kernels_;
  const int threads_;
  const int64_t slot_;
  Line* lines_;
  char* slots_;
  std::vector<const char*> parts_;
  std::vector<float> scratch_;
};

}  // namespace anabranch::shm
