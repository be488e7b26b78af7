// The first backward of a static graph, which counts: found whatever the outputs are and whatever came before it.
#include "tests/support/ddp_models.h"

namespace lockstep::static_graph_test {
namespace {

using namespace ddp_models;
using testing::expect_error;
using testing::Recorder;

const std::vector<int64_t> kSizes = {4, 5, 2};

at::Tensor loss_of(const at::Tensor& output) {
  return output.pow(2).mean();
}

at::Tensor rows_of(const World& world, int step) {
  return my_rows(random_batch(6, kSizes[0], static_cast<uint64_t>(step)), world);
}

std::vector<at::Tensor> whole_batch(int step) {
  auto model = mlp(kSizes);
  loss_of(model->forward(random_batch(6, kSizes[0], static_cast<uint64_t>(step)))).backward();
  return gradients_of(*model);
}

/// Shows its tensor to nobody.
struct Hidden {
  at::Tensor tensor;
};
struct HidingImpl : MlpImpl {
  HidingImpl() : MlpImpl(kSizes) {}
  std::shared_ptr<Hidden> forward(const at::Tensor& input) {
    return std::make_shared<Hidden>(Hidden{MlpImpl::forward(input)});
  }
};
TORCH_MODULE(Hiding);

// D-1: a struct of the program, behind a pointer.
LOCKSTEP_THREAD_TEST(DdpFirstStaticBackward, IsFoundIfOutputsShowNoTensor, 2) {
  for (const bool as_view : {false, true}) {
    DistributedDataParallel ddp(seeded(Hiding()), world.group(),
                                {.gradient_as_bucket_view = as_view, .static_graph = true});
    for (int step = 0; step < 4; ++step) {
      zero_grads(ddp);
      loss_of(ddp(rows_of(world, step))->tensor).backward();
      expect_close(gradients_of(ddp), whole_batch(step));
    }
    EXPECT_TRUE(ddp.engine().reducer()->has_rebuilt_buckets());
  }
}

// DDP-43 for static graphs, D-3: a gradient penalty, and a gradient that nothing comes of.
LOCKSTEP_THREAD_TEST(DdpFirstStaticBackward, IsNotAutogradGrad, 2) {
  const auto with_penalty = [](auto& model, const at::Tensor& rows) {
    const auto input = rows.clone().requires_grad_();
    const auto output = model.forward(input);
    const auto slope = torch::autograd::grad({output.sum()}, {input}, {}, /*retain_graph=*/true, /*create_graph=*/true);
    return loss_of(output) + loss_of(slope[0]);
  };
  for (const bool is_static : {false, true}) {
    DistributedDataParallel ddp(mlp(kSizes), world.group(), {.static_graph = is_static});
    {
      const auto input = rows_of(world, 9).requires_grad_();
      Recorder recorder;
      torch::autograd::grad({ddp(input).sum()}, {input});
      testing::expect_none(recorder.events("launch"), "all_reduce");
    }
    for (int step = 0; step < 4; ++step) {
      zero_grads(ddp);
      with_penalty(ddp, rows_of(world, step)).backward();
      auto alone = mlp(kSizes);
      const auto parts = random_batch(6, kSizes[0], static_cast<uint64_t>(step)).tensor_split(2);
      ((with_penalty(*alone, parts[0]) + with_penalty(*alone, parts[1])) / 2).backward();
      expect_close(gradients_of(ddp), gradients_of(*alone));
    }
  }
}

/// From now on the gradient of the last layer's weight throws as often as `times` says.
std::shared_ptr<int> add_failing_hook(Mlp& model) {
  auto times = std::make_shared<int>(0);
  model->layers[0]->weight.register_hook([times](const at::Tensor& gradient) {
    TORCH_CHECK((*times)-- <= 0, "a hook of the user's");
    return gradient;
  });
  return times;
}

// D-2: it throws and is repeated on the same graph, with no forward in between.
LOCKSTEP_THREAD_TEST(DdpFirstStaticBackward, MayThrowAndBeRepeatedOnTheSameGraph, 2) {
  DistributedDataParallel ddp(mlp(kSizes), world.group(), {.static_graph = true});
  const auto failures = add_failing_hook(ddp.module());
  for (int step = 0; step < 4; ++step) {
    zero_grads(ddp);
    const auto loss = loss_of(ddp(rows_of(world, step)));
    if (step == 0) {
      *failures = 2;
      for (int i = 0; i < 2; ++i) {
        expect_error([&] { loss.backward({}, /*retain_graph=*/true); }, {"a hook of the user's"});
        zero_grads(ddp);
      }
    }
    loss.backward();
    expect_close(gradients_of(ddp), whole_batch(step));
  }
}

// D-2: one rank alone throws and repeats; the others wait for it, and train with what it then has.
LOCKSTEP_THREAD_TEST(DdpFirstStaticBackward, MayThrowOnOneRankAndBeRepeatedThere, 2) {
  DistributedDataParallel ddp(mlp(kSizes), world.group(), {.static_graph = true});
  const auto failures = add_failing_hook(ddp.module());
  for (int step = 0; step < 4; ++step) {
    zero_grads(ddp);
    if (step == 0 && world.rank() == 0) {
      *failures = 1;
      expect_error([&] { loss_of(ddp(rows_of(world, step))).backward(); }, {"a hook of the user's"});
      zero_grads(ddp);
    }
    loss_of(ddp(rows_of(world, step))).backward();
    expect_close(gradients_of(ddp), whole_batch(step));
  }
}

}  // namespace
}  // namespace lockstep::static_graph_test
