// State as a whole: collected, loaded, and interchangeable with that of optimizers that are not sharded.
#include <torch/serialize.h>

#include <sstream>

#include "lockstep/base/str.h"
#include "lockstep/comm/objects.h"
#include "lockstep/comm/values.h"
#include "lockstep/state/python_format.h"
#include "lockstep/testing/memory_probe.h"
#include "lockstep/testing/recorder.h"
#include "lockstep/testing/temp_dir.h"
#include "lockstep/zero/streaming.h"
#include "tests/support/zero_fixtures.h"

namespace lockstep::state_test {
namespace {

using namespace zero_fixtures;
using testing::expect_error;
using testing::Recorder;
using torch::optim::Adam;
using torch::optim::SGD;
using torch::optim::SGDOptions;
using Zero = ZeroRedundancyOptimizer<Adam>;

const std::vector<std::vector<int64_t>> kShapes = {{7, 5}, {5}, {3, 4, 2}, {1}, {13}};

template <class Optimizer>
void train(Optimizer& optimizer, const std::vector<at::Tensor>& parameters, int steps, int first = 0) {
  for (int step = 0; step < steps; ++step) {
    set_gradients(parameters, first + step);
    optimizer.step();
  }
}

/// What was consolidated on rank 0, on all ranks.
OptimizerStateDict shared_state(ZeroOptimizer& optimizer, const World& world) {
  optimizer.consolidate_state_dict(0);
  const auto value = world.rank() == 0 ? to_python(optimizer.state_dict()) : c10::IValue();
  return from_python(broadcast_value(value, 0, world.group(), at::kCPU));
}

// ZERO-35, ZERO-37
TEST(ZeroState, IsOnTheTargetOnlyAndAsOfItsConsolidation) {
  on_ranks([](const World& world) {
    for (const auto& [name, zero] : ways(world.group())) {
      const auto parameters = parameters_of(kShapes);
      Zero optimizer(parameters, {}, zero);
      const auto refused = [&] {
        expect_error([&] { optimizer.state_dict(); },
                     {str("rank ", world.rank(), " of ", world.world_size()), "not consolidated",
                      str("consolidate_state_dict(", world.rank(), ")")});
      };
      refused();
      optimizer.consolidate_state_dict();
      if (world.rank() == 0) {
        EXPECT_TRUE(optimizer.state_dict().state.empty()) << "no step, no state";
        EXPECT_EQ(optimizer.state_dict().param_groups[0].params, (std::vector<int64_t>{0, 1, 2, 3, 4}));
      } else {
        refused();
      }
      train(optimizer, parameters, 2);
      const int to = world.world_size() - 1;
      optimizer.consolidate_state_dict(to);
      if (world.rank() != to) {
        refused();
        optimizer.consolidate_state_dict(to);
        continue;
      }
      const auto state = optimizer.state_dict();
      EXPECT_EQ(state.state.size(), parameters.size());
      EXPECT_EQ(state.state.begin()->first, 0);
      EXPECT_EQ(state.state.rbegin()->first, 4);
      EXPECT_EQ(state.state.at(0).at("step").toInt(), 2);
      const auto average = state.state.at(0).at("exp_avg").toTensor().clone();
      optimizer.consolidate_state_dict(to);
      EXPECT_TRUE(at::equal(average, state.state.at(0).at("exp_avg").toTensor()));
    }
  });
}

/// Two rows of the first parameter have gradients, as those of an embedding. Returns them dense.
at::Tensor set_sparse_gradient(const at::Tensor& parameter, int step) {
  const auto rows = at::tensor({step % 3, 3 + step % 4}, at::kLong).view({1, 2});
  const auto values = at::arange(10.0, at::kFloat).view({2, 5}).add_(step);
  const auto gradient = at::sparse_coo_tensor(rows, values, parameter.sizes());
  parameter.mutable_grad() = gradient;
  return gradient.to_dense();
}

// ZERO-35, ZERO-38, ZERO-70: of momenta that began as sparse gradients
TEST(ZeroState, OfSparseGradientsIsSavedAndLoaded) {
  on_ranks(
      [](const World& world) {
        const testing::TempDir folder;
        const auto path = broadcast_object(folder.file("state"), 0, world.group());
        using Sgd = optim::SGD;
        for (const bool nesterov : {false, true}) {
          const Sgd::Options options{.lr = 0.1, .momentum = 0.9, .nesterov = nesterov};
          const auto made = [&] { return parameters_of({{7, 5}, {2}}); };
          const auto expected = made();
          Sgd plain(expected, options);
          const auto train = [&](torch::optim::Optimizer& optimizer, const std::vector<at::Tensor>& parameters,
                                 int from) {
            for (int step = from; step < from + 2; ++step) {
              set_sparse_gradient(parameters[0], step);
              parameters[1].mutable_grad() = at::ones({2});
              optimizer.step();
            }
          };
          const auto train_plain = [&](int from) {
            for (int step = from; step < from + 2; ++step) {
              expected[0].mutable_grad() = set_sparse_gradient(expected[0], step);
              expected[1].mutable_grad() = at::ones({2});
              plain.step();
            }
          };
          const auto parameters = made();
          ZeroRedundancyOptimizer<Sgd> optimizer(parameters, options, world.group());
          train(optimizer, parameters, 0);
          train_plain(0);
          EXPECT_GE(optimizer.memory_report().state, 0);
          const auto dict = shared_state(optimizer, world);
          expect_same_state(dict, state_dict_of(plain), {1e-6});
          const auto file = path + ".pt";
          if (world.rank() == 0) torch::save(optimizer, file);
          save_sharded(optimizer, path);
          const auto values = copies_of(parameters);
          train_plain(2);
          const auto goes_on = [&](const std::string& how, const std::function<void(ZeroOptimizer&)>& load) {
            const auto loaded = copies_of(values);
            ZeroRedundancyOptimizer<Sgd> other(loaded, options, world.group());
            load(other);
            train(other, loaded, 2);
            expect_same(loaded, expected, how, {1e-5});
          };
          goes_on("dictionary", [&](ZeroOptimizer& other) { other.load_state_dict(dict); });
          goes_on("archive", [&](ZeroOptimizer& other) { torch::load(other, file); });
          goes_on("files", [&](ZeroOptimizer& other) { load_sharded(other, path); });
          goes_on("chunks", [&](ZeroOptimizer& other) {
            consolidate_in_chunks(optimizer, {.max_bytes = 16});
            barrier(world.group());
            save_in_chunks(optimizer, path, {.max_bytes = 16});
            load_sharded(other, path);
          });
          barrier(world.group());
        }
      },
      {1, 2, 3}, {"threads"});
}

// ZERO-74: who only passes state on to the target holds one rank's share of it, once
TEST(ZeroState, IsNotUnpackedByThoseWhoPassItOn) {
  on_ranks(
      [](const World& world) {
        for (const auto& [name, zero] : ways(world.group())) {
          const auto parameters = parameters_of({{200, 300}, {200, 300}, {200, 300}});
          Zero optimizer(parameters, {}, zero);
          train(optimizer, parameters, 1);
          const auto share = optimizer.memory_report().state;
          const testing::MemoryProbe probe;
          optimizer.consolidate_state_dict(0);
          constexpr int64_t kDescriptions = 16 << 10;
          if (world.rank() > 0) {
            EXPECT_LE(probe.total().peak_bytes, share + kDescriptions) << name;
          }
        }
      },
      {3}, {"threads"});
}

// ZERO-37: an archive of an old consolidation says how old it is
TEST(ZeroState, ThatIsOldIsSavedWithAWarning) {
  on_ranks(
      [](const World& world) {
        const auto parameters = parameters_of(kShapes);
        Zero optimizer(parameters, {}, world.group());
        train(optimizer, parameters, 1);
        optimizer.consolidate_state_dict();
        if (world.rank() > 0) return train(optimizer, parameters, 3);
        const auto saves = [&] {
          std::ostringstream out;
          torch::save(optimizer, out);
        };
        const ddp_models::Warnings warnings;
        saves();
        EXPECT_EQ(warnings.count("steps ago"), 0);
        train(optimizer, parameters, 3);
        saves();
        EXPECT_EQ(warnings.count("the state is that of 3 steps ago: consolidate_state_dict() first"), 1);
      },
      {1, 2}, {"threads"});
}

// ZERO-37
TEST(ZeroState, StaysAsItWasWhenTrainingGoesOn) {
  on_ranks([](const World& world) {
    for (const auto& [name, zero] : ways(world.group())) {
      const auto parameters = parameters_of(kShapes);
      Zero optimizer(parameters, {}, zero);
      train(optimizer, parameters, 2);
      optimizer.consolidate_state_dict();
      std::optional<NamedValues> before;
      if (world.rank() == 0) before = copied_to(optimizer.state_dict().state.at(1), at::kCPU);
      train(optimizer, parameters, 1, 2);
      if (before) expect_same_values(optimizer.state_dict().state.at(1), *before, name);
    }
  });
}

// ZERO-36
TEST(ZeroState, IsSentByTheOtherRanksOnly) {
  on_ranks([](const World& world) {
    const auto parameters = parameters_of(kShapes);
    Zero optimizer(parameters, {}, world.group());
    train(optimizer, parameters, 1);
    const Recorder recorder;
    optimizer.consolidate_state_dict(0);
    const auto launches = recorder.events("launch");
    EXPECT_EQ(launches.size(), 2U * (world.world_size() - 1)) << "a length and bytes for each of W-1 objects";
    for (const auto& event : launches) EXPECT_EQ(event.kind, "broadcast");
    for (const int to : {-1, world.world_size()}) {
      expect_error([&] { optimizer.consolidate_state_dict(to); },
                   {str("rank ", to), str("a group of ", world.world_size())});
    }
    EXPECT_EQ(recorder.events("launch").size(), launches.size());
  });
}

// ZERO-38
TEST(ZeroState, LoadsWithItsOptions) {
  on_ranks([](const World& world) {
    for (const auto& [name, zero] : ways(world.group())) {
      const auto x = at::ones({1}).requires_grad_();
      const auto gradient = [&](const at::Tensor& parameter) { parameter.mutable_grad() = at::ones({1}); };
      ZeroRedundancyOptimizer<SGD> optimizer({x}, SGDOptions(0.1).momentum(0.9), zero);
      gradient(x);
      optimizer.step();
      EXPECT_FLOAT_EQ(x.item<float>(), 0.9F);
      const auto state = shared_state(optimizer, world);
      EXPECT_FLOAT_EQ(state.state.at(0).at("momentum_buffer").toTensor().item<float>(), 1);

      ZeroRedundancyOptimizer<SGD> other({x}, SGDOptions(0.01), zero);
      const auto& options = static_cast<SGDOptions&>(other.param_groups()[0].options());
      const auto copy = state;
      other.load_state_dict(state);
      expect_same_state(state, copy);
      EXPECT_EQ(options.lr(), 0.1);
      EXPECT_EQ(options.momentum(), 0.9);
      EXPECT_EQ(other.local_optimizer().param_groups()[0].options().get_lr(), 0.1);
      gradient(x);
      other.step();
      EXPECT_FLOAT_EQ(x.item<float>(), 0.71F) << name;
      EXPECT_FLOAT_EQ(shared_state(other, world).state.at(0).at("momentum_buffer").toTensor().item<float>(), 1.9F);
      EXPECT_FLOAT_EQ(state.state.at(0).at("momentum_buffer").toTensor().item<float>(), 1) << "it was copied";
    }
  });
}

// ZERO-38
TEST(ZeroState, IsKeptForOwnParametersOnly) {
  on_ranks([](const World& world) {
    const auto parameters = parameters_of(kShapes);
    Adam plain(copies_of(parameters));
    train(plain, plain.parameters(), 2);
    Zero optimizer(parameters, {}, world.group());
    optimizer.load_state_dict(state_dict_of(plain));
    const auto own = optimizer.partition().partition()[world.rank()][0].params().size();
    EXPECT_EQ(optimizer.local_optimizer().state().size(), own);
  });
}

// ZERO-39
TEST(ZeroState, ThatDoesNotFitIsRefused) {
  on_ranks([](const World& world) {
    for (const auto& [name, zero] : ways(world.group())) {
      const auto parameters = parameters_of(kShapes);
      Zero optimizer(parameters, {0.5}, zero);
      train(optimizer, parameters, 2);
      const auto good = shared_state(optimizer, world);
      const auto refuses = [&](const OptimizerStateDict& dict, const std::vector<std::string>& words) {
        expect_error([&] { optimizer.load_state_dict(dict); }, words);
        EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 0.5);
        const auto now = shared_state(optimizer, world);
        expect_same_state(now, good);
      };
      auto bad = good;
      // Of a wider model, and of another kind of optimizer.
      for (auto& [key, value] : bad.state.at(0)) {
        if (value.isTensor() && value.toTensor().dim() > 0) value = at::cat({value.toTensor(), value.toTensor()});
      }
      refuses(bad, {"parameter 0 has sizes", "another model"});
      for (auto& [index, values] : bad.state) values = {{"momentum_buffer", at::ones(kShapes[index])}};
      refuses(bad, {"does not fit", "another optimizer"});
      bad = good;
      bad.param_groups[0].options["lr"] = 0.25;
      bad.state[5] = bad.state[0];
      refuses(bad, {"5 parameters", "state of parameter 5"});
      bad.state.erase(5);
      bad.param_groups.push_back(bad.param_groups[0]);
      refuses(bad, {"with 1 parameter groups was given the state of 2"});
      bad.param_groups.pop_back();
      bad.param_groups[0].params.pop_back();
      refuses(bad, {"5 parameters in group 0 was given the state of 4"});
      bad = good;
      bad.param_groups[0].options["lr"] = "fast";
      expect_error([&] { optimizer.load_state_dict(bad); }, {});
      expect_same_state(shared_state(optimizer, world), good);
      bad = good;
      for (auto& [index, values] : bad.state) values.erase("step");
      expect_error([&] { optimizer.load_state_dict(bad); }, {"does not fit"});
      expect_same_state(shared_state(optimizer, world), good);
      train(optimizer, parameters, 1, 2);

      optimizer.consolidate_state_dict();
      optimizer.load_state_dict(good);
      expect_error([&] { optimizer.state_dict(); }, {"not consolidated"});
    }
  });
}

// ZERO-39: a rank without a share refuses what the others do
TEST(ZeroState, ThatDoesNotFitIsRefusedByRanksWithoutAShare) {
  on_ranks(
      [](const World& world) {
        for (const auto& [name, zero] : ways(world.group())) {
          const auto parameters = parameters_of({{3}, {2}});
          Zero optimizer(parameters, {}, zero);
          train(optimizer, parameters, 2);
          const auto good = shared_state(optimizer, world);
          auto bad = good;
          for (auto& [index, values] : bad.state) values.erase("step");
          expect_error([&] { optimizer.load_state_dict(bad); }, {"does not fit"});
          bad = good;
          bad.state[2] = bad.state[0];
          expect_error([&] { optimizer.load_state_dict(bad); }, {"2 parameters", "state of parameter 2"});
          expect_same_state(shared_state(optimizer, world), good);
          train(optimizer, parameters, 1, 2);
        }
      },
      {4}, {"threads"});
}

// ZERO-40
TEST(ZeroState, IsThatOfTheUnshardedOptimizerBothWays) {
  on_ranks([](const World& world) {
    for (const auto& [from_name, from] : ways(world.group())) {
      for (const auto& [to_name, to] : ways(world.group())) {
        const auto expected = parameters_of(kShapes);
        Adam plain(expected);
        const auto parameters = copies_of(expected);
        Zero first(parameters, {}, from);
        train(plain, expected, 3);
        train(first, parameters, 3);
        const auto state = shared_state(first, world);
        // Into an unsharded one.
        const auto unsharded = copies_of(parameters);
        Adam other(unsharded, 0.5);
        load_state_dict(other, state);
        // Into one that divides otherwise.
        const auto again = copies_of(parameters);
        Zero second(again, {0.5}, to);
        second.load_state_dict(state);
        // From the unsharded one.
        const auto third_parameters = copies_of(parameters);
        Zero third(third_parameters, {0.5}, to);
        third.load_state_dict(state_dict_of(plain));
        train(plain, expected, 2, 3);
        train(other, unsharded, 2, 3);
        train(second, again, 2, 3);
        train(third, third_parameters, 2, 3);
        expect_same(unsharded, expected, from_name);
        expect_same(again, expected, from_name + " to " + to_name);
        expect_same(third_parameters, expected, to_name);
      }
    }
  });
}

// ZERO-40
TEST(ZeroState, MovesBetweenNumbersOfRanks) {
  const auto expected = parameters_of(kShapes);
  Adam plain(expected);
  auto values = copies_of(expected);
  OptimizerStateDict state = state_dict_of(plain);
  int steps = 0;
  for (const int world_size : {2, 4, 1, 3}) {
    train(plain, expected, 2, steps);
    std::vector<at::Tensor> values_after;
    OptimizerStateDict state_after;
    testing::run_threads_in_gtest({.world_size = world_size}, [&](const World& world) {
      const auto all = ways(world.group());
      const auto parameters = copies_of(values);
      Zero optimizer(parameters, {}, all[steps / 2 % 3].second);
      optimizer.load_state_dict(state);
      train(optimizer, parameters, 2, steps);
      optimizer.consolidate_state_dict();
      if (world.rank() != 0) return;
      values_after = copies_of(parameters);
      state_after = optimizer.state_dict();
    });
    values = std::move(values_after);
    state = std::move(state_after);
    steps += 2;
    expect_same(values, expected);
    expect_same_state(state, state_dict_of(plain));
  }
}

template <class Object>
std::string saved(const Object& object) {
  std::ostringstream out;
  torch::save(object, out);
  return std::move(out).str();
}

template <class Object>
void load_saved(Object& object, const std::string& bytes) {
  std::istringstream in(bytes);
  torch::load(object, in);
}

// ZERO-41
TEST(ZeroState, FilesOpenInThePlainOptimizerAndTheOtherWayRound) {
  on_ranks([](const World& world) {
    for (const auto& [name, zero] : ways(world.group())) {
      const auto expected = parameters_of(kShapes);
      Adam plain(expected, 0.5);
      const auto parameters = copies_of(expected);
      Zero optimizer(parameters, {0.5}, zero);
      if (world.rank() == 0)
        expect_error([&] { saved(static_cast<torch::optim::Optimizer&>(optimizer)); }, {"not consolidated"});
      train(plain, expected, 2);
      train(optimizer, parameters, 2);
      optimizer.consolidate_state_dict();
      if (world.rank() == 0) {
        Adam opened(expected);
        load_saved(opened, saved(static_cast<torch::optim::Optimizer&>(optimizer)));
        expect_same_state(state_dict_of(opened), state_dict_of(plain));
      }
      const auto others = copies_of(parameters);
      Zero back(others, {}, zero);
      load_saved(static_cast<torch::optim::Optimizer&>(back), saved(static_cast<torch::optim::Optimizer&>(plain)));
      EXPECT_EQ(back.param_groups()[0].options().get_lr(), 0.5);
      train(plain, expected, 2, 2);
      train(back, others, 2, 2);
      expect_same(others, expected, name);
      expect_error([&] { load_saved(static_cast<torch::optim::Optimizer&>(back), saved(at::ones({2}))); }, {});
    }
  });
}

// ZERO-42
TEST(ZeroState, IsCopiedThroughListsTuplesAndDictionaries) {
  const auto tensor = at::arange(3);
  c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
  dict.insert("number", 4);
  dict.insert("tuple", c10::ivalue::Tuple::create({tensor, "text"}));
  c10::List<at::Tensor> list({tensor, tensor});
  dict.insert("list", list);
  const auto copy = copied_to(dict, at::kCPU).toGenericDict();
  tensor.fill_(9);
  EXPECT_EQ(copy.at("number").toInt(), 4);
  const auto pair = copy.at("tuple").toTupleRef().elements().vec();
  EXPECT_EQ(pair[1].toStringRef(), "text");
  EXPECT_TRUE(at::equal(pair[0].toTensor(), at::arange(3)));
  const auto copies = copy.at("list").toTensorVector();
  ASSERT_EQ(copies.size(), 2U);
  EXPECT_TRUE(at::equal(copies[1], at::arange(3)));
  EXPECT_FALSE(copies[0].is_alias_of(copies[1])) << "aliases become two copies";
}

// ZERO-43
TEST(ZeroState, ObjectsReachAllRanks) {
  on_ranks([](const World& world) {
    for (int root = 0; root < world.world_size(); ++root) {
      c10::impl::GenericDict dict(c10::IntType::get(), c10::AnyType::get());
      if (world.rank() == root) {
        dict.insert(7, at::arange(5));
        dict.insert(9, "text");
      }
      const auto empty = broadcast_value(c10::IValue(), root, world.group(), at::kCPU);
      EXPECT_TRUE(empty.isNone());
      EXPECT_EQ(broadcast_value(c10::IValue(world.rank() == root ? "" : "other"), root, world.group(), at::kCPU)
                    .toStringRef(),
                "");
      const auto received = broadcast_value(dict, root, world.group(), at::kCPU).toGenericDict();
      EXPECT_EQ(received.size(), 2U);
      EXPECT_TRUE(at::equal(received.at(7).toTensor(), at::arange(5)));
      EXPECT_EQ(received.at(9).toStringRef(), "text");
    }
    if (world.world_size() > 1) {
      const Recorder sent;
      broadcast_value(c10::IValue("text"), 0, world.group(), at::kCPU);
      const auto launches = sent.events("launch");
      ASSERT_EQ(launches.size(), 2U);
      EXPECT_EQ(launches[0].bytes, 8U) << "the length";
      EXPECT_EQ(launches[0].dtype, "Long");
      EXPECT_EQ(launches[1].dtype, "Byte");
    }
    const Recorder recorder;
    for (const int root : {-1, world.world_size()}) {
      expect_error([&] { broadcast_value(c10::IValue(1), root, world.group(), at::kCPU); },
                   {str("rank ", root, " is not in the group"), str(world.world_size(), " ranks")});
    }
    EXPECT_TRUE(recorder.events().empty());
  });
}

}  // namespace
}  // namespace lockstep::state_test
