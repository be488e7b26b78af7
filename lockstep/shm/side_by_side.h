// Pieces of shared memory seen once more, one behind the other, as one range that can only be read. Nothing is copied,
// and nothing but address space is used: what the owners of the pieces write shows here.
#pragma once

#include <cstddef>
#include <span>

#include "lockstep/shm/request.h"

namespace lockstep::shm {

class SideBySide {
 public:
  /// Whether pieces that begin at such an offset, of a page, and have this length can be put side by side.
  static bool fits(std::size_t offset, std::size_t bytes);

  /// Of this process's pool and those of others as they are mapped here; each fits(). They may be unmapped there
  /// afterwards. Throws MemoryError if the kernel refuses, as it does when a process has too many mappings.
  explicit SideBySide(std::span<const Span> pieces);
  SideBySide(SideBySide&& other) noexcept;
  SideBySide& operator=(SideBySide&& other) = delete;
  ~SideBySide();

  const std::byte* data() const { return data_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace lockstep::shm
