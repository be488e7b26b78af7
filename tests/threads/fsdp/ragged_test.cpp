// Shards of sizes that the program sets, or that are balanced by bytes.
#include <torch/optim/adamw.h>

#include <algorithm>

#include "lockstep/fsdp/optimizer_state.h"
#include "lockstep/fsdp/sharded_files.h"
#include "lockstep/fsdp/state_dict.h"
#include "lockstep/optim/clip_grad.h"
#include "lockstep/testing/temp_dir.h"
#include "tests/support/fsdp_models.h"

namespace lockstep::fsdp_ragged_test {

using namespace fsdp_models;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using Rows = std::vector<int64_t>;

/// All rows but one on the second of the ranks, none on the last.
FullyShardOptions ragged(FullyShardOptions options, int64_t ranks) {
  options.shard_placement_fn = [ranks](const std::string& name, const at::Tensor& parameter) {
    Rows rows(static_cast<std::size_t>(ranks));
    rows.front() = 1;
    rows[1] = parameter.size(0) - 1;
    return name.ends_with("norm.bias") ? std::nullopt : std::optional(ShardPlacement{.rows = rows});
  };
  return options;
}

FullyShardOptions balanced(FullyShardOptions options) {
  options.balance = std::make_shared<ShardBalance>();
  return options;
}

std::vector<std::pair<std::string, FullyShardOptions>> ways(const World& world) {
  std::vector<std::pair<std::string, FullyShardOptions>> all;
  const auto add = [&](const std::string& what, const FullyShardOptions& options) {
    const auto ranks = options.mesh->size(options.mesh->ndim() - 1);
    all.emplace_back(what + ", ragged", ragged(options, ranks));
    all.emplace_back(what + ", balanced", balanced(options));
  };
  const auto mesh = mesh_of(world);
  add("unset", {.mesh = mesh});
  add("kept", {.mesh = mesh, .reshard_after_forward = false});
  if (world.world_size() < 4) return all;
  add("neighbours", {.mesh = mesh, .reshard_after_forward = 2});
  add("hybrid", {.mesh = init_device_mesh("cpu", {2, 2}, {.mesh_dim_names = {"replicate", "shard"}})});
  return all;
}

// FSDP-99
TEST(FsdpRagged, TrainsAsDdpDoes) {
  for (const int size : {2, 3, 4}) {
    testing::run_threads_in_gtest({.world_size = size}, [](const World& world) {
      for (const auto& [what, options] : ways(world)) {
        DistributedDataParallel ddp(net(), DdpOptions{.process_group = world.group()});
        auto model = net();
        auto root = sharded(model, options);
        AdamW plain(ddp.parameters(), AdamWOptions(0.01));
        AdamW optimizer(model->parameters(), AdamWOptions(0.01));
        for (int step = 0; step < 3; ++step) {
          plain.zero_grad();
          optimizer.zero_grad();
          {
            const auto scope = root.no_sync();
            loss_of(model, world, 10 + step).backward();
          }
          {
            const auto scope = ddp.no_sync();
            loss_of(ddp, world, 10 + step).backward();
          }
          loss_of(model, world, step).backward();
          loss_of(ddp, world, step).backward();
          const auto norm = root.clip_grad_norm_(0.05);
          EXPECT_NEAR(norm.item<double>(), clip_grad_norm_(ddp.parameters(), 0.05).item<double>(), 1e-6) << what;
          optimizer.step();
          plain.step();
        }
        expect_same_parameters(*model, *ddp.module(), what, 1e-5);
        const auto state = full_state_dict(*model);
        {
          const auto summoned = root.summon_full_params();
          for (const auto& item : ddp.module()->named_parameters()) {
            EXPECT_TRUE(at::allclose(state.at(item.key()), item.value(), 1e-5, 1e-5)) << what << item.key();
            EXPECT_TRUE(model->named_parameters()[item.key()].equal(state.at(item.key()))) << what << item.key();
          }
          const at::NoGradGuard no_grad;
          model->head->weight.fill_(2);
        }
        EXPECT_TRUE(full_state_dict(*model).at("head.weight").eq(2).all().item<bool>()) << what;
        const auto momenta = full_optimizer_state_dict(*model, optimizer);
        EXPECT_EQ(momenta.state.at("head.weight").at("exp_avg").toTensor().sizes(), at::IntArrayRef({3, 7}));
      }
    });
  }
}

// FSDP-99: the bits are DDP's, as those of even shards.
TEST(FsdpRagged, HasDdpsBits) {
  testing::run_threads_in_gtest({.world_size = 3}, [](const World& world) {
    for (const bool is_balanced : {false, true}) {
      const auto options = is_balanced ? balanced({}) : ragged({}, 3);
      expect_parity(
          world,
          [&](auto& model, SGD& optimizer) {
            for (int step = 0; step < 3; ++step) {
              optimizer.zero_grad();
              loss_of(model, world, step).backward();
              optimizer.step();
            }
          },
          options);
    }
  });
}

// FSDP-99
TEST(FsdpRagged, PutsRowsWhereTheProgramSays) {
  testing::run_threads_in_gtest({.world_size = 3}, [](const World& world) {
    auto layer = built_from_seed([] { return torch::nn::Linear(2, 5); });
    const auto rows = [](const std::string& name, const at::Tensor&) {
      return std::optional(ShardPlacement{.rows = name == "weight" ? Rows{0, 4, 1} : Rows{2, 2, 1}});
    };
    const auto before = layer->weight.detach().clone();
    const auto bias = layer->bias.detach().clone();
    fully_shard(layer, {.mesh = mesh_of(world), .shard_placement_fn = rows});
    const auto shard = layer->parameters()[0];
    const Rows begins{0, 0, 4};
    const Rows counts{0, 4, 1};
    EXPECT_TRUE(shard.equal(before.narrow(0, begins[world.rank()], counts[world.rank()])));
    EXPECT_THAT(layout_of(shard)->to_string(), ::testing::HasSubstr("RaggedShard(dim=0, 0+4+1)"));
    // What the chunk rule gives is no other layout than its own.
    EXPECT_THAT(layout_of(layer->parameters()[1])->to_string(), ::testing::HasSubstr("Shard(dim=0)"));
    EXPECT_TRUE(layer->forward(at::ones({1, 2})).allclose(at::linear(at::ones({1, 2}), before, bias)));
    // Its parts are known by where they lie.
    const auto parts = sharded_state_dict(*layer);
    torch::nn::Linear other(2, 5);
    fully_shard(other, {.mesh = mesh_of(world)});
    expect_error([&] { load_sharded_state_dict(*other, parts); }, {"RaggedShard"});
  });
}

// FSDP-99
TEST(FsdpRagged, BalancesBytes) {
  testing::run_threads_in_gtest({.world_size = 4}, [](const World& world) {
    const auto bytes_of = [](const torch::nn::Module& model) {
      int64_t bytes = 0;
      for (const auto& each : model.parameters()) bytes += static_cast<int64_t>(each.nbytes());
      return bytes;
    };
    auto model = net();
    const auto options = balanced({.mesh = mesh_of(world)});
    sharded(model, options);
    const auto& bytes = options.balance->bytes();
    ASSERT_EQ(bytes.size(), 4U);
    EXPECT_EQ(bytes[world.rank()], bytes_of(*model));
    const auto [least, most] = std::minmax_element(bytes.begin(), bytes.end());
    EXPECT_LE(*most - *least, 14 * 4) << "more than the longest row";
    auto chunks = net();
    sharded(chunks, {.mesh = mesh_of(world)});
    EXPECT_TRUE(world.rank() != 0 || bytes_of(*chunks) > *most);
  });
}

// FSDP-99, FSDP-74
TEST(FsdpRagged, StateGoesToOtherShardsAndBack) {
  const testing::TempDir dir;
  const auto path = dir.file("run");
  const auto train = [](Net& model, AdamW& optimizer, int from, int to) {
    for (int step = from; step < to; ++step) {
      optimizer.zero_grad();
      auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(step));
      model->forward(at::randint(11, {4, 2}, generator, at::TensorOptions(at::kLong))).pow(2).mean().backward();
      optimizer.step();
    }
  };
  auto expected = net();
  AdamW plain(expected->parameters(), AdamWOptions(0.01));
  int step = 0;
  for (const auto& [size, is_ragged] : {std::pair(4, true), std::pair(2, false), std::pair(3, true)}) {
    train(expected, plain, step, step + 2);
    testing::run_threads_in_gtest({.world_size = size}, [&](const World& world) {
      auto model = net();
      const FullyShardOptions options{.mesh = mesh_of(world)};
      sharded(model, is_ragged ? ragged(options, world.world_size()) : options);
      AdamW optimizer(model->parameters(), AdamWOptions(0.01));
      if (step > 0) load_sharded(*model, optimizer, path);
      train(model, optimizer, step, step + 2);
      const auto state = full_state_dict(*model);
      for (const auto& item : expected->named_parameters()) {
        EXPECT_TRUE(at::allclose(state.at(item.key()), item.value(), 1e-4, 1e-5)) << size << item.key();
      }
      barrier(world.group());
      save_sharded(*model, optimizer, path);
    });
    step += 2;
  }
}

