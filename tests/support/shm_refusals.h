// What the shm backend says when ranks disagree, come late or leave, for ranks as threads and as processes.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <any>

#include <thread>

#include "lockstep/lockstep.h"
#include "lockstep/testing/checks.h"
#include "tests/support/shm_promises.h"

namespace lockstep::shm_refusals {

using reduction_model::have_same_bits;
using shm_promises::all_ranks;
using ::testing::HasSubstr;
using namespace std::chrono_literals;

inline void expect_works(const GroupPtr& group) {
  for (const int64_t size : {3, 70'000}) {
    const auto tensor = at::full({size}, group->getRank() + 1.0F);
    all_reduce(tensor, group);
    const auto ranks = group->getSize();
    EXPECT_TRUE(at::equal(tensor, at::full({size}, ranks * (ranks + 1) / 2.0F)));
  }
}

/// The message of the error `call` must end with; no tensor may be written to.
template <class Error>
std::string message_of(const Call& call, const GroupPtr& group) {
  std::vector<at::Tensor> tensors = call.inputs;
  tensors.insert(tensors.end(), call.outputs.begin(), call.outputs.end());
  std::vector<at::Tensor> before;
  for (const auto& tensor : tensors) before.push_back(tensor.clone());
  std::string message;
  try {
    launch(call, group).wait();
    ADD_FAILURE() << call.describe() << " did not fail";
  } catch (const Error& error) {
    message = error.what_without_backtrace();
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    EXPECT_TRUE(have_same_bits(tensors[i], before[i])) << call.describe() << " wrote to tensor " << i;
  }
  return message;
}

// ---- Disagreement

/// One rank calls `odd`, the others `common`; both sides as the message has them.
struct Disagreement {
  std::string about;
  std::function<Call(int rank)> odd;
  std::string odd_text;
  std::function<Call(int rank)> common;
  std::string common_text;
};

inline void check_disagreement(const World& world, const Disagreement& all) {
  for (const int odd_rank : {0, world.world_size() - 1}) {
    for (const bool is_async : {false, true}) {
      const ::testing::ScopedTrace trace(__FILE__, __LINE__, all.about + ", odd rank " + std::to_string(odd_rank));
      auto call = (world.rank() == odd_rank ? all.odd : all.common)(world.rank());
      call.is_async = is_async;
      const auto message = message_of<c10::Error>(call, world.group());
      EXPECT_THAT(message, HasSubstr(all.about));
      EXPECT_THAT(message, HasSubstr("rank " + std::to_string(odd_rank) + " calls " + all.odd_text));
      EXPECT_THAT(message, HasSubstr("calls " + all.common_text));
      expect_works(world.group());
    }
  }
}

inline Call all_reduce_call(const std::vector<int64_t>& sizes, at::ScalarType dtype = at::kFloat,
                            ReduceOp op = ReduceOp::SUM) {
  Call call{.kind = CallKind::kAllReduce, .op = op};
  for (const auto size : sizes) call.inputs.push_back(at::ones({size}, dtype));
  return call;
}

inline void check_disagreements(const World& world) {
  const int64_t ranks = world.world_size();
  const auto all_reduce_of = [](auto... arguments) { return [=](int) { return all_reduce_call(arguments...); }; };
  using Sizes = std::vector<int64_t>;
  const auto five = all_reduce_of(Sizes{5});
  const std::string five_text = "all_reduce(sum, float[5])";
  const auto rooted = [](CallKind kind, int root) {
    return [=](int) { return Call{.kind = kind, .inputs = {at::ones({5})}, .root = root}; };
  };
  const auto text = [](const char* name, int64_t elements) {
    return std::string(name) + "(float[" + std::to_string(elements) + "])";
  };
  const std::vector<Disagreement> all = {
      {"sizes", all_reduce_of(Sizes{6}), "all_reduce(sum, float[6])", five, five_text},
      {"sizes", all_reduce_of(Sizes{0}), "all_reduce(sum, float[0])", five, five_text},
      {"sizes", all_reduce_of(Sizes{90'000}), "all_reduce(sum, float[90000])", five, five_text},
      {"sizes", all_reduce_of(Sizes{90'001}), "all_reduce(sum, float[90001])", all_reduce_of(Sizes{90'000}),
       "all_reduce(sum, float[90000])"},
      // As many bytes, and as many elements.
      {"dtypes", all_reduce_of(Sizes{3}, at::kDouble), "all_reduce(sum, double[3])", all_reduce_of(Sizes{6}),
       "all_reduce(sum, float[6])"},
      {"dtypes", all_reduce_of(Sizes{5}, at::kInt), "all_reduce(sum, int32[5])", five, five_text},
      {"reductions", all_reduce_of(Sizes{5}, at::kFloat, ReduceOp::MAX), "all_reduce(max, float[5])", five, five_text},
      {"roots", rooted(CallKind::kBroadcast, 0), "broadcast(float[5], root 0)", rooted(CallKind::kBroadcast, 1),
       "broadcast(float[5], root 1)"},
      {"roots", rooted(CallKind::kReduce, 1), "reduce(sum, float[5], root 1)", rooted(CallKind::kReduce, 0),
       "reduce(sum, float[5], root 0)"},
      {"operations", rooted(CallKind::kBroadcast, 0), "broadcast(float[5], root 0)", five, five_text},
      {"operations", [](int) { return Call{.kind = CallKind::kBarrier}; }, "barrier()", five, five_text},
      // Tensors in one call: another number of them, or cut otherwise.
      {"sizes", all_reduce_of(Sizes{5, 1}), "all_reduce(sum, float[6])", five, five_text},
      {"sizes", all_reduce_of(Sizes{3, 4}), "all_reduce(sum, float[7])", all_reduce_of(Sizes{4, 3}),
       "all_reduce(sum, float[7])"},
      {"elements to rank",
       [&](int) {
         return Call{
             .kind = CallKind::kAllGatherSingle, .inputs = {at::ones({4})}, .outputs = {at::zeros({4 * ranks})}};
       },
       text("all_gather", 4),
       [&](int) {
         return Call{
             .kind = CallKind::kAllGatherSingle, .inputs = {at::ones({5})}, .outputs = {at::zeros({5 * ranks})}};
       },
       text("all_gather", 5)},
      {"sizes",
       [&](int) {
         return Call{
             .kind = CallKind::kReduceScatterSingle, .inputs = {at::ones({4 * ranks})}, .outputs = {at::zeros({4})}};
       },
       "reduce_scatter(sum, float[" + std::to_string(4 * ranks) + "])",
       [&](int) {
         return Call{
             .kind = CallKind::kReduceScatterSingle, .inputs = {at::ones({5 * ranks})}, .outputs = {at::zeros({5})}};
       },
       "reduce_scatter(sum, float[" + std::to_string(5 * ranks) + "])"},
      {"elements to rank",
       [&](int) {
         return Call{
             .kind = CallKind::kAllToAllSingle, .inputs = {at::ones({4 * ranks})}, .outputs = {at::zeros({4 * ranks})}};
       },
       text("all_to_all", 4 * ranks),
       [&](int) {
         return Call{
             .kind = CallKind::kAllToAllSingle, .inputs = {at::ones({5 * ranks})}, .outputs = {at::zeros({5 * ranks})}};
       },
       text("all_to_all", 5 * ranks)},
  };
  for (const auto& each : all) check_disagreement(world, each);
}

/// The root gives other pieces than the others expect; nobody but the two knows, all refuse.
inline void check_scatter_sizes(const World& world) {
  const bool is_root = world.rank() == 0;
  Call scatter{.kind = CallKind::kScatter, .outputs = {at::zeros({world.rank() == 1 ? 6 : 5})}};
  if (is_root) scatter.inputs = std::vector<at::Tensor>(world.world_size(), at::ones({5}));
  EXPECT_THAT(message_of<c10::Error>(scatter, world.group()),
              HasSubstr("rank 0 gives 5 elements to rank 1, which expects 6"));
  Call gather{.kind = CallKind::kGather, .inputs = {at::ones({world.rank() == 1 ? 6 : 5})}};
  if (is_root) {
    for (int rank = 0; rank < world.world_size(); ++rank) gather.outputs.push_back(at::zeros({5}));
  }
  EXPECT_THAT(message_of<c10::Error>(gather, world.group()),
              HasSubstr("rank 1 gives 6 elements to rank 0, which expects 5"));
  expect_works(world.group());
}

/// Wrong on its own, whatever the others call: refused without them.
inline void check_malformed(const World& world) {
  const int64_t ranks = world.world_size();
  if (world.rank() == 0) {
    const std::vector<at::Tensor> fives(ranks, at::ones({5}));
    for (const int64_t size : {4, 6, 90'000}) {
      message_of<c10::Error>({.kind = CallKind::kReduceScatter, .inputs = fives, .outputs = {at::zeros({size})}},
                             world.group());
    }
    message_of<c10::Error>(
        {.kind = CallKind::kReduceScatterSingle, .inputs = {at::ones({5 * ranks + 1})}, .outputs = {at::zeros({5})}},
        world.group());
    message_of<c10::Error>({.kind = CallKind::kBroadcast, .inputs = {at::ones({5})}, .root = world.world_size()},
                           world.group());
  }
  expect_works(world.group());
}

// ---- Absence

/// Rank 2 comes after the others' time is over; it is told as well.
inline void check_late_rank(const World& world) {
  const auto group = new_group(world.group(), all_ranks(world), {.timeout = 1500ms, .name = "impatient"});
  expect_works(group);
  if (world.rank() == 2) std::this_thread::sleep_for(3s);
  const auto start = std::chrono::steady_clock::now();
  const auto message = message_of<c10::DistBackendError>(all_reduce_call({5}), group);
  EXPECT_LT(std::chrono::steady_clock::now() - start, 6s);
  EXPECT_THAT(message, HasSubstr("rank 2 did not take part within 1500 ms"));
  EXPECT_THAT(message, HasSubstr("all_reduce(sum, float[5])"));
  EXPECT_THAT(message, HasSubstr("group 'impatient'"));
  // It stays so, and says so at once.
  EXPECT_THAT(message_of<c10::DistBackendError>(all_reduce_call({6}), group),
              HasSubstr("rank 2 did not take part within 1500 ms"));
  expect_works(world.group());
}

/// The call's own time limit goes before the group's.
inline void check_timeout_of_call(const World& world) {
  const auto group = new_group(world.group(), all_ranks(world));
  auto call = all_reduce_call({70'000});
  call.timeout = 300ms;
  if (world.rank() == 2) std::this_thread::sleep_for(1500ms);
  EXPECT_THAT(message_of<c10::DistBackendError>(call, group), HasSubstr("rank 2 did not take part within 300 ms"));
}

/// `keep` is given the group before rank 2 drops it.
inline void check_rank_that_leaves(const World& world, const std::function<std::any(const GroupPtr&)>& keep) {
  auto group = new_group(world.group(), all_ranks(world), {.timeout = 8s, .name = "left"});
  expect_works(group);
  const auto kept = keep(group);
  if (world.rank() == 2) {
    group.reset();
  } else {
    const auto start = std::chrono::steady_clock::now();
    EXPECT_THAT(message_of<c10::DistBackendError>(all_reduce_call({5}), group), HasSubstr("rank 2 has left the group"));
    EXPECT_LT(std::chrono::steady_clock::now() - start, 4s);
  }
  expect_works(world.group());
}

/// Rank 2 drops the group while it has a call under way, which rank 0 never joins.
inline void check_rank_that_leaves_in_a_call(const World& world) {
  auto group = new_group(world.group(), all_ranks(world), {.name = "left"});
  if (world.rank() == 2) {
    std::ignore = launch_all_reduce(at::ones({5}), group);
    group.reset();
    barrier(world.group());
  } else {
    if (world.rank() == 0) barrier(world.group());
    const auto message = message_of<c10::DistBackendError>(all_reduce_call({5}), group);
    if (world.rank() != 0) barrier(world.group());
    EXPECT_THAT(message, HasSubstr("rank 2 of 4 destroyed group 'left' with collectives under way"));
  }
  expect_works(world.group());
}

}  // namespace lockstep::shm_refusals
