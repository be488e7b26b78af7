// Tensor parallelism for modules as they are.
//
//   lockstep::parallelize_module(*model, mesh["tp"],
//                                {{"layers.*.in_proj", lockstep::ColwiseParallel()},
//                                 {"layers.*.out_proj", lockstep::RowwiseParallel()}});
//
// A layer's members become DTensors; its registered parameters stay plain leaves that hold this rank's part, with their
// layout attached (shard/layout_of.h): optimizers, files and fully_shard() see ordinary tensors under the names they
// had. docs/tensor-parallel.md tells what follows.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/tp/style.h"

namespace lockstep {

/// Dotted paths below the module, a pattern per token ("layers.*.in_proj", "head?", "[ab]"); "" is the module itself.
using ParallelPlan = std::vector<std::pair<std::string, Style>>;

struct ParallelizeOptions {
  /// Whose weights count, by its number in the mesh. None: every rank cuts its own, and nothing is sent; parts of what
  /// was built by deferred_init() are deferred too then.
  std::optional<int> src_data_rank = 0;
};

/// Applies each style to the modules its path names, in the plan's order. Warns of a token that matches nothing.
/// Refuses a mesh of several axes, layers a style does not know, parameters that are divided already or differ between
/// ranks, and uneven local outputs where there are dropouts, before it changes anything. Collective over the mesh.
/// Before checkpoints, fully_shard() and optimizers. Afterwards libtorch's clone() of such a layer throws, because it
/// counts a buffer that clones lack: build another module instead.
void parallelize_module(torch::nn::Module& module, const DeviceMesh& mesh, const ParallelPlan& plan,
                        const ParallelizeOptions& options = {});
/// One style for the module itself.
void parallelize_module(torch::nn::Module& module, const DeviceMesh& mesh, const Style& style,
                        const ParallelizeOptions& options = {});

/// Of what a holder or pointer points to.
template <class Holder>
  requires requires(Holder& holder) { *holder; }
void parallelize_module(Holder module, const DeviceMesh& mesh, const ParallelPlan& plan,
                        const ParallelizeOptions& options = {}) {
  parallelize_module(*module, mesh, plan, options);
}
template <class Holder>
  requires requires(Holder& holder) { *holder; }
void parallelize_module(Holder module, const DeviceMesh& mesh, const Style& style,
                        const ParallelizeOptions& options = {}) {
  parallelize_module(*module, mesh, style, options);
}

}  // namespace lockstep
