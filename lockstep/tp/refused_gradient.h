// What a layer's member has for a gradient: using it throws and names the parameter, so that an optimizer made from
// members does not step nothing in silence. Internal to tp.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace lockstep::detail {

/// Of the sizes of `member`, without memory.
at::Tensor make_refused_gradient_of_member(const at::Tensor& member, const std::string& name);

}  // namespace lockstep::detail
