// Teams of processes whose ranks happen to be threads of this one: they meet, map and signal as processes do, and one
// test sees both ends.
#include "lockstep/shm/collective.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <future>
#include <thread>

#include "lockstep/shm/errors.h"
#include "lockstep/shm/messages.h"
#include "lockstep/shm/peer_watch.h"
#include "lockstep/shm/pool.h"

namespace lockstep::shm {
namespace {

constexpr int kRanks = 2;

void run_ranks(const std::function<void(const std::shared_ptr<Team>&)>& body) {
  std::promise<std::string> word;
  const auto said = word.get_future().share();
  const auto run = [&](int rank) {
    const auto team = Team::of_processes({.rank = rank, .size = kRanks, .group = "pair"}, [&](const std::string& mine) {
      if (rank == 0) word.set_value(mine);
      return said.get();
    });
    body(team);
  };
  auto other = std::async(std::launch::async, [&] { run(1); });
  std::exception_ptr error;
  try {
    run(0);
  } catch (...) {
    error = std::current_exception();
  }
  other.wait();
  if (error) std::rethrow_exception(error);
  other.get();
}

Request all_reduce_of(const Span& span) {
  return {.kind = Kind::kAllReduce, .element_bytes = sizeof(float), .gives = {&span, 1}, .gets = {&span, 1}};
}

/// Steps the rank's ring moved on by.
std::uint32_t steps_of(Collectives& collectives, const Span& span) {
  const auto& ready = collectives.team().lane(collectives.team().rank()).ready.value;
  const auto before = ready.load();
  collectives.run(all_reduce_of(span), Patience::of_caller(kRanks));
  return ready.load() - before;
}

TEST(Collectives, PassNothingThroughSlotsIfAllTensorsAreShared) {
  run_ranks([](const std::shared_ptr<Team>& team) {
    Collectives collectives(team);
    auto& pool = *team->pool();
    constexpr std::size_t kBytes = 4 * kChunkBytes;
    std::vector<std::byte> ordinary(kBytes);
    EXPECT_EQ(steps_of(collectives, {ordinary.data(), kBytes}), 4U);
    auto* shared = pool.allocate(kBytes);
    EXPECT_EQ(steps_of(collectives, {shared, kBytes}), 1U);
    // A view inside, not at a page's begin.
    EXPECT_EQ(steps_of(collectives, {shared + 4, kBytes - 8}), 1U);
    // One rank's is not: all stage, after the step in which they noticed.
    const bool is_odd = team->rank() == 1;
    EXPECT_EQ(steps_of(collectives, {is_odd ? ordinary.data() : shared, kBytes}), 5U);
  });
}

TEST(Collectives, LeaveNoMappingAndNoDescriptor) {
  const auto count_open = [] {
    int count = 0;
    for (int fd = 0; fd < 1024; ++fd) count += ::access(("/proc/self/fd/" + std::to_string(fd)).c_str(), F_OK) == 0;
    return count;
  };
  const auto is_mapped = [] {
    std::string line;
    for (std::ifstream maps("/proc/self/maps"); std::getline(maps, line);) {
      if (line.find("memfd:lockstep") != std::string::npos) return true;
    }
    return false;
  };
  const int before = count_open();
  EXPECT_THROW(run_ranks([&](const std::shared_ptr<Team>& team) {
                 Collectives collectives(team);
                 EXPECT_TRUE(is_mapped());
                 float value = 1;
                 const Span span{reinterpret_cast<std::byte*>(&value), sizeof(value)};
                 collectives.run(all_reduce_of(span), Patience::of_caller(kRanks));
                 auto request = all_reduce_of(span);
                 if (team->rank() == 1) request.dtype = DType::kInt32;
                 try {
                   collectives.run(request, Patience::of_caller(kRanks));
                 } catch (const MismatchError&) {
                   throw std::runtime_error("as expected");
                 }
               }),
               std::runtime_error);
  EXPECT_FALSE(is_mapped());
  EXPECT_EQ(count_open(), before);
}

TEST(Collectives, RefuseToRunInAForkedProcess) {
  run_ranks([](const std::shared_ptr<Team>& team) {
    Collectives collectives(team);
    std::vector<float> values(2, 1);
    const Span span{reinterpret_cast<std::byte*>(values.data()), 8};
    if (team->rank() == 0) {
      const auto child = ::fork();
      if (child == 0) {
        try {
          collectives.run(all_reduce_of(span), Patience::of_caller(kRanks));
        } catch (const PeerError& error) {
          std::_Exit(std::string(error.what()).find("forked") != std::string::npos ? 42 : 1);
        }
        std::_Exit(2);
      }
      int status = 0;
      ::waitpid(child, &status, 0);
      EXPECT_EQ(WEXITSTATUS(status), 42);
    }
    collectives.run(all_reduce_of(span), Patience::of_caller(kRanks));
    EXPECT_EQ(values[0], 2);
  });
}

// A rank that only gives is done with reading from the start, but not with showing what it gives.
TEST(PeerWatch, MissesARankThatIsGoneBeforeItHasShownEverything) {
  for (const bool has_shown_everything : {false, true}) {
    run_ranks([&](const std::shared_ptr<Team>& team) {
      constexpr std::uint32_t kEnd = 5;
      auto& lane = team->lane(team->rank());
      if (team->rank() == 1) {
        post(lane.finished, kEnd);
        post(lane.ready, has_shown_everything ? kEnd : kEnd - 1);
        return team->leave();
      }
      while (!team->has_left(1)) std::this_thread::yield();
      const Request request{.kind = Kind::kGather};
      PeerWatch watch(*team, request, 0);
      watch.ends_before(kEnd);
      watch.waits_for(1);
      EXPECT_NO_THROW(watch.check());
      if (has_shown_everything) {
        EXPECT_NO_THROW(watch.check());
      } else {
        EXPECT_THROW(watch.check(), PeerError);
      }
    });
  }
}

TEST(Messages, MayBeClosedByACallback) {
  run_ranks([](const std::shared_ptr<Team>& team) {
    auto messages = std::make_shared<Messages>(team);
    auto* raw = messages.get();
    std::promise<void> done;
    int value = 7 + team->rank();
    const Span span{reinterpret_cast<std::byte*>(&value), sizeof(value)};
    Messages::Transfer transfer;
    transfer.peer = 1 - team->rank();
    transfer.span = span;
    transfer.done = [&](std::exception_ptr error, int) {
      EXPECT_EQ(error, nullptr);
      raw->close("its callback had enough");
      messages.reset();
      done.set_value();
    };
    team->rank() == 0 ? raw->send(std::move(transfer)) : raw->receive(std::move(transfer));
    done.get_future().wait();
    EXPECT_EQ(value, 7);
  });
}

}  // namespace
}  // namespace lockstep::shm
