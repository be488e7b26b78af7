// Rules of norms, embeddings and indices: against one device.
#include "lockstep/comm/world.h"
#include "lockstep/testing/recorder.h"
#include "tests/support/dtensor_rules.h"

namespace lockstep::lookup_rules_test {
namespace {

using testing::check_rule;
using testing::integers;
using testing::normal;
using testing::RuleCase;
using testing::Tensors;

std::vector<RuleCase> norm_cases() {
  std::vector<RuleCase> cases;
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{4, 6}, {3, 5, 4}, {1, 3, 2}}) {
    const auto x = normal(sizes, 1);
    const auto weight = normal({sizes.back()}, 2);
    const auto bias = normal({sizes.back()}, 3);
    const at::IntArrayRef shape(&sizes.back(), 1);
    const std::vector<int64_t> normalized = shape.vec();
    cases.push_back({"layer_norm", {x, weight, bias}, [normalized](const Tensors& a) {
                       return Tensors{at::layer_norm(a[0], normalized, a[1], a[2])};
                     }});
    cases.push_back({"layer_norm without bias", {x, weight}, [normalized](const Tensors& a) {
                       return Tensors{at::layer_norm(a[0], normalized, a[1])};
                     }});
    cases.push_back({"layer_norm without weight", {x}, [normalized](const Tensors& a) {
                       return Tensors{at::layer_norm(a[0], normalized)};
                     }});
    cases.push_back({"rms_norm", {x, weight}, [normalized](const Tensors& a) {
                       return Tensors{at::rms_norm(a[0], normalized, a[1])};
                     }});
  }
  cases.push_back({"layer_norm over two dims", {normal({5, 2, 3}, 1), normal({2, 3}, 2)}, [](const Tensors& a) {
                     return Tensors{at::layer_norm(a[0], {2, 3}, a[1])};
                   }});
  cases.push_back({"group_norm", {normal({3, 4, 5}, 1), normal({4}, 2), normal({4}, 3)}, [](const Tensors& a) {
                     return Tensors{std::get<0>(at::native_group_norm(a[0], a[1], a[2], 3, 4, 5, 2, 1e-5))};
                   }});
  return cases;
}

std::vector<RuleCase> lookup_cases() {
  std::vector<RuleCase> cases;
  for (const int64_t rows : {6, 7, 2}) {
    const auto table = normal({rows, 4}, 1);
    const auto ids = integers(rows, {3, 5}, 2);
    cases.push_back({"embedding", {table, ids}, [](const Tensors& a) { return Tensors{at::embedding(a[0], a[1])}; }});
    cases.push_back({"embedding with padding", {table, ids}, [](const Tensors& a) {
                       return Tensors{at::embedding(a[0], a[1], /*padding_idx=*/1)};
                     }});
    cases.push_back({"embedding by frequency", {table, ids}, [](const Tensors& a) {
                       return Tensors{at::embedding(a[0], a[1], -1, /*scale_grad_by_freq=*/true)};
                     }});
  }
  const auto x = normal({5, 4, 3}, 3);
  for (int64_t dim = 0; dim < 3; ++dim) {
    cases.push_back({str("index_select ", dim), {x, integers(x.size(dim), {5}, 4)}, [dim](const Tensors& a) {
                       return Tensors{a[0].index_select(dim, a[1])};
                     }});
    auto sizes = x.sizes().vec();
    sizes[dim] = 2;
    cases.push_back({str("gather ", dim), {x, integers(x.size(dim), sizes, 5)}, [dim](const Tensors& a) {
                       return Tensors{a[0].gather(dim, a[1])};
                     }});
    cases.push_back({str("gather of fewer ", dim), {x, integers(x.size(dim), {2, 3, 2}, 6)}, [dim](const Tensors& a) {
                       return Tensors{a[0].gather(dim, a[1])};
                     }});
    cases.push_back({str("scatter_add ", dim),
                     {x, integers(x.size(dim), sizes, 7), normal(sizes, 8)},
                     [dim](const Tensors& a) { return Tensors{a[0].scatter_add(dim, a[1], a[2])}; }});
  }
  cases.push_back(
      {"index", {x, integers(5, {2, 3}, 9)}, [](const Tensors& a) { return Tensors{at::index(a[0], {a[1]})}; }});
  cases.push_back({"index of dims 1 and 2", {x, integers(4, {2}, 9), integers(3, {2}, 10)}, [](const Tensors& a) {
                     return Tensors{at::index(a[0], {std::nullopt, a[1], a[2]})};
                   }});
  cases.push_back({"index of dims 0 and 2", {x, integers(5, {2}, 9), integers(3, {4, 1}, 10)}, [](const Tensors& a) {
                     return Tensors{at::index(a[0], {a[1], std::nullopt, a[2]})};
                   }});
  cases.push_back({"index of rows", {x, integers(4, {6}, 9)}, [](const Tensors& a) {
                     return Tensors{at::index(a[0], {std::nullopt, a[1]})};
                   }});
  cases.push_back({"new_zeros", {x}, [](const Tensors& a) { return Tensors{a[0].new_zeros({2, 3})}; }});
  cases.push_back({"new_full", {x}, [](const Tensors& a) { return Tensors{a[0].new_full({5, 4, 3}, 2)}; }});
  return cases;
}

