// What memory can do for an all_reduce in place: two streams are read, summed and written back. Every rank works on
// buffers of its own, far larger than the caches.
#pragma once

#include <cstdint>
#include <memory>

namespace lockstep::bench {

enum class Pages { kDefault, kHuge };

class MemoryStream {
 public:
  explicit MemoryStream(Pages pages);

  void pass();

  /// Read and written by one pass of one rank.
  static constexpr int64_t kBytesPerPass = 4 * (64 << 20);

 private:
  struct Unmap {
    void operator()(float* data) const;
  };

  std::unique_ptr<float, Unmap> data_;  // both streams, one after the other
};

}  // namespace lockstep::bench
