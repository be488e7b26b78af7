// Steps that fail on the way to their gradients, and are repeated.
#include <chrono>

#include "lockstep/comm/barrier.h"
#include "lockstep/comm/failure_notice.h"
#include "lockstep/testing/interpose.h"
#include "tests/support/ddp_models.h"

namespace lockstep {
namespace {

using namespace ddp_models;
using testing::expect_error;

const std::vector<int64_t> kSizes = {4, 3, 3, 2};

void use_a_bucket_per_layer(auto& ddp) {
  const auto parameters = ddp.bucket_plan().parameters();
  ddp.use_plan(BucketPlan(parameters, {{.parameters = {4, 5}}, {.parameters = {2, 3}}, {.parameters = {0, 1}}}));
}

/// Trains for some steps; `attempt(step, run)` runs each, and may let it fail before.
template <class Ddp>
std::vector<at::Tensor> train(Ddp& ddp, const World& world,
                              const std::function<void(int step, const std::function<void()>& run)>& attempt) {
  torch::optim::SGD optimizer(ddp.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < 4; ++step) {
    attempt(step, [&] {
      optimizer.zero_grad();
      ddp(my_rows(random_batch(8, kSizes[0], step), world)).pow(2).mean().backward();
    });
    optimizer.step();
  }
  return ddp.parameters();
}

std::vector<at::Tensor> trained_without_failure(const World& world, const DdpOptions& options) {
  DistributedDataParallel ddp(mlp(kSizes), world.group(), options);
  use_a_bucket_per_layer(ddp);
  return train(ddp, world, [](int, const auto& run) { run(); });
}

void expect_equal(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected) {
  for (std::size_t i = 0; i < actual.size(); ++i) EXPECT_TRUE(at::equal(actual[i], expected[i])) << "tensor " << i;
}

/// Gradients are what this rank alone computes: of all parameters, or of those that got one.
void expect_local_gradients(const torch::nn::Module& module, Mlp local, const at::Tensor& rows, bool of_all) {
  local->forward(rows).pow(2).mean().backward();
  const auto expected = gradients_of(*local);
  const auto actual = gradients_of(module);
  std::size_t defined = 0;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    if (!actual[i].defined()) continue;
    EXPECT_TRUE(at::allclose(actual[i], expected[i])) << "parameter " << i;
    ++defined;
  }
  EXPECT_GT(defined, of_all ? actual.size() - 1 : 0U);
}

Mlp copy_of(const Mlp& model) {
  auto copy = mlp(kSizes);
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < copy->parameters().size(); ++i) copy->parameters()[i].copy_(model->parameters()[i]);
  return copy;
}

// DDP-65: what a hook launched fails when it is waited for, the second bucket of three.
// (D-12)
LOCKSTEP_THREAD_TEST(DdpRepeat, ABucketThatDoesNotArriveLeavesLocalGradients, 2) {
  for (const int way : {0, 1, 2, 3}) {
    const bool as_view = way % 2 == 1;
    const DdpOptions options = {.find_unused_parameters = way >= 2, .gradient_as_bucket_view = as_view};
    const auto expected = trained_without_failure(world, options);
    DistributedDataParallel ddp(mlp(kSizes), world.group(), options);
    use_a_bucket_per_layer(ddp);
    bool fails = false;
    ddp.register_comm_hook([&](GradBucket& bucket) {
      const auto mean =
          then(all_reduce_future(bucket.buffer(), world.group()), [](const at::Tensor& sum) { return sum / 2; });
      if (!fails || bucket.index() != 1) return mean;
      mean->wait();
      auto lost = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
      lost->setError(std::make_exception_ptr(std::runtime_error("lost on the way")));
      return lost;
    });
    const auto actual = train(ddp, world, [&](int step, const auto& run) {
      if (step == 2) {
        fails = true;
        expect_error(run, {"bucket 1", "lost on the way"});
        fails = false;
        const auto rows = my_rows(random_batch(8, kSizes[0], step), world);
        if (!as_view) expect_local_gradients(*ddp.module(), copy_of(ddp.module()), rows, /*of_all=*/true);
        // As views some would be sums and others not: there are none.
        for (const auto& parameter : ddp.parameters()) EXPECT_NE(parameter.grad().defined(), as_view);
      }
      run();
    });
    expect_equal(actual, expected);
  }
}

