#include "lockstep/zero/slice_stand_in.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "lockstep/intercept/key.h"

namespace lockstep::detail {
namespace {

/// Operators in place whose result at an element depends on nothing but the arguments' values there.
bool is_elementwise_change(std::string_view name) {
  static const std::unordered_set<std::string_view> names = {"aten::zero_",
                                                             "aten::fill_",
                                                             "aten::copy_",
                                                             "aten::mul_",
                                                             "aten::div_",
                                                             "aten::add_",
                                                             "aten::sub_",
                                                             "aten::neg_",
                                                             "aten::clamp_",
                                                             "aten::clamp_min_",
                                                             "aten::clamp_max_",
                                                             "aten::clip_",
                                                             "aten::nan_to_num_",
                                                             "aten::addcmul_",
                                                             "aten::addcdiv_",
                                                             "aten::lerp_",
                                                             "aten::sign_",
                                                             "aten::pow_",
                                                             "aten::_foreach_zero_",
                                                             "aten::_foreach_mul_",
                                                             "aten::_foreach_div_",
                                                             "aten::_foreach_add_",
                                                             "aten::_foreach_sub_",
                                                             "aten::_foreach_neg_",
                                                             "aten::_foreach_clamp_min_",
                                                             "aten::_foreach_clamp_max_",
                                                             "aten::_foreach_addcmul_",
                                                             "aten::_foreach_addcdiv_"};
  return names.contains(name);
}

bool is_alias(std::string_view name) {
  return name == "aten::detach" || name == "aten::detach_" || name == "aten::alias";
}

[[noreturn]] void refuse(const SliceStandIn& stand_in, const std::string& name) {
  TORCH_CHECK(
      false, stand_in.keeper()->description_of(stand_in.index()), " is divided among the ranks ",
      "(ZeroStage::kGradients), and ", name, " needs more than this rank's part of it. Clip by ",
      "lockstep::clip_grad_norm_(optimizer, max_norm); what this rank has is optimizer.own_gradients(). Changes ",
      "of each element by itself, as mul_() and clamp_(), work.");
}

class StandInRule final : public TensorRule {
 public:
  void run(OperatorCall& call) override {
    const auto self = call.argument(0);
    if (is_alias(call.name())) return call.replace({self});
    const auto* first = self.isTensor() ? SliceStandIn::of(self.toTensor()) : nullptr;
    if (first != nullptr && is_accumulation(call, self.toTensor())) {
      first->keeper()->add_whole(first->index(), call.argument(1).toTensor());
      return call.replace({self});
    }
    const at::NoGradGuard no_grad;
    if (call.name() == "aten::zero_" || call.name() == "aten::_foreach_zero_") forget_additions(self);
    take_parts(call);
    call.proceed();
    if (call.result_count() > 0) call.result(0) = self;
  }

 private:
  /// Done by the accumulator of a parameter that has a gradient already.
  static bool is_accumulation(const OperatorCall& call, const at::Tensor& self) {
    if (call.name() != "aten::add_" || torch::autograd::get_current_node() == nullptr) return false;
    const auto& added = call.argument(1);
    return added.isTensor() && added.toTensor().sizes() == self.sizes() && call.argument(2).toScalar().equal(1);
  }

  static void forget_additions(const c10::IValue& targets) {
    const auto tensors = targets.isTensor() ? std::vector<at::Tensor>{targets.toTensor()} : targets.toTensorVector();
    for (const auto& tensor : tensors) {
      if (const auto* stand_in = SliceStandIn::of(tensor)) stand_in->keeper()->forget_additions(stand_in->index());
    }
  }

  /// Puts this rank's parts in the place of stand-ins and of whole tensors beside them.
  static void take_parts(OperatorCall& call) {
    const auto& self = call.argument(0);
    const auto targets = self.isTensor()       ? std::vector<at::Tensor>{self.toTensor()}
                         : self.isTensorList() ? self.toTensorVector()
                                               : std::vector<at::Tensor>();
    const bool is_change =
        is_elementwise_change(call.name()) &&
        std::any_of(targets.begin(), targets.end(), [](const auto& each) { return SliceStandIn::of(each) != nullptr; });
    for_each_tensor(call, [&](const at::Tensor& tensor, std::size_t argument) {
      const auto* stand_in = SliceStandIn::of(tensor);
      if (stand_in != nullptr && (!is_change || argument > 0)) refuse(*stand_in, call.name());
    });
    for (std::size_t i = 0; i < call.argument_count(); ++i) {
      auto& value = call.argument(i);
      if (value.isTensor()) {
        value = part(call, targets.front(), value.toTensor());
      } else if (value.isTensorList()) {
        auto tensors = value.toTensorVector();
        for (std::size_t j = 0; j < tensors.size(); ++j)
          tensors[j] = part(call, targets[std::min(j, targets.size() - 1)], tensors[j]);
        value = c10::IValue(std::move(tensors));
      }
    }
  }

  static at::Tensor part(const OperatorCall& call, const at::Tensor& target, const at::Tensor& tensor) {
    const auto* stand_in = SliceStandIn::of(target);
    if (stand_in == nullptr || !tensor.defined()) return tensor;
    const auto keeper = stand_in->keeper();
    if (tensor.is_same(target)) return keeper->part_of_gradient(stand_in->index());
    if (tensor.dim() == 0 || (tensor.numel() == 1 && target.numel() != 1)) return tensor.reshape({});
    if (tensor.sizes() != target.sizes()) refuse(*stand_in, call.name());
    return keeper->same_part_of(stand_in->index(), tensor);
  }
};

}  // namespace

SliceStandIn::SliceStandIn(const c10::TensorImpl& like, std::shared_ptr<Link> link)
    : GradientStandIn(c10::DispatchKeySet(kInterceptKey), like.dtype(), like.device()), link_(std::move(link)) {
  install_interceptor();
  set_sizes_and_strides(like.sizes(), like.strides());
  set_storage_access_should_throw();
}

TensorRule* SliceStandIn::rule() const {
  static StandInRule rule;
  return &rule;
}

std::shared_ptr<SliceKeeper> SliceStandIn::keeper() const {
  auto keeper = link_->keeper.lock();
  TORCH_CHECK(keeper, "[lockstep/zero] this gradient was divided among the ranks and is no more: a later backward has ",
              "taken its place, or the optimizer that kept it is gone.");
  return keeper;
}

GradientShard SliceStandIn::shard() const {
  const auto its_keeper = keeper();
  GradientShard shard{.groups = {its_keeper->group()}};
  if (auto part = its_keeper->part_of_gradient(index()); part.numel() > 0) shard.gradients.push_back(std::move(part));
  return shard;
}

c10::intrusive_ptr<c10::TensorImpl> SliceStandIn::shallow_copy_and_detach(
    const c10::VariableVersion& /*version_counter*/, bool /*allow_tensor_metadata_change*/) const {
  return c10::make_intrusive<SliceStandIn>(*this, link_);
}

c10::intrusive_ptr<c10::TensorImpl> SliceStandIn::shallow_copy_and_detach(c10::VariableVersion&& /*version_counter*/,
                                                                          bool /*allow_tensor_metadata_change*/) const {
  return c10::make_intrusive<SliceStandIn>(*this, link_);
}

}  // namespace lockstep::detail
