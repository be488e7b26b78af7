// Rules of reductions, searches, softmax: against one device.
#include "lockstep/comm/world.h"
#include "lockstep/testing/recorder.h"
#include "tests/support/dtensor_rules.h"

namespace lockstep::reduction_rules_test {
namespace {

using testing::check_rule;
using testing::normal;
using testing::RuleCase;
using testing::Tensors;

using Unary = std::function<at::Tensor(const at::Tensor&)>;

RuleCase unary(const std::string& name, const at::Tensor& input, const Unary& run, bool has_gradient = true) {
  return {name, {input}, [run](const Tensors& x) { return Tensors{run(x[0])}; }, has_gradient};
}

std::vector<RuleCase> cases_of(at::IntArrayRef sizes) {
  const auto x = normal(sizes, 1);
  std::vector<RuleCase> cases = {
      unary("sum", x, [](const auto& a) { return a.sum(); }),
      unary("mean", x, [](const auto& a) { return a.mean(); }),
      unary("prod", x, [](const auto& a) { return a.prod(); }),
      unary("max", x, [](const auto& a) { return a.max(); }),
      unary("min", x, [](const auto& a) { return a.min(); }),
      unary("median", x, [](const auto& a) { return a.median(); }),
      unary("argmax", x, [](const auto& a) { return a.argmax(); }),
      unary("any", x, [](const auto& a) { return a.gt(1.5).any(); }),
      unary("all", x, [](const auto& a) { return a.gt(-2.0).all(); }),
      unary("norm", x, [](const auto& a) { return a.norm(); }),
      unary("norm 3", x, [](const auto& a) { return at::linalg_vector_norm(a, 3); }),
      unary("norm inf", x, [](const auto& a) { return at::linalg_vector_norm(a, INFINITY); }),
      unary("norm -inf", x, [](const auto& a) { return at::linalg_vector_norm(a, -INFINITY); }),
      unary(
          "norm 0", x, [](const auto& a) { return at::linalg_vector_norm(a, 0); }, false),
      unary(
          "norm -1", x, [](const auto& a) { return at::linalg_vector_norm(a, -1); }, false),
      unary("var", x, [](const auto& a) { return a.var(); }),
      unary("int amax", at::arange(x.numel()).view(x.sizes()), [](const auto& a) { return a.amax(); }),
  };
  for (int64_t dim = 0; dim < x.dim(); ++dim) {
    const bool keeps = dim % 2 == 0;
    const auto add = [&](const std::string& name, const Unary& run, bool has_gradient = true) {
      cases.push_back(unary(str(name, " ", dim), x, run, has_gradient));
    };
    add("sum", [dim, keeps](const auto& a) { return a.sum(dim, keeps); });
    add("mean", [dim, keeps](const auto& a) { return a.mean(dim, keeps); });
    add("prod", [dim, keeps](const auto& a) { return a.prod(dim, keeps); });
    add("amax", [dim, keeps](const auto& a) { return a.amax(dim, keeps); });
    add("amin", [dim, keeps](const auto& a) { return a.amin(dim, keeps); });
    add("argmin", [dim](const auto& a) { return a.argmin(dim); });
    add("any", [dim](const auto& a) { return a.gt(1).any(dim); });
    add("all", [dim, keeps](const auto& a) { return a.gt(-1).all(dim, keeps); });
    add("norm", [dim, keeps](const auto& a) { return at::linalg_vector_norm(a, 2, dim, keeps); });
    add("norm inf", [dim, keeps](const auto& a) { return at::linalg_vector_norm(a, INFINITY, dim, keeps); });
    add("var", [dim, keeps](const auto& a) { return at::var(a, at::IntArrayRef{dim}, 1, keeps); });
    add("std", [dim, keeps](const auto& a) { return at::std(a, at::IntArrayRef{dim}, 0, keeps); });
    add("logsumexp", [dim, keeps](const auto& a) { return a.logsumexp(dim, keeps); });
    add("softmax", [dim](const auto& a) { return a.softmax(dim); });
    add("log_softmax", [dim](const auto& a) { return a.log_softmax(dim); });
    add("cumsum", [dim](const auto& a) { return a.cumsum(dim); });
    add("max with indices", [dim, keeps](const auto& a) { return std::get<0>(a.max(dim, keeps)); });
    add("median of dim", [dim, keeps](const auto& a) { return std::get<0>(a.median(dim, keeps)); });
    cases.push_back({str("topk ", dim), {x}, [dim](const Tensors& a) {
                       const auto [values, indices] = at::topk(a[0], 2, dim);
                       return Tensors{values, indices};
                     }});
    cases.push_back({str("sort ", dim), {x}, [dim](const Tensors& a) {
                       const auto [values, indices] = a[0].sort(dim);
                       return Tensors{values, indices};
                     }});
    cases.push_back({str("var_mean ", dim),
                     {x},
                     [dim, keeps](const Tensors& a) {
                       const auto [variance, mean] = at::var_mean(a[0], at::IntArrayRef{dim}, 1, keeps);
                       return Tensors{variance, mean};
                     },
                     false});
  }
  return cases;
}

void check_all(const DeviceMesh& mesh) {
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{4, 6}, {5, 3, 2}, {2, 7}}) {
    for (const auto& each : cases_of(sizes)) check_rule(mesh, each, mesh.ndim() == 1 ? 24 : 8);
  }
}

