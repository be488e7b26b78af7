// A checkpoint that was written in any layout is read in any other, value by value.
#include <mutex>

#include "lockstep/testing/temp_dir.h"
#include "tests/support/checkpoint_runs.h"

namespace lockstep::checkpoint_layouts_test {

using namespace checkpoint_runs;

void on_ranks(int world_size, const testing::RankBody& body) {
  testing::run_threads_in_gtest({.world_size = world_size}, body);
}

/// One process that did what the run did.
struct Whole {
  explicit Whole(uint64_t seed) : model(net(seed)), optimizer(unique_parameters(*model), optimizer_options()) {}
  void step() { checkpoint_runs::step(model, optimizer); }
  dcp::State state() {
    dcp::State state;
    state.add("model", model).add("optimizer", optimizer, model);
    return state;
  }
  Net model;
  optim::AdamW optimizer;
};

void expect_same(const Whole& actual, const Whole& expected, const std::string& what) {
  const auto wanted = expected.model->named_parameters();
  for (const auto& item : actual.model->named_parameters()) {
    EXPECT_TRUE(item.value().equal(wanted[item.key()])) << what << ": " << item.key();
  }
  const auto buffers = expected.model->named_buffers();
  for (const auto& item : actual.model->named_buffers()) {
    EXPECT_TRUE(item.value().equal(buffers[item.key()])) << what << ": " << item.key();
  }
  const auto state = state_dict_of(actual.optimizer);
  const auto wanted_state = state_dict_of(expected.optimizer);
  ASSERT_EQ(state.state.size(), wanted_state.state.size()) << what;
  for (const auto& [index, values] : wanted_state.state) {
    for (const auto& [name, value] : values) {
      const auto& other = state.state.at(index).at(name);
      const bool is_same = value.isTensor() ? !value.toTensor().defined() || value.toTensor().equal(other.toTensor())
                                            : value.toScalar().toDouble() == other.toScalar().toDouble();
      EXPECT_TRUE(is_same) << what << ": " << name << " of parameter " << index;
    }
  }
}

/// Saved by every layout on 1 to 4 ranks, loaded by every layout on 1 to 4 ranks, saved again, and read by one process.
class Matrix : public ::testing::TestWithParam<std::string> {};

// TP-56, ZERO-70
TEST_P(Matrix, IsReadByAllOthers) {
  const testing::TempDir folder;
  Whole expected(1);
  expected.step();
  expected.step();
  for (const int ranks : {1, 2, 3, 4}) {
    const auto path = folder.file("from" + std::to_string(ranks));
    on_ranks(ranks, [&](const World& world) {
      TrainingRun run(GetParam(), world, 1);
      run.step();
      run.step();
      dcp::save(path, run.state(), {.step = 2});
    });
    Whole whole(2);
    EXPECT_EQ(dcp::load(path, whole.state()).step, 2);
    expect_same(whole, expected, str(GetParam(), " on ", ranks));
  }
  for (const auto& other : layouts()) {
    for (const int ranks : {1, 2, 3, 4}) {
      const auto again = folder.file("again");
      on_ranks(ranks, [&](const World& world) {
        for (const int from : {1, 2, 3, 4}) {
          TrainingRun run(other, world, 2);
          if (from == 2) run.step();  // state is replaced
          dcp::load(folder.file("from" + std::to_string(from)), run.state());
          dcp::save(again + std::to_string(from), run.state());
        }
      });
      for (const int from : {1, 2, 3, 4}) {
        Whole whole(3);
        dcp::load(again + std::to_string(from), whole.state());
        expect_same(whole, expected, str(GetParam(), " on ", from, " to ", other, " on ", ranks));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Checkpoints, Matrix, ::testing::ValuesIn(layouts()), [](const auto& test) {
  auto name = test.param;
  std::erase_if(name, [](char letter) { return letter == ' ' || letter == '-'; });
  return name;
});

}  // namespace lockstep::checkpoint_layouts_test
