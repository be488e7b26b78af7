// Compares values and gradients of differentiable collectives with Python's.
#include "lockstep/nn/functional_collectives.h"

#include "lockstep/comm/world.h"
#include "lockstep/testing/gtest.h"
#include "tests/support/oracle_reference.h"

namespace lockstep {
namespace {

using oracle::at_key;
using oracle::tensors_of;
using testing::check_equal;
using testing::Tolerance;

at::Tensor run(const std::string& name, const at::Tensor& tensor, const World& world) {
  const auto& group = world.group();
  if (name == "all_reduce") return functional::all_reduce(tensor, group);
  if (name == "all_gather 0") return functional::all_gather(tensor, group, 0);
  if (name == "all_gather 1") return functional::all_gather(tensor, group, 1);
  if (name == "reduce_scatter 0") return functional::reduce_scatter(tensor, group, 0);
  if (name == "reduce_scatter 1") return functional::reduce_scatter(tensor, group, 1);
  if (name == "broadcast") return functional::broadcast(tensor, 1, group);
  const std::vector<std::vector<int64_t>> splits = {{1, 3}, {2, 2}};
  const auto rank = world.rank();
  return functional::all_to_all_single(tensor, group, {splits[0][rank], splits[1][rank]}, splits[rank]);
}

TEST(FunctionalCollectivesOracle, ValuesAndGradientsAgreeWithPython) {
  const auto cases = oracle::run_reference("nn/functional_collectives_reference.py");
  if (cases.isNone()) GTEST_SKIP() << "there is no Python to compare with";
  ASSERT_EQ(cases.toGenericDict().size(), 7U);
  for (const auto& entry : cases.toGenericDict()) {
    const auto name = entry.key().toStringRef();
    testing::run_threads_in_gtest({.world_size = 2}, [&](const World& world) {
      const auto wanted = tensors_of(entry.value().toListRef()[world.rank()]);
      const auto input = wanted[0].clone().requires_grad_();
      const auto output = run(name, input, world);
      (output * wanted[2]).sum().backward();
      check_equal(name, output.detach(), wanted[1], Tolerance::of(at::kDouble));
      check_equal(name + ", gradient", input.grad(), wanted[3], Tolerance::of(at::kDouble));
    });
  }
}

}  // namespace
}  // namespace lockstep
