#include "lockstep/shm/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>
#include <utility>

#include "lockstep/base/str.h"
#include "lockstep/shm/descriptors.h"
#include "lockstep/shm/errors.h"

namespace lockstep::shm {
namespace {

// Not in the headers of older systems.
constexpr int kPopulateWrite = 23;
constexpr std::size_t kPage = 4096;

[[noreturn]] void fail(const std::string& what, const char* call, const std::string& advice = "") {
  throw MemoryError(str("[lockstep/shm] ", what, ": ", call, " failed: ", describe_error(errno), advice));
}

/// The number in a file of the kernel's, or `otherwise`: "max" and files that are not there mean no limit.
std::size_t number_in(const std::string& path, std::size_t otherwise) {
  std::ifstream file(path);
  std::size_t value = 0;
  return file >> value ? value : otherwise;
}

std::size_t reclaimable_in(const std::string& path) {
  std::size_t total = 0;
  std::string name;
  std::size_t bytes = 0;
  for (std::ifstream file(path); file >> name >> bytes;) {
    if (name == "active_file" || name == "inactive_file" || name == "slab_reclaimable") total += bytes;
  }
  return total;
}

/// What the control group (version 2) still allows, walking up from ours: any level may have a limit.
std::size_t left_in_control_groups() {
  constexpr auto kNoLimit = std::numeric_limits<std::size_t>::max();
  std::string line;
  std::string path;
  for (std::ifstream groups("/proc/self/cgroup"); std::getline(groups, line);) {
    if (line.starts_with("0::")) path = line.substr(3);
  }
  std::size_t left = kNoLimit;
  while (!path.empty()) {
    const auto folder = "/sys/fs/cgroup" + (path == "/" ? "" : path);
    const auto limit = number_in(folder + "/memory.max", kNoLimit);
    if (limit != kNoLimit) {
      // Files that were read count as used, but make room when asked.
      const auto in_use = number_in(folder + "/memory.current", 0);
      const auto used = in_use - std::min(in_use, reclaimable_in(folder + "/memory.stat"));
      left = std::min(left, limit > used ? limit - used : 0);
    }
    if (path == "/") break;
    path.resize(path.rfind('/'));
    if (path.empty()) path = "/";
  }
  return left;
}

}  // namespace

SharedMemory SharedMemory::create(const std::string& what, std::size_t bytes) {
  SharedMemory memory;
  memory.fd_.reset(::memfd_create(what.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memory.fd_) fail(what, "memfd_create");
  memory.size_ = bytes;
  if (::ftruncate(memory.fd_.get(), static_cast<off_t>(bytes)) != 0) {
    fail(what, "ftruncate", str(" (", readable_bytes(bytes), "; is there a limit on file sizes, ulimit -f?)"));
  }
  // No rank can take pages away under another one's feet.
  ::fcntl(memory.fd_.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW);
  memory.map(what);
  return memory;
}

SharedMemory SharedMemory::attach(const std::string& what, UniqueFd fd) {
  SharedMemory memory;
  memory.fd_ = std::move(fd);
  struct stat status = {};
  if (::fstat(memory.fd_.get(), &status) != 0) fail(what, "fstat");
  memory.size_ = static_cast<std::size_t>(status.st_size);
  memory.map(what);
  return memory;
}

void SharedMemory::map(const std::string& what) {
  void* at = ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd_.get(), 0);
  if (at == MAP_FAILED) {
    fail(what, "mmap",
         str(" (", readable_bytes(size_),
             " of address space; raise ulimit -v, or lower the reserve with LOCKSTEP_SHM_RESERVE_BYTES)"));
  }
  data_ = static_cast<std::byte*>(at);
  // Wishes: huge pages where the machine grants them to shared memory, and no gigabytes of peers' data in a core dump.
  ::madvise(data_, size_, MADV_HUGEPAGE);
  ::madvise(data_, size_, MADV_DONTDUMP);
}

SharedMemory::SharedMemory(SharedMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)), fd_(std::move(other.fd_)) {}

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(fd_, other.fd_);
  return *this;
}

SharedMemory::~SharedMemory() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

void SharedMemory::commit(std::size_t offset, std::size_t bytes) {
  if (bytes == 0) return;
  // Asked first: the kernel would rather kill a process than refuse the last page.
  const auto available = available_memory();
  if (bytes > available) {
    throw MemoryError(str("[lockstep/shm] ", readable_bytes(bytes), " of shared memory are wanted, but only ",
                          readable_bytes(available), " are free here. Use smaller tensors or fewer ranks per host."));
  }
  const auto begin = offset / kPage * kPage;
  const auto length = offset + bytes - begin;
  while ((fd_ ? ::fallocate(fd_.get(), 0, static_cast<off_t>(offset), static_cast<off_t>(bytes))
              : ::madvise(data_ + begin, length, kPopulateWrite)) != 0) {
    if (errno == EINTR || (!fd_ && errno == EAGAIN)) continue;
    fail(str(readable_bytes(bytes), " of shared memory"), fd_ ? "fallocate" : "madvise");
  }
}

bool SharedMemory::commits_without_fd() {
  static const bool is_known = [] {
    void* page = ::mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) return false;
    const bool is_done = ::madvise(page, kPage, kPopulateWrite) == 0;
    ::munmap(page, kPage);
    return is_done;
  }();
  return is_known;
}

bool SharedMemory::discard(std::size_t offset, std::size_t bytes) noexcept {
  return ::fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                     static_cast<off_t>(bytes)) == 0;
}

std::size_t available_memory() {
  std::size_t free_in_machine = std::numeric_limits<std::size_t>::max();
  std::string line;
  for (std::ifstream info("/proc/meminfo"); std::getline(info, line);) {
    if (!line.starts_with("MemAvailable:")) continue;
    free_in_machine = std::stoull(line.substr(std::strlen("MemAvailable:"))) * 1024;
    break;
  }
  return std::min(free_in_machine, left_in_control_groups());
}

std::size_t total_memory() {
  return static_cast<std::size_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
}

std::string readable_bytes(std::size_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 1024 && unit + 1 < std::size(kUnits)) {
    value /= 1024;
    ++unit;
  }
  const auto tenths = static_cast<std::size_t>(value * 10);
  return unit == 0 ? str(bytes, " B") : str(tenths / 10, ".", tenths % 10, " ", kUnits[unit]);
}

}  // namespace lockstep::shm
