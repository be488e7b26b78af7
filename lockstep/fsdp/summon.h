// Whole parameters for the program, between steps: to look at them, to change them, to run what knows nothing of
// shards.
//
//   {
//     const auto scope = root.summon_full_params();
//     torch::nn::init::xavier_uniform_(model->head->weight);   // parameters() are whole too
//   }                                                          // each rank keeps its part
//
// Inside of the scope no forward that is followed by a backward, and no step: optimizers hold the shards.
#pragma once

#include <memory>
#include <vector>

namespace lockstep {

namespace detail {
class Unit;
class Summon;
}  // namespace detail

struct SummonOptions {
  /// The units inside of this one as well.
  bool recurse = true;
  /// This rank's part of what was written is kept; of equal writes on all ranks, all.
  bool writeback = true;
  /// Only the mesh's first rank gets whole parameters; elsewhere using them is refused. Not with writeback.
  bool rank0_only = false;
  /// Whole parameters are in host memory.
  bool offload_to_cpu = false;
  /// .grad is whole too, and what is written there is kept as well. Not with offload_to_cpu.
  bool with_grads = false;
};

/// While it lives, module members and parameters() are whole, in the dtype of the shards. Made by
/// FsdpUnit::summon_full_params(): collective. Its end is local.
class SummonGuard {
 public:
  SummonGuard(const std::vector<std::shared_ptr<detail::Unit>>& units, const SummonOptions& options);
  ~SummonGuard();
  SummonGuard(SummonGuard&&) noexcept;
  SummonGuard& operator=(SummonGuard&&) = delete;

 private:
  std::unique_ptr<detail::Summon> summon_;
};

}  // namespace lockstep
