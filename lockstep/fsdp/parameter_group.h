// The parameters of a unit that are gathered together: their shards, the gather that makes them whole for a while, the
// reduction of their gradients. Internal to fsdp. Not thread-safe: the unit's tree has the lock.
//
// For collectives every rank's part of a parameter is as long as the first one's. The parts lie in one flat buffer that
// the group's backend reaches without a copy, and a gather puts them straight into the whole parameters, one behind the
// other, so nothing is copied out; only what is not cut along its first dim is put in order afterwards.
//
// On one host next to nothing is copied: see host_share.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/call_label.h"
#include "lockstep/comm/pending.h"
#include "lockstep/fsdp/gradient_reduction.h"
#include "lockstep/fsdp/host_share.h"
#include "lockstep/fsdp/member.h"
#include "lockstep/fsdp/options.h"
#include "lockstep/fsdp/shard_watch.h"
#include "lockstep/fsdp/unit_comm.h"
#include "lockstep/fsdp/unit_steps.h"

namespace lockstep::detail {

class ParameterGroup {
 public:
  /// Cuts the parameters, which have one dtype: each keeps its sizes and loses its memory, for which `owner` answers
  /// from then on. Local.
  ParameterGroup(const std::vector<WholeParameter>& parameters, const DeviceMesh& mesh,
                 const FullyShardOptions& options, const std::shared_ptr<StorageOwner>& owner);
  ~ParameterGroup();
  ParameterGroup(const ParameterGroup&) = delete;
  ParameterGroup& operator=(const ParameterGroup&) = delete;

  const std::vector<Member>& members() const { return members_; }
  const DeviceMesh& mesh() const { return mesh_; }
  at::Device device() const { return device_; }
  int64_t ranks() const { return group_->getSize(); }
  /// How the members' ranks divide what a module computes with; a shard's layout has what was cut before as well.
  Layout division_of(const Member& member) const;
  GradientReduction& gradients() { return gradients_; }
  /// In errors and events.
  void set_unit_name(const std::string& name);
  void set_all_gather(std::shared_ptr<AllGatherComm> comm);
  /// Between forward and backward, each of these ranks keeps an equal part of every whole parameter.
  void set_group_between(GroupPtr group);

  /// In the shards' own dtype, whatever the policy says. REQUIRES: it is not whole.
  void set_full_precision(bool is_full_precision);

  // Gathering. All ranks do the same. `for_backward`: of a forward since which the shards have not changed.
  void launch_gather(Pass pass, bool for_backward);
  /// After launch_gather().
  void wait_for_gather();
  /// After that: gathered parts become the whole parameters.
  void finish_gather();
  void free();
  /// As free(), but this rank's part for the backward's gather stays if there is a group for that.
  void free_until_backward();
  /// The next gather is over all ranks.
  void drop_parts() { kept_.clear(); }
  /// Whether shards were written, or exchanged, since they were gathered last. Names the first one.
  const std::string* changed_since_gather() const;
  /// Lets whole parameters require gradients as their shards do: those may be frozen or thawed between passes.
  void follow_requires_grad();
  /// Whether a shard was frozen or thawed since.
  bool has_changed_requires_grad() const;
  /// How many handles required gradients then, and how many there are.
  std::size_t trainable_count() const { return trainable_count_; }
  std::size_t handle_count() const { return handle_count_; }
  /// Bytes of the shards, and of all whole parameters with their padding.
  int64_t shard_bytes() const;
  int64_t whole_bytes() const;
  /// For events.
  Event describe() const;

 private:
  void cut(Member& member, const at::Tensor& value);
  /// Follows shards whose memory, device or dtype was exchanged: by a load, to(), set_data().
  void take_back_shards();
  void check_taken_back(const Member& member) const;
  void take_frozen_handles(Member& member) const;
  void rebuild(const at::TensorOptions& options);
  /// New memory for all shards.
  void make_room(const at::TensorOptions& options, int64_t elements);
  void mark_changed() const;
  /// The shards as they are gathered: in the compute dtype, on the compute device.
  at::Tensor gather_source(Pass pass) const;
  void launch_gather_between();
  /// False if ranks do not share a host.
  bool launch_on_host(Pass pass, bool for_backward);
  /// Of whole parameters, by the policy and as they are gathered now.
  at::ScalarType policy_dtype(at::ScalarType dtype) const;
  at::ScalarType gathered_dtype(at::ScalarType dtype) const;

  const FullyShardOptions options_;
  const DeviceMesh mesh_;
  const GroupPtr group_;  // over which parameters are cut
  const bool is_divided_;
  at::Device device_;  // of whole parameters
  std::vector<Member> members_;
  at::Tensor shards_;  // flat, padded; undefined for a group without parameters
  const std::shared_ptr<ShardWatch> watch_;
  std::optional<OwnedStorage> watched_;
  std::size_t handle_count_ = 0;
  std::size_t trainable_count_ = 0;
  GradientReduction gradients_;

  std::shared_ptr<AllGatherComm> comm_ = std::make_shared<AllGatherComm>();
  std::string unit_;  // its name
  CallLabel gather_label_;
  Pending gather_;
  std::vector<at::Tensor> gathered_;  // by member; while it is gathered and whole
  bool is_in_order_ = true;           // what gathered_ holds
  bool is_full_precision_ = false;
  GroupPtr between_;                  // null: all parts are freed
  std::vector<at::Tensor> kept_;      // by member; from forward to backward
  std::unique_ptr<HostShare> share_;  // null: gathers are copies
  bool may_share_;
  bool is_from_host_ = false;  // what is being gathered
};

}  // namespace lockstep::detail
