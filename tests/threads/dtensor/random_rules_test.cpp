// Random operators on DTensors, and factories: values are those of one device, whatever the placements.
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/world.h"
#include "lockstep/dtensor/factories.h"
#include "tests/support/dtensor_rules.h"

namespace lockstep::random_rules_test {
namespace {

using testing::axis_placements;
using testing::check_equal;
using testing::expect_error;
using testing::normal;

at::Generator seeded(uint64_t seed = 7) {
  return at::make_generator<at::CPUGeneratorImpl>(seed);
}

using Draw = std::function<at::Tensor(const at::Tensor&, at::Generator)>;

const std::vector<std::pair<std::string, Draw>> kDraws = {
    {"normal_", [](const at::Tensor& x, at::Generator g) { return x.clone().normal_(1, 2, std::move(g)); }},
    {"uniform_", [](const at::Tensor& x, at::Generator g) { return x.clone().uniform_(-1, 1, std::move(g)); }},
    {"bernoulli_", [](const at::Tensor& x, at::Generator g) { return x.clone().bernoulli_(0.4, std::move(g)); }},
    {"exponential_", [](const at::Tensor& x, at::Generator g) { return x.clone().exponential_(2, std::move(g)); }},
    {"random_", [](const at::Tensor& x, at::Generator g) { return x.clone().random_(3, 50, std::move(g)); }},
    {"bernoulli", [](const at::Tensor& x, at::Generator g) { return at::bernoulli(x.sigmoid(), std::move(g)); }},
};

void check_draws(const DeviceMesh& mesh) {
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{4, 6}, {5, 7}, {1, 2, 3}}) {
    const auto whole = normal(sizes, 1);
    std::vector<Placements> all;
    for (const auto& first : axis_placements(whole)) {
      for (const auto& second : axis_placements(whole)) {
        all.push_back(mesh.ndim() == 1 ? Placements{first} : Placements{first, second});
        if (mesh.ndim() == 1) break;
      }
    }
    for (const auto& placements : all) {
      const bool has_terms = std::any_of(placements.begin(), placements.end(),
                                         [](const auto& each) { return std::holds_alternative<Partial>(each); });
      if (has_terms) continue;
      const auto x = distribute_tensor(whole, mesh, placements);
      for (const auto& [name, draw] : kDraws) {
        check_equal(str(name, " ", to_string(placements)), DTensor(draw(x, seeded())).full_tensor(),
                    draw(whole, seeded()));
      }
    }
  }
}

// TP-22
LOCKSTEP_THREAD_TEST(RandomRules, OnTwoRanks, 2) {
  check_draws(init_device_mesh("cpu", {2}));
}

// TP-22
LOCKSTEP_THREAD_TEST(RandomRules, OnThreeRanks, 3) {
  check_draws(init_device_mesh("cpu", {3}));
}

// TP-22
LOCKSTEP_THREAD_TEST(RandomRules, OnASquare, 4) {
  check_draws(init_device_mesh("cpu", {2, 2}));
}

// Memory in another order is filled in that order, as on one device.
LOCKSTEP_THREAD_TEST(RandomRules, FollowStrides, 2) {
  const auto mesh = init_device_mesh("cpu", {2});
  const auto whole = at::zeros({40, 30}).t();
  const auto x = distribute_tensor(at::zeros({40, 30}), mesh, {Shard(1)}).tensor().t();
  check_equal("normal_", DTensor(x.normal_(0, 1, seeded())).full_tensor(), whole.normal_(0, 1, seeded()));
}

// TP-22: the sum of random terms would be something else
LOCKSTEP_THREAD_TEST(RandomRules, RefuseTerms, 2) {
  const auto mesh = init_device_mesh("cpu", {2});
  const auto terms = DTensor::from_local(at::ones({4}), mesh, {Partial()});
  expect_error([&] { terms.tensor().normal_(); }, {"aten::normal_", "Partial(sum)", "redistribute()"});
}

