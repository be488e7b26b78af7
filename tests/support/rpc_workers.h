// Workers of the shared-memory RPC agent whose requests are texts: what the agent itself does, without the layers
// above.
#pragma once

#include <torch/csrc/distributed/rpc/request_callback.h>
#include <torch/csrc/distributed/rpc/utils.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/rpc/shm_agent.h"

namespace lockstep::rpc {

using torch::distributed::rpc::Message;
using torch::distributed::rpc::MessageType;
using torch::distributed::rpc::RequestCallback;
using torch::distributed::rpc::WorkerInfo;
using MessagePtr = c10::intrusive_ptr<Message>;
using FuturePtr = c10::intrusive_ptr<torch::distributed::rpc::JitFuture>;

inline MessagePtr text_message(const std::string& text, std::vector<at::Tensor> tensors = {},
                               MessageType type = MessageType::SCRIPT_CALL) {
  return c10::make_intrusive<Message>(std::vector<char>(text.begin(), text.end()), std::move(tensors), type);
}

inline std::string text_of(const Message& message) {
  return {message.payload().begin(), message.payload().end()};
}

inline FuturePtr new_answer() {
  return c10::make_intrusive<torch::distributed::rpc::JitFuture>(at::AnyClassType::get());
}

/// Answers a request by what is registered for the first word of its text; "echo" is.
class TextCallback final : public RequestCallback {
 public:
  using Function = std::function<FuturePtr(Message& request)>;

  explicit TextCallback(std::map<std::string, Function> functions = {}) : functions_(std::move(functions)) {}

  static FuturePtr answer(MessagePtr message) {
    auto future = new_answer();
    future->markCompleted(c10::IValue(std::move(message)));
    return future;
  }
  static FuturePtr answer_text(const std::string& text, std::vector<at::Tensor> tensors = {}) {
    return answer(text_message(text, std::move(tensors), MessageType::SCRIPT_RET));
  }

 protected:
  FuturePtr processMessage(Message& request, std::vector<c10::Stream>) const override {
    const auto text = text_of(request);
    const auto found = functions_.find(text.substr(0, text.find(' ')));
    if (found != functions_.end()) return found->second(request);
    return answer_text(text, request.tensors());
  }

 private:
  const std::map<std::string, Function> functions_;
};

inline MessagePtr message_in(const FuturePtr& future) {
  future->waitAndThrow();
  return future->constValue().toCustomClass<Message>();
}

/// The text of the error a future ends with; empty if it ends without.
inline std::string error_in(const FuturePtr& future) {
  future->wait();
  return future->hasError() ? future->tryRetrieveErrorMessage() : "";
}

}  // namespace lockstep::rpc
