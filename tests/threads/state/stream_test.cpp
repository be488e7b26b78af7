// Weights that ranks hold slices of, collected on one rank in chunks. Optimizer state is in tests/threads/zero.
#include "lockstep/state/stream.h"

#include <torch/torch.h>

#include <algorithm>

#include "lockstep/shard/flat.h"
#include "lockstep/testing/gtest.h"

namespace lockstep::detail {
namespace {

/// Every rank has an equal slice of the first weight, with what is left over on the last, and rank 0 all of the second.
void expect_whole_weights(const World& world, int to, int64_t max_bytes) {
  const std::vector<at::Tensor> weights = {at::arange(35, at::kFloat).view({7, 5}).t(),
                                           at::full({}, int64_t{3}, at::kLong)};
  const auto row = row_of(weights[0]);
  const int64_t size = row.numel() / world.world_size();
  const bool is_last = world.rank() + 1 == world.world_size();
  const ElementRange mine{size * world.rank(), is_last ? row.numel() : size * (world.rank() + 1)};
  std::vector<StatePiece> own = {weight_piece(0, "fc.weight", row.narrow(0, mine.begin, mine.size()), mine)};
  if (world.rank() == 0) own.push_back(weight_piece(1, "fc.count", weights[1]));

  StateByIndex collected;
  std::vector<std::string> names;
  stream_pieces(own, to, max_bytes, world.group(), at::kCPU,
                [&](const StatePiece& piece, const std::string& name, int64_t begin, const at::Tensor& bytes) {
                  ASSERT_LE(bytes.numel(), max_bytes);
                  names.push_back(piece.name);
                  place_for(collected, piece, name, weights[piece.index]).narrow(0, begin, bytes.numel()).copy_(bytes);
                });
  if (world.rank() != to) {
    EXPECT_TRUE(collected.empty());
    return;
  }
  for (std::size_t i = 0; i < weights.size(); ++i) {
    EXPECT_TRUE(at::equal(collected.at(static_cast<int64_t>(i)).at(kWeight).toTensor(), weights[i])) << i;
  }
  EXPECT_EQ(names.front(), "fc.weight");
  EXPECT_NE(std::find(names.begin(), names.end(), "fc.count"), names.end());
}

TEST(StateStream, CollectsWeightsByName) {
  for (const int world_size : {1, 2, 3}) {
    SCOPED_TRACE(world_size);
    testing::run_threads_in_gtest({.world_size = world_size}, [](const World& world) {
      for (const int64_t max_bytes : {5, 1 << 20}) {
        for (int to = 0; to < world.world_size(); ++to) expect_whole_weights(world, to, max_bytes);
      }
    });
  }
}

}  // namespace
}  // namespace lockstep::detail
