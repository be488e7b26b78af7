// A check that ranks hold what placements say: against replicas that differ, which train wrongly without a word.
//
//   {
//     const lockstep::LayoutChecker checker;   // for a step, now and then
//     loss_of(model(x)).backward();
//   }
//   lockstep::check_layouts(*model);           // after a load, or at the end of a step
#pragma once

#include <cstdint>

namespace torch::nn {
class Module;
}

namespace lockstep {

namespace detail {
struct OpenCheckers;
}

/// While it lives, after every operator on DTensors, forward and backward, ranks compare what must be equal: the
/// operator, sizes, dtype and placements of its results, and the bits of what they hold along axes that replicate. The
/// first tensor that differs is an error on all ranks of the mesh, which names operator, result and ranks. Per rank:
/// all ranks of a mesh have one, or none. Costs a small all-gather per result and axis, and waits for what is under
/// way.
class LayoutChecker {
 public:
  LayoutChecker();
  ~LayoutChecker();
  LayoutChecker(const LayoutChecker&) = delete;
  LayoutChecker& operator=(const LayoutChecker&) = delete;

  /// How many tensors were compared since it began.
  int64_t compared() const;

 private:
  detail::OpenCheckers& open_;
  int64_t compared_before_ = 0;
};

/// Compares the registered parameters and buffers of `module` that carry a layout, or are DTensors: names, sizes,
/// dtypes and placements on all ranks of their meshes, local sizes with the layout's, and the bits of replicas. Throws
/// on all ranks of a mesh, naming the first that differs. Collective over the meshes.
void check_layouts(const torch::nn::Module& module);

}  // namespace lockstep
