#include "lockstep/checkpointing/saved_tensors_hooks.h"

#include <c10/util/Exception.h>

#include <utility>

#include "lockstep/checkpointing/host_copy.h"
#include "lockstep/nn/saved_tensors.h"

namespace lockstep {
namespace detail {
namespace {

using torch::autograd::SavedVariableHooks;

struct HookPair {
  std::function<std::any(const at::Tensor&)> pack;
  std::function<at::Tensor(const std::any&)> unpack;
};

class PairHooks final : public SavedVariableHooks {
 public:
  explicit PairHooks(std::shared_ptr<const HookPair> pair) : pair_(std::move(pair)) {}
  void call_pack_hook(const at::Tensor& tensor) override { packed_ = pair_->pack(tensor); }
  at::Tensor call_unpack_hook() override {
    auto tensor = pair_->unpack(packed_);
    TORCH_CHECK(tensor.defined(), "[lockstep/checkpointing] an unpack hook of saved_tensors_hooks() gave no tensor.");
    return tensor;
  }

 private:
  const std::shared_ptr<const HookPair> pair_;
  std::any packed_;
};

class PairRule final : public SavingRule {
 public:
  explicit PairRule(HookPair pair) : pair_(std::make_shared<HookPair>(std::move(pair))) {}
  std::unique_ptr<SavedVariableHooks> hooks() override { return std::make_unique<PairHooks>(pair_); }

 private:
  const std::shared_ptr<const HookPair> pair_;
};

/// Or a view of one: what a product saves of a weight.
bool is_parameter(const at::Tensor& tensor) {
  if (!tensor.requires_grad()) return false;
  return tensor.is_leaf() || (tensor.is_view() && tensor._base().is_leaf());
}

class OnHostHooks final : public SavedVariableHooks {
 public:
  explicit OnHostHooks(bool is_pinned) : is_pinned_(is_pinned) {}

  void call_pack_hook(const at::Tensor& tensor) override {
    device_ = tensor.device();
    is_copied_ = !tensor.is_cpu() && !is_parameter(tensor);
    saved_ = is_copied_ ? copy_to_host(tensor.detach(), is_pinned_) : tensor.tensor_data();
    version_ = saved_._version();
  }

  at::Tensor call_unpack_hook() override {
    // Autograd leaves this check to hooks where there are some.
    TORCH_CHECK(saved_._version() == version_, "[lockstep/checkpointing] one of the variables needed for gradient ",
                "computation has been modified by an inplace operation: a ", saved_.toString(), " of sizes ",
                saved_.sizes(), " is at version ", saved_._version(), ", but forward used version ", version_,
                ". Change it after backward, or change a clone of it.");
    return is_copied_ ? saved_.to(device_, /*non_blocking=*/is_pinned_) : saved_;
  }

 private:
  const bool is_pinned_;
  bool is_copied_ = false;
  at::Device device_ = at::kCPU;
  at::Tensor saved_;
  int64_t version_ = 0;
};

class OnHostRule final : public SavingRule {
 public:
  explicit OnHostRule(bool is_pinned) : is_pinned_(is_pinned) {}
  std::unique_ptr<SavedVariableHooks> hooks() override { return std::make_unique<OnHostHooks>(is_pinned_); }

 private:
  const bool is_pinned_;
};

}  // namespace
}  // namespace detail

SavedTensorsScope::SavedTensorsScope(std::shared_ptr<detail::SavingRule> rule)
    : entered_(std::make_unique<detail::EnterSaving>(std::move(rule))) {}

SavedTensorsScope::~SavedTensorsScope() = default;

SavedTensorsScope saved_tensors_hooks(std::function<std::any(const at::Tensor&)> pack,
                                      std::function<at::Tensor(const std::any&)> unpack) {
  TORCH_CHECK(pack && unpack, "[lockstep/checkpointing] saved_tensors_hooks: there is no ", pack ? "un" : "",
              "pack hook. It takes two functions.");
  return SavedTensorsScope(
      std::make_shared<detail::PairRule>(detail::HookPair{.pack = std::move(pack), .unpack = std::move(unpack)}));
}

SavedTensorsScope save_on_cpu(const SaveOnCpuOptions& options) {
  return SavedTensorsScope(std::make_shared<detail::OnHostRule>(options.pin_memory));
}

}  // namespace lockstep
