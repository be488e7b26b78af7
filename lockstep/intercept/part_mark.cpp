#include "lockstep/intercept/part_mark.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <initializer_list>
#include <memory>
#include <string>

#include "lockstep/intercept/tensor_access.h"

namespace lockstep {
namespace {

// Nobody uses them: libtorch keeps them for tests of its dispatcher, in programs of their own.
constexpr auto kPartKey = c10::DispatchKey::TESTING_ONLY_GenericWrapper;
constexpr auto kCopyKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

void add_key(const at::Tensor& tensor, c10::DispatchKey key) {
  auto& keys = detail::TensorAccess::keys_of(*tensor.unsafeGetTensorImpl());
  keys = keys.add(key);
}

void refuse_to_measure(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& tensor = torch::jit::peek(*stack, 0, op.schema().arguments().size()).toTensor();
  TORCH_CHECK(
      false, "[lockstep/intercept] ", op.schema().name(), " of the gradient of a shard, of sizes ", tensor.sizes(),
      ": it would be of this rank's part only, and so differ by rank. If it is to clip, call ",
      "lockstep::clip_grad_norm_(), which takes the same arguments, instead of ",
      "torch::nn::utils::clip_grad_norm_(). Optimizers that measure all gradients at once, as LBFGS does, need ",
      "whole ones. What is of this rank's part alone at::linalg_vector_norm() and at::amax() give.");
}

/// Of what is measured next.
void hand_mark_on(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard excluded(kPartKey);
  op.callBoxed(stack);
  add_key(torch::jit::peek(*stack, 0, 1).toTensor(), kPartKey);
}

void check_copy(const at::Tensor& tensor, const std::string& operator_name) {
  const bool is_copy = tensor.defined() && tensor.unsafeGetTensorImpl()->key_set().has(kCopyKey);
  TORCH_CHECK(!is_copy || !tensor.requires_grad(), "[lockstep/intercept] ", operator_name,
              " gets a copy of a shard, of ", "sizes ", tensor.sizes(),
              ", for a parameter: the module was cloned after it was sharded, which copies ",
              "this rank's part only. Build another one and load a state dict, or clone before fully_shard().");
}

void refuse_copies(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  for (const auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (value.isTensor()) check_copy(value.toTensor(), op.schema().name());
    if (!value.isTensorList()) continue;
    for (const at::Tensor& each : value.toTensorList()) check_copy(each, op.schema().name());
  }
  const c10::impl::ExcludeDispatchKeyGuard excluded(kCopyKey);
  op.callBoxed(stack);
}

template <auto* Kernel>
void register_kernel(c10::DispatchKey key, std::initializer_list<const char*> names) {
  auto library = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  for (const auto* name : names) library->impl(name, torch::CppFunction::makeFromBoxedFunction<Kernel>());
  [[maybe_unused]] const auto* kept = library.release();
}

/// Never taken back: tensors that carry the key may outlive everything that is destroyed at exit.
bool pass_all_others(c10::DispatchKey key) {
  auto library = std::make_unique<torch::Library>(torch::Library::IMPL, "_", key, __FILE__, __LINE__);
  try {
    static_cast<void>(library->fallback(torch::CppFunction::makeFallthrough()));
  } catch (const c10::Error&) {
    return false;  // another copy of Lockstep in this process has: its tensors are marked, ours are not
  }
  [[maybe_unused]] const auto* kept = library.release();
  return true;
}

bool register_kernels() {
  if (!pass_all_others(kPartKey) || !pass_all_others(kCopyKey)) return false;
  register_kernel<&refuse_to_measure>(kPartKey, {"norm.Scalar", "norm.ScalarOpt_dtype", "max"});
  register_kernel<&hand_mark_on>(kPartKey, {"abs", "cat"});
  register_kernel<&refuse_copies>(kCopyKey, {"linear",
                                             "bilinear",
                                             "matmul",
                                             "mm",
                                             "addmm",
                                             "bmm",
                                             "conv1d",
                                             "conv2d",
                                             "conv3d",
                                             "conv_transpose1d",
                                             "conv_transpose2d.input",
                                             "conv_transpose3d.input",
                                             "embedding",
                                             "embedding_bag.padding_idx",
                                             "embedding_bag",
                                             "layer_norm",
                                             "group_norm",
                                             "batch_norm",
                                             "instance_norm",
                                             "prelu",
                                             "lstm.input",
                                             "gru.input",
                                             "rnn_tanh.input",
                                             "rnn_relu.input"});
  return true;
}

bool is_registered() {
  static const bool is_done = register_kernels();
  return is_done;
}

}  // namespace

void mark_part(const at::Tensor& tensor) {
  if (is_registered()) add_key(tensor, kPartKey);
}

void mark_copy_of_part(const at::Tensor& tensor) {
  if (is_registered()) add_key(tensor, kCopyKey);
}

}  // namespace lockstep
