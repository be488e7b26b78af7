// Whether two tensors share an element, compared with a list of all elements.
#include "lockstep/zero/shared_memory.h"

#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <random>
#include <set>

namespace lockstep::detail {
namespace {

/// Where the elements lie.
std::set<const void*> places_in(const at::Tensor& tensor) {
  std::set<const void*> places;
  for (int64_t i = 0; i < tensor.numel(); ++i) {
    int64_t rest = i;
    int64_t offset = 0;
    for (int64_t dim = tensor.dim() - 1; dim >= 0; --dim) {
      offset += rest % tensor.size(dim) * tensor.stride(dim);
      rest /= tensor.size(dim);
    }
    places.insert(tensor.const_data_ptr<float>() + offset);
  }
  return places;
}

// ZERO-3
TEST(SharedMemory, IsThatOfACommonElement) {
  const auto memory = at::zeros({200});
  std::mt19937 random(7);
  const auto one_of = [&](const std::vector<int64_t>& values) { return values[random() % values.size()]; };
  const auto made = [&] {
    std::vector<int64_t> sizes;
    std::vector<int64_t> strides;
    for (auto dims = one_of({0, 1, 2, 3}); dims > 0; --dims) {
      sizes.push_back(one_of({1, 2, 3, 4}));
      strides.push_back(one_of({0, 1, 2, 3, 4, 6, 12, 17}));
    }
    return memory.as_strided(sizes, strides, one_of({0, 1, 2, 5, 11, 30}));
  };
  int shared = 0;
  for (int i = 0; i < 5000; ++i) {
    const auto one = made();
    const auto other = made();
    const auto places = places_in(one);
    bool is_shared = false;
    for (const auto* place : places_in(other)) is_shared = is_shared || places.contains(place);
    shared += is_shared ? 1 : 0;
    ASSERT_EQ(share_memory(one, other), is_shared) << one.sizes() << one.strides() << other.sizes() << other.strides();
    const auto range = bytes_spanned_by(one);
    EXPECT_EQ(range.begin, *places.begin());
    EXPECT_EQ(range.end, static_cast<const char*>(*places.rbegin()) + sizeof(float));
  }
  EXPECT_GT(shared, 500);
  EXPECT_LT(shared, 4500);
}

}  // namespace
}  // namespace lockstep::detail
