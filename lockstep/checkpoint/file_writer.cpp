#include "lockstep/checkpoint/file_writer.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "lockstep/base/crc32c.h"

namespace lockstep::detail {
namespace {

/// What stays in a core's cache between the checksum and the copy into the kernel.
constexpr int64_t kChunkBytes = 1 << 18;

}  // namespace

FileWriter::FileWriter(std::string path)
    : path_(std::move(path)), file_(::open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666)) {
  if (!file_) fail();
}

void FileWriter::fail() const {
  TORCH_CHECK(false, "[lockstep/checkpoint] cannot write ", path_, ": ", std::strerror(errno));
}

void FileWriter::write(const char* bytes, int64_t count) {
  while (count > 0) {
    const auto written = ::write(file_.get(), bytes, static_cast<std::size_t>(count));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail();
    bytes += written;
    count -= written;
  }
}

void FileWriter::write(const std::string& bytes) {
  write(bytes.data(), static_cast<int64_t>(bytes.size()));
}

uint32_t FileWriter::write(const at::Tensor& values, const std::function<void(int64_t)>& on_bytes) {
  // Views may be lazily conjugated or negated: what counts are values.
  const auto local = values.detach().resolve_conj().resolve_neg().cpu().contiguous();
  const auto* bytes = static_cast<const char*>(local.const_data_ptr());
  const auto total = static_cast<int64_t>(local.nbytes());
  uint32_t checksum = 0;
  for (int64_t begin = 0; begin < total; begin += kChunkBytes) {
    const auto count = std::min(kChunkBytes, total - begin);
    checksum = crc32c(checksum, bytes + begin, static_cast<std::size_t>(count));
    write(bytes + begin, count);
    on_bytes(count);
  }
  return checksum;
}

void FileWriter::finish() {
  if (::fsync(file_.get()) != 0) fail();
  if (::close(file_.release()) != 0) fail();
}

}  // namespace lockstep::detail
