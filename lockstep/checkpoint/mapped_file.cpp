#include "lockstep/checkpoint/mapped_file.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>

#include "lockstep/base/unique_fd.h"

namespace lockstep::detail {

MappedFile::MappedFile(const std::string& path, int64_t bytes) : bytes_(static_cast<std::size_t>(bytes)) {
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat about = {};
  TORCH_CHECK(file && ::fstat(file.get(), &about) == 0, "[lockstep/checkpoint] cannot read ", path, ": ",
              std::strerror(errno));
  // Memory beyond the end of a file must not be touched.
  TORCH_CHECK(about.st_size == bytes, "[lockstep/checkpoint] ", path, " has ", about.st_size,
              " bytes, but was written with ", bytes);
  if (bytes == 0) return;
  void* mapped = ::mmap(nullptr, bytes_, PROT_READ, MAP_SHARED, file.get(), 0);
  TORCH_CHECK(mapped != MAP_FAILED, "[lockstep/checkpoint] cannot map ", path, ": ", std::strerror(errno));
  ::madvise(mapped, bytes_, MADV_WILLNEED);
  begin_ = static_cast<const char*>(mapped);
}

MappedFile::~MappedFile() {
  if (begin_ != nullptr) ::munmap(const_cast<char*>(begin_), bytes_);
}

}  // namespace lockstep::detail
