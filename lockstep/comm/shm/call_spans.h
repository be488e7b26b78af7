// A call's tensors as the bytes that shm/ moves: contiguous, and inputs apart from outputs. Internal to comm.
//
// Made when the call's turn has come, not when it is launched: an earlier call may still write to its tensors.
#pragma once

#include <c10/util/SmallVector.h>

#include <optional>
#include <utility>
#include <vector>

#include "lockstep/comm/call.h"
#include "lockstep/shm/request.h"

namespace lockstep::detail {

class CallSpans {
 public:
  using Spans = c10::SmallVector<shm::Span, 4>;

  /// `call` must outlive it.
  CallSpans(const Call& call, int rank, int ranks);

  const Spans& gives() const { return gives_; }
  const Spans& gets() const { return gets_; }
  /// Gives the caller's tensors what arrived in others that stood in for them.
  void write_back() const;
  /// The tensors the spans point to.
  const Call& call() const { return own_ ? *own_ : call_; }

 private:
  void make_contiguous();
  void separate_inputs();
  bool is_own_piece(std::size_t input, std::size_t output) const;
  void collect_spans();
  bool is_root() const { return rank_ == call_.root; }
  Call& own();

  const Call& call_;
  const int rank_;
  const int ranks_;
  std::optional<Call> own_;                                       // if some tensors had to be replaced
  std::vector<std::pair<at::Tensor, at::Tensor>> to_write_back_;  // from a contiguous one to the caller's own
  Spans gives_;
  Spans gets_;
};

}  // namespace lockstep::detail
