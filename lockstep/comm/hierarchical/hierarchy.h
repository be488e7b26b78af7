// The collectives of a group that spans hosts: shared memory inside each host, one leader per host across. Internal to
// comm; docs/comm.md, "Several hosts", says which stages each operation has.
//
// One call at a time, the same on all ranks. A call that fails is the last: the hosts may have come to different
// points.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/backend_registry.h"
#include "lockstep/comm/call.h"
#include "lockstep/comm/hierarchical/host_layout.h"
#include "lockstep/comm/hierarchical/leader_exchange.h"
#include "lockstep/comm/shm/shm_backend.h"

namespace lockstep::detail {

class Hierarchy {
 public:
  /// `local`: the ranks of this host. `leaders`: one per host, null on ranks that lead none. `flat`: all ranks.
  Hierarchy(HostLayout layout, int rank, c10::intrusive_ptr<ShmBackend> local, const BackendPtr& leaders,
            BackendPtr flat);

  /// Runs `call`, which is well formed, and blocks until its results may be read.
  void run(const Call& call);

  ShmBackend& local() const { return *local_; }
  c10d::Backend& flat() const { return *flat_; }

 private:
  void run_stages(const Call& call, const Deadline& deadline);
  void all_reduce(const Call& call, const Deadline& deadline);
  void reduce(const Call& call, const Deadline& deadline);
  void broadcast(const Call& call, const Deadline& deadline);
  void all_gather(const Call& call, const Deadline& deadline);
  void reduce_scatter(const Call& call, const Deadline& deadline);
  void barrier(const Deadline& deadline);

  // Stages. A local root is a place on this host; the leader's is 0.
  void on_host(Call call, const Deadline& deadline);
  void reduce_to_leader(const at::Tensor& run, const Call& call, const Deadline& deadline);
  void broadcast_on_host(const at::Tensor& run, int root, const Deadline& deadline);
  /// Only leaders do `stage`.
  template <class Stage>
  void across(const Stage& stage);

  bool is_leader() const { return layout_.place_of(rank_) == 0; }
  int ranks() const { return layout_.ranks(); }
  /// Ranks of this host.
  int places() const { return static_cast<int>(layout_.ranks_on(host_).size()); }
  std::size_t host_index() const { return static_cast<std::size_t>(host_); }
  /// The hosts' parts of a table that has a row per rank, in host order.
  std::vector<at::Tensor> by_host(const at::Tensor& table) const;

  // Fixed after construction.
  const HostLayout layout_;
  const int rank_;
  const int host_;
  const at::Tensor host_order_;  // layout_.host_order(); undefined if that is rank order
  const c10::intrusive_ptr<ShmBackend> local_;
  const BackendPtr flat_;

  // Used by run() alone.
  // Dropped when a call fails: the leaders' connections close, and others stop waiting.
  std::shared_ptr<LeaderExchange> leaders_;
  std::shared_ptr<LeaderExchange> all_;  // of all ranks: compares what has no stages
  std::string failure_;
};

}  // namespace lockstep::detail
