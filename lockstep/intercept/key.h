// The dispatch key this layer lives on: libtorch's key for code outside of it, above autograd and autocast. A tensor
// that carries it, or a thread that includes it, brings operators to our fallback (interceptor.cpp). There can be one
// fallback per process and key, so nobody else in Lockstep uses the key. Local and thread-safe.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKey.h>

namespace lockstep {

inline constexpr auto kInterceptKey = c10::DispatchKey::DeferredInit;
/// The twin below autograd: for scopes that want to see kernels, and tensors whose rule works there.
inline constexpr auto kKernelKey = c10::DispatchKey::Fake;

/// Registers the fallback, once per process. Whatever puts the key somewhere calls it first. Refuses if another library
/// of this process has registered one.
void install_interceptor();
/// The same for kKernelKey.
void install_kernel_interceptor();

/// Makes operators that get `tensor` pass through the interceptor. Its views and detached copies inherit the mark,
/// tensors computed from it do not. The mark alone changes nothing; a rule or an owner does.
void mark_intercepted(const at::Tensor& tensor);
void unmark_intercepted(const at::Tensor& tensor);
bool is_marked_intercepted(const at::Tensor& tensor);

}  // namespace lockstep
