#include "lockstep/rpc/call.h"

#include <ATen/record_function.h>
#include <torch/csrc/distributed/autograd/utils.h>
#include <torch/csrc/distributed/rpc/rref_context.h>
#include <torch/csrc/distributed/rpc/script_call.h>
#include <torch/csrc/distributed/rpc/script_remote_call.h>
#include <torch/csrc/distributed/rpc/utils.h>

#include <algorithm>
#include <cmath>

#include "lockstep/rpc/call_links.h"
#include "lockstep/rpc/context_scope.h"
#include "lockstep/rpc/message_check.h"
#include "lockstep/rpc/remote_error.h"
#include "lockstep/rpc/rpc.h"
#include "lockstep/rpc/session.h"
#include "lockstep/rpc/switched_agent.h"
#include "lockstep/rpc/wire_names.h"

namespace lockstep::rpc {

namespace trpc = torch::distributed::rpc;

Callee Callee::within(std::chrono::duration<float> limit) const {
  TORCH_CHECK(limit.count() >= 0, "[lockstep/rpc] a call cannot be given ", limit.count(),
              " seconds. Zero is no limit.");
  auto copy = *this;
  copy.timeout_seconds_ = limit.count();
  return copy;
}

const WorkerInfo& Callee::info() const {
  const auto agent = detail::current_agent("a call");
  try {
    if (const auto* rank = std::get_if<int>(&worker_)) {
      TORCH_CHECK(std::in_range<trpc::worker_id_t>(*rank));
      return agent->getWorkerInfo(static_cast<trpc::worker_id_t>(*rank));
    }
    return agent->getWorkerInfo(std::get<std::string>(worker_));
  } catch (const c10::Error&) {
    const auto who = std::visit([](const auto& each) { return str("'", each, "'"); }, worker_);
    TORCH_CHECK(false, "[lockstep/rpc] there is no worker ", who, ". There are ", detail::known_workers(), ".");
  }
}

namespace detail {
namespace {

using torch::distributed::autograd::sendMessageWithAutograd;

c10::intrusive_ptr<trpc::Message> message_of(const std::string& function, std::vector<c10::IValue> arguments) {
  arguments.insert(arguments.begin(), c10::IValue(function));
  const trpc::JitRRefPickleGuard rrefs_may_travel;
  return trpc::ScriptCall(call_name(), std::move(arguments)).toMessage();
}

FuturePtr send(const WorkerInfo& to, c10::intrusive_ptr<trpc::Message> message, float timeout) {
  const auto agent = current_agent("a call");
  drop_ended_context();
  // Within a context every call carries its id, also without tensors: its result may need gradients.
  return sendMessageWithAutograd(*agent, to, std::move(message), /*forceGradRecording=*/true, timeout,
                                 /*forceDisableProfiling=*/true);
}

/// The range that a profiler shows.
std::string range_name(const char* kind, const std::string& function, const WorkerInfo& to) {
  return str(kind, "#", function, "(", current_agent("a call")->getWorkerInfo().name_, " -> ", to.name_, ")");
}

bool needs_gradients(const trpc::Message& message) {
  const auto& tensors = message.tensors();
  return std::any_of(tensors.begin(), tensors.end(),
                     [](const at::Tensor& tensor) { return tensor.defined() && tensor.requires_grad(); });
}

c10::IValue value_of(c10::ivalue::Future& answer, const std::string& worker, const std::string& function,
                     const std::shared_ptr<CallLink>& link) {
  try {
    if (answer.hasError()) std::rethrow_exception(answer.exception_ptr());
    const auto message = answer.constValue().toCustomClass<trpc::Message>();
    check_answer(*message);
    auto value = trpc::deserializeRespToIValue(*message);
    note_answer(link, value);
    return value;
  } catch (...) {
    note_failure(link);
    throw translate(std::current_exception(), worker, function);
  }
}

}  // namespace

FuturePtr call(const Callee& to, const std::string& function, std::vector<c10::IValue> arguments) {
  const auto& worker = to.info();
  RECORD_USER_SCOPE(at::hasCallbacks() ? range_name("rpc_async", function, worker) : std::string());
  auto message = message_of(function, std::move(arguments));
  const auto link = note_call(worker.name_, function, needs_gradients(*message));
  auto answer = send(worker, std::move(message), to.timeout_seconds());
  auto value = answer->then([worker = worker.name_, function,
                             link](c10::ivalue::Future& done) { return value_of(done, worker, function, link); },
                            c10::AnyType::get());
  remember_for_wait_all(value);
  return value;
}

c10::IValue call_and_wait(const Callee& to, const std::string& function, std::vector<c10::IValue> arguments) {
  const auto& worker = to.info();
  RECORD_USER_SCOPE(at::hasCallbacks() ? range_name("rpc_sync", function, worker) : std::string());
  auto message = message_of(function, std::move(arguments));
  const auto link = note_call(worker.name_, function, needs_gradients(*message));
  const auto answer = send(worker, std::move(message), to.timeout_seconds());
  if (!switched_agent()->wait(*answer, to.timeout_seconds())) {
    const auto limit = to.timeout_seconds() < 0 ? rpc_timeout().count() : to.timeout_seconds();
    note_failure(link);
    const auto text = str("there was none within ", std::lround(limit * 1000),
                          " ms. Threads that wait for calls may hold the whole pool");
    throw translate(std::make_exception_ptr(std::runtime_error(trpc::makeRPCError(text, trpc::RPCErrorType::TIMEOUT))),
                    worker.name_, function);
  }
  return value_of(*answer, worker.name_, function, link);
}

namespace {

/// Runs libtorch's end of a creation. After errors that it does not know it throws into whoever completed the answer,
/// and forgets to strike the reference off its list; the error itself is told at the reference's next use.
template <class Finish, class StrikeOff>
void finish_creation(c10::ivalue::Future& answer, const Finish& finish, const StrikeOff& strike_off) {
  try {
    if (!answer.hasError()) check_answer(*answer.constValue().toCustomClass<trpc::Message>());
    finish();
  } catch (const std::exception&) {
    strike_off(trpc::RRefContext::getInstance());
  }
}

}  // namespace

RRefPtr call_remote(const Callee& to, const std::string& function, std::vector<c10::IValue> arguments) {
  const auto& worker = to.info();
  RECORD_USER_SCOPE(at::hasCallbacks() ? range_name("remote", function, worker) : std::string());
  auto& context = trpc::RRefContext::getInstance();
  arguments.insert(arguments.begin(), c10::IValue(function));
  const auto message_for = [&](const trpc::RRefId& id, const trpc::ForkId& fork) {
    const trpc::JitRRefPickleGuard rrefs_may_travel;
    return trpc::ScriptRemoteCall(call_name(), std::move(arguments), id, fork, /*isAsyncExecution=*/false).toMessage();
  };
  if (worker.id_ == context.getWorkerId()) {
    auto owned = context.createOwnerRRef(c10::AnyType::get());
    context.addSelfAsFork(owned);  // until the call has run
    auto answer = send(worker, message_for(owned->rrefId(), owned->rrefId()), to.timeout_seconds());
    owned->registerOwnerCreationFuture(answer);
    answer->addCallback([id = owned->rrefId()](c10::ivalue::Future& done) {
      finish_creation(
          done, [&] { trpc::callback::finishCreatingOwnerRRef(done, id); },
          [&](trpc::RRefContext& all) { all.delForkOfOwner(id, id); });
    });
    return owned;
  }
  auto user = context.createUserRRef(worker.id_, c10::AnyType::get());
  auto answer = send(worker, message_for(user->rrefId(), user->forkId()), to.timeout_seconds());
  user->registerOwnerCreationFuture(answer);
  context.addPendingUser(user->forkId(), user);
  answer->addCallback([fork = user->forkId()](c10::ivalue::Future& done) {
    finish_creation(
        done, [&] { trpc::callback::confirmPendingUser(done, fork); },
        [&](trpc::RRefContext& all) { all.delPendingUser(fork); });
  });
  return user;
}

void check_class_name(const std::string& given, const std::string& before, const std::type_info& type) {
  TORCH_CHECK(before.empty() || before == given, "[lockstep/rpc] class ", readable(type), " is registered twice: as '",
              before, "' and as '", given, "'. remote() could not tell which one is meant: derive a class of its own.");
}

void refuse_unregistered(const std::string& what, const std::string& remedy) {
  TORCH_CHECK(false, "[lockstep/rpc] ", what, " is not registered here. Register it with ", remedy, ".");
}

}  // namespace detail
}  // namespace lockstep::rpc
