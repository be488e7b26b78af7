// One forward with gradients, as the reducer knows it: what its backward has to do is decided here, when it runs, and
// not by what the wrapper's switches say when backward comes. Internal to ddp.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

namespace lockstep::detail {

/// Kept by the graph of its outputs. Guarded by the reducer's lock.
struct ForwardPass {
  /// Gradients of its backward are reduced. Not so under no_sync().
  const bool is_synced = false;
  /// Its outputs are marked: its backwards come to them.
  bool is_visible = false;
  /// Parameters that its outputs do not lead to, in order; if they are searched for.
  std::vector<std::size_t> unused = {};
  /// A backward has brought gradients through it.
  bool was_used = false;
  /// And they have been reduced: what comes afterwards is a second backward.
  bool is_reduced = false;
};
using PassPtr = std::shared_ptr<ForwardPass>;

}  // namespace lockstep::detail
