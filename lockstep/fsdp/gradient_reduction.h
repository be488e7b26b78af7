// The reduction of a group's gradients: from the whole parameters' .grad on every rank to the shards' .grad. Internal
// to fsdp. Not thread-safe: the unit's tree has the lock.
//
// Gradients are scaled while they are copied into the buffer that is reduced, before they are summed, in rank order:
// the bits are DDP's. Shards get theirs when backward is over, so a backward that throws leaves nothing behind.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/call_label.h"
#include "lockstep/comm/pending.h"
#include "lockstep/fsdp/member.h"
#include "lockstep/fsdp/options.h"
#include "lockstep/fsdp/shard_watch.h"
#include "lockstep/fsdp/unit_comm.h"

namespace lockstep::detail {

/// What a unit's settings say about one reduction. The same on all ranks.
struct ReductionSettings {
  double divisor = 0;                                      // 0: the number of ranks
  bool sums_replicas = true;                               // false: kept until a reduction that does
  bool sends_zeros = false;                                // for trainable parameters without gradients
  bool counts = true;                                      // false: this backward's gradients count as zeros
  std::function<void(const at::Tensor&)> on_reduced = {};  // the program's, on the flat result
  std::optional<c10::Stream> on_reduced_stream = {};       // where it runs; none: on the current one
};

class GradientReduction {
 public:
  /// `members` belong to the group that holds this. `replicas` is null if there are none.
  GradientReduction(std::vector<Member>& members, GroupPtr group, GroupPtr replicas, const FullyShardOptions& options);

  void set_unit_name(const std::string& name);
  void set_reduce_scatter(std::shared_ptr<ReduceScatterComm> comm) { comm_ = std::move(comm); }
  void set_group(GroupPtr group) { group_ = std::move(group); }

  /// Sets gradients aside, to be reduced with those of a later backward; or drops them if they do not count.
  void keep(bool counts);
  /// What was set aside is dropped if the program has zeroed the shards' gradients since.
  void forget_zeroed();
  bool has_kept() const;
  /// Between steps whole parameters have gradients that throw by name, so that nobody takes them for those of a step.
  void refuse_whole();
  void accept_whole();
  /// Takes the gradients and starts their sum over the ranks. All ranks have gradients of the same parameters, unless
  /// zeros are sent. Throws before anything is sent.
  void launch(const ReductionSettings& settings);
  /// Waits for what was launched, and starts the sum over replicas.
  void finish_scatter();
  /// Waits for that.
  void finish_replicas();
  /// Puts what was reduced into the shards' .grad, or adds it to what is there, and runs the shards' hooks.
  void hand_out();
  /// Lets what was launched wait for a later backward, unless the program zeroes gradients before that.
  void leave_launched();
  /// Waits for gradients on their way to the host.
  void finish_copies();
  /// Forgets what was launched, kept, and is in the whole parameters' .grad.
  void drop();
  /// Bytes of the buffers that reduce all gradients.
  int64_t buffer_bytes() const;

 private:
  struct Reduction {
    Pending pending;
    at::Tensor input;
    at::Tensor output;
    std::vector<std::size_t> members;
    std::vector<bool> is_zeroed = {};  // by place in members; none: the program has zeroed none since
    ReductionSettings settings;
    double scale_after = 1;
    std::optional<c10::Event> hooked = std::nullopt;  // behind on_reduced, on a stream of the program's

    bool is_dropped(std::size_t place) const { return !is_zeroed.empty() && is_zeroed[place]; }
  };

  std::vector<std::size_t> members_to_reduce(const ReductionSettings& settings);
  void witness(std::size_t index);
  /// Gradients of parameters that were frozen since the forward: autograd would not have kept them.
  void drop_frozen();
  bool is_zeroed(std::size_t index) const;
  void check(const std::vector<std::size_t>& members) const;
  at::ScalarType reduce_dtype(at::ScalarType compute_dtype) const;
  int64_t world() const;
  void fill(const at::Tensor& input, const Member& member, double scale, bool counts);
  /// Adds what waits for the sum over replicas, or lets this wait as well.
  void add_partials(const Reduction& reduction);
  static void run_hook(Reduction& reduction);
  void hand_out(const Member& member, const at::Tensor& flat);
  std::string who() const;

  std::vector<Member>& members_;
  GroupPtr group_;
  const GroupPtr replicas_;
  const MixedPrecisionPolicy policy_;
  std::string unit_;
  CallLabel label_;
  std::shared_ptr<ReduceScatterComm> comm_ = std::make_shared<ReduceScatterComm>();

  /// Tells whether the program zeroed or dropped a shard's gradient since others were set aside: these go with it.
  struct Witness {
    const void* grad = nullptr;
    int64_t version = 0;
    bool is_stand_in = false;                         // ours: the program has none yet
    std::shared_ptr<ZeroWatch> watch = nullptr;       // of a stand-in
    std::shared_ptr<OwnedStorage> watched = nullptr;  // its storage
  };
  std::vector<Witness> witnesses_;     // by member; none if nothing is kept
  std::vector<at::Tensor> partials_;   // by member: sums over the shard group only
  std::vector<Reduction> scattering_;  // in launch order
  std::vector<Reduction> replicating_;
  std::vector<Reduction> reduced_;
  std::optional<c10::Stream> copying_;  // on which gradients go to the host
};

}  // namespace lockstep::detail
