#include "lockstep/ddp/quantization_hooks.h"

#include <ATen/ops/aminmax.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <limits>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/futures.h"
#include "lockstep/ddp/default_hooks.h"

namespace lockstep {
namespace {

constexpr double kLargest = 255;

/// Scale and zero point of each row, as float32[2, rows, 1]. Zero has a byte of its own in every row.
at::Tensor parameters_of(const at::Tensor& rows) {
  const auto [lowest, highest] = at::aminmax(rows, /*dim=*/1, /*keepdim=*/true);
  const auto low = lowest.to(at::kFloat).clamp_max(0);
  const auto high = highest.to(at::kFloat).clamp_min(0);
  const auto scale = (high - low).div_(kLargest).clamp_min_(std::numeric_limits<float>::epsilon());
  const auto zero_point = low.div(scale).round_().neg_().clamp_(0, kLargest);
  return at::stack({scale, zero_point});
}

at::Tensor quantized(const at::Tensor& rows, const at::Tensor& parameters) {
  return rows.div(parameters[0]).round_().add_(parameters[1]).clamp_(0, kLargest).to(at::kByte);
}

/// Mean over the ranks of what their bytes stand for, in rank order: every rank gets the same bits.
at::Tensor mean_of(const at::Tensor& values, const at::Tensor& parameters) {
  const auto world_size = values.size(0);
  auto sum = at::zeros(values[0].sizes(), parameters.options());
  for (int64_t rank = 0; rank < world_size; ++rank) {
    sum.add_(values[rank].to(at::kFloat).sub_(parameters[rank][1]).mul_(parameters[rank][0]));
  }
  return sum.div_(world_size);
}

/// One piece for every rank, as [ranks, …].
at::Tensor room_for_all(const at::Tensor& mine, const GroupPtr& group) {
  auto sizes = mine.sizes().vec();
  sizes.insert(sizes.begin(), group->getSize());
  return at::empty(sizes, mine.options());
}

FuturePtr run_quantized(const GradBucket& bucket, const GroupPtr& group, int64_t row_length) {
  const at::NoGradGuard no_grad;
  const auto& buffer = bucket.buffer();
  if (buffer.is_sparse() || bucket.sparse_rows() || buffer.numel() == 0) return detail::average_future(buffer, group);
  const auto length = buffer.numel();
  if (row_length == 0) row_length = length;
  const auto padding = (row_length - length % row_length) % row_length;
  const auto rows = (padding > 0 ? at::constant_pad_nd(buffer, {0, padding}) : buffer).view({-1, row_length});

  const auto my_parameters = parameters_of(rows);
  const auto my_values = quantized(rows, my_parameters);
  const auto parameters = room_for_all(my_parameters, group);
  const auto values = room_for_all(my_values, group);
  // The second does not depend on the first: both can be under way at once.
  const std::vector<FuturePtr> both = {launch_all_gather_into_tensor(parameters, my_parameters, group).future(),
                                       launch_all_gather_into_tensor(values, my_values, group).future()};
  return detail::all_of(both)->then(
      [=](c10::ivalue::Future& done) {
        const at::NoGradGuard no_grad;
        done.value();  // throws what it holds
        detail::wait_on_stream(both);
        return c10::IValue(buffer.copy_(mean_of(values, parameters).view({-1}).narrow(0, 0, length)));
      },
      c10::TensorType::get());
}

CommHook quantization_hook(const std::string& name, GroupPtr group, int64_t row_length) {
  return {.name = name, .run = [group = std::move(group), row_length](GradBucket& bucket) {
            return run_quantized(bucket, detail::group_for(bucket, group), row_length);
          }};
}

}  // namespace

CommHook quantization_per_tensor_hook(GroupPtr group) {
  return quantization_hook("quantization_pertensor_hook", std::move(group), 0);
}

CommHook quantization_per_channel_hook(GroupPtr group, int64_t bucket_size) {
  TORCH_CHECK(bucket_size >= 1, "[lockstep/ddp] quantization_per_channel_hook: bucket_size must be 1 or more, but is ",
              bucket_size);
  return quantization_hook("quantization_perchannel_hook", std::move(group), bucket_size);
}

}  // namespace lockstep
