// Runs of elements as boxes, against every element by itself.
#include "lockstep/shard/box.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

namespace lockstep::box_test {
namespace {

using Sizes = std::vector<int64_t>;

int64_t below(std::mt19937& random, int64_t limit) {
  return std::uniform_int_distribution<int64_t>(0, limit - 1)(random);
}

Sizes random_sizes(std::mt19937& random, int64_t smallest) {
  Sizes sizes;
  const auto dims = below(random, 5);
  for (int64_t dim = 0; dim < dims; ++dim) sizes.push_back(smallest + below(random, 5));
  return sizes;
}

at::Tensor numbered(const Sizes& sizes) {
  const auto count = std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
  return at::arange(count).view(sizes);
}

TEST(Boxes, OfARunHoldItsElementsInOrder) {
  std::mt19937 random(1);
  for (int round = 0; round < 3000; ++round) {
    const auto sizes = random_sizes(random, 1);
    const auto all = numbered(sizes);
    const auto begin = below(random, all.numel() + 1);
    const auto end = begin + below(random, all.numel() - begin + 1);
    const auto boxes = boxes_of_run({begin, end}, sizes);
    EXPECT_LE(boxes.size(), std::max<std::size_t>(1, 2 * sizes.size()));
    auto next = begin;
    for (const auto& box : boxes) {
      const auto elements = box_in(all, whole_box(sizes), box).flatten();
      ASSERT_EQ(elements.numel(), box.numel());
      ASSERT_TRUE(elements.equal(at::arange(next, next + box.numel()))) << box.to_string();
      next += box.numel();
    }
    EXPECT_EQ(next, end);
  }
}

TEST(Boxes, OfAWholeTensorAreOne) {
  for (const auto& sizes : std::vector<Sizes>{{}, {1}, {7}, {2, 3}, {1, 1, 5}, {4, 1, 2}}) {
    const auto whole = whole_box(sizes);
    EXPECT_EQ(boxes_of_run({0, whole.numel()}, sizes), std::vector<Box>{whole});
  }
  EXPECT_TRUE(boxes_of_run({0, 0}, {0, 3}).empty());
  EXPECT_TRUE(boxes_of_run({2, 2}, {5}).empty());
}

TEST(Boxes, OfARunInAnyOrderOfMemoryAreViewsOfIt) {
  std::mt19937 random(2);
  for (int round = 0; round < 2000; ++round) {
    const auto sizes = random_sizes(random, 1);
    const auto all = numbered(sizes);
    // A tensor whose dims lie in memory in another order, maybe with any stride where there is one index.
    Sizes order(sizes.size());
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    Sizes strides(sizes.size());
    int64_t stride = 1;
    for (auto place = order.rbegin(); place != order.rend(); ++place) {
      strides[static_cast<std::size_t>(*place)] = stride;
      stride *= sizes[static_cast<std::size_t>(*place)];
    }
    const auto stored = at::empty_strided(sizes, strides, at::kLong).copy_(all);
    const auto memory = stored.as_strided({all.numel()}, {1});
    const auto begin = below(random, all.numel() + 1);
    const auto end = begin + below(random, all.numel() - begin + 1);
    const auto row = memory.slice(0, begin, end);
    auto seen = at::zeros(sizes, at::kLong);
    int64_t count = 0;
    for (const auto& piece : boxed_run({begin, end}, row, sizes, strides)) {
      ASSERT_EQ(piece.values.sizes().vec(), piece.box.sizes);
      EXPECT_TRUE(piece.values.is_alias_of(memory));
      const auto there = box_in(all, whole_box(sizes), piece.box);
      ASSERT_TRUE(piece.values.equal(there)) << piece.box.to_string();
      box_in(seen, whole_box(sizes), piece.box).add_(1);
      count += piece.box.numel();
    }
    EXPECT_EQ(count, end - begin);
    EXPECT_TRUE(at::le(seen, 1).all().item<bool>());
  }
}

TEST(Boxes, WithoutStridesAreRowByRow) {
  const auto row = at::arange(4);
  const auto boxed = boxed_run({1, 5}, row, {2, 3}, {});
  ASSERT_EQ(boxed.size(), 2);
  EXPECT_EQ(boxed[0].box, (Box{.offsets = {0, 1}, .sizes = {1, 2}}));
  EXPECT_EQ(boxed[1].box, (Box{.offsets = {1, 0}, .sizes = {1, 2}}));
  EXPECT_TRUE(boxed[1].values.equal(at::tensor({2, 3}, at::kLong).view({1, 2})));
}

TEST(Boxes, IntersectAsTheirElementsDo) {
  std::mt19937 random(3);
  for (int round = 0; round < 2000; ++round) {
    const auto sizes = random_sizes(random, 1);
    const auto drawn = [&] {
      Box box;
      for (const auto size : sizes) {
        box.offsets.push_back(below(random, size + 1));
        box.sizes.push_back(below(random, size - box.offsets.back() + 1));
      }
      return box;
    };
    const auto one = drawn();
    const auto other = drawn();
    auto marks = at::zeros(sizes, at::kLong);
    box_in(marks, whole_box(sizes), one).add_(1);
    box_in(marks, whole_box(sizes), other).add_(1);
    const auto common = intersection(one, other);
    EXPECT_EQ(common ? common->numel() : 0, at::eq(marks, 2).sum().item<int64_t>());
    if (common) {
      EXPECT_TRUE(at::eq(box_in(marks, whole_box(sizes), *common), 2).all().item<bool>());
    }
  }
}

TEST(Boxes, OfNothingHaveNoElementsHoweverLongTheyAre) {
  EXPECT_EQ((Box{.offsets = {0, 0, 0}, .sizes = {INT64_MAX, INT64_MAX, 0}}).numel(), 0);
  EXPECT_EQ(Box().numel(), 1);
}

}  // namespace
}  // namespace lockstep::box_test
