// Every operation, dtype and reduction over shared memory, with the same inputs as gloo and against a model: each rank
// knows all ranks' inputs and computes what it must hold, in rank order. The model must be met bit for bit; gloo, which
// adds in another order and rounds half types after each step, within a tolerance unless data only moves.
#include <set>

#include "lockstep/lockstep.h"
#include "lockstep/testing/gtest.h"
#include "tests/support/reduction_model.h"

namespace lockstep {
namespace {

using reduction_model::factor_of;
using reduction_model::has_meaning;
using reduction_model::have_same_bits;
using reduction_model::input_of;
using reduction_model::model_of;
using testing::CheckFailure;

const std::vector<at::ScalarType> kDtypes = {at::kFloat, at::kDouble, at::kHalf,         at::kBFloat16,
                                             at::kChar,  at::kShort,  at::kInt,          at::kLong,
                                             at::kByte,  at::kBool,   at::kComplexFloat, at::kComplexDouble};
const std::vector<ReduceOp> kOps = {ReduceOp::SUM, ReduceOp::AVG,  ReduceOp::PRODUCT, ReduceOp::MIN,
                                    ReduceOp::MAX, ReduceOp::BAND, ReduceOp::BOR,     ReduceOp::BXOR};
const std::vector<int64_t> kSizes = {0, 1, 7, 1000, 40'003};
// Of floats: more than the steps that can be under way at once carry.
constexpr int64_t kManyChunks = 700'001;

// ---- Comparing

/// Five numbers below 2 are added in another order, and half types rounded each time.
testing::Tolerance tolerance_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
    case at::kComplexFloat:
      return {.relative = 1e-5, .absolute = 1e-5};
    case at::kDouble:
    case at::kComplexDouble:
      return {.relative = 1e-13, .absolute = 1e-13};
    case at::kHalf:
      return {.relative = 5e-3, .absolute = 2e-2};
    case at::kBFloat16:
      return {.relative = 5e-2, .absolute = 1e-1};
    default:
      return testing::Tolerance::exact();
  }
}

/// One rank's two groups of the same ranks.
class Contest {
 public:
  explicit Contest(const World& world)
      : rank(world.rank()),
        ranks(world.world_size()),
        gloo_(new_group(world.group(), all_ranks(), {.backend = "gloo"})),
        shm_(new_group(world.group(), all_ranks(), {.backend = "shm"})) {}

  const int rank;
  const int ranks;

  const GroupPtr& shm() const { return shm_; }

  /// Inputs of all ranks, by rank.
  std::vector<at::Tensor> inputs(int64_t size, at::ScalarType dtype, int salt = 0) const {
    std::vector<at::Tensor> all;
    for (int each = 0; each < ranks; ++each) all.push_back(input_of(each, size, dtype, salt));
    return all;
  }

  /// Runs what `make` makes once on each side. `expected` is what this rank's results must be, if they are defined.
  void run(const std::function<Call()>& make, const std::vector<at::Tensor>& expected) {
    auto call = make();
    const auto text = call.describe();
    call.is_async = ++calls_ % 2 == 0;
    if (call.op == ReduceOp::PREMUL_SUM) call.factor = factor_of(rank);
    launch(call, shm_).wait();
    for (std::size_t i = 0; i < expected.size(); ++i) {
      if (have_same_bits(call.results().at(i), expected[i])) continue;
      testing::check_equal("shm: " + text, comparable(call.results()[i]), comparable(expected[i]));
      throw CheckFailure("shm: " + text + ": equal, but not in sizes or bits");
    }
    const auto other = make();
    if (!runs_on_gloo(other)) return;
    const auto tolerance =
        is_reduction(call.kind) ? tolerance_of(call.subjects()[0].scalar_type()) : testing::Tolerance::exact();
    for (std::size_t i = 0; i < expected.size(); ++i) {
      testing::check_equal("gloo: " + text, comparable(call.results()[i]), comparable(other.results()[i]), tolerance);
    }
  }

  /// What gloo was asked for and could not do.
  const std::set<std::string>& refused() const { return refused_; }

 private:
  std::vector<int> all_ranks() const {
    std::vector<int> all;
    for (int each = 0; each < ranks; ++each) all.push_back(each);
    return all;
  }

  static at::Tensor comparable(const at::Tensor& tensor) {
    return tensor.is_complex() ? at::view_as_real(tensor) : tensor;
  }