/// What all ranks of the world hold is the same.
void check_same_everywhere(const std::string& what, const at::Tensor& local, const World& world) {
  auto first = local.contiguous().clone();
  broadcast(first, 0, world.group());
  check_equal(what, local.contiguous(), first);
}

// TP-44: one mask for all: its slices where sequences are cut, all of it on replicas. Generators stood otherwise.
LOCKSTEP_RANK_TEST(RandomRules, DropOutOneMask, 2) {
  const auto mesh = init_device_mesh("cpu", {2});
  at::manual_seed(static_cast<uint64_t>(world.rank()) + 5);
  for (const Placement& placement : {Placement(Replicate()), Placement(Shard(1))}) {
    const auto x = distribute_tensor(at::ones({3, 5, 4}), mesh, {placement});
    const DTensor dropped(at::dropout(x, 0.5, true));
    EXPECT_EQ(dropped.placements(), (Placements{placement}));
    const auto whole = dropped.full_tensor();
    EXPECT_GT(whole.eq(0).sum().item<int64_t>(), 0);
    EXPECT_GT(whole.eq(2).sum().item<int64_t>(), 0);
    check_same_everywhere("mask", whole, world);
    const auto [native, mask] = at::native_dropout(x, 0.25, true);
    check_same_everywhere("native", DTensor(native).full_tensor(), world);
    check_equal("mask of native", DTensor(mask).full_tensor(), DTensor(native).full_tensor().ne(0));
  }
}

// TP-22, TP-44: ranks draw on where the first one stood, and go on together
LOCKSTEP_PROCESS_TEST(RandomRules, TakeOverTheFirstGenerator, 2) {
  const auto mesh = init_device_mesh("cpu", {2});
  at::manual_seed(static_cast<uint64_t>(world.rank()) + 5);
  auto one = seeded(5);
  const auto first = dtensor::randn({5, 3}, {.mesh = mesh, .placements = {Shard(0)}});
  check_equal("first", first.full_tensor(), at::randn({5, 3}, one));
  check_equal("second", dtensor::rand({40}, {.mesh = mesh}).full_tensor(), at::rand({40}, one));
  check_equal("like", DTensor(at::rand_like(first)).full_tensor(), at::rand({5, 3}, one));
  check_equal("like, normal", DTensor(at::randn_like(first)).full_tensor(), at::randn({5, 3}, one));
  check_equal("ordinary", at::randn({3}), at::randn({3}, one));
}

// TP-22
LOCKSTEP_THREAD_TEST(DTensorFactories, MakeParts, 3) {
  const auto mesh = init_device_mesh("cpu", {3});
  const dtensor::FactoryOptions options = {.mesh = mesh, .placements = {Shard(0)}, .requires_grad = true};
  const auto zeros = dtensor::zeros({4, 2}, options);
  EXPECT_TRUE(zeros.tensor().requires_grad() && zeros.tensor().is_leaf());
  EXPECT_EQ(zeros.to_local().size(0), world.rank() < 2 ? 2 : 0);
  check_equal("zeros", zeros.full_tensor().detach(), at::zeros({4, 2}));
  check_equal("ones", dtensor::ones({4, 2}, options).full_tensor().detach(), at::ones({4, 2}));
  check_equal("full", dtensor::full({4}, 3, {.mesh = mesh, .dtype = at::kLong}).full_tensor(),
              at::full({4}, 3, at::kLong));
  EXPECT_EQ(dtensor::empty({7, 2}, options).tensor().sizes(), (at::IntArrayRef{7, 2}));
  check_equal("rand", dtensor::rand({7}, {.mesh = mesh, .placements = {Shard(0)}, .generator = seeded()}).full_tensor(),
              at::rand({7}, seeded()));
  expect_error([&] { dtensor::zeros({4}, {.mesh = mesh, .placements = {Partial()}}); },
               {"terms of a sum", "from_local()"});
}

}  // namespace
}  // namespace lockstep::random_rules_test
