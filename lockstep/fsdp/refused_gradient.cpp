#include "lockstep/fsdp/refused_gradient.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <memory>
#include <utility>

#include "lockstep/base/str.h"
#include "lockstep/fsdp/freed_storage.h"
#include "lockstep/fsdp/unit_tree.h"
#include "lockstep/intercept/key.h"
#include "lockstep/intercept/operator_call.h"
#include "lockstep/intercept/operator_scope.h"

namespace lockstep::detail {
namespace {

class GradientRefusal final : public StorageOwner {
 public:
  explicit GradientRefusal(std::string message) : message_(std::move(message)) {}

  void before_operator(OperatorCall& call, c10::ArrayRef<TouchedTensor> touched) override {
    TORCH_CHECK(is_plain_backward(), message_, " (", call.name(), ")");
    // Autograd adds to it, with no operator before that told of the backward.
    for (const auto& each : touched) each.tensor.set_data(at::zeros(each.tensor.sizes(), each.tensor.options()));
  }

 private:
  const std::string message_;
};

}  // namespace

at::Tensor make_refused_gradient(const at::Tensor& parameter, const std::string& who) {
  const c10::InferenceMode none(false);
  const at::NoGradGuard no_grad;
  const NotIntercepted below;
  auto message = str(who,
                     " has its gradient in its shard, not in the module's member. Make the optimizer, and whatever "
                     "else reads gradients, from parameters(), after fully_shard().");
  at::Tensor gradient;
  {
    const at::AutoDispatchBelowADInplaceOrView no_view;
    gradient = at::empty({1}, parameter.options().requires_grad(false)).expand(parameter.sizes());
  }
  const FreedStorage memory(gradient, parameter.scalar_type(), std::make_shared<GradientRefusal>(message), message);
  return gradient;
}

bool is_refused(const at::Tensor& gradient) {
  return is_marked_intercepted(gradient);
}

}  // namespace lockstep::detail
