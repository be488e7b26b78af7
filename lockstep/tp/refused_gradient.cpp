#include "lockstep/tp/refused_gradient.h"

#include <utility>

#include "lockstep/intercept/key.h"
#include "lockstep/intercept/tensor_rule.h"

namespace lockstep::detail {
namespace {

class Refusal final : public TensorRule {
 public:
  explicit Refusal(std::string name) : name_(std::move(name)) {}

  void run(OperatorCall& call) override {
    TORCH_CHECK(false, "[lockstep/tp] parameter '", name_, "' has its gradient in the registered parameter, not in ",
                "the module's member. Make the optimizer, and whatever else reads gradients, from parameters(). (",
                call.name(), ")");
  }

 private:
  const std::string name_;
};

class RefusedGradient final : public RuledTensorImpl {
 public:
  RefusedGradient(const c10::TensorImpl& like, std::shared_ptr<Refusal> refusal)
      : RuledTensorImpl(c10::DispatchKeySet(kInterceptKey), like.dtype(), like.device()), refusal_(std::move(refusal)) {
    install_interceptor();
    set_sizes_and_strides(like.sizes(), like.strides());
    set_storage_access_should_throw();
  }

  TensorRule* rule() const override { return refusal_.get(); }

  // data() of it is another one.
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(const c10::VariableVersion& /*version_counter*/,
                                                         bool /*allow_tensor_metadata_change*/) const override {
    return c10::make_intrusive<RefusedGradient>(*this, refusal_);
  }
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(c10::VariableVersion&& /*version_counter*/,
                                                         bool /*allow_tensor_metadata_change*/) const override {
    return c10::make_intrusive<RefusedGradient>(*this, refusal_);
  }

 private:
  const std::shared_ptr<Refusal> refusal_;
};

}  // namespace

at::Tensor make_refused_gradient_of_member(const at::Tensor& member, const std::string& name) {
  return at::detail::make_tensor<RefusedGradient>(*member.unsafeGetTensorImpl(), std::make_shared<Refusal>(name));
}

}  // namespace lockstep::detail
