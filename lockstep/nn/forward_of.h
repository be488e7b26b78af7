// What a class needs to know of a module type to be derived from it with a forward of its own: Checkpointed<M>,
// Prepared<M>.
#pragma once

#include <ATen/core/Tensor.h>

namespace torch::nn {
class SequentialImpl;
}

namespace lockstep::detail {

/// LinearImpl of torch::nn::Linear; a module's class itself otherwise.
template <class M>
struct ImplementationOf {
  using type = M;
};
template <class M>
  requires requires { typename M::ContainedType; }
struct ImplementationOf<M> {
  using type = typename M::ContainedType;
};

/// What a member function takes and returns.
template <class M>
struct ForwardOf {
  using type = decltype(&M::forward);
};
/// A template there: what everybody calls.
template <>
struct ForwardOf<torch::nn::SequentialImpl> {
  using type = at::Tensor (torch::nn::SequentialImpl::*)(const at::Tensor&);
};

}  // namespace lockstep::detail
