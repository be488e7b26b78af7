#include "lockstep/shm/pool.h"

#include <algorithm>

#include "lockstep/base/str.h"
#include "lockstep/shm/errors.h"

namespace lockstep::shm {
namespace {

constexpr std::size_t kLine = 64;
constexpr std::size_t kPage = 4096;
// Grown by at least this much, so that many small tensors do not mean many system calls.
constexpr std::size_t kGrowth = std::size_t{1} << 20;

std::size_t round_up(std::size_t bytes, std::size_t to) {
  return (bytes + to - 1) / to * to;
}

}  // namespace

Pool::Pool(std::shared_ptr<Team> team)
    : team_(std::move(team)),
      memory_(*team_->pool_memory()),
      begin_(team_->layout().pool),
      committed_end_(begin_),
      free_{{begin_, memory_.size() - begin_}} {}

/// First fit. The free list's last entry reaches to the end of the reserve, so memory is reused before it grows.
std::size_t Pool::take(std::size_t bytes, std::size_t alignment) {
  for (auto each = free_.begin(); each != free_.end(); ++each) {
    const auto [offset, length] = *each;
    const auto at = round_up(offset, alignment);
    const auto skipped = at - offset;
    if (skipped > length || bytes > length - skipped) continue;
    free_.erase(each);
    if (at > offset) free_[offset] = at - offset;
    if (offset + length > at + bytes) free_[at + bytes] = offset + length - at - bytes;
    return at;
  }
  throw MemoryError(str(team_->seat().who(), ": ", readable_bytes(bytes), " do not fit into the ",
                        readable_bytes(memory_.size() - begin_),
                        " reserved for zero-copy tensors of a rank. Raise LOCKSTEP_SHM_RESERVE_BYTES."));
}

std::byte* Pool::allocate(std::size_t bytes) {
  // What exceeds the whole reserve is not rounded up: the number could wrap around.
  const auto wanted =
      bytes > memory_.size() ? bytes : round_up(std::max<std::size_t>(bytes, 1), bytes >= kPage ? kPage : kLine);
  const std::lock_guard lock(mutex_);
  const auto at = take(wanted, bytes >= kPage ? kPage : kLine);
  blocks_[at] = wanted;
  if (at + wanted > committed_end_) {
    const auto end = std::min(memory_.size(), std::max(round_up(at + wanted, kPage), committed_end_ + kGrowth));
    try {
      memory_.commit(committed_end_, end - committed_end_);
    } catch (...) {
      give_back(at);
      throw;
    }
    committed_end_ = end;
  }
  return memory_.data() + at;
}

void Pool::free(std::byte* at) noexcept {
  const std::lock_guard lock(mutex_);
  give_back(static_cast<std::size_t>(at - memory_.data()));
}

void Pool::give_back(std::size_t offset) {
  const auto block = blocks_.find(offset);
  if (block == blocks_.end()) return;
  auto bytes = block->second;
  blocks_.erase(block);
  const auto next = free_.find(offset + bytes);
  if (next != free_.end()) {
    bytes += next->second;
    free_.erase(next);
  }
  const auto after = free_.lower_bound(offset);
  if (after != free_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == offset) {
      before->second += bytes;
      return;
    }
  }
  free_[offset] = bytes;
}

std::size_t Pool::used() const {
  const std::lock_guard lock(mutex_);
  std::size_t bytes = 0;
  for (const auto& [offset, size] : blocks_) bytes += size;
  return bytes;
}

std::size_t Pool::committed() const {
  const std::lock_guard lock(mutex_);
  return committed_end_ - begin_;
}

}  // namespace lockstep::shm
