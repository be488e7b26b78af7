// Where ranks meet: every init method, in worlds made inside a test's ranks.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <csignal>

#include "lockstep/base/rank_local.h"
#include "lockstep/base/unique_fd.h"
#include "lockstep/launch/port.h"
#include "lockstep/lockstep.h"
#include "lockstep/testing/gtest.h"
#include "lockstep/testing/temp_dir.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;

/// Makes a second world at `init_method` beside the harness's and uses it: collectives, a subgroup, the user's store.
void expect_world_at(const World& outer, const std::string& init_method) {
  RankScope scope;
  const EnterRank enter(scope);
  {
    const auto world = init({.backend = "gloo",
                             .timeout = 30s,
                             .init_method = init_method,
                             .rank = outer.rank(),
                             .world_size = outer.world_size()});
    EXPECT_EQ(world.launcher(), "options");
    auto tensor = at::full({3}, world.rank() + 1);
    all_reduce(tensor, world.group());
    EXPECT_EQ(tensor[0].item<int>(), 6);
    const auto pair = new_group(world.group(), {0, 2});
    if (pair) all_reduce(tensor, pair, ReduceOp::MAX);
    if (world.rank() == 1) world.store()->set("greeting", std::string("hello"));
    EXPECT_EQ(world.store()->get_to_str("greeting"), "hello");
    barrier(world.group());
  }
}

LOCKSTEP_PROCESS_TEST(Rendezvous, MeetsAtATcpStore, 3) {
  std::optional<PortReservation> port;
  if (world.rank() == 0) port.emplace();
  const auto number = broadcast_object(port ? std::to_string(port->port()) : "", 0, world.group());
  expect_world_at(world, "tcp://127.0.0.1:" + number);
}

LOCKSTEP_PROCESS_TEST(Rendezvous, KeepsABrokenPipeToTheStoreFromKillingTheRank, 3) {
  std::optional<PortReservation> port;
  if (world.rank() == 0) port.emplace();
  const auto address =
      "tcp://127.0.0.1:" + broadcast_object(port ? std::to_string(port->port()) : "", 0, world.group());
  ::signal(SIGPIPE, world.rank() == 0 ? SIG_DFL : [](int) {});
  expect_world_at(world, address);
  struct sigaction now = {};
  ::sigaction(SIGPIPE, nullptr, &now);
  EXPECT_NE(now.sa_handler, SIG_DFL);
  EXPECT_EQ(now.sa_handler == SIG_IGN, world.rank() == 0) << "a handler of the program's own must stay";
}

LOCKSTEP_PROCESS_TEST(Rendezvous, MeetsAtAFile, 3) {
  std::optional<testing::TempDir> directory;
  if (world.rank() == 0) directory.emplace();
  const auto path = broadcast_object(directory ? directory->file("store") : "", 0, world.group());
  expect_world_at(world, "file://" + path);
  barrier(world.group());
}

LOCKSTEP_PROCESS_TEST(Rendezvous, MeetsWhereTheEnvironmentSays, 3) {
  std::optional<PortReservation> port;
  if (world.rank() == 0) port.emplace();
  const auto number = broadcast_object(port ? std::to_string(port->port()) : "", 0, world.group());
  ::setenv("RANK", std::to_string(world.rank()).c_str(), 1);
  ::setenv("WORLD_SIZE", "3", 1);
  ::setenv("MASTER_ADDR", "localhost", 1);
  ::setenv("MASTER_PORT", number.c_str(), 1);
  expect_world_at(world, "env://");
}

LOCKSTEP_THREAD_TEST(Rendezvous, MeetsInMemory, 3) {
  expect_world_at(world, "hash://rendezvous-test");
}

/// A port that somebody else listens at.
class TakenPort {
 public:
  TakenPort() : socket_(::socket(AF_INET6, SOCK_STREAM, 0)) {
    sockaddr_in6 address = {};
    address.sin6_family = AF_INET6;
    socklen_t size = sizeof(address);
    EXPECT_EQ(::bind(socket_.get(), reinterpret_cast<sockaddr*>(&address), size), 0);
    EXPECT_EQ(::listen(socket_.get(), 1), 0);
    EXPECT_EQ(::getsockname(socket_.get(), reinterpret_cast<sockaddr*>(&address), &size), 0);
    port_ = ntohs(address.sin6_port);
  }
  int port() const { return port_; }

 private:
  UniqueFd socket_;
  int port_ = 0;
};

TEST(Rendezvous, SaysWhenThePortIsTaken) {
  const TakenPort taken;
  const RankEnvironment first{.launcher = "test", .rank = 0, .world_size = 2};
  testing::expect_error([&] { rendezvous("tcp://127.0.0.1:" + std::to_string(taken.port()), first, 2s); },
                        {"rank 0 of 2", "cannot serve the store", "MASTER_PORT"});
}

// RPC-5: for groups and for RPC
TEST(Rendezvous, OneProcessMeetsTwiceAtOnePort) {
  std::string address;
  {
    const PortReservation free;
    address = "tcp://127.0.0.1:" + std::to_string(free.port());
  }
  const RankEnvironment first{.launcher = "test", .rank = 0, .world_size = 2};
  const auto store = rendezvous(address, first, 10s);
  store->set("key", "value");
  EXPECT_EQ(rendezvous(address, first, 10s)->get_to_str("key"), "value");
}

}  // namespace
}  // namespace lockstep
