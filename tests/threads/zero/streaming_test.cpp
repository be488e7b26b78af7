// State in chunks and in files.
#include "lockstep/zero/streaming.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "lockstep/base/str.h"
#include "lockstep/comm/barrier.h"
#include "lockstep/comm/objects.h"
#include "lockstep/testing/memory_probe.h"
#include "lockstep/testing/recorder.h"
#include "lockstep/testing/temp_dir.h"
#include "tests/support/ddp_models.h"
#include "tests/support/saved_files.h"
#include "tests/support/zero_fixtures.h"

namespace lockstep::streaming_test {
namespace {

using namespace zero_fixtures;
using testing::expect_error;
using testing::Recorder;
using testing::TempDir;
using torch::optim::Adam;
using Zero = ZeroRedundancyOptimizer<Adam>;

const std::vector<std::vector<int64_t>> kShapes = {{7, 5}, {5}, {3, 4, 2}, {1}, {}, {0}, {13}};

template <class Optimizer>
void train(Optimizer& optimizer, const std::vector<at::Tensor>& parameters, int steps, int first = 0) {
  for (int step = 0; step < steps; ++step) {
    set_gradients(parameters, first + step);
    optimizer.step();
  }
}

std::string part_of(const std::string& path, int part) {
  return saved_files::file_of(path, str(".part", part));
}

// ZERO-69
TEST(ZeroStreaming, CollectsWhatConsolidationDoes) {
  on_ranks(
      [](const World& world) {
        for (const auto& [name, zero] : ways(world.group())) {
          const auto parameters = parameters_of(kShapes);
          Zero optimizer(parameters, {}, zero);
          train(optimizer, parameters, 2);
          for (const int64_t max_bytes : {3, 16, 1 << 20}) {
            const int to = world.world_size() - 1;
            optimizer.consolidate_state_dict(to);
            std::optional<OptimizerStateDict> expected;
            if (world.rank() == to) expected = optimizer.state_dict();
            consolidate_in_chunks(optimizer, {.to = to, .max_bytes = max_bytes});
            if (expected) {
              expect_same_state(optimizer.state_dict(), *expected);
            } else {
              expect_error([&] { optimizer.state_dict(); }, {"not consolidated"});
            }
          }
        }
      },
      {1, 2, 3});
}

/// What ranks have told each other of what there is and where: sent, received and read. Other threads may free it,
/// which a probe of this one does not see; then it counts until the end, so all of it is allowed.
int64_t bytes_of_descriptions(const Recorder& recorder, const World& world) {
  int64_t bytes = 0;
  for (const auto& event : recorder.events("launch")) {
    if (event.kind == "all_gather_into_tensor")
      bytes += static_cast<int64_t>(event.bytes) * (1 + 2 * world.world_size());
  }
  return bytes;
}

// ZERO-69
TEST(ZeroStreaming, HoldsNoMoreThanTheBoundOnAnyRank) {
  on_ranks(
      [](const World& world) {
        for (const auto& [name, zero] : ways(world.group())) {
          const TempDir folder;
          const auto path = broadcast_object(folder.file("state"), 0, world.group());
          const auto parameters = parameters_of({{512, 300}, {700}, {400, 400}, {400, 100}});
          Zero optimizer(parameters, {}, zero);
          train(optimizer, parameters, 1);
          constexpr int64_t kBound = 64 << 10;
          constexpr int64_t kNumberOfSave = 256;
          const auto state_bytes = 2 * optimizer.memory_report().parameters;
          {
            const Recorder recorder;
            const testing::MemoryProbe probe;
            consolidate_in_chunks(optimizer, {.to = 0, .max_bytes = kBound});
            const auto result = world.rank() == 0 ? state_bytes : 0;
            const auto descriptions = bytes_of_descriptions(recorder, world);
            EXPECT_LE(descriptions, 12 << 10) << name;
            EXPECT_LE(probe.total().peak_bytes, kBound + descriptions + result) << name;
            for (const auto& event : recorder.events("launch"))
              EXPECT_LE(event.bytes, static_cast<std::size_t>(kBound));
          }
          {
            const Recorder recorder;
            const testing::MemoryProbe probe;
            save_in_chunks(optimizer, path, {.to = 0, .max_bytes = kBound});
            EXPECT_LE(probe.total().peak_bytes, kBound + kNumberOfSave + bytes_of_descriptions(recorder, world))
                << name << ": the rank that writes has no more either";
          }
          {
            const Recorder recorder;
            const testing::MemoryProbe probe;
            save_sharded(optimizer, path);
            EXPECT_LE(probe.total().peak_bytes, kNumberOfSave + bytes_of_descriptions(recorder, world)) << name;
          }
          barrier(world.group());
        }
      },
      {2, 3}, {"threads", "gloo"});
}

// ZERO-69
TEST(ZeroStreaming, RefusesBoundsAndRanksThatMakeNoSense) {
  on_ranks(
      [](const World& world) {
        const auto parameters = parameters_of(kShapes);
        Zero optimizer(parameters, {}, world.group());
        expect_error([&] { consolidate_in_chunks(optimizer, {.max_bytes = 0}); }, {"chunks of 0 bytes"});
        expect_error([&] { consolidate_in_chunks(optimizer, {.to = 2}); }, {"rank 2 of a group of 2"});
        expect_error([&] { save_in_chunks(optimizer, "unused", {.to = -1}); }, {"rank -1 of a group of 2"});
      },
      {2});
}

struct Saved {
  std::vector<at::Tensor> values;
  std::vector<at::Tensor> after;  // two steps later
};

/// Trains, saves under `path`, and says how training would have gone on.
Saved save(int world_size, std::size_t way, const std::string& path, bool in_chunks) {
  Saved result;
  testing::run_threads_in_gtest({.world_size = world_size}, [&](const World& world) {
    const auto parameters = parameters_of(kShapes);
    Zero optimizer(parameters, {0.25}, ways(world.group())[way].second);
    train(optimizer, parameters, 3);
    in_chunks ? save_in_chunks(optimizer, path, {.to = world_size - 1, .max_bytes = 20})
              : save_sharded(optimizer, path);
    const auto values = copies_of(parameters);
    train(optimizer, parameters, 2, 3);
    if (world.rank() == 0) result = {values, copies_of(parameters)};
  });
  return result;
}

// ZERO-70, ZERO-69
TEST(ZeroStreaming, FilesLoadAtAnyNumberOfRanksAndUnderAnyDivision) {
  for (const bool in_chunks : {false, true}) {
    for (const std::size_t from_way : {0, 1, 2}) {
      const TempDir folder;
      const auto path = folder.file("state");
      const auto saved = save(4, from_way, path, in_chunks);
      for (const int world_size : {1, 2, 3, 4}) {
        testing::run_threads_in_gtest({.world_size = world_size}, [&](const World& world) {
          for (const auto& [name, zero] : ways(world.group())) {
            const auto parameters = copies_of(saved.values);
            Zero optimizer(parameters, {}, zero);
            const Recorder recorder;
            load_sharded(optimizer, path);
            EXPECT_TRUE(recorder.events().empty());
            EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 0.25);
            train(optimizer, parameters, 2, 3);
            expect_same(parameters, saved.after, str(name, ", saved by way ", from_way));
          }
        });
      }
    }
  }
}

// ZERO-70
TEST(ZeroStreaming, FilesKnowInWhichOrderMemoryLay) {
  const TempDir folder;
  const auto path = folder.file("state");
  const auto made = [](bool has_channels_last) {
    auto parameter = parameters_of({{4, 3, 2, 2}})[0].detach();
    if (has_channels_last) parameter = parameter.contiguous(at::MemoryFormat::ChannelsLast);
    return std::vector<at::Tensor>{parameter.requires_grad_()};
  };
  for (const std::size_t from_way : {0, 2}) {
    testing::run_threads_in_gtest({.world_size = 2}, [&](const World& world) {
      const auto parameters = made(true);
      Zero optimizer(parameters, {}, ways(world.group())[from_way].second);
      train(optimizer, parameters, 2);
      save_sharded(optimizer, path);
      const auto values = copies_of(parameters);
      train(optimizer, parameters, 2, 2);
      for (const auto& [name, zero] : ways(world.group())) {
        const auto others = made(false);
        others[0].detach().copy_(values[0]);
        Zero other(others, {}, zero);
        load_sharded(other, path);
        train(other, others, 2, 2);
        expect_same(others, parameters, name);
      }
    });
  }
}

// ZERO-70
TEST(ZeroStreaming, FilesThatAreMissingDamagedOrForeignAreRefused) {
  on_ranks(
      [](const World& world) {
        const TempDir folder;
        const auto path = broadcast_object(folder.file("state"), 0, world.group());
        const auto parameters = parameters_of(kShapes);
        for (const auto& [name, zero] : ways(world.group())) {
          Zero optimizer(parameters, {}, zero);
          train(optimizer, parameters, 1);
          const auto state = [&] {
            optimizer.consolidate_state_dict();
            return world.rank() == 0 ? optimizer.state_dict() : OptimizerStateDict();
          };
          const auto before = state();
          const auto refuses = [&](const std::string& file, const std::vector<std::string>& words) {
            barrier(world.group());
            expect_error([&] { load_sharded(optimizer, file); }, words);
            expect_same_state(state(), before);
            barrier(world.group());
          };
          refuses(path + ".nowhere", {"cannot read", ".nowhere"});
          save_sharded(optimizer, path);
          load_sharded(optimizer, path);
          const auto as_rank_0 = [&](const std::function<void()>& action) {
            barrier(world.group());
            if (world.rank() == 0) action();
            barrier(world.group());
          };
          as_rank_0([&] { std::ofstream(path + ".odd") << "no index"; });
          refuses(path + ".odd", {"is no index of saved optimizer state"});

          // A save to a folder that is not there fails on all ranks alike, and leaves the old one usable.
          expect_error([&] { save_sharded(optimizer, path + ".d/state"); }, {"rank 0", "cannot write", "No such file"});
          expect_error([&] { save_in_chunks(optimizer, path + ".d/state"); },
                       {"rank 0", "cannot write", "No such file"});
          load_sharded(optimizer, path);

          // Parts of another save.
          save_sharded(optimizer, path + "2");
          as_rank_0([&] {
            for (int rank = 0; rank < world.world_size(); ++rank) {
              std::ifstream in(part_of(path + "2", rank), std::ios::binary);
              std::ofstream(part_of(path, rank), std::ios::binary) << in.rdbuf();
            }
          });
          refuses(path, {".part", "belongs to another save"});
          save_sharded(optimizer, path);
          const auto other_parameters = parameters_of({{7, 5}, {5}, {3, 4, 2}, {1}, {}, {0}, {14}});
          Zero other(other_parameters, {}, zero);
          expect_error([&] { load_sharded(other, path); }, {"parameter 6 has sizes [14], the saved one [13]"});
          Zero fewer({other_parameters[0]}, {}, zero);
          expect_error([&] { load_sharded(fewer, path); }, {"1 parameters in group 0 was given the state of 7"});
          barrier(world.group());
        }
      },
      {2});
}

// ZERO-70: parameters are known by name, so that they may be listed in another order.
TEST(ZeroStreaming, FilesKnowParametersByName) {
  on_ranks(
      [](const World& world) {
        const TempDir folder;
        const auto path = broadcast_object(folder.file("state"), 0, world.group());
        const std::vector<std::string> names = {"a", "b", "c"};
        for (const auto& [way, zero] : ways(world.group())) {
          auto named = zero;
          named.parameter_names = names;
          const auto parameters = parameters_of({{4, 3}, {3, 4}, {5}});
          Zero optimizer(parameters, {}, named);
          train(optimizer, parameters, 2);
          save_sharded(optimizer, path);

          const std::vector<std::size_t> order = {2, 0, 1};
          std::vector<at::Tensor> turned;
          auto turned_zero = zero;
          for (const auto i : order) {
            turned.push_back(parameters[i].detach().clone().requires_grad_());
            turned_zero.parameter_names.push_back(names[i]);
          }
          Zero other(turned, {}, turned_zero);
          load_sharded(other, path);
          for (const auto& parameter : parameters) parameter.mutable_grad() = at::full_like(parameter, 0.5);
          for (const auto& parameter : turned) parameter.mutable_grad() = at::full_like(parameter, 0.5);
          optimizer.step();
          other.step();
          for (std::size_t i = 0; i < order.size(); ++i) EXPECT_TRUE(at::equal(turned[i], parameters[order[i]])) << way;

          // One that does not know names goes by position, and notices only sizes that differ.
          Zero nameless(turned, {}, zero);
          expect_error([&] { load_sharded(nameless, path); }, {"parameter 0 has sizes [5], the saved one [4, 3]"});
          turned_zero.parameter_names = {"c", "x", "b"};
          Zero foreign(turned, {}, turned_zero);
          expect_error([&] { load_sharded(foreign, path); }, {"parameter 'x'", "not among those that were saved"});
          barrier(world.group());
        }
        const auto refuses = [&](const std::vector<std::string>& given, const std::vector<std::string>& words) {
          const ZeroOptions options{.process_group = world.group(), .parameter_names = given};
          expect_error([&] { Zero(parameters_of({{2}, {3}}), {}, options); }, words);
        };
        refuses({"a"}, {"1 parameter_names for 2 parameters"});
        refuses({"a", "a"}, {"'a'", "twice"});
      },
      {1, 2}, {"threads"});
}

/// Two ranks saved these after three steps, before files knew names: three parameters of ones, twos and threes, and
/// gradients 0, 1, 2, … plus the number of the step.
// ZERO-70
TEST(ZeroStreaming, FilesOfTheFirstFormatLoad) {
  const std::string folder = std::string(std::getenv("LOCKSTEP_SOURCE_DIR")) + "/tests/threads/zero/files/format_1_";
  on_ranks(
      [&](const World& world) {
        const auto made = [] {
          std::vector<at::Tensor> parameters;
          for (const auto& shape : std::vector<std::vector<int64_t>>{{3, 2}, {5}, {2, 2, 2}}) {
            parameters.push_back(at::full(shape, static_cast<double>(parameters.size() + 1)).requires_grad_());
          }
          return parameters;
        };
        const auto expected = made();
        torch::optim::AdamW plain(expected, torch::optim::AdamWOptions(0.125));
        for (int step = 0; step < 3; ++step) {
          for (const auto& parameter : expected) {
            parameter.mutable_grad() = at::arange(parameter.numel(), at::kFloat).view(parameter.sizes()) + step;
          }
          plain.step();
        }
        for (const auto& [way, zero] : ways(world.group())) {
          for (const std::string saved : {"elements", "parameters"}) {
            auto named = zero;
            named.parameter_names = {"a", "b", "c"};
            for (const auto& options : {zero, named}) {
              ZeroRedundancyOptimizer<torch::optim::AdamW> optimizer(made(), torch::optim::AdamWOptions(1), options);
              load_sharded(optimizer, folder + saved);
              optimizer.consolidate_state_dict();
              if (world.rank() == 0) expect_same_state(optimizer.state_dict(), state_dict_of(plain), {1e-6});
            }
          }
        }
      },
      {1, 2, 3}, {"threads"});
}

// ZERO-70, ZERO-39: what the optimizer had is still there, however its shard is cut
TEST(ZeroStreaming, PartsThatEndTooEarlyAreRefused) {
  const TempDir folder;
  testing::run_threads_in_gtest({.world_size = 1}, [&](const World& world) {
    for (const auto& [name, zero] : ways(world.group())) {
      const auto path = folder.file(name);
      const auto parameters = parameters_of(kShapes);
      Zero optimizer(parameters, {}, zero);
      train(optimizer, parameters, 1);
      save_sharded(optimizer, path);
      const auto part = part_of(path, 0);
      std::string bytes;
      {
        std::ifstream in(part, std::ios::binary);
        bytes.assign(std::istreambuf_iterator<char>(in), {});
      }
      std::ofstream(part, std::ios::binary) << bytes.substr(0, bytes.size() - 1);
      train(optimizer, parameters, 1, 1);
      optimizer.consolidate_state_dict();
      const auto before = optimizer.state_dict();
      expect_error([&] { load_sharded(optimizer, path); }, {".part0", "ends before byte"});
      optimizer.consolidate_state_dict();
      expect_same_state(optimizer.state_dict(), before);
    }
  });
}

// ZERO-70: a save that fails, or a crash, must not cost the one before
TEST(ZeroStreaming, ASaveThatFailsLeavesTheLastOne) {
  const TempDir folder;
  on_ranks(
      [&](const World& world) {
        const auto size = static_cast<std::size_t>(world.world_size());
        const auto as_rank_0 = [&](const std::function<void()>& action) {
          barrier(world.group());
          if (world.rank() == 0) action();
          barrier(world.group());
        };
        const auto state_of = [&](Zero& optimizer) {
          optimizer.consolidate_state_dict();
          return world.rank() == 0 ? optimizer.state_dict() : OptimizerStateDict();
        };
        for (const bool in_chunks : {false, true}) {
          const auto path = folder.file(str("state", size, in_chunks));
          const auto save = [&](Zero& optimizer) {
            in_chunks ? save_in_chunks(optimizer, path) : save_sharded(optimizer, path);
          };
          const auto parameters = parameters_of(kShapes);
          Zero optimizer(parameters, {}, world.group());
          train(optimizer, parameters, 1);
          save(optimizer);
          const auto saved = state_of(optimizer);
          train(optimizer, parameters, 1, 1);
          // In the way of the index.
          as_rank_0([&] { std::filesystem::create_directory(path + ".new"); });
          expect_error([&] { save(optimizer); }, {"rank 0", "cannot write", path});
          as_rank_0([&] { std::filesystem::remove(path + ".new"); });
          const auto parts = in_chunks ? 1 : size;
          EXPECT_EQ(saved_files::files_of(path).size(), parts + 1) << "what the failed save had written is gone";
          Zero other(parameters_of(kShapes), {}, world.group());
          load_sharded(other, path);
          expect_same_state(state_of(other), saved);

          barrier(world.group());
          save(optimizer);
          EXPECT_EQ(saved_files::files_of(path).size(), parts + 1) << "parts of the save before are gone";
          load_sharded(other, path);
          expect_same_state(state_of(other), state_of(optimizer));
          barrier(world.group());
        }
      },
      {1, 2, 3}, {"threads"});
}

// ZERO-70
TEST(ZeroStreaming, ASaveRemovesThePartsOfAnOlderFormat) {
  const TempDir folder;
  const auto path = folder.file("state");
  const std::string old =
      std::string(std::getenv("LOCKSTEP_SOURCE_DIR")) + "/tests/threads/zero/files/format_1_elements";
  for (const std::string part : {"", ".part0", ".part1"}) std::filesystem::copy_file(old + part, path + part);
  std::ofstream(path + ".part2") << "somebody else's";
  testing::run_threads_in_gtest({.world_size = 1}, [&](const World& world) {
    const auto parameters = parameters_of({{3, 2}, {5}, {2, 2, 2}});
    Zero optimizer(parameters, {}, world.group());
    load_sharded(optimizer, path);
    save_sharded(optimizer, path);
    load_sharded(optimizer, path);
  });
  EXPECT_EQ(saved_files::files_of(path).size(), 3U) << "index, part and what is not of the save";
  EXPECT_TRUE(std::filesystem::exists(path + ".part2"));
}

struct TwoAlike : torch::nn::Module {
  TwoAlike() {
    for (const auto* name : {"a", "b"}) register_parameter(name, at::full({3, 2}, name[0] - 'a' + 1.0));
  }
  at::Tensor forward(const at::Tensor& x) { return x * parameters()[0] + 3 * x * parameters()[1]; }
};

// The optimizer is not told of the wrapper, and finds it by the parameters
TEST(ZeroStreaming, FilesKnowParametersByTheNamesOfTheirWrapper) {
  const TempDir folder;
  on_ranks(
      [&](const World& world) {
        const auto path = folder.file(str("named", world.world_size()));
        const auto module = std::make_shared<TwoAlike>();
        const auto other = std::make_shared<TwoAlike>();
        DistributedDataParallel ddp(module, world.group());
        DistributedDataParallel ddp_of_other(other, world.group());
        const auto turned = std::vector<at::Tensor>{other->parameters()[1], other->parameters()[0]};
        Zero optimizer(ddp.parameters(), {});
        Zero in_another_order(turned, {});
        const auto step = [](auto& wrapper, Zero& by) {
          by.zero_grad();
          wrapper(at::arange(6.0).view({3, 2})).square().sum().backward();
          by.step();
        };
        step(ddp, optimizer);
        {
          const at::NoGradGuard no_grad;
          for (int i = 0; i < 2; ++i) other->parameters()[i].copy_(module->parameters()[i]);
        }
        save_sharded(optimizer, path);
        {
          const ddp_models::Warnings warnings;
          load_sharded(in_another_order, path);
          EXPECT_EQ(warnings.count("by position"), 0);
        }
        step(ddp, optimizer);
        step(ddp_of_other, in_another_order);
        for (int i = 0; i < 2; ++i) EXPECT_TRUE(at::equal(other->parameters()[i], module->parameters()[i])) << i;

        // Nobody names these.
        const auto nameless = parameters_of({{3, 2}, {3, 2}});
        Zero by_position(nameless, {}, world.group());
        const ddp_models::Warnings warnings;
        load_sharded(by_position, path);
        EXPECT_EQ(warnings.count("by position"), 1);
        EXPECT_EQ(warnings.count("parameter 0 gets the state of 'a'"), 1);
        EXPECT_EQ(warnings.count("parameter_names"), 1);
        barrier(world.group());
      },
      {1, 2}, {"threads"});
}

// Names that two wrapped modules share say nothing
TEST(ZeroStreaming, FilesGoByPositionIfTwoModulesShareTheirNames) {
  const TempDir folder;
  testing::run_threads_in_gtest({.world_size = 2}, [&](const World& world) {
    const auto path = folder.file("shared");
    DistributedDataParallel one(std::make_shared<TwoAlike>(), world.group());
    DistributedDataParallel two(std::make_shared<TwoAlike>(), world.group());
    auto parameters = one.parameters();
    for (const auto& parameter : two.parameters()) parameters.push_back(parameter);
    Zero optimizer(parameters, {}, world.group());
    train(optimizer, parameters, 1);
    save_sharded(optimizer, path);
    const ddp_models::Warnings warnings;
    load_sharded(optimizer, path);
    EXPECT_EQ(warnings.count("by position"), 0) << "the file has no names either";
    train(optimizer, parameters, 1);
  });
}

// By file, by archive and by dictionary, however state is divided: the momenta would be dropped
TEST(ZeroStreaming, StateOfAnotherKindIsRefusedByAllRanks) {
  const TempDir folder;
  on_ranks(
      [&](const World& world) {
        for (const auto& [name, zero] : ways(world.group())) {
          const auto path = folder.file(str(name, world.world_size()));
          const auto parameters = parameters_of(kShapes);
          ZeroRedundancyOptimizer<optim::AdamW> adamw(parameters, {.lr = 1e-2}, zero);
          train(adamw, parameters, 2);
          save_sharded(adamw, path);
          adamw.consolidate_state_dict();
          if (world.rank() == 0) torch::save(adamw, path + ".pt");
          barrier(world.group());
          const auto refuses = [&](auto& optimizer, const std::string& kind) {
            const std::vector<std::string> words = {"state of Adam or AdamW", kind, "'exp_avg'"};
            expect_error([&] { load_sharded(optimizer, path); }, words);
            expect_error([&] { torch::load(optimizer, path + ".pt"); }, words);
            EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 0.25);
            train(optimizer, parameters, 1);
            barrier(world.group());
          };
          ZeroRedundancyOptimizer<optim::SGD> sgd(parameters, {.lr = 0.25, .momentum = 0.9}, zero);
          refuses(sgd, "lockstep::optim::SGD");
          ZeroRedundancyOptimizer<optim::RMSprop> rmsprop(parameters, {.lr = 0.25}, zero);
          refuses(rmsprop, "lockstep::optim::RMSprop");
          ZeroRedundancyOptimizer<torch::optim::SGD> theirs(parameters, torch::optim::SGDOptions(0.25).momentum(0.9),
                                                            zero);
          refuses(theirs, "torch::optim::SGD");
        }
      },
      {1, 2, 3}, {"threads"});
}

}  // namespace
}  // namespace lockstep::streaming_test
