// One collective call, as a value: what is asked, with which tensors. Every call the library makes passes through
// launch() (pending.h) as a Call, so it can be observed, delayed, replaced or failed in one place; and every backend of
// ours receives its calls in this form (call_backend.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "lockstep/comm/call_label.h"

namespace lockstep {

using ReduceOp = c10d::ReduceOp::RedOpType;

enum class CallKind {
  kAllReduce,            // inputs[i], in place; several tensors are reduced as one
  kReduce,               // inputs[0], in place on the root
  kBroadcast,            // inputs[0], in place
  kAllGather,            // inputs[i] to outputs[rank * inputs + i]
  kAllGatherSingle,      // inputs[i] to outputs[i], which holds world_size pieces
  kReduceScatter,        // inputs[rank] to outputs[0]
  kReduceScatterSingle,  // inputs[i], which holds world_size pieces, to outputs[i]
  kGather,               // inputs[0] to outputs[rank] on the root
  kScatter,              // inputs[rank] on the root to outputs[0]
  kAllToAll,             // inputs[rank] to outputs[rank]
  kAllToAllSingle,       // inputs[0] to outputs[0], cut by the splits; no splits means equal pieces
  kBarrier,
};

bool is_reduction(CallKind kind);
bool has_root(CallKind kind);

/// Python's name of the operation: "all_reduce", "all_gather_into_tensor", …
const char* name_of(CallKind kind);
const char* name_of(ReduceOp op);

struct Call {
  CallKind kind = CallKind::kBarrier;
  std::vector<at::Tensor> inputs = {};
  std::vector<at::Tensor> outputs = {};
  ReduceOp op = ReduceOp::SUM;
  /// What this rank's input is multiplied by under PREMUL_SUM.
  double factor = 1;
  int root = 0;
  /// False if the caller waits at once, so that a backend need not bring in another thread.
  bool is_async = true;
  std::vector<int64_t> input_splits = {};
  std::vector<int64_t> output_splits = {};
  /// No rank's call ends before all ranks have their outputs. Backends of others do not know it.
  bool ends_together = false;
  std::chrono::milliseconds timeout = c10d::kUnsetTimeout;
  /// What it is for. launch() fills in the current LabelScope's if there is none.
  CallLabel label = {};

  /// The tensors that hold the result: the outputs, or the inputs of operations that work in place.
  const std::vector<at::Tensor>& results() const { return outputs.empty() ? inputs : outputs; }
  /// The tensors that say what travels: a rank may give nothing (scatter) and still receive.
  const std::vector<at::Tensor>& subjects() const { return inputs.empty() ? outputs : inputs; }
  /// Bytes this rank contributes.
  std::size_t bytes() const;
  /// "all_reduce(sum, Float[3, 4]) of DDP bucket 3": what two ranks must have in common is visible in it, and its
  /// label.
  std::string describe() const;
  /// The same with the call's number in its group: "all_reduce(sum, Float[3, 4]) #12 of DDP bucket 3".
  std::string describe(uint64_t sequence) const;
};

/// "Float[3, 4]".
std::string describe(const at::Tensor& tensor);

/// What is wrong with the call on its own, whatever the other ranks do: counts, sizes, the root. Nothing if it is well
/// formed.
std::optional<std::string> find_problem(const Call& call, int rank, int size);

/// Divides by the number of ranks, integers towards zero as NCCL does; autograd does not notice.
void divide_by_ranks(const std::vector<at::Tensor>& tensors, int64_t ranks);

/// Runs `call`, which is well formed, on a backend: one of ours receives it as it is, others through c10d's functions.
/// Blocking or not as the backend is; throws what the backend throws.
c10::intrusive_ptr<c10d::Work> dispatch(c10d::Backend& backend, Call call);

/// The pieces of a single-tensor form, as views: `tensor` cut along dim 0 by `splits`, or into `count` equal parts.
std::vector<at::Tensor> pieces_of(const at::Tensor& tensor, const std::vector<int64_t>& splits, int count);

}  // namespace lockstep
