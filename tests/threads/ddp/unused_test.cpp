// Parameters that a step does not use: found in the graph, or known from the first step of a static graph.
#include <torch/csrc/autograd/utils/lambda_post_hook.h>

#include "tests/support/ddp_models.h"

namespace lockstep {
namespace {

using namespace ddp_models;
using testing::expect_error;
using testing::Recorder;

at::Tensor input_of(const World& world) {
  return at::full({1, 4}, 0.1 * (world.rank() + 1));
}

/// The mean over ranks of what each rank computes alone; undefined where no rank has a gradient.
std::vector<at::Tensor> expected_gradients(const World& world, const std::function<bool(int)>& left,
                                           const std::function<bool(int)>& right) {
  std::vector<at::Tensor> sums(6);
  for (int rank = 0; rank < world.world_size(); ++rank) {
    auto model = seeded(Branchy());
    model->forward(at::full({1, 4}, 0.1 * (rank + 1)), left(rank), right(rank)).sum().backward();
    const auto own = gradients_of(*model);
    for (std::size_t i = 0; i < own.size(); ++i) {
      if (!own[i].defined()) continue;
      const auto part = own[i] / world.world_size();
      sums[i] = sums[i].defined() ? sums[i] + part : part;
    }
  }
  return sums;
}

// DDP-48, DDP-49, DDP-50
LOCKSTEP_THREAD_TEST(DdpUnused, BranchesMayDifferByStepAndRank, 3) {
  for (const bool as_view : {false, true}) {
    DistributedDataParallel ddp(seeded(Branchy()), world.group(),
                                {.find_unused_parameters = true, .gradient_as_bucket_view = as_view});
    for (int step = 0; step < 12; ++step) {
      const auto left = [&](int rank) { return (step + rank) % 3 != 0; };
      const auto right = [&](int rank) { return step % 2 == 0 && rank == 1; };
      zero_grads(ddp);
      ddp(input_of(world), left(world.rank()), right(world.rank())).sum().backward();
      // DDP-58: used on some ranks means a mean on all; used on none stays undefined.
      expect_close(gradients_of(ddp), expected_gradients(world, left, right));
    }
  }
}

// DDP-49: behind the last bucket.
LOCKSTEP_THREAD_TEST(DdpUnused, MarksAreSummedOncePerStep, 2) {
  const Warnings warnings;
  DistributedDataParallel ddp(seeded(Branchy()), world.group(), {.find_unused_parameters = true});
  for (int step = 0; step < 3; ++step) {
    Recorder recorder;
    ddp(input_of(world), true, true).sum().backward();
    std::vector<std::string> launches;
    for (const auto& event : recorder.events("launch")) {
      if (event.kind == "bucket") launches.push_back(event.unit);
      if (event.dtype == "Int") launches.emplace_back("marks");
    }
    EXPECT_EQ(launches, (std::vector<std::string>{"bucket 0", "marks"}));
  }
  // DDP-51
  EXPECT_EQ(warnings.count("find_unused_parameters is on, but"), 1);
}

/// Returns everything in one of several kinds of wrapping.
struct Wrapped {
  at::Tensor value;
  std::optional<std::map<std::string, std::vector<at::Tensor>>> more;
};
template <class Visit>
void for_each_tensor(Wrapped& wrapped, Visit&& visit) {
  visit_tensors(wrapped.value, visit);
  visit_tensors(wrapped.more, visit);
}

struct NestedImpl : torch::nn::Module {
  NestedImpl()
      : first(register_module("first", torch::nn::Linear(4, 2))),
        second(register_module("second", torch::nn::Linear(4, 2))),
        third(register_module("third", torch::nn::Linear(4, 2))) {}
  Wrapped forward(const at::Tensor& input) {
    return {first->forward(input), std::map<std::string, std::vector<at::Tensor>>{{"key", {second->forward(input)}}}};
  }
  torch::nn::Linear first;
  torch::nn::Linear second;
  torch::nn::Linear third;
};
TORCH_MODULE(Nested);

struct TupleImpl : NestedImpl {
  std::tuple<at::Tensor, std::vector<at::Tensor>, int> forward(const at::Tensor& input) {
    return {first->forward(input), {second->forward(input)}, 7};
  }
};
TORCH_MODULE(Tuple);

// DDP-48, DDP-76
LOCKSTEP_THREAD_TEST(DdpUnused, OutputsMayBeNested, 2) {
  DistributedDataParallel ddp(seeded(Nested()), world.group(), {.find_unused_parameters = true});
  auto output = ddp(input_of(world));
  EXPECT_NE(output.value.grad_fn()->name().find("DdpSink"), std::string::npos);
  (output.value.sum() + output.more->at("key")[0].sum()).backward();
  EXPECT_TRUE(ddp.module()->second->weight.grad().defined());
  EXPECT_FALSE(ddp.module()->third->weight.grad().defined());

  DistributedDataParallel with_tuple(seeded(Tuple()), world.group(), {.find_unused_parameters = true});
  for (int step = 0; step < 2; ++step) {
    const auto [value, list, number] = with_tuple(input_of(world));
    EXPECT_EQ(number, 7);
    (value.sum() + list[0].sum()).backward();
  }
}

// DDP-50, DDP-76: an output the loss leaves out counts as unused; its gradient stays undefined.
LOCKSTEP_THREAD_TEST(DdpUnused, OutputsAbsentFromTheLossCountAsUnused, 2) {
  DistributedDataParallel ddp(seeded(Nested()), world.group(), {.find_unused_parameters = true});
  for (int step = 0; step < 3; ++step) {
    zero_grads(ddp);
    ddp(input_of(world)).value.sum().backward();
    EXPECT_TRUE(ddp.module()->first->weight.grad().defined());
    EXPECT_FALSE(ddp.module()->second->weight.grad().defined());
    EXPECT_FALSE(ddp.module()->third->weight.grad().defined());
  }
}

// DDP-48
LOCKSTEP_THREAD_TEST(DdpUnused, OutputThatIsNeverUsedReducesNothing, 2) {
  DistributedDataParallel ddp(seeded(Branchy()), world.group(), {.find_unused_parameters = true});
  ddp(input_of(world), true, true);
  Recorder recorder;
  ddp(input_of(world), true, false).sum().backward();
  testing::expect_count(recorder.events("launch"), "all_reduce", 2);  // the bucket and the marks, once
}

// DDP-47
LOCKSTEP_THREAD_TEST(DdpUnused, MarksAddUpOverLocalSteps, 2) {
  DistributedDataParallel ddp(seeded(Branchy()), world.group(), {.find_unused_parameters = true});
  for (int step = 0; step < 2; ++step) {
    zero_grads(ddp);
    {
      const auto guard = ddp.no_sync();
      ddp(input_of(world), true, false).sum().backward();
    }
    ddp(input_of(world), false, false).sum().backward();
    // Left was used in the first micro-step, so it is averaged; right never was.
    ASSERT_TRUE(ddp.module()->left->weight.grad().defined());
    const auto all = at::empty({2, 8});
    all_gather_into_tensor(all, ddp.module()->left->weight.grad().reshape({1, 8}), world.group());
    EXPECT_TRUE(at::equal(all[0], all[1]));
    EXPECT_FALSE(ddp.module()->right->weight.grad().defined());
  }
}

// DDP-51
LOCKSTEP_THREAD_TEST(DdpUnused, ChangingSetsShowInTheLog, 2) {
  DistributedDataParallel ddp(seeded(Branchy()), world.group(), {.find_unused_parameters = true});
  const auto step = [&](bool left) {
    ddp(input_of(world), left, true).sum().backward();
    ddp(input_of(world), left, true).sum().backward();
    return ddp.get_ddp_logging_data().ints_map.at("can_set_static_graph");
  };
  EXPECT_EQ(step(true), 1);
  step(false);
  EXPECT_EQ(step(false), 0);
}

// DDP-12
LOCKSTEP_THREAD_TEST(DdpUnused, BucketsOfUnusedParametersMayBeSkipped, 2) {
  DistributedDataParallel ddp(
      seeded(Branchy()), world.group(),
      {.bucket_cap_mb = 0, .find_unused_parameters = true, .skip_all_reduce_unused_params = true});
  const auto reduced = [&](bool left) {
    zero_grads(ddp);
    Recorder recorder;
    ddp(input_of(world), left, true).sum().backward();
    int count = 0;
    for (const auto& event : recorder.events("launch")) count += event.kind == "bucket" ? 1 : 0;
    return count;
  };
  EXPECT_EQ(reduced(true), 6);
  EXPECT_EQ(reduced(false), 4);
  EXPECT_FALSE(ddp.module()->left->weight.grad().defined());
}

// D-11: ranks that would skip different buckets are told so, in the first step or, when asked to look, in every one.
LOCKSTEP_THREAD_TEST(DdpUnused, SkippedParametersAreCompared, 2) {
  const Warnings warnings;
  const DdpOptions options = {
      .bucket_cap_mb = 0, .find_unused_parameters = true, .skip_all_reduce_unused_params = true};
  DistributedDataParallel ddp(seeded(Branchy()), world.group(), options);
  expect_error([&] { ddp(input_of(world), world.rank() == 0, world.rank() == 1); },
               {"skip_all_reduce_unused_params", "'left.weight'", "'right.weight'"});
  DistributedDataParallel later(seeded(Branchy()), world.group(), options);
  later(input_of(world), true, false).sum().backward();
  EXPECT_EQ(warnings.count("has changed"), 0);
  later(input_of(world), false, true).sum().backward();
  later(input_of(world), true, false).sum().backward();
  EXPECT_EQ(warnings.count("has changed"), 1);
  barrier(world.group());
  c10d::setDebugLevel(c10d::DebugLevel::Info);
  const auto restore = std::shared_ptr<void>(nullptr, [](void*) { c10d::setDebugLevel(c10d::DebugLevel::Off); });
  expect_error([&] { later(input_of(world), world.rank() == 0, world.rank() == 1); },
               {"skip_all_reduce_unused_params", "'left.weight'", "'right.weight'"});
  barrier(world.group());
}

// DDP-52
LOCKSTEP_THREAD_TEST(DdpStaticGraph, IsSetBeforeTheFirstStepOnce, 2) {
  const Warnings warnings;
  DistributedDataParallel ddp(seeded(Branchy()), world.group());
  ddp.set_static_graph();
  EXPECT_EQ(warnings.count("is set already"), 0);
  ddp.set_static_graph();
  EXPECT_EQ(warnings.count("is set already"), 1);
  DistributedDataParallel redundant(seeded(Branchy()), world.group(),
                                    {.find_unused_parameters = true, .static_graph = true});
  EXPECT_EQ(warnings.count("redundant"), 1);
  DistributedDataParallel late(seeded(Branchy()), world.group());
  late(input_of(world), true, true).sum().backward();
  expect_error([&] { late.set_static_graph(); }, {"before the first step"});
}

// DDP-53, DDP-54, DDP-30
LOCKSTEP_THREAD_TEST(DdpStaticGraph, CountsFirstAndReducesAtTheEnd, 2) {
  for (const bool as_view : {false, true}) {
    DistributedDataParallel ddp(seeded(Branchy()), world.group(),
                                {.bucket_cap_mb = 0, .gradient_as_bucket_view = as_view, .static_graph = true});
    const auto all = [](int) { return true; };
    const auto none = [](int) { return false; };
    for (int step = 0; step < 5; ++step) {
      zero_grads(ddp);
      Recorder recorder;
      ddp(input_of(world), true, false).sum().backward();
      // Nothing is hidden behind the first backward, which counts, nor the second, which has one bucket.
      const auto events = recorder.events();
      const auto is_first_bucket = [](const auto& event) { return event.kind == "bucket"; };
      const auto first_bucket = std::find_if(events.begin(), events.end(), is_first_bucket);
      const bool has_gradient_after =
          std::any_of(first_bucket, events.end(), [](const auto& event) { return event.kind == "gradient"; });
      EXPECT_EQ(has_gradient_after, step >= 2) << step;
      expect_close(gradients_of(ddp), expected_gradients(world, all, none));
      EXPECT_EQ(ddp.engine().reducer()->has_rebuilt_buckets(), step >= 2) << step;
    }
    EXPECT_EQ(ddp.engine().reducer()->last_step().unused_parameters, (std::vector<std::size_t>{4, 5}));
  }
}

struct TwiceImpl : torch::nn::Module {
  TwiceImpl() : inner(register_module("inner", torch::nn::Linear(4, 4))) {}
  at::Tensor forward(const at::Tensor& input) { return inner->forward(at::tanh(inner->forward(input))); }
  torch::nn::Linear inner;
};
TORCH_MODULE(Twice);

// DDP-54: a backward inside the backward, as checkpointing makes it, over a parameter that is used in both.
LOCKSTEP_THREAD_TEST(DdpStaticGraph, TakesReentrantBackwards, 2) {
  const auto run = [](auto& model, torch::nn::Linear& inner, const at::Tensor& input) {
    auto hidden = model.forward(input);
    auto leaf = hidden.detach().requires_grad_();
    auto output = inner->forward(leaf).sum();
    hidden.register_hook([output, leaf](const at::Tensor&) {
      output.backward();
      return leaf.grad();
    });
    hidden.sum().backward();
  };
  std::vector<at::Tensor> expected(2);
  for (int rank = 0; rank < 2; ++rank) {
    auto alone = seeded(Twice());
    run(*alone.ptr(), alone->inner, at::full({1, 4}, 0.1 * (rank + 1)));
    const auto own = gradients_of(*alone);
    for (int i = 0; i < 2; ++i) expected[i] = rank == 0 ? own[i] / 2 : expected[i] + own[i] / 2;
  }
  DistributedDataParallel ddp(seeded(Twice()), world.group(), {.static_graph = true});
  for (int step = 0; step < 4; ++step) {
    zero_grads(ddp);
    run(ddp, ddp.module()->inner, input_of(world));
    expect_close(gradients_of(ddp), expected);
  }
}

// DDP-55
LOCKSTEP_THREAD_TEST(DdpStaticGraph, NamesParametersOfAChangedGraph, 2) {
  DistributedDataParallel ddp(seeded(Branchy()), world.group(), {.static_graph = true});
  for (int step = 0; step < 2; ++step) ddp(input_of(world), true, false).sum().backward();
  expect_error([&] { ddp(input_of(world), true, true).sum().backward(); },
               {"'right.", "one gradient more", "static_graph"});
  DistributedDataParallel missing(seeded(Branchy()), world.group(), {.static_graph = true});
  for (int step = 0; step < 2; ++step) missing(input_of(world), true, true).sum().backward();
  missing(input_of(world), true, false).sum().backward();
  expect_error([&] { missing(input_of(world), true, true); }, {"'right.weight'", "static_graph"});
  barrier(world.group());
}

// DDP-56
LOCKSTEP_THREAD_TEST(DdpStaticGraph, MayBeginUnderNoSync, 2) {
  DistributedDataParallel ddp(mlp({4, 3}), world.group(), {.static_graph = true});
  const auto input = at::full({1, 4}, world.rank() + 1.0);
  {
    const auto guard = ddp.no_sync();
    ddp(input).sum().backward();
  }
  for (int step = 0; step < 3; ++step) {
    ddp(input).sum().backward();
    EXPECT_TRUE(at::allclose(ddp.module()->layers[0]->weight.grad(), at::full({3, 4}, 3.0 + 1.5 * step))) << step;
  }
}

// DDP-57
LOCKSTEP_THREAD_TEST(DdpGradientViews, AliasTheBucketAndAreMadeAgain, 2) {
  DistributedDataParallel ddp(mlp({4, 3}), world.group(), {.gradient_as_bucket_view = true});
  const auto& weight = ddp.module()->layers[0]->weight;
  const auto step = [&] { ddp(at::full({1, 4}, world.rank() + 1.0)).sum().backward(); };
  const auto is_view = [&] {
    const auto buckets = ddp.engine().reducer()->get_grad_buckets(false);
    return weight.grad().is_alias_of(buckets[0].buffer());
  };
  step();
  EXPECT_TRUE(is_view());
  ddp.zero_grad(/*set_to_none=*/true);
  step();
  EXPECT_TRUE(is_view());
  EXPECT_TRUE(at::allclose(weight.grad(), at::full({3, 4}, 1.5)));
  ddp.zero_grad(/*set_to_none=*/false);
  step();
  EXPECT_TRUE(is_view());
  EXPECT_TRUE(at::allclose(weight.grad(), at::full({3, 4}, 1.5)));
  weight.mutable_grad() = at::full({3, 4}, 10.0);
  step();
  EXPECT_TRUE(is_view());
  EXPECT_TRUE(at::allclose(weight.grad(), at::full({3, 4}, 11.5)));
  // Unlike Python's, and so unlike a tracked view: libtorch's own Optimizer::zero_grad() detaches in place.
  torch::optim::SGD optimizer(ddp.parameters(), 0.1);
  for (const bool to_none : {true, false}) {
    optimizer.zero_grad(to_none);
    step();
    EXPECT_TRUE(is_view());
    EXPECT_TRUE(at::allclose(weight.grad(), at::full({3, 4}, 1.5)));
  }
}

// DDP-58
LOCKSTEP_THREAD_TEST(DdpGradientViews, ForeignGradientIsNamed, 2) {
  DistributedDataParallel ddp(mlp({4, 3}), world.group(), {.gradient_as_bucket_view = true});
  ddp(at::ones({1, 4})).sum().backward();
  const auto output = ddp(at::ones({1, 4})).sum();
  // Replaced between its hook and the end of backward.
  torch::autograd::impl::grad_accumulator(ddp.module()->layers[0]->bias)
      ->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
          [&](const torch::autograd::variable_list& outputs, const torch::autograd::variable_list&) {
            ddp.module()->layers[0]->bias.mutable_grad() = at::zeros({3});
            return outputs;
          }));
  expect_error([&] { output.backward(); }, {"'layer0.bias'", "gradient_as_bucket_view"});
}

}  // namespace
}  // namespace lockstep
