// What autograd saves of a tensor for backward. As a rule it saves the tensor itself, so whoever lets the tensor show
// other memory after forward changes what backward computes with. While a SavesContents lives, it saves what tensors
// hold at that moment. Internal to the wrappers.
#pragma once

namespace lockstep::detail {

/// In all threads, as a forward may use several. Tensors that are changed in place before backward are still noticed,
/// with an error.
class SavesContents {
 public:
  SavesContents();
  ~SavesContents();
  SavesContents(const SavesContents&) = delete;
  SavesContents& operator=(const SavesContents&) = delete;
};

}  // namespace lockstep::detail
