// A file as memory, to be read: only what is looked at is read from the disk. Internal to checkpoint.
#pragma once

#include <cstdint>
#include <string>

namespace lockstep::detail {

class MappedFile {
 public:
  /// Throws, naming the file, if it cannot be read or has another length.
  MappedFile(const std::string& path, int64_t bytes);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const char* begin() const { return begin_; }

 private:
  const char* begin_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace lockstep::detail
