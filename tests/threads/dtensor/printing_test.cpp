// DTensors in text: streams, GoogleTest's messages, and pointers that somebody asks for.
#include <sstream>

#include "lockstep/comm/world.h"
#include "lockstep/dtensor/dtensor.h"
#include "lockstep/testing/gtest.h"

namespace lockstep::dtensor_printing_test {
namespace {

using testing::expect_error;

// libtorch's operator<< asks for the memory of what it prints: the error says what to print instead
LOCKSTEP_THREAD_TEST(DTensorPrinting, SaysHowToPrint, 2) {
  const auto mesh = init_device_mesh("cpu", {world.world_size()});
  for (const auto dtype : {at::kFloat, at::kDouble, at::kLong}) {
    for (const auto& sizes : std::vector<std::vector<int64_t>>{{}, {4}, {4, 2}, {2, 3, 4}}) {
      const auto placement = sizes.empty() ? Placement(Replicate()) : Placement(Shard(0));
      const auto tensor = distribute_tensor(at::ones(sizes, dtype), mesh, {placement});
      std::ostringstream text;
      expect_error([&] { text << tensor.tensor(); }, {"to_string()", "to_local()", "full_tensor()"});
      expect_error([&] { text << tensor.tensor() * 2; }, {"to_string()"});
      expect_error([&] { text << tensor.tensor().detach(); }, {"to_string()"});
      text.str("");
      text << tensor;
      EXPECT_EQ(text.str(), tensor.to_string());
    }
  }
}

LOCKSTEP_THREAD_TEST(DTensorPrinting, IsPrintedByGoogleTest, 2) {
  const auto mesh = init_device_mesh("cpu", {world.world_size()});
  const auto tensor = distribute_tensor(at::ones({4, 2}), mesh, {Shard(0)});
  EXPECT_EQ(::testing::PrintToString(tensor.tensor()), tensor.to_string());
  EXPECT_EQ(::testing::PrintToString(tensor), tensor.to_string());
  EXPECT_NE(::testing::PrintToString(at::ones({2})).find("CPUFloatType{2}"), std::string::npos);
  EXPECT_NE(::testing::PrintToString(std::vector<at::Tensor>{tensor}).find("Shard(dim=0)"), std::string::npos);
}

}  // namespace
}  // namespace lockstep::dtensor_printing_test
