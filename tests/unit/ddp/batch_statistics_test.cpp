// The two ways to combine what ranks know of their rows. The second is for accelerators, where it asks for no number.
#include "lockstep/ddp/batch_statistics.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace lockstep::detail {
namespace {

/// What each rank gives: means, squared deviations and number of its rows.
at::Tensor rows_of(const at::Tensor& whole, const std::vector<int64_t>& counts) {
  std::vector<at::Tensor> rows;
  int64_t begin = 0;
  for (const auto count : counts) {
    const auto part = whole.narrow(0, begin, count);
    const auto channels = whole.size(1);
    begin += count;
    if (count == 0) {
      rows.push_back(at::zeros({2 * channels + 1}, at::kDouble));
      continue;
    }
    rows.push_back(at::cat({part.mean(0), part.var(0, /*unbiased=*/false) * count, at::full({1}, count, at::kDouble)}));
  }
  return at::stack(rows);
}

// DDP-99: the loop over ranks and the sums over all of them agree with the whole batch, ranks without rows included
TEST(BatchStatistics, BothWaysEqualTheWholeBatch) {
  // Far from zero, where a sum of squares would lose everything.
  const auto whole = at::randn({12, 5}, at::detail::createCPUGenerator(1), at::TensorOptions(at::kDouble)) + 1e6;
  for (const auto& counts : std::vector<std::vector<int64_t>>{{12}, {1, 11}, {0, 5, 0, 7}, {3, 3, 3, 3}, {12, 0}}) {
    const auto all = rows_of(whole, counts);
    for (const auto& found : {combined_in_rank_order(all), combined_at_once(all)}) {
      EXPECT_TRUE(at::allclose(found.mean, whole.mean(0), 1e-14));
      EXPECT_TRUE(at::allclose(found.variance, whole.var(0, /*unbiased=*/false), 1e-6));
      EXPECT_EQ(found.count.item<double>(), 12);
    }
  }
}

// DDP-99: no rows anywhere give zeros, not NaN
TEST(BatchStatistics, NoRowsAtAllGiveZeros) {
  const auto all = at::zeros({3, 9}, at::kDouble);
  for (const auto& found : {combined_in_rank_order(all), combined_at_once(all)}) {
    EXPECT_TRUE(at::equal(found.mean, at::zeros({4}, at::kDouble)));
    EXPECT_TRUE(at::equal(found.variance, at::zeros({4}, at::kDouble)));
    EXPECT_EQ(found.count.item<double>(), 0);
  }
}

}  // namespace
}  // namespace lockstep::detail
