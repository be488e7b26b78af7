#include "lockstep/shm/pool.h"

#include <algorithm>

#include "lockstep/base/str.h"
#include "lockstep/shm/errors.h"
#include "lockstep/shm/lifeline.h"

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

Pool::Pool(std::size_t reserve)
    : home_(fork_generation()),
      reserve_(reserve),
      // No mapping is empty, not even that of a pool without reserve.
      memory_(SharedMemory::create("lockstep-pool", std::max(reserve, kPage))),
      free_{{0, reserve}} {}

/// The forked process has a copy of the books, of which the owner knows nothing.
bool Pool::is_at_home() const {
  return fork_generation() == home_;
}

/// First fit. The free list's last entry reaches to the end of the reserve, so memory is reused before it grows.
std::size_t Pool::take(std::size_t bytes, std::size_t alignment, const std::string& who) {
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
  throw MemoryError(str(who, ": ", readable_bytes(bytes), " do not fit into the ", readable_bytes(reserve_),
                        " reserved for zero-copy tensors of a process. Raise LOCKSTEP_SHM_RESERVE_BYTES."));
}

std::byte* Pool::allocate(std::size_t bytes, const std::string& who) {
  if (!is_at_home()) {
    throw MemoryError(str(who, ": this process was forked off the rank's and may not use its shared memory"));
  }
  // What exceeds the whole reserve is not rounded up: the number could wrap around.
  const auto wanted =
      bytes > reserve_ ? bytes : round_up(std::max<std::size_t>(bytes, 1), bytes >= kPage ? kPage : kLine);
  const std::lock_guard lock(mutex_);
  const auto at = take(wanted, bytes >= kPage ? kPage : kLine, who);
  blocks_[at] = wanted;
  if (at + wanted > committed_end_) {
    const auto end = std::min(reserve_, std::max(round_up(at + wanted, kPage), committed_end_ + kGrowth));
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
  if (!is_at_home()) return;
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

void Pool::trim() noexcept {
  if (!is_at_home()) return;
  const std::lock_guard lock(mutex_);
  if (free_.empty()) return;
  const auto [offset, bytes] = *free_.rbegin();
  const auto begin = round_up(offset, kPage);
  if (offset + bytes < committed_end_ || begin >= committed_end_) return;
  if (memory_.discard(begin, committed_end_ - begin)) committed_end_ = begin;
}

std::size_t Pool::used() const {
  const std::lock_guard lock(mutex_);
  std::size_t bytes = 0;
  for (const auto& [offset, size] : blocks_) bytes += size;
  return bytes;
}

std::size_t Pool::committed() const {
  const std::lock_guard lock(mutex_);
  return committed_end_;
}

}  // namespace lockstep::shm
