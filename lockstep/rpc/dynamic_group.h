// Groups whose workers come and go: no size is known, and each tells the others of itself. Internal to rpc.
#pragma once

#include <torch/csrc/distributed/rpc/types.h>

#include <chrono>

#include "lockstep/rpc/meeting.h"

namespace lockstep::rpc::detail {

/// One worker comes or goes at a time; held until the end of the scope. Throws if another holds it for longer than
/// `timeout`.
class MembershipLock {
 public:
  MembershipLock(StorePtr store, std::string worker, std::chrono::milliseconds timeout);
  ~MembershipLock();
  MembershipLock(const MembershipLock&) = delete;
  MembershipLock& operator=(const MembershipLock&) = delete;
  MembershipLock(MembershipLock&&) = delete;
  MembershipLock& operator=(MembershipLock&&) = delete;

 private:
  StorePtr store_;
  std::string worker_;
};

/// Throws unless what `own` registered fits the workers that are there. RPC runs already, but nobody knows of us.
void compare_with_members(const WorkerCard& own, c10d::Store& store);

/// Tells every other worker that this one comes, or goes. Those that do not answer are warned of and left out.
void tell_members(bool joins);

}  // namespace lockstep::rpc::detail
