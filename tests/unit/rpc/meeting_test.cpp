// What workers must agree on before they begin, on cards as several machines might show them.
#include "lockstep/rpc/meeting.h"

#include <gtest/gtest.h>

#include "lockstep/testing/checks.h"

namespace lockstep::rpc::meeting_test {
namespace {

using detail::check_cards;
using detail::choose_agent;
using detail::WorkerCard;
using testing::expect_error;

c10::Device gpu(int index) {
  return {c10::kCUDA, static_cast<c10::DeviceIndex>(index)};
}

std::vector<WorkerCard> two_workers(const DeviceMap& map, std::vector<c10::Device> devices_of_b = {}) {
  WorkerCard a{.name = "a", .host = "h", .device_count = 2};
  a.device_maps["b"] = map;
  return {a, {.name = "b", .host = "h", .devices = std::move(devices_of_b), .device_count = 2}};
}

}  // namespace

// RPC-56
TEST(RpcMeeting, DeviceMapsMustFit) {
  check_cards(two_workers({{gpu(0), gpu(1)}, {gpu(1), gpu(0)}}));
  check_cards(two_workers({{c10::kCPU, c10::kCPU}, {gpu(0), gpu(1)}}));
  const auto refuses = [](std::vector<WorkerCard> cards, const std::vector<std::string>& words) {
    expect_error([&] { check_cards(cards); }, words);
  };
  refuses(two_workers({{gpu(0), gpu(0)}, {gpu(1), gpu(0)}}), {"worker 'a' to 'b'", "two devices go to cuda:0"});
  refuses(two_workers({{gpu(2), gpu(0)}}), {"worker 'a' to 'b'", "cuda:2 does not exist on worker 'a'", "2 devices"});
  refuses(two_workers({{gpu(0), gpu(5)}}), {"cuda:5 does not exist on worker 'b'"});
  refuses(two_workers({{gpu(0), gpu(0)}}, {gpu(1)}), {"cuda:0 is not among the devices that worker 'b' gave"});
  auto cards = two_workers({{gpu(0), gpu(0)}});
  cards[0].device_maps["nobody"] = {{gpu(0), gpu(0)}};
  refuses(cards, {"worker 'a' to 'nobody'", "no such worker"});
}

// RPC-56
TEST(RpcMeeting, DeviceMapsAreAddedStepByStep) {
  RpcOptions options;
  options.set_device_map("b", {{gpu(0), gpu(1)}}).set_device_map("b", {{gpu(1), gpu(0)}});
  options.set_device_map("c", {{gpu(0), gpu(0)}});
  EXPECT_EQ(options.device_maps.at("b"), (DeviceMap{{gpu(0), gpu(1)}, {gpu(1), gpu(0)}}));
  EXPECT_EQ(options.device_maps.at("c").size(), 1);
}

// RPC-56
TEST(RpcMeeting, AgentsAreChosenForAll) {
  std::vector<WorkerCard> cards = {{.name = "a", .host = "h"}, {.name = "b", .host = "h"}};
  EXPECT_EQ(choose_agent(cards), Agent::kShm);
  EXPECT_EQ(choose_agent(two_workers({{gpu(0), gpu(1)}})), Agent::kTensorPipe);
  cards[1].host = "elsewhere";
  EXPECT_EQ(choose_agent(cards), Agent::kTensorPipe);
  cards[0].agent = Agent::kShm;
  expect_error([&] { choose_agent(cards); }, {"'a' asks for shared memory", "'b' is on another host"});
  cards[1] = {.name = "b", .host = "h", .agent = Agent::kTensorPipe};
  expect_error([&] { choose_agent(cards); }, {"'a' asks for shared memory", "'b' asks for TensorPipe"});
  cards[0].agent = Agent::kAuto;
  EXPECT_EQ(choose_agent(cards), Agent::kTensorPipe);
}

}  // namespace lockstep::rpc::meeting_test
