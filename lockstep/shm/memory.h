// Memory that processes share. It has no name in any file system: it travels as a descriptor, nobody else can open it,
// and the kernel frees it with the last process that has it.
#pragma once

#include <cstddef>
#include <string>

#include "lockstep/base/unique_fd.h"

namespace lockstep::shm {

class SharedMemory {
 public:
  SharedMemory() = default;
  /// `bytes` of address space, all zero. Pages exist only once committed. `what` is for messages and /proc.
  static SharedMemory create(const std::string& what, std::size_t bytes);
  /// Maps memory another process created.
  static SharedMemory attach(const std::string& what, UniqueFd fd);

  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  ~SharedMemory();

  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }
  /// To pass on; -1 once forgotten.
  int fd() const { return fd_.get(); }
  /// The mapping needs no descriptor any more. Rules out commit() unless commits_without_fd(), and discard().
  void forget_fd() { fd_.reset(); }
  /// Whether the kernel knows how (Linux 5.14).
  static bool commits_without_fd();

  /// Makes sure that the pages of this range exist, so that touching them cannot fail. Throws MemoryError if there is
  /// not enough memory; without this, running out would be a SIGBUS in whoever touches the page.
  void commit(std::size_t offset, std::size_t bytes);
  /// Gives whole pages back to the machine. Whoever touches them again finds zeros. False if that failed.
  bool discard(std::size_t offset, std::size_t bytes) noexcept;

 private:
  void map(const std::string& what);

  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
  UniqueFd fd_;
};

/// Bytes this process could still use without anybody being killed for it: the machine's and its control group's.
std::size_t available_memory();

/// Bytes of memory in this machine.
std::size_t total_memory();

/// "1.5 GiB".
std::string readable_bytes(std::size_t bytes);

}  // namespace lockstep::shm
