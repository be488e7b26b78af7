// Saves and loads: what fails, and what is left then; saves that go on beside training.
#include <filesystem>
#include <fstream>

#include "lockstep/base/observer.h"
#include "lockstep/checkpoint/manager.h"
#include "lockstep/checkpoint/verify.h"
#include "lockstep/checkpoint/weights.h"
#include "lockstep/optim/grad_scaler.h"
#include "lockstep/optim/schedules.h"
#include "lockstep/testing/temp_dir.h"
#include "tests/support/checkpoint_runs.h"

namespace lockstep::checkpoint_save_test {

using namespace checkpoint_runs;
using testing::expect_error;

void on_ranks(int world_size, const testing::RankBody& body) {
  testing::run_threads_in_gtest({.world_size = world_size}, body);
}

std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

/// Some tensors that all ranks have and one that is divided, all of one value.
struct Values : dcp::Stateful {
  explicit Values(double value) : whole(at::full({100}, value)), part(at::full({8, 3}, value)) {}
  void save(dcp::Outgoing& out) override {
    out.tensor("whole", whole, dcp::Replicas::kAlike);
    const auto rows = 8 / out.world_size();
    out.pieces("part", {8, 3}, at::kFloat,
               {{.box = {{out.rank() * rows, 0}, {rows, 3}}, .values = part.narrow(0, out.rank() * rows, rows)}});
    out.value("count", count);
  }
  void load(dcp::Incoming& in) override {
    in.tensor("whole", whole);
    in.tensor("part", part);
    const auto saved = in.value("count");
    in.then([this, saved] { count = saved.toInt(); });
  }
  void expect(double value) const {
    EXPECT_TRUE(whole.eq(value).all().item<bool>()) << value;
    EXPECT_TRUE(part.eq(value).all().item<bool>()) << value;
  }
  at::Tensor whole;
  at::Tensor part;
  int64_t count = 0;
};

dcp::State state_of(Values& values) {
  dcp::State state;
  state.add("values", values);
  return state;
}

/// Rank `who` fails at a step of its save.
struct FailsAt {
  FailsAt(const World& world, int who, std::string unit, std::string state)
      : scope([this, who, rank = world.rank(), unit = std::move(unit), state = std::move(state)](
                  const Event& step, const std::function<void()>& next) {
          const bool is_it =
              rank == who && step.kind == "save" && step.state == state && step.unit.find(unit) != std::string::npos;
          if (is_it && is_armed) throw std::runtime_error("No space left on device");
          next();
        }) {}
  bool is_armed = true;
  StepScope scope;
};

// FSDP-100
TEST(CheckpointSave, ThatFailsOnOneRankThrowsOnAllAndLeavesTheLastOne) {
  for (const auto& [who, unit, state] :
       std::vector<std::tuple<int, std::string, std::string>>{{0, "rank-00000", "write"},
                                                              {1, "rank-00001", "write"},
                                                              {1, "rank", "flush"},
                                                              {0, "lockstep.json", "write"},
                                                              {0, "", "rename"}}) {
    SCOPED_TRACE(unit + " " + state);
    const testing::TempDir folder;
    const auto path = folder.file("last");
    on_ranks(2, [&, who = who, unit = unit, state = state](const World& world) {
      Values one(1);
      dcp::save(path, state_of(one));
      FailsAt fails(world, who, unit, state);
      Values two(2);
      expect_error([&] { dcp::save(path, state_of(two)); },
                   {"'" + path + "' was not saved", "No space left on device", str("rank ", who)});
      Values loaded(0);
      dcp::load(path, state_of(loaded));
      loaded.expect(1);
      // And it can be done again.
      fails.is_armed = false;
      dcp::save(path, state_of(two));
      dcp::load(path, state_of(loaded));
      loaded.expect(2);
    });
    EXPECT_EQ(names_in(folder.path()), std::vector<std::string>{"last"});
  }
}

TEST(CheckpointSave, SaysWhereItCannotWrite) {
  const testing::TempDir folder;
  std::ofstream(folder.file("file")) << "no folder";
  on_ranks(2, [&](const World&) {
    Values values(1);
    expect_error([&] { dcp::save(folder.file("file/x"), state_of(values)); },
                 {"was not saved", "cannot make the folder", "Not a directory"});
    expect_error([&] { dcp::load(folder.file("nothing"), state_of(values)); }, {"was not loaded", "cannot read"});
    expect_error([&] { dcp::load(folder.path(), state_of(values)); }, {"holds no checkpoint"});
  });
}

TEST(CheckpointSave, RefusesWhatDoesNotFitTogether) {
  const testing::TempDir folder;
  on_ranks(2, [&](const World& world) {
    auto mine = at::zeros({2 + world.rank()});
    dcp::State other;
    other.add("x", mine);
    expect_error([&] { dcp::save(folder.file("x"), other); }, {"'x' is F32 of sizes [2] on rank 0"});
    auto sparse = at::eye(3).to_sparse();
    dcp::State refused;
    refused.add("x", sparse);
    expect_error([&] { dcp::save(folder.file("x"), refused); }, {"'x' is sparse"});
    dcp::State state;
    state.add("x", mine);
    expect_error([&] { state.add("x", mine); }, {"there is an entry 'x'"});
  });
  EXPECT_TRUE(names_in(folder.path()).empty());
}

TEST(CheckpointSave, WritesReplicasOnceAndSpreadsThem) {
  const testing::TempDir folder;
  on_ranks(2, [&](const World&) {
    std::vector<at::Tensor> tensors;
    for (int i = 0; i < 8; ++i) tensors.push_back(at::full({1000}, i));
    torch::nn::ParameterList list;
    for (const auto& tensor : tensors) list->append(tensor.to(at::kFloat));
    dcp::State state;
    state.add("list", list);
    dcp::save(folder.file("x"), state, {.max_file_bytes = 5000});
  });
  // Two pieces of 4000 bytes do not fit into one file of 5000.
  int64_t bytes = 0;
  int files = 0;
  for (const auto& name : names_in(folder.file("x"))) {
    if (name == "lockstep.json") continue;
    ++files;
    bytes += static_cast<int64_t>(std::filesystem::file_size(folder.file("x") + "/" + name));
  }
  EXPECT_EQ(files, 8);
  EXPECT_LT(bytes, 8 * 4000 + 8 * 300);
}

TEST(CheckpointLoad, NamesWhatIsMissingExtraAndOfOtherSizes) {
  const testing::TempDir folder;
  const auto path = folder.file("x");
  auto a = at::ones({2, 3});
  auto b = at::ones({4});
  double c = 5;
  dcp::State saved;
  saved.add("m.a", a).add("m.b", b).add("c", c);
  dcp::save(path, saved);
  struct Asks : dcp::Stateful {
    void save(dcp::Outgoing&) override {}
    void load(dcp::Incoming& in) override {
      in.tensor("", into);
      in.tensor("absent", into);
    }
    at::Tensor into = at::zeros({3, 2});
  } asks;
  dcp::State state;
  state.add("m.a", asks);
  expect_error([&] { dcp::load(path, state); },
               {"'m.a' has sizes [2, 3] there and [3, 2] here", "it lacks m.a.absent"});
  EXPECT_TRUE(asks.into.eq(0).all().item<bool>());
  asks.into = at::zeros({2, 3});
  const auto loaded = dcp::load(path, state, {.strict = false});
  EXPECT_EQ(loaded.missing, std::vector<std::string>{"m.a.absent"});
  EXPECT_TRUE(asks.into.eq(1).all().item<bool>());
  auto wide = at::zeros({2, 3}, at::kDouble);
  dcp::State cast;
  cast.add("m.a", wide);
  expect_error([&] { dcp::load(path, cast); }, {"'m.a' is Float there and Double here", "casts"});
  dcp::load(path, cast, {.casts = true});
  EXPECT_TRUE(wide.eq(1).all().item<bool>());
  auto model = torch::nn::Linear(3, 2);
  dcp::save(folder.file("linear"), dcp::State().add("", model));
  auto without_bias = torch::nn::Linear(torch::nn::LinearOptions(3, 2).bias(false));
  expect_error([&] { dcp::load(folder.file("linear"), dcp::State().add("", without_bias)); }, {"nobody asks for bias"});
  dcp::LoadOptions renamed{.name_in_checkpoint = [](const std::string& name) { return name.substr(2); }};
  dcp::load(folder.file("linear"), dcp::State().add("x", model), renamed);
}

// FSDP-100
TEST(CheckpointLoad, NoticesDamage) {
  const testing::TempDir folder;
  const auto path = folder.file("x");
  Values one(1);
  dcp::save(path, state_of(one));
  EXPECT_TRUE(dcp::verify(path).empty());
  const auto file = path + "/rank-00000.safetensors";
  {
    std::fstream damaged(file, std::ios::in | std::ios::out | std::ios::binary);
    damaged.seekp(-4, std::ios::end);
    damaged.put('\x55');
  }
  ASSERT_EQ(dcp::verify(path).size(), 1);
  Values loaded(7);
  expect_error([&] { dcp::load(path, state_of(loaded)); }, {file + " is damaged", "'values."});
  loaded = Values(7);
  expect_error([&] { dcp::load(path, state_of(loaded), {.verify = dcp::Verify::kFirst}); },
               {file + " is damaged", "'values."});
  loaded.expect(7);
  std::filesystem::resize_file(file, std::filesystem::file_size(file) - 1);
  expect_error([&] { dcp::load(path, state_of(loaded)); }, {file, "but was written with"});
  std::filesystem::remove(file);
  expect_error([&] { dcp::load(path, state_of(loaded)); }, {"cannot read " + file});
}

TEST(CheckpointLoad, TakesEverythingThatARunHas) {
  const testing::TempDir folder;
  const auto path = folder.file("x");
  struct Everything {
    explicit Everything(const World& world, uint64_t seed) : run("ddp", world, seed) {}
    dcp::State state() {
      auto state = run.state();
      state.add("scaler", scaler).add("schedule", schedule).add("old schedule", old_schedule).add("sampler", sampler);
      state.add("random", dcp::random_state()).add("epoch", epoch).add("best", best).add("done", done);
      state.add("note", note).add("ema", ema).add("sgd", sgd, other);
      return state;
    }
    TrainingRun run;
    GradScaler scaler{{.device = at::kCPU, .growth_interval = 3}};
    optim::CosineAnnealingLR schedule{*run.optimizer, {.T_max = 100}};
    torch::nn::Linear other{2, 2};
    torch::optim::SGD sgd{other->parameters(), 1.0};
    torch::optim::StepLR old_schedule{sgd, 3};
    DistributedSampler sampler{100, {.seed = 3}};
    int64_t epoch = 0;
    double best = 0;
    bool done = false;
    std::string note;
    at::Tensor ema = at::zeros({3}, at::kComplexDouble);
  };
  std::array<at::Tensor, 2> drawn;
  on_ranks(2, [&](const World& world) {
    Everything all(world, 1);
    all.run.step();
    for (int i = 0; i < 7; ++i) {
      all.schedule.step();
      all.old_schedule.step();
      all.scaler.scale(at::ones({}));
      all.scaler.update(1024);
    }
    all.sampler.set_epoch(4, 10);
    all.epoch = 5;
    all.best = std::numeric_limits<double>::infinity();
    all.done = true;
    all.note = std::string("bytes \0 \xff", 9);
    all.ema.fill_(c10::complex<double>(1, -2));
    barrier(world.group());  // threads share the generator
    dcp::save(path, all.state());
    if (world.rank() == 0) drawn[0] = at::rand({5});
    barrier(world.group());
    at::rand({3});
    Everything again(world, 2);
    dcp::load(path, again.state());
    barrier(world.group());
    if (world.rank() == 0) drawn[1] = at::rand({5});
    barrier(world.group());
    EXPECT_EQ(again.schedule.last_epoch(), 7);
    EXPECT_EQ(again.schedule.last_lr(), all.schedule.last_lr());
    again.old_schedule.step();
    again.old_schedule.step();
    all.old_schedule.step();
    all.old_schedule.step();
    EXPECT_EQ(again.sgd.param_groups()[0].options().get_lr(), all.sgd.param_groups()[0].options().get_lr());
    EXPECT_EQ(again.scaler.get_scale(), 1024);
    EXPECT_EQ(again.scaler.state_dict(), all.scaler.state_dict());
    EXPECT_EQ(again.sampler.epoch(), 4);
    EXPECT_EQ(again.epoch, 5);
    EXPECT_EQ(again.best, all.best);
    EXPECT_TRUE(again.done);
    EXPECT_EQ(again.note, all.note);
    EXPECT_TRUE(again.ema.equal(all.ema));
  });
  EXPECT_TRUE(drawn[0].equal(drawn[1]));
}

TEST(CheckpointLoad, GivesEveryRankItsOwn) {
  const testing::TempDir folder;
  const auto path = folder.file("x");
  on_ranks(2, [&](const World& world) {
    int64_t place = 10 + world.rank();
    auto mine = at::full({4 + world.rank()}, world.rank());
    dcp::State state;
    state.add("place", dcp::per_rank(place)).add("mine", dcp::per_rank(mine));
    dcp::save(path, state);
    place = 0;
    mine.fill_(7);
    dcp::load(path, state);
    EXPECT_EQ(place, 10 + world.rank());
    EXPECT_TRUE(mine.eq(world.rank()).all().item<bool>());
  });
  on_ranks(3, [&](const World&) {
    int64_t place = 7;
    auto mine = at::full({2}, 7);
    dcp::load(path, dcp::State().add("place", dcp::per_rank(place)).add("mine", dcp::per_rank(mine)));
    EXPECT_EQ(place, 7);
    EXPECT_TRUE(mine.eq(7).all().item<bool>());
  });
  // Without it the first rank's counts, which is told.
  on_ranks(2, [&](const World& world) {
    int64_t place = 10 + world.rank();
    dcp::save(path, dcp::State().add("place", place));
    dcp::load(path, dcp::State().add("place", place));
    EXPECT_EQ(place, 10);
  });
}

TEST(CheckpointLoad, FillsModulesOnTheMetaDevice) {
  const testing::TempDir folder;
  const auto path = folder.file("x");
  auto model = net(1);
  dcp::save(path, dcp::State().add("model", model));
  auto empty = deferred_init([] { return Net(); });
  dcp::load(path, dcp::State().add("model", empty));
  const auto wanted = model->named_parameters();
  for (const auto& item : empty->named_parameters()) EXPECT_TRUE(item.value().equal(wanted[item.key()])) << item.key();
}

TEST(CheckpointAsync, SavesWhatWasThereThen) {
  const testing::TempDir folder;
  on_ranks(2, [&](const World&) {
    dcp::AsyncSaver saver;
    for (int i = 1; i <= 5; ++i) {
      Values values(i);
      saver.save(folder.file("step" + std::to_string(i)), state_of(values));
      values.whole.fill_(-1);  // training goes on
      values.part.fill_(-1);
    }
    saver.wait();
    EXPECT_FALSE(saver.is_saving());
    for (int i = 1; i <= 5; ++i) {
      Values loaded(0);
      dcp::load(folder.file("step" + std::to_string(i)), state_of(loaded));
      loaded.expect(i);
    }
  });
}

TEST(CheckpointAsync, TellsOfFailuresAtTheNextSaveOrWait) {
  const testing::TempDir folder;
  on_ranks(2, [&](const World& world) {
    dcp::AsyncSaver saver;
    Values values(1);
    FailsAt fails(world, 1, "rank-00001", "write");
    saver.save(folder.file("a"), state_of(values));
    expect_error([&] { saver.wait(); }, {"'" + folder.file("a") + "' was not saved", "No space left"});
    saver.save(folder.file("b"), state_of(values));
    expect_error([&] { saver.save(folder.file("c"), state_of(values)); }, {"b' was not saved"});
    fails.is_armed = false;
    saver.save(folder.file("d"), state_of(values));
    saver.wait();
  });
  EXPECT_EQ(names_in(folder.path()), std::vector<std::string>{"d"});
}

TEST(CheckpointManager, KeepsTheLastAndEveryMthAndResumesFromTheNewest) {
  for (const bool is_asynchronous : {false, true}) {
    const testing::TempDir folder;
    const auto run = folder.file("deep/run");
    on_ranks(2, [&](const World& world) {
      dcp::CheckpointManager manager(run,
                                     {.every = 10, .keep_last = 2, .keep_every = 40, .asynchronous = is_asynchronous});
      Values values(0);
      EXPECT_EQ(manager.resume(state_of(values)), std::nullopt);
      for (int64_t step = 1; step <= 95; ++step) {
        values.whole.fill_(static_cast<double>(step));
        values.part.fill_(static_cast<double>(step));
        EXPECT_EQ(manager.save_if_due(step, state_of(values)), step % 10 == 0);
      }
      manager.wait();
      EXPECT_EQ(manager.steps(), (std::vector<int64_t>{40, 80, 90}));
      barrier(world.group());
      if (world.rank() == 0) {
        EXPECT_EQ(std::filesystem::read_symlink(run + "/latest"), "step-00000090");
        std::filesystem::create_directory(run + "/.step-00000100.saving-17");  // of a job that was killed
        std::filesystem::create_directory(run + "/step-00000200");             // no checkpoint
        // A damaged one is passed over.
        std::fstream damaged(run + "/step-00000090/rank-00001.safetensors", std::ios::in | std::ios::out);
        damaged.seekp(-1, std::ios::end);
        damaged.put('\x55');
      }
      barrier(world.group());
      Values loaded(0);
      EXPECT_EQ(manager.resume(state_of(loaded)), 80);
      loaded.expect(80);
      EXPECT_FALSE(std::filesystem::exists(run + "/.step-00000100.saving-17"));
      // What does not fit is an error, not a reason to take an older one.
      auto other = torch::nn::Linear(2, 2);
      dcp::State misfit;
      misfit.add("values", other);
      expect_error([&] { manager.resume(misfit); }, {"it lacks values.weight"});
    });
  }
}

TEST(CheckpointManager, RefusesBadOptions) {
  expect_error([] { dcp::CheckpointManager("x", {.every = 0}); }, {"every 0 steps"});
  expect_error([] { dcp::CheckpointManager("x", {.keep_last = -1}); }, {"keep_last = -1"});
  expect_error([] { dcp::CheckpointManager(""); }, {"needs a folder"});
}

TEST(Weights, AreAFolderThatOthersOpen) {
  const testing::TempDir folder;
  for (const auto& layout : {"ddp", "fsdp", "fsdp flat", "2-D"}) {
    SCOPED_TRACE(layout);
    on_ranks(4, [&](const World& world) {
      TrainingRun run(layout, world, 1);
      run.step();
      save_weights(run.model, folder.file("whole"), {.texts = {{"config.json", "{}"}}});
      save_weights(run.model, folder.file("several"), {.max_file_bytes = 300});
    });
    EXPECT_EQ(names_in(folder.file("whole")), (std::vector<std::string>{"config.json", "model.safetensors"}));
    EXPECT_TRUE(std::filesystem::exists(folder.file("several/model.safetensors.index.json")));
    auto expected = net(2);
    load_weights(expected, folder.file("several"));
    auto whole = net(3);
    load_weights(whole, folder.file("whole"));
    on_ranks(3, [&](const World& world) {
      TrainingRun run("fsdp", world, 4);
      load_weights(run.model, folder.file("several"));
      for (const auto& item : run.model->named_parameters()) {
        const auto wanted = expected->named_parameters()[item.key()];
        EXPECT_TRUE(layout_of(item.value())->cut(wanted.detach()).equal(item.value().detach())) << item.key();
      }
    });
    for (const auto& item : whole->named_parameters()) {
      EXPECT_TRUE(item.value().equal(expected->named_parameters()[item.key()])) << item.key();
      EXPECT_TRUE(item.value().detach().equal(
          whole_values(item.key() == "tied" ? "norm.bias" : item.key(), item.value().sizes())))
          << item.key();
    }
    EXPECT_EQ(names_in(folder.path()), (std::vector<std::string>{"several", "whole"}));
  }
}

}  // namespace lockstep::checkpoint_save_test