void check_all(const DeviceMesh& mesh, const std::vector<RuleCase>& cases) {
  for (const auto& each : cases) check_rule(mesh, each, mesh.ndim() == 1 ? 60 : 20);
}

// TP-18, TP-38
LOCKSTEP_THREAD_TEST(NormRules, OnTwoRanks, 2) {
  check_all(init_device_mesh("cpu", {2}), norm_cases());
}

LOCKSTEP_THREAD_TEST(NormRules, OnThreeRanks, 3) {
  check_all(init_device_mesh("cpu", {3}), norm_cases());
}

LOCKSTEP_THREAD_TEST(NormRules, OnASquare, 4) {
  check_all(init_device_mesh("cpu", {2, 2}), norm_cases());
}

// TP-33, TP-34
LOCKSTEP_THREAD_TEST(LookupRules, OnTwoRanks, 2) {
  check_all(init_device_mesh("cpu", {2}), lookup_cases());
}

LOCKSTEP_THREAD_TEST(LookupRules, OnThreeRanks, 3) {
  check_all(init_device_mesh("cpu", {3}), lookup_cases());
}

LOCKSTEP_THREAD_TEST(LookupRules, OnASquare, 4) {
  check_all(init_device_mesh("cpu", {2, 2}), lookup_cases());
}

// TP-38: sequences cut: nothing is sent forward, and gradients of the weight are terms
LOCKSTEP_THREAD_TEST(NormRules, SendNothingForRowsThatAreCut, 2) {
  const auto mesh = init_device_mesh("cpu", {2});
  const auto x = distribute_tensor(normal({2, 5, 4}, 1), mesh, {Shard(1)});
  const auto weight = distribute_tensor(normal({4}, 2).requires_grad_(), mesh, {Replicate()});
  const testing::Recorder recorder;
  const auto y = at::layer_norm(x, {4}, weight);
  EXPECT_EQ(DTensor(y).placements(), (Placements{Shard(1)}));
  const auto gradient = torch::autograd::grad({y}, {weight}, {at::ones_like(y)})[0];
  EXPECT_EQ(DTensor(gradient).placements(), (Placements{Partial()}));
  EXPECT_TRUE(recorder.events().empty());
}

// TP-34: nothing is sent to look ids up, and an id that no rank has is an error as on one device
LOCKSTEP_THREAD_TEST(LookupRules, LookUpRowsWithoutGathering, 3) {
  const auto mesh = init_device_mesh("cpu", {3});
  const auto table = distribute_tensor(normal({7, 4}, 1), mesh, {Shard(0)});
  const auto ids = distribute_tensor(integers(7, {5}, 2), mesh, {Replicate()});
  const testing::Recorder recorder;
  EXPECT_EQ(DTensor(at::embedding(table, ids)).placements(), (Placements{Partial()}));
  EXPECT_TRUE(recorder.events().empty());
  const auto wrong = DTensor::from_local(at::full({2}, 7, at::kLong), mesh, {Replicate()});
  testing::expect_error([&] { at::embedding(table, wrong); }, {"aten::embedding", "outside of the table"});
}

}  // namespace
}  // namespace lockstep::lookup_rules_test