// FSDP-99
TEST(FsdpRagged, RefusesRowsThatAreNoDivision) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    const auto shard = [&](const ShardPlacement& placement, bool is_flat = false) {
      fully_shard(torch::nn::Linear(4, 4),
                  {.mesh = mesh_of(world),
                   .shard_placement_fn = [&](const std::string&, const at::Tensor&) { return placement; },
                   .use_orig_params = !is_flat});
    };
    expect_error([&] { shard({.rows = {1, 2}}); }, {"'weight'", "1 + 2", "dim 0 has 4 for 2 ranks"});
    expect_error([&] { shard({.rows = {5, -1}}); }, {"5 + -1"});
    expect_error([&] { shard({.rows = {4}}); }, {"'weight'"});
    expect_error([&] { shard({.dim = 1, .rows = {2, 2}}); }, {"along dim 1"});
    expect_error([&] { shard({.rows = {1, 3}}, /*is_flat=*/true); }, {"use_orig_params"});
    const int64_t mine = world.rank();
    expect_error([&] { shard({.rows = {1 + mine, 3 - mine}}); }, {"where FSDP cuts parameters", "'weight'", "2 + 2"});
    ShardBalance balance;
    balance.divide(3, 4, 2);
    expect_error([&] { balance.divide(3, 4, 3); }, {"2 ranks", "among 3"});
  });
}

}  // namespace lockstep::fsdp_ragged_test
