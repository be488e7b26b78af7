#include "lockstep/ddp/state_sync.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <deque>

#include "lockstep/base/str.h"
#include "lockstep/comm/agreement.h"
#include "lockstep/comm/collectives.h"

namespace lockstep {
namespace {

struct Chunk {
  std::vector<at::Tensor> tensors;
  at::Tensor flat;
  Pending pending;
  bool is_in_place = false;  // flat is the only tensor itself
};

std::vector<Chunk> chunks_of(const std::vector<at::Tensor>& tensors, std::size_t chunk_bytes) {
  std::vector<Chunk> chunks;
  struct Open {
    at::ScalarType dtype;
    c10::Device device;
    std::size_t chunk;
    std::size_t bytes;
  };
  std::vector<Open> open;
  for (const auto& tensor : tensors) {
    if (tensor.numel() == 0) continue;
    auto found = std::find_if(open.begin(), open.end(), [&](const Open& each) {
      return each.dtype == tensor.scalar_type() && each.device == tensor.device();
    });
    if (found == open.end()) {
      open.push_back({tensor.scalar_type(), tensor.device(), chunks.size(), 0});
      found = std::prev(open.end());
      chunks.emplace_back();
    } else if (found->bytes + tensor.nbytes() > chunk_bytes) {
      found->chunk = chunks.size();
      found->bytes = 0;
      chunks.emplace_back();
    }
    chunks[found->chunk].tensors.push_back(tensor);
    found->bytes += tensor.nbytes();
  }
  return chunks;
}

/// In the order of memory where that is dense, so that strided parameters travel as they lie.
at::Tensor as_run(const at::Tensor& tensor) {
  if (tensor.is_non_overlapping_and_dense()) return tensor.as_strided({tensor.numel()}, {1});
  return tensor.reshape({-1});
}

void start(Chunk& chunk, const GroupPtr& group, int source) {
  if (chunk.tensors.size() == 1 && chunk.tensors[0].is_contiguous()) {
    chunk.flat = chunk.tensors[0].detach();  // by an operator: who answers for its memory is asked
    chunk.is_in_place = true;
  } else {
    int64_t total = 0;
    for (const auto& tensor : chunk.tensors) total += tensor.numel();
    chunk.flat = at::empty({total}, chunk.tensors[0].options().requires_grad(false));
    if (group->getRank() == source) {
      int64_t at = 0;
      for (const auto& tensor : chunk.tensors) {
        chunk.flat.narrow(0, at, tensor.numel()).copy_(as_run(tensor));
        at += tensor.numel();
      }
    }
  }
  chunk.pending = launch_broadcast(chunk.flat, source, group);
}

void finish(Chunk& chunk, const GroupPtr& group, int source) {
  chunk.pending.wait();
  if (group->getRank() == source || chunk.is_in_place) return;
  int64_t at = 0;
  for (const auto& tensor : chunk.tensors) {
    const auto part = chunk.flat.narrow(0, at, tensor.numel());
    if (tensor.is_non_overlapping_and_dense()) {
      as_run(tensor).copy_(part);
    } else {
      tensor.copy_(part.view(tensor.sizes()));
    }
    at += tensor.numel();
  }
}

}  // namespace

void broadcast_coalesced(const std::vector<at::Tensor>& tensors, const GroupPtr& group, std::size_t chunk_bytes,
                         int source) {
  if (group->getSize() == 1) return;
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;  // versions stay as they are
  auto chunks = chunks_of(tensors, chunk_bytes);
  constexpr std::size_t kInFlight = 2;
  for (std::size_t i = 0; i < chunks.size() + kInFlight; ++i) {
    if (i >= kInFlight) {
      finish(chunks[i - kInFlight], group, source);
      chunks[i - kInFlight] = {};
    }
    if (i < chunks.size()) start(chunks[i], group, source);
  }
}

void verify_parameters_across_ranks(const std::vector<ParameterInfo>& parameters, const GroupPtr& group) {
  if (group->getSize() == 1) return;
  const std::string what = "DistributedDataParallel's model";
  // First how many, then which: a message about parameter 7 would hide that one is missing.
  check_same_on_all_ranks(what, Facts{{"number of parameters", std::to_string(parameters.size())}}, group);
  Facts facts;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto& parameter = parameters[i];
    const auto label = str("parameter ", i, " '", parameter.name, "'");
    facts.emplace_back(
        label, str(c10::toString(parameter.dtype), "[", join(parameter.sizes, ", "), "], strides [",
                   join(parameter.strides, ", "), "]", parameter.expects_sparse_gradient ? ", sparse gradients" : ""));
  }
  check_same_on_all_ranks(what, facts, group);
}

}  // namespace lockstep
