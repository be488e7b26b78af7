// Results of operators that a policy keeps instead of running them again. Internal to checkpointing.
//
// Forward runs in the scope of saving(), every recomputation in one of replaying(). An operator is known by its name
// and by how often it was called before.
#pragma once

#include <ATen/core/stack.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "lockstep/checkpointing/policy.h"
#include "lockstep/checkpointing/surroundings.h"
#include "lockstep/intercept/operator_scope.h"

namespace lockstep::detail {

class KeptResults : public std::enable_shared_from_this<KeptResults> {
 public:
  KeptResults(CheckpointPolicyFn policy, bool allows_mutation)
      : policy_(std::move(policy)), allows_mutation_(allows_mutation) {}

  std::shared_ptr<OperatorScope> saving();
  std::shared_ptr<OperatorScope> replaying();

 private:
  class Saving;
  class Replaying;
  struct Entry {
    enum class State { kRecomputed, kKept, kUsed } state = State::kRecomputed;
    torch::jit::Stack results = {};
    std::vector<int64_t> versions = {};           // of the tensors among them
    std::vector<at::Device> devices = {};         // where they belong, if they are on the host
    std::vector<GeneratorState> generators = {};  // behind an operator that drew from them
  };
  using Counts = std::unordered_map<const void*, std::size_t>;

  void save(OperatorCall& call, Counts& counts);
  void replay(OperatorCall& call, Counts& counts);
  /// Results that the call is about to write to are copied first. Not all who share memory share versions: the parts of
  /// aten::linear do not.
  void copy_before_write(const OperatorCall& call);

  const CheckpointPolicyFn policy_;
  const bool allows_mutation_;
  // Guarded by mutex_: a backward inside of the function may run in other threads.
  std::mutex mutex_;
  std::unordered_map<const void*, std::vector<Entry>> entries_;                           // by the operator's schema
  std::unordered_multimap<const void*, std::pair<const void*, std::size_t>> by_storage_;  // schema and number
};

}  // namespace lockstep::detail
