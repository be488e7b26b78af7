// The part of ZeroOptimizer that refuses arguments, before anything is made of them.
#include <ATen/ops/zeros.h>

#include <set>

#include "lockstep/optim/functional_registry.h"
#include "lockstep/zero/optimizer.h"
#include "lockstep/zero/parameter_checks.h"

namespace lockstep {

void ZeroOptimizer::check_arguments(const std::vector<torch::optim::OptimizerParamGroup>& groups) const {
  const bool is_sharded = options_.stage != ZeroStage::kReplicated;
  TORCH_CHECK(!is_sharded || !type_.needs_all_parameters, who(), ": ", type_.name,
              " cannot be sharded: what it does to one parameter depends on all of them");
  check_stage();
  check_state_can_be_loaded();
  check_dtypes();
  if (options_.overlap_with_ddp) check_overlap(groups);
  const bool is_by_elements = is_sharded && options_.partition == ZeroPartition::kElements;
  TORCH_CHECK(!is_by_elements || type_.is_elementwise, who(), ": ", type_.name,
              " is not known to update every element by itself, so it cannot step slices of parameters. Use ",
              "ZeroPartition::kParameters, or say kIsElementwise in your class.");
  TORCH_CHECK(!is_by_elements || options_.params_per_rank.empty(), who(),
              ": params_per_rank and ZeroPartition::kElements exclude each other");
  detail::ParameterGroups parameters;
  for (const auto& group : groups) parameters.push_back(group.params());
  check_parameters(parameters);
  check_names(parameters);
}

void ZeroOptimizer::check_state_can_be_loaded() const {
  if (type_.has_load) return;
  const auto parameter = at::zeros({1}).requires_grad_();
  parameter.mutable_grad() = at::zeros({1});
  std::unique_ptr<Optimizer> tried;
  try {
    tried = type_.make({{std::vector<at::Tensor>{parameter}, type_.defaults->clone()}});
    tried->step();
  } catch (const std::exception&) {
    return;  // it wants other parameters than this one
  }
  TORCH_CHECK(
      tried->state().empty(), who(), ": ", type_.name, " keeps state and has no load(), so its state could ",
      "neither be saved nor follow its parameters. It must override save() and load(), as those of libtorch do.");
}

void ZeroOptimizer::check_parameters(const std::vector<std::vector<at::Tensor>>& groups) const {
  for (const auto& group : groups) detail::wait_for_others(group);
  detail::check_parameters(groups, who());
  if (options_.stage != ZeroStage::kReplicated) detail::check_memory_is_apart(groups, who());
}

void ZeroOptimizer::check_names(const std::vector<std::vector<at::Tensor>>& groups) const {
  const auto& names = options_.parameter_names;
  if (names.empty()) return;
  std::size_t count = 0;
  for (const auto& group : groups) count += group.size();
  TORCH_CHECK(names.size() == count, who(), ": there are ", names.size(), " parameter_names for ", count,
              " parameters. Give one for each, in the order of the groups.");
  std::set<std::string> seen;
  for (const auto& name : names) {
    TORCH_CHECK(!name.empty() && seen.insert(name).second, who(), ": '", name,
                "' in parameter_names is empty or there twice. Files know parameters by their names.");
  }
}

void ZeroOptimizer::check_stage() const {
  if (options_.stage == ZeroStage::kState) return;
  const char* name = has_sharded_gradients() ? "ZeroStage::kGradients" : "ZeroStage::kReplicated";
  TORCH_CHECK(!options_.overlap_with_ddp, who(), ": overlap_with_ddp is a way to divide state, not for ", name);
  TORCH_CHECK(options_.params_per_rank.empty(), who(), ": params_per_rank divides state, which is not for ", name);
  if (!has_sharded_gradients()) return;
  TORCH_CHECK(options_.partition == ZeroPartition::kElements && !options_.parameters_as_bucket_view, who(), ": ", name,
              " divides by elements. Leave partition and parameters_as_bucket_view as they are.");
  TORCH_CHECK(options_.ddp.engine(), who(), ": ", name, " needs the DistributedDataParallel that computes the ",
              "gradients. Give it as ZeroOptions{.stage = ", name, ", .ddp = ddp}.");
}

void ZeroOptimizer::check_dtypes() const {
  const auto& reduced = options_.reduce_dtype;
  TORCH_CHECK(!reduced || has_sharded_gradients(), who(), ": reduce_dtype is for ZeroStage::kGradients, where the ",
              "optimizer reduces gradients. In other stages DDP does: give it ",
              "DdpOptions{.mixed_precision = MixedPrecision{.reduce_dtype = at::kFloat}}.");
  TORCH_CHECK(!reduced || c10::isFloatingType(*reduced), who(), ": gradients cannot be reduced in ", *reduced,
              ". Set reduce_dtype to a floating-point one.");
  const auto& dtype = options_.master_dtype;
  if (!dtype) return;
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kDouble, who(), ": masters cannot be of ", *dtype,
              ". Set master_dtype to at::kFloat or at::kDouble.");
  TORCH_CHECK(!options_.overlap_with_ddp, who(), ": master_dtype is not for overlap_with_ddp, whose steps are part of ",
              "backward. Use one of them.");
  TORCH_CHECK(!type_.needs_all_parameters, who(), ": ", type_.name, " runs its closure several times in a step, which ",
              "would see parameters that masters were not rounded into. Leave master_dtype out.");
}

void ZeroOptimizer::check_overlap(const std::vector<torch::optim::OptimizerParamGroup>& groups) const {
  TORCH_CHECK(!options_.overlap_parameter_sync, who(),
              ": overlap_with_ddp sends parameters in backward, so no forward ",
              "could overlap that. Leave overlap_parameter_sync out.");
  TORCH_CHECK(optim::has_functional_form(type_.name), who(), ": overlap_with_ddp steps bucket by bucket, which ",
              type_.name, " cannot: it has no functional form. Use another optimizer, or register_functional().");
  TORCH_CHECK(groups.size() == 1, who(), ": overlap_with_ddp takes one parameter group, ", groups.size(),
              " were given");
  TORCH_CHECK(options_.partition == ZeroPartition::kParameters && options_.params_per_rank.empty(), who(),
              ": with overlap_with_ddp DDP's buckets say who has which parameter: leave partition and ",
              "params_per_rank as they are");
  if (options_.parameters_as_bucket_view) {
    TORCH_WARN(who(), ": parameters_as_bucket_view is ignored: with overlap_with_ddp parameters become views anyway, ",
               "in the order of DDP's buckets");
  }
}

}  // namespace lockstep
