// What a whole parameter has for a gradient between steps, where it has none: using it throws and names the parameter,
// so an optimizer that was made from a module's members, or before fully_shard(), does not step nothing in silence.
// Internal to fsdp.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace lockstep::detail {

/// Of the sizes of `parameter`, without memory. If a backward adds to it, it becomes zeros and an ordinary gradient.
at::Tensor make_refused_gradient(const at::Tensor& parameter, const std::string& who);
/// Whether it still refuses.
bool is_refused(const at::Tensor& gradient);

}  // namespace lockstep::detail
