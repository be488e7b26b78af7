// What the rest of ddp/ has to know about a parameter besides its tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace lockstep {

struct ParameterInfo {
  std::string name = "";  // dotted: "encoder.weight"
  std::vector<int64_t> sizes = {};
  std::vector<int64_t> strides = {};
  at::ScalarType dtype = at::kFloat;
  c10::Device device = c10::Device(c10::kCPU);
  /// Its owner is an Embedding or EmbeddingBag that makes sparse gradients.
  bool expects_sparse_gradient = false;

  int64_t numel() const;
  std::size_t bytes() const;
  /// "'encoder.weight' (Float[3, 4])".
  std::string describe() const;
};

ParameterInfo info_of(const std::string& name, const at::Tensor& parameter, bool expects_sparse_gradient = false);

}  // namespace lockstep
