// One file of a checkpoint, written in order, with a checksum of every piece. Internal to checkpoint.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>

#include "lockstep/base/unique_fd.h"

namespace lockstep::detail {

class FileWriter {
 public:
  /// Makes the file. Throws, naming it, if it cannot; as do the others.
  explicit FileWriter(std::string path);

  void write(const std::string& bytes);
  /// A tensor's values, row by row; its checksum. `on_bytes` is told how many were written, now and then.
  uint32_t write(const at::Tensor& values, const std::function<void(int64_t)>& on_bytes);
  /// Waits until all of it is on the disk.
  void finish();

 private:
  void write(const char* bytes, int64_t count);
  [[noreturn]] void fail() const;

  const std::string path_;
  UniqueFd file_;
};

}  // namespace lockstep::detail
