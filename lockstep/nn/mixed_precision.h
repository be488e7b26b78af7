// In which dtypes a wrapped module computes and reduces: the settings that DDP and FSDP share.
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>
#include <string>

namespace lockstep {

/// Dtypes of computation. Only floating point tensors are cast; what is unset stays as it is, and the reduction follows
/// param_dtype.
struct MixedPrecision {
  std::optional<at::ScalarType> param_dtype = std::nullopt;
  std::optional<at::ScalarType> reduce_dtype = std::nullopt;
  std::optional<at::ScalarType> buffer_dtype = std::nullopt;
};

namespace detail {

/// "param_dtype Half, reduce_dtype Float, buffer_dtype none".
std::string describe(const MixedPrecision& config);

}  // namespace detail
}  // namespace lockstep
