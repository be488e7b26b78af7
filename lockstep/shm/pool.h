// Hands out pieces of a rank's shared memory. Grows page by page on demand and keeps what was freed for reuse.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>

#include "lockstep/shm/team.h"

namespace lockstep::shm {

class Pool {
 public:
  /// `team` is one of processes, and lives as long as the pool.
  explicit Pool(std::shared_ptr<Team> team);

  /// Throws MemoryError if the machine or the reserve is exhausted. Aligned to 64 bytes, large blocks to pages.
  std::byte* allocate(std::size_t bytes);
  void free(std::byte* at) noexcept;

  /// Bytes handed out, and bytes that exist.
  std::size_t used() const;
  std::size_t committed() const;

 private:
  std::size_t take(std::size_t bytes, std::size_t alignment);
  void give_back(std::size_t offset);

  const std::shared_ptr<Team> team_;
  SharedMemory& memory_;
  const std::size_t begin_;

  mutable std::mutex mutex_;
  std::size_t committed_end_;                  // behind the last page that exists
  std::map<std::size_t, std::size_t> free_;    // offset to bytes; neighbours are merged
  std::map<std::size_t, std::size_t> blocks_;  // handed out
};

}  // namespace lockstep::shm
