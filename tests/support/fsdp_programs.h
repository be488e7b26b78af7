// Programs that run in one process with every rank's data and on ranks, and must come to the same: what FSDP's mixtures
// share.
#pragma once

#include <optional>
#include <string>

#include "lockstep/fsdp/state_dict.h"
#include "tests/support/fsdp_models.h"

namespace lockstep::fsdp_programs {

using namespace fsdp_models;

inline at::Tensor tokens(int rank, int step) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(100 * step + rank));
  return at::randint(12, {4, 2}, generator, at::TensorOptions(at::kLong));
}

/// A program's view of the world it trains in: one process with all data, or a rank.
struct Trainer {
  int size;
  std::optional<int> rank = std::nullopt;
  std::optional<FsdpUnit> root = std::nullopt;

  /// The mean over ranks of what `loss(rank)` gives: here, or in the reduction.
  template <class Loss>
  at::Tensor mean(const Loss& loss) const {
    if (rank) return loss(*rank);
    auto total = loss(0);
    for (int each = 1; each < size; ++each) total = total + loss(each);
    return total / size;
  }
  std::optional<FsdpNoSync> no_sync() {
    if (!root) return std::nullopt;
    return root->no_sync();
  }
};

inline void expect_whole_state(const torch::nn::Module& model, const torch::nn::Module& plain, const std::string& what,
                               double tolerance) {
  const auto state = full_state_dict(model);
  for (const auto& item : plain.named_parameters()) {
    const auto found = state.find(item.key());
    ASSERT_TRUE(found != state.end()) << what << " " << item.key();
    EXPECT_TRUE(at::allclose(found->second, item.value().detach(), tolerance, tolerance))
        << what << " " << item.key() << " differs by "
        << (found->second.numel() > 0 ? (found->second - item.value().detach()).abs().max().item<double>() : 0);
  }
}

}  // namespace lockstep::fsdp_programs
