// Whom to call, and how long to wait.
#pragma once

#include <chrono>
#include <string>
#include <variant>

#include "lockstep/rpc/wire.h"

namespace lockstep::rpc {

/// A worker by name, rank or WorkerInfo. `within()` gives the call its own time limit instead of the default one:
/// rpc_sync(Callee("worker1").within(2s), f, x). Zero: none.
class Callee {
 public:
  Callee(std::string name) : worker_(std::move(name)) {}                   // NOLINT(google-explicit-constructor)
  Callee(const char* name) : Callee(std::string(name)) {}                  // NOLINT(google-explicit-constructor)
  Callee(int rank) : worker_(rank) {}                                      // NOLINT(google-explicit-constructor)
  Callee(const WorkerInfo& info) : worker_(static_cast<int>(info.id_)) {}  // NOLINT(google-explicit-constructor)

  Callee within(std::chrono::duration<float> limit) const;

  /// Throws if RPC is not initialised or nobody is called so.
  const WorkerInfo& info() const;
  float timeout_seconds() const { return timeout_seconds_; }

 private:
  std::variant<std::string, int> worker_;
  float timeout_seconds_ = torch::distributed::rpc::kUnsetRpcTimeout;
};

}  // namespace lockstep::rpc
