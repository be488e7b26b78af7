#include "lockstep/zero/overlap.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/Logging.h>
#include <torch/csrc/distributed/c10d/debug.h>

#include <utility>

#include "lockstep/base/str.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/optim/functional_registry.h"
#include "lockstep/zero/optimizer.h"

namespace lockstep::detail {
namespace {

bool is_same_list(const std::vector<at::Tensor>& one, const std::vector<at::Tensor>& other) {
  return std::equal(one.begin(), one.end(), other.begin(), other.end(),
                    [](const at::Tensor& left, const at::Tensor& right) { return left.is_same(right); });
}

}  // namespace

std::string ZeroOverlap::who() const {
  return zero_->who();
}

void ZeroOverlap::detach() noexcept {
  try {
    if (!is_attached_) {
      TORCH_WARN(who(), ": overlap_with_ddp is on, but no hook was made for it, so this optimizer never updated a ",
                 "parameter. Register hook_with_zero_step(hook, ddp, optimizer) before the first backward.");
    }
  } catch (const std::exception& error) {
    LOG(WARNING) << "[lockstep/zero] a warning could not be given: " << error.what();
  }
  zero_ = nullptr;
}

void ZeroOverlap::check_can_attach(DdpEngine& ddp, bool shard_buckets) {
  ddp.reducer_for("overlap with ZeRO");
  TORCH_CHECK(!ddp.options().skip_all_reduce_unused_params, who(),
              ": overlap_with_ddp needs every bucket in every backward, so not skip_all_reduce_unused_params");
  // They are in no bucket, so nobody would step them.
  TORCH_CHECK(ddp.options().delay_all_reduce_named_params.empty(), who(),
              ": overlap_with_ddp steps buckets, which delay_all_reduce_named_params are not in. Use one of them.");
  // The first hook says what the others must say, also if it is never registered.
  const bool is_first = ddp_.expired() && !is_attached_;
  TORCH_CHECK(is_first || info_.shard_buckets == shard_buckets, who(),
              ": a hook was made for this optimizer with shard_buckets ", info_.shard_buckets ? "on" : "off",
              ", and now it is ", shard_buckets ? "on" : "off");
  TORCH_CHECK(is_first || ddp_.lock() == ddp.shared_from_this(), who(),
              ": this optimizer steps in backwards of another DDP");
  info_.shard_buckets = shard_buckets;
  ddp_ = ddp.shared_from_this();
  ddp_group_ = ddp.group();
}

void ZeroOverlap::attach(DdpEngine& ddp, bool shard_buckets) {
  check_can_attach(ddp, shard_buckets);
  if (std::exchange(is_attached_, true)) return;
  auto& reducer = *ddp.reducer();
  reducer.set_consumer({.take = [self = shared_from_this(), &reducer](std::size_t index, const at::Tensor&) {
    self->used_.insert(reducer.parameters()[index].unsafeGetTensorImpl());
    return false;
  }});
  reducer.set_finish_listener([self = shared_from_this()] { self->on_reduced(); });
}

std::shared_ptr<DdpEngine> ZeroOverlap::ddp() const {
  auto engine = ddp_.lock();
  TORCH_CHECK(engine, who(), ": the DistributedDataParallel that the hook was made for is gone");
  TORCH_CHECK(engine->group() == ddp_group_, who(),
              ": DDP goes on with another group, so its buckets are others. Make ",
              "a new optimizer, and a new hook on a new DDP.");
  return engine;
}

void ZeroOverlap::on_bucket(const GradBucket& bucket, const FuturePtr& future, OverlapForm form) {
  TORCH_CHECK(zero_ != nullptr, "[lockstep/zero] the ZeroRedundancyOptimizer that steps in this backward is gone. It ",
              "must live as long as backwards run.");
  const auto engine = ddp();
  TORCH_CHECK(is_attached_, who(), ": the hook that steps in this backward was not registered itself, but through ",
              "another one that did not pass on CommHook::on_registered. Register it by register_comm_hook().");
  const auto& reducer = *engine->reducer();
  const auto index = bucket.index();
  // What a backward that failed has left.
  if (index == 0) info_.clear_per_iter_info();
  if (index == 0 && (!reducer.is_static_graph() || !has_reduced_once_)) used_.clear();
  zero_->refuse_aloud([&] {
    set_up(reducer, bucket);
    if (info_.status == OverlapStatus::kInitialized) check_bucket(bucket);
  });
  if (info_.status != OverlapStatus::kInitialized) return;
  if (index == 0) begin_backward();
  info_.bucket_indices_seen.push_back(index);
  if (info_.offsets.contains(index)) {
    info_.bucket_index_to_bucket.emplace(index, bucket);
    info_.bucket_index_to_future.emplace(index, future);
  }
  if (must_wait_for_used(reducer)) return;
  const bool has_unused = can_be_unused(reducer);
  // Where a continuation would run differs between ranks, and so would the order of collectives. One bucket later it is
  // the same, and the reduction has had the time of a bucket's gradients.
  if (form == OverlapForm::kInterleaved && index > 0) step_and_send(index - 1, has_unused);
  if (!bucket.is_last()) return;
  for (auto i = form == OverlapForm::kInterleaved ? index : 0; i <= index; ++i) step_and_send(i, has_unused);
  end_backward();
}

bool ZeroOverlap::can_be_unused(const Reducer& reducer) const {
  return reducer.is_static_graph() || ddp()->options().find_unused_parameters;
}

bool ZeroOverlap::must_wait_for_used(const Reducer& reducer) const {
  return can_be_unused(reducer) && !(reducer.is_static_graph() && has_reduced_once_);
}

void ZeroOverlap::check_bucket(const GradBucket& bucket) const {
  const auto index = bucket.index();
  const auto& known = info_.params_per_bucket;
  TORCH_CHECK(index < known.size() && is_same_list(bucket.parameters(), known[index]), who(), ": bucket ", index,
              " holds other parameters than when the optimizer was set up. DDP's buckets must stay as they are.");
  TORCH_CHECK(index == info_.bucket_indices_seen.size(), who(), ": bucket ", index, " came when bucket ",
              info_.bucket_indices_seen.size(), " was expected. They must come in their order.");
}

void ZeroOverlap::begin_backward() {
  zero_->prepare_step();
  ++zero_->steps_since_consolidation_;
  // As schedulers have left them.
  local_->set_options(zero_->param_groups()[0].options());
  ddp()->join_progress().add_step(zero_->step_options());
  info_.broadcast_handles.clear();
}

void ZeroOverlap::step_and_send(std::size_t bucket_index, bool has_unused) {
  const auto& ranks = info_.assigned_ranks_per_bucket[bucket_index];
  if (ranks.contains(zero_->group_->getRank())) {
    zero_->announce_if_throws([&] { step_shard(bucket_index, has_unused); });
  }
  for (const auto rank : ranks) {
    const auto& shard = info_.assignments_per_rank[rank].at(bucket_index);
    info_.broadcast_handles.push_back(launch_broadcast(shard.tensor, rank, zero_->group_));
  }
}

void ZeroOverlap::step_shard(std::size_t bucket_index, bool has_unused) {
  const auto place = info_.offsets.find(bucket_index);
  TORCH_CHECK(place != info_.offsets.end(), who(), ": bucket ", bucket_index, " was not assigned to this rank");
  auto& bucket = info_.bucket_index_to_bucket.at(bucket_index);
  auto& future = *info_.bucket_index_to_future.at(bucket_index);
  detail::wait_for(future, zero_->group_, "the hook inside of ZeRO's");
  bucket.set_buffer(tensor_of(future));
  const auto& shard = info_.assignments_per_rank[zero_->group_->getRank()].at(bucket_index);
  const auto reduced = bucket.gradients();
  std::vector<at::Tensor> gradients(local_->parameters().size());
  for (std::size_t i = 0; i < shard.parameters.size(); ++i) {
    if (has_unused && !used_.contains(shard.parameters[i].unsafeGetTensorImpl())) continue;
    gradients[place->second + i] = reduced[shard.offset + i];
  }
  const at::NoGradGuard no_grad;
  local_->step(gradients);
}

void ZeroOverlap::end_backward() {
  info_.wait_for_broadcasts(who());
  info_.clear_per_iter_info();
}

void ZeroOverlap::on_reduced() {
  has_reduced_once_ = true;
  // Empty if the hook has done it.
  if (info_.bucket_indices_seen.empty()) return;
  for (std::size_t i = 0; i < info_.params_per_bucket.size(); ++i) step_and_send(i, /*has_unused=*/true);
  end_backward();
}

std::vector<const FlatShard*> ZeroOverlap::flat_buffers() const {
  std::vector<const FlatShard*> buffers;
  for (const auto& flat : flat_) buffers.push_back(&flat);
  return buffers;
}

// ---- setting up ----

void ZeroOverlap::set_up(const Reducer& reducer, const GradBucket& bucket) {
  TORCH_CHECK(!bucket.buffer().is_sparse() && !bucket.sparse_rows(), who(), ": bucket ", bucket.index(),
              " holds a sparse gradient. overlap_with_ddp steps dense ones only.");
  if (info_.status == OverlapStatus::kInitialized) return;
  const bool is_final = !reducer.should_rebuild_buckets();
  if (!was_final_at_start_) was_final_at_start_ = is_final;
  if (!is_final) return;
  info_.status = OverlapStatus::kDdpHasRebuiltBuckets;
  const auto& plan = reducer.plan().buckets();
  if (bucket.index() > 0) {
    info_.add_bucket(bucket.parameters());
    return;
  }
  if (info_.params_per_bucket.size() < plan.size()) {
    info_.params_per_bucket.clear();
    info_.total_size.reset();
    // Nothing to wait for if all ranks have known the buckets from the start.
    if (!*was_final_at_start_) return info_.add_bucket(bucket.parameters());
    for (const auto& each : plan) {
      std::vector<at::Tensor> parameters;
      for (const auto index : each.parameters) parameters.push_back(reducer.parameters()[index]);
      info_.add_bucket(parameters);
    }
  }
  initialize();
}

void ZeroOverlap::initialize() {
  zero_->notice_new_groups();
  zero_->notice_trainability();
  const auto& group = zero_->group_;
  auto next = info_;
  next.assign(group->getRank(), group->getSize());
  zero_->partition_->clear();
  zero_->partition_->partition(next.params_per_rank);
  std::vector<FlatShard> flat;
  for (auto& of_rank : next.assignments_per_rank) {
    for (auto& [bucket_index, shard] : of_rank) {
      flat.emplace_back(flat_layout_of(shard.parameters, /*world_size=*/1), /*rank=*/0, shard.parameters, group,
                        FlatMemory::kViews);
      shard.tensor = flat.back().buffer();
    }
  }
  const auto& own = next.params_per_rank[group->getRank()];
  local_ = optim::functional_form_of(zero_->type_.name, own, zero_->param_groups()[0].options());
  own_indices_.clear();
  for (const auto& parameter : own) {
    own_indices_.push_back(zero_->partition_->param_to_index().at(parameter.unsafeGetTensorImpl()));
  }
  next.status = OverlapStatus::kInitialized;
  info_ = std::move(next);
  flat_ = std::move(flat);
  if (c10d::debug_level() != c10d::DebugLevel::Off) log_assignment();
}

void ZeroOverlap::log_assignment() const {
  int64_t elements = 0;
  for (const auto& parameter : local_->parameters()) elements += parameter.numel();
  LOG(INFO) << who() << " steps " << elements << " elements of parameters in " << info_.offsets.size() << " buckets";
  if (zero_->group_->getRank() == 0) {
    LOG(INFO) << who() << ": DDP has " << info_.params_per_bucket.size() << " buckets, in "
              << info_.num_bucket_assignments << " assignments";
  }
}

// ---- state ----

void ZeroOverlap::check_has_state(const char* what) const {
  TORCH_CHECK(info_.status == OverlapStatus::kInitialized, who(), ": ", what, " is not possible yet: with ",
              "overlap_with_ddp the local optimizer is made in a backward, when DDP's buckets are final",
              is_attached_ ? "." : ", and no hook was made. Register hook_with_zero_step(hook, ddp, optimizer).");
}

std::vector<StatePiece> ZeroOverlap::pieces() const {
  std::vector<StatePiece> pieces;
  for (std::size_t i = 0; i < own_indices_.size(); ++i) {
    auto values = local_->state(i);
    if (values.empty()) continue;
    pieces.push_back({.index = own_indices_[i],
                      .elements = {0, local_->parameters()[i].numel()},
                      .is_whole = true,
                      .values = std::move(values)});
  }
  return pieces;
}

void ZeroOverlap::load(const StateSource& source) {
  std::vector<NamedValues> held;
  for (std::size_t i = 0; i < own_indices_.size(); ++i) held.push_back(local_->state(i));
  try {
    for (std::size_t i = 0; i < own_indices_.size(); ++i) {
      const auto values = source(own_indices_[i], {0, local_->parameters()[i].numel()}, true);
      local_->load_state(i, values.value_or(NamedValues()));
    }
  } catch (...) {
    for (std::size_t i = 0; i < held.size(); ++i) local_->load_state(i, held[i]);
    throw;
  }
}

ShardingBytes ZeroOverlap::bytes() const {
  ShardingBytes bytes;
  for (const auto& piece : pieces()) bytes.state += bytes_of(piece.values);
  for (const auto& of_rank : info_.assignments_per_rank) {
    for (const auto& [bucket_index, shard] : of_rank) bytes.buckets += static_cast<int64_t>(shard.tensor.nbytes());
  }
  return bytes;
}

}  // namespace lockstep::detail
