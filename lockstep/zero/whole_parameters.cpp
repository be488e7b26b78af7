#include "lockstep/zero/whole_parameters.h"

#include "lockstep/shard/flat.h"

namespace lockstep::detail {
namespace {

/// Copies where the parameter is and, if they have its sizes, laid out like it: fused kernels want that.
NamedValues placed_beside(const at::Tensor& parameter, const NamedValues& values) {
  auto copies = copied_to(values, parameter.device());
  for (auto& [name, value] : copies) {
    if (!value.isTensor()) continue;
    const auto tensor = value.toTensor();
    if (tensor.dim() == 0 && parameter.dim() > 0) {
      // Counters such as a step are read by the host in every step.
      value = tensor.cpu();
    } else if (tensor.sizes() == parameter.sizes() && tensor.strides() != parameter.strides()) {
      value = unflattened_like(flattened_like(tensor, parameter), parameter);
    }
  }
  return copies;
}

}  // namespace

WholeParameters::WholeParameters(PartitionCache& partition, bool as_bucket_view, bool is_awaited_later, GroupPtr group)
    : partition_(partition),
      as_bucket_view_(as_bucket_view),
      is_awaited_later_(is_awaited_later),
      group_(std::move(group)) {}

void WholeParameters::set_groups(std::vector<std::vector<at::Tensor>> /*groups*/) {
  const auto& groups = partition_.partition();
  std::vector<std::vector<OwnParameter>> own;
  for (const auto& each : groups[group_ ? group_->getRank() : 0]) {
    auto& parameters = own.emplace_back();
    for (const auto& parameter : each.params()) {
      parameters.push_back({partition_.param_to_index().at(parameter.unsafeGetTensorImpl()), parameter});
    }
  }
  own_ = std::move(own);
  if (!group_) return;
  if (as_bucket_view_) {
    device_parameters_ = partition_.device_to_params_per_rank();
    return make_views();
  }
  std::vector<ParameterSync::Sent> sent;
  const auto& rank_of = partition_.param_to_rank();
  for (const auto& parameter : partition_.index_to_param()) {
    const auto rank = rank_of.find(parameter.unsafeGetTensorImpl());
    if (rank != rank_of.end()) sent.push_back({parameter, rank->second});
  }
  sync_.emplace(sent, group_, is_awaited_later_);
}

void WholeParameters::make_views() {
  views_.emplace(device_parameters_, group_, is_awaited_later_ ? FlatMemory::kStorages : FlatMemory::kViews);
}

std::vector<std::vector<at::Tensor>> WholeParameters::local_parameters() const {
  std::vector<std::vector<at::Tensor>> groups;
  for (const auto& group : own_) {
    auto& parameters = groups.emplace_back();
    for (const auto& own : group) parameters.push_back(own.parameter);
  }
  return groups;
}

void WholeParameters::on_trainability_change() {
  if (group_ && as_bucket_view_) make_views();
}

std::vector<at::Tensor> WholeParameters::own_gradients() const {
  std::vector<at::Tensor> gradients;
  for (const auto& group : own_) {
    for (const auto& own : group) {
      if (const auto& gradient = own.parameter.grad(); gradient.defined()) gradients.push_back(gradient);
    }
  }
  return gradients;
}

std::vector<const FlatShard*> WholeParameters::flat_buffers() const {
  std::vector<const FlatShard*> buffers;
  if (!views_) return buffers;
  for (const auto& flat : views_->flat_buffers()) buffers.push_back(&flat);
  return buffers;
}

std::vector<Arrival> WholeParameters::launch_sync() {
  if (views_) return views_->launch(group_);
  return sync_ ? sync_->launch() : std::vector<Arrival>();
}

std::vector<StatePiece> WholeParameters::pieces(const OptimizerStateDict& local) const {
  std::vector<StatePiece> pieces;
  int64_t position = 0;
  for (const auto& group : own_) {
    for (const auto& own : group) {
      if (const auto found = local.state.find(position++); found != local.state.end()) {
        pieces.push_back({.index = own.index,
                          .elements = {0, own.parameter.numel()},
                          .is_whole = true,
                          .values = with_dense_tensors(found->second)});
      }
    }
  }
  return pieces;
}

OptimizerStateDict WholeParameters::load(const StateSource& source) {
  OptimizerStateDict dict;
  int64_t position = 0;
  for (const auto& group : own_) {
    auto& into = dict.param_groups.emplace_back();
    for (const auto& [index, parameter] : group) {
      into.params.push_back(position);
      if (const auto values = source(index, {0, parameter.numel()}, true)) {
        dict.state.emplace(position, placed_beside(parameter, *values));
      }
      ++position;
    }
  }
  return dict;
}

ShardingBytes WholeParameters::bytes() const {
  return {.buckets = views_ ? views_->bytes() : 0, .temporaries = sync_ ? sync_->bytes() : 0};
}

}  // namespace lockstep::detail
