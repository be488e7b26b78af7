// Programs that would train differently without a word. Those that are not refused yet are disabled.
#include "tests/support/fsdp_models.h"

namespace lockstep::fsdp_silent_test {

using namespace fsdp_models;
using testing::expect_error;

struct Mirrored : torch::nn::Module {
  at::Tensor forward(const at::Tensor& input) { return at::matmul(at::tanh(at::matmul(input, first)), mirror); }
  at::Tensor first = register_parameter("first", at::ones({5, 5}));
  at::Tensor mirror = register_parameter("mirror", first.detach().requires_grad_());
};

TEST(FsdpSilent, DISABLED_RefusesParametersThatShareMemory) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    auto model = std::make_shared<Mirrored>();
    expect_error([&] { fully_shard(*model, {.mesh = mesh_of(world)}); }, {"'first'", "'mirror'", "share"});
  });
}

// Ranks that use different units of the same sizes must not compute with half of each.
TEST(FsdpSilent, DISABLED_RefusesUnitsThatDifferByRank) {
  testing::run_threads_in_gtest(
      {.world_size = 2, .collective_timeout = std::chrono::seconds(2)}, [](const World& world) {
        const auto mesh = mesh_of(world);
        auto left = seeded(1, [] { return torch::nn::Linear(5, 6); });
        auto right = seeded(2, [] { return torch::nn::Linear(5, 6); });
        torch::nn::ModuleList both(left, right);
        fully_shard(left, {.mesh = mesh});
        fully_shard(right, {.mesh = mesh});
        expect_error([&] { (world.rank() == 0 ? left : right)->forward(batch(0)); }, {"FSDP unit"});
      });
}

}  // namespace lockstep::fsdp_silent_test
