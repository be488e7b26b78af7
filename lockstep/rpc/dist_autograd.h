// Distributed autograd: one backward through functions that ran on several workers.
//
//     dist_autograd::Context context;
//     auto loss = rpc::rpc_sync("worker1", forward, input).sum();
//     dist_autograd::backward(context.id(), {loss});
//     auto gradients = dist_autograd::get_gradients(context.id());   // this worker's; .grad is not touched
//
// Calls made by this thread while the scope lives are recorded, the calls those functions make too. Gradients gather in
// the context, on each worker those of its own tensors; a DistributedOptimizer's step applies them.
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <vector>

namespace lockstep::dist_autograd {

/// One backward pass over all workers that its calls reach. A thread has one at a time. Its end, by whichever way,
/// releases it here and on those workers.
class Context {
 public:
  Context();
  /// For later: no thread works for it before a WorkFor says so. Several may be open at once.
  struct ForLater {};
  explicit Context(ForLater /*tag*/);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  Context(Context&&) = delete;
  Context& operator=(Context&&) = delete;

  /// The same on all workers: rank << 48 | counter.
  std::int64_t id() const { return id_; }

 private:
  std::int64_t id_;
};

/// Lets this thread work for `context`, instead of whichever it works for, until the end of the scope. With it a
/// program sends the calls of its next batch while it computes the last one:
///
///     auto next = std::make_unique<Context>(Context::ForLater());
///     Future<at::Tensor> rows = (WorkFor(*next), rpc::rpc_async("server", look_up, ids));
class WorkFor {
 public:
  explicit WorkFor(const Context& context);
  ~WorkFor();
  WorkFor(const WorkFor&) = delete;
  WorkFor& operator=(const WorkFor&) = delete;
  WorkFor(WorkFor&&) = delete;
  WorkFor& operator=(WorkFor&&) = delete;

 private:
  std::int64_t before_;
};

struct BackwardOptions {
  bool retain_graph = false;
  /// Of the whole pass; none: wait for ever. A call with tensors that need gradients whose result does not contribute
  /// to the roots never gets any, and then the pass waits for it.
  std::optional<std::chrono::milliseconds> timeout = std::nullopt;
};

/// Blocks until all workers have done their part. Roots have one element each.
void backward(std::int64_t context_id, const std::vector<at::Tensor>& roots, const BackwardOptions& options = {});

/// This worker's tensors in the context and their gradients; several backwards add up.
c10::Dict<at::Tensor, at::Tensor> get_gradients(std::int64_t context_id);

/// Adds the context's gradients of these parameters to their .grad, as a plain backward does. For optimizers that step
/// by .grad, a ZeroRedundancyOptimizer say. Those that have none in the context are left alone.
void accumulate_grads(std::int64_t context_id, const std::vector<at::Tensor>& parameters);

}  // namespace lockstep::dist_autograd
