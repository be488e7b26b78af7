#include "lockstep/mesh/device_choice.h"

#include "lockstep/testing/gtest.h"

namespace lockstep::detail {
namespace {

using lockstep::testing::expect_error;

// TP-12: the process's choice stands
TEST(DeviceChoice, LeavesADeviceThatIsChosen) {
  EXPECT_EQ(choose_device({.is_chosen = true, .device_count = 4, .rank = 1, .local_rank = 1}), std::nullopt);
}

// TP-12: nothing to choose from
TEST(DeviceChoice, ChoosesNothingWithoutDevices) {
  EXPECT_EQ(choose_device({.device_count = 0, .rank = 1}), std::nullopt);
}

// TP-12: LOCAL_RANK if set
TEST(DeviceChoice, TakesTheLaunchersLocalRank) {
  EXPECT_EQ(choose_device({.device_count = 4, .rank = 5, .local_rank = 3}),
            (DeviceChoice{.index = 3, .is_guess = false}));
  EXPECT_EQ(choose_device({.device_count = 2, .rank = 5, .local_rank = 3}),
            (DeviceChoice{.index = 1, .is_guess = false}));
}

// TP-12: else rank modulo devices, marked as a guess
TEST(DeviceChoice, GuessesByRankWithoutLocalRank) {
  EXPECT_EQ(choose_device({.device_count = 4, .rank = 6}), (DeviceChoice{.index = 2, .is_guess = true}));
}

// TP-2: uneven devices per host
TEST(DeviceChoice, RefusesHostsWithDifferentNumbersOfDevices) {
  expect_error([] { check_even_devices("cuda", {4, 4, 2, 2}, 3); },
               {"[lockstep/mesh] ", "rank 3 of 4", "'cuda'", "4, 4, 2, 2", "Choose each rank's device"});
}

// TP-2: hosts that are not full
TEST(DeviceChoice, RefusesRanksThatDoNotFillTheHosts) {
  expect_error([] { check_even_devices("cuda", {2, 2, 2}, 0); },
               {"[lockstep/mesh] ", "rank 0 of 3", "2 devices", "LOCAL_RANK"});
}

// TP-2
TEST(DeviceChoice, AcceptsEvenHosts) {
  check_even_devices("cuda", {2, 2, 2, 2}, 0);
  check_even_devices("cuda", {4, 4}, 0);
  check_even_devices("cuda", {1, 1, 1}, 0);
  check_even_devices("cuda", {0, 0, 0}, 0);
}

}  // namespace
}  // namespace lockstep::detail
