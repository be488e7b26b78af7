// Communication hooks: what they are given, what may come back, and what happens if they fail.
#include "tests/support/ddp_models.h"

namespace lockstep::comm_hook_test {
namespace {

using namespace ddp_models;
using testing::expect_error;

at::Tensor input_of(const World& world) {
  return at::full({1, 4}, world.rank() + 1.0);
}

FuturePtr mean_hook(GradBucket& bucket, const GroupPtr& group) {
  bucket.buffer().div_(group->getSize());
  return all_reduce_future(bucket.buffer(), group);
}

// DDP-62
LOCKSTEP_THREAD_TEST(DdpCommHook, ReplacesDivisionAndReduction, 2) {
  DistributedDataParallel ddp(mlp({4, 3}), world.group());
  ddp.register_comm_hook([](GradBucket& bucket) { return completed_future(bucket.buffer()); });
  for (int step = 0; step < 3; ++step) {
    zero_grads(ddp);
    ddp(input_of(world)).sum().backward();
    // Nobody divided and nobody added: they are this rank's own.
    EXPECT_TRUE(at::equal(ddp.module()->layers[0]->weight.grad(), at::full({3, 4}, world.rank() + 1.0)));
  }
}

// A parameter that lies otherwise since the bucket was made, as after to(channels_last): its gradient does not.
LOCKSTEP_THREAD_TEST(DdpCommHook, SeesGradientsAsTheBucketHoldsThem, 2) {
  auto model = mlp({4, 3});
  DistributedDataParallel ddp(model, world.group());
  auto& weight = model->layers[0]->weight;
  const auto factor = at::arange(12, at::kFloat).view({3, 4});
  ddp.register_comm_hook([&](GradBucket& bucket) {
    for (auto& gradient : bucket.gradients()) {
      if (gradient.dim() == 2) gradient.mul_(factor);
    }
    return completed_future(bucket.buffer());
  });
  for (int step = 0; step < 3; ++step) {
    // Before the second step the buckets are made anew.
    if (step == 0) weight.set_data(weight.detach().t().contiguous().t());
    if (step == 2) weight.set_data(weight.detach().contiguous());
    zero_grads(ddp);
    ddp(input_of(world)).sum().backward();
    EXPECT_TRUE(at::equal(weight.grad(), factor * (world.rank() + 1))) << step;
  }
}

struct Counter {
  int calls = 0;
  GroupPtr group;
};

// DDP-62, DDP-64
LOCKSTEP_THREAD_TEST(DdpCommHook, SeesTheBucketAndKeepsState, 2) {
  DistributedDataParallel ddp(mlp({4, 3, 2}), world.group(), {.bucket_cap_mb = 0});
  const auto state = std::make_shared<Counter>(Counter{.group = world.group()});
  std::vector<std::size_t> indices;
  std::vector<bool> was_last;
  ddp.register_comm_hook(state, [&](Counter& counter, GradBucket& bucket) {
    ++counter.calls;
    indices.push_back(bucket.index());
    was_last.push_back(bucket.is_last());
    EXPECT_EQ(bucket.gradients().size(), bucket.parameters().size());
    int64_t elements = 0;
    for (std::size_t i = 0; i < bucket.parameters().size(); ++i) {
      EXPECT_EQ(bucket.gradients()[i].sizes(), bucket.parameters()[i].sizes());
      EXPECT_TRUE(bucket.gradients()[i].is_alias_of(bucket.buffer()));
      EXPECT_TRUE(at::equal(bucket.gradients()[i], bucket.parameters()[i].grad()));
      elements += bucket.parameters()[i].numel();
    }
    EXPECT_EQ(bucket.buffer().numel(), elements);
    return mean_hook(bucket, counter.group);
  });
  ddp(input_of(world)).sum().backward();
  EXPECT_EQ(was_last, std::vector<bool>{true});
  indices.clear();
  was_last.clear();
  zero_grads(ddp);
  ddp(input_of(world)).sum().backward();
  EXPECT_EQ(indices, (std::vector<std::size_t>{0, 1, 2, 3}));
  EXPECT_EQ(was_last, (std::vector<bool>{false, false, false, true}));
  EXPECT_EQ(state->calls, 5);
  // What a rank that only takes part uses.
  auto buckets = ddp.engine().reducer()->get_grad_buckets();
  EXPECT_EQ(buckets.size(), 4U);
  for (auto& bucket : buckets) {
    EXPECT_EQ(bucket.buffer().abs().sum().item<float>(), 0);
    ddp.engine().reducer()->run_allreduce_hook(bucket)->wait();
  }
}

// DDP-63
LOCKSTEP_THREAD_TEST(DdpCommHook, IsOneAndBetweenSteps, 2) {
  DistributedDataParallel ddp(mlp({4, 3}), world.group());
  expect_error([&] { ddp.register_comm_hook(CommHook{.name = "none"}); }, {"no hook"});
  ddp(input_of(world)).sum().backward();
  ddp.register_comm_hook([&](GradBucket& bucket) { return mean_hook(bucket, world.group()); }, "mine");
  EXPECT_EQ(ddp.get_ddp_logging_data().strs_map.at("comm_hook"), "mine");
  expect_error([&] { ddp.register_comm_hook([](GradBucket& b) { return completed_future(b.buffer()); }); },
               {"registered already", "'mine'"});
  zero_grads(ddp);
  ddp(input_of(world)).sum().backward();
  EXPECT_TRUE(at::allclose(ddp.module()->layers[0]->weight.grad(), at::full({3, 4}, 1.5)));
  DistributedDataParallel other(mlp({4, 4, 3}), world.group(), {.bucket_cap_mb = 0});
  other(input_of(world)).sum().backward();
  zero_grads(other);
  const auto output = other(input_of(world)).sum();
  other.module()->layers[0]->weight.register_hook([&](const at::Tensor&) {
    expect_error([&] { other.register_comm_hook([](GradBucket& b) { return completed_future(b.buffer()); }); },
                 {"under way"});
  });
  output.backward();
}

// DDP-65
LOCKSTEP_THREAD_TEST(DdpCommHook, ResultMayBeNewStorage, 2) {
  for (const bool as_view : {false, true}) {
    DistributedDataParallel ddp(mlp({4, 3}), world.group(), {.gradient_as_bucket_view = as_view});
    ddp.register_comm_hook([&](GradBucket& bucket) {
      return then(mean_hook(bucket, world.group()), [](const at::Tensor& mean) { return mean * 2; });
    });
    for (int step = 0; step < 3; ++step) {
      zero_grads(ddp);
      ddp(input_of(world)).sum().backward();
      EXPECT_TRUE(at::allclose(ddp.module()->layers[0]->weight.grad(), at::full({3, 4}, 3.0)));
    }
  }
}

// DDP-65: of another dtype and shape, and as a list.
LOCKSTEP_THREAD_TEST(DdpCommHook, ResultMayBeAListOrOfAnotherDtype, 2) {
  DistributedDataParallel ddp(mlp({4, 3}), world.group());
  ddp.register_comm_hook([](GradBucket& bucket) {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors());
    future->markCompleted(c10::IValue(std::vector<at::Tensor>{bucket.buffer().to(at::kDouble).view({5, 3})}));
    return future;
  });
  ddp(input_of(world)).sum().backward();
  EXPECT_EQ(ddp.module()->layers[0]->weight.grad().scalar_type(), at::kFloat);
  EXPECT_TRUE(at::equal(ddp.module()->layers[0]->weight.grad(), at::full({3, 4}, world.rank() + 1.0)));
}

// DDP-65
LOCKSTEP_THREAD_TEST(DdpCommHook, FailuresNameBucketHookAndParameters, 2) {
  const auto failing = [&](auto hook, const std::vector<std::string>& words) {
    DistributedDataParallel ddp(mlp({4, 3}), world.group());
    ddp.register_comm_hook(hook, "shaky");
    const auto output = ddp(input_of(world)).sum();
    auto all = words;
    for (const char* word : {"'shaky'", "bucket 0", "'layer0.bias'", "rank"}) all.emplace_back(word);
    expect_error([&] { output.backward(); }, all);
    EXPECT_EQ(ddp.get_ddp_logging_data().ints_map.at("has_error"), 1);
    // The next step begins anew.
    expect_error([&] { ddp(input_of(world)).sum().backward(); }, words);
  };
  failing([](GradBucket& bucket) { return completed_future(bucket.buffer().narrow(0, 0, 3)); }, {"3 elements", "15"});
  failing([](GradBucket&) -> FuturePtr { throw std::runtime_error("no luck"); }, {"no luck"});
  failing([](GradBucket&) -> FuturePtr { return nullptr; }, {"no future"});
  failing(
      [](GradBucket&) {
        auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
        future->setError(std::make_exception_ptr(std::runtime_error("later no luck")));
        return future;
      },
      {"later no luck"});
  barrier(world.group());
}

// DDP-60, DDP-62
LOCKSTEP_THREAD_TEST(DdpCommHook, GetsSparseGradientsToo, 2) {
  torch::nn::EmbeddingBag bag(torch::nn::EmbeddingBagOptions(10, 3).mode(torch::kSum).sparse(true));
  DistributedDataParallel ddp(seeded(bag), world.group());
  bool was_sparse = false;
  ddp.register_comm_hook([&](GradBucket& bucket) {
    was_sparse = bucket.buffer().is_sparse();
    return then(all_reduce_future(bucket.buffer(), world.group()), [](const at::Tensor& sum) { return sum / 2; });
  });
  ddp(at::tensor({1, 2, world.rank() + 4}), at::tensor({0})).sum().backward();
  EXPECT_TRUE(was_sparse);
  const auto dense = bag->weight.grad().to_dense();
  EXPECT_EQ(dense.sum().item<float>(), 9);
  EXPECT_EQ(dense[4][0].item<float>(), 0.5);
}

}  // namespace
}  // namespace lockstep::comm_hook_test