// DDP-65: the second of three launches fails, in the middle of backward.
LOCKSTEP_THREAD_TEST(DdpRepeat, ABucketThatCannotBeLaunchedLeavesLocalGradients, 2) {
  for (const bool as_view : {false, true}) {
    for (const bool searches : {false, true}) {
      const DdpOptions options = {.find_unused_parameters = searches, .gradient_as_bucket_view = as_view};
      const auto expected = trained_without_failure(world, options);
      DistributedDataParallel ddp(mlp(kSizes), world.group(), options);
      use_a_bucket_per_layer(ddp);
      const auto actual = train(ddp, world, [&](int step, const auto& run) {
        if (step == 1) {
          {
            const auto failing = testing::fail_call(CallKind::kAllReduce, 1, "no way out");
            expect_error(run, {"no way out"});
          }
          const auto rows = my_rows(random_batch(8, kSizes[0], step), world);
          if (!as_view) expect_local_gradients(*ddp.module(), copy_of(ddp.module()), rows, /*of_all=*/false);
          EXPECT_FALSE(ddp.engine().reducer()->is_armed());
        }
        run();
      });
      expect_equal(actual, expected);
    }
  }
}

// The first backward of a static graph counts: one that failed must not be counted.
LOCKSTEP_THREAD_TEST(DdpRepeat, AFirstStepOfAStaticGraphCanFail, 2) {
  const DdpOptions options = {.static_graph = true};
  const auto expected = trained_without_failure(world, options);
  DistributedDataParallel ddp(mlp(kSizes), world.group(), options);
  use_a_bucket_per_layer(ddp);
  const auto actual = train(ddp, world, [&](int step, const auto& run) {
    if (step == 0) {
      // After the marks of what is used come the buckets.
      const auto failing = testing::fail_call(CallKind::kAllReduce, 2, "no way out");
      expect_error(run, {"no way out"});
    }
    run();
  });
  expect_equal(actual, expected);
}

// Something else throws in the first backward of a static graph: its end, where everything is reduced, is not reached.
LOCKSTEP_THREAD_TEST(DdpRepeat, AFirstBackwardOfAStaticGraphCanThrow, 2) {
  const DdpOptions options = {.static_graph = true};
  const auto expected = trained_without_failure(world, options);
  DistributedDataParallel ddp(mlp(kSizes), world.group(), options);
  use_a_bucket_per_layer(ddp);
  const auto actual = train(ddp, world, [&](int step, const auto& run) {
    if (step == 0) {
      auto output = ddp(my_rows(random_batch(8, kSizes[0], step), world));
      const auto hidden = output.relu();
      hidden.register_hook([](const at::Tensor& gradient) { return gradient; });
      output.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("a hook of the user's"); });
      expect_error([&] { hidden.sum().backward(); }, {"a hook of the user's"});
      // And once more behind the wrapper's own node, where the end is queued already.
      auto again = ddp(my_rows(random_batch(8, kSizes[0], step), world));
      ddp.module()->layers[2]->weight.register_hook([is_first = std::make_shared<bool>(true)](const at::Tensor& grad) {
        TORCH_CHECK(!std::exchange(*is_first, false), "a hook of a parameter");
        return grad;
      });
      expect_error([&] { again.sum().backward(); }, {"a hook of a parameter"});
    }
    run();
  });
  expect_equal(actual, expected);
}

// Which buckets were used before the failure differs between ranks: nothing can be repeated.
LOCKSTEP_THREAD_TEST(DdpRepeat, AStepWithOptimizersInBackwardIsNotRepeated, 2) {
  DistributedDataParallel ddp(mlp(kSizes), world.group());
  use_a_bucket_per_layer(ddp);
  ddp.register_fused_optim([](auto parameters) { return std::make_shared<torch::optim::SGD>(parameters, 0.1); });
  const auto run = [&] { ddp(my_rows(random_batch(8, kSizes[0], 1), world)).pow(2).mean().backward(); };
  run();
  {
    const auto failing = testing::fail_call(CallKind::kAllReduce, 1, "no way out");
    expect_error(run, {"no way out"});
  }
  expect_error(run, {"stepped some", "Wrap the module again"});
}

