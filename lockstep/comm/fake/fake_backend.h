// A group with no other ranks in it: fixed rank and size, calls are recorded and finish at once. For construction-only
// tests, pretend worlds of any size, and faults: the n-th call can be delayed or made to fail.
//
// Data: reductions and broadcasts leave the tensor as it is; gathers fill every slot with this rank's piece; scatters
// take this rank's own piece.
#pragma once

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "lockstep/comm/call_backend.h"
#include "lockstep/comm/group.h"

namespace lockstep {

class FakeBackend : public CallBackend {
 public:
  FakeBackend(int rank, int size, std::chrono::milliseconds timeout = std::chrono::minutes(30));

  /// A copy of the calls so far, oldest first.
  std::vector<Call> calls() const;
  void clear_calls();

  /// Call number `n` (0 is the first ever) sleeps before it finishes.
  void delay_call(std::size_t n, std::chrono::milliseconds duration);
  /// Call number `n` throws c10::DistBackendError(message) in wait().
  void fail_call(std::size_t n, const std::string& message);

 protected:
  WorkPtr submit(Call&& call) override;
  uint64_t sequence_number() const override;

 private:
  mutable std::mutex mutex_;
  std::vector<Call> calls_;
  uint64_t next_ = 0;
  std::map<std::size_t, std::chrono::milliseconds> delays_;
  std::map<std::size_t, std::string> failures_;
};

/// A group over a FakeBackend, for code that takes a group. Local: nothing is contacted.
struct FakeGroup {
  GroupPtr group;
  c10::intrusive_ptr<FakeBackend> backend;
};
FakeGroup make_fake_group(int rank, int size);

}  // namespace lockstep
