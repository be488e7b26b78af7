// What flat parameters (use_orig_params = false) consist of, by the names their parts had: state dicts hold those.
// Internal to fsdp.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <unordered_map>
#include <vector>

namespace torch::nn {
class Module;
}

namespace lockstep::detail {

struct FlatPiece {
  std::string name;  // as `module` below knows it
  std::vector<int64_t> sizes;
  int64_t offset = 0;  // in the whole flat parameter
  int64_t elements = 0;

  /// Its values in the whole flat parameter: a view.
  at::Tensor in(const at::Tensor& flat) const { return flat.narrow(0, offset, elements).view(sizes); }
};

/// By flat shard; ordinary parameters are absent.
using FlatPieces = std::unordered_map<const c10::TensorImpl*, std::vector<FlatPiece>>;
FlatPieces flat_pieces(const torch::nn::Module& module);

}  // namespace lockstep::detail
