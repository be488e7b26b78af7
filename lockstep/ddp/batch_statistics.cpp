#include "lockstep/ddp/batch_statistics.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/var_mean.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "lockstep/comm/collectives.h"

namespace lockstep::detail {
namespace {

/// This rank's row, in double: a count beyond 2^24 does not fit a float.
at::Tensor own_row(const at::Tensor& values, int64_t own_count) {
  const auto options = values.options().dtype(at::kDouble);
  const auto channels = values.size(1);
  if (own_count == 0) return at::zeros({2 * channels + 1}, options);
  const auto [variance, mean] = at::var_mean(values, all_dims_but_channels(values), /*correction=*/at::Scalar(0));
  return at::cat({mean.to(at::kDouble), variance.to(at::kDouble).mul(static_cast<double>(own_count)),
                  at::full({1}, own_count, options)});
}

int64_t channels_in(const at::Tensor& all) {
  return (all.size(1) - 1) / 2;
}

}  // namespace

std::vector<int64_t> all_dims_but_channels(const at::Tensor& input) {
  std::vector<int64_t> dims = {0};
  for (int64_t dim = 2; dim < input.dim(); ++dim) dims.push_back(dim);
  return dims;
}

BatchStatistics combined_in_rank_order(const at::Tensor& all) {
  const auto channels = channels_in(all);
  auto mean = at::zeros({channels}, all.options());
  auto squares = at::zeros({channels}, all.options());
  double count = 0;
  for (int64_t rank = 0; rank < all.size(0); ++rank) {
    const auto theirs = all[rank][2 * channels].item<double>();
    if (theirs == 0) continue;
    const auto delta = all[rank].narrow(0, 0, channels) - mean;
    const double together = count + theirs;
    mean = mean + delta * (theirs / together);
    squares = squares + all[rank].narrow(0, channels, channels) + delta * delta * (count * theirs / together);
    count = together;
  }
  return {.mean = mean, .variance = squares / std::max(count, 1.0), .count = at::scalar_tensor(count, all.options())};
}

BatchStatistics combined_at_once(const at::Tensor& all) {
  const auto channels = channels_in(all);
  const auto means = all.narrow(1, 0, channels);
  const auto counts = all.narrow(1, 2 * channels, 1);
  const auto count = counts.sum();
  const auto divisor = count.clamp_min(1);
  const auto mean = (means * counts).sum(0) / divisor;
  // Deviations from the common mean: a sum of squares would cancel.
  const auto squares = (all.narrow(1, channels, channels) + (means - mean).square() * counts).sum(0);
  return {.mean = mean, .variance = squares / divisor, .count = count};
}

BatchStatistics gather_statistics(const at::Tensor& input, const GroupPtr& group) {
  const auto channels = input.size(1);
  const auto own_count = channels == 0 ? 0 : input.numel() / channels;
  const auto dtype = input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const auto mine = own_row(input.to(dtype), own_count);
  const auto all = at::empty({group->getSize(), mine.numel()}, mine.options());
  all_gather_into_tensor(all, mine, group);
  auto statistics = input.is_cpu() ? combined_in_rank_order(all) : combined_at_once(all);
  // A rank that has more than one value need not ask how many there are.
  TORCH_CHECK(own_count > 1 || statistics.count.item<double>() > 1, "[lockstep/ddp] SyncBatchNorm got ",
              statistics.count.item<double>(),
              " value per channel on all ranks together: it needs more than one to train");
  statistics.mean = statistics.mean.to(dtype);
  statistics.variance = statistics.variance.to(dtype);
  return statistics;
}

}  // namespace lockstep::detail
