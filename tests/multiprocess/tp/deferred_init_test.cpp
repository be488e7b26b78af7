// Layers of a module without memory are divided, and then filled: a rank has its parts, and no more. Processes, because
// threads would draw from one generator.
#include "lockstep/intercept/deferred_init.h"
#include "lockstep/fsdp/fully_shard.h"
#include "lockstep/testing/gtest.h"
#include "lockstep/tp/parallelize_module.h"
#include "tests/support/tensor_parallel_pairs.h"

namespace lockstep {
namespace {

using namespace tensor_parallel_pairs;  // NOLINT(google-build-using-namespace)
using testing::expect_error;

Mlp build() {
  return Mlp(8, 12);
}

const ParallelPlan& plan() {
  static const ParallelPlan plan = {{"in", ColwiseParallel()}, {"out", RowwiseParallel()}};
  return plan;
}

Mlp divided_without_memory(const DeviceMesh& mesh) {
  auto model = built_from_seed([] { return deferred_init(build); }, 1);
  parallelize_module(*model, mesh, plan(), {.src_data_rank = std::nullopt});
  for (const auto& parameter : model->parameters()) EXPECT_TRUE(is_deferred(parameter));
  return model;
}

/// One step of both.
void expect_computes_alike(Mlp& model, Mlp& whole) {
  const auto x = built_from_seed([] { return at::randn({3, 8}); }, 2);
  const auto y = model(x);
  const auto expected = whole(x);
  expect_close("output", y, expected);
  y.pow(2).sum().backward();
  expected.pow(2).sum().backward();
}

LOCKSTEP_PROCESS_TEST(TpDeferredInit, PartsAreThoseOfAnOrdinaryBuild, 2) {
  const auto mesh = init_device_mesh("cpu", {2});
  auto whole = built_from_seed(build, 1);
  auto model = divided_without_memory(mesh);
  materialize_module(*model);
  EXPECT_TRUE(model->in->weight.is_cpu());  // also of what it computes with
  expect_computes_alike(model, whole);
  expect_parts(*model, *whole);
}

LOCKSTEP_PROCESS_TEST(TpDeferredInit, UnitsFillTheirParts, 4) {
  const auto mesh = init_device_mesh("cpu", {2, 2}, {.mesh_dim_names = {"dp", "tp"}});
  auto whole = built_from_seed(build, 1);
  auto model = divided_without_memory(mesh["tp"]);
  fully_shard(model, {.mesh = mesh["dp"]});
  expect_computes_alike(model, whole);
}

LOCKSTEP_PROCESS_TEST(TpDeferredInit, NobodyCanSendWhatHasNoMemory, 2) {
  const auto mesh = init_device_mesh("cpu", {2});
  auto model = deferred_init(build);
  expect_error([&] { parallelize_module(*model, mesh, plan()); }, {"no memory yet", "src_data_rank"});
}

}  // namespace
}  // namespace lockstep
