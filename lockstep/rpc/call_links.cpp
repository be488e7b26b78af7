#include "lockstep/rpc/call_links.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/autograd/context/container.h>
#include <torch/csrc/distributed/autograd/functions/sendrpc_backward.h>

#include <algorithm>
#include <mutex>
#include <set>
#include <unordered_map>
#include <unordered_set>

#include "lockstep/rpc/box.h"
#include "lockstep/rpc/context_scope.h"
#include "lockstep/rpc/session.h"

namespace lockstep::rpc::detail {
namespace {

using torch::autograd::Node;
using torch::distributed::autograd::DistAutogradContainer;

struct Links {
  std::mutex mutex;
  std::unordered_map<std::int64_t, std::vector<std::shared_ptr<CallLink>>> by_context;
};
Links& links() {
  static auto* const all = new Links;
  return *all;
}

constexpr int kRankShift = 48;

/// What a backward from the roots reaches on this worker, gradients that come back from others included.
std::unordered_set<const Node*> reached_from(const std::vector<at::Tensor>& roots, std::int64_t context_id) {
  std::unordered_set<const Node*> seen;
  std::vector<const Node*> open;
  const auto visit = [&](const Node* node) {
    if (node != nullptr && seen.insert(node).second) open.push_back(node);
  };
  for (const auto& root : roots) visit(root.grad_fn().get());
  for (const auto& [id, send] : DistAutogradContainer::getInstance().retrieveContext(context_id)->sendFunctions()) {
    visit(send.get());
  }
  while (!open.empty()) {
    const auto* const node = open.back();
    open.pop_back();
    for (const auto& edge : node->next_edges()) visit(edge.function.get());
  }
  return seen;
}

}  // namespace

std::shared_ptr<CallLink> note_call(const std::string& worker, const std::string& function, bool has_sent) {
  const auto context = current_context_id();
  if (context == -1 || context >> kRankShift != current_agent("a call")->getWorkerInfo().id_) return nullptr;
  auto link = std::make_shared<CallLink>();
  link->worker = worker;
  link->function = function;
  link->has_sent = has_sent;
  auto& all = links();
  const std::lock_guard lock(all.mutex);
  all.by_context[context].push_back(link);
  return link;
}

void note_answer(const std::shared_ptr<CallLink>& link, const c10::IValue& value) {
  if (!link) return;
  std::vector<NodePtr> results;
  for (const auto& tensor : tensors_of(value)) {
    if (tensor.defined() && tensor.grad_fn()) results.push_back(tensor.grad_fn());
  }
  const std::lock_guard lock(links().mutex);
  link->results = std::move(results);
  link->state = CallLink::State::kAnswered;
}

void note_failure(const std::shared_ptr<CallLink>& link) {
  if (!link) return;
  const std::lock_guard lock(links().mutex);
  link->state = CallLink::State::kFailed;
}

void check_links(std::int64_t context_id, const std::vector<at::Tensor>& roots) {
  std::vector<CallLink> all;
  {
    const std::lock_guard lock(links().mutex);
    const auto found = links().by_context.find(context_id);
    if (found == links().by_context.end()) return;
    for (const auto& link : found->second) all.push_back(*link);
  }
  const auto reached = reached_from(roots, context_id);
  const auto contributes = [&](const CallLink& link) {
    return std::any_of(link.results.begin(), link.results.end(),
                       [&](const auto& node) { return reached.contains(node.get()); });
  };
  std::set<std::string> taking_part;
  for (const auto& link : all) {
    if (contributes(link)) taking_part.insert(link.worker);
  }
  for (const auto& link : all) {
    TORCH_CHECK(link.state != CallLink::State::kFailed || !link.has_sent, "[lockstep/rpc] backward: the call of '",
                link.function, "' on worker '", link.worker, "' in context ", context_id,
                " failed, and the gradient of what it was given will never come. Begin a new context and compute the ",
                "loss anew.");
    if (link.state != CallLink::State::kAnswered || link.results.empty() || contributes(link)) continue;
    TORCH_CHECK(!link.has_sent && !taking_part.contains(link.worker), "[lockstep/rpc] backward: the result of '",
                link.function, "' on worker '", link.worker, "' does not contribute to a root of this backward, which ",
                "would wait for its gradient for ever. A context is for one backward, from all its losses at once, ",
                "unless the same graph is retained. Make calls that are for something else outside of it.");
  }
}

void forget_links(std::int64_t context_id) {
  auto& all = links();
  const std::lock_guard lock(all.mutex);
  all.by_context.erase(context_id);
}

}  // namespace lockstep::rpc::detail
