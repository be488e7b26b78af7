// Gradients that share their memory with others which backward still needs.
#include "tests/support/ddp_models.h"

namespace lockstep {
namespace {

using namespace ddp_models;

/// Backward hands one tensor to both tables, and it is the values of the sparse gradients of both.
struct TwoTablesImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& rows) { return one(rows) + other(rows); }
  torch::nn::Embedding one =
      register_module("one", torch::nn::Embedding(torch::nn::EmbeddingOptions(6, 2).sparse(true)));
  torch::nn::Embedding other =
      register_module("other", torch::nn::Embedding(torch::nn::EmbeddingOptions(6, 2).sparse(true)));
};
TORCH_MODULE(TwoTables);

// DDP-60: PyTorch divides sparse gradients in place, which here divides the second one twice.
TEST(DdpSharedGradient, IsDividedOnceForEachTable) {
  const auto rows = at::arange(12) % 5;
  auto reference = seeded(TwoTables());
  reference->forward(rows).pow(2).mean().backward();
  testing::run_threads_in_gtest({.world_size = 2}, [&](const World& world) {
    DistributedDataParallel ddp(seeded(TwoTables()), world.group());
    ddp(my_rows(rows, world)).pow(2).mean().backward();
    for (const auto& [mine, whole] : {std::pair(ddp.module()->one->weight, reference->one->weight),
                                      std::pair(ddp.module()->other->weight, reference->other->weight)}) {
      ASSERT_TRUE(mine.grad().is_sparse());
      EXPECT_TRUE(at::allclose(mine.grad().to_dense(), whole.grad().to_dense())) << mine.grad();
    }
  });
}

}  // namespace
}  // namespace lockstep
