// What libtorch's archives of optimizers have in common, whoever writes them. Internal to state and optim.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/serialize/archive.h>

#include <cstddef>
#include <string>

namespace lockstep::detail {

/// What libtorch's optimizers expect to find under "pytorch_version".
inline constexpr const char* kArchiveFormat = "1.5.0";

inline at::Tensor count_tensor(std::size_t count) {
  return at::scalar_tensor(static_cast<int64_t>(count), at::kLong);
}

inline std::size_t read_count(torch::serialize::InputArchive& archive, const std::string& key) {
  at::Tensor count;
  archive.read(key, count);
  return static_cast<std::size_t>(count.item<int64_t>());
}

}  // namespace lockstep::detail
