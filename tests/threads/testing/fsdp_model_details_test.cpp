// The kit's models compute what Python's do: losses, activations, delays.
#include <ATen/ops/log_softmax.h>

#include "lockstep/testing/fsdp/nested_models.h"
#include "lockstep/testing/fsdp/small_models.h"
#include "lockstep/testing/fsdp/transformer.h"
#include "lockstep/testing/gtest.h"

namespace lockstep::fsdp_model_details_test {

using namespace testing;
using namespace std::chrono_literals;

// FSDP-91
LOCKSTEP_THREAD_TEST(FsdpModelDetails, TheTransformersLossIsASum, 1) {
  const auto model = TransformerWithSharedParams::init(world.group(), {.deterministic = true});
  const auto inputs = model->get_input(compute_device());
  const auto output = model->forward(inputs);
  const auto likelihoods = at::log_softmax(output, -1).gather(-1, inputs[1].unsqueeze(-1));
  EXPECT_TRUE(at::allclose(model->get_loss(inputs, output), -likelihoods.sum()));
}

// FSDP-95
LOCKSTEP_THREAD_TEST(FsdpModelDetails, TheExpertIsFreedLateIfAskedFor, 2) {
  const auto model =
      MixtureOfExperts::init(world.group(), {.fsdp_init_mode = FsdpInitMode::kRecursive, .deterministic = true}, 40ms);
  fully_shard(*model, with_mesh({}, world.group()));  // the root, by which the expert has its name
  const auto start = std::chrono::steady_clock::now();
  static_cast<void>(model->forward(model->get_input(compute_device())).cpu());  // a delay of a GPU holds up its stream
  EXPECT_GE(std::chrono::steady_clock::now() - start, 40ms);
}

// FSDP-96
LOCKSTEP_THREAD_TEST(FsdpModelDetails, AnMlpCutsOffWhatIsNegativeBehindBothLayers, 1) {
  MLP mlp(4);
  const at::NoGradGuard no_grad;
  mlp->out_proj->bias.fill_(-100);
  EXPECT_TRUE(mlp->forward(at::ones({2, 4})).eq(0).all().item<bool>());
  mlp->out_proj->weight.fill_(-1);
  mlp->out_proj->bias.fill_(1);
  mlp->in_proj->bias.fill_(-100);
  EXPECT_TRUE(mlp->forward(at::ones({2, 4})).eq(1).all().item<bool>());
}

}  // namespace lockstep::fsdp_model_details_test
