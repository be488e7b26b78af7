// Operators that change shapes on DTensors, with every placement, forward and backward, against one device; views that
// are written; and attention as models write it, which moves nothing.
#include <torch/torch.h>

#include <functional>
#include <random>

#include "lockstep/base/str.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/world.h"
#include "lockstep/dtensor/dtensor.h"
#include "lockstep/dtensor/dtensor_impl.h"
#include "lockstep/testing/gtest.h"
#include "lockstep/testing/recorder.h"
#include "tests/support/dtensor_line.h"

namespace lockstep::shape_rules_test {
namespace {

using testing::check_equal;
using testing::expect_error;
using testing::Recorder;
using Sizes = std::vector<int64_t>;
using Tensors = std::vector<at::Tensor>;
using testing::line;

struct Case {
  std::string name;
  std::vector<Sizes> inputs;
  std::function<Tensors(const Tensors&)> run;
};

/// Of one tensor.
Case of(const std::string& name, const Sizes& sizes, const std::function<at::Tensor(const at::Tensor&)>& run) {
  return {name, {sizes}, [run](const Tensors& inputs) -> Tensors { return {run(inputs[0])}; }};
}

Case parts_of(const std::string& name, const Sizes& sizes, const std::function<Tensors(const at::Tensor&)>& run) {
  return {name, {sizes}, [run](const Tensors& inputs) { return run(inputs[0]); }};
}

/// Whole numbers, so that sums are exact in any order.
at::Tensor whole_of(const Sizes& sizes, int64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(seed));
  return at::randint(-30, 30, sizes, generator, at::TensorOptions(at::kLong)).to(at::kDouble) * 12;
}

at::Tensor term_of(const at::Tensor& value, ReduceOp op, int64_t index, int64_t count) {
  if (op == ReduceOp::SUM) return index == 0 ? value - 5 * count * (count - 1) : at::full_like(value, 10 * index);
  if (op == ReduceOp::AVG) return value + (2 * index - (count - 1));
  return index == count - 1 ? value : value - 1 - index;  // max
}

at::Tensor distributed(const at::Tensor& whole, const DeviceMesh& mesh, const Placements& placements) {
  const Layout layout(mesh, placements, whole.sizes().vec());
  auto local = whole.detach();
  for (std::size_t axis = 0; axis < placements.size(); ++axis) {
    const auto* partial = std::get_if<Partial>(&placements[axis]);
    if (partial == nullptr) continue;
    local = term_of(local, partial->op, (*mesh.get_coordinate())[axis], mesh.size(static_cast<int64_t>(axis)));
  }
  return DTensor::from_local(layout.cut(local).clone(at::MemoryFormat::Contiguous), mesh, placements,
                             {.shape = whole.sizes().vec(), .stride = whole.strides().vec()})
      .tensor();
}

Placements candidates(int64_t dims) {
  Placements all = {Replicate(), Partial(), Partial(ReduceOp::AVG), Partial(ReduceOp::MAX)};
  for (int64_t dim = 0; dim < dims; ++dim) {
    all.emplace_back(Shard(dim));
    all.emplace_back(StridedShard(dim, 2));
  }
  if (dims > 0) all.emplace_back(StridedShard(dims - 1, 3));
  return all;
}

bool do_mix(const Placements& placements) {
  const auto has = [&](bool is_max) {
    return std::any_of(placements.begin(), placements.end(), [&](const Placement& each) {
      const auto* partial = std::get_if<Partial>(&each);
      return partial != nullptr && (partial->op == ReduceOp::MAX) == is_max;
    });
  };
  return !(has(true) && has(false));
}

/// Of the first and of the last dim: the first ranks hold one index each, the last one the others.
std::vector<Placements> ragged(const DeviceMesh& mesh, const Sizes& sizes) {
  std::vector<Placements> all;
  for (const auto dim : {std::size_t{0}, sizes.size() - 1}) {
    if (mesh.ndim() != 1 || sizes.empty() || sizes[dim] < mesh.size()) continue;
    std::vector<int64_t> counts(static_cast<std::size_t>(mesh.size()), 1);
    counts.back() = sizes[dim] - mesh.size() + 1;
    all.push_back({RaggedShard(static_cast<int64_t>(dim), counts)});
  }
  return all;
}

std::vector<Placements> all_placements(const DeviceMesh& mesh, const Sizes& sizes) {
  const auto dims = static_cast<int64_t>(sizes.size());
  auto all = ragged(mesh, sizes);
  for (const auto& first : candidates(dims)) {
    if (mesh.ndim() == 1) {
      all.push_back({first});
      continue;
    }
    for (const auto& second : candidates(dims)) {
      if (do_mix({first, second})) all.push_back({first, second});
    }
  }
  return all;
}

/// Results, and gradients of a weighted sum of them.
struct Outcome {
  Tensors results;
  Tensors gradients;
};

Outcome outcome_of(const Case& test, const Tensors& inputs, const std::function<at::Tensor(const at::Tensor&)>& give) {
  Outcome outcome;
  outcome.results = test.run(inputs);
  at::Tensor loss;
  int64_t seed = 100;
  for (const auto& each : outcome.results) {
    if (seed++ == 101) continue;  // the second of several has no gradient
    auto term = (each * give(whole_of(each.sizes().vec(), seed))).sum();
    loss = loss.defined() ? loss + term : term;
  }
  loss.backward();
  for (const auto& each : inputs) outcome.gradients.push_back(each.grad());
  return outcome;
}

void check_case(const Case& test, const DeviceMesh& mesh, const std::vector<Placements>& placements) {
  std::string what = test.name;
  Tensors wholes;
  Tensors inputs;
  for (std::size_t i = 0; i < test.inputs.size(); ++i) {
    what += str(" [", join(test.inputs[i], ", "), "] ", to_string(placements[i]));
    const auto whole = whole_of(test.inputs[i], static_cast<int64_t>(i));
    wholes.push_back(whole.clone().requires_grad_());
    inputs.push_back(distributed(whole, mesh, placements[i]).requires_grad_());
  }
  const ::testing::ScopedTrace trace(__FILE__, __LINE__, what);
  const Placements replicas(static_cast<std::size_t>(mesh.ndim()), Replicate());
  const auto expected = outcome_of(test, wholes, [](const at::Tensor& weights) { return weights; });
  const auto actual =
      outcome_of(test, inputs, [&](const at::Tensor& weights) { return distributed(weights, mesh, replicas); });
  ASSERT_EQ(actual.results.size(), expected.results.size());
  for (std::size_t i = 0; i < expected.results.size(); ++i) {
    const DTensor result(actual.results[i]);
    ASSERT_EQ(result.tensor().sizes(), expected.results[i].sizes());
    EXPECT_EQ(result.tensor().is_contiguous(), expected.results[i].is_contiguous());
    ASSERT_EQ(result.to_local().sizes(), at::IntArrayRef(result.layout().local_sizes()));
    check_equal("result of " + what, result.full_tensor().detach(), expected.results[i].detach());
  }
  for (std::size_t i = 0; i < wholes.size(); ++i) {
    if (wholes[i].sizes() == at::IntArrayRef{0}) continue;  // libtorch gives what cat() leaves out an ordinary one
    check_equal("gradient of " + what, DTensor(actual.gradients[i]).full_tensor(), expected.gradients[i]);
  }
}

/// All placements of one input, on a line of two; else some of them.
void check_cases(const std::vector<Case>& cases, const DeviceMesh& mesh) {
  std::mt19937 random(7);
  for (const auto& test : cases) {
    std::vector<std::vector<Placements>> all = {{}};
    for (const auto& sizes : test.inputs) {
      std::vector<std::vector<Placements>> longer;
      for (const auto& begun : all) {
        for (const auto& each : all_placements(mesh, sizes)) {
          longer.push_back(begun);
          longer.back().push_back(each);
        }
      }
      all = std::move(longer);
    }
    std::shuffle(all.begin(), all.end(), random);
    const std::size_t most = mesh.ndim() == 1 ? 40 : 12;
    if (all.size() > most) all.erase(all.begin() + static_cast<std::ptrdiff_t>(most), all.end());
    for (const auto& placements : all) check_case(test, mesh, placements);
  }
}

std::vector<Case> views() {
  std::vector<Case> cases;
  for (const Sizes& sizes : {Sizes{4, 6, 12}, Sizes{5, 3, 7}, Sizes{2, 1, 9}}) {
    const auto a = sizes[0];
    const auto b = sizes[1];
    const auto c = sizes[2];
    for (const Sizes& to : {Sizes{-1}, Sizes{a * b, c}, Sizes{a, -1}, Sizes{a, 1, b, c}, Sizes{1, a, b * c, 1}}) {
      cases.push_back(of("view", sizes, [=](const at::Tensor& x) { return x.view(to); }));
    }
    cases.push_back(
        of("transposed view", sizes, [=](const at::Tensor& x) { return x.transpose(0, 1).reshape({-1, c}); }));
    cases.push_back(of("sliced view", sizes, [=](const at::Tensor& x) { return x.slice(2, 0, 3).reshape({a, -1}); }));
    for (int64_t dim = -4; dim < 4; ++dim) {
      cases.push_back(of("unsqueeze", sizes, [=](const at::Tensor& x) { return x.unsqueeze(dim); }));
    }
    for (int64_t dim = 0; dim < 3; ++dim) {
      const auto size = sizes[static_cast<std::size_t>(dim)];
      cases.push_back(of("transpose", sizes, [=](const at::Tensor& x) { return x.transpose(dim, -1); }));
      cases.push_back(of("select", sizes, [=](const at::Tensor& x) { return x.select(dim, -1); }));
      cases.push_back(of("slice", sizes, [=](const at::Tensor& x) { return x.slice(dim, size / 2); }));
      cases.push_back(of("slice of all", sizes, [=](const at::Tensor& x) { return x.slice(dim, 0, size); }));
      cases.push_back(of("slice with a step", sizes, [=](const at::Tensor& x) { return x.slice(dim, 0, size, 2); }));
      cases.push_back(of("narrow", sizes, [=](const at::Tensor& x) { return x.narrow(dim, 0, (size + 1) / 2); }));
      cases.push_back(parts_of("split", sizes, [=](const at::Tensor& x) { return x.split(2, dim); }));
      cases.push_back(parts_of("chunk", sizes, [=](const at::Tensor& x) { return x.chunk(3, dim); }));
      cases.push_back(parts_of("split_with_sizes", sizes,
                               [=](const at::Tensor& x) { return x.split_with_sizes({1, size - 1}, dim); }));
      cases.push_back(parts_of("unbind", sizes, [=](const at::Tensor& x) { return x.unbind(dim); }));
    }
    cases.push_back(of("permute", sizes, [=](const at::Tensor& x) { return x.permute({2, 0, -2}); }));
    cases.push_back(of("diagonal", sizes, [=](const at::Tensor& x) { return x.diagonal(1, 2, 0); }));
    cases.push_back(of("unfold", sizes, [=](const at::Tensor& x) { return x.unfold(2, 3, 2); }));
    cases.push_back(of("expand", sizes, [=](const at::Tensor& x) { return x.expand({3, -1, b, c}); }));
  }
  cases.push_back(of("expand", {5, 1, 3}, [](const at::Tensor& x) { return x.expand({2, -1, 4, 3}); }));
  cases.push_back(of("unflatten", {4, 6, 12}, [](const at::Tensor& x) { return x.view({2, 2, 6, 3, 4}); }));
  cases.push_back(of("unflatten", {12, 5}, [](const at::Tensor& x) { return x.unflatten(0, {3, 2, 2}); }));
  cases.push_back(of("t", {5, 4}, [](const at::Tensor& x) { return x.t(); }));
  cases.push_back(of("t", {5}, [](const at::Tensor& x) { return x.t(); }));
  cases.push_back(of("squeeze", {1, 5, 1, 3}, [](const at::Tensor& x) { return x.squeeze(); }));
  cases.push_back(of("squeeze", {2, 5, 1, 3}, [](const at::Tensor& x) { return x.squeeze(-2); }));
  cases.push_back(of("squeeze", {2, 5, 3}, [](const at::Tensor& x) { return x.squeeze(0); }));
  cases.push_back(of("empty view", {0, 4}, [](const at::Tensor& x) { return x.view({0, 2, 2}); }));
  cases.push_back(of("empty view", {3, 0, 4}, [](const at::Tensor& x) { return x.view({4, 0, 3}); }));
  cases.push_back(of("empty slice", {3, 4}, [](const at::Tensor& x) { return x.slice(0, 2, 2); }));
  cases.push_back(of("empty expand", {0, 1}, [](const at::Tensor& x) { return x.t().expand({2, -1, 0}); }));
  cases.push_back(of("squeeze", {1, 3, 1, 2}, [](const at::Tensor& x) { return x.squeeze(Sizes{0, 3, -2}); }));
  return cases;
}

std::vector<Case> rearrangements() {
  std::vector<Case> cases;
  for (const Sizes& sizes : {Sizes{4, 6}, Sizes{5, 7}, Sizes{3, 4, 8}}) {
    const auto last = static_cast<int64_t>(sizes.size()) - 1;
    cases.push_back(of("flip", sizes, [=](const at::Tensor& x) { return x.flip({0, last}); }));
    cases.push_back(of("flip", sizes, [=](const at::Tensor& x) { return x.flip({-1}); }));
    cases.push_back(of("roll", sizes, [=](const at::Tensor& x) { return x.roll({2}, {1}); }));
    cases.push_back(of("roll", sizes, [=](const at::Tensor& x) { return x.roll({3}); }));
    Sizes repeats(sizes.size() + 1, 1);
    repeats[0] = 2;
    repeats[2] = 3;
    cases.push_back(of("repeat", sizes, [=](const at::Tensor& x) { return x.repeat(repeats); }));
    for (const int64_t diagonal : {-1, 0, 2}) {
      cases.push_back(of("tril", sizes, [=](const at::Tensor& x) { return x.tril(diagonal); }));
      cases.push_back(of("triu", sizes, [=](const at::Tensor& x) { return x.triu(diagonal); }));
    }
    cases.push_back(of("pad", sizes, [](const at::Tensor& x) { return at::constant_pad_nd(x, {1, 2}, 0); }));
    cases.push_back(of("pad", sizes, [](const at::Tensor& x) { return at::constant_pad_nd(x, {0, 0, -1, 2}, 5); }));
    for (int64_t dim = 0; dim < 2; ++dim) {
      auto other = sizes;
      other[static_cast<std::size_t>(dim)] *= 2;
      cases.push_back({"cat", {sizes, other}, [=](const Tensors& x) -> Tensors { return {at::cat(x, dim)}; }});
      cases.push_back({"stack", {sizes, sizes}, [=](const Tensors& x) -> Tensors { return {at::stack(x, dim)}; }});
    }
    cases.push_back({"stack", {sizes, sizes}, [](const Tensors& x) -> Tensors { return {at::stack(x, -1)}; }});
    cases.push_back({"cat with nothing", {{0}, sizes}, [](const Tensors& x) -> Tensors { return {at::cat(x, -1)}; }});
  }
  return cases;
}

DeviceMesh square() {
  return init_device_mesh("cpu", {2, 2});
}

// TP-18
LOCKSTEP_THREAD_TEST(ShapeRules, ViewsAreThoseOfOneDeviceOnTwoRanks, 2) {
  check_cases(views(), line(world));
}

LOCKSTEP_THREAD_TEST(ShapeRules, ViewsAreThoseOfOneDeviceOnThreeRanks, 3) {
  check_cases(views(), line(world));
}

LOCKSTEP_THREAD_TEST(ShapeRules, ViewsAreThoseOfOneDeviceOnASquare, 4) {
  check_cases(views(), square());
}

LOCKSTEP_THREAD_TEST(ShapeRules, RearrangementsAreThoseOfOneDeviceOnTwoRanks, 2) {
  check_cases(rearrangements(), line(world));
}

LOCKSTEP_THREAD_TEST(ShapeRules, RearrangementsAreThoseOfOneDeviceOnThreeRanks, 3) {
  check_cases(rearrangements(), line(world));
}

LOCKSTEP_THREAD_TEST(ShapeRules, RearrangementsAreThoseOfOneDeviceOnASquare, 4) {
  check_cases(rearrangements(), square());
}

// Views that are written. The tensor they are views of, and its other views, see it; gradients are those of one device.

using Write = std::function<at::Tensor(const at::Tensor&)>;

/// `write` gets a tensor that is no leaf, writes a view of it, and returns what the loss is made of.
void check_write(const std::string& name, const Sizes& sizes, const DeviceMesh& mesh, const Placements& placements,
                 const Write& write) {
  check_case(of(name, sizes, [&](const at::Tensor& x) { return write(x * 3); }), mesh, {placements});
}

const std::vector<std::pair<std::string, Write>>& writes() {
  static const std::vector<std::pair<std::string, Write>> all = {
      {"view", [](const at::Tensor& x) { return x.view({-1}).add_(1), x * 2; }},
      {"view of a view", [](const at::Tensor& x) { return x.unsqueeze(0).view({2, -1}).mul_(5), x * 2; }},
      {"transposed", [](const at::Tensor& x) { return x.t().mul_(2), x * 2; }},
      {"row", [](const at::Tensor& x) { return x[0].zero_(), x * 2; }},
      {"row, by another view",
       [](const at::Tensor& x) {
         const auto turned = x.t();
         x[0].mul_(4);
         return turned * 2;
       }},
      {"column", [](const at::Tensor& x) { return x.select(1, -1).mul_(3), x * 2; }},
      {"rows", [](const at::Tensor& x) { return x.slice(0, 1, 3).mul_(3), x * 2; }},
      {"the view itself",
       [](const at::Tensor& x) {
         auto view = x.view({2, -1});
         x.mul_(2);
         return view.mul_(7) * 2;
       }},
      {"with itself", [](const at::Tensor& x) { return x.t().mul_(x.t().detach() + 1), x * 2; }},
      {"in another shape", [](const at::Tensor& x) { return (x * 2).t_().unsqueeze_(0).transpose_(0, 1).squeeze_(1); }},
  };
  return all;
}

// TP-18
LOCKSTEP_THREAD_TEST(WrittenViews, AreSeenByTheirTensorAndItsOtherViews, 2) {
  const auto mesh = line(world);
  for (const auto& [name, write] : writes()) {
    for (const Sizes& sizes : {Sizes{4, 6}, Sizes{6, 5}}) {
      check_write(name, sizes, mesh, {Replicate()}, write);
    }
  }
  for (const auto* name : {"transposed", "with itself", "in another shape", "column", "rows", "row"}) {
    const auto found =
        std::find_if(writes().begin(), writes().end(), [&](const auto& each) { return each.first == name; });
    const bool cuts_rows = std::string(name) == "column";
    const bool cuts_columns = std::string(name) == "row" || std::string(name) == "rows";
    if (!cuts_columns) check_write(name, {5, 4}, mesh, {Shard(0)}, found->second);
    if (!cuts_rows) check_write(name, {4, 5}, mesh, {Shard(1)}, found->second);
  }
  check_write("view", {4, 6}, mesh, {Shard(0)}, writes()[0].second);
  check_write("view", {4, 6}, mesh, {Shard(1)}, writes()[0].second);
  check_write("the view itself", {4, 6}, mesh, {Shard(0)}, writes()[7].second);
}

LOCKSTEP_THREAD_TEST(WrittenViews, AreSeenOnOneRank, 1) {
  for (const auto& [name, write] : writes()) {
    for (const Placement& placement : Placements{Shard(0), Shard(1), StridedShard(1, 2)}) {
      check_write(name, {4, 6}, line(world), {placement}, write);
    }
  }
}

/// A view that had to be copied is not written, nor read once its tensor has been.
LOCKSTEP_THREAD_TEST(WrittenViews, AreRefusedWhereTheyAreCopies, 2) {
  const auto mesh = line(world);
  const auto whole = whole_of({5, 6}, 1);
  const auto make = [&] { return distributed(whole, mesh, {Shard(0)}) * 1; };
  auto x = make();
  expect_error([&] { x[0].zero_(); }, {"aten::zero_ writes a view"});
  expect_error([&] { x.view({-1}).add_(1); }, {"clone() the view"});
  expect_error([&] { x.view({-1}).detach().add_(1); }, {"aten::add_"});
  expect_error([&] { x.view({-1}).view({6, 5}).t().add_(1); }, {"aten::add_"});
  expect_error([&] { x.squeeze_().slice(0, 1, 3).copy_(x.slice(0, 0, 2)); }, {"aten::copy_"});
  expect_error(
      [&] {
        x.tril_();
        x.t().view({-1}).mul_(2);
      },
      {"aten::mul_"});
  x = make();
  check_equal("a copy of it is written", DTensor(x[0].clone().zero_()).full_tensor(), at::zeros({6}, at::kDouble));
  check_equal("it is not", DTensor(x).full_tensor(), whole);
  const auto row = x[0];
  const auto detached = row.detach();
  check_equal("read", DTensor(row + 1).full_tensor(), whole[0] + 1);
  x.mul_(2);
  expect_error([&] { auto sum = row + 1; }, {"has been written in place since"});
  expect_error([&] { auto local = DTensor(row).to_local(); }, {"Make the view again"});
  expect_error([&] { auto sum = detached + 1; }, {"Make the view again"});
  check_equal("made again", DTensor(x[0] + 1).full_tensor(), whole[0] * 2 + 1);
  // In place the tensor would have to lie in another way.
  expect_error([&] { distributed(whole, mesh, {StridedShard(0, 2)}).tril_(); }, {"in place"});
  expect_error([&] { distributed(whole.slice(0, 0, 1), mesh, {Shard(0)}).squeeze_(0); }, {"in place"});
  expect_error([&] { auto strided = x.as_strided({2, 2}, {1, 1}); }, {"aten::as_strided"});
  const at::InferenceMode inference;
  expect_error([&] { make()[0].zero_(); }, {"aten::zero_"});
}

/// Of parts that lie in memory otherwise than the whole would, and differ in size, some could be viewed and some not:
/// one head of three on a rank, two on another. All ranks say the same.
LOCKSTEP_THREAD_TEST(WrittenViews, OfUnevenPartsAreCopiesOnAllRanksOrOnNone, 2) {
  const auto mesh = line(world);
  const Sizes whole_sizes = {2, 3, 5, 4};
  const auto whole = whole_of(whole_sizes, 1);
  const auto layout = Layout(mesh, {Shard(1)}, whole_sizes);
  const auto held = layout.cut(whole).transpose(1, 2).contiguous().transpose(1, 2);
  const std::vector<std::pair<std::string, Sizes>> shapes = {{"heads with the batch", {6, 5, 4}},
                                                             {"behind the heads", {2, 3, 20}},
                                                             {"all", {-1}},
                                                             {"nothing", {2, 1, 3, 5, 1, 2, 2}}};
  for (const auto& [name, sizes] : shapes) {
    const at::Tensor tensor =
        DTensor::from_local(held.clone(at::MemoryFormat::Preserve), mesh, {Shard(1)},
                            {.shape = whole_sizes, .stride = at::empty(whole_sizes, at::kMeta).strides().vec()});
    const auto view = tensor.view(sizes);
    check_equal(name, DTensor(view).full_tensor(), whole.view(sizes));
    const auto mine = at::full({1}, detail::dtensor_impl(view)->is_copied() ? 1 : 0, at::kLong);
    auto sum = mine.clone();
    all_reduce(sum, world.group());
    EXPECT_EQ(sum.item<int64_t>(), mine.item<int64_t>() * world.world_size()) << name;
    if (name == "nothing") {  // is joined
      view.mul_(2);
      check_equal(name, DTensor(tensor).full_tensor(), whole * 2);
    } else {
      expect_error([&] { view.mul_(2); }, {"aten::mul_ writes a view"});
    }
  }
}

/// Its gradient may lie on the ranks in a way that the view could not be written in.
LOCKSTEP_THREAD_TEST(WrittenViews, TakeGradientsOfAnyPlacement, 2) {
  const auto mesh = line(world);
  const auto whole = whole_of({5, 6}, 1);
  for (const auto& placement : candidates(2)) {
    auto expected = whole.clone().requires_grad_();
    auto written = expected * 3;
    written[0].mul_(2);
    written.view({-1}).mul_(5);
    written.backward(whole);
    auto x = distributed(whole, mesh, {Replicate()}).requires_grad_();
    auto y = x * 3;
    y[0].mul_(2);
    y.view({-1}).mul_(5);
    y.backward(distributed(whole, mesh, {placement}));
    check_equal("gradient by " + to_string(placement), DTensor(x.grad()).full_tensor(), expected.grad());
  }
}

/// A gradient that came through a view is a tensor of its own: it is accumulated, scaled and zeroed.
LOCKSTEP_THREAD_TEST(WrittenViews, AreNoMatterForGradients, 2) {
  const auto mesh = line(world);
  const auto whole = whole_of({3, 5}, 1);
  auto x = distributed(whole, mesh, {Shard(0)}).requires_grad_();
  auto weights = distributed(whole.view({-1}), mesh, {Shard(0)});
  for (int step = 0; step < 3; ++step) (x.view({-1}) * weights).sum().backward();
  check_equal("accumulated", DTensor(x.grad()).full_tensor(), whole * 3);
  x.mutable_grad().mul_(2);
  check_equal("scaled", DTensor(x.grad()).full_tensor(), whole * 6);
  x.mutable_grad().zero_();
  check_equal("zeroed", DTensor(x.grad()).full_tensor(), whole * 0);
}

// Attention as libtorch's and users' modules write it. Heads are cut, and nothing moves, forward or backward.

constexpr int64_t kTime = 3;
constexpr int64_t kBatch = 2;
constexpr int64_t kHeads = 6;
constexpr int64_t kWidth = 4;

/// Rows of [time, batch, 3 * embedding], as F::multi_head_attention_forward goes on from the product.
at::Tensor packed_attention(const at::Tensor& packed) {
  Tensors heads;
  for (const auto& each : packed.chunk(3, -1)) {
    heads.push_back(each.contiguous().view({kTime, kBatch * kHeads, kWidth}).transpose(0, 1));
  }
  const auto scores = at::bmm(heads[0], heads[1].transpose(1, 2));
  const auto mixed = at::bmm(scores * 0.5, heads[2]);
  return mixed.transpose(0, 1).contiguous().view({kTime, kBatch, kHeads * kWidth});
}

/// The same of [batch, time, 3 * embedding], as transformers of vision write it.
at::Tensor unbound_attention(const at::Tensor& packed) {
  const auto heads = packed.view({kBatch, kTime, 3, kHeads, kWidth}).permute({2, 0, 3, 1, 4}).unbind(0);
  const auto scores = at::matmul(heads[0], heads[1].transpose(-2, -1));
  return at::matmul(scores * 0.5, heads[2]).transpose(1, 2).reshape({kBatch, kTime, kHeads * kWidth});
}

void check_attention(const std::string& name, const Sizes& sizes, const DeviceMesh& mesh,
                     const std::function<at::Tensor(const at::Tensor&)>& attention) {
  const auto whole = whole_of(sizes, 1) / 12;
  const auto weights = whole_of({sizes[0], sizes[1], kHeads * kWidth}, 2) / 12;
  const auto expected_input = whole.clone().requires_grad_();
  const auto expected = attention(expected_input);
  expected.backward(weights);
  const auto input = distributed(whole, mesh, {StridedShard(2, 3)}).requires_grad_();
  const auto gradient = distributed(weights, mesh, {Shard(2)});
  at::Tensor result;
  {
    const Recorder recorder;
    result = attention(input);
    result.backward(gradient);
    EXPECT_EQ(recorder.events("launch").size(), 0U) << name;
  }
  EXPECT_EQ(DTensor(result).placements(), (Placements{Shard(2)})) << name;
  EXPECT_EQ(DTensor(input.grad()).placements(), (Placements{StridedShard(2, 3)})) << name;
  check_equal(name, DTensor(result).full_tensor().detach(), expected.detach());
  check_equal("gradient of " + name, DTensor(input.grad()).full_tensor(), expected_input.grad());
}

LOCKSTEP_THREAD_TEST(Attention, OfPackedHeadsMovesNothing, 2) {
  check_attention("packed attention", {kTime, kBatch, 3 * kHeads * kWidth}, line(world), packed_attention);
  check_attention("unbound attention", {kBatch, kTime, 3 * kHeads * kWidth}, line(world), unbound_attention);
}

LOCKSTEP_THREAD_TEST(Attention, OfPackedHeadsMovesNothingOnThreeRanks, 3) {
  check_attention("packed attention", {kTime, kBatch, 3 * kHeads * kWidth}, line(world), packed_attention);
  check_attention("unbound attention", {kBatch, kTime, 3 * kHeads * kWidth}, line(world), unbound_attention);
}

/// libtorch's own function, with weights of heads cut as a fused projection needs it.
LOCKSTEP_THREAD_TEST(Attention, OfLibtorchMovesNothingBeforeItsOutput, 2) {
  namespace functional = torch::nn::functional;
  constexpr auto kEmbedding = kHeads * kWidth;
  const auto mesh = line(world);
  const std::vector<std::pair<Sizes, Placement>> made = {{{kTime, kBatch, kEmbedding}, Replicate()},
                                                         {{3 * kEmbedding, kEmbedding}, StridedShard(0, 3)},
                                                         {{3 * kEmbedding}, StridedShard(0, 3)},
                                                         {{kEmbedding, kEmbedding}, Shard(1)},
                                                         {{kEmbedding}, Replicate()}};
  Tensors wholes;
  Tensors inputs;
  for (std::size_t i = 0; i < made.size(); ++i) {
    const auto whole = whole_of(made[i].first, static_cast<int64_t>(i)) / 1000;
    wholes.push_back(whole.clone().requires_grad_());
    inputs.push_back(distributed(whole, mesh, {made[i].second}).requires_grad_());
  }
  const auto attend = [](const Tensors& of) {
    const auto options = functional::MultiheadAttentionForwardFuncOptions(kEmbedding, kHeads, of[1], of[2], {}, {},
                                                                          false, 0.0, of[3], of[4]);
    return functional::multi_head_attention_forward(of[0], of[0], of[0], options);
  };
  const auto [expected, expected_weights] = attend(wholes);
  (expected.pow(2).sum() + expected_weights.pow(3).sum()).backward();
  at::Tensor result;
  at::Tensor weights;
  {
    const Recorder recorder;
    std::tie(result, weights) = attend(inputs);
    // libtorch asks whether query, key and value are equal: an answer of one byte each.
    for (const auto& event : recorder.events("launch")) EXPECT_EQ(event.bytes, 1U) << event.kind;
  }
  EXPECT_EQ(DTensor(result).placements(), (Placements{Partial()}));
  (result.pow(2).sum() + weights.pow(3).sum()).backward();
  EXPECT_TRUE(at::allclose(DTensor(result).full_tensor(), expected));
  EXPECT_TRUE(at::allclose(DTensor(weights).full_tensor(), expected_weights));
  for (std::size_t i = 0; i < wholes.size(); ++i) {
    EXPECT_TRUE(at::allclose(DTensor(inputs[i].grad()).full_tensor(), wholes[i].grad())) << "gradient of input " << i;
  }
}

/// Without autograd, composite operators arrive whole.
LOCKSTEP_THREAD_TEST(Attention, WorksWithoutAutograd, 2) {
  const auto whole = whole_of({kBatch, kTime, 3 * kHeads * kWidth}, 1) / 12;
  const auto expected = unbound_attention(whole);
  {
    const at::NoGradGuard no_grad;
    const auto input = distributed(whole, line(world), {StridedShard(2, 3)});
    check_equal("without gradients", DTensor(unbound_attention(input)).full_tensor(), expected);
  }
  const at::InferenceMode inference;
  const auto input = distributed(whole, line(world), {StridedShard(2, 3)});
  check_equal("in inference mode", DTensor(unbound_attention(input)).full_tensor(), expected);
}

}  // namespace
}  // namespace lockstep::shape_rules_test
