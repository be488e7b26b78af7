#include "lockstep/nn/parameter_info.h"

#include <c10/core/ScalarType.h>

#include <functional>
#include <numeric>

#include "lockstep/base/str.h"

namespace lockstep {

int64_t ParameterInfo::numel() const {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

std::size_t ParameterInfo::bytes() const {
  return static_cast<std::size_t>(numel()) * c10::elementSize(dtype);
}

std::string ParameterInfo::describe() const {
  return str("'", name, "' (", c10::toString(dtype), "[", join(sizes, ", "), "])");
}

ParameterInfo info_of(const std::string& name, const at::Tensor& parameter, bool expects_sparse_gradient) {
  return {.name = name,
          .sizes = parameter.sizes().vec(),
          .strides = parameter.strides().vec(),
          .dtype = parameter.scalar_type(),
          .device = parameter.device(),
          .expects_sparse_gradient = expects_sparse_gradient};
}

}  // namespace lockstep
