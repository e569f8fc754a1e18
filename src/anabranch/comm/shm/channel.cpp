#include "channel.h"

#include <algorithm>
#include <cstring>

#include "../../ops/cpu/team.h"

namespace anabranch::shm {
namespace {

enum Verb : uint32_t { kBarrier, kAllGather, kReduceScatter, kAllReduce, kAllToAll, kBroadcast, kMerge };
constexpr const char* kNames[] = {"barrier", "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast",
                                  "merge_partials"};

constexpr int64_t kPage = 4096;
constexpr int64_t kBlock = 64 << 10;  // bytes a thread copies or sums at a time
constexpr int64_t kTable = kMaxRanks * sizeof(int64_t);  // sizes at the start of an all_to_all's slots
// Bytes all members put into an all_reduce up to which one wait is cheaper than two: of a pair, of more.
constexpr int64_t kSmallPair = 128 << 10, kSmallSum = 32 << 10;

int64_t up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }
int64_t down(int64_t n, int64_t unit) { return n / unit * unit; }
int64_t itemsize(Type type) { return type == Type::f32 ? 4 : 2; }

struct CopyJob {
  char* to;
  const char* from;
  int64_t bytes;
};

void copy_task(void* context, int, int64_t i) {
  const CopyJob& job = *static_cast<CopyJob*>(context);
  memcpy(job.to + i * kBlock, job.from + i * kBlock, std::min(kBlock, job.bytes - i * kBlock));
}

// The part of [at, at + bytes) that lies in slice r of `unit` bytes: where, and how much.
Span within(int64_t bytes, int64_t r, int64_t unit) {
  const int64_t from = std::min(bytes, r * unit);
  return {from, std::min(bytes, from + unit) - from};
}

int64_t longest(const std::vector<Span>& parts) {
  int64_t most = 0;
  for (const Span& p : parts) most = std::max(most, p.bytes);
  return most;
}

int64_t total(const std::vector<Span>& parts) {
  int64_t all = 0;
  for (const Span& p : parts) all += p.bytes;
  return all;
}

int64_t rounds_of(int64_t bytes, int64_t unit) { return std::max<int64_t>(1, (bytes + unit - 1) / unit); }

}  // namespace

Channel::Channel(Region& region, std::vector<int> members, int me, const Kernels* kernels, int threads)
    : region_(region),
      members_(std::move(members)),
      n_(static_cast<int>(members_.size())),
      me_(me),
      kernels_(kernels),
      threads_(threads),
      slot_(static_cast<int64_t>(region.slot_bytes())),
      parts_(n_) {
  char* base = region.group(members_, me);
  lines_ = reinterpret_cast<Line*>(base);
  slots_ = base + up(n_ * sizeof(Line), kPage);
}

char* Channel::slot(int member, uint64_t number) const {
  return slots_ + (2 * member + static_cast<int64_t>(number % 2)) * up(slot_, kPage);
}

// After this the own slot of the slice may be written.
Channel::Slice Channel::begin(const char* verb, uint32_t id, uint64_t bytes, uint64_t rounds) {
  const uint64_t number = lines_[me_].posted.load(std::memory_order_relaxed) + 1;
  for (int j = 0; j < n_; ++j)
    if (j != me_) region_.wait(lines_[j], number - 1, {verb, &members_, members_[j]});
  return {verb, number, {id, static_cast<uint32_t>(rounds), bytes}};
}

void Channel::post(const Slice& s) {
  lines_[me_].note[s.number % 2] = s.note;
  Region::post(lines_[me_], s.number);
}

void Channel::await(const Slice& s, int peer) const {
  region_.wait(lines_[peer], s.number, {s.verb, &members_, members_[peer]});
  const Line::Note& theirs = lines_[peer].note[s.number % 2];
  if (theirs.verb != s.note.verb || theirs.bytes != s.note.bytes)
    disagree(s, peer, std::string(kNames[theirs.verb]) + " of " + std::to_string(theirs.bytes) + " bytes",
             std::string(s.verb) + " of " + std::to_string(s.note.bytes));
}

void Channel::await_all(const Slice& s) const {
  for (int j = 0; j < n_; ++j)
    if (j != me_) await(s, j);
}

void Channel::disagree(const Slice& s, int peer, const std::string& theirs, const std::string& mine) const {
  region_.fail(members_[me_]);
  throw Broken(std::string(s.verb) + " among ranks " + ranks_text(members_) + ": rank " +
               std::to_string(members_[peer]) + " is in " + theirs + ", rank " + std::to_string(members_[me_]) + " in " +
               mine);
}

