// The parameters of a unit: their shards, the gather that makes them whole for a while, the reduction of their
// gradients. Internal to fsdp. Not thread-safe: the unit's tree has the lock.
//
// A parameter is cut along dim 0 by the chunk rule. For collectives every rank's part is as long as the first one's:
// the parts of a unit lie in one flat buffer that the group's backend reaches without a copy, and a gather puts them
// straight into the whole parameters, one behind the other, so nothing is copied out.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/call_label.h"
#include "lockstep/comm/pending.h"
#include "lockstep/fsdp/freed_storage.h"
#include "lockstep/fsdp/options.h"
#include "lockstep/fsdp/shard_watch.h"
#include "lockstep/mesh/device_mesh.h"

namespace lockstep::detail {

/// A parameter before it is sharded.
struct WholeParameter {
  std::string name;
  at::Tensor tensor;
};

class ParameterGroup {
 public:
  /// Cuts the parameters: each keeps its sizes and loses its memory, for which `owner` answers from then on. Local.
  ParameterGroup(const std::vector<WholeParameter>& parameters, const DeviceMesh& mesh,
                 const MixedPrecisionPolicy& policy, const std::shared_ptr<StorageOwner>& owner,
                 const std::string& unit);

  std::size_t count() const { return members_.size(); }
  const std::string& name(std::size_t index) const { return members_[index].name; }
  /// What the module registers from now on.
  const at::Tensor& shard(std::size_t index) const { return members_[index].shard; }
  /// The whole parameter; undefined if all handles are gone.
  at::Tensor whole(std::size_t index) const { return members_[index].memory.tensor(); }

  // Gathering. All ranks do the same.
  void launch_gather();
  /// After launch_gather().
  void finish_gather();
  void free();
  /// Brings what the program wrote into the whole parameters into the shards, this rank's part of it.
  void write_back();
  /// Whether shards were written, or exchanged, since they were gathered last. Names the first one.
  const std::string* changed_since_gather() const;
  /// How many required gradients when they were gathered last.
  std::size_t trainable_count() const { return trainable_count_; }

  // Reduction of what is in the whole parameters' .grad. All ranks have gradients of the same parameters.
  /// Takes the gradients, each times `scale`, and starts their sum over the ranks.
  void launch_reduction(double scale);
  bool is_reducing() const { return !reductions_.empty(); }
  /// Waits for what was launched first, and for the sum over replicas.
  void finish_reduction();
  /// Puts what was reduced into the shards' .grad, or adds it to what is there.
  void hand_out_gradients();
  /// Forgets what was launched and what is in the whole parameters' .grad.
  void drop_gradients();

 private:
  struct Member {
    std::string name;
    std::vector<int64_t> sizes;
    at::ScalarType dtype;
    int64_t row = 1;        // elements of one index of dim 0
    int64_t rows = 0;       // of this rank, at most `chunk`
    int64_t first_row = 0;  // in the whole parameter
    int64_t chunk = 0;      // rows of the first rank
    int64_t offset = 0;     // in shards_
    FreedStorage memory;
    at::Tensor shard = {};
    const void* address = nullptr;  // of the shard in shards_

    int64_t padded() const { return chunk * row; }
  };
  struct Reduction {
    Pending pending;
    at::Tensor input;
    at::Tensor output;
    std::vector<std::size_t> members;
  };

  void cut(Member& member, const at::Tensor& tensor);
  void take_back_shards();
  /// Lets whole parameters require gradients as their shards do: those may be frozen or thawed any time.
  void follow_requires_grad();
  at::ScalarType gathered_dtype(at::ScalarType dtype) const;
  at::Tensor reduction_input(const std::vector<std::size_t>& members, double scale) const;

  const MixedPrecisionPolicy policy_;
  const DeviceMesh mesh_;
  const GroupPtr group_;     // over which parameters are cut
  const GroupPtr replicas_;  // null if there are none
  const CallLabel gather_label_;
  const CallLabel reduce_label_;
  std::vector<Member> members_;
  at::Tensor shards_;  // flat, padded; undefined for a unit without parameters
  const std::shared_ptr<ShardWatch> watch_ = std::make_shared<ShardWatch>();
  std::optional<OwnedStorage> watched_;
  std::size_t trainable_count_ = 0;
  std::vector<at::Tensor> gathered_;  // by member, while gathering
  Pending gather_;
  std::vector<Reduction> reductions_;  // on their way
  std::vector<Reduction> reduced_;
};

}  // namespace lockstep::detail