  /// Below the library, to which an error of gloo's is the end of the group.
  bool runs_on_gloo(const Call& call) {
    auto effective = call;
    if (call.op == ReduceOp::AVG) effective.op = ReduceOp::SUM;
    try {
      dispatch(*gloo_->getBackend(at::kCPU), effective)->wait();
    } catch (const std::exception&) {
      const auto dtype = call.subjects()[0].scalar_type();
      refused_.insert(std::string(name_of(call.kind)) + " " + c10::toString(dtype) + " " + name_of(call.op));
      return false;
    }
    if (call.op == ReduceOp::AVG) divide_by_ranks(call.results(), ranks);
    return true;
  }

  // Not the world's: gloo's barrier fails too if it finds a call that failed just before still in its queue.
  const GroupPtr gloo_;
  const GroupPtr shm_;
  int calls_ = 0;
  std::set<std::string> refused_;
};

// ---- The operations

std::vector<at::Tensor> empty_like_each(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> empty;
  for (const auto& tensor : tensors) empty.push_back(at::empty_like(tensor));
  return empty;
}

void check_all_reduce(Contest& contest, int64_t size, at::ScalarType dtype, ReduceOp op) {
  const auto inputs = contest.inputs(size, dtype);
  contest.run([&] { return Call{.kind = CallKind::kAllReduce, .inputs = {inputs[contest.rank].clone()}, .op = op}; },
              {model_of(inputs, op)});
}

void check_reduce(Contest& contest, int64_t size, at::ScalarType dtype, ReduceOp op, int root) {
  const auto inputs = contest.inputs(size, dtype);
  std::vector<at::Tensor> expected;
  if (contest.rank == root) expected.push_back(model_of(inputs, op));
  contest.run(
      [&] { return Call{.kind = CallKind::kReduce, .inputs = {inputs[contest.rank].clone()}, .op = op, .root = root}; },
      expected);
}

/// As a list, as one tensor, and two tensors in one call.
void check_reduce_scatter(Contest& contest, int64_t size, at::ScalarType dtype, ReduceOp op) {
  const auto pieces_of_rank = [&](int rank, int salt) {
    std::vector<at::Tensor> pieces;
    for (int to = 0; to < contest.ranks; ++to) pieces.push_back(input_of(rank, size + salt, dtype, 100 * salt + to));
    return pieces;
  };
  const auto expected = model_of(contest.inputs(size, dtype, contest.rank), op);
  const auto second = model_of(contest.inputs(size + 1, dtype, 100 + contest.rank), op);
  const auto pieces = pieces_of_rank(contest.rank, 0);
  contest.run(
      [&] {
        return Call{
            .kind = CallKind::kReduceScatter, .inputs = pieces, .outputs = {at::empty_like(expected)}, .op = op};
      },
      {expected});
  const auto whole = at::cat(pieces);
  contest.run(
      [&] {
        return Call{
            .kind = CallKind::kReduceScatterSingle, .inputs = {whole}, .outputs = {at::empty_like(expected)}, .op = op};
      },
      {expected});
  contest.run(
      [&] {
        return Call{.kind = CallKind::kReduceScatterSingle,
                    .inputs = {whole, at::cat(pieces_of_rank(contest.rank, 1))},
                    .outputs = {at::empty_like(expected), at::empty_like(second)},
                    .op = op};
      },
      {expected, second});
}

void check_all_reduce_coalesced(Contest& contest, at::ScalarType dtype, ReduceOp op) {
  std::vector<at::Tensor> mine;
  std::vector<at::Tensor> expected;
  for (const int64_t size : {1000, 0, 7, 20'011}) {
    mine.push_back(input_of(contest.rank, size, dtype));
    expected.push_back(model_of(contest.inputs(size, dtype), op));
  }
  contest.run(
      [&] {
        Call call{.kind = CallKind::kAllReduce, .op = op};
        for (const auto& tensor : mine) call.inputs.push_back(tensor.clone());
        return call;
      },
      expected);
}

void check_all_gather(Contest& contest, int64_t size, at::ScalarType dtype) {
  const auto inputs = contest.inputs(size, dtype);
  const auto others = contest.inputs(size + 3, dtype);
  const auto mine = inputs[contest.rank];
  contest.run([&] { return Call{.kind = CallKind::kAllGather, .inputs = {mine}, .outputs = empty_like_each(inputs)}; },
              inputs);
  const auto whole = at::cat(inputs);
  contest.run(
      [&] { return Call{.kind = CallKind::kAllGatherSingle, .inputs = {mine}, .outputs = {at::empty_like(whole)}}; },
      {whole});
  const std::vector<at::Tensor> both = {whole, at::cat(others)};
  contest.run(
      [&] {
        return Call{.kind = CallKind::kAllGatherSingle,
                    .inputs = {mine, others[contest.rank]},
                    .outputs = empty_like_each(both)};
      },
      both);
}

/// Lists of two tensors in one call.
void check_all_gather_coalesced(Contest& contest, int64_t size, at::ScalarType dtype) {
  const auto first = contest.inputs(size, dtype);
  const auto second = contest.inputs(size + 3, dtype);
  std::vector<at::Tensor> expected;
  for (int rank = 0; rank < contest.ranks; ++rank) expected.insert(expected.end(), {first[rank], second[rank]});
  contest.run(
      [&] {
        return Call{.kind = CallKind::kAllGather,
                    .inputs = {first[contest.rank], second[contest.rank]},
                    .outputs = empty_like_each(expected)};
      },
      expected);
}

void check_rooted(Contest& contest, int64_t size, at::ScalarType dtype, int root) {
  const auto inputs = contest.inputs(size, dtype);
  const auto mine = inputs[contest.rank];
  const bool is_root = contest.rank == root;
  contest.run([&] { return Call{.kind = CallKind::kBroadcast, .inputs = {mine.clone()}, .root = root}; },
              {inputs[root]});
  const auto at_root = is_root ? inputs : std::vector<at::Tensor>{};
  contest.run(
      [&] {
        return Call{.kind = CallKind::kGather, .inputs = {mine}, .outputs = empty_like_each(at_root), .root = root};
      },
      at_root);
  contest.run(
      [&] {
        return Call{.kind = CallKind::kScatter, .inputs = at_root, .outputs = {at::empty_like(mine)}, .root = root};
      },
      {mine});
}

void check_all_to_all(Contest& contest, int64_t size, at::ScalarType dtype) {
  // What `from` sends to `to`: equal pieces, or of as many elements more as the two numbers say.
  const auto piece = [&](int from, int to, bool is_uneven) {
    return input_of(from, size + (is_uneven ? from + to : 0), dtype, to);
  };
  for (const bool is_uneven : {false, true}) {
    std::vector<at::Tensor> sent;
    std::vector<at::Tensor> expected;
    std::vector<int64_t> splits;
    for (int other = 0; other < contest.ranks; ++other) {
      sent.push_back(piece(contest.rank, other, is_uneven));
      expected.push_back(piece(other, contest.rank, is_uneven));
      splits.push_back(sent.back().size(0));
    }
    contest.run([&] { return Call{.kind = CallKind::kAllToAll, .inputs = sent, .outputs = empty_like_each(expected)}; },
                expected);
    const auto whole = at::cat(expected);
    contest.run(
        [&] {
          Call call{.kind = CallKind::kAllToAllSingle, .inputs = {at::cat(sent)}, .outputs = {at::empty_like(whole)}};
          // Counted alike in both directions.
          if (is_uneven) call.input_splits = call.output_splits = splits;
          return call;
        },
        {whole});
  }
}

// ---- What has no meaning

/// One rank asks alone: were anything sent before the refusal, the others would notice.
void check_refused(Contest& contest, at::ScalarType dtype, ReduceOp op) {
  const auto tensor = input_of(contest.rank, 7 * contest.ranks, dtype);
  const auto before = tensor.clone();
  const auto output = at::zeros({7}, tensor.options());
  const auto pieces = tensor.split(7);
  if (contest.rank == static_cast<int>(op) % contest.ranks) {
    for (const auto& call :
         {Call{.kind = CallKind::kAllReduce, .inputs = {tensor}, .op = op},
          Call{.kind = CallKind::kReduce, .inputs = {tensor}, .op = op},
          Call{.kind = CallKind::kReduceScatter, .inputs = pieces, .outputs = {output}, .op = op},
          Call{.kind = CallKind::kReduceScatterSingle, .inputs = {tensor}, .outputs = {output}, .op = op}}) {
      EXPECT_THROW(launch(call, contest.shm()).wait(), c10::Error) << call.describe();
    }
  }
  EXPECT_TRUE(have_same_bits(tensor, before)) << name_of(op) << " of " << c10::toString(dtype);
  check_all_reduce(contest, 7, dtype, ReduceOp::SUM);
}

class ShmAgainstGloo : public ::testing::TestWithParam<int> {};

void check_reductions(Contest& contest, at::ScalarType dtype, ReduceOp op) {
  for (const auto size : kSizes) {
    // Large worlds are slow on gloo, and small sizes say nothing new there about another reduction.
    if (contest.ranks > 3 && op != ReduceOp::SUM && size != 7 && size != 40'003) continue;
    check_all_reduce(contest, size, dtype, op);
  }
  check_all_reduce_coalesced(contest, dtype, op);
  // Each size with some of the reductions, the chunks being the same for all.
  constexpr int64_t kSomeSizes[] = {7, 1000, 0};
  const auto size = kSomeSizes[(static_cast<int>(op) + static_cast<int>(dtype)) % 3];
  check_reduce(contest, size, dtype, op, static_cast<int>(op) % contest.ranks);
  check_reduce_scatter(contest, size, dtype, op);
}

TEST_P(ShmAgainstGloo, GivesTheSameForEveryReduction) {
  testing::run_processes_in_gtest({.world_size = GetParam(), .backend = "gloo"}, [](const World& world) {
    Contest contest(world);
    for (const auto dtype : kDtypes) {
      for (const auto op : kOps) {
        if (has_meaning(op, dtype)) check_reductions(contest, dtype, op);
      }
      for (int root = 0; root < contest.ranks; ++root) check_reduce(contest, 40'003, dtype, ReduceOp::SUM, root);
      check_reduce_scatter(contest, 40'003, dtype, ReduceOp::SUM);
    }
    check_all_reduce(contest, kManyChunks, at::kFloat, ReduceOp::SUM);
    check_reduce_scatter(contest, kManyChunks, at::kFloat, ReduceOp::SUM);
    // Were gloo to refuse everything, this test would compare nothing.
    for (const auto& what : contest.refused()) EXPECT_EQ(what.find(" Float sum"), std::string::npos) << what;
  });
}

TEST_P(ShmAgainstGloo, GivesTheSameWhereDataOnlyMoves) {
  testing::run_processes_in_gtest({.world_size = GetParam(), .backend = "gloo"}, [](const World& world) {
    Contest contest(world);
    for (const auto dtype : kDtypes) {
      for (const auto size : kSizes) {
        check_all_gather(contest, size, dtype);
        check_all_gather_coalesced(contest, size, dtype);
        const int roots = size >= 1000 ? contest.ranks : 1;
        for (int root = 0; root < roots; ++root) check_rooted(contest, size, dtype, root);
        check_all_to_all(contest, size, dtype);
      }
    }
    check_all_gather(contest, kManyChunks, at::kFloat);
    check_rooted(contest, kManyChunks, at::kFloat, contest.ranks - 1);
    check_all_to_all(contest, kManyChunks, at::kFloat);
    // Not every release of gloo has the list form of all_to_all.
    for (const auto& what : contest.refused()) {
      EXPECT_TRUE(what.starts_with("all_to_all ") || what.find(" Float") == std::string::npos) << what;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, ShmAgainstGloo, ::testing::Values(1, 2, 3, 5));

/// What gloo does not have. A lone rank has no backend of the name.
class ShmBeyondGloo : public ::testing::TestWithParam<int> {};

TEST_P(ShmBeyondGloo, MultipliesByEachRanksFactorBeforeItAdds) {
  testing::run_processes_in_gtest({.world_size = GetParam(), .backend = "gloo"}, [](const World& world) {
    Contest contest(world);
    for (const auto dtype : kDtypes) {
      if (has_meaning(ReduceOp::PREMUL_SUM, dtype)) check_reductions(contest, dtype, ReduceOp::PREMUL_SUM);
    }
  });
}

TEST_P(ShmBeyondGloo, RefusesReductionsWithoutMeaning) {
  testing::run_processes_in_gtest({.world_size = GetParam(), .backend = "gloo"}, [](const World& world) {
    Contest contest(world);
    auto ops = kOps;
    ops.push_back(ReduceOp::PREMUL_SUM);
    for (const auto dtype : kDtypes) {
      for (const auto op : ops) {
        if (!has_meaning(op, dtype)) check_refused(contest, dtype, op);
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, ShmBeyondGloo, ::testing::Values(2, 3, 5));

}  // namespace
}  // namespace lockstep
