// U-8: compares a rank's samples with Python's, index by index.
#include "lockstep/nn/distributed_sampler.h"

#include "lockstep/testing/gtest.h"
#include "tests/support/oracle_reference.h"

namespace lockstep {
namespace {

using oracle::at_key;

TEST(DistributedSamplerOracle, IndicesAreThoseOfPython) {
  const auto cases = oracle::run_reference("nn/distributed_sampler_reference.py");
  if (cases.isNone()) GTEST_SKIP() << "there is no Python to compare with";
  ASSERT_EQ(cases.toListRef().size(), 4U * (1 + 2 + 3 + 7) * 16);
  for (const c10::IValue& each : cases.toListRef()) {
    const auto number = [&](const char* key) { return at_key(each, key).toInt(); };
    DistributedSampler sampler(static_cast<std::size_t>(number("size")),
                               {.num_replicas = static_cast<int>(number("ranks")),
                                .rank = static_cast<int>(number("rank")),
                                .shuffle = at_key(each, "shuffle").toBool(),
                                .seed = static_cast<uint64_t>(number("seed")),
                                .drop_last = at_key(each, "drop_last").toBool()});
    sampler.set_epoch(number("epoch"));
    const auto expected = at_key(each, "indices").toTensor();
    const auto* begin = expected.const_data_ptr<int64_t>();
    EXPECT_EQ(sampler.indices(), std::vector<std::size_t>(begin, begin + expected.numel())) << each;
  }
}

}  // namespace
}  // namespace lockstep
