// What the shm backend promises about calls under way, for ranks as threads and as processes: they run in the order of
// their launch, whoever waits, and nobody has to.
#pragma once

#include <gtest/gtest.h>

#include <future>
#include <thread>

#include "lockstep/lockstep.h"
#include "tests/support/shm_promises.h"

namespace lockstep::shm_order {

using reduction_model::have_same_bits;
using reduction_model::input_of;
using reduction_model::model_of;
using shm_promises::all_ranks;
using shm_promises::cpu_backend;
using shm_promises::inputs_of_all;
using namespace std::chrono_literals;

/// A call, and what its results must be on this rank.
struct Expectation {
  Call call;
  std::vector<at::Tensor> results;

  void check() const {
    for (std::size_t i = 0; i < results.size(); ++i) {
      EXPECT_TRUE(have_same_bits(call.results()[i], results[i])) << call.describe();
    }
  }
};

/// The calls of all ranks number `number` fit together.
inline Expectation make_call(const World& world, int number) {
  constexpr int64_t kSizes[] = {1, 100, 0, 5003, 40'009};
  const int64_t size = kSizes[number % 5];
  const int ranks = world.world_size();
  const int root = number % ranks;
  const auto inputs = inputs_of_all(world, size, at::kFloat, number);
  const auto mine = inputs[world.rank()].clone();
  const auto sum = model_of(inputs, ReduceOp::SUM);
  const auto cut = [&](const at::Tensor& whole) {
    return whole.slice(0, world.rank() * size, (world.rank() + 1) * size).clone();
  };
  switch (number % 6) {
    case 0:
      return {{.kind = CallKind::kAllReduce, .inputs = {mine}}, {sum}};
    case 1:
      return {{.kind = CallKind::kBroadcast, .inputs = {mine}, .root = root}, {inputs[root]}};
    case 2:
      return {{.kind = CallKind::kAllGatherSingle, .inputs = {mine}, .outputs = {at::zeros({ranks * size})}},
              {at::cat(inputs)}};
    case 3: {
      const auto wholes = inputs_of_all(world, ranks * size, at::kFloat, number);
      return {
          {.kind = CallKind::kReduceScatterSingle, .inputs = {wholes[world.rank()]}, .outputs = {at::zeros({size})}},
          {cut(model_of(wholes, ReduceOp::SUM))}};
    }
    case 4: {
      const auto wholes = inputs_of_all(world, ranks * size, at::kFloat, number);
      std::vector<at::Tensor> received;
      for (const auto& whole : wholes) received.push_back(cut(whole));
      return {
          {.kind = CallKind::kAllToAllSingle, .inputs = {wholes[world.rank()]}, .outputs = {at::zeros({ranks * size})}},
          {at::cat(received)}};
    }
    default:
      return {{.kind = CallKind::kAllReduce, .inputs = {mine, mine.clone(), mine.clone()}, .op = ReduceOp::MAX},
              std::vector<at::Tensor>(3, model_of(inputs, ReduceOp::MAX))};
  }
}

inline void check_many_in_flight(const World& world) {
  constexpr int kCalls = 50;
  std::vector<Expectation> calls;
  std::vector<Pending> pending;
  for (int i = 0; i < kCalls; ++i) {
    calls.push_back(make_call(world, i));
    pending.push_back(launch(calls.back().call, world.group()));
  }
  // The caller computes meanwhile.
  auto product = at::ones({200, 200});
  for (int i = 0; i < 5; ++i) product = product.mm(at::full({200, 200}, 0.005F));
  EXPECT_NEAR(product[0][0].item<float>(), 1, 1e-3);
  for (int i = kCalls - 1; i >= 0; --i) {
    pending[i].wait();
    // Whatever was launched before is done as well.
    EXPECT_TRUE(pending[i / 2].is_completed());
    calls[i].check();
  }
}

inline void check_futures(const World& world) {
  for (int i = 0; i < 12; ++i) {
    const auto expectation = make_call(world, i);
    auto pending = launch(expectation.call, world.group());
    const auto future = pending.future();
    future->wait();
    const auto tensors = future->value().toTensorVector();
    ASSERT_EQ(tensors.size(), expectation.call.results().size());
    for (std::size_t j = 0; j < tensors.size(); ++j) {
      EXPECT_EQ(tensors[j].data_ptr(), expectation.call.results()[j].data_ptr()) << expectation.call.describe();
    }
    expectation.check();
    // Asked for afterwards, it is complete at once.
    pending.wait();
    EXPECT_TRUE(pending.future()->completed());
  }
}

/// `wait` is called with a later call, from the callback of an earlier one on a thread of the backend's.
inline void check_callback_that_waits(const World& world, const std::function<void(Pending&)>& wait) {
  const auto first = make_call(world, 0);
  const auto second = make_call(world, 6);
  // Rank 0 comes late, so that the others' callbacks are there before the call is done.
  if (world.rank() == 0) std::this_thread::sleep_for(200ms);
  auto pending = launch(first.call, world.group());
  auto later = launch(second.call, world.group());
  const auto done = std::make_shared<std::promise<void>>();
  pending.future()->addCallback([=](c10::ivalue::Future&) mutable {
    wait(later);
    done->set_value();
  });
  EXPECT_EQ(done->get_future().wait_for(5s), std::future_status::ready) << "the callback waits for ever";
  // Also helps a callback that does.
  later.wait();
  pending.wait();
  first.check();
  second.check();
}

inline void check_callback_that_communicates(const World& world) {
  if (world.rank() == 0) std::this_thread::sleep_for(100ms);
  const auto first = make_call(world, 0);
  const auto second = make_call(world, 4);
  const auto done = std::make_shared<std::promise<void>>();
  auto pending = launch(first.call, world.group());
  pending.future()->addCallback([=, group = world.group()](c10::ivalue::Future&) {
    auto call = second.call;
    call.is_async = false;
    launch(call, group).wait();
    done->set_value();
  });
  EXPECT_EQ(done->get_future().wait_for(10s), std::future_status::ready);
  pending.wait();
  first.check();
  second.check();
}

inline void check_two_groups(const World& world) {
  const auto one = new_group(world.group(), all_ranks(world), {.name = "one"});
  const auto other = new_group(world.group(), all_ranks(world), {.name = "other"});
  const bool is_odd = world.rank() % 2 == 1;
  for (int round = 0; round < 20; ++round) {
    const auto first = make_call(world, round);
    const auto second = make_call(world, round + 100);
    std::vector<Pending> pending;
    for (const bool is_first : {!is_odd, is_odd}) {
      pending.push_back(launch((is_first ? first : second).call, is_first ? one : other));
    }
    for (auto& each : pending) each.wait();
    first.check();
    second.check();
  }
}

inline void check_wait_with_a_limit(const World& world) {
  const auto expectation = make_call(world, 0);
  const bool is_late = world.rank() == world.world_size() - 1;
  if (is_late) std::this_thread::sleep_for(600ms);
  const auto start = std::chrono::steady_clock::now();
  const auto work = dispatch(*cpu_backend(world.group()), expectation.call);
  if (!is_late) {
    EXPECT_FALSE(work->isCompleted());
    EXPECT_THROW(work->wait(100ms), c10::DistBackendError);
    EXPECT_GE(std::chrono::steady_clock::now() - start, 95ms);
    EXPECT_EQ(work->exception(), nullptr);
  }
  EXPECT_TRUE(work->wait(20s));
  EXPECT_TRUE(work->isSuccess());
  expectation.check();
}

inline void check_dropped(const World& world) {
  std::vector<Expectation> calls;
  for (int i = 0; i < 20; ++i) {
    calls.push_back(make_call(world, i));
    std::ignore = launch(calls.back().call, world.group());
    // Nobody but the backend has these tensors.
    std::ignore = launch(make_call(world, i + 1).call, world.group());
  }
  barrier(world.group());
  for (const auto& call : calls) call.check();
}

/// A blocking call among launched ones keeps its place.
inline void check_mixed_with_blocking(const World& world) {
  for (int round = 0; round < 10; ++round) {
    const auto tensor = at::ones({20'000});
    auto first = launch_all_reduce(tensor, world.group());
    all_reduce(tensor, world.group());
    auto third = launch_all_reduce(tensor, world.group());
    third.wait();
    EXPECT_TRUE(first.is_completed());
    const auto ranks = world.world_size();
    EXPECT_TRUE(at::equal(tensor, at::full({20'000}, static_cast<float>(ranks * ranks * ranks))));
  }
}

/// Copies of strided tensors are made when a call's turn has come, not when it is launched.
inline void check_strided_in_order(const World& world) {
  const auto ranks = static_cast<float>(world.world_size());
  for (const int64_t rows : {3, 20'000}) {
    const auto tensor = at::ones({rows, 4}).t();
    const auto half = tensor.narrow(0, 1, 2);
    std::vector<Pending> pending;
    for (int i = 0; i < 3; ++i) pending.push_back(launch_all_reduce(half, world.group()));
    // Its input is what the calls before it are still to write.
    const auto gathered = at::empty({world.world_size(), 2, rows});
    pending.push_back(launch_all_gather_into_tensor(gathered, half, world.group()));
    for (auto& each : pending) each.wait();
    EXPECT_TRUE(at::equal(half, at::full({2, rows}, ranks * ranks * ranks)));
    EXPECT_TRUE(at::equal(gathered, at::full(gathered.sizes(), ranks * ranks * ranks)));
    EXPECT_TRUE(at::equal(tensor[0], at::ones({rows})));
  }
}

}  // namespace lockstep::shm_order
