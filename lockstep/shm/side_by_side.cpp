#include "lockstep/shm/side_by_side.h"

#include <sys/mman.h>

#include <cerrno>
#include <utility>

#include "lockstep/base/str.h"
#include "lockstep/shm/descriptors.h"
#include "lockstep/shm/errors.h"

namespace lockstep::shm {
namespace {

constexpr std::size_t kPageBytes = 4096;

[[noreturn]] void refuse(const char* call, std::size_t bytes) {
  throw MemoryError(str("[lockstep/shm] ", call, " of ", bytes, " bytes of peers' memory failed: ",
                        describe_error(errno), " (a process may have vm.max_map_count mappings)"));
}

}  // namespace

bool SideBySide::fits(std::size_t offset, std::size_t bytes) {
  return bytes > 0 && offset % kPageBytes == 0 && bytes % kPageBytes == 0;
}

SideBySide::SideBySide(std::span<const Span> pieces) : bytes_(length_of(pieces)) {
  void* room = ::mmap(nullptr, bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) refuse("mmap", bytes_);
  data_ = static_cast<std::byte*>(room);
  auto* at = data_;
  for (const auto& piece : pieces) {
    // From no bytes to some: a second mapping of the same shared pages, for which nobody needs their descriptor.
    if (::mremap(piece.at, 0, piece.bytes, MREMAP_MAYMOVE | MREMAP_FIXED, at) == MAP_FAILED) {
      const auto error = errno;
      ::munmap(data_, bytes_);
      errno = error;
      refuse("mremap", piece.bytes);
    }
    at += piece.bytes;
  }
  // Who wrote here would write to others' parameters.
  ::mprotect(data_, bytes_, PROT_READ);
}

SideBySide::SideBySide(SideBySide&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

SideBySide::~SideBySide() {
  if (data_ != nullptr) ::munmap(data_, bytes_);
}

}  // namespace lockstep::shm
