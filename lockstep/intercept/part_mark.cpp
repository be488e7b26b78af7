#include "lockstep/intercept/part_mark.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <memory>

#include "lockstep/intercept/tensor_access.h"

namespace lockstep {
namespace {

// Nobody uses it: libtorch keeps it for tests of its dispatcher, in programs of their own.
constexpr auto kPartKey = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

void add_part_key(const at::Tensor& tensor) {
  auto& keys = detail::TensorAccess::keys_of(*tensor.unsafeGetTensorImpl());
  keys = keys.add(kPartKey);
}

void refuse_to_measure(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& tensor = torch::jit::peek(*stack, 0, op.schema().arguments().size()).toTensor();
  TORCH_CHECK(false, "[lockstep/intercept] ", op.schema().name(), " of the gradient of a shard, of sizes ",
              tensor.sizes(), ": it would be of this rank's part only, and so differ by rank. If it is to clip, call ",
              "lockstep::clip_grad_norm_(), which takes the same arguments, instead of ",
              "torch::nn::utils::clip_grad_norm_(). What is of this rank's part alone at::linalg_vector_norm() and ",
              "at::amax() give.");
}

/// Of what is measured next.
void hand_mark_on(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard excluded(kPartKey);
  op.callBoxed(stack);
  add_part_key(torch::jit::peek(*stack, 0, 1).toTensor());
}

bool register_kernels() {
  // Never taken back: tensors that carry the key may outlive everything that is destroyed at exit.
  auto all = std::make_unique<torch::Library>(torch::Library::IMPL, "_", kPartKey, __FILE__, __LINE__);
  auto some = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", kPartKey, __FILE__, __LINE__);
  try {
    static_cast<void>(all->fallback(torch::CppFunction::makeFallthrough()));
  } catch (const c10::Error&) {
    return false;  // another copy of Lockstep in this process has: its tensors are marked, ours are not
  }
  for (const auto* name : {"norm.Scalar", "norm.ScalarOpt_dtype", "max"}) {
    some->impl(name, torch::CppFunction::makeFromBoxedFunction<&refuse_to_measure>());
  }
  some->impl("abs", torch::CppFunction::makeFromBoxedFunction<&hand_mark_on>());
  [[maybe_unused]] const auto* kept = all.release();
  [[maybe_unused]] const auto* kept_too = some.release();
  return true;
}

}  // namespace

void mark_part(const at::Tensor& tensor) {
  static const bool is_registered = register_kernels();
  if (is_registered) add_part_key(tensor);
}

}  // namespace lockstep
