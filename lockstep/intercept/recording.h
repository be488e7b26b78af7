// Internal to intercept. What a deferred build did: the operators that give its tensors their values, in order, with
// their arguments. Tensors are remembered by storage and geometry, so views need no record: a view is the same storage
// with another geometry, whoever made it.
//
// Shared by all storages of a build, and alive as long as one of them. Its parts are guarded by its mutex.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/StorageImpl.h>

#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "lockstep/intercept/random_stream.h"
#include "lockstep/intercept/tensor_rule.h"

namespace lockstep::detail {

/// Where in which storage a tensor lies.
struct TensorPlace {
  std::size_t storage = 0;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  int64_t offset = 0;
  at::ScalarType dtype = at::kFloat;
  bool is_conj = false;
  bool is_neg = false;
};

/// A tensor among the arguments: one without memory, one with memory, or none.
struct RecordedOperand {
  std::optional<TensorPlace> deferred;
  at::Tensor real;
  int64_t real_version = 0;
};

struct RecordedArgument {
  enum class Kind { kPlain, kTensor, kTensorList, kOptionalTensorList };
  Kind kind = Kind::kPlain;
  c10::IValue plain;
  std::vector<RecordedOperand> operands;
};

/// A result on a storage of its own.
struct RecordedResult {
  std::size_t result = 0;
  std::size_t item = 0;  // of a list
  TensorPlace place;
};

struct RecordedOperator {
  c10::OperatorHandle op;
  std::vector<RecordedArgument> arguments;
  std::vector<std::size_t> read;     // storages among the arguments, those it writes included
  std::vector<RecordedResult> made;  // what it returns that was not there before
  std::optional<std::size_t> stream;
  at::Tensor random_state;  // before it ran; undefined until it ran once
};

struct RecordedStorage {
  at::Device device = at::kCPU;                                     // where an ordinary build has it
  std::vector<std::size_t> writers;                                 // positions of operators, the first makes it
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> memory;  // once it had some
  bool is_alive = true;
};

class Recording : public TensorRule, public std::enable_shared_from_this<Recording> {
 public:
  explicit Recording(at::Device device) : device_(device) {}

  /// For operators that get a tensor of this recording.
  void run(OperatorCall& call) override;
  /// For operators that make tensors from nothing, inside of the scope.
  void run_factory(OperatorCall& call);
  /// The build is over.
  void leave();

  /// Gives `tensors` their memory and their values. REQUIRES: all are of this recording.
  void materialize(const std::vector<at::Tensor>& tensors);

  void storage_died(std::size_t storage);

 private:
  friend class Replay;

  void record(OperatorCall& call);
  /// After the build: throws if the call is a forward pass, not an edit of what was built.
  void check_is_edit(const OperatorCall& call, const RecordedOperator& recorded,
                     const torch::jit::Stack& results) const;
  RecordedOperator describe(const OperatorCall& call) const;
  RecordedOperand operand_of(const OperatorCall& call, const at::Tensor& tensor, bool is_written) const;
  void keep(const OperatorCall& call, RecordedOperator recorded, torch::jit::Stack& results);
  void keep_result(const at::Tensor& tensor, std::size_t result, std::size_t item, RecordedOperator& recorded,
                   at::Device device);
  at::Device device_of(const OperatorCall& call, const RecordedOperator& recorded) const;
  bool adopt(const at::Tensor& tensor);

  const at::Device device_;  // of tensors whose options name none

  mutable std::recursive_mutex mutex_;  // a rule may be asked while it answers
  bool is_open_ = true;
  std::deque<RecordedOperator> operators_;
  std::deque<RecordedStorage> storages_;
  RandomStreams streams_;
};

/// The context of a storage without memory.
class DeferredStorage : public RuledStorage {
 public:
  DeferredStorage(std::shared_ptr<Recording> recording, std::size_t index)
      : recording_(std::move(recording)), index_(index) {}
  ~DeferredStorage() override { recording_->storage_died(index_); }
  DeferredStorage(const DeferredStorage&) = delete;
  DeferredStorage& operator=(const DeferredStorage&) = delete;

  TensorRule& rule() override { return *recording_; }
  const std::shared_ptr<Recording>& recording() const { return recording_; }
  std::size_t index() const { return index_; }

  /// Null if `tensor` has memory.
  static DeferredStorage* of(const at::Tensor& tensor) {
    return dynamic_cast<DeferredStorage*>(RuledStorage::of(tensor));
  }

 private:
  const std::shared_ptr<Recording> recording_;
  const std::size_t index_;
};

/// REQUIRES: a tensor without memory.
TensorPlace place_of(const at::Tensor& tensor, std::size_t storage);

}  // namespace lockstep::detail
