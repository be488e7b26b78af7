// Compares what ranks hold of tensors with what PyTorch's distributed tensors say: sizes, offsets and the elements.
#include "lockstep/shard/layout.h"

#include "lockstep/base/str.h"
#include "lockstep/testing/gtest.h"
#include "tests/support/oracle_reference.h"

namespace lockstep {
namespace {

using oracle::at_key;

std::vector<int64_t> integers_of(const c10::IValue& list) {
  std::vector<int64_t> integers;
  for (const auto& each : list.toListRef()) integers.push_back(each.toInt());
  return integers;
}

Placement placement_of(const std::vector<int64_t>& written) {
  if (written[0] == 0) return Replicate();
  if (written[0] == 1) return Shard(written[1]);
  return StridedShard(written[1], written[2]);
}

/// Numbers of the elements in the part, row by row.
std::vector<int64_t> elements_of(const TensorPart& part, const std::vector<int64_t>& sizes) {
  std::vector<int64_t> elements = {0};
  for (std::size_t dim = 0; dim < sizes.size(); ++dim) {
    std::vector<int64_t> finer;
    for (const auto element : elements) {
      for (const auto& range : part.ranges()[dim]) {
        for (auto i = range.begin; i < range.end; ++i) finer.push_back(element * sizes[dim] + i);
      }
    }
    elements = std::move(finer);
  }
  return elements;
}

// TP-14, TP-15, TP-16
TEST(LayoutOracle, PartsAgreeWithPyTorch) {
  const auto cases = oracle::run_reference("shard/layout_reference.py");
  if (cases.isNone()) GTEST_SKIP() << "there is no Python to compare with";
  ASSERT_GT(cases.toListRef().size(), 500U);
  for (const auto& subject : cases.toListRef()) {
    const auto mesh = integers_of(at_key(subject, "mesh"));
    const auto sizes = integers_of(at_key(subject, "sizes"));
    Placements placements;
    for (const auto& each : at_key(subject, "placements").toListRef())
      placements.push_back(placement_of(integers_of(each)));
    const auto ranks = at_key(subject, "ranks").toListRef().vec();
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
      const auto wanted = ranks[rank].toListRef().vec();
      const auto coordinate = unravel(static_cast<int64_t>(rank), mesh);
      const auto part = part_at(coordinate, mesh, placements, sizes);
      const auto what =
          str(to_string(placements), " of [", join(sizes, ","), "] on (", join(mesh, ","), "), rank ", rank);
      EXPECT_EQ(part.sizes(), integers_of(wanted[0])) << what;
      EXPECT_EQ(part.offsets(), integers_of(wanted[1])) << what;
      EXPECT_EQ(elements_of(part, sizes), integers_of(wanted[2])) << what;
    }
  }
}

}  // namespace
}  // namespace lockstep
