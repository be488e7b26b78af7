#include "lockstep/nn/mixed_precision.h"

#include "lockstep/base/str.h"

namespace lockstep::detail {
namespace {

std::string name_of(std::optional<at::ScalarType> dtype) {
  return dtype ? c10::toString(*dtype) : "none";
}

}  // namespace

std::string describe(const MixedPrecision& config) {
  return str("param_dtype ", name_of(config.param_dtype), ", reduce_dtype ", name_of(config.reduce_dtype),
             ", buffer_dtype ", name_of(config.buffer_dtype));
}

}  // namespace lockstep::detail
