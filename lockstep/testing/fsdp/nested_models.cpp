#include "lockstep/testing/fsdp/nested_models.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/rand.h>
#include <c10/core/GradMode.h>
#include <torch/nn/modules/linear.h>

#include <utility>

#include "lockstep/comm/collectives.h"
#include "lockstep/fsdp/policies.h"
#include "lockstep/testing/delay.h"
#include "lockstep/testing/interpose.h"

namespace lockstep::testing {

using torch::nn::Linear;

namespace {

/// In the order in which they are drawn.
struct NestedLayers {
  const Linear first{8, 4};
  const Linear inner{4, 16};
  const Linear outer{16, 16};
  const Linear third{16, 4};
  const Linear last{4, 8};
};

}  // namespace

void ChainImpl::add(torch::nn::AnyModule module) {
  register_module(std::to_string(links_.size()), module.ptr());
  links_.push_back(std::move(module));
}

at::Tensor ChainImpl::forward(const at::Tensor& input) {
  auto output = input;
  for (std::size_t i = 0; i < links_.size(); ++i) output = forward_link(i, output);
  return output;
}

NestedWrappedModule::NestedWrappedModule(const GroupPtr& group) : rank_((check_member(group), group->getRank())) {}

NestedWrappedModule::NestedWrappedModule(const GroupPtr& group, bool deterministic) : NestedWrappedModule(group) {
  build_model(deterministic, [&] {
    const NestedLayers made;
    module = register_module("module", Chain(made.first, Chain(made.inner, made.outer), made.third, made.last));
  });
}

std::shared_ptr<NestedWrappedModule> NestedWrappedModule::init(const TestGroups& groups,
                                                               const TestModelOptions& options) {
  auto model = std::make_shared<NestedWrappedModule>(groups.shard, options.deterministic);
  init_model(*model, groups, options, [&](const FullyShardOptions& fsdp) {
    fully_shard(chain_at(*model, 1).at(0), fsdp);
    fully_shard(chain_at(*model, 1), fsdp);
    fully_shard(model->module->at(2), fsdp);
  });
  return model;
}

ChainImpl& NestedWrappedModule::chain_at(const NestedWrappedModule& model, std::size_t index) {
  return *model.module->at(index).as<ChainImpl>();
}

std::vector<at::Tensor> NestedWrappedModule::get_input(c10::Device device) {
  const auto seed = kInputSeed + static_cast<uint64_t>(rank_);
  return {at::rand({4, 8}, at::detail::createCPUGenerator(seed)).to(device)};
}

at::Tensor NestedWrappedModule::forward(const std::vector<at::Tensor>& input) {
  return module->forward(input.at(0));
}

at::Tensor NestedWrappedModule::get_loss(const std::vector<at::Tensor>& /*input*/, const at::Tensor& output) {
  return output.sum();
}

std::shared_ptr<AlwaysWrapNestedWrappedModule> AlwaysWrapNestedWrappedModule::init(const TestGroups& groups,
                                                                                   const TestModelOptions& options) {
  auto model = std::make_shared<AlwaysWrapNestedWrappedModule>(groups.shard, options.deterministic);
  init_model(*model, groups, options,
             [&](const FullyShardOptions& fsdp) { shard_by_policy(*model, always_wrap_policy(), fsdp); });
  return model;
}

NonUniformReqGradNWM::NonUniformReqGradNWM(const GroupPtr& group, bool deterministic) : NestedWrappedModule(group) {
  build_model(deterministic, [&] {
    const NestedLayers made;
    module = register_module("module", Chain(made.first, Chain(made.inner, made.outer), Chain(made.third, made.last)));
  });
}

std::shared_ptr<NonUniformReqGradNWM> NonUniformReqGradNWM::init(const TestGroups& groups,
                                                                 const TestModelOptions& options) {
  auto model = std::make_shared<NonUniformReqGradNWM>(groups.shard, options.deterministic);
  init_model(*model, groups, options, [&](const FullyShardOptions& fsdp) {
    fully_shard(chain_at(*model, 1).at(0), fsdp);
    fully_shard(chain_at(*model, 1), fsdp);
    fully_shard(chain_at(*model, 2), fsdp);
  });
  // Names are the same with and without units.
  for (const auto& item : model->named_parameters()) {
    if (!item.key().starts_with("module.2.1.")) item.value().set_requires_grad(false);
  }
  return model;
}

MixtureOfExperts::MixtureOfExperts(const GroupPtr& group, bool deterministic,
                                   std::chrono::milliseconds delay_before_free)
    : NestedWrappedModule(group), group_(group), delay_before_free_(delay_before_free) {
  Linear expert{nullptr};
  build_model(deterministic, [&] { expert = Linear(23, 12); }, kExpertSeed + static_cast<uint64_t>(rank_));
  build_model(deterministic, [&] {
    const Linear shared(12, 23);
    const Linear first(8, 12);
    const Linear last(12, 8);
    module = register_module("module", Chain(first, shared, expert, last));
  });
}

std::shared_ptr<MixtureOfExperts> MixtureOfExperts::init(const TestGroups& groups, const TestModelOptions& options,
                                                         std::chrono::milliseconds delay_before_free) {
  auto model = std::make_shared<MixtureOfExperts>(groups.shard, options.deterministic, delay_before_free);
  init_model(*model, groups, options, [&](const FullyShardOptions& fsdp) {
    auto alone = fsdp;
    // All ranks make all groups.
    for (int rank = 0; rank < groups.shard->getSize(); ++rank) {
      const auto group = new_group(groups.shard, {rank});
      if (group) alone.mesh = TestGroups(group).mesh();
    }
    fully_shard(model->module->at(2), alone);
    fully_shard(model->module->at(1), fsdp);
    model->is_sharded_ = true;
  });
  return model;
}

at::Tensor MixtureOfExperts::forward(const std::vector<at::Tensor>& input) {
  const auto late = replace_steps("reshard", [&](const Event& step, const std::function<void()>& next) {
    if (step.unit.ends_with("module.2")) device_sleep(delay_before_free_, compute_device());
    next();
  });
  return module->forward(input.at(0));
}

void MixtureOfExperts::run_backward(const at::Tensor& loss) {
  loss.backward();
  if (is_sharded_) return;
  const at::NoGradGuard no_grad;
  for (const auto& item : named_parameters()) {
    if (is_expert(item.key()) || !item.value().grad().defined()) continue;
    // Not divided: that would be rounded otherwise than what the library does.
    item.value().grad().mul_(1.0 / group_->getSize());
    all_reduce(item.value().grad(), group_);
  }
}

bool MixtureOfExperts::is_expert(const std::string& name) {
  return name.starts_with("module.2.");
}

}  // namespace lockstep::testing
