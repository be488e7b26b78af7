// One process, many groups: one pool and one lifeline serve all of them.
#include "tests/support/shm_groups.h"

#include <dirent.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/resource.h>

#include <csignal>
#include <cstdlib>
#include <fstream>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "lockstep/comm/builtin_backends.h"
#include "lockstep/shm/memory.h"
#include "lockstep/testing/gtest.h"
#include "tests/support/shm_refusals.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;

void run(int ranks, const testing::RankBody& body) {
  testing::run_processes_in_gtest({.world_size = ranks, .backend = "shm"}, body);
}

class ShmGroups : public ::testing::TestWithParam<int> {};

TEST_P(ShmGroups, TakeEachOthersTensorsWithoutACopy) {
  run(GetParam(), [](const World& world) {
    shm_groups::check_sub_groups(world);
    shm_groups::check_upwards(world);
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, ShmGroups, ::testing::Values(3, 4));

TEST(ShmGroups, OfAMeshTakeEachOthersTensorsWithoutACopy) {
  run(4, shm_groups::check_mesh);
}

// ---- What groups cost

int open_descriptors() {
  int count = 0;
  DIR* folder = ::opendir("/proc/self/fd");
  while (::readdir(folder) != nullptr) ++count;
  ::closedir(folder);
  return count - 3;  // ".", ".." and the folder itself
}

/// Address space of this process, in bytes.
std::size_t address_space() {
  std::string line;
  for (std::ifstream status("/proc/self/status"); std::getline(status, line);) {
    if (line.starts_with("VmSize:")) return std::stoull(line.substr(7)) * 1024;
  }
  return 0;
}

int pools_mapped() {
  int count = 0;
  std::string line;
  for (std::ifstream maps("/proc/self/maps"); std::getline(maps, line);) {
    count += line.find("memfd:lockstep-pool") != std::string::npos ? 1 : 0;
  }
  return count;
}

TEST(ShmGroups, CostNoDescriptorsAndNoReserve) {
  run(4, [](const World& world) {
    std::vector<GroupPtr> groups = {new_group(world.group(), shm_promises::all_ranks(world))};
    const int descriptors = open_descriptors();
    const auto bytes = address_space();
    // Mine and three others'.
    EXPECT_EQ(pools_mapped(), 4);
    for (const std::size_t count : {8, 16}) {
      while (groups.size() < count) {
        groups.push_back(new_group(
            world.group(), groups.size() % 2 == 0 ? shm_promises::all_ranks(world) : std::vector<int>{3, 1, 2, 0}));
        shm_refusals::expect_works(groups.back());
      }
      EXPECT_EQ(open_descriptors(), descriptors) << count << " groups";
      EXPECT_EQ(pools_mapped(), 4) << count << " groups";
      // Rings and channels of four ranks, some 9 MiB per group, and nothing of the size of a reserve.
      EXPECT_LT(address_space(), bytes + count * (std::size_t{32} << 20)) << count << " groups";
      EXPECT_GT(shm::total_memory(), count * (std::size_t{32} << 20));
    }
    barrier(world.group());
    groups.clear();
    EXPECT_EQ(open_descriptors(), descriptors);
    barrier(world.group());
    shm_refusals::expect_works(world.group());
  });
}

/// While it lives, this process can open `left` more files.
class FewDescriptors {
 public:
  explicit FewDescriptors(int left) {
    ::getrlimit(RLIMIT_NOFILE, &before_);
    auto lower = before_;
    lower.rlim_cur = 200;
    ::setrlimit(RLIMIT_NOFILE, &lower);
    for (int fd = -1; (fd = ::open("/dev/null", O_RDONLY | O_CLOEXEC)) >= 0;) fillers_.emplace_back(fd);
    fillers_.resize(fillers_.size() - static_cast<std::size_t>(left));
  }
  ~FewDescriptors() { ::setrlimit(RLIMIT_NOFILE, &before_); }
  FewDescriptors(const FewDescriptors&) = delete;
  FewDescriptors& operator=(const FewDescriptors&) = delete;

 private:
  rlimit before_ = {};
  std::vector<UniqueFd> fillers_;
};

/// A store whose clients open nothing, unlike the test kit's.
StorePtr open_tcp_store(const World& world) {
  c10d::TCPStoreOptions options;
  options.isServer = world.rank() == 0;
  options.waitWorkers = false;
  StorePtr store;
  if (options.isServer) store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  const auto mine = options.isServer ? std::to_string(static_cast<c10d::TCPStore&>(*store).getPort()) : "";
  options.port = static_cast<std::uint16_t>(std::stoi(all_gather_object(mine, world.group())[0]));
  if (!store) store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  return store;
}

std::string refusal_of_group(const World& world, const StorePtr& store) {
  static int groups = 0;
  try {
    detail::make_shm_backend({.store = c10::make_intrusive<c10d::PrefixStore>(std::to_string(groups++), store),
                              .rank = world.rank(),
                              .size = world.world_size(),
                              .group_name = "poor",
                              .timeout = 30s,
                              .address = ""});
  } catch (const c10::DistBackendError& error) {
    return error.what_without_backtrace();
  }
  return "it was made";
}

// Every rank hears of it, at once, and nothing leaks.
TEST(ShmGroups, SayThatDescriptorsRanOut) {
  run(3, [](const World& world) {
    const auto store = open_tcp_store(world);
    EXPECT_EQ(refusal_of_group(world, store), "it was made");
    const int before = open_descriptors();
    for (const int poor : {0, 1, 2}) {
      bool was_made = false;
      for (int left = 0; !was_made && left < 12; ++left) {
        const ::testing::ScopedTrace trace(__FILE__, __LINE__,
                                           "rank " + std::to_string(poor) + " has " + std::to_string(left));
        const auto start = std::chrono::steady_clock::now();
        std::string message;
        {
          std::optional<FewDescriptors> few;
          if (world.rank() == poor) few.emplace(left);
          message = refusal_of_group(world, store);
        }
        EXPECT_LT(std::chrono::steady_clock::now() - start, 20s);
        was_made = message == "it was made";
        if (was_made) {
          EXPECT_GT(left, 2);
        } else if (world.rank() == poor) {
          EXPECT_THAT(message, HasSubstr("out of file descriptors: this process may have 200 open. Raise the limit"));
        } else {
          EXPECT_THAT(message, HasSubstr("rank " + std::to_string(poor) + " gave up: "));
          EXPECT_THAT(message, HasSubstr("out of file descriptors"));
        }
        EXPECT_EQ(open_descriptors(), before);
        barrier(world.group());
      }
      EXPECT_TRUE(was_made);
    }
    shm_refusals::expect_works(world.group());
  });
}

// ---- When a process ends

constexpr int kSawIt = 42;

TEST(ShmGroups, AllNameAProcessThatWasKilled) {
  const auto report = testing::run_processes_from_gtest(
      {.world_size = 4, .backend = "shm", .timeout = 60s, .expected_exit_code = kSawIt}, [&](const World& world) {
        std::vector<GroupPtr> groups = {world.group()};
        for (const auto& ranks : {std::vector{0, 1, 2, 3}, {0, 2}, {2, 1}, {3, 2}, {0, 1, 2}, {1, 2, 3}}) {
          groups.push_back(new_group(world.group(), ranks));
        }
        const auto others = new_group(world.group(), {0, 1, 3});
        for (const auto& group : groups) {
          if (group) shm_refusals::expect_works(group);
        }
        barrier(world.group());
        if (world.rank() == 2) ::raise(SIGKILL);
        for (const auto& group : groups) {
          if (!group) continue;
          const auto start = std::chrono::steady_clock::now();
          const auto message =
              shm_refusals::message_of<c10::DistBackendError>(shm_refusals::all_reduce_call({70'000}), group);
          EXPECT_THAT(message, HasSubstr("rank 2 is gone"));
          EXPECT_THAT(message, HasSubstr("group '" + group_name(group) + "'"));
          EXPECT_LT(std::chrono::steady_clock::now() - start, 5s);
        }
        // Those without it go on, with tensors of a group that cannot.
        const auto tensor = shm_promises::shared_copy(world.group(), at::ones({shm_groups::kSize}));
        EXPECT_EQ(shm_groups::steps_of(others, [&] { all_reduce(tensor, others); }), 1U);
        EXPECT_TRUE(at::equal(tensor, at::full({shm_groups::kSize}, 3.0F)));
        if (!::testing::Test::HasFailure()) std::_Exit(kSawIt);
      });
  if (testing::is_rank_process()) return;
  for (const int rank : {0, 1, 3}) {
    EXPECT_EQ(report.ranks[rank].kind, testing::RankOutcome::Kind::kPassed) << report.describe();
  }
}

// A rank that is only late would write its share into a tensor of some other group.
TEST(ShmGroups, DoNotGetMemoryThatALateRankMayWriteTo) {
  run(2, [](const World& world) {
    const auto group = new_group(world.group(), {0, 1}, {.timeout = 300ms});
    auto tensor = shm_promises::shared_copy(group, at::ones({shm_groups::kSize}));
    auto untouched = shm_promises::shared_copy(group, at::ones({shm_groups::kSize}));
    void* const given = tensor.data_ptr();
    void* const free = untouched.data_ptr();
    if (world.rank() == 0) {
      EXPECT_THROW(all_reduce(tensor, group), c10::DistBackendError);
      tensor = at::Tensor();
      untouched = at::Tensor();
      const auto next = shm_promises::shared_copy(world.group(), at::ones({shm_groups::kSize}));
      EXPECT_NE(next.data_ptr(), given);
      EXPECT_EQ(next.data_ptr(), free);
    }
    barrier(world.group());
  });
}

}  // namespace
}  // namespace lockstep
