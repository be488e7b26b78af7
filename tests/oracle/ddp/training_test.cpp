// Trains what Python's DistributedDataParallel trained, from the same weights on the same batches, and compares losses,
// gradients, parameters, buffers and logging data after every step. A second check: one process with all batches.
#include <gtest/gtest.h>

#include "lockstep/base/str.h"
#include "lockstep/ddp/distributed_data_parallel.h"
#include "lockstep/lockstep.h"
#include "lockstep/testing/gtest.h"
#include "tests/oracle/ddp/logging.h"
#include "tests/oracle/ddp/one_process.h"
#include "tests/oracle/ddp/reference.h"
#include "tests/oracle/ddp/training.h"

namespace lockstep::ddp_oracle {
namespace {

/// Whether PyTorch divides by the number of ranks somewhere, where ours multiplies by its inverse, as both do when they
/// copy a gradient into its bucket. Half of a number is the same either way, a third is not.
bool is_divided_otherwise(const Case& file_case) {
  const auto options = file_case.facts["options"];
  return file_case.facts["model"].text() == "Bags" || options.has("gradient_as_bucket_view") ||
         options.has("batched_grad_copy");
}

/// Where the ranks' models are, and what their sums travel by.
struct Setting {
  std::string backend;
  c10::Device device;
};

/// Two numbers have one sum in any order. Of three, gloo's order is Python's if the buckets are; shm has another one.
/// An accelerator multiplies in another order than the host, on which Python ran.
Tolerance tolerance_of(const Case& file_case, int world_size, const Setting& setting) {
  if (setting.device.is_cpu() && world_size == 2) return std::nullopt;
  // Sums of three round at 2^-8, and steps let it grow.
  if (file_case.facts["options"].has("mixed_precision")) return 0.1;
  if (!setting.device.is_cpu()) return 1e-3;
  if (setting.backend == "gloo" && !is_divided_otherwise(file_case)) return std::nullopt;
  return 1e-5;
}

void check_local_gradients(const Case& file_case, int rank) {
  const auto model = initial_model(file_case, rank);
  loss_of(*model, rank_step(file_case, rank, 0)).backward();
  const ::testing::ScopedTrace trace(__FILE__, __LINE__, "without DistributedDataParallel");
  expect_gradients(*model, file_case.ranks[rank]["results"]["local_gradients"], std::nullopt);
}

/// Forward and backward; the loss.
at::Tensor run_step(DistributedDataParallel<std::shared_ptr<Model>>& ddp, const std::string& kind,
                    const RankStep& step) {
  const auto no_sync = ddp.no_sync(kind == "local");
  const at::AutoGradMode grad_mode(kind != "evaluate");
  auto loss = loss_of(ddp, step);
  if (kind != "evaluate") loss.backward();
  return loss;
}

void check_case(const Case& file_case, const World& world, const Setting& setting) {
  const auto tolerance = tolerance_of(file_case, world.world_size(), setting);
  const auto results = file_case.ranks[world.rank()]["results"];
  const bool has_tensors = results.has("state");
  const bool has_one_process =
      has_tensors && world.rank() == 0 && setting.device.is_cpu() && file_case.facts["has_one_model"].flag();
  const EnvironmentScope environment(file_case);
  if (has_tensors) check_local_gradients(file_case, world.rank());

  const auto model = initial_model(file_case, world.rank(), setting.device);
  DistributedDataParallel ddp(model, world.group(), options_of(file_case));
  auto optimizer = make_optimizer(*model, file_case);
  OneProcess one_process(file_case, world.world_size());
  if (has_tensors) expect_same(flat_state(*model), results["state"].tensor(), std::nullopt, "what was synced");
  ExpectedLog log(results["log"], setting.backend, setting.device);
  log.expect_in(ddp.get_ddp_logging_data());

  Join scope({&ddp}, {.enable = file_case.facts["is_joined"].flag(),
                      .options = {.divide_by_initial_world_size = file_case.facts["divides_by_all"].flag()}});
  for (std::size_t i = 0; i < results["steps"].size(); ++i) {
    const ::testing::ScopedTrace trace(__FILE__, __LINE__, str("step ", i));
    const auto step = file_case.facts["steps"][i];
    const auto kind = step["kind"].text();
    const auto result = results["steps"][i];
    zero_gradients(*model, step["zero"].text());
    const auto loss = run_step(ddp, kind, rank_step(file_case, world.rank(), i, setting.device));
    // In Join scopes buckets are rebuilt in reduced steps only: other ranks do not know of local ones.
    if (!file_case.facts["is_joined"].flag()) {
      log.change(result["log"]);
      log.expect_in(ddp.get_ddp_logging_data());
    }
    if (has_tensors) {
      expect_same(loss, result["loss"].tensor(), tolerance, "loss");
      expect_gradients(*model, result["gradients"], tolerance);
    }
    if (has_one_process) one_process.run_step(i, *model);
    if (kind == "train") optimizer.step();
    if (has_tensors) expect_same(flat_state(*model), result["state"].tensor(), tolerance, "parameters and buffers");
    if (has_one_process && kind == "train") one_process.expect_same_parameters(*model);
  }
  scope.finish();
  if (results.has("final")) {
    expect_same(flat_state(*model), results["final"].tensor(), tolerance, "parameters and buffers in the end");
  }
}

void check_family(const std::string& family, const World& world, const Setting& setting) {
  const auto cases = cases_of(family, world.world_size());
  ASSERT_FALSE(cases.empty()) << "the reference has no " << family;
  for (const auto& each : cases) {
    const ::testing::ScopedTrace trace(__FILE__, __LINE__, str(family, ": ", each.facts["name"].text()));
    check_case(each, world, setting);
    if (::testing::Test::HasFailure()) return;  // one is enough to read
  }
}

enum class Where { kGloo, kShm, kGlooOnGpu };

template <int kRanks, Where kWhere>
struct Ranks {
  static constexpr int kWorldSize = kRanks;
  static constexpr const char* kBackend = kWhere == Where::kShm ? "shm" : "gloo";
  static constexpr bool kIsOnGpu = kWhere == Where::kGlooOnGpu;
};
struct RanksName {
  template <class R>
  static std::string GetName(int) {
    return str(R::kBackend, R::kIsOnGpu ? "_gpu" : "", R::kWorldSize);
  }
};

/// One set of rank processes per world size and backend, for all tests.
template <class R>
class DdpOracle : public testing::ContinuousTest<DdpOracle<R>> {
 public:
  static testing::RunOptions options() { return {.world_size = R::kWorldSize, .backend = R::kBackend}; }
  static void SetUpTestSuite() {
    if (!has_python() || is_gpu_missing()) return;
    ASSERT_NO_THROW(make_reference(R::kWorldSize));
    testing::ContinuousTest<DdpOracle>::SetUpTestSuite();
  }

