// backward(loss, weight) in accumulations: a weight belongs to the forward its loss came from, and to gradients that
// are still there.
#include "tests/support/ddp_models.h"

namespace lockstep::weights_test {
namespace {

using namespace ddp_models;
using testing::expect_error;

const std::vector<int64_t> kSizes = {6, 5, 3};

at::Tensor loss_of(const at::Tensor& output) {
  return output.pow(2).mean();
}

/// Of one process with all samples.
std::vector<at::Tensor> mean_over(const at::Tensor& samples) {
  auto model = mlp(kSizes);
  loss_of(model->forward(samples)).backward();
  return gradients_of(*model);
}

double samples_in(const at::Tensor& rows) {
  return static_cast<double>(rows.size(0));
}

struct Samples {
  explicit Samples(const World& world, uint64_t seed = 3) : all(random_batch(12, 6, seed)) {
    const std::vector<int64_t> cuts = {4};  // 4 and 8 samples
    const auto mine = all.tensor_split(at::IntArrayRef(cuts))[world.rank()];
    first = mine.narrow(0, 0, 1);
    rest = mine.narrow(0, 1, mine.size(0) - 1);
  }
  at::Tensor all;
  at::Tensor first;
  at::Tensor rest;
};

// D-4: whether a weighted backward is reduced is the forward's matter, wherever the backward stands.
LOCKSTEP_THREAD_TEST(DdpWeights, BelongToTheForwardOfTheirLoss, 2) {
  for (const bool as_view : {false, true}) {
    DistributedDataParallel ddp(mlp(kSizes), world.group(), {.gradient_as_bucket_view = as_view});
    for (int step = 0; step < 3; ++step) {
      const Samples samples(world, step);
      const auto expected = mean_over(samples.all);
      const auto forward_locally = [&] {
        const auto guard = ddp.no_sync();
        return ddp(samples.first);
      };
      // The backward of a local forward outside of no_sync().
      zero_grads(ddp);
      ddp.backward(loss_of(forward_locally()), 1);
      ddp.backward(loss_of(ddp(samples.rest)), samples_in(samples.rest));
      expect_close(gradients_of(ddp), expected);
      // The backward of a synced forward inside.
      zero_grads(ddp);
      ddp.backward(loss_of(forward_locally()), 1);
      const auto synced = ddp(samples.rest);
      {
        const auto guard = ddp.no_sync();
        ddp.backward(loss_of(synced), samples_in(samples.rest));
      }
      expect_close(gradients_of(ddp), expected);
      // Both forwards before both backwards.
      zero_grads(ddp);
      const auto before = ddp(samples.rest);
      const auto local = forward_locally();
      ddp.backward(loss_of(local), 1);
      ddp.backward(loss_of(before), samples_in(samples.rest));
      expect_close(gradients_of(ddp), expected);
      // And no weight is left for a plain step.
      zero_grads(ddp);
      loss_of(ddp(my_rows(samples.all, world))).backward();
      expect_close(gradients_of(ddp), expected);
    }
  }
}

// D-4: micro-batches without samples, whose loss is NaN, in the middle and at the end of an accumulation.
LOCKSTEP_THREAD_TEST(DdpWeights, OfZeroCountNothingInAnAccumulation, 2) {
  for (const bool as_view : {false, true}) {
    DistributedDataParallel ddp(mlp(kSizes), world.group(), {.gradient_as_bucket_view = as_view});
    for (int step = 0; step < 2; ++step) {
      const Samples samples(world, step);
      const auto nothing = [&] { return (ddp(samples.all).pow(2) * 0).sum() / at::zeros({}); };
      EXPECT_TRUE(nothing().isnan().item<bool>());
      zero_grads(ddp);
      {
        const auto guard = ddp.no_sync();
        if (world.rank() == 0) ddp.backward(nothing(), 0);
        ddp.backward(loss_of(ddp(samples.first)), 1);
        if (world.rank() == 1) ddp.backward(nothing(), 0);
        ddp.backward(loss_of(ddp(samples.rest)), samples_in(samples.rest));
      }
      ddp.backward(nothing(), 0);
      expect_close(gradients_of(ddp), mean_over(samples.all));
      // What is there already, averaged, stays: of the rank without samples too.
      world.rank() == 0 ? ddp.backward(nothing(), 0) : ddp.backward(loss_of(ddp(samples.all)), 12);
      auto twice = mean_over(samples.all);
      for (auto& gradient : twice) gradient = gradient * 2;
      expect_close(gradients_of(ddp), twice);
    }
    expect_error([&] { ddp.backward(loss_of(ddp(at::ones({1, 6}))), 0); }, {"zero", "nothing to average"});
  }
}

// D-4: what makes gradients zero hangs on parameters once, and not before it is needed.
LOCKSTEP_THREAD_TEST(DdpWeights, OfZeroHookAParameterOnce, 2) {
  DistributedDataParallel ddp(mlp(kSizes), world.group());
  const auto train = [&](double weight) { ddp.backward(loss_of(ddp(at::ones({1, 6}))), weight); };
  // A hook's index is the number of those before it.
  const auto hooks_so_far = [&] {
    return ddp.module()->layers[0]->weight.register_hook([](const at::Tensor& gradient) { return gradient; });
  };
  EXPECT_EQ(hooks_so_far(), 0);
  train(2);
  EXPECT_EQ(hooks_so_far(), 1);
  for (int step = 0; step < 4; ++step) train(world.rank());
  EXPECT_EQ(hooks_so_far(), world.rank() == 0 ? 3 : 2);
}

// D-4: parameters that are reduced by themselves are divided by the weights as well.
LOCKSTEP_THREAD_TEST(DdpWeights, HoldForDelayedParametersToo, 2) {
  auto model = mlp(kSizes);
  DistributedDataParallel ddp(model, world.group(),
                              {.delay_all_reduce_named_params = {{"layer1.weight", model->layers[1]->weight},
                                                                 {"layer1.bias", model->layers[1]->bias}},
                               .param_to_hook_all_reduce = model->layers[0]->weight});
  for (int step = 0; step < 2; ++step) {
    const Samples samples(world, step);
    zero_grads(ddp);
    {
      const auto guard = ddp.no_sync();
      ddp.backward(loss_of(ddp(samples.first)), 1);
    }
    ddp.backward(loss_of(ddp(samples.rest)), samples_in(samples.rest));
    expect_close(gradients_of(ddp), mean_over(samples.all));
    // And once more on top.
    const auto mine = at::cat({samples.first, samples.rest});
    ddp.backward(loss_of(ddp(mine)), samples_in(mine));
    auto twice = mean_over(samples.all);
    for (auto& gradient : twice) gradient = gradient * 2;
    expect_close(gradients_of(ddp), twice);
  }
}

// an odd number of micro-batches leaves one waiting, and the next epoch begins with zeroed gradients.
LOCKSTEP_THREAD_TEST(DdpWeights, GoWithTheGradientsThatAreZeroed, 2) {
  for (const bool as_view : {false, true}) {
    for (const bool to_none : {false, true}) {
      DistributedDataParallel ddp(mlp(kSizes), world.group(), {.gradient_as_bucket_view = as_view});
      for (int epoch = 0; epoch < 3; ++epoch) {
        const Samples samples(world, epoch);
        ddp.zero_grad(to_none);
        {
          const auto guard = ddp.no_sync();
          ddp.backward(loss_of(ddp(samples.first)), 1);
        }
        ddp.backward(loss_of(ddp(samples.rest)), samples_in(samples.rest));
        expect_close(gradients_of(ddp), mean_over(samples.all));
        ddp.zero_grad(to_none);
        const auto guard = ddp.no_sync();
        ddp.backward(loss_of(ddp(samples.all)), 100.0 * (1 + world.rank()));
      }
      // What was zeroed waits for no weighted backward either.
      const Samples samples(world);
      ddp.zero_grad(to_none);
      loss_of(ddp(my_rows(samples.all, world))).backward();
      expect_close(gradients_of(ddp), mean_over(samples.all));
    }
  }
}

// a backward that throws in its middle leaves its divisor to nobody, and its weight neither.
LOCKSTEP_THREAD_TEST(DdpWeights, OfABackwardThatThrowsAreForgotten, 2) {
  DistributedDataParallel ddp(mlp(kSizes), world.group(), {.bucket_cap_mb = 0});
  bool fails = false;
  ddp.module()->layers[0]->weight.register_hook([&](const at::Tensor& gradient) {
    TORCH_CHECK(!fails, "a hook of the user's");
    return gradient;
  });
  for (int step = 0; step < 3; ++step) {
    const Samples samples(world, step);
    for (const bool is_local : {false, true}) {
      zero_grads(ddp);
      fails = true;
      {
        const auto guard = ddp.no_sync(is_local);
        expect_error([&] { ddp.backward(loss_of(ddp(samples.first)), 10.0 + world.rank()); }, {"a hook of the user's"});
      }
      fails = false;
      zero_grads(ddp);
      loss_of(ddp(my_rows(samples.all, world))).backward();
      expect_close(gradients_of(ddp), mean_over(samples.all));
      zero_grads(ddp);
      const auto mine = at::cat({samples.first, samples.rest});
      ddp.backward(loss_of(ddp(mine)), samples_in(mine));
      expect_close(gradients_of(ddp), mean_over(samples.all));
    }
  }
}

// one that throws before its first gradient leaves the weights of those before it, and adds none.
LOCKSTEP_THREAD_TEST(DdpWeights, OfAnAccumulationOutlastABackwardThatThrows, 2) {
  for (const bool is_local : {false, true}) {
    DistributedDataParallel ddp(mlp(kSizes), world.group());
    const auto fail = [&] {
      expect_error([&] { ddp.backward(at::ones({}), 100.0 + world.rank()); }, {"does not require grad"});
    };
    for (int step = 0; step < 2; ++step) {
      const Samples samples(world, step);
      zero_grads(ddp);
      {
        const auto guard = ddp.no_sync();
        ddp.backward(loss_of(ddp(samples.first)), 1);
        if (is_local) fail();
      }
      const auto output = ddp(samples.rest);
      if (!is_local) fail();
      ddp.backward(loss_of(output), samples_in(samples.rest));
      expect_close(gradients_of(ddp), mean_over(samples.all));
    }
  }
}

// Averages of an earlier backward are as they were.
LOCKSTEP_THREAD_TEST(DdpWeights, OfABackwardThatThrowsLeaveAveragesAlone, 2) {
  DistributedDataParallel ddp(mlp(kSizes), world.group());
  ddp.backward(loss_of(ddp(random_batch(2, kSizes[0], world.rank()))), 64);
  std::vector<at::Tensor> before;
  for (const auto& gradient : gradients_of(ddp)) before.push_back(gradient.clone());
  const auto output = ddp(random_batch(2, kSizes[0], 7));
  output.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("skip"); });
  EXPECT_ANY_THROW(ddp.backward(loss_of(output), 64));
  expect_close(gradients_of(ddp), before);
}

}  // namespace
}  // namespace lockstep::weights_test
