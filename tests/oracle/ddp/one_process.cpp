#include "tests/oracle/ddp/one_process.h"

#include <gtest/gtest.h>

#include "lockstep/base/str.h"

namespace lockstep::ddp_oracle {
namespace {

// Sums over samples and ranks come in another order here; 5 to 9 steps let it grow.
constexpr double kTolerance = 2e-5;

/// The batches of all ranks as one.
RankStep joined(const std::vector<RankStep>& ranks) {
  RankStep whole{.batches = {}, .uses = ranks[0].uses};
  for (std::size_t i = 0; i < ranks[0].batches.size(); ++i) {
    std::vector<at::Tensor> inputs;
    std::vector<at::Tensor> targets;
    for (const auto& rank : ranks) {
      inputs.push_back(rank.batches[i].input);
      targets.push_back(rank.batches[i].target);
    }
    whole.batches.push_back({at::cat(inputs), at::cat(targets)});
  }
  return whole;
}

}  // namespace

OneProcess::OneProcess(const Case& file_case, int world_size)
    : file_case_(file_case),
      world_size_(world_size),
      model_(initial_model(file_case, 0)),
      optimizer_(make_optimizer(*model_, file_case)) {}

at::Tensor OneProcess::whole_loss(std::size_t step) {
  std::vector<RankStep> ranks;
  bool is_one_batch = detail::buffers_of(*model_, {}).empty();
  for (int rank = 0; rank < world_size_; ++rank) {
    ranks.push_back(rank_step(file_case_, rank, step));
    is_one_batch = is_one_batch && ranks[rank].uses == ranks[0].uses;
  }
  if (is_one_batch) return loss_of(*model_, joined(ranks));
  // Ranks differ in their branches, or normalise their own batch: part by part, but still one backward.
  at::Tensor total = at::zeros({});
  for (const auto& rank : ranks) total = total + loss_of(*model_, rank) / world_size_;
  return total;
}

void OneProcess::run_step(std::size_t step, const torch::nn::Module& reduced) {
  const auto kind = file_case_.facts["steps"][step]["kind"].text();
  zero_gradients(*model_, file_case_.facts["steps"][step]["zero"].text());
  if (kind == "evaluate") return;
  whole_loss(step).backward();
  if (kind == "local") return;
  const auto theirs = parameters_of(*model_);
  const auto ours = parameters_of(reduced);
  for (std::size_t i = 0; i < theirs.size(); ++i) {
    const auto& expected = theirs[i].second.grad();
    const auto& actual = ours[i].second.grad();
    const auto what = str("gradient of ", theirs[i].first, ", against one process");
    ASSERT_EQ(actual.defined(), expected.defined()) << what;
    if (!expected.defined()) continue;
    expect_same(actual.to_dense(), expected.to_dense(), kTolerance, what);
  }
  optimizer_.step();
}

void OneProcess::expect_same_parameters(const torch::nn::Module& trained) const {
  expect_same(flat_state(trained, false), flat_state(*model_, false), kTolerance, "parameters, against one process");
}

}  // namespace lockstep::ddp_oracle