 protected:
  static bool is_gpu_missing() { return R::kIsOnGpu && gpu_count() == 0; }
  void SetUp() override {
    if (!has_python()) GTEST_SKIP() << kNoPython;
    if (is_gpu_missing()) GTEST_SKIP() << "no GPU";
    ASSERT_TRUE(this->ranks()) << "there is no reference to compare with, see above";
  }
  void check(const std::string& family) {
    this->run([family](const World& world) {
      check_family(family, world, {.backend = R::kBackend, .device = R::kIsOnGpu ? world.device() : c10::kCPU});
    });
  }
};

using AllRanks = ::testing::Types<Ranks<2, Where::kGloo>, Ranks<3, Where::kGloo>, Ranks<2, Where::kShm>,
                                  Ranks<3, Where::kShm>, Ranks<2, Where::kGlooOnGpu>, Ranks<3, Where::kGlooOnGpu>>;
TYPED_TEST_SUITE(DdpOracle, AllRanks, RanksName);

// DDP-11, DDP-12, DDP-13, DDP-16, DDP-23, DDP-28, DDP-36, DDP-39, DDP-43
TYPED_TEST(DdpOracle, TrainsMlpsLikePython) {
  this->check("mlp");
}

// DDP-8, DDP-16, DDP-22, DDP-46, DDP-74
TYPED_TEST(DdpOracle, TrainsConvNetsLikePython) {
  this->check("conv");
}

// DDP-15: a shared weight, and a block used twice
TYPED_TEST(DdpOracle, TrainsTransformersWithSharedParametersLikePython) {
  this->check("transformer");
}

// DDP-17, DDP-60, DDP-61
TYPED_TEST(DdpOracle, ReducesSparseGradientsLikePython) {
  this->check("sparse");
}

// DDP-12, DDP-47, DDP-48, DDP-49, DDP-50, DDP-58
TYPED_TEST(DdpOracle, LeavesOutUnusedParametersLikePython) {
  this->check("unused");
}

// DDP-53, DDP-54
TYPED_TEST(DdpOracle, TrainsStaticGraphsLikePython) {
  this->check("static");
}

// DDP-57
TYPED_TEST(DdpOracle, KeepsGradientsInBucketsLikePython) {
  this->check("view");
}

// DDP-45, DDP-59
TYPED_TEST(DdpOracle, AccumulatesUnderNoSyncLikePython) {
  this->check("no_sync");
}

// DDP-78, DDP-79, DDP-82: against the same steps in plain torch
TYPED_TEST(DdpOracle, TrainsInLowPrecisionAsWrittenOutInPython) {
  this->check("precision");
}

// JOIN-29, JOIN-33, JOIN-36, JOIN-37, JOIN-39, DDP-93 to DDP-97
TYPED_TEST(DdpOracle, JoinsRanksWithoutInputsLikePython) {
  this->check("join");
}

// DDP-9, DDP-26, DDP-29, DDP-30, DDP-102 to DDP-105: the log is compared in the other tests too
TYPED_TEST(DdpOracle, BuildsAndRebuildsBucketsLikePython) {
  this->check("large");
}

}  // namespace
}  // namespace lockstep::ddp_oracle
