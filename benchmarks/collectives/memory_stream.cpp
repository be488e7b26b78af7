#include "benchmarks/collectives/memory_stream.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

namespace lockstep::bench {
namespace {

// Every byte is read once and written once.
constexpr std::size_t kBytes = MemoryStream::kBytesPerPass / 2;
constexpr std::size_t kStreamNumel = kBytes / 2 / sizeof(float);

/// Compiled with -O3, so that the loop is bound by memory and not by scalar arithmetic.
void sum_into_both(float* __restrict left, float* __restrict right, std::size_t numel) {
  for (std::size_t i = 0; i < numel; ++i) {
    const float sum = left[i] + right[i];
    left[i] = sum;
    right[i] = sum;
  }
}

float* map_memory(Pages pages) {
  void* data = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
  // A wish: where it is not granted, both kinds of pages are the same.
  if (pages == Pages::kHuge) ::madvise(data, kBytes, MADV_HUGEPAGE);
  return static_cast<float*>(data);
}

}  // namespace

MemoryStream::MemoryStream(Pages pages) : data_(map_memory(pages)) {
  // Untouched pages would all be one page of zeros.
  std::fill_n(data_.get(), 2 * kStreamNumel, 0.0f);
}

void MemoryStream::pass() {
  sum_into_both(data_.get(), data_.get() + kStreamNumel, kStreamNumel);
}

void MemoryStream::Unmap::operator()(float* data) const {
  ::munmap(data, kBytes);
}

}  // namespace lockstep::bench
