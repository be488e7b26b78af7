#include "lockstep/optim/average_parameters.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <functional>
#include <string>

#include "lockstep/base/str.h"
#include "lockstep/comm/call_label.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/shard/layout_of.h"

namespace lockstep {
namespace {

constexpr std::size_t kAverageBucketBytes = std::size_t{64} << 20;

/// Parameters of one dtype and device that are averaged together.
struct AverageBucket {
  std::vector<at::Tensor> params;
  std::size_t bytes = 0;
  at::Tensor flat;
  Pending pending;
};

/// In the order of the list, so it is the same on all ranks.
std::vector<AverageBucket> average_buckets(const std::vector<at::Tensor>& params) {
  std::vector<AverageBucket> buckets;
  for (const auto& param : params) {
    if (param.numel() == 0) continue;
    const auto has_room = [&](const AverageBucket& bucket) {
      const auto& first = bucket.params[0];
      return first.scalar_type() == param.scalar_type() && first.device() == param.device() &&
             bucket.bytes + param.nbytes() <= kAverageBucketBytes;
    };
    auto found = std::find_if(buckets.begin(), buckets.end(), has_room);
    if (found == buckets.end()) found = buckets.emplace(buckets.end());
    found->params.push_back(param);
    found->bytes += param.nbytes();
  }
  return buckets;
}

/// Not every backend sums complex numbers.
at::Tensor as_real(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor) : tensor;
}

void start(AverageBucket& bucket, const GroupPtr& group) {
  std::vector<at::Tensor> rows;
  for (const auto& param : bucket.params) rows.push_back(param.reshape({-1}));
  bucket.flat = at::cat(rows);
  bucket.flat.div_(group->getSize());
  bucket.pending = launch_all_reduce(as_real(bucket.flat), group);
}

void finish(AverageBucket& bucket) {
  bucket.pending.wait();
  int64_t begin = 0;
  for (const auto& param : bucket.params) {
    param.copy_(bucket.flat.narrow(0, begin, param.numel()).view(param.sizes()));
    begin += param.numel();
  }
  bucket.flat.reset();
}

void check_can_be_averaged(const at::Tensor& param, std::size_t index) {
  TORCH_CHECK(param.defined(), "[lockstep/optim] parameter ", index, " to average is no tensor");
  TORCH_CHECK(at::isFloatingType(param.scalar_type()) || param.is_complex(), "[lockstep/optim] parameter ", index,
              " to average is of type ", param.scalar_type(), ", whose mean is of another type");
  const auto cut = layout_of(param);
  TORCH_CHECK(!cut || cut->is_replicated(), "[lockstep/optim] parameter ", index, " to average is a part (", *cut,
              "), of which other ranks have other ones: model averaging is for parameters that every rank has whole");
}

/// One number from each rank, as long as they are the same; the facts themselves otherwise.
void compare(const Facts& facts, const std::vector<at::Tensor>& params, const GroupPtr& group) {
  std::string text;
  for (const auto& [name, value] : facts) text += str(name, "=", value, "\n");
  const auto device = params.empty() || serves_device(group, c10::DeviceType::CPU) ? c10::Device(c10::DeviceType::CPU)
                                                                                   : params[0].device();
  const auto number = static_cast<int64_t>(std::hash<std::string>()(text));
  const auto mine = at::tensor({number}, at::kLong).to(device);
  const auto all = at::empty({group->getSize()}, mine.options());
  all_gather_into_tensor(all, mine, group);
  if (all.eq(number).all().item<bool>()) return;
  check_same_on_all_ranks("what is averaged", facts, group);
}

void average_all(const std::vector<at::Tensor>& params, const GroupPtr& group, Facts facts) {
  check_member(group);
  for (std::size_t i = 0; i < params.size(); ++i) check_can_be_averaged(params[i], i);
  if (group->getSize() == 1) return;
  const LabelScope label({"model averaging"});
  facts.emplace_back("number of parameters to average", str(params.size()));
  for (std::size_t i = 0; i < params.size(); ++i) {
    facts.emplace_back(str("parameter ", i, " to average"), lockstep::str(params[i].scalar_type(), params[i].sizes()));
  }
  compare(facts, params, group);
  const at::NoGradGuard no_grad;
  auto buckets = average_buckets(params);
  // One is packed while another one travels.
  for (std::size_t i = 0; i < buckets.size(); ++i) {
    start(buckets[i], group);
    if (i > 0) finish(buckets[i - 1]);
  }
  if (!buckets.empty()) finish(buckets.back());
}

std::vector<at::Tensor> params_in(const std::vector<torch::optim::OptimizerParamGroup>& param_groups) {
  std::vector<at::Tensor> params;
  for (const auto& group : param_groups) params.insert(params.end(), group.params().begin(), group.params().end());
  return params;
}

}  // namespace

void average_parameters(const std::vector<at::Tensor>& params, const GroupPtr& process_group) {
  average_all(params, process_group, {});
}

std::vector<at::Tensor> get_params_to_average(const std::vector<at::Tensor>& params) {
  std::vector<at::Tensor> trained;
  for (const auto& param : params) {
    if (param.grad().defined()) trained.push_back(param);
  }
  return trained;
}

std::vector<at::Tensor> get_params_to_average(const std::vector<torch::optim::OptimizerParamGroup>& param_groups) {
  return get_params_to_average(params_in(param_groups));
}

void average_parameters_or_parameter_groups(const std::vector<at::Tensor>& params, const GroupPtr& process_group) {
  detail::average_trained(params, process_group, {});
}

void average_parameters_or_parameter_groups(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                                            const GroupPtr& process_group) {
  detail::average_trained(params_in(param_groups), process_group, {});
}

namespace detail {

void average_trained(const std::vector<at::Tensor>& params, const GroupPtr& group, Facts facts) {
  // Which ones, not only how many: two of the same sizes could be taken for each other.
  std::vector<std::size_t> positions;
  for (std::size_t i = 0; i < params.size(); ++i) {
    if (params[i].grad().defined()) positions.push_back(i);
  }
  facts.emplace_back("positions of the parameters that have a gradient", join(positions, ", "));
  average_all(get_params_to_average(params), group, std::move(facts));
}

}  // namespace detail
}  // namespace lockstep
