// The mesh chooses devices, on a machine that has none: a pretend kind of device stands in, with a current device per
// thread.
#include "lockstep/mesh/device_choice.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "lockstep/mesh/device_mesh.h"
#include "lockstep/testing/gtest.h"

namespace lockstep {
namespace {

constexpr int kDevices = 2;

thread_local c10::DeviceIndex current_device = 0;
thread_local int set_calls = 0;

/// XPU, because nothing else in these tests uses it.
struct PretendGuard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::XPU> {
  c10::Device getDevice() const override { return {c10::DeviceType::XPU, current_device}; }
  void setDevice(c10::Device device) const override {
    current_device = device.index();
    ++set_calls;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
};

/// Registers the pretend devices, takes LOCAL_RANK away, and forgets both afterwards.
class PretendDevices : public ::testing::Test {
 protected:
  void SetUp() override {
    if (c10::impl::hasDeviceGuardImpl(c10::DeviceType::XPU)) GTEST_SKIP() << "this libtorch has real XPU devices";
    static const PretendGuard guard;
    c10::impl::device_guard_impl_registry[kSlot] = &guard;
    if (const char* given = std::getenv("LOCAL_RANK")) local_rank_ = given;
    ::unsetenv("LOCAL_RANK");
  }
  void TearDown() override {
    c10::impl::device_guard_impl_registry[kSlot] = nullptr;
    if (local_rank_) ::setenv("LOCAL_RANK", local_rank_->c_str(), 1);
  }

 private:
  static constexpr auto kSlot = static_cast<std::size_t>(c10::DeviceType::XPU);
  std::optional<std::string> local_rank_;
};

class CollectWarnings : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override { messages.push_back(warning.msg()); }
  std::vector<std::string> messages;
};

void run(int world_size, const lockstep::testing::RankBody& body) {
  lockstep::testing::run_threads_in_gtest({.world_size = world_size}, body);
}

// TP-12: rank modulo devices, with a warning that names both
TEST_F(PretendDevices, AreTakenByRankWithAWarning) {
  run(4, [](const World& world) {
    CollectWarnings warnings;
    const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
    init_device_mesh("xpu", {2, 2});
    EXPECT_EQ(current_device, world.rank() % kDevices);
    EXPECT_EQ(set_calls, 1);
    ASSERT_EQ(warnings.messages.size(), 1U);
    EXPECT_NE(warnings.messages[0].find("[lockstep/mesh] rank " + std::to_string(world.rank()) + " of 4"),
              std::string::npos);
    EXPECT_NE(warnings.messages[0].find("LOCAL_RANK"), std::string::npos);
  });
}

// TP-12: LOCAL_RANK goes before the rank, without a warning
TEST_F(PretendDevices, AreTakenByLocalRankIfSet) {
  ::setenv("LOCAL_RANK", "1", 1);
  run(2, [](const World&) {
    CollectWarnings warnings;
    const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
    init_device_mesh("xpu", {2});
    EXPECT_EQ(current_device, 1);
    EXPECT_TRUE(warnings.messages.empty());
  });
  ::unsetenv("LOCAL_RANK");
}

// TP-12: what the process has chosen stands
TEST_F(PretendDevices, AreLeftAloneIfOneIsChosen) {
  run(2, [](const World&) {
    CollectWarnings warnings;
    const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
    current_device = 1;
    init_device_mesh("xpu", {2});
    EXPECT_EQ(current_device, 1);
    EXPECT_EQ(set_calls, 0);
    EXPECT_TRUE(warnings.messages.empty());
  });
}

// TP-12: a mesh of CPUs has nothing to choose
TEST_F(PretendDevices, AreNotTouchedByAMeshOfCpus) {
  run(2, [](const World&) {
    init_device_mesh("cpu", {2});
    EXPECT_EQ(set_calls, 0);
  });
}

// TP-2: 3 ranks do not fill hosts of 2 devices; every rank says so, also one that has chosen
TEST_F(PretendDevices, MustFillEveryHost) {
  run(3, [](const World& world) {
    if (world.rank() == 1) current_device = 1;
    lockstep::testing::expect_error(
        [] { init_device_mesh("xpu", {3}); },
        {"[lockstep/mesh] ", "rank " + std::to_string(world.rank()) + " of 3", "2 devices", "'xpu'"});
    EXPECT_EQ(set_calls, 0);
  });
}

}  // namespace
}  // namespace lockstep
