// A file of a checkpoint, to be read: in pieces into memory that is there, or as memory itself. Internal to checkpoint.
#pragma once

#include <cstdint>
#include <string>

#include "lockstep/base/unique_fd.h"

namespace lockstep::detail {

class MappedFile {
 public:
  /// Throws, naming the file, if it cannot be read or has another length.
  MappedFile(std::string path, int64_t bytes);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  /// All of it as memory: only what is looked at is read from the disk.
  const char* begin();
  /// Bytes [begin, begin + count), copied. Throws, naming the file, if it has been cut off since.
  void read(int64_t begin, char* into, int64_t count) const;

 private:
  const std::string path_;
  const std::size_t bytes_;
  UniqueFd file_;
  const char* begin_ = nullptr;
};

}  // namespace lockstep::detail
