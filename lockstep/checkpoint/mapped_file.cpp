#include "lockstep/checkpoint/mapped_file.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace lockstep::detail {

MappedFile::MappedFile(std::string path, int64_t bytes)
    : path_(std::move(path)),
      bytes_(static_cast<std::size_t>(bytes)),
      file_(::open(path_.c_str(), O_RDONLY | O_CLOEXEC)) {
  struct stat about = {};
  TORCH_CHECK(file_ && ::fstat(file_.get(), &about) == 0, "[lockstep/checkpoint] cannot read ", path_, ": ",
              std::strerror(errno));
  // Memory beyond the end of a file must not be touched.
  TORCH_CHECK(about.st_size == bytes, "[lockstep/checkpoint] ", path_, " has ", about.st_size,
              " bytes, but was written with ", bytes);
}

MappedFile::~MappedFile() {
  if (begin_ != nullptr) ::munmap(const_cast<char*>(begin_), bytes_);
}

const char* MappedFile::begin() {
  if (begin_ != nullptr || bytes_ == 0) return begin_;
  void* mapped = ::mmap(nullptr, bytes_, PROT_READ, MAP_SHARED, file_.get(), 0);
  TORCH_CHECK(mapped != MAP_FAILED, "[lockstep/checkpoint] cannot map ", path_, ": ", std::strerror(errno));
  begin_ = static_cast<const char*>(mapped);
  return begin_;
}

void MappedFile::read(int64_t begin, char* into, int64_t count) const {
  while (count > 0) {
    const auto done = ::pread(file_.get(), into, static_cast<std::size_t>(count), begin);
    if (done < 0 && errno == EINTR) continue;
    TORCH_CHECK(done > 0, "[lockstep/checkpoint] cannot read ", path_, ": ",
                done < 0 ? std::strerror(errno) : "it was cut off meanwhile");
    begin += done;
    into += done;
    count -= done;
  }
}

}  // namespace lockstep::detail
