// State of a sharded module by name: whole, in parts that any number of ranks can load, and as torch::save writes it.
#include <torch/serialize.h>

#include <filesystem>
#include <fstream>

#include "lockstep/fsdp/sharded_files.h"
#include "lockstep/testing/recorder.h"
#include "lockstep/testing/temp_dir.h"
#include "tests/support/fsdp_state_models.h"
#include "tests/support/saved_files.h"

namespace lockstep::fsdp_state_test {

using namespace fsdp_state_models;
using testing::expect_error;

void on_ranks(int world_size, const std::function<void(const World&)>& body) {
  testing::run_threads_in_gtest({.world_size = world_size}, body);
}

/// What rank threads hand to each other, or to a later world.
template <class Value>
class Shelf {
 public:
  explicit Shelf(int places) : values_(static_cast<std::size_t>(places)) {}
  void put(const World& world, Value value) {
    const std::lock_guard lock(mutex_);
    values_[static_cast<std::size_t>(world.rank())] = std::move(value);
  }
  const std::vector<Value>& all() const { return values_; }

 private:
  std::mutex mutex_;
  std::vector<Value> values_;
};

ShardedModuleState copied(const ShardedModuleState& state) {
  auto copy = state;
  for (auto& [name, tensor] : copy) tensor.local = tensor.local.clone();
  return copy;
}

std::string shard_of(const std::string& path, int part) {
  return saved_files::file_of(path, ".shard" + std::to_string(part));
}

// FSDP-74
TEST(FsdpState, IsShardsWithTheirPlaceWithoutACollective) {
  on_ranks(3, [](const World& world) {
    auto model = net();
    sharded(model, {.mesh = mesh_of(world)});
    const testing::Recorder recorder;
    const auto state = sharded_state_dict(*model);
    EXPECT_TRUE(recorder.events().empty());
    EXPECT_EQ(state.size(), model->named_parameters().size() + model->named_buffers().size());
    const auto& weight = state.at("first.weight");
    ASSERT_TRUE(weight.sharding);
    EXPECT_EQ(weight.sharding->sizes, (std::vector<int64_t>{7, 5}));
    EXPECT_EQ(weight.sharding->mesh_shape, std::vector<int64_t>{3});
    EXPECT_EQ(weight.sharding->coordinate, std::vector<int>{world.rank()});
    EXPECT_EQ(weight.sharding->placements, Placements{Shard(0)});
    EXPECT_EQ(weight.local.size(0), world.rank() < 2 ? 3 : 1);
    EXPECT_FALSE(state.at("block0.norm.running_mean").sharding);
  });
}

// FSDP-74: 4 ranks to 2 to 3 to 1, and to a module that is not sharded.
TEST(FsdpState, LoadsOnAnyNumberOfRanks) {
  auto expected = net(5);
  for (int step = 0; step < 3; ++step) expected->forward(batch(step));
  std::vector<ShardedModuleState> parts;
  for (const int size : {4, 2, 3, 1}) {
    Shelf<ShardedModuleState> shelf(size);
    on_ranks(size, [&](const World& world) {
      auto model = net(parts.empty() ? 5 : 6);
      sharded(model, {.mesh = mesh_of(world)});
      if (parts.empty()) {
        for (int step = 0; step < 3; ++step) model->forward(batch(step));
      } else {
        load_sharded_state_dict(*model, parts);
      }
      expect_same_model(*model, *expected, "on " + std::to_string(size));
      shelf.put(world, copied(sharded_state_dict(*model)));
    });
    parts = shelf.all();
    auto whole = net(6);
    load_sharded_state_dict(*whole, parts);
    expect_same_model(*whole, *expected, "whole");
  }
}

// FSDP-74: replicas hold the same parts.
TEST(FsdpState, LoadsFromAndIntoAMeshOfTwoAxes) {
  const auto expected = net(5);
  Shelf<ShardedModuleState> shelf(4);
  on_ranks(4, [&](const World& world) {
    auto model = net(5);
    sharded(model, {.mesh = init_device_mesh("cpu", {2, 2}, {.mesh_dim_names = {"replicate", "shard"}})});
    shelf.put(world, copied(sharded_state_dict(*model)));
  });
  on_ranks(3, [&](const World& world) {
    auto model = net(6);
    sharded(model, {.mesh = mesh_of(world)});
    load_sharded_state_dict(*model, shelf.all());
    expect_same_model(*model, *expected, "from a mesh");
  });
}

// FSDP-74, FSDP-76
TEST(FsdpState, SaysWhatDoesNotFitAndChangesNothing) {
  Shelf<ShardedModuleState> shelf(2);
  on_ranks(2, [&](const World& world) {
    auto model = net(5);
    sharded(model, {.mesh = mesh_of(world)});
    shelf.put(world, copied(sharded_state_dict(*model)));
  });
  on_ranks(3, [&](const World& world) {
    const auto before = net(6);
    auto model = net(6);
    sharded(model, {.mesh = mesh_of(world)});
    auto parts = shelf.all();
    // The first of two parts has rows 0 to 3 of 7; rank 0 of 3 needs no more.
    const auto first_part_only = [&] { load_sharded_state_dict(*model, std::vector{parts.front()}); };
    if (world.rank() > 0) expect_error(first_part_only, {"elements of '", "Give those of all ranks that saved"});
    for (auto& part : parts) part.erase("head.weight");
    expect_error([&] { load_sharded_state_dict(*model, parts); }, {"it lacks head.weight"});
    parts = shelf.all();
    parts[0]["more"] = {.local = at::ones({1})};
    expect_error([&] { load_sharded_state_dict(*model, parts); }, {"the module has no more"});
    for (auto& part : parts) {
      part.at("head.weight").sharding->sizes = {4, 7};
    }
    expect_error([&] { load_sharded_state_dict(*model, parts); },
                 {"'head.weight' has sizes [3, 7], the one that was saved [4, 7]"});
    expect_same_model(*model, *before, "unchanged");
    parts = shelf.all();
    parts[0]["more"] = {.local = at::ones({1})};
    for (auto& part : parts) part.erase("first.bias");
    load_sharded_state_dict(*model, parts, {.strict = false});
    auto expected = net(5);
    const at::NoGradGuard no_grad;
    expected->first->bias.copy_(before->first->bias);
    expect_same_model(*model, *expected, "not strict");
  });
}

// FSDP-77
TEST(FsdpState, OfOneRankLoadsInTheSameLayoutOnly) {
  Shelf<ShardedModuleState> shelf(4);
  Shelf<std::string> raw(4);
  on_ranks(4, [&](const World& world) {
    auto model = net(5);
    sharded(model, {.mesh = mesh_of(world)});
    shelf.put(world, copied(sharded_state_dict(*model)));
    std::ostringstream stream;
    torch::save(model, stream);
    raw.put(world, stream.str());
  });
  const auto expected = net(5);
  on_ranks(4, [&](const World& world) {
    auto model = net(6);
    sharded(model, {.mesh = mesh_of(world)});
    load_sharded_state_dict(*model, shelf.all()[world.rank()]);
    expect_same_model(*model, *expected, "its own");
    const auto other = (world.rank() + 1) % 4;
    expect_error([&] { load_sharded_state_dict(*model, shelf.all()[other]); },
                 {"' was saved as [", "on a mesh of [4]", "Load the parts of all ranks"});
    // torch::save() and torch::load() of the module: raw shards.
    auto again = net(6);
    sharded(again, {.mesh = mesh_of(world)});
    std::istringstream stream(raw.all()[world.rank()]);
    torch::load(again, stream);
    expect_same_model(*again, *expected, "raw");
    EXPECT_TRUE(again->forward(batch(0)).equal(net(5)->forward(batch(0))));
  });
  on_ranks(2, [&](const World& world) {
    auto model = net(6);
    sharded(model, {.mesh = mesh_of(world)});
    expect_error([&] { load_sharded_state_dict(*model, shelf.all()[world.rank()]); },
                 {"was saved as [7], (Shard(dim=0),) on a mesh of [4], the part of [" + std::to_string(world.rank()),
                  "on a mesh of [2]"});
    std::istringstream stream(raw.all()[world.rank()]);
    torch::load(model, stream);
    expect_error([&] { model->forward(batch(0)); },
                 {"the shard of parameter '", "of sizes", "Load values of the same sizes"});
  });
}

// FSDP-75
TEST(FsdpState, WholeEqualsDdpsKeyByKeyAndLoadsIntoAnUnshardedModule) {
  for (const int size : {1, 2, 4}) {
    on_ranks(size, [](const World& world) {
      DistributedDataParallel ddp(net(), DdpOptions{.process_group = world.group()});
      torch::optim::SGD plain(unique_parameters(*ddp.module()), torch::optim::SGDOptions(0.1));
      train(ddp, plain, 0, 3);
      auto model = net();
      sharded(model, {.mesh = mesh_of(world)});
      torch::optim::SGD optimizer(unique_parameters(*model), torch::optim::SGDOptions(0.1));
      train(model, optimizer, 0, 3);
      const auto state = full_state_dict(*model);
      const auto parameters = ddp.module()->named_parameters();
      const auto buffers = ddp.module()->named_buffers();
      EXPECT_EQ(state.size(), parameters.size() + buffers.size());
      for (const auto& item : parameters) EXPECT_TRUE(state.at(item.key()).equal(item.value())) << item.key();
      for (const auto& item : buffers) EXPECT_TRUE(state.at(item.key()).equal(item.value())) << item.key();
      auto bare = net(6);
      load_full_state_dict(*bare, state);
      expect_same_model(*bare, *ddp.module(), "bare");
      EXPECT_EQ(full_state_dict(*model, {.cpu_offload = true, .rank0_only = true}).empty(), world.rank() != 0);
    });
  }
}

// FSDP-50, FSDP-53, FSDP-75
TEST(FsdpState, KeepsDtypesUnderAPolicy) {
  on_ranks(2, [](const World& world) {
    auto whole = net();
    auto model = net();
    sharded(model,
            {.mesh = mesh_of(world), .mp_policy = {.param_dtype = at::kBFloat16, .buffer_dtype = at::kBFloat16}});
    EXPECT_EQ(model->blocks[0]->norm->running_mean.scalar_type(), at::kBFloat16);
    const auto state = full_state_dict(*model);
    for (const auto& item : whole->named_parameters()) {
      EXPECT_EQ(state.at(item.key()).scalar_type(), at::kFloat) << item.key();
      EXPECT_TRUE(state.at(item.key()).equal(item.value())) << item.key();
    }
    for (const auto& item : whole->named_buffers()) {
      EXPECT_EQ(state.at(item.key()).scalar_type(), item.value().scalar_type()) << item.key();
    }
  });
}

// FSDP-75, FSDP-76
TEST(FsdpState, MayLeaveOutFrozenParameters) {
  on_ranks(2, [](const World& world) {
    auto model = net();
    model->first->weight.set_requires_grad(false);
    sharded(model, {.mesh = mesh_of(world)});
    const auto state = full_state_dict(*model, {.ignore_frozen_params = true});
    EXPECT_FALSE(state.contains("first.weight"));
    EXPECT_TRUE(state.contains("first.bias"));
    EXPECT_FALSE(sharded_state_dict(*model, {.ignore_frozen_params = true}).contains("first.weight"));
    expect_error([&] { load_full_state_dict(*model, state); }, {"it lacks first.weight"});
    load_full_state_dict(*model, state, {.ignore_frozen_params = true});
    load_sharded_state_dict(*model, sharded_state_dict(*model, {.ignore_frozen_params = true}),
                            {.ignore_frozen_params = true});
  });
}

// FSDP-76: replicas of groups without rank 0 get it too.
TEST(FsdpState, OfRankZeroReachesAllOfAMeshOfTwoAxes) {
  for (const auto& shape : std::vector<std::vector<int64_t>>{{2, 2}, {4, 1}, {1, 4}}) {
    on_ranks(4, [&](const World& world) {
      auto expected = net(5);
      const auto mesh = init_device_mesh("cpu", shape, {.mesh_dim_names = {"replicate", "shard"}});
      auto model = net(6);
      sharded(model, {.mesh = mesh});
      ModuleState state;
      if (world.rank() == 0) {
        for (const auto& item : expected->named_parameters()) state.emplace(item.key(), item.value().detach());
        for (const auto& item : expected->named_buffers()) state.emplace(item.key(), item.value().detach());
      }
      load_full_state_dict(*model, state, {.broadcast_from_rank0 = true});
      expect_same_model(*model, *expected, "broadcast");
      state.erase("head.weight");
      expect_error([&] { load_full_state_dict(*model, state, {.broadcast_from_rank0 = true}); },
                   {"the state of rank 0 does not fit", "it lacks head.weight"});
      EXPECT_EQ(full_state_dict(*model, {.rank0_only = true}).empty(), world.rank() != 0);
    });
  }
}

// FSDP-74, FSDP-78
TEST(FsdpState, InFilesGoesFromFourRanksToTwoToThree) {
  const testing::TempDir dir;
  const auto path = dir.file("run");
  using torch::optim::AdamW;
  auto expected = net(5);
  AdamW plain(unique_parameters(*expected), 0.01);
  int step = 0;
  for (const int size : {4, 2, 3}) {
    train(expected, plain, step, step + 2);
    on_ranks(size, [&](const World& world) {
      auto model = net(step == 0 ? 5 : 6);
      sharded(model, {.mesh = mesh_of(world)});
      AdamW optimizer(unique_parameters(*model), step == 0 ? 0.01 : 0.5);
      if (step > 0) load_sharded(*model, optimizer, path);
      train(model, optimizer, step, step + 2);
      const auto state = full_state_dict(*model);
      for (const auto& item : expected->named_parameters()) {
        EXPECT_TRUE(at::allclose(state.at(item.key()), item.value(), 1e-4, 1e-5)) << size << item.key();
      }
      barrier(world.group());  // the save replaces what others may still read
      save_sharded(*model, optimizer, path);
    });
    step += 2;
  }
  auto bare = net(6);
  AdamW optimizer(unique_parameters(*bare), 0.5);
  load_sharded(*bare, optimizer, path);
  train(bare, optimizer, step, step + 1);
  train(expected, plain, step, step + 1);
  EXPECT_TRUE(at::allclose(bare->head->weight, expected->head->weight, 1e-4, 1e-5));
  // Parts of two saves, a part that is not there, and one that is none.
  on_ranks(2, [&](const World& world) {
    auto model = net(6);
    sharded(model, {.mesh = mesh_of(world)});
    save_sharded(*model, path);
    save_sharded(*model, path + "2");
    expect_error([&] { save_sharded(*model, "/nowhere/run"); }, {"state was not saved", "/nowhere/run.", ".shard"});
  });
  std::rename(shard_of(path + "2", 1).c_str(), shard_of(path, 1).c_str());
  expect_error([&] { load_sharded(*bare, path); }, {".shard1 belongs to another save"});
  std::remove(shard_of(path, 1).c_str());
  expect_error([&] { load_sharded(*bare, path); }, {"cannot read", ".shard1"});
  std::ofstream(shard_of(path, 0)) << "something";
  expect_error([&] { load_sharded(*bare, path); }, {".shard0 is no part of saved state"});
  expect_error([&] { load_sharded(*bare, path + "3"); }, {"cannot read", path + "3"});
}

// FSDP-74: a save that fails, or a crash, must not cost the one before
TEST(FsdpState, InFilesOutlivesASaveThatFails) {
  const testing::TempDir dir;
  on_ranks(3, [&](const World& world) {
    const auto path = dir.file("run");
    auto model = net(5);
    sharded(model, {.mesh = mesh_of(world)});
    torch::optim::AdamW optimizer(unique_parameters(*model), 0.01);
    train(model, optimizer, 0, 1);
    save_sharded(*model, optimizer, path);
    const auto saved = full_state_dict(*model);
    train(model, optimizer, 1, 2);
    const auto as_rank_0 = [&](const std::function<void()>& action) {
      barrier(world.group());
      if (world.rank() == 0) action();
      barrier(world.group());
    };
    // In the way of the index.
    as_rank_0([&] { std::filesystem::create_directory(path + ".new"); });
    expect_error([&] { save_sharded(*model, optimizer, path); }, {"state was not saved", "cannot write", path});
    as_rank_0([&] { std::filesystem::remove(path + ".new"); });
    EXPECT_EQ(saved_files::files_of(path).size(), 4U) << "what the failed save had written is gone";
    auto other = net(6);
    sharded(other, {.mesh = mesh_of(world)});
    load_sharded(*other, path);
    for (const auto& [name, value] : full_state_dict(*other)) EXPECT_TRUE(value.equal(saved.at(name))) << name;

    barrier(world.group());
    save_sharded(*model, optimizer, path);
    EXPECT_EQ(saved_files::files_of(path).size(), 4U) << "parts of the save before are gone";
    load_sharded(*other, path);
    const auto now = full_state_dict(*model);
    for (const auto& [name, value] : full_state_dict(*other)) EXPECT_TRUE(value.equal(now.at(name))) << name;

    // As saves were before they had an index.
    as_rank_0([&] {
      std::remove(path.c_str());
      for (int part = 0; part < 3; ++part) {
        std::rename(shard_of(path, part).c_str(), (path + ".shard" + std::to_string(part)).c_str());
      }
    });
    load_sharded(*model, optimizer, path);
    barrier(world.group());
    save_sharded(*model, optimizer, path);
    EXPECT_EQ(saved_files::files_of(path).size(), 4U) << "which the next save replaces";
  });
}

}  // namespace lockstep::fsdp_state_test
