// Division by elements: the trainable parameters of a group lie in one flat buffer (a block) for each dtype, of which
// every rank steps an equal slice; one all-gather in place gives all ranks the rest. In ZeRO's second stage DDP's
// buckets are the blocks, and gradients come in slices too. Internal to zero.
//
// The local optimizer sees its slice as few long parameters (runs). A run is cut at the borders of parameters where
// their state would differ: if some got no gradient in a step, or were loaded with other step counts. So the result is
// that of whole parameters, whatever happens; as a rule there is one run, and one for each large parameter.
#pragma once

#include <memory>
#include <optional>
#include <unordered_set>
#include <utility>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/zero/division.h"
#include "lockstep/zero/scattered_gradients.h"

namespace lockstep::detail {

class ElementSlices final : public Division {
 public:
  /// Slices begin at multiples of this.
  static constexpr int64_t kAlignmentBytes = 64;

  /// The second stage has parameters block by block, and the gradients' slices of the same blocks.
  /// `is_awaited_later`: parameters get storages of their own, and those that are needed first are sent apart.
  ElementSlices(GroupPtr group, bool is_awaited_later, std::vector<std::vector<at::Tensor>> blocks = {},
                std::shared_ptr<ScatteredGradients> scattered = nullptr)
      : group_(std::move(group)),
        is_awaited_later_(is_awaited_later),
        given_blocks_(std::move(blocks)),
        scattered_(std::move(scattered)) {}

  /// How a block of these parameters is cut.
  static FlatLayout layout_for(const std::vector<at::Tensor>& parameters, int world_size);

  /// Makes blocks of the trainable parameters that are in none; the parameters become views. Groups can be added at the
  /// end and taken away there.
  void set_groups(std::vector<std::vector<at::Tensor>> groups) override;

  std::vector<std::vector<at::Tensor>> local_parameters() const override;
  /// What becomes trainable gets a block of its own; what is frozen stays, and has no gradient.
  void on_trainability_change() override;
  bool takes_gradients_in_place() const override { return false; }
  bool has_only_whole_gradients() const override;
  bool must_recut() const override;
  void take_gradients() override;
  void drop_gradients() override;
  std::vector<at::Tensor> own_gradients() const override;
  std::vector<const FlatShard*> flat_buffers() const override;
  std::vector<Arrival> launch_sync() override;
  std::vector<StatePiece> pieces(const OptimizerStateDict& local) const override;
  OptimizerStateDict load(const StateSource& source) override;
  ShardingBytes bytes() const override;

 private:
  struct Member {
    int64_t index = 0;  // over all groups
    std::size_t group = 0;
    at::Tensor parameter = {};
  };
  /// What this rank has of one parameter.
  struct Piece {
    Member of = {};
    ElementRange elements = {};  // in the block
    ElementRange in_parameter = {};
  };
  /// Pieces [first, last) of a block, all of one group.
  struct Run {
    std::size_t first = 0;
    std::size_t last = 0;
    ElementRange elements = {};
    at::Tensor parameter = {};
    at::Tensor gradients = {};  // where those of its pieces do not lie like it
  };
  struct Block {
    std::size_t number = 0;
    std::size_t last_group = 0;
    FlatShard flat = {};
    std::unordered_set<const void*> members = {};
    std::vector<Piece> pieces = {};  // this rank's
    std::vector<Run> runs = {};
  };
  using PieceValues = std::vector<std::optional<NamedValues>>;
  /// Of gradients, from `from[i]` to `to[i]`.
  struct Copies {
    std::vector<at::Tensor> to = {};
    std::vector<at::Tensor> from = {};
  };

  Block made_block(const std::vector<Member>& members) const;
  std::unordered_set<const void*> placed_parameters() const;
  /// State that the source has of parameters without a place here is dropped.
  void warn_of_frozen_state(const StateSource& source) const;
  bool has_gradient(const Piece& piece) const;
  /// Of all parameters, whatever this rank has of them: either all ranks throw, or none.
  void check_gradients_are_dense() const;
  /// As the run's parameter lies; a view if there is nothing to put together. Off the CPU its values are there once
  /// `copies` are made.
  at::Tensor gradient_of(const Block& block, Run& run, Copies& copies) const;
  Run made_run(const Block& block, std::size_t first, std::size_t last) const;
  /// Runs as long as presence of gradients and the values that are not by element allow.
  std::vector<Run> cut(const Block& block, const PieceValues& values) const;
  /// The run's state, from that of its pieces.
  NamedValues joined(const PieceValues& values, const Run& run, const Block& block) const;
  /// Calls visit(group, block, run) in the order of the local optimizer's parameters.
  template <class Blocks, class Visit>
  void for_each_run(Blocks& blocks, const Visit& visit) const;

  /// Sends the block's slices piece by piece, in the order of the parameters.
  void launch_in_pieces(const FlatShard& flat, std::vector<Arrival>& arrivals) const;

  const GroupPtr group_;
  const bool is_awaited_later_;
  const std::vector<std::vector<at::Tensor>> given_blocks_;
  const std::shared_ptr<ScatteredGradients> scattered_;  // null in the first stage
  std::vector<std::vector<at::Tensor>> groups_;
  std::vector<Block> blocks_;
};

}  // namespace lockstep::detail
