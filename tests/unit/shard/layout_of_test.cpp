// What a parameter's layout survives, and what it does not.
#include "lockstep/shard/layout_of.h"

#include <sstream>

#include "lockstep/comm/fake/fake_backend.h"
#include "lockstep/comm/world.h"
#include "lockstep/testing/gtest.h"

namespace lockstep {
namespace {

using testing::check_equal;
using testing::expect_error;

Layout layout_for(int64_t rows, int rank = 0) {
  return {DeviceMesh::from_group(make_fake_group(rank, 2).group, "cpu"), {Shard(0)}, {rows, 3}};
}

at::Tensor carrier() {
  auto tensor = at::ones({2, 3}).requires_grad_();
  set_layout(tensor, layout_for(4));
  return tensor;
}

TEST(LayoutOf, IsNullWithoutOne) {
  EXPECT_EQ(layout_of(at::ones({2})), nullptr);
  EXPECT_EQ(layout_of(at::ones({2}).requires_grad_()), nullptr);
  EXPECT_EQ(layout_of(at::Tensor()), nullptr);
}

TEST(LayoutOf, GivesWhatWasSet) {
  const auto tensor = carrier();
  ASSERT_NE(layout_of(tensor), nullptr);
  EXPECT_EQ(layout_of(tensor)->sizes(), (std::vector<int64_t>{4, 3}));
  const auto handle = tensor;
  EXPECT_EQ(layout_of(handle), layout_of(tensor)) << "handles share the tensor";
  set_layout(tensor, layout_for(3));
  EXPECT_EQ(layout_of(handle)->sizes(), (std::vector<int64_t>{3, 3})) << "replaced";
  clear_layout(tensor);
  EXPECT_EQ(layout_of(tensor), nullptr);
  clear_layout(at::ones({2}));
  set_layout(tensor, layout_for(4));
  EXPECT_NE(layout_of(tensor), nullptr);
}

TEST(LayoutOf, TellsWhatIsGathered) {
  const auto tensor = carrier();
  EXPECT_FALSE(has_gathered_layout(tensor)) << "modules compute with it as it is";
  auto whole = at::ones({8, 3});
  set_gathered_layout(tensor, layout_for(4), {whole});
  EXPECT_TRUE(has_gathered_layout(tensor));
  ASSERT_EQ(gathered_wholes(tensor).size(), 1);
  EXPECT_TRUE(gathered_wholes(tensor)[0].is_same(whole));
  whole = at::Tensor();
  EXPECT_TRUE(gathered_wholes(tensor).empty()) << "it keeps nothing alive";
  set_layout(tensor, layout_for(4));
  EXPECT_FALSE(has_gathered_layout(tensor)) << "replaced";
  set_gathered_layout(tensor, layout_for(4), {});
  clear_layout(tensor);
  EXPECT_FALSE(has_gathered_layout(tensor));
  EXPECT_FALSE(has_gathered_layout(at::Tensor()));
}

TEST(LayoutOf, FrozenAndIntegerTensorsCarryOne) {
  const auto frozen = at::ones({2, 3});
  set_layout(frozen, layout_for(4));
  EXPECT_NE(layout_of(frozen), nullptr);
  EXPECT_FALSE(frozen.requires_grad());
  const auto integer = at::ones({2, 3}, at::kLong);
  set_layout(integer, layout_for(4));
  EXPECT_NE(layout_of(integer), nullptr);
}

TEST(LayoutOf, SurvivesNewMemory) {
  const auto tensor = carrier();
  tensor.set_data(at::zeros({2, 3}, at::kDouble));
  EXPECT_NE(layout_of(tensor), nullptr) << "set_data, another dtype";
  {
    const at::NoGradGuard no_grad;
    tensor.set_(at::zeros({2, 3}, at::kDouble));
  }
  EXPECT_NE(layout_of(tensor), nullptr) << "set_";
  auto flat = at::zeros({10}, at::kDouble);
  tensor.set_data(flat.narrow(0, 0, 6).view({2, 3}));
  EXPECT_NE(layout_of(tensor), nullptr) << "a place in a flat buffer";
  tensor.requires_grad_(false);
  tensor.requires_grad_(true);
  EXPECT_NE(layout_of(tensor), nullptr) << "frozen and back";
}

TEST(LayoutOf, StaysWithTheTensorItWasGivenTo) {
  const auto tensor = carrier();
  EXPECT_EQ(layout_of(tensor.detach()), nullptr);
  EXPECT_EQ(layout_of(tensor.clone()), nullptr);
  EXPECT_EQ(layout_of(tensor.view({6})), nullptr);
  EXPECT_EQ(layout_of(tensor * 2), nullptr);
  EXPECT_EQ(layout_of(tensor.to(at::kDouble)), nullptr);
  auto other = at::zeros({2, 3});
  other.set_data(tensor);
  EXPECT_EQ(layout_of(other), nullptr) << "the memory's owner has it, not the memory";
}

TEST(LayoutOf, SurvivesWhatModulesDo) {
  torch::nn::Linear module(3, 2);
  set_layout(module->weight, layout_for(4));
  std::stringstream file;
  torch::save(module, file);
  module->to(at::kDouble);
  EXPECT_NE(layout_of(module->weight), nullptr) << "to()";
  module->to(at::kFloat);
  torch::load(module, file);
  EXPECT_NE(layout_of(module->weight), nullptr) << "load()";
  EXPECT_NE(layout_of(module->parameters()[0]), nullptr) << "registered";
  module->zero_grad();
  EXPECT_NE(layout_of(module->weight), nullptr);
  const auto copy = std::dynamic_pointer_cast<torch::nn::LinearImpl>(module->clone());
  EXPECT_EQ(layout_of(copy->weight), nullptr) << "a clone is another module";
}

TEST(LayoutOf, LeavesGradientsAndHooksAlone) {
  const auto tensor = carrier();
  const auto plain = at::ones({2, 3}).requires_grad_();
  EXPECT_FALSE(has_gradient_hooks(tensor));
  EXPECT_FALSE(has_gradient_hooks(at::ones({2})));
  int calls = 0;
  const auto position = tensor.register_hook([&](const at::Tensor& gradient) {
    ++calls;
    return gradient * 3;
  });
  EXPECT_TRUE(has_gradient_hooks(tensor));
  for (const auto& each : {tensor, plain}) (each * each * 5).sum().backward();
  check_equal("the user's hook counts", tensor.grad(), plain.grad() * 3);
  EXPECT_EQ(calls, 1);
  tensor.remove_hook(position);
  EXPECT_FALSE(has_gradient_hooks(tensor));
  EXPECT_NE(layout_of(tensor), nullptr);
  tensor.mutable_grad() = at::Tensor();
  (tensor * tensor * 5).sum().backward();
  check_equal("without it", tensor.grad(), plain.grad());
  const auto before = at::ones({2, 3}).requires_grad_();
  before.register_hook([](const at::Tensor& gradient) { return gradient * 2; });
  EXPECT_TRUE(has_gradient_hooks(before));
  set_layout(before, layout_for(4));
  before.sum().backward();
  check_equal("a hook from before", before.grad(), at::full({2, 3}, 2.F));
}

TEST(LayoutOf, GoesWithTheTensor) {
  const auto group = make_fake_group(0, 2).group;
  const auto uses = group.use_count();
  {
    auto tensor = at::ones({2, 3}).requires_grad_();
    set_layout(tensor, {DeviceMesh::from_group(group, "cpu"), {Shard(0)}, {4, 3}});
    EXPECT_GT(group.use_count(), uses);
    tensor.set_data(at::zeros({2, 3}));
    EXPECT_GT(group.use_count(), uses);
    tensor.sum().backward();
  }
  EXPECT_EQ(group.use_count(), uses);
}

TEST(LayoutOf, IsNotFoundAtAnAddressUsedAgain) {
  for (int i = 0; i < 100; ++i) {
    auto tensor = at::ones({2, 3}).requires_grad_();
    EXPECT_EQ(layout_of(tensor), nullptr);
    set_layout(tensor, layout_for(4));
  }
}

TEST(LayoutOf, RefusesTensorsItCannotDescribe) {
  expect_error([] { set_layout(at::ones({3, 3}), layout_for(4)); },
               {"[lockstep/shard] rank 0", "[3, 3]", "[2, 3]", "Shard(dim=0)"});
  expect_error([] { set_layout(at::ones({2, 3}).requires_grad_() * 2, layout_for(4)); },
               {"[lockstep/shard]", "Float[2, 3]", "detach()"});
  expect_error([] { set_layout(at::Tensor(), layout_for(4)); }, {"[lockstep/shard]", "undefined"});
  EXPECT_NO_THROW(set_layout(at::ones({1, 3}), layout_for(3, 1))) << "uneven";
}

}  // namespace
}  // namespace lockstep
