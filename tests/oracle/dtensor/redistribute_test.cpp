// Compares DTensor::redistribute() with Python's for every pair of placements: values, gradients and collectives.
#include <atomic>

#include "lockstep/dtensor/dtensor.h"
#include "lockstep/testing/gtest.h"
#include "tests/support/oracle_collectives.h"
#include "tests/support/oracle_reference.h"

namespace lockstep::redistribute_oracle_test {

using oracle::at_key;
using oracle::Counts;
using testing::check_equal;

std::vector<int64_t> integers_of(const c10::IValue& list) {
  std::vector<int64_t> integers;
  for (const auto& each : list.toListRef()) integers.push_back(each.toInt());
  return integers;
}

Placements placements_of(const c10::IValue& list) {
  Placements placements;
  for (const auto& each : list.toListRef()) {
    const auto written = integers_of(each);
    const Placement all[] = {Replicate(), Shard(written[1]), StridedShard(written[1], std::max<int64_t>(written[2], 1)),
                             Partial()};
    placements.push_back(all[written[0]]);
  }
  return placements;
}

struct Case {
  explicit Case(const c10::IValue& value) : all(value) {}

  std::string describe() const {
    return str(to_string(from), " to ", to_string(to), " of [", join(sizes, ","), "] on (", join(mesh, ","), ")");
  }
  bool is_strided() const {
    const auto strided = [](const Placement& each) { return std::holds_alternative<StridedShard>(each); };
    return std::any_of(from.begin(), from.end(), strided) || std::any_of(to.begin(), to.end(), strided);
  }
  bool is_refused() const { return all.toGenericDict().contains("error"); }

  c10::IValue all;
  std::vector<int64_t> mesh = integers_of(at_key(all, "mesh"));
  std::vector<int64_t> sizes = integers_of(at_key(all, "sizes"));
  Placements from = placements_of(at_key(all, "from"));
  Placements to = placements_of(at_key(all, "to"));
};

/// This rank's number in the mesh.
int64_t ravel(const DeviceMesh& mesh) {
  int64_t number = 0;
  for (int64_t axis = 0; axis < mesh.ndim(); ++axis) number = number * mesh.size(axis) + mesh.get_local_rank(axis);
  return number;
}

/// How often ours were Python's collectives, and how often others.
struct Tally {
  std::atomic<int> same = 0;
  std::atomic<int> others = 0;
};

void compare_collectives(const Case& subject, const std::string& pass, const Counts& ours, Tally& tally) {
  const auto python = oracle::counts_of(at_key(subject.all, pass));
  // Better ones: a tensor that is cut along another dim goes by all-to-all, where Python over gloo gathers all of it.
  // A strided cut goes through the whole tensor, which can take a step more than Python.
  EXPECT_TRUE(oracle::are_as_good(ours, python) ||
              (subject.is_strided() && oracle::total(ours) <= oracle::total(python) + 1))
      << subject.describe() << ", " << pass << ": " << oracle::to_text(ours) << "; Python: " << oracle::to_text(python);
  ++(ours == python ? tally.same : tally.others);
}

void compare(const Case& subject, const DeviceMesh& mesh, Tally& tally) {
  const auto rank = static_cast<std::size_t>(ravel(mesh));
  const auto stride = at::empty(subject.sizes, at::kDouble).strides().vec();
  const FromLocalOptions whole{.shape = subject.sizes, .stride = stride};
  if (subject.is_refused()) {
    const Layout layout(mesh, subject.from, subject.sizes);
    const auto tensor = DTensor::from_local(at::zeros(layout.local_sizes(), at::kDouble), mesh, subject.from, whole);
    testing::expect_error([&] { tensor.redistribute(subject.to); }, {"cannot be redistributed"});
    return;
  }
  const auto mine = oracle::tensors_of(at_key(subject.all, "ranks").toListRef()[rank]);
  const auto local = mine[0].clone().set_requires_grad(true);
  testing::Recorder forward;
  const auto result = DTensor::from_local(local, mesh, subject.from, whole).redistribute(subject.to).to_local();
  compare_collectives(subject, "forward", oracle::launched(forward), tally);
  const testing::Recorder backward;
  (result * mine[1]).sum().backward();
  compare_collectives(subject, "backward", oracle::launched(backward), tally);
  const testing::Tolerance rounding{.relative = 1e-13, .absolute = 1e-13};
  check_equal(subject.describe(), result.detach(), mine[2], rounding);
  check_equal("gradient, " + subject.describe(), local.grad(), mine[3], rounding);
}

// TP-20, TP-21, TP-23 to TP-31
TEST(RedistributeOracle, AgreesWithPyTorch) {
  const auto reference = oracle::run_reference("dtensor/redistribute_reference.py");
  if (reference.isNone()) GTEST_SKIP() << "there is no Python to compare with";
  std::vector<Case> cases;
  for (const auto& each : reference.toListRef()) cases.emplace_back(each);
  ASSERT_GT(cases.size(), 600U);
  Tally tally;
  testing::run_threads_in_gtest({.world_size = 4}, [&](const World&) {
    const auto grid = init_device_mesh("cpu", {2, 2}, {.mesh_dim_names = {"a", "b"}});
    const auto line = init_device_mesh("cpu", {4});
    for (const auto& subject : cases) {
      compare(subject, subject.mesh.size() == 2 ? grid : subject.mesh[0] == 2 ? grid["b"] : line, tally);
    }
  });
  RecordProperty("same", tally.same);
  RecordProperty("others", tally.others);
  EXPECT_GT(tally.same, 2 * tally.others);
}

}  // namespace lockstep::redistribute_oracle_test
