// What the leaders of several hosts do among each other. Internal to comm: the middle stage of a Hierarchy.
//
// The transport only moves bytes; the arithmetic is that of shm/, in host order. So every dtype and reduction of the
// local stage works here too, half types are summed in float, and all leaders get the same bits in every run.
#pragma once

#include <vector>

#include "lockstep/comm/backend_registry.h"
#include "lockstep/comm/call.h"
#include "lockstep/comm/deadline.h"
#include "lockstep/shm/reduce.h"

namespace lockstep::detail {

/// All of it is collective over the leaders and blocks. Tensors are contiguous and of one dtype.
class LeaderExchange {
 public:
  /// Among the leaders alone; rank h is host h's.
  explicit LeaderExchange(BackendPtr transport) : transport_(std::move(transport)) {}

  /// In place.
  void all_reduce(const at::Tensor& run, const shm::Reduction& reduction, const Deadline& deadline);
  /// In place on host `root`; the others keep theirs.
  void reduce(const at::Tensor& run, int root, const shm::Reduction& reduction, const Deadline& deadline);
  /// This host's part of the reduction of all runs, which are cut into `elements[h]` for host h.
  at::Tensor reduce_scatter(const at::Tensor& run, const std::vector<int64_t>& elements,
                            const shm::Reduction& reduction, const Deadline& deadline);
  /// The leaders' runs of equal size, one after the other.
  void all_gather(const at::Tensor& output, const at::Tensor& input, const Deadline& deadline);
  void broadcast(const at::Tensor& run, int root, const Deadline& deadline);
  void barrier(const Deadline& deadline);

 private:
  int host() const { return transport_->getRank(); }
  int hosts() const { return transport_->getSize(); }
  /// Row h: what host h has for this one.
  at::Tensor exchange(const at::Tensor& run, const std::vector<int64_t>& elements, const Deadline& deadline);
  void run_call(Call call, const Deadline& deadline);

  const BackendPtr transport_;
};

}  // namespace lockstep::detail