// TP-18
LOCKSTEP_THREAD_TEST(ReductionRules, OnTwoRanks, 2) {
  check_all(init_device_mesh("cpu", {2}));
}

// TP-18
LOCKSTEP_THREAD_TEST(ReductionRules, OnThreeRanks, 3) {
  check_all(init_device_mesh("cpu", {3}));
}

// TP-18
LOCKSTEP_THREAD_TEST(ReductionRules, OnASquare, 4) {
  check_all(init_device_mesh("cpu", {2, 2}));
}

// A number is the same on all ranks, and comparing tells all the same.
LOCKSTEP_THREAD_TEST(ReductionRules, GiveNumbersToAllRanks, 3) {
  const auto mesh = init_device_mesh("cpu", {3});
  const auto x = normal({7}, 1);
  const auto cut = distribute_tensor(x, mesh, {Shard(0)});
  EXPECT_DOUBLE_EQ(cut.tensor().sum().item<double>(), x.sum().item<double>());
  EXPECT_TRUE(at::equal(cut, distribute_tensor(x, mesh, {Replicate()})));
  auto other = x.clone();
  other[6] += 1;
  EXPECT_FALSE(at::equal(cut, distribute_tensor(other, mesh, {Shard(0)})));
  EXPECT_FALSE(at::equal(cut, distribute_tensor(normal({6}, 1), mesh, {Shard(0)})));
}

// TP-6: numbers on ranks outside of the mesh
LOCKSTEP_THREAD_TEST(ReductionRules, GiveNumbersOutsideOfTheMesh, 3) {
  const auto mesh = DeviceMesh::from_ranks("cpu", {.ranks = {0, 1}});
  const auto cut = distribute_tensor(at::ones({4}), mesh, {Shard(0)});
  EXPECT_EQ(cut.tensor().sum().item<double>(), mesh.is_member() ? 4 : 0);
  EXPECT_TRUE(at::equal(cut, cut));
}

// Reduced by parts where that can be put together again: nothing is gathered.
LOCKSTEP_THREAD_TEST(ReductionRules, DoNotGatherWhatPartsGive, 2) {
  const auto mesh = init_device_mesh("cpu", {2});
  const auto cut = distribute_tensor(normal({5, 4}, 1), mesh, {Shard(0)});
  const testing::Recorder recorder;
  EXPECT_EQ(DTensor(cut.tensor().mean()).placements(), (Placements{Partial()}));
  EXPECT_EQ(DTensor(cut.tensor().mean(0)).placements(), (Placements{Partial()}));
  EXPECT_EQ(DTensor(cut.tensor().mean(1)).placements(), (Placements{Shard(0)}));
  EXPECT_EQ(DTensor(cut.tensor().amax(0)).placements(), (Placements{Partial(ReduceOp::MAX)}));
  EXPECT_EQ(DTensor(cut.tensor().min()).placements(), (Placements{Partial(ReduceOp::MIN)}));
  EXPECT_EQ(DTensor(cut.tensor().softmax(1)).placements(), (Placements{Shard(0)}));
  EXPECT_TRUE(recorder.events().empty());
  EXPECT_EQ(DTensor(cut.tensor().norm()).placements(), (Placements{Replicate()}));
  testing::expect_exact_order(recorder.events("launch"), {"all_reduce"});
}

}  // namespace
}  // namespace lockstep::reduction_rules_test
