// Ranks that are killed at any point: while they meet, in the middle of a collective, of a message, between two.
// The ranks are this program again, without libtorch, so hundreds of them start in seconds.
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <future>
#include <random>
#include <thread>

#include "lockstep/base/env.h"
#include "lockstep/base/str.h"
#include "lockstep/launch/child.h"
#include "lockstep/shm/collective.h"
#include "lockstep/shm/errors.h"
#include "lockstep/shm/messages.h"
#include "lockstep/shm/pool.h"
#include "tests/support/agree_by_file.h"

namespace lockstep::shm {
namespace {

using namespace std::chrono_literals;

constexpr int kSawIt = 42;
constexpr int kRanks = 3;

/// Rank 0's word reaches the others through a file that appears at once.
/// One collective of `kind`. Each piece is full of its giver's rank + 1; what is gotten is checked.
void run_one(Collectives& collectives, Kind kind, const Span& room, int root) {
  const int rank = collectives.team().rank();
  const Shape shape(kind);
  const bool is_in_place = kind == Kind::kAllReduce || kind == Kind::kReduce;
  const auto all = std::span(reinterpret_cast<float*>(room.at), room.bytes / sizeof(float));
  std::fill(all.begin(), all.end(), 1.0F + static_cast<float>(rank));
  static std::vector<float> received;
  received.resize(all.size());
  const auto pieces_of = [](std::span<float> values, bool are_several) {
    const auto piece = are_several ? values.size() / kRanks : values.size();
    std::vector<Span> spans;
    for (int i = 0; i < (are_several ? kRanks : 1); ++i) {
      spans.push_back(
          {reinterpret_cast<std::byte*>(values.data() + static_cast<std::size_t>(i) * piece), piece * sizeof(float)});
    }
    return spans;
  };
  // Where one side is cut into a piece per rank, the other is such a piece or cut alike.
  const bool are_pieces = shape.gives_per_receiver || shape.gets_per_giver;
  const auto piece = are_pieces ? all.size() / kRanks : all.size();
  const auto gives = pieces_of(shape.gives_per_receiver ? all : all.first(piece), shape.gives_per_receiver);
  const auto target = is_in_place ? all : std::span(received);
  const auto gets = pieces_of(shape.gets_per_giver ? target : target.first(piece), shape.gets_per_giver);
  const bool takes =
      kind != Kind::kBarrier && (!shape.only_root_gets || rank == root) && (kind != Kind::kBroadcast || rank != root);
  Request request{.kind = kind, .element_bytes = sizeof(float), .root = root, .timeout = 30s};
  if (kind != Kind::kBarrier && (!shape.only_root_gives || rank == root)) request.gives = gives;
  if (takes) request.gets = gets;
  collectives.run(request, Patience::of_caller(kRanks));
  for (std::size_t i = 0; takes && i < gets.size(); ++i) {
    const auto giver = shape.gets_per_giver ? static_cast<float>(i) : static_cast<float>(root);
    const float expected = shape.reduces ? 6 : giver + 1;
    const auto* values = reinterpret_cast<const float*>(gets[i].at);
    const auto count = gets[i].bytes / sizeof(float);
    if (count == 0 || (values[0] == expected && values[count - 1] == expected)) continue;
    std::printf("%s: wrong result %g instead of %g\n", name_of(kind), values[0], expected);
    std::_Exit(1);
  }
}

/// Collectives and messages without end, the same on all ranks. Returns only by exception.
void work_until_a_peer_is_gone(int rank, unsigned seed, const std::string& path) {
  auto team = Team::of_processes({.rank = rank, .size = kRanks, .group = "victims", .timeout = 1s},
                                 [&](const std::string& word) { return agree_by_file(path, rank, word, 2s); });
  Collectives collectives(team);
  const auto messages = std::make_shared<Messages>(team);
  if (env("LOCKSTEP_TEST_FORKS") && ::fork() == 0) {
    // What a data loader does: a child that has copies of all descriptors and outlives its parent by far.
    ::sleep(60);
    std::_Exit(0);
  }
  std::ofstream(path + ".made" + std::to_string(rank));
  if (env("LOCKSTEP_TEST_CHILD_LEAVES") && ::fork() == 0) {
    // A child that takes its copy of everything down must not speak for its parent.
    team->leave();
    team->fail("the child failed");
    messages->close("the child closed");
    std::_Exit(0);
  }
  if (env("LOCKSTEP_TEST_LATE")) std::this_thread::sleep_for(8s);
  auto& pool = *team->pool();
  std::mt19937 random(seed);
  std::vector<float> ordinary(200'000);
  auto* shared = reinterpret_cast<float*>(pool.allocate(ordinary.size() * sizeof(float)));
  while (true) {
    const auto count = std::size_t{1} + random() % ordinary.size();
    float* values = random() % 2 == 0 ? ordinary.data() : shared;
    const auto kind = static_cast<Kind>(random() % (static_cast<unsigned>(Kind::kBarrier) + 1));
    const Span span{reinterpret_cast<std::byte*>(values), count * sizeof(float)};
    run_one(collectives, kind, span, static_cast<int>(random() % kRanks));
    if (random() % 4 != 0) continue;
    std::promise<void> received;
    std::promise<void> sent;
    const auto into = [](std::promise<void>& promise) {
      return [&promise](std::exception_ptr error, int) { error ? promise.set_exception(error) : promise.set_value(); };
    };
    std::vector<std::byte> box(span.bytes);
    messages->send({.peer = (rank + 1) % kRanks, .span = span, .timeout = 30s, .done = into(sent)});
    messages->receive({.peer = (rank + kRanks - 1) % kRanks,
                       .span = {box.data(), box.size()},
                       .timeout = 30s,
                       .done = into(received)});
    auto receiving = received.get_future();
    auto sending = sent.get_future();
    receiving.wait();
    sending.wait();
    receiving.get();
    sending.get();
  }
}

/// The body of a rank process; not a test by itself.
TEST(Victim, DISABLED_Rank) {
  const int rank = std::stoi(*env("LOCKSTEP_TEST_RANK"));
  try {
    work_until_a_peer_is_gone(rank, static_cast<unsigned>(std::stoul(*env("LOCKSTEP_TEST_SEED"))),
                              *env("LOCKSTEP_TEST_MEETING"));
  } catch (const PeerError& error) {
    std::printf("%s\n", error.what());
    std::fflush(stdout);
    std::_Exit(kSawIt);
  }
}

std::string read_all(int fd) {
  std::string text;
  char buffer[4096];
  for (ssize_t got = 0; (got = ::read(fd, buffer, sizeof(buffer))) > 0;)
    text.append(buffer, static_cast<std::size_t>(got));
  return text;
}

/// Starts the ranks, kills one after a while and looks at what the others make of it.
void kill_one(unsigned seed, const EnvironmentChanges& of_victim = {}, int late_rank = -1) {
  const bool forks = !of_victim.empty();
  SCOPED_TRACE(str("seed ", seed));
  std::mt19937 random(seed);
  const int victim = late_rank >= 0 ? late_rank + 1 : static_cast<int>(random() % kRanks);
  const auto delay = std::chrono::microseconds(random() % 40'000);
  std::string folder = "/tmp/lockstep-kill-XXXXXX";
  ASSERT_NE(::mkdtemp(folder.data()), nullptr);
  const auto meeting = folder + "/meeting";
  std::vector<Child> ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    EnvironmentChanges environment = {{"LOCKSTEP_TEST_RANK", std::to_string(rank)},
                                      {"LOCKSTEP_TEST_SEED", std::to_string(seed)},
                                      {"LOCKSTEP_TEST_MEETING", meeting}};
    if (rank == victim) environment.insert(of_victim.begin(), of_victim.end());
    if (rank == late_rank) environment["LOCKSTEP_TEST_LATE"] = "1";
    ranks.emplace_back(ChildOptions{.argv = {"/proc/self/exe", "--gtest_also_run_disabled_tests",
                                             "--gtest_filter=Victim.DISABLED_Rank", "--gtest_brief=1"},
                                    .environment = environment,
                                    .inherited_fds = {}});
  }
  const auto made = [&](int rank) { return meeting + ".made" + std::to_string(rank); };
  // Three in four die at work, the others at any time since their start.
  const bool has_met = forks || late_rank >= 0 || seed % 4 != 0;
  for (int rank = 0; has_met && rank < kRanks; ++rank) {
    while (::access(made(rank).c_str(), F_OK) != 0) std::this_thread::sleep_for(1ms);
  }
  std::this_thread::sleep_for(delay);
  // The one process, not its tree: a forked child must not keep it looking alive.
  ::kill(ranks[static_cast<std::size_t>(victim)].pid(), SIGKILL);
  const auto killed = Child::Clock::now();
  std::string all_texts;
  std::vector<std::string> texts(kRanks);
  for (int rank = 0; rank < kRanks; ++rank) {
    if (rank == victim || rank == late_rank) continue;
    auto& survivor = ranks[static_cast<std::size_t>(rank)];
    while (!survivor.exit_status() && Child::Clock::now() < killed + 10s) survivor.wait_until_gone(10ms);
    const auto text = read_all(survivor.stdout_fd());
    ASSERT_TRUE(survivor.exit_status()) << "rank " << rank << " still waits for rank " << victim;
    EXPECT_EQ(survivor.exit_status()->code, kSawIt) << "rank " << rank << ": " << text;
    all_texts += text;
    texts[static_cast<std::size_t>(rank)] = text;
  }
  EXPECT_NE(all_texts.find(str(": rank ", victim, " ")), std::string::npos) << all_texts;
  // Those who were still meeting wait for who did not come; afterwards everybody knows who is gone, and soon.
  for (int rank = 0; has_met && rank < kRanks; ++rank) {
    if (rank == victim || rank == late_rank) continue;
    EXPECT_LT(ranks[static_cast<std::size_t>(rank)].exit_time() - killed, 1s) << "rank " << rank;
    const auto& text = texts[static_cast<std::size_t>(rank)];
    EXPECT_NE(text.find(str("rank ", victim, " is gone")), std::string::npos) << text;
    EXPECT_NE(text.find("on group 'victims'"), std::string::npos) << text;
  }
  for (int rank = 0; rank < kRanks; ++rank) ::unlink(made(rank).c_str());
  for (const char* file : {"/meeting", "/meeting.new"}) ::unlink((folder + file).c_str());
  ::rmdir(folder.c_str());
}

std::size_t shared_memory_bytes() {
  std::string line;
  for (std::ifstream info("/proc/meminfo"); std::getline(info, line);) {
    if (line.starts_with("Shmem:")) return std::stoull(line.substr(6)) * 1024;
  }
  return 0;
}

std::string lockstep_sockets() {
  std::string line;
  std::string found;
  for (std::ifstream sockets("/proc/net/unix"); std::getline(sockets, line);) {
    if (line.find("@lockstep-") != std::string::npos) found += line + "\n";
  }
  return found;
}

TEST(Kill, AtAnyPointIsNoticedByTheOthersAndLeavesNothing) {
  const auto before = shared_memory_bytes();
  for (unsigned seed = 1; seed <= 200; ++seed) {
    kill_one(seed);
    if (HasFatalFailure()) return;
  }
  // 200 teams would have left 600 rings and pools of a MiB each; other programs may use a little meanwhile.
  EXPECT_LT(shared_memory_bytes(), before + (std::size_t{64} << 20));
  EXPECT_EQ(lockstep_sockets(), "");
}

TEST(Kill, IsNoticedThoughAForkedChildLivesOn) {
  for (const unsigned seed : {1001U, 1002U, 1003U}) kill_one(seed, {{"LOCKSTEP_TEST_FORKS", "1"}});
}

TEST(Kill, IsNoticedThoughAForkedChildTookItsCopyDown) {
  for (const unsigned seed : {1001U, 1002U, 1003U}) kill_one(seed, {{"LOCKSTEP_TEST_CHILD_LEAVES", "1"}});
}

// Rank 0 waits for rank 1, which is late for a good reason; that rank 2 is gone must be heard meanwhile.
TEST(Kill, IsNoticedBehindALateRank) {
  kill_one(2001, {}, 1);
}

}  // namespace
}  // namespace lockstep::shm
