#include "lockstep/rpc/dist_autograd.h"

#include <torch/csrc/distributed/autograd/context/container.h>
#include <torch/csrc/distributed/autograd/engine/dist_engine.h>

#include <charconv>
#include <future>
#include <string_view>
#include <thread>

#include "lockstep/base/str.h"
#include "lockstep/rpc/call_links.h"
#include "lockstep/rpc/context_scope.h"
#include "lockstep/rpc/remote_error.h"
#include "lockstep/rpc/session.h"

namespace lockstep::dist_autograd {

namespace tautograd = torch::distributed::autograd;
using rpc::detail::current_agent;

namespace {

tautograd::ContextPtr context_of(std::int64_t id) {
  current_agent("distributed autograd");
  auto& container = tautograd::DistAutogradContainer::getInstance();
  try {
    return container.retrieveContext(id);
  } catch (const c10::Error&) {
    TORCH_CHECK(false, "[lockstep/rpc] there is no distributed autograd context ", id, " on worker '",
                current_agent("")->getWorkerInfo().name_, "': its scope has ended, or nothing of it came here.");
  }
}

void check_roots(const std::vector<at::Tensor>& roots) {
  TORCH_CHECK(!roots.empty(), "[lockstep/rpc] backward: there are no roots. Give at least one loss.");
  for (std::size_t i = 0; i < roots.size(); ++i) {
    const auto& root = roots[i];
    TORCH_CHECK(root.defined() && root.requires_grad(), "[lockstep/rpc] backward: root ", i, " requires no gradient.");
    TORCH_CHECK(root.numel() == 1, "[lockstep/rpc] backward: root ", i, " has ", root.numel(),
                " elements; a root is a scalar.");
    TORCH_CHECK(root.grad_fn(), "[lockstep/rpc] backward: root ", i,
                " is a leaf: nothing was computed from it that a backward could go through.");
  }
}

std::string names_of_workers(const tautograd::ContextPtr& context) {
  std::vector<std::string> names;
  const auto agent = current_agent("distributed autograd");
  for (const auto id : context->getKnownWorkerIds()) names.push_back(str("'", agent->getWorkerInfo(id).name_, "'"));
  return join(names, ", ");
}

/// libtorch's text names the ranks that an error came through; the last is where it was thrown.
[[noreturn]] void tell_failure(std::int64_t context_id, const std::exception_ptr& error) {
  const auto text = rpc::detail::text_of(error);
  constexpr std::string_view kMark = "Error on Node ";
  const auto mark = text.rfind(kMark);
  if (mark == std::string::npos) std::rethrow_exception(error);
  const auto number = mark + kMark.size();
  const auto colon = text.find(": ", number);
  int rank = -1;
  if (colon == std::string::npos ||
      std::from_chars(text.data() + number, text.data() + colon, rank).ptr != text.data() + colon) {
    std::rethrow_exception(error);
  }
  const auto worker = current_agent("distributed autograd")
                          ->getWorkerInfo(static_cast<torch::distributed::rpc::worker_id_t>(rank))
                          .name_;
  throw rpc::RemoteError(rpc::RemoteError::Kind::kThrown, worker, "backward",
                         str("[lockstep/rpc] backward of context ", context_id, " failed on worker '", worker,
                             "': ", text.substr(colon + 2)));
}

void execute(std::int64_t context_id, const std::vector<at::Tensor>& roots, bool retain_graph) {
  try {
    tautograd::DistEngine::getInstance().execute(context_id, roots, retain_graph);
  } catch (const std::exception&) {
    tell_failure(context_id, std::current_exception());
  }
}

}  // namespace

Context::Context() {
  const auto agent = current_agent("a distributed autograd context");
  rpc::detail::drop_ended_context();
  const auto current = rpc::detail::current_context_id();
  TORCH_CHECK(current == -1, "[lockstep/rpc] this thread works for distributed autograd context ", current,
              " already: contexts do not nest.");
  id_ = tautograd::DistAutogradContainer::getInstance().newContext()->contextId();
}

Context::Context(ForLater /*tag*/) {
  current_agent("a distributed autograd context");
  const rpc::detail::ContextScope none(-1);
  id_ = tautograd::DistAutogradContainer::getInstance().newContext()->contextId();
}

WorkFor::WorkFor(const Context& context) : before_(rpc::detail::current_context_id()) {
  tautograd::DistAutogradContainer::forceCurrentContextId(context.id());
}

WorkFor::~WorkFor() {
  tautograd::DistAutogradContainer::forceCurrentContextId(before_);
}

Context::~Context() {
  rpc::detail::forget_links(id_);
  try {
    tautograd::DistAutogradContainer::getInstance().releaseContext(id_);
  } catch (const std::exception& error) {
    TORCH_WARN("[lockstep/rpc] context ", id_, " could not be released everywhere: ", error.what());
  }
}

void backward(std::int64_t context_id, const std::vector<at::Tensor>& roots, const BackwardOptions& options) {
  const auto context = context_of(context_id);
  check_roots(roots);
  rpc::detail::check_links(context_id, roots);
  if (!options.timeout) return execute(context_id, roots, options.retain_graph);
  // libtorch's engine waits without an end. Another thread does; after a timeout it stays there with the context, and
  // ends when the gradients come after all.
  std::packaged_task<void()> pass(
      [context_id, roots, retain_graph = options.retain_graph] { execute(context_id, roots, retain_graph); });
  auto result = pass.get_future();
  std::thread(std::move(pass)).detach();
  TORCH_CHECK(result.wait_for(*options.timeout) == std::future_status::ready, "[lockstep/rpc] backward of context ",
              context_id, " did not end within ", options.timeout->count(), " ms. It waits for gradients from worker ",
              names_of_workers(context), ". Does every result of a call in this context contribute to a root?");
  result.get();
}

c10::Dict<at::Tensor, at::Tensor> get_gradients(std::int64_t context_id) {
  return context_of(context_id)->getGradients();
}

void accumulate_grads(std::int64_t context_id, const std::vector<at::Tensor>& parameters) {
  const auto gradients = get_gradients(context_id);
  const at::NoGradGuard no_grad;
  for (const auto& parameter : parameters) {
    const auto found = gradients.find(parameter);
    if (found == gradients.end()) continue;
    auto& grad = parameter.mutable_grad();
    // The context may add to its own later.
    grad = grad.defined() ? grad + found->value() : found->value().clone();
  }
}

}  // namespace lockstep::dist_autograd
