// ZeRO's second stage: the optimizer takes over what DDP's backwards do with gradients.
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <c10/util/Logging.h>

#include <unordered_map>
#include <unordered_set>

#include "lockstep/ddp/ddp_base.h"
#include "lockstep/ddp/engine.h"
#include "lockstep/zero/element_slices.h"
#include "lockstep/zero/master_weights.h"
#include "lockstep/zero/optimizer.h"
#include "lockstep/zero/sharding.h"

namespace lockstep {
namespace {

/// What a rank keeps of an average: for a master all that was reduced, else what .grad would hold.
at::ScalarType gradient_dtype_of(const at::Tensor& parameter, const ZeroOptions& options) {
  const auto own = parameter.scalar_type();
  const auto& reduced = options.reduce_dtype;
  const bool is_wider = reduced && c10::elementSize(*reduced) > c10::elementSize(own);
  return is_wider && detail::has_master(own, options.master_dtype) ? *reduced : own;
}

}  // namespace

DdpReference::DdpReference(const DdpBase& ddp) : engine_(ddp.shared_engine()) {}

std::unique_ptr<detail::Division> ZeroOptimizer::shard_gradients() {
  const auto ddp = options_.ddp.engine();
  TORCH_CHECK(ddp->group() == group_, who(), ": with ZeroStage::kGradients the optimizer's group must be DDP's, ",
              "which has ", ddp->group()->getSize(), " ranks");
  TORCH_CHECK(ddp->options().delay_all_reduce_named_params.empty(), who(),
              ": ZeroStage::kGradients cannot be together with delay_all_reduce_named_params");
  auto& reducer = ddp->reducer_for("ZeroStage::kGradients");
  // Bad options of the local optimizer must throw while DDP is as it was. Of one element each: some make state at once.
  LocalOptimizerType::Groups groups;
  for (const auto& group : param_groups_) {
    const auto element = at::zeros({1}, all_parameters().front().options().requires_grad(false)).requires_grad_();
    groups.emplace_back(std::vector<at::Tensor>{element}, group.options().clone());
  }
  type_.make(groups);

  std::unordered_map<const void*, int64_t> index_of;
  std::unordered_set<const void*> missing;  // that no bucket holds
  for (const auto& parameter : all_parameters()) {
    index_of.emplace(parameter.unsafeGetTensorImpl(), static_cast<int64_t>(index_of.size()));
    if (parameter.requires_grad()) missing.insert(parameter.unsafeGetTensorImpl());
  }
  std::vector<int64_t> indices;
  for (const auto& parameter : reducer.parameters()) {
    const auto found = index_of.find(parameter.unsafeGetTensorImpl());
    TORCH_CHECK(found != index_of.end(), who(), ": parameter '", reducer.plan().parameters()[indices.size()].name,
                "' of DDP is not in the optimizer. With ZeroStage::kGradients its gradient would be lost: give ",
                "the optimizer all parameters of DDP, or freeze it.");
    TORCH_CHECK(parameter.requires_grad(), who(), ": parameter '", reducer.plan().parameters()[indices.size()].name,
                "' was frozen after DDP was made");
    missing.erase(found->first);
    indices.push_back(found->second);
  }
  for (const auto& parameter : all_parameters()) {
    TORCH_CHECK(!missing.contains(parameter.unsafeGetTensorImpl()), who(), ": parameter ",
                index_of.at(parameter.unsafeGetTensorImpl()), " of the optimizer is not one that DDP averages. ",
                "With ZeroStage::kGradients all trainable ones must be.");
  }

  std::vector<std::vector<at::Tensor>> blocks;
  std::shared_ptr<detail::ScatteredGradients> scattered;
  const auto scatter = [&](const BucketPlan& plan) {
    std::vector<detail::ScatteredGradients::Cut> cuts;
    for (const auto& bucket : plan.buckets()) {
      auto& parameters = blocks.emplace_back();
      auto& cut = cuts.emplace_back();
      for (const auto index : bucket.parameters) {
        parameters.push_back(reducer.parameters()[index]);
        cut.members.push_back({parameters.back(), plan.parameters()[index].name, indices[index]});
      }
      cut.layout = detail::ElementSlices::layout_for(parameters, group_->getSize());
      cut.kept_dtype = gradient_dtype_of(parameters.front(), options_);
    }
    scattered =
        std::make_shared<detail::ScatteredGradients>(std::move(cuts), std::move(indices), options_.reduce_dtype, group_,
                                                     who(), [this] { check_preparation_is_mirrored(); });
    return scattered;
  };
  reducer.set_scatter(scatter, "ZeroStage::kGradients divides the gradients");
  is_scatter_set_ = true;
  return std::make_unique<detail::ElementSlices>(group_, overlaps_forwards(), std::move(blocks), std::move(scattered));
}

void ZeroOptimizer::give_gradients_back() noexcept {
  try {
    const auto ddp = options_.ddp.engine();
    if (ddp && sharding_) ddp->reducer()->clear_scatter();
    if (sharding_) sharding_->drop_gradients();
  } catch (const std::exception& error) {
    LOG(WARNING) << "[lockstep/zero] DDP cannot average gradients again: " << error.what();
  }
}

}  // namespace lockstep
