// What an attack on checkpoints found: each of these restored something else, lost something or refused its own, once.
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "lockstep/base/observer.h"
#include "lockstep/checkpoint/manager.h"
#include "lockstep/checkpoint/weights.h"
#include "lockstep/nn/distributed_sampler.h"
#include "lockstep/optim/grad_scaler.h"
#include "lockstep/testing/temp_dir.h"
#include "tests/support/checkpoint_runs.h"

namespace lockstep::checkpoint_attacks_test {

using namespace checkpoint_runs;
using testing::expect_error;

struct TwoImpl : torch::nn::Module {
  TwoImpl() {
    register_module("a", a);
    register_module("b", b);
  }
  torch::nn::Linear a{3, 4};
  torch::nn::Linear b{4, 2};
};
TORCH_MODULE(Two);

void give_gradients(const std::vector<at::Tensor>& parameters) {
  for (auto parameter : parameters) parameter.mutable_grad() = at::ones_like(parameter.detach());
}

std::string text_in(const std::string& file) {
  std::ifstream in(file);
  return {std::istreambuf_iterator<char>(in), {}};
}

TEST(CheckpointAttacks, NothingElseIsReplaced) {
  const testing::TempDir folder;
  Two model;
  dcp::State state;
  state.add("model", model);
  std::filesystem::create_directory(folder.file("thesis"));
  std::ofstream(folder.file("thesis/chapter1.tex")) << "text";
  expect_error([&] { dcp::save(folder.file("thesis"), state); }, {"chapter1.tex", "no part of a checkpoint"});
  EXPECT_EQ(text_in(folder.file("thesis/chapter1.tex")), "text");
  // Nor a run's checkpoints.
  dcp::CheckpointManager(folder.file("run")).save(1, state);
  expect_error([&] { dcp::save(folder.file("run"), state); }, {"no part of a checkpoint"});
  // What belongs to weights stays with them.
  save_weights(model, folder.file("weights"), {.texts = {{"config.json", "{}"}}});
  std::ofstream(folder.file("weights/tokenizer.json")) << "words";
  save_weights(model, folder.file("weights"));
  EXPECT_EQ(text_in(folder.file("weights/tokenizer.json")), "words");
  EXPECT_EQ(text_in(folder.file("weights/config.json")), "{}");
  // A link leads where it led.
  std::filesystem::create_directory(folder.file("disk"));
  std::filesystem::create_directory_symlink(folder.file("disk"), folder.file("link"));
  dcp::save(folder.file("link"), state);
  EXPECT_TRUE(std::filesystem::is_symlink(folder.file("link")));
  EXPECT_TRUE(std::filesystem::exists(folder.file("disk/lockstep.json")));
}

TEST(CheckpointAttacks, ParametersWithoutStateHaveNone) {
  const testing::TempDir folder;
  Two model;
  optim::AdamW optimizer(model->parameters(), {.lr = 0.1});
  give_gradients(model->a->parameters());
  optimizer.step();
  dcp::State state;
  state.add("model", model).add("optimizer", optimizer, model);
  dcp::save(folder.file("x"), state);
  dcp::load(folder.file("x"), state);
  EXPECT_EQ(state_dict_of(optimizer).state.size(), 2);
  testing::run_threads_in_gtest({.world_size = 2}, [&](const World& world) {
    Two other;
    DistributedDataParallel<Two> ddp(other, world.group());
    ZeroRedundancyOptimizer<optim::AdamW> zero(other->parameters(), {.lr = 0.3}, world.group());
    dcp::State divided;
    divided.add("model", ddp).add("optimizer", zero, other);
    dcp::load(folder.file("x"), divided);
    EXPECT_EQ(zero.param_groups()[0].options().get_lr(), 0.1);
    // Of a flat parameter one part has state, and the other none: there is no such thing.
    Two flat;
    fully_shard(*flat, {.mesh = DeviceMesh::from_group(world.group(), "cpu"), .use_orig_params = false});
    optim::AdamW of_flat(flat->parameters(), {.lr = 0.3});
    dcp::State refused;
    refused.add("model", flat).add("optimizer", of_flat, flat);
    expect_error([&] { dcp::load(folder.file("x"), refused); }, {"b.weight, b.bias", "one flat parameter"});
  });
}

TEST(CheckpointAttacks, FlatParametersAreOfOneGroupAndOneAge) {
  const testing::TempDir folder;
  const auto save = [&](bool has_groups, bool has_ages) {
    Two model;
    std::vector<torch::optim::OptimizerParamGroup> groups;
    if (has_groups) {
      groups.emplace_back(model->a->parameters());
      groups.emplace_back(model->b->parameters(), std::make_unique<torch::optim::AdamOptions>(0.7));
    } else {
      groups.emplace_back(model->parameters());
    }
    torch::optim::Adam optimizer(groups, torch::optim::AdamOptions(0.1));
    give_gradients(model->parameters());
    optimizer.step();
    if (has_ages) {
      model->b->zero_grad();
      give_gradients(model->a->parameters());
      optimizer.step();
    }
    dcp::State state;
    state.add("model", model).add("optimizer", optimizer, model);
    dcp::save(folder.file("x"), state);
  };
  const auto load = [&](const std::vector<std::string>& words) {
    testing::run_threads_in_gtest({.world_size = 2}, [&](const World& world) {
      Two flat;
      fully_shard(*flat, {.mesh = DeviceMesh::from_group(world.group(), "cpu"), .use_orig_params = false});
      torch::optim::Adam optimizer(flat->parameters(), 0.3);
      dcp::State state;
      state.add("model", flat).add("optimizer", optimizer, flat);
      expect_error([&] { dcp::load(folder.file("x"), state); }, words);
    });
  };
  save(true, false);
  load({"was saved in another group"});
  save(false, true);
  load({"'step' of 'b.weight' differs"});
}

TEST(CheckpointAttacks, OtherNamesBringTheOptionsOfTheirGroups) {
  const testing::TempDir folder;
  Two model;
  optim::SGD optimizer(model->parameters(), {.lr = 0.5, .momentum = 0.9});
  give_gradients(model->parameters());
  optimizer.step();
  dcp::State state;
  state.add("model", model).add("optimizer", optimizer, model);
  dcp::save(folder.file("x"), state);
  struct RenamedImpl : torch::nn::Module {
    RenamedImpl() {
      register_module("first", first);
      register_module("second", second);
    }
    torch::nn::Linear first{3, 4};
    torch::nn::Linear second{4, 2};
  };
  auto renamed = std::make_shared<RenamedImpl>();
  optim::SGD other(renamed->parameters(), {.lr = 0.01, .momentum = 0.9});
  dcp::State names;
  names.add("net", renamed).add("optimizer", other, renamed);
  const auto hook = [](std::string name) {
    const auto replace = [&](const std::string& from, const std::string& to) {
      if (const auto at = name.find(from); at != std::string::npos) name.replace(at, from.size(), to);
    };
    replace("net.", "model.");
    replace("first.", "a.");
    replace("second.", "b.");
    return name;
  };
  dcp::load(folder.file("x"), names, {.name_in_checkpoint = hook});
  EXPECT_EQ(other.param_groups()[0].options().get_lr(), 0.5);
  EXPECT_TRUE(renamed->first->weight.equal(model->a->weight));
  // What is left of an entry that is called otherwise there is noticed.
  auto part = std::make_shared<RenamedImpl>();
  part->unregister_module("second");
  expect_error([&] { dcp::load(folder.file("x"), dcp::State().add("net", part), {.name_in_checkpoint = hook}); },
               {"nobody asks for model.b.bias"});
  // Options of other parameters are nobody's.
  auto foreign = std::make_shared<RenamedImpl>();
  optim::SGD plain(foreign->parameters(), {.lr = 0.01});
  expect_error([&] { dcp::load(folder.file("x"), dcp::State().add("optimizer", plain, foreign)); },
               {"has no parameter of this one"});
}

TEST(CheckpointAttacks, SamplersGoOnWhereAllRanksWere) {
  const testing::TempDir folder;
  const auto next_of = [](DistributedSampler& sampler) {
    sampler.reset();
    return sampler.next(1)->front();
  };
  testing::run_threads_in_gtest({.world_size = 2}, [&](const World&) {
    DistributedSampler sampler(100, {.shuffle = false});
    sampler.reset();
    sampler.next(12);
    dcp::save(folder.file("x"), dcp::State().add("sampler", sampler));
  });
  testing::run_threads_in_gtest({.world_size = 1}, [&](const World&) {
    DistributedSampler sampler(100, {.shuffle = false});
    dcp::load(folder.file("x"), dcp::State().add("sampler", sampler));
    EXPECT_EQ(next_of(sampler), 24);
    dcp::save(folder.file("one"), dcp::State().add("sampler", sampler));
  });
}

TEST(CheckpointAttacks, LazyConjugatesAreValues) {
  const testing::TempDir folder;
  const auto plain = at::randn({4, 3}, at::kComplexFloat);
  auto conjugate = plain.conj();
  auto imaginary = at::imag(plain.conj());  // has its sign in a bit
  dcp::save(folder.file("x"), dcp::State().add("c", conjugate).add("i", imaginary));
  auto loaded = at::zeros({4, 3}, at::kComplexFloat);
  auto loaded_imaginary = at::zeros({4, 3});
  dcp::load(folder.file("x"), dcp::State().add("c", loaded).add("i", loaded_imaginary));
  EXPECT_TRUE(loaded.equal(plain.conj().resolve_conj()));
  EXPECT_TRUE(loaded_imaginary.equal(imaginary.resolve_neg()));
  auto into = at::zeros({4, 3}, at::kComplexFloat).conj();
  dcp::load(folder.file("x"), dcp::State().add("c", into), {.strict = false});
  EXPECT_TRUE(into.resolve_conj().equal(loaded));
}

TEST(CheckpointAttacks, ManagersTellWhatTheyPassOver) {
  const testing::TempDir folder;
  Two model;
  dcp::State state;
  state.add("model", model);
  dcp::CheckpointManager manager(folder.path(), {.every = 1});
  manager.save(1, state);
  manager.save(2, state);
  std::filesystem::resize_file(manager.path_of(2) + "/rank-00000.safetensors", 50);
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(manager.resume(state), 1);
  EXPECT_NE(::testing::internal::GetCapturedStderr().find("is passed over"), std::string::npos);
  std::filesystem::resize_file(manager.path_of(1) + "/rank-00000.safetensors", 50);
  expect_error([&] { manager.resume(state); }, {"none of the checkpoints", "begin anew"});
}

TEST(CheckpointAttacks, ACourseThatWasLeftIsNotGoneOnWith) {
  const testing::TempDir folder;
  Two model;
  dcp::State state;
  state.add("model", model);
  dcp::CheckpointManager manager(folder.path(), {.every = 1, .keep_last = 1});
  manager.save(10, state);
  manager.save(3, state);
  manager.save(4, state);
  EXPECT_EQ(manager.resume(state), 4);
  EXPECT_TRUE(std::filesystem::exists(manager.path_of(10) + ".left-behind/lockstep.json"));
}

TEST(CheckpointAttacks, UnfinishedSavesAreSortedOut) {
  const testing::TempDir folder;
  Two model;
  dcp::State state;
  state.add("model", model);
  dcp::CheckpointManager manager(folder.path(), {.every = 1});
  manager.save(7, state);
  // A crash between the two renames, on a file system that cannot exchange folders.
  std::filesystem::rename(manager.path_of(7), folder.file(".step-00000007.saving-12.before"));
  std::filesystem::create_directory(folder.file(".step-00000007.saving-12"));
  EXPECT_EQ(manager.resume(state), 7);
  EXPECT_FALSE(std::filesystem::exists(folder.file(".step-00000007.saving-12")));
  // Another process that only looks does not disturb a save.
  const StepScope scope([&](const Event& step, const std::function<void()>& next) {
    if (step.kind == "save" && step.unit == "lockstep.json") {
      dcp::CheckpointManager(folder.path()).resume(state);
    }
    next();
  });
  manager.save(8, state);
  EXPECT_EQ(manager.steps(), (std::vector<int64_t>{7, 8}));
}

TEST(CheckpointAttacks, RanksLoadOneCheckpoint) {
  const testing::TempDir folder;
  Two model;
  dcp::save(folder.file("0"), dcp::State().add("model", model), {.step = 0});
  dcp::save(folder.file("1"), dcp::State().add("model", model), {.step = 1});
  testing::run_threads_in_gtest({.world_size = 2}, [&](const World& world) {
    Two own;
    expect_error([&] { dcp::load(folder.file(std::to_string(world.rank())), dcp::State().add("model", own)); },
                 {"another checkpoint than rank 0's"});
  });
}

TEST(CheckpointAttacks, WhatDoesNotFitIsRefused) {
  const testing::TempDir folder;
  Two model;
  optim::AdamW optimizer(model->parameters(), {.lr = 0.1});
  give_gradients(model->parameters());
  optimizer.step();
  double half = 0.5;
  GradScaler disabled({.device = at::kCPU, .enabled = false});
  dcp::State state;
  state.add("optimizer", optimizer, model).add("half", half).add("scaler", disabled);
  dcp::save(folder.file("x"), state);
  struct WiderImpl : torch::nn::Module {
    WiderImpl() {
      register_module("a", a);
      register_module("b", b);
    }
    torch::nn::Linear a{3, 5};
    torch::nn::Linear b{5, 2};
  };
  auto wider = std::make_shared<WiderImpl>();
  optim::AdamW other(wider->parameters(), {.lr = 0.1});
  expect_error([&] { dcp::load(folder.file("x"), dcp::State().add("optimizer", other, wider)); },
               {"'state.a.weight.exp_avg' has sizes [4, 3], the parameter [5, 3]"});
  int64_t whole = 3;
  expect_error([&] { dcp::load(folder.file("x"), dcp::State().add("half", whole)); }, {"'half' is a Double"});
  EXPECT_EQ(whole, 3);
  GradScaler enabled({.device = at::kCPU});
  expect_error([&] { dcp::load(folder.file("x"), dcp::State().add("scaler", enabled)); }, {"was disabled"});
}

TEST(CheckpointAttacks, OptimizersOfModelsWithoutMemoryGetState) {
  const testing::TempDir folder;
  Two model;
  optim::AdamW optimizer(model->parameters(), {.lr = 0.1});
  give_gradients(model->parameters());
  optimizer.step();
  dcp::State state;
  state.add("optimizer", optimizer, model).add("model", model);
  dcp::save(folder.file("x"), state);
  auto empty = deferred_init([] { return Two(); });
  optim::AdamW other(empty->parameters(), {.lr = 0.1});
  dcp::State early;
  early.add("optimizer", other, empty).add("model", empty);
  dcp::load(folder.file("x"), early);
  give_gradients(empty->parameters());
  give_gradients(model->parameters());
  other.step();
  optimizer.step();
  EXPECT_TRUE(empty->a->weight.equal(model->a->weight));
}

TEST(CheckpointAttacks, ManyFilesAreReadFewAtATime) {
  const testing::TempDir folder;
  torch::nn::ParameterList list;
  for (int i = 0; i < 150; ++i) list->append(at::full({3}, static_cast<double>(i)));
  dcp::save(folder.file("x"), dcp::State().add("list", list), {.max_file_bytes = 1});
  torch::nn::ParameterList loaded;
  for (int i = 0; i < 150; ++i) loaded->append(at::zeros({3}));
  dcp::load(folder.file("x"), dcp::State().add("list", loaded));
  for (std::size_t i = 0; i < 150; ++i) EXPECT_TRUE((*loaded)[i].equal((*list)[i])) << i;
}

TEST(CheckpointAttacks, ADamagedCheckpointDoesNotStopZero) {
  const testing::TempDir folder;
  testing::run_threads_in_gtest({.world_size = 2}, [&](const World& world) {
    Two model;
    DistributedDataParallel<Two> ddp(model, world.group());
    ZeroRedundancyOptimizer<optim::AdamW> zero(model->parameters(), {.lr = 0.3}, world.group());
    const auto step = [&] {
      give_gradients(model->parameters());
      zero.step();
    };
    dcp::State state;
    state.add("model", ddp).add("optimizer", zero, model);
    dcp::CheckpointManager manager(folder.path(), {.every = 1});
    step();
    manager.save(1, state);
    step();
    manager.save(2, state);
    barrier(world.group());
    if (world.rank() == 0) {
      for (const auto* name : {"/rank-00000.safetensors", "/rank-00001.safetensors"}) {
        std::fstream file(manager.path_of(2) + name, std::ios::in | std::ios::out);
        file.seekp(-1, std::ios::end);
        file.put('\x77');
      }
    }
    barrier(world.group());
    EXPECT_EQ(manager.resume(state), 1);
    step();
  });
}

}  // namespace lockstep::checkpoint_attacks_test