void Channel::copy(char* to, const char* from, int64_t bytes) const {
  if (!bytes) return;
  CopyJob job{to, from, bytes};
  if (threads_ == 1 || pieces(threads_, bytes) == 1) {
    memcpy(to, from, bytes);
    return;
  }
  run_tasks(threads_, (bytes + kBlock - 1) / kBlock, copy_task, &job);
}

// In member order, in fp32, rounded once.
void Channel::sum(Type type, const std::vector<const char*>& parts, char* out, int64_t bytes) const {
  std::vector<char*> at(n_);
  std::vector<int64_t> stride(n_, kBlock);
  const auto part = [&](int64_t from, int64_t rows, int64_t row) {
    for (int j = 0; j < n_; ++j) at[j] = const_cast<char*>(parts[j]) + from;
    SumArgs a{};
    a.type = type;
    a.parts = at.data();
    a.stride_bytes = stride.data();
    a.out = out + from;
    a.members = n_;
    a.rows = rows;
    a.row = row / itemsize(type);
    a.out_stride_bytes = kBlock;
    a.threads = threads_;
    kernels_->sum_members(a);
  };
  const int64_t whole = down(bytes, kBlock);
  if (whole) part(0, whole / kBlock, kBlock);
  if (bytes > whole) part(whole, 1, bytes - whole);
}

void Channel::barrier() {
  const Slice s = begin("barrier", kBarrier, 0);
  post(s);
  await_all(s);
}

void Channel::all_gather(const char* x, char* out, const std::vector<Span>& parts) {
  const int64_t rounds = rounds_of(longest(parts), slot_);
  for (int64_t r = 0; r < rounds; ++r) {
    const Slice s = begin("all_gather", kAllGather, total(parts));
    const Span mine = within(parts[me_].bytes, r, slot_);
    copy(slot(me_, s.number), x + mine.at, mine.bytes);
    post(s);
    copy(out + parts[me_].at + mine.at, x + mine.at, mine.bytes);
    for (int i = 1; i < n_; ++i) {
      const int j = (me_ + i) % n_;
      const Span theirs = within(parts[j].bytes, r, slot_);
      if (!theirs.bytes) continue;
      await(s, j);
      copy(out + parts[j].at + theirs.at, slot(j, s.number), theirs.bytes);
    }
  }
}

// A slot holds a slice for each peer, in member order without the sender.
void Channel::reduce_scatter(Type type, const char* x, char* out, const std::vector<Span>& parts) {
  const int64_t unit = down(slot_ / (n_ - 1), 64), rounds = rounds_of(longest(parts), unit);
  for (int64_t r = 0; r < rounds; ++r) {
    const Slice s = begin("reduce_scatter", kReduceScatter, total(parts));
    for (int j = 0; j < n_; ++j) {
      const Span theirs = within(parts[j].bytes, r, unit);
      if (j != me_) copy(slot(me_, s.number) + (j - (j > me_)) * unit, x + parts[j].at + theirs.at, theirs.bytes);
    }
    post(s);
    const Span mine = within(parts[me_].bytes, r, unit);
    if (!mine.bytes) continue;
    await_all(s);
    for (int j = 0; j < n_; ++j) parts_[j] = slot(j, s.number) + (me_ - (me_ > j)) * unit;
    parts_[me_] = x + parts[me_].at + mine.at;
    sum(type, parts_, out + mine.at, mine.bytes);
  }
}

// Everyone reads everything: one wait.
void Channel::all_reduce_small(Type type, const char* x, char* out, int64_t bytes) {
  for (int64_t r = 0; r < rounds_of(bytes, slot_); ++r) {
    const Slice s = begin("all_reduce", kAllReduce, bytes);
    const Span now = within(bytes, r, slot_);
    copy(slot(me_, s.number), x + now.at, now.bytes);
    post(s);
    await_all(s);
    for (int j = 0; j < n_; ++j) parts_[j] = slot(j, s.number);
    parts_[me_] = x + now.at;
    sum(type, parts_, out + now.at, now.bytes);
  }
}

