// Hands out pieces of a process's shared memory, for zero-copy tensors. Grows page by page on demand and keeps what was
// freed for reuse. Every process with a rank in one of this process's teams has mapped all of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "lockstep/shm/memory.h"

namespace lockstep::shm {

class Pool {
 public:
  /// At most `reserve` bytes, all address space so far.
  explicit Pool(std::size_t reserve);

  /// Throws MemoryError, which begins with `who`, if the reserve is exhausted, and one if the machine is. Aligned to 64
  /// bytes, large blocks to pages. Neither this nor free() does anything for a process forked off the pool's.
  std::byte* allocate(std::size_t bytes, const std::string& who = "[lockstep/shm]");
  void free(std::byte* at) noexcept;
  /// Gives the pages behind the last block back to the machine.
  void trim() noexcept;

  /// A number by which other processes find what lies at `at`, if all of it is the pool's.
  std::optional<std::uint64_t> locate(const std::byte* at, std::size_t bytes) const {
    if (at < memory_.data() || at + bytes > memory_.data() + reserve_) return std::nullopt;
    return static_cast<std::uint64_t>(at - memory_.data());
  }
  const SharedMemory& memory() const { return memory_; }

  /// Bytes handed out, and bytes that exist.
  std::size_t used() const;
  std::size_t committed() const;

 private:
  std::size_t take(std::size_t bytes, std::size_t alignment, const std::string& who);
  void give_back(std::size_t offset);
  bool is_at_home() const;

  const int home_;  // the fork_generation() that made it
  const std::size_t reserve_;
  SharedMemory memory_;

  mutable std::mutex mutex_;
  std::size_t committed_end_ = 0;              // behind the last page that exists
  std::map<std::size_t, std::size_t> free_;    // offset to bytes; neighbours are merged
  std::map<std::size_t, std::size_t> blocks_;  // handed out
};

}  // namespace lockstep::shm
