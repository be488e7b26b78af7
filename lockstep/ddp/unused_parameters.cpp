#include "lockstep/ddp/unused_parameters.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <c10/util/Logging.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/c10d/debug.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "lockstep/base/str.h"
#include "lockstep/comm/agreement.h"
#include "lockstep/comm/call_label.h"
#include "lockstep/comm/collectives.h"

namespace lockstep::detail {

namespace {

// A mark holds two counts of ranks: those that use the parameter, and those that keep a gradient of it.
constexpr int32_t kKept = 1 << 16;

}  // namespace

std::vector<std::size_t> find_unused(
    const std::vector<at::Tensor>& outputs,
    const std::unordered_map<const torch::autograd::Node*, std::size_t>& accumulators) {
  std::unordered_set<const torch::autograd::Node*> seen;
  std::vector<const torch::autograd::Node*> to_visit;
  const auto visit = [&](const torch::autograd::Node* node) {
    if (node != nullptr && seen.insert(node).second) to_visit.push_back(node);
  };
  for (const auto& output : outputs) {
    if (output.defined() && output.requires_grad()) visit(torch::autograd::impl::gradient_edge(output).function.get());
  }
  std::vector<bool> is_used(accumulators.size());
  while (!to_visit.empty()) {
    const auto* node = to_visit.back();
    to_visit.pop_back();
    if (const auto found = accumulators.find(node); found != accumulators.end()) is_used[found->second] = true;
    for (const auto& edge : node->next_edges()) visit(edge.function.get());
  }
  std::vector<std::size_t> unused;
  for (std::size_t i = 0; i < is_used.size(); ++i) {
    if (!is_used[i]) unused.push_back(i);
  }
  return unused;
}

UsedMap::UsedMap(std::size_t parameters, c10::Device device)
    : marks_(at::zeros({static_cast<int64_t>(parameters)}, at::kInt)),
      on_device_(at::empty({static_cast<int64_t>(parameters)}, at::TensorOptions(at::kInt).device(device))) {}

void UsedMap::mark(std::size_t parameter) {
  marks_.mutable_data_ptr<int32_t>()[parameter] = 1;
}

void UsedMap::mark_kept(std::size_t parameter) {
  auto& mark = marks_.mutable_data_ptr<int32_t>()[parameter];
  if (mark == 0) mark = kKept;
}

int UsedMap::kept_by(std::size_t parameter) const {
  return marks_.const_data_ptr<int32_t>()[parameter] / kKept;
}

void UsedMap::unmark(std::size_t parameter) {
  marks_.mutable_data_ptr<int32_t>()[parameter] = 0;
}

bool UsedMap::is_marked(std::size_t parameter) const {
  return marks_.const_data_ptr<int32_t>()[parameter] % kKept != 0;
}

void UsedMap::launch(const GroupPtr& group) {
  const LabelScope label({"DDP's used parameters"});
  if (on_device_.is_cpu()) {
    on_device_.copy_(marks_);
  } else {
    // New memory for each step: the copy may still run when the next step sets its marks.
    const auto staging = at::empty_like(marks_, marks_.options().pinned_memory(true));
    staging.copy_(marks_);
    on_device_.copy_(staging, /*non_blocking=*/true);
  }
  pending_ = launch_all_reduce(on_device_, group);
  is_under_way_ = true;
}

void UsedMap::fetch() {
  pending_.wait();
  is_under_way_ = false;
  marks_.copy_(on_device_);
}

bool UsedMap::is_used(std::size_t parameter) {
  if (is_marked(parameter)) return true;
  if (is_under_way_) fetch();
  return is_marked(parameter);
}

void UsedMap::wait() {
  if (is_under_way_) pending_.wait();
}

void UsedMap::finish() {
  wait();
  is_under_way_ = false;
}

void UsedMap::clear() {
  marks_.zero_();
}

void UsedMap::give_up() {
  if (is_under_way_) on_device_ = at::empty_like(on_device_);
  pending_ = Pending();
  is_under_way_ = false;
  clear();
}

void UnusedParameters::search(const std::vector<at::Tensor>& outputs,
                              const std::unordered_map<const torch::autograd::Node*, std::size_t>& accumulators) {
  auto found = find_unused(outputs, accumulators);
  const bool is_first = !std::exchange(has_searched_, true);
  if (!is_first && found != of_step) is_same_in_all_steps = false;
  of_step = std::move(found);
  if (setup_.options.skip_all_reduce_unused_params && setup_.group->getSize() > 1) compare_skipped(is_first);
  if (of_step.empty() && !std::exchange(has_warned_of_needless_search_, true)) {
    TORCH_WARN(setup_.who(), ": find_unused_parameters is on, but the forward pass used every parameter. The search ",
               "costs a walk over the graph in every step; turn it off if no step leaves parameters out.");
  }
  if (c10d::debug_level() == c10d::DebugLevel::Detail && !of_step.empty()) {
    LOG(INFO) << setup_.who() << ": unused parameters in this step: " << setup_.names_of(of_step);
  }
}

void UnusedParameters::compare_skipped(bool is_first) {
  if (is_first || c10d::debug_level() != c10d::DebugLevel::Off) {
    const LabelScope label({"DDP's skipped parameters"});
    check_same_on_all_ranks("what skip_all_reduce_unused_params leaves out",
                            Facts{{"unused parameters", str(setup_.names_of(of_step), " (", join(of_step, ", "), ")")}},
                            setup_.group);
  } else if (!is_same_in_all_steps && !std::exchange(has_warned_of_changed_skips_, true)) {
    TORCH_WARN(setup_.who(), ": skip_all_reduce_unused_params is on, and the set of unused parameters has changed. If ",
               "it does not change alike on all ranks, they wait for each other, or sum what does not belong ",
               "together. TORCH_DISTRIBUTED_DEBUG=INFO compares the sets in every step.");
  }
}

bool UnusedParameters::contains(std::size_t parameter) const {
  return std::binary_search(of_step.begin(), of_step.end(), parameter);
}

}  // namespace lockstep::detail
