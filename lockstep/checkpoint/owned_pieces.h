// What this rank has of a parameter, or of something that is divided as the parameter is: its optimizer state, say. By
// the layout that the parameter carries, whoever gave it one. Internal to checkpoint.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "lockstep/fsdp/flat_pieces.h"
#include "lockstep/shard/box.h"

namespace lockstep::detail {

struct OwnedPieces {
  std::string name = "";
  std::vector<int64_t> sizes = {};       // of the whole tensor
  std::vector<BoxedValues> pieces = {};  // none on a rank that has nothing of it
};

/// `local` has the sizes that the parameter has on this rank; results are views of it. A flat parameter is what it
/// consists of, `flat`, by their names; any other is itself, by `name`.
std::vector<OwnedPieces> owned_pieces(const std::string& name, const at::Tensor& parameter, const at::Tensor& local,
                                      const std::vector<FlatPiece>& flat);

/// If it is on the meta device: memory on this rank's device, to be filled.
void give_memory(const at::Tensor& tensor);

/// Sizes of the whole parameter.
std::vector<int64_t> whole_sizes(const at::Tensor& parameter);

}  // namespace lockstep::detail
