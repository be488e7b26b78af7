// DTensors through operators and autograd, against one device.
#include "lockstep/dtensor/dtensor.h"

#include "lockstep/comm/world.h"
#include "lockstep/dtensor/implicit_replication.h"
#include "lockstep/testing/gtest.h"
#include "lockstep/testing/recorder.h"
#include "tests/support/dtensor_line.h"

namespace lockstep {
namespace {

using testing::check_equal;
using testing::expect_error;
using testing::line;
using testing::numbers;

// TP-18: a tensor of global sizes that prints what it is
LOCKSTEP_THREAD_TEST(DTensor, IsATensorOfGlobalSizes, 2) {
  const auto mesh = line(world);
  const auto whole = numbers({5, 4}, 1);
  const auto tensor = distribute_tensor(whole, mesh, {Shard(0)});
  EXPECT_EQ(tensor.tensor().sizes(), (at::IntArrayRef{5, 4}));
  EXPECT_TRUE(is_dtensor(tensor));
  EXPECT_FALSE(is_dtensor(whole));
  EXPECT_EQ(tensor.to_local().size(0), world.rank() == 0 ? 3 : 2);
  check_equal("full", tensor.full_tensor(), whole);
  EXPECT_THAT(tensor.to_string(), ::testing::HasSubstr("Shard(dim=0)"));
}

// TP-18: autograd works on it: a product of sharded matrices, its loss and gradients
LOCKSTEP_THREAD_TEST(DTensor, IsDifferentiated, 2) {
  const auto mesh = line(world);
  const auto x_whole = numbers({6, 4}, 1).requires_grad_();
  const auto w_whole = numbers({4, 8}, 2).requires_grad_();
  const auto v_whole = numbers({8, 3}, 3).requires_grad_();
  at::gelu(x_whole.mm(w_whole)).mm(v_whole).pow(2).sum().backward();

  const auto x = distribute_tensor(x_whole, mesh, {Replicate()});
  const auto w = distribute_tensor(w_whole, mesh, {Shard(1)});
  const auto v = distribute_tensor(v_whole, mesh, {Shard(0)});
  EXPECT_TRUE(w.tensor().requires_grad() && w.tensor().is_leaf());
  const auto hidden = at::gelu(x.tensor().mm(w));
  EXPECT_EQ(DTensor(hidden).placements(), (Placements{Shard(1)}));
  const auto out = hidden.mm(v);
  EXPECT_EQ(DTensor(out).placements(), (Placements{Partial()}));
  const auto loss = out.pow(2).sum();
  EXPECT_EQ(DTensor(loss).placements(), (Placements{Replicate()}));
  loss.backward();
  for (const auto& [tensor, whole] : {std::pair{x, x_whole}, {w, w_whole}, {v, v_whole}}) {
    ASSERT_TRUE(tensor.tensor().grad().defined());
    const DTensor gradient(tensor.tensor().grad());
    EXPECT_TRUE(at::allclose(gradient.full_tensor(), whole.grad(), 1e-4, 1e-5)) << gradient.to_string();
  }
}

}  // namespace
}  // namespace lockstep
