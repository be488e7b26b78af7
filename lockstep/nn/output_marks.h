// Marks on what a forward returned: through them a wrapper learns which of its forwards a backward comes to. Nothing
// is added to the graph; a mark lives as long as the part of the graph it is on. Internal to the wrappers.
//
// A mark is lost where an output is a view that the program changes in place, and there is none on what the outputs
// do not show: wrappers must have an answer for backwards that come to no mark.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

namespace lockstep::detail {

class OutputMark {
 public:
  virtual ~OutputMark() = default;
  /// A backward, or autograd::grad(), is about to go through an output. Comes once for each; may throw.
  virtual void reached() = 0;
};

/// Returns whether there was an output to mark: a tensor with a history.
bool mark_outputs(const std::vector<at::Tensor*>& outputs, const std::shared_ptr<OutputMark>& mark);

/// Calls visit(mark) for marks a backward from `root` would come to, until it returns false. Walks the graph.
void visit_marks(const at::Tensor& root, const std::function<bool(const OutputMark& mark)>& visit);

}  // namespace lockstep::detail