// Above that, each member sums a share and all gather the shares: equal in bits, as every element is
// still summed once, in member order.
void Channel::all_reduce(Type type, const char* x, char* out, int64_t bytes) {
  if (bytes * n_ <= (n_ == 2 ? kSmallPair : kSmallSum)) return all_reduce_small(type, x, out, bytes);
  const int64_t unit = down(slot_ / n_, 64) * n_;
  for (int64_t r = 0; r < rounds_of(bytes, unit); ++r) {
    const Span now = within(bytes, r, unit);
    const int64_t share = up((now.bytes + n_ - 1) / n_, 64);
    const auto of = [&](int j) { return within(now.bytes, j, share); };
    const Slice scatter = begin("all_reduce", kAllReduce, bytes);
    for (int j = 0; j < n_; ++j)
      if (j != me_) copy(slot(me_, scatter.number) + of(j).at, x + now.at + of(j).at, of(j).bytes);
    post(scatter);
    await_all(scatter);
    for (int j = 0; j < n_; ++j) parts_[j] = slot(j, scatter.number) + of(me_).at;
    parts_[me_] = x + now.at + of(me_).at;
    const Slice gather = begin("all_reduce", kAllReduce, bytes);
    char* mine = out + now.at + of(me_).at;
    if (of(me_).bytes) sum(type, parts_, mine, of(me_).bytes);
    copy(slot(me_, gather.number), mine, of(me_).bytes);
    post(gather);
    for (int i = 1; i < n_; ++i) {
      const int j = (me_ + i) % n_;
      if (!of(j).bytes) continue;
      await(gather, j);
      copy(out + now.at + of(j).at, slot(j, gather.number), of(j).bytes);
    }
  }
}

// A member's bytes to all peers are one stream, cut into slices wherever that falls; the first slot says
// how much is whose. Only so are a few long parts among many short ones moved in few slices.
void Channel::all_to_all(const char* x, char* out, const std::vector<Span>& send, const std::vector<Span>& recv) {
  const int64_t unit = slot_ - kTable;
  const int64_t outgoing = total(send) - send[me_].bytes;
  std::vector<int64_t> starts(n_);  // of my part in each peer's stream
  uint32_t rounds = static_cast<uint32_t>(rounds_of(outgoing, unit));
  const uint32_t own_rounds = rounds;
  for (uint32_t r = 0; r < rounds; ++r) {
    const Slice s = begin("all_to_all", kAllToAll, 0, own_rounds);
    char* to = slot(me_, s.number);
    auto* sizes = reinterpret_cast<int64_t*>(to);
    int64_t at = 0;
    for (int j = 0; j < n_; ++j) {
      if (r == 0) sizes[j] = send[j].bytes;
      if (j == me_) continue;
      const int64_t low = std::max(at, int64_t{r} * unit), high = std::min(at + send[j].bytes, (int64_t{r} + 1) * unit);
      if (low < high) copy(to + kTable + low - int64_t{r} * unit, x + send[j].at + low - at, high - low);
      at += send[j].bytes;
    }
    post(s);
    if (r == 0) {
      copy(out + recv[me_].at, x + send[me_].at, send[me_].bytes);
      for (int j = 0; j < n_; ++j) {
        if (j == me_) continue;
        await(s, j);
        const auto* theirs = reinterpret_cast<const int64_t*>(slot(j, s.number));
        if (theirs[me_] != recv[j].bytes)
          disagree(s, j, "all_to_all with " + std::to_string(theirs[me_]) + " bytes for rank " + std::to_string(members_[me_]),
                   "one that expects " + std::to_string(recv[j].bytes));
        starts[j] = 0;
        for (int i = 0; i < me_; ++i) starts[j] += i == j ? 0 : theirs[i];
        rounds = std::max(rounds, lines_[j].note[s.number % 2].rounds);
      }
    }
    for (int i = 1; i < n_; ++i) {
      const int j = (me_ + i) % n_;
      const int64_t low = std::max(starts[j], int64_t{r} * unit);
      const int64_t high = std::min(starts[j] + recv[j].bytes, (int64_t{r} + 1) * unit);
      if (low >= high) continue;
      await(s, j);
      copy(out + recv[j].at + low - starts[j], slot(j, s.number) + kTable + low - int64_t{r} * unit, high - low);
    }
  }
}

void Channel::broadcast(const char* x, char* out, int64_t bytes, int root) {
  for (int64_t r = 0; r < rounds_of(bytes, slot_); ++r) {
    const Slice s = begin("broadcast", kBroadcast, bytes);
    const Span now = within(bytes, r, slot_);
    if (me_ == root) copy(slot(me_, s.number), x + now.at, now.bytes);
    post(s);
    if (me_ != root) await(s, root);
    copy(out + now.at, me_ == root ? x + now.at : slot(root, s.number), now.bytes);
  }
}

char* Channel::lend() { return slot(me_, begin("landing", kMerge, 0).number); }

