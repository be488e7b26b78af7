// Groups that span hosts. The hosts are pretended: each rank says where it is before the group is made; the launchers'
// tests have real ones, as network namespaces.
#include <signal.h>
#include <stdlib.h>

#include <thread>

#include "lockstep/base/rank_local.h"
#include "lockstep/testing/gtest.h"
#include "tests/support/conformance.h"
#include "tests/support/shm_odd_tensors.h"
#include "tests/support/shm_random.h"

namespace lockstep::hierarchical_test {
namespace {

using testing::expect_error;
using ::testing::HasSubstr;
using namespace std::chrono_literals;

/// The host of every rank.
using Hosts = std::vector<int>;

/// A group of all ranks, each on its host.
GroupPtr group_on(const Hosts& hosts, const World& world, std::chrono::milliseconds timeout = 0ms) {
  ::setenv("LOCKSTEP_HOST_ID", std::to_string(hosts.at(world.rank())).c_str(), 1);
  std::vector<int> all;
  for (int rank = 0; rank < world.world_size(); ++rank) all.push_back(rank);
  return new_group(world.group(), all, {.backend = "shm", .timeout = timeout, .name = "hosts"});
}

std::string backend_name(const GroupPtr& group) {
  return group->getBackend(c10::kCPU)->getBackendName();
}

testing::RunOptions options_for(const Hosts& hosts) {
  return {.world_size = static_cast<int>(hosts.size()), .backend = "gloo"};
}

/// Fails unless all ranks hold the same bits.
void check_same_bits(const char* what, const at::Tensor& tensor, const World& world) {
  const auto flat = tensor.contiguous().view({-1});
  const std::string bytes(static_cast<const char*>(flat.const_data_ptr()), flat.nbytes());
  for (const auto& other : all_gather_object(bytes, world.group())) EXPECT_TRUE(other == bytes) << what;
}

/// What depends on where ranks are: how results come about.
class Hierarchical : public ::testing::TestWithParam<Hosts> {};

/// What happens to a call before and after that, alike wherever ranks are: fewer layouts show it.
class HierarchicalCalls : public ::testing::TestWithParam<Hosts> {};

TEST_P(Hierarchical, ConformsForEveryCollective) {
  testing::run_processes_in_gtest(options_for(GetParam()), [](const World& world) {
    const auto group = group_on(GetParam(), world);
    EXPECT_EQ(backend_name(group), "hierarchical");
    conformance::check_all(conformance::Place(group), at::kCPU);
  });
}

TEST_P(Hierarchical, ReducesEveryDtypeWithEveryOperationThatFits) {
  testing::run_processes_in_gtest(options_for(GetParam()), [](const World& world) {
    const auto group = group_on(GetParam(), world);
    const int ranks = world.world_size();
    for (const auto dtype : {at::kChar, at::kByte, at::kShort, at::kInt}) {
      for (const auto op : conformance::kOps) {
        if (op == ReduceOp::AVG) continue;
        conformance::check_all_reduce(conformance::Place(group), dtype, 31, op, at::kCPU);
      }
      auto bits = at::full({5}, 1 << world.rank(), dtype);
      all_reduce(bits, group, ReduceOp::BOR);
      testing::check_equal("bor", bits, at::full({5}, (1 << ranks) - 1, dtype));
      bits = at::full({5}, 6 | (world.rank() & 1), dtype);
      all_reduce(bits, group, ReduceOp::BAND);
      testing::check_equal("band", bits, at::full({5}, 6, dtype));
      bits = at::full({5}, 1 << world.rank(), dtype);
      all_reduce(bits, group, ReduceOp::BXOR);
      testing::check_equal("bxor", bits, at::full({5}, (1 << ranks) - 1, dtype));
    }
    for (const auto dtype : {at::kComplexFloat, at::kComplexDouble}) {
      auto values = at::full({7}, c10::complex<double>(world.rank(), 1), dtype);
      all_reduce(values, group);
      testing::check_equal(
          "complex", at::view_as_real(values),
          at::view_as_real(at::full({7}, c10::complex<double>(ranks * (ranks - 1) / 2.0, ranks), dtype)));
      expect_error([&] { all_reduce(values, group, ReduceOp::MAX); }, {"Complex", "tensors have no max"});
    }
    auto flags = at::zeros({3}, at::kBool);
    flags[0] = world.rank() == 1;
    flags[1] = true;
    auto any = flags.clone();
    all_reduce(any, group, ReduceOp::MAX);
    all_reduce(flags, group, ReduceOp::MIN);
    testing::check_equal("any", any.to(at::kInt), at::tensor({1, 1, 0}, at::kInt));
    testing::check_equal("all", flags.to(at::kInt), at::tensor({0, 1, 0}, at::kInt));
    expect_error([&] { all_reduce(at::ones({1}), group, ReduceOp::BOR); }, {"Float tensors have no bor"});
  });
}

TEST_P(Hierarchical, MovesDtypesThatGlooDoesNotKnow) {
  testing::run_processes_in_gtest(options_for(GetParam()), [](const World& world) {
    const conformance::Place place(group_on(GetParam(), world));
    for (const auto dtype : {at::kShort, at::kComplexFloat, at::kFloat8_e4m3fn}) {
      conformance::check_broadcast(place, dtype, 31, at::kCPU);
      conformance::check_gathers(place, dtype, 31, at::kCPU);
      conformance::check_gathers_coalesced(place, dtype, at::kCPU);
      conformance::check_all_to_all(place, dtype, 31, at::kCPU);
    }
  });
}

TEST_P(HierarchicalCalls, SendsFromRankToRank) {
  testing::run_processes_in_gtest(options_for(GetParam()), [](const World& world) {
    const auto backend = group_on(GetParam(), world)->getBackend(c10::kCPU);
    const int ranks = world.world_size();
    const int next = (world.rank() + 1) % ranks;
    const int previous = (world.rank() + ranks - 1) % ranks;
    std::vector<at::Tensor> sent = {at::full({3}, world.rank(), at::kFloat)};
    std::vector<at::Tensor> received = {at::empty({3})};
    const auto sending = backend->send(sent, next, 7);
    backend->recv(received, previous, 7)->wait();
    sending->wait();
    testing::check_equal("received", received[0], at::full({3}, previous, at::kFloat));
  });
}

TEST_P(HierarchicalCalls, MultipliesByEachRanksOwnFactor) {
  testing::run_processes_in_gtest(options_for(GetParam()), [](const World& world) {
    const auto group = group_on(GetParam(), world);
    Call call{.kind = CallKind::kAllReduce,
              .inputs = {at::ones({4})},
              .op = ReduceOp::PREMUL_SUM,
              .factor = 1.0 + world.rank()};
    launch(call, group).wait();
    const double sum = world.world_size() * (world.world_size() + 1) / 2.0;
    testing::check_equal("premul_sum", call.inputs[0], at::full({4}, sum, at::kFloat));
  });
}

TEST_P(Hierarchical, GivesAllRanksTheSameBits) {
  testing::run_processes_in_gtest(options_for(GetParam()), [](const World& world) {
    const auto group = group_on(GetParam(), world);
    for (const auto dtype : {at::kFloat, at::kHalf, at::kBFloat16}) {
      for (const int64_t size : {1000, 100'003}) {
        at::manual_seed(world.rank());
        const auto mine = at::randn({size}).to(dtype);
        auto first = mine.clone();
        all_reduce(first, group, ReduceOp::AVG);
        check_same_bits("all_reduce", first, world);
        auto second = mine.clone();
        all_reduce(second, group, ReduceOp::AVG);
        EXPECT_TRUE(first.equal(second)) << "another run, other bits";
      }
    }
  });
}

TEST_P(HierarchicalCalls, LeavesInputsAsTheyAre) {
  testing::run_processes_in_gtest(options_for(GetParam()), [](const World& world) {
    const auto group = group_on(GetParam(), world);
    const int ranks = world.world_size();
    const auto input = at::full({ranks * 2}, world.rank() + 1.0);
    const auto before = input.clone();
    const auto output = at::empty({2});
    reduce_scatter_tensor(output, input, group);
    testing::check_equal("input of reduce_scatter", input, before);
    for (int root = 0; root < ranks; ++root) {
      auto tensor = before.clone();
      reduce(tensor, root, group);
      if (world.rank() != root) testing::check_equal("input of reduce", tensor, before);
    }
  });
}

TEST_P(HierarchicalCalls, RunsLaunchedCallsInOrder) {
  testing::run_processes_in_gtest(options_for(GetParam()), [](const World& world) {
    const auto group = group_on(GetParam(), world);
    auto tensor = at::ones({1000});
    std::vector<Pending> pending;
    for (int i = 0; i < 5; ++i) pending.push_back(launch_all_reduce(tensor, group));
    pending.back().future()->wait();
    for (auto& each : pending) each.wait();
    testing::check_equal("sum of sums", tensor, at::full({1000}, std::pow(world.world_size(), 5), at::kFloat));
  });
}

/// A world of its own, whose group is hierarchical.
void in_hierarchical_world(const World& outer, const Hosts& hosts, const std::function<void(const World&)>& body) {
  RankScope scope;
  const EnterRank enter(scope);
  ::setenv("LOCKSTEP_HOST_ID", std::to_string(hosts.at(outer.rank())).c_str(), 1);
  const auto world = init({.rank = outer.rank(), .world_size = outer.world_size(), .store = outer.store()});
  EXPECT_EQ(backend_name(world.group()), "hierarchical");
  body(world);
}

TEST_P(HierarchicalCalls, TakesExpandedAndOverlappingTensors) {
  testing::run_processes_in_gtest(options_for(GetParam()), [](const World& outer) {
    in_hierarchical_world(outer, GetParam(), shm_odd_tensors::check_all);
  });
}

TEST_P(Hierarchical, GivesWhatTheModelGivesForRandomSequences) {
  testing::run_processes_in_gtest(options_for(GetParam()), [](const World& outer) {
    in_hierarchical_world(outer, GetParam(), [](const World& world) { shm_random::check_sequences(world, 77, 300); });
  });
}

std::string name_of_layout(const ::testing::TestParamInfo<Hosts>& layout) {
  std::string name = "On";
  for (const int host : layout.param) name += std::to_string(host);
  return name;
}

INSTANTIATE_TEST_SUITE_P(Layouts, Hierarchical,
                         ::testing::Values(Hosts{0, 0, 1, 1}, Hosts{0, 1, 0, 1}, Hosts{0, 1, 1}, Hosts{0, 1, 1, 0, 0},
                                           Hosts{0, 1, 2, 2}, Hosts{0, 1, 2}),
                         name_of_layout);
INSTANTIATE_TEST_SUITE_P(Layouts, HierarchicalCalls, ::testing::Values(Hosts{0, 1, 0, 1}, Hosts{0, 1, 1}),
                         name_of_layout);

TEST(HierarchicalChoice, FollowsWhoSharesAHost) {
  testing::run_processes_in_gtest({.world_size = 4, .backend = "gloo"}, [](const World& world) {
    EXPECT_EQ(backend_name(group_on({0, 0, 0, 0}, world)), "shm");
    EXPECT_EQ(backend_name(group_on({0, 1, 2, 3}, world)), "hierarchical");
    const auto group = group_on({0, 0, 1, 1}, world);
    EXPECT_EQ(backend_name(group), "hierarchical");
    // Groups made from it choose anew.
    const auto host = new_host_group(group);
    EXPECT_EQ(backend_name(host), "shm");
    const auto leaders = new_subgroups(group, {{0, 2}, {1, 3}});
    EXPECT_EQ(backend_name(leaders), "hierarchical");
    auto tensor = at::ones({1});
    all_reduce(tensor, host);
    all_reduce(tensor, leaders);
    EXPECT_EQ(tensor.item<float>(), 4);
  });
}

TEST(HierarchicalFailure, OfRanksOfOneHostThatDisagreeIsToldToAll) {
  testing::run_processes_in_gtest({.world_size = 4, .backend = "gloo"}, [](const World& world) {
    auto group = group_on({0, 0, 1, 1}, world, 20s);
    const auto start = std::chrono::steady_clock::now();
    const auto message =
        expect_error([&] { all_reduce(at::ones({world.rank() == 1 ? 5 : 4}), group); }, {"every rank is alive"});
    // A group's end waits for the stage that runs: the other host's leader is in none, though this one keeps the group.
    if (world.rank() >= 2) group.reset();
    EXPECT_LT(std::chrono::steady_clock::now() - start, 10s);
    barrier(world.group());
    EXPECT_THAT(message, HasSubstr(world.rank() < 2 ? "float[5]" : "Float[4]"));
  });
}

/// A collective that ranks call in two ways, and words of the error that names both.
struct Disagreement {
  std::function<void(const GroupPtr& group, bool is_other)> collective;
  std::vector<std::string> words;
};

std::vector<Disagreement> disagreements() {
  return {
      {[](const auto& group, bool is_other) { all_reduce(at::ones({4}, is_other ? at::kInt : at::kFloat), group); },
       {"4 Float", "4 Int"}},
      {[](const auto& group, bool is_other) {
         all_reduce(at::ones({4}), group, is_other ? ReduceOp::MAX : ReduceOp::SUM);
       },
       {"all_reduce(sum)", "all_reduce(max)"}},
      {[](const auto& group, bool is_other) { all_reduce(at::ones({is_other ? 50'000 : 4}), group); },
       {"4 Float", "50000 Float"}},
      {[](const auto& group, bool is_other) {
         const int64_t size = is_other ? 6 : 4;
         all_gather_into_tensor(at::empty({group->getSize() * size}), at::ones({size}), group);
       },
       {"4 Float", "6 Float"}},
      {[](const auto& group, bool is_other) { is_other ? barrier(group) : all_reduce(at::ones({4}), group); },
       {"barrier", "all_reduce(sum)"}},
  };
}

void gather_to_first(const GroupPtr& group, int64_t size) {
  std::vector<at::Tensor> outputs;
  for (int rank = 0; group->getRank() == 0 && rank < group->getSize(); ++rank) outputs.push_back(at::empty({size}));
  gather(at::ones({size}), outputs, 0, group);
}

/// Among all ranks at once, whatever their hosts are.
std::vector<Disagreement> disagreements_without_stages() {
  return {
      {[](const auto& group, bool is_other) { gather_to_first(group, is_other ? 6 : 4); }, {"4 Float", "6 Float"}},
      {[](const auto& group, bool is_other) {
         const auto dtype = is_other ? at::kInt : at::kFloat;
         all_to_all_single(at::empty({4 * group->getSize()}, dtype), at::ones({4 * group->getSize()}, dtype), group);
       },
       {"4 Float", "4 Int"}},
      {[](const auto& group, bool is_other) {
         // The others' messages are right for each other, but not for this one.
         const auto size = (is_other ? 2 : 1) * group->getSize();
         all_to_all_single(at::empty({size}), at::ones({size}), group);
       },
       {"1 Float", "2 Float"}},
  };
}

void expect_told(const Disagreement& disagreement, const Hosts& hosts, bool is_other, const std::string& who,
                 const World& world) {
  const auto group = group_on(hosts, world, 20s);
  all_reduce(at::ones({3}), group);
  auto words = disagreement.words;
  words.push_back(who + " disagree");
  const auto start = std::chrono::steady_clock::now();
  expect_error([&] { disagreement.collective(group, is_other); }, words);
  EXPECT_LT(std::chrono::steady_clock::now() - start, 10s);
}

/// Both hosts are of one mind in themselves: only the leaders can notice.
TEST(HierarchicalFailure, OfHostsThatDisagreeIsToldToAll) {
  testing::run_processes_in_gtest({.world_size = 4, .backend = "gloo"}, [](const World& world) {
    for (const auto& each : disagreements()) expect_told(each, {0, 0, 1, 1}, world.rank() >= 2, "hosts", world);
    for (const auto& each : disagreements_without_stages()) {
      expect_told(each, {0, 0, 1, 1}, world.rank() == 1, "ranks", world);
    }
  });
}

/// Whoever waits for long may hear from the others that they gave up before its own host tells it why.
TEST(HierarchicalFailure, OfHostsThatDisagreeIsToldWithItsCauseToThoseWhoWaitedLong) {
  testing::run_processes_in_gtest({.world_size = 4, .backend = "gloo"}, [](const World& world) {
    for (const auto lateness : {85ms, 185ms, 285ms}) {
      const auto group = group_on({0, 0, 1, 1}, world, 20s);
      all_reduce(at::ones({3}), group);
      if (world.rank() == 0) std::this_thread::sleep_for(lateness);
      expect_error([&] { all_reduce(at::ones({4}), group, world.rank() < 2 ? ReduceOp::SUM : ReduceOp::MAX); },
                   {"all_reduce(sum)", "all_reduce(max)", "hosts disagree"});
    }
  });
}

//
TEST(HierarchicalFailure, OfRanksThatAreAloneOnTheirHostsAndDisagreeIsToldToAll) {
  testing::run_processes_in_gtest({.world_size = 3, .backend = "gloo"}, [](const World& world) {
    auto all = disagreements();
    for (auto& each : disagreements_without_stages()) all.push_back(std::move(each));
    all.push_back({[](const auto& group, bool is_other) {
                     is_other ? all_reduce(at::ones({4}), group) : gather_to_first(group, 4);
                   },
                   {"gather", "all_reduce(sum)"}});
    // A host that has its own root's message would be content before its leader knows better.
    all.push_back({[](const auto& group, bool is_other) { broadcast(at::ones({4}), is_other ? 1 : 0, group); },
                   {"root 0", "root 1"}});
    for (const auto& each : all) expect_told(each, {0, 1, 2}, world.rank() == 1, "ranks", world);
  });
}

constexpr int kSawIt = 42;

void be_killed() {
  ::raise(SIGKILL);
}

/// Rank `victim` of four, two on each host as a rule, is lost by `doom`; all others must name it within `limit`.
void expect_all_hosts_name(int victim, const std::function<void()>& doom, std::chrono::milliseconds timeout,
                           std::chrono::milliseconds limit, const std::function<void(const GroupPtr&)>& collective,
                           const Hosts& hosts = {0, 0, 1, 1}) {
  const auto report = testing::run_processes_from_gtest(
      {.world_size = 4, .backend = "gloo", .timeout = 40s, .expected_exit_code = kSawIt}, [&](const World& world) {
        const auto group = group_on(hosts, world, timeout);
        all_reduce(at::ones({3}), group);
        if (world.rank() == victim) {
          doom();
          std::_Exit(kSawIt);
        }
        const auto start = std::chrono::steady_clock::now();
        const auto message = expect_error([&] { collective(group); }, {});
        EXPECT_THAT(message, HasSubstr("rank " + std::to_string(victim) + " is gone, hung or late"));
        EXPECT_LT(std::chrono::steady_clock::now() - start, limit) << message;
        expect_error([&] { barrier(group); }, {"can no longer be used"});
        if (!::testing::Test::HasFailure()) std::_Exit(kSawIt);
      });
  if (testing::is_rank_process()) return;
  for (int rank = 0; rank < 4; ++rank) {
    if (rank == victim) continue;
    EXPECT_EQ(report.ranks[rank].kind, testing::RankOutcome::Kind::kPassed) << report.describe();
  }
}

TEST(HierarchicalFailure, OfAKilledRankIsNamedOnBothHosts) {
  expect_all_hosts_name(3, be_killed, 20s, 2500ms,
                        [](const GroupPtr& group) { all_reduce(at::ones({100'000}), group); });
}

TEST(HierarchicalFailure, OfAKilledLeaderIsNamedOnBothHosts) {
  expect_all_hosts_name(2, be_killed, 20s, 2500ms, [](const GroupPtr& group) { all_reduce(at::ones({10}), group); });
}

TEST(HierarchicalFailure, IsNamedInAReduceScatter) {
  expect_all_hosts_name(3, be_killed, 20s, 2500ms,
                        [](const GroupPtr& group) { reduce_scatter_tensor(at::empty({5}), at::ones({20}), group); });
}

TEST(HierarchicalFailure, IsNamedInAnAllToAll) {
  expect_all_hosts_name(3, be_killed, 20s, 2500ms, [](const GroupPtr& group) {
    const auto rows = at::empty({4, 5});
    for (int i = 0; i < 2; ++i) all_to_all_single(rows, at::ones({4, 5}), group);
  });
}

TEST(HierarchicalFailure, OfAKilledRankIsNamedByRanksThatAreAloneOnTheirHosts) {
  expect_all_hosts_name(2, be_killed, 20s, 2500ms,
                        [](const GroupPtr& group) { all_reduce(at::ones({100'000}), group); }, {0, 1, 2, 3});
}

TEST(HierarchicalFailure, OfAHungRankIsNamedAfterTheTimeout) {
  expect_all_hosts_name(
      1, [] { std::this_thread::sleep_for(12s); }, 3s, 9s,
      [](const GroupPtr& group) { all_reduce(at::ones({10}), group); });
}

}  // namespace
}  // namespace lockstep::hierarchical_test
