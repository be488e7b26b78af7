// Gradients inside a context of distributed autograd, in one process: they stay there, and are reduced there.
#include <torch/csrc/distributed/autograd/context/container.h>
#include <torch/csrc/distributed/autograd/context/context.h>
#include <torch/csrc/distributed/autograd/engine/dist_engine.h>

#include "lockstep/ddp/gradient_access.h"
#include "tests/ddp_models.h"

namespace lockstep {
namespace {

using namespace ddp_models;
using torch::distributed::autograd::ContextPtr;
using torch::distributed::autograd::DistAutogradContainer;
using torch::distributed::autograd::ThreadLocalDistAutogradContext;

// DDP-99
TEST(DdpDistAutograd, ReadsAndWritesGradientsInTheContext) {
  auto& container = DistAutogradContainer::init(0);
  const auto context = container.newContext();
  const auto parameter = at::ones({3}).requires_grad_();
  detail::GradientAccess::of_current_backward().with_gradient(parameter, [](at::Tensor& grad) {
    EXPECT_FALSE(grad.defined());
    grad = at::full({3}, 2.0);
    return true;
  });
  EXPECT_TRUE(parameter.grad().defined());
  parameter.mutable_grad() = at::Tensor();
  {
    const ThreadLocalDistAutogradContext scope{ContextPtr(context)};
    const auto access = detail::GradientAccess::of_current_backward();
    EXPECT_TRUE(access.is_in_context());
    context->accumulateGrad(parameter, at::full({3}, 5.0), 2);
    access.with_gradient(parameter, [](at::Tensor& grad) {
      EXPECT_TRUE(at::equal(grad, at::full({3}, 5.0)));
      grad = grad * 2;
      return true;
    });
  }
  EXPECT_FALSE(parameter.grad().defined());
  EXPECT_TRUE(at::equal(context->getGradients().at(parameter), at::full({3}, 10.0)));
  container.releaseContext(context->contextId());
}

}  // namespace
}  // namespace lockstep
