// The gradients of ZeRO's second stage: of every bucket of DDP this rank's slice of the average. Internal to zero.
//
// A parameter whose gradient is here has a stand-in in .grad: what happens to that happens to the gradient. So the
// module's zero_grad(), and whatever else puts something in its place, count here as they do everywhere. Backwards add
// to slices, as they add to .grad; a step uses them up. Filled by the reducer on threads of the autograd engine, read
// between backwards.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/pending.h"
#include "lockstep/ddp/gradient_scatter.h"
#include "lockstep/shard/flat_layout.h"
#include "lockstep/zero/slice_stand_in.h"

namespace lockstep::detail {

class ScatteredGradients final : public GradientScatter,
                                 public SliceKeeper,
                                 public std::enable_shared_from_this<ScatteredGradients> {
 public:
  struct Member {
    at::Tensor parameter = {};
    std::string name = "";
    int64_t index = 0;  // the optimizer's
  };
  /// A bucket: what is in it, and how it is cut.
  struct Cut {
    FlatLayout layout = {};
    std::vector<Member> members = {};        // in the layout's order
    at::ScalarType kept_dtype = at::kFloat;  // in which this rank keeps its slice
  };

  /// `optimizer_indices` by the reducer's. `reduce_dtype` as of ZeroOptions. `check_can_be_summed` throws where ranks
  /// could not take part in a sum. `who` opens messages.
  ScatteredGradients(std::vector<Cut> cuts, std::vector<int64_t> optimizer_indices,
                     std::optional<at::ScalarType> reduce_dtype, GroupPtr group, std::string who,
                     std::function<void()> check_can_be_summed);

  /// Brings all gradients into the slices: what is in .grad in place of a stand-in, and what backwards that were not
  /// averaged have added. Before anybody reads them.
  void settle();
  /// As of settle(): whether the parameter has a gradient.
  bool has(int64_t index) const { return held_[index].has; }
  /// As of settle(): there are gradients, and none of them came from an averaged backward.
  bool has_only_whole_gradients() const { return has_taken_whole_ && !has_averaged_; }
  /// This rank's slice of the bucket; where has() is false it means nothing.
  const at::Tensor& slice(std::size_t bucket) const { return slices_[bucket].gradients; }
  void drop();
  int64_t bytes() const;

  std::optional<at::ScalarType> reduce_dtype() const override {
    // One rank has nothing to reduce, and rounds nothing; nor does DDP.
    return group_->getSize() > 1 ? reduce_dtype_ : std::nullopt;
  }
  int64_t buffer_elements(std::size_t bucket) const override { return cuts_[bucket].layout.plan().padded(); }
  void begin_bucket(std::size_t bucket) override;
  void launch(std::size_t bucket, const at::Tensor& buffer) override;
  void wait_for(std::size_t bucket) override;
  void end_backward(const std::vector<bool>& is_used) override;
  void give_up() override;

  std::string description_of(int64_t index) const override;
  at::Tensor part_of_gradient(int64_t index) override;
  at::Tensor same_part_of(int64_t index, const at::Tensor& whole) const override;
  void add_whole(int64_t index, const at::Tensor& gradient) override;
  void forget_additions(int64_t index) override;
  const GroupPtr& group() const override { return group_; }
  void check_can_be_summed() const override { check_can_be_summed_(); }

 private:
  struct Slice {
    at::Tensor gradients = {};
    at::Tensor arriving = {};  // in a backward, if it cannot arrive in gradients
    bool adds = false;         // in a backward: to gradients that were there
    std::optional<Pending> reduction = std::nullopt;
    bool is_begun = false;  // a backward is filling the bucket
  };
  /// What is known of a parameter; undefined if DDP does not average it.
  struct Held {
    at::Tensor parameter = {};
    std::string name = "";
    std::size_t bucket = 0;
    ElementRange in_slice = {};
    ElementRange in_parameter = {};
    /// The order in which in_parameter counts; the parameter itself may have got another one.
    std::vector<int64_t> memory_order = {};
    at::Tensor stand_in = {};
    /// What backwards that were not averaged have added since the stand-in is in .grad.
    at::Tensor added = {};
    bool has = false;
    bool is_kept = false;          // in a backward: there was a gradient before it
    bool has_settled_own = false;  // of a whole gradient only this rank's part was kept
  };

  bool is_in_place(const Held& held) const;
  void make_stand_in(Held& held, int64_t index);
  at::Tensor part_of_slice(const Held& held) const;
  static at::Tensor part_of_whole(const Held& held, const at::Tensor& whole);
  void settle_added(Held& held);
  void settle(Held& held);
  void forget(Held& held);

  const std::vector<Cut> cuts_;
  const std::vector<int64_t> optimizer_indices_;
  const std::optional<at::ScalarType> reduce_dtype_;
  const GroupPtr group_;
  const std::string who_;
  const std::function<void()> check_can_be_summed_;
  std::vector<Slice> slices_;
  std::vector<Held> held_;  // by the optimizer's indices
  bool has_averaged_ = false;
  bool has_taken_whole_ = false;
};

}  // namespace lockstep::detail