// As many rows as fit a slot at a time, or if one row is too wide as many heads of each owner.
void Channel::merge_partials(const Partials& p) {
  const int64_t width = p.width * itemsize(p.type), head_bytes = n_ * (width + 4);
  if (partials_fit(p.rows, n_ * p.heads, width)) return merge_round(p, 0, p.rows, 0, p.heads);
  const int64_t room = slot_ - 64, rows = room / (head_bytes * p.heads);
  const int64_t row_step = std::max<int64_t>(1, rows), head_step = rows ? p.heads : room / head_bytes;
  if (!head_step)
    throw std::invalid_argument("merge_partials: one head of " + std::to_string(n_) + " members takes " +
                                std::to_string(head_bytes) + " bytes, a slot has " + std::to_string(room));
  for (int64_t b = 0; b < p.rows; b += row_step)
    for (int64_t h = 0; h < p.heads; h += head_step)
      merge_round(p, b, std::min(row_step, p.rows - b), h, std::min(head_step, p.heads - h));
}

// The round's rows and heads of every owner, laid out [rows, members * heads, width] behind their lse: the
// peers' are shown to them; the own ones, if wanted there, stay in this core's cache.
void Channel::pack(const Partials& p, char* slot, int64_t row, int64_t rows, int64_t head, int64_t heads,
                   bool own) const {
  const int64_t width = p.width * itemsize(p.type), group = n_ * heads;
  const int64_t run = p.out_bytes[1] == width ? heads : 1;  // heads that lie behind one another
  char* to = slot + partials_at(rows, group);
  auto* lse = reinterpret_cast<float*>(slot);
  for (int64_t b = row; b < row + rows; ++b)
    for (int owner = 0; owner < n_; ++owner) {
      const char* from = p.out + b * p.out_bytes[0] + (owner * p.heads + head) * p.out_bytes[1];
      const float* stats = p.lse + b * p.lse_stride[0] + (owner * p.heads + head) * p.lse_stride[1];
      for (int64_t h = 0; h < heads; ++h) *lse++ = stats[h * p.lse_stride[1]];
      for (int64_t h = 0; h < heads; h += run, to += run * width) {
        if (owner != me_ || own) memcpy(to, from + h * p.out_bytes[1], run * width);
      }
    }
}

// Shown to the peers unless written there already, then the own heads are merged in place. The merge wants
// its members one stride apart: any two are, so that of two members the own part is read where it is.
void Channel::merge_round(const Partials& p, int64_t row, int64_t rows, int64_t head, int64_t heads) {
  const int64_t width = p.width * itemsize(p.type), group = n_ * heads, mine_at = me_ * heads;
  const Slice s = begin("merge_partials", kMerge, p.rows * n_ * p.heads * width);
  char* mine = slot(me_, s.number);
  const bool lent = p.out == mine + partials_at(rows, group);
  const bool dense = heads == p.heads && p.out_bytes[1] == width && p.out_bytes[0] == group * width &&
                     p.lse_stride[1] == 1 && p.lse_stride[0] == group;
  const bool in_place = n_ == 2 && dense && !lent;
  if (!lent) pack(p, mine, row, rows, head, heads, !in_place);
  post(s);
  await_all(s);
  const char* out[2];
  const float* lse[2];
  for (int j = 0; j < 2; ++j) {
    out[j] = slot(j, s.number) + partials_at(rows, group) + mine_at * width;
    lse[j] = reinterpret_cast<const float*>(slot(j, s.number)) + mine_at;
    if (!in_place || j != me_) continue;
    out[j] = p.out + row * p.out_bytes[0] + mine_at * width;
    lse[j] = p.lse + row * group + mine_at;
  }
  scratch_.resize(rows * heads);
  MergeArgs a{};
  a.type = a.out_type = p.type;
  a.partials = out[0];
  a.lse = lse[0];
  a.sink = p.sink ? p.sink + head : nullptr;
  a.sink_stride = 1;
  a.out = p.merged + (row * p.heads + head) * width;
  a.lse_out = scratch_.data();
  a.members = n_;
  a.rows = rows;
  a.heads = heads;
  a.width = p.width;
  const int64_t strides[] = {out[1] - out[0], group * width, width};
  const int64_t stats[] = {(reinterpret_cast<intptr_t>(lse[1]) - reinterpret_cast<intptr_t>(lse[0])) / 4, group, 1};
  for (int i = 0; i < 3; ++i) a.partials_bytes[i] = strides[i], a.lse_stride[i] = stats[i];
  a.out_bytes[0] = p.heads * width;
  a.out_bytes[1] = width;
  a.lse_out_stride[0] = heads;
  a.lse_out_stride[1] = 1;
  a.to_natural = 1.0f;
  a.threads = threads_;
  kernels_->merge_partials(a);
}

}  // namespace anabranch::shm
