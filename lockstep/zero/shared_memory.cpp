#include "lockstep/zero/shared_memory.h"

#include <algorithm>
#include <functional>
#include <vector>

namespace lockstep::detail {
namespace {

struct Dim {
  int64_t size = 1;
  int64_t stride = 0;  // in bytes
};

/// Where a tensor's elements lie: the longest stride first, dense inner dimensions as one run.
struct Places {
  const char* begin = nullptr;
  std::vector<Dim> dims = {};
  int64_t run = 0;  // bytes that follow each other

  /// Of the dimensions from this one on.
  int64_t spanned(std::size_t dim) const {
    int64_t bytes = run;
    for (auto i = dim; i < dims.size(); ++i) bytes += (dims[i].size - 1) * dims[i].stride;
    return bytes;
  }
};

Places places_of(const at::Tensor& tensor) {
  const auto item = static_cast<int64_t>(tensor.itemsize());
  Places places{.begin = static_cast<const char*>(tensor.const_data_ptr()), .run = item};
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    // An expanded dimension repeats the same elements.
    if (tensor.size(i) > 1 && tensor.stride(i) > 0) places.dims.push_back({tensor.size(i), tensor.stride(i) * item});
  }
  std::sort(places.dims.begin(), places.dims.end(), [](const Dim& a, const Dim& b) { return a.stride > b.stride; });
  while (!places.dims.empty() && places.dims.back().stride == places.run) {
    places.run *= places.dims.back().size;
    places.dims.pop_back();
  }
  return places;
}

/// Whether one of the runs that begin at `begin` and go on by the dimensions from `dim` on has a byte in `range`.
bool reaches(const Places& places, std::size_t dim, const char* begin, const ByteRange& range) {
  if (begin >= range.begin) return begin < range.end;
  if (dim == places.dims.size()) return begin + places.run > range.begin;
  const auto [size, stride] = places.dims[dim];
  const auto before = (range.begin - begin + stride - 1) / stride;  // how many begin before the range
  if (before < size && begin + before * stride < range.end) return true;
  for (auto i = std::min(before, size) - 1; i >= 0; --i) {
    const auto* start = begin + i * stride;
    if (start + places.spanned(dim + 1) <= range.begin) return false;
    if (reaches(places, dim + 1, start, range)) return true;
  }
  return false;
}

bool any_run(const Places& places, std::size_t dim, const char* begin, const std::function<bool(ByteRange)>& holds) {
  if (dim == places.dims.size()) return holds({begin, begin + places.run});
  for (int64_t i = 0; i < places.dims[dim].size; ++i) {
    if (any_run(places, dim + 1, begin + i * places.dims[dim].stride, holds)) return true;
  }
  return false;
}

}  // namespace

ByteRange bytes_spanned_by(const at::Tensor& tensor) {
  const auto places = places_of(tensor);
  return {places.begin, places.begin + places.spanned(0)};
}

bool share_memory(const at::Tensor& one, const at::Tensor& other) {
  auto [few, many] = std::pair(places_of(one), places_of(other));
  if (few.dims.size() > many.dims.size()) std::swap(few, many);
  return any_run(few, 0, few.begin, [&](const ByteRange& run) { return reaches(many, 0, many.begin, run); });
}

}  // namespace lockstep::detail