// A weighted backward that fails before its first gradient leaves no divisor to the next, plain one.
LOCKSTEP_THREAD_TEST(DdpRepeat, AWeightedBackwardThatThrowsLeavesNoWeight, 2) {
  const auto expected = trained_without_failure(world, {});
  DistributedDataParallel ddp(mlp(kSizes), world.group());
  use_a_bucket_per_layer(ddp);
  const auto actual = train(ddp, world, [&](int step, const auto& run) {
    if (step == 1) {
      ddp(my_rows(random_batch(8, kSizes[0], step), world));
      const double weight = world.rank() == 0 ? 0 : 5;
      expect_error([&] { ddp.backward(at::ones({}), weight); }, {"does not require grad"});
    }
    run();
  });
  expect_equal(actual, expected);
}

// What comes before the first bucket fails (here the sum of weights), and the backward is repeated on the same graph: a
// static graph must not have counted the first one.
LOCKSTEP_THREAD_TEST(DdpRepeat, ABackwardThatCannotBeginCanBeRepeated, 2) {
  for (const bool is_static : {false, true}) {
    const DdpOptions options = {.static_graph = is_static};
    const auto expected = trained_without_failure(world, options);
    DistributedDataParallel ddp(mlp(kSizes), world.group(), options);
    use_a_bucket_per_layer(ddp);
    torch::optim::SGD optimizer(ddp.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    ddp.join({.options = {.weighted = true}}).run([&] {
      for (int step = 0; step < 4; ++step) {
        const auto loss = ddp(my_rows(random_batch(8, kSizes[0], step), world)).pow(2).mean();
        if (step % 2 == 0) {
          const auto failing = testing::fail_call(CallKind::kAllReduce, 0, "no way out");
          expect_error([&] { loss.backward({}, /*retain_graph=*/true); }, {"no way out"});
        }
        optimizer.zero_grad();
        loss.backward();
        optimizer.step();
      }
    });
    expect_equal(ddp.parameters(), expected);
  }
}

// Gradients that are reduced one by one, when backward ends: one that threw has no end, and the next one has its own.
LOCKSTEP_THREAD_TEST(DdpRepeat, ABackwardThatThrewLeavesPerParameterReductionReady, 2) {
  auto whole = mlp(kSizes);
  torch::optim::SGD plain(whole->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < 4; ++step) {
    plain.zero_grad();
    whole->forward(random_batch(8, kSizes[0], step)).pow(2).mean().backward();
    plain.step();
  }
  DistributedDataParallel ddp(mlp(kSizes), world.group(), {.per_parameter = true});
  bool fails = false;
  ddp.module()->layers[0]->weight.register_hook([&](const at::Tensor& gradient) {
    TORCH_CHECK(!fails, "a hook of the user's");
    return gradient;
  });
  torch::optim::SGD optimizer(ddp.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < 4; ++step) {
    const auto loss = ddp(my_rows(random_batch(8, kSizes[0], step), world)).pow(2).mean();
    fails = step != 0;
    if (fails) expect_error([&] { loss.backward({}, /*retain_graph=*/true); }, {"a hook of the user's"});
    fails = false;
    // On the same graph: no forward has come in between.
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
  }
  expect_close(ddp.parameters(), whole->parameters());
}

// D-12: something of the user's throws in the middle of backward, after some buckets were launched.
LOCKSTEP_THREAD_TEST(DdpRepeat, ABackwardThatThrowsLeavesTheReducerReady, 2) {
  const Warnings quiet;
  const std::vector<DdpOptions> ways = {{},
                                        {.find_unused_parameters = true},
                                        {.static_graph = true},
                                        {.gradient_as_bucket_view = true},
                                        {.batched_grad_copy = true}};
  for (const auto& options : ways) {
    const auto expected = trained_without_failure(world, options);
    DistributedDataParallel ddp(mlp(kSizes), world.group(), options);
    use_a_bucket_per_layer(ddp);
    bool fails = false;
    ddp.module()->layers[0]->weight.register_hook([&](const at::Tensor& gradient) {
      TORCH_CHECK(!fails, "a hook of the user's");
      return gradient;
    });
    const auto actual = train(ddp, world, [&](int step, const auto& run) {
      fails = true;
      if (step != 0) expect_error(run, {"a hook of the user's"});
      if (step == 2) ddp.check_finalized();
      if (step == 3) expect_error(run, {"a hook of the user's"});
      fails = false;
      run();
    });
    expect_equal(actual, expected);
  }
}

// D-12: so does a backward that is refused, for a gradient that comes a second time.
LOCKSTEP_THREAD_TEST(DdpRepeat, ABackwardThatWasRefusedLeavesTheReducerReady, 2) {
  const auto expected = trained_without_failure(world, {});
  DistributedDataParallel ddp(mlp(kSizes), world.group());
  use_a_bucket_per_layer(ddp);
  const auto actual = train(ddp, world, [&](int step, const auto& run) {
    if (step == 2) {
      const auto outside = ddp.module()->layers[2]->forward(at::ones({2, 3})).sum();
      auto output = ddp(my_rows(random_batch(8, kSizes[0], step), world));
      output.register_hook([&](const at::Tensor&) { outside.backward({}, /*retain_graph=*/true); });
      expect_error([&] { output.sum().backward(); }, {"second time", "layer2"});
    }
    run();
  });
  expect_equal(actual, expected);
}

// One rank alone fails and repeats: its buckets would be summed with others of the step before, which are as long.
LOCKSTEP_THREAD_TEST(DdpRepeat, ARankThatRepeatsAloneIsNoticed, 2) {
  DistributedDataParallel ddp(mlp({3, 3, 3, 3}), world.group());
  use_a_bucket_per_layer(ddp);
  bool fails = world.rank() == 0;
  ddp.module()->layers[0]->weight.register_hook([&](const at::Tensor& gradient) {
    TORCH_CHECK(!fails, "a hook of the user's");
    return gradient;
  });
  const auto run = [&] { ddp(random_batch(2, 3, 1)).sum().backward(); };
  if (world.rank() == 0) {
    expect_error(run, {"a hook of the user's"});
    fails = false;
  }
  expect_error(run, {"DDP after a backward that failed"});
}

// D-12: a callback of a hook may run when the step was given up, and looks at its bucket.
LOCKSTEP_THREAD_TEST(DdpRepeat, AHooksBucketOutlivesAStepThatFailed, 2) {
  DistributedDataParallel ddp(mlp(kSizes), world.group());
  use_a_bucket_per_layer(ddp);
  auto late = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
  std::size_t seen = 0;
  std::optional<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> buffer;
  ddp.register_comm_hook([&](GradBucket& bucket) {
    TORCH_CHECK(bucket.index() == 0, "no further");
    buffer.emplace(bucket.buffer().getIntrusivePtr());
    return then(late, [&bucket, &seen](const at::Tensor& tensor) {
      seen = bucket.parameters().size();
      return tensor;
    });
  });
  expect_error([&] { ddp(random_batch(2, kSizes[0], 1)).sum().backward(); }, {"no further"});
  EXPECT_TRUE(buffer->lock()) << "the bucket that the hook was given is gone, and its buffer with it";
  late->markCompleted(c10::IValue(at::zeros({1})));
  EXPECT_EQ(seen, 2U);
}

// D-12: what was launched may still be written to, by other ranks or by a hook.
LOCKSTEP_THREAD_TEST(DdpRepeat, BuffersOfAStepThatFailedAreNotUsedAgain, 2) {
  const auto expected = trained_without_failure(world, {});
  DistributedDataParallel ddp(mlp(kSizes), world.group());
  use_a_bucket_per_layer(ddp);
  const auto never = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
  bool fails = false;
  at::Tensor under_way;
  ddp.register_comm_hook([&](GradBucket& bucket) -> FuturePtr {
    if (fails) {
      TORCH_CHECK(bucket.index() == 0, "no further");
      under_way = bucket.buffer();
      return never;
    }
    if (under_way.defined()) under_way.fill_(1e6);
    bucket.buffer().div_(world.world_size());
    return all_reduce_future(bucket.buffer(), world.group());
  });
  const auto actual = train(ddp, world, [&](int step, const auto& run) {
    fails = step == 2;
    if (fails) expect_error(run, {"no further"});
    fails = false;
    run();
  });
  expect_equal(actual, expected);
}

// D-10: programs that go on without a dead peer tell it by the type, also behind a hook.
LOCKSTEP_THREAD_TEST(DdpRepeat, ThePeersFailureKeepsItsTypeBehindHooks, 2) {
  const auto expect_peer_error = [&](auto& ddp, const std::string& where) {
    const auto failing = testing::fail_call(CallKind::kAllReduce, 0, "rank 5 is gone");
    try {
      ddp(random_batch(2, kSizes[0], 1)).sum().backward();
      ADD_FAILURE() << "nothing was thrown";
    } catch (const c10::DistBackendError& error) {
      EXPECT_NE(std::string(error.what()).find("rank 5 is gone"), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find(where), std::string::npos) << error.what();
    }
  };
  DistributedDataParallel plain(mlp(kSizes), world.group());
  plain.register_comm_hook([&](GradBucket& bucket) { return all_reduce_future(bucket.buffer(), world.group()); });
  expect_peer_error(plain, "bucket 0");
  DistributedDataParallel low(mlp(kSizes), world.group(),
                              {.mixed_precision = MixedPrecision{.reduce_dtype = at::kHalf}});
  expect_peer_error(low, "");
  // And if it fails on its way.
  DistributedDataParallel lost(mlp(kSizes), world.group());
  lost.register_comm_hook([&](GradBucket&) {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
    future->setError(std::make_exception_ptr(c10::DistBackendError({__func__, __FILE__, __LINE__}, "rank 5 is gone")));
    return then(future, [](const at::Tensor& tensor) { return tensor; });
  });
  expect_peer_error(lost, "bucket 0");
  DistributedDataParallel own(mlp(kSizes), world.group());
  own.register_comm_hook([](GradBucket&) -> FuturePtr { throw std::runtime_error("a mistake"); });
  try {
    own(random_batch(2, kSizes[0], 1)).sum().backward();
    ADD_FAILURE() << "nothing was thrown";
  } catch (const c10::DistBackendError&) {
    ADD_FAILURE() << "the hook's own mistake is no peer's";
  } catch (const c10::Error&) {
  }
}

// (D-10): gloo names no types; whatever goes wrong after a launch is a peer's doing or the transport's.
TEST(DdpRepeat, ThePeersFailureKeepsItsTypeBehindHooksOverGloo) {
  testing::run_threads_in_gtest({.world_size = 2, .backend = "gloo"}, [](const World& world) {
    for (const bool announces : {false, true}) {
      const auto group =
          new_group(world.group(), {0, 1}, {.timeout = std::chrono::seconds(announces ? 60 : 1), .name = "hooks"});
      DistributedDataParallel ddp(mlp(kSizes), group);
      ddp.register_comm_hook([&](GradBucket& bucket) {
        return then(all_reduce_future(bucket.buffer(), group), [](const at::Tensor& sum) { return sum / 2; });
      });
      const auto begin = std::chrono::steady_clock::now();
      if (world.rank() == 0) {
        try {
          ddp(random_batch(2, kSizes[0], 1)).sum().backward();
          ADD_FAILURE() << "nothing was thrown";
        } catch (const c10::DistBackendError& error) {
          EXPECT_NE(std::string(error.what()).find(announces ? "enough" : "rank 1 is gone, hung or late"),
                    std::string::npos)
              << error.what();
          EXPECT_NE(std::string(error.what()).find("bucket 0"), std::string::npos) << error.what();
        }
        EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
      } else if (announces) {
        announce_failure(group, std::make_exception_ptr(std::runtime_error("enough")));
      }
      barrier(world.group());
    }
  });
}

}  // namespace
}  // namespace lockstep
