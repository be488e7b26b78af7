#include "lockstep/rpc/request_callback.h"

#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/autograd/rpc_messages/rref_backward_req.h>
#include <torch/csrc/distributed/autograd/rpc_messages/rref_backward_resp.h>
#include <torch/csrc/distributed/rpc/rref_context.h>
#include <torch/csrc/distributed/rpc/script_resp.h>

#include "lockstep/rpc/builtins.h"
#include "lockstep/rpc/functions.h"
#include "lockstep/rpc/message_check.h"
#include "lockstep/rpc/object_handle.h"
#include "lockstep/rpc/remote_error.h"
#include "lockstep/rpc/rref_backward.h"
#include "lockstep/rpc/session.h"
#include "lockstep/rpc/wire_names.h"

namespace lockstep::rpc::detail {
namespace {

namespace trpc = torch::distributed::rpc;
using trpc::JitFuture;
using Streams = std::vector<c10::Stream>;

std::string own_name() {
  return current_agent("a request")->getWorkerInfo().name_;
}

/// An error as the caller shall read it.
std::exception_ptr described(const std::string& function, const std::exception_ptr& error) {
  return std::make_exception_ptr(std::runtime_error(failure_text(own_name(), function, error)));
}

const std::string& name_of(const trpc::ScriptCall& call) {
  if (call.hasOp() || !call.hasQualifiedName() || call.qualifiedName() != call_name()) {
    throw Refused("it is no call of this library");
  }
  const auto& stack = call.stack();
  if (stack.empty() || !stack[0].isString()) throw Refused("it names no function");
  return stack[0].toStringRef();
}

Answer run(const trpc::ScriptCall& call, const std::string& name, Form form) {
  const std::vector<c10::IValue> arguments(call.stack().begin() + 1, call.stack().end());
  if (const auto function = find_function(name)) return function->call(arguments, form);
  if (is_operator_name(name)) return run_operator(name, arguments, form);
  throw Refused(
      str("it is not registered on worker '", own_name(), "'. Register it there under this name before init_rpc()"));
}

class Callback final : public trpc::RequestCallbackNoPython {
 public:
  c10::intrusive_ptr<JitFuture> processMessage(trpc::Message& request, Streams streams) const override {
    try {
      check_request(request);
    } catch (const Refused&) {
      return asFuture(described("?", std::current_exception()));
    }
    // TensorPipe may make them on a thread of the program's that is in inference mode.
    for (auto& tensor : request.tensors()) {
      if (!tensor.defined() || !tensor.is_inference()) continue;
      const c10::InferenceMode off(false);
      tensor = tensor.clone();
    }
    return RequestCallbackNoPython::processMessage(request, std::move(streams));
  }

 protected:
  c10::intrusive_ptr<JitFuture> processScriptCall(trpc::RpcCommandBase& rpc, const Streams& streams) const override {
    const auto& call = static_cast<trpc::ScriptCall&>(rpc);
    std::string name = "?";
    try {
      const c10::MultiStreamGuard guard(streams);
      name = name_of(call);
      auto answer = run(call, name, Form::kWire);
      if (!answer.pending) return asFuture(response(std::move(answer.value)));
      return answer.pending->then(
          [name](JitFuture& done) {
            if (done.hasError()) std::rethrow_exception(described(name, done.exception_ptr()));
            return trpc::withStorages(response(done.value()));
          },
          c10::getCustomClassType<c10::intrusive_ptr<trpc::Message>>());
    } catch (...) {
      return asFuture(described(name, std::current_exception()));
    }
  }

  c10::intrusive_ptr<JitFuture> processScriptRemoteCall(trpc::RpcCommandBase& rpc,
                                                        const Streams& streams) const override {
    const auto& call = static_cast<trpc::ScriptRemoteCall&>(rpc);
    // Errors are the object's: whoever asks for it gets them.
    auto object = c10::make_intrusive<JitFuture>(c10::AnyType::get(), current_agent("a request")->getDevices());
    std::string name = "?";
    try {
      const c10::MultiStreamGuard guard(streams);
      name = name_of(call);
      auto answer = run(call, name, Form::kBoxed);
      if (!answer.pending) {
        object->markCompleted(std::move(answer.value));
      } else {
        answer.pending->addCallback([name, object](JitFuture& done) {
          if (done.hasError()) {
            object->setError(described(name, done.exception_ptr()));
          } else {
            object->markCompleted(done.value());
          }
        });
      }
    } catch (...) {
      object->setError(described(name, std::current_exception()));
    }
    return assignOwnerRRef(call.retRRefId(), call.retForkId(), object);
  }

  c10::intrusive_ptr<JitFuture> processRRefBackward(trpc::RpcCommandBase& rpc) const override {
    const auto& request = static_cast<torch::distributed::autograd::RRefBackwardReq&>(rpc);
    const auto answer = [] { return trpc::withStorages(torch::distributed::autograd::RRefBackwardResp().toMessage()); };
    auto done = retrieveOwnerRRef(request.getRRefId());
    return done->then(
        [answer, context = request.getAutogradContextId(), retain_graph = request.retainGraph()](JitFuture& object) {
          try {
            backward_of(object.value(), context, retain_graph);
          } catch (...) {
            std::rethrow_exception(described("RRef.backward", std::current_exception()));
          }
          return answer();
        },
        c10::getCustomClassType<c10::intrusive_ptr<trpc::Message>>());
  }

  // libtorch's looks into the reference, which is null while others refer to the object.
  void handleRRefDelete(c10::intrusive_ptr<trpc::RRef>& /*rref*/) const override {}

  // libtorch's catches std::exception only, and anything else would end the process.
  c10::intrusive_ptr<JitFuture> processRpcWithErrors(trpc::RpcCommandBase& rpc, const trpc::MessageType& type,
                                                     const Streams& streams) const override {
    try {
      return processRpc(rpc, type, streams);
    } catch (...) {
      return asFuture(described("?", std::current_exception()));
    }
  }

 private:
  static c10::intrusive_ptr<trpc::Message> response(c10::IValue value) {
    const trpc::JitRRefPickleGuard rrefs_may_travel;
    return trpc::ScriptResp(std::move(value)).toMessage();
  }
};

}  // namespace

std::unique_ptr<trpc::RequestCallback> make_request_callback() {
  return std::make_unique<Callback>();
}

}  // namespace lockstep::rpc::detail
