// The part of ZeroOptimizer that goes on after a rank died: parameters are made the same on those who are left, and
// state is divided anew among them.
//
// A step has two halves: every rank steps its shard, then all send theirs. Who fails in the second half has stepped,
// and must not step again; who is still before the first half has the gradients of the same step, by DDP's recover().
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <sstream>
#include <utility>

#include "lockstep/base/str.h"
#include "lockstep/comm/barrier.h"
#include "lockstep/comm/call_label.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/objects.h"
#include "lockstep/comm/values.h"
#include "lockstep/ddp/state_sync.h"
#include "lockstep/shard/flat.h"
#include "lockstep/zero/optimizer.h"
#include "lockstep/zero/sharding.h"

namespace lockstep {
namespace {

struct Steps {
  int64_t taken = 0;    // of the own shard
  int64_t synced = 0;   // by all ranks, as far as this one knows
  int64_t divided = 0;  // how often state was divided anew
};

std::vector<Steps> gather_steps(const Steps& mine, const GroupPtr& group) {
  std::vector<Steps> all;
  for (const auto& text : all_gather_object(str(mine.taken, " ", mine.synced, " ", mine.divided), group)) {
    std::istringstream words(text);
    words >> all.emplace_back().taken >> all.back().synced >> all.back().divided;
  }
  return all;
}

/// True for the elements of `parameter`, in memory order, that this rank's optimizer steps.
at::Tensor own_elements(const at::Tensor& parameter, const std::vector<at::Tensor>& stepped) {
  const auto mask = at::zeros({parameter.numel()}, at::TensorOptions(at::kFloat).device(parameter.device()));
  const auto size = parameter.element_size();
  const auto* begin = static_cast<const char*>(parameter.data_ptr());
  for (const auto& own : stepped) {
    if (own.numel() == 0 || own.device() != parameter.device()) continue;
    const auto* own_begin = static_cast<const char*>(own.data_ptr());
    const auto first = std::max<int64_t>((own_begin - begin) / size, 0);
    const auto last = std::min<int64_t>((own_begin - begin) / size + own.numel(), parameter.numel());
    if (first < last) mask.narrow(0, first, last - first).fill_(1);
  }
  return mask;
}

/// Every element becomes what its owner has; what a lost rank had to step, what the first one has of it.
void take_from_owners(const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& stepped,
                      const GroupPtr& group) {
  const at::NoGradGuard no_grad;
  for (const auto& parameter : parameters) {
    auto mine = own_elements(parameter, stepped);
    const auto owners = mine.clone();
    all_reduce(owners, group);
    if (group->getRank() == 0) mine = at::where(owners == 0, 1.0F, mine);
    auto row = detail::flattened_like(parameter.detach(), parameter);
    row = at::where(mine > 0, row, at::zeros({}, row.options())).contiguous();
    // One rank has the value and the others nothing: their sum is its bits.
    all_reduce(row.is_complex() ? at::view_as_real(row) : row, group);
    parameter.detach().copy_(detail::unflattened_like(row, parameter));
  }
}

}  // namespace

std::vector<std::string> ZeroOptimizer::recover(const GroupPtr& group, const std::function<void()>& before_step) {
  check_member(group);
  TORCH_CHECK(!options_.overlap_with_ddp && !has_sharded_gradients() && options_.params_per_rank.empty(), who(),
              ": recover() is for ZeroStage::kState and kReplicated, without overlap_with_ddp and params_per_rank: ",
              "make the optimizer anew, and load what was saved last.");
  TORCH_CHECK(!join_config().enable, who(), ": recover() inside of a Join scope, whose group has failed: leave the ",
              "scope by the exception first.");
  const LabelScope label({"ZeRO's recovery"});
  try {
    wait_for_parameters();
  } catch (const c10::DistBackendError&) {
    if (arriving_) arriving_->abandon();
    arriving_.reset();
  }
  const bool is_divided = options_.stage != ZeroStage::kReplicated;
  const auto steps = gather_steps({steps_taken_, steps_synced_, divisions_}, group);
  const auto most = [&](int64_t Steps::*count) {
    return (*std::max_element(steps.begin(), steps.end(),
                              [&](const auto& one, const auto& other) { return one.*count < other.*count; })).*
           count;
  };
  std::vector<std::string> lost;
  // Another rank has come through the vote of the last recovery, and this one has not.
  if (divisions_ < most(&Steps::divided)) lost = take_collected();
  const auto taken = most(&Steps::taken);
  if (is_divided && steps_taken_ < taken) {
    TORCH_CHECK(steps_taken_ + 1 == taken, who(), ": recover(): this rank has taken ", steps_taken_,
                " steps, another one ", taken, ". Were all steps taken on all ranks?");
    if (before_step) before_step();
    sharding_->step([](torch::optim::Optimizer& local, const LossClosure&) { return local.step(); }, nullptr);
    ++steps_taken_;
  }
  if (is_divided) {
    const auto synced = most(&Steps::synced);
    const auto ahead =
        std::find_if(steps.begin(), steps.end(), [&](const auto& each) { return each.synced == synced; });
    if (synced == taken) {
      std::vector<at::Tensor> values;
      for (const auto& parameter : all_parameters()) values.push_back(parameter.detach());
      broadcast_coalesced(values, group, kBroadcastChunkBytes, static_cast<int>(ahead - steps.begin()));
    } else {
      take_from_owners(all_parameters(), sharding_->own_parameters(), group);
    }
    collect_state(group, /*lacks_an_update=*/synced < taken);
    const auto more = take_collected();
    lost.insert(lost.end(), more.begin(), more.end());
  } else {
    group_ = group;
  }
  // This rank's program is about to take the step that is taken already.
  is_step_taken_ = is_divided && steps_taken_ > steps_ended_;
  steps_ended_ = steps_taken_;
  steps_synced_ = steps_taken_;
  if (!lost.empty()) {
    TORCH_WARN(who(), ": of ", join(lost, ", "), " the optimizer state, or a part of it, died with the rank that held ",
               "it and begins anew, as may have what that rank had not sent of the last step. ZeroStage::kReplicated ",
               "loses nothing.");
  }
  return lost;
}

void ZeroOptimizer::collect_state(const GroupPtr& group, bool lacks_an_update) {
  const auto parameters = all_parameters();
  const auto pieces = sharding_->pieces();
  Collected collected{.group = group, .state = exposed_groups(), .lacks_an_update = lacks_an_update};
  for (int rank = 0; rank < group->getSize(); ++rank) {
    const auto sent = group->getRank() == rank ? detail::to_ivalue(pieces) : c10::IValue();
    for (const auto& piece : detail::pieces_from(broadcast_value(sent, rank, group, default_device_))) {
      detail::add_piece(collected.state.state, piece, parameters[static_cast<std::size_t>(piece.index)]);
    }
  }
  auto owned = at::zeros({static_cast<int64_t>(parameters.size())}, at::TensorOptions(at::kLong));
  const auto stepped = sharding_->own_parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    owned[static_cast<int64_t>(i)] = own_elements(parameters[i], stepped).count_nonzero();
  }
  owned = owned.to(default_device_);
  all_reduce(owned, group);
  collected.owned = owned.cpu();
  collected_ = std::move(collected);
  // Once one rank has cut its shard anew, what it had is nowhere but in what all have collected: nobody cuts before all
  // have. Who is past this knows it.
  barrier(group);
}

std::vector<std::string> ZeroOptimizer::take_collected() {
  TORCH_CHECK(collected_, who(), ": recover(): the state that others have divided is not here. Were all ranks of the ",
              "group in the last recovery?");
  const auto collected = std::move(*std::exchange(collected_, std::nullopt));
  const auto parameters = all_parameters();
  group_ = collected.group;
  sharding_->detach();
  partition_.emplace(*this, group_->getSize(), who());
  sharding_ = made_sharding();
  load_from(collected.state, detail::source_of(collected.state.state, parameters), "that survivors had");
  ++divisions_;
  std::vector<std::string> lost;
  if (collected.state.state.empty() && !collected.lacks_an_update) return lost;
  const auto names = parameter_names();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto owned = collected.owned[static_cast<int64_t>(i)].item<int64_t>();
    if (!parameters[i].requires_grad() || owned == parameters[i].numel()) continue;
    lost.push_back(names[i].empty() ? str("parameter ", i) : str("'", names[i], "'"));
  }
  return lost;
}

}  // namespace lockstep
