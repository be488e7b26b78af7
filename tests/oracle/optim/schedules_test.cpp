// U-8: compares learning rates with Python's, step by step. Python multiplies the last rate; the functions here do not.
#include "lockstep/optim/schedules.h"

#include "lockstep/optim/optimizers.h"
#include "tests/oracle/optim/reference.h"

namespace lockstep::schedules_oracle {
namespace {

using namespace optim_oracle;
using optim::CosineAnnealingLROptions;
using optim::LinearLROptions;

optim::LRCurve sequence(const std::string& name, std::vector<optim::LRCurve>& curves,
                        std::vector<int64_t>& milestones) {
  if (name == "linear") return LinearLROptions{};
  if (name == "linear down") return LinearLROptions{.start_factor = 1.0, .end_factor = 0.2, .total_iters = 7};
  if (name == "cosine") return CosineAnnealingLROptions{.T_max = 10, .eta_min = 0.001};
  if (name == "sequence") {
    curves = {LinearLROptions{.start_factor = 0.01, .total_iters = 6}, CosineAnnealingLROptions{.T_max = 15}};
    milestones = {6};
  } else {
    curves = {LinearLROptions{.start_factor = 0.1, .total_iters = 3},
              CosineAnnealingLROptions{.T_max = 5, .eta_min = 0.01},
              LinearLROptions{.start_factor = 1.0, .end_factor = 0.5, .total_iters = 4}};
    milestones = {4, 11};
  }
  return nullptr;
}

std::unique_ptr<optim::CurveLR> made(const std::string& name, torch::optim::Optimizer& optimizer) {
  std::vector<optim::LRCurve> curves;
  std::vector<int64_t> milestones;
  if (const auto curve = sequence(name, curves, milestones)) return std::make_unique<optim::CurveLR>(optimizer, curve);
  return std::make_unique<optim::SequentialLR>(optimizer, curves, milestones);
}

TEST(SchedulesOracle, RatesAreThoseOfPython) {
  const auto saved = oracle::run_reference("optim/schedules_reference.py");
  if (saved.isNone()) GTEST_SKIP() << "there is no Python to compare with";
  ASSERT_EQ(saved.toGenericDict().size(), 5U);
  for (const auto& [name, expected] : oracle::tensors_by_name(saved)) {
    SCOPED_TRACE(name);
    optim::SGD optimizer({{{at::zeros({1}).requires_grad_()}, optim::group_options(optim::SGDOptions{.lr = 0.3})},
                          {{at::zeros({1}).requires_grad_()}, optim::group_options(optim::SGDOptions{.lr = 0.007})}});
    const auto schedule = made(name, optimizer);
    for (int64_t step = 0; step < expected.size(0); ++step) {
      if (step > 0) schedule->step();
      const auto lrs = schedule->last_lr();
      for (int64_t group = 0; group < 2; ++group) {
        const double wanted = expected[step][group].item<double>();
        EXPECT_NEAR(lrs[static_cast<std::size_t>(group)], wanted, 1e-12 * wanted + 1e-16) << step;
      }
    }
  }
}

}  // namespace
}  // namespace lockstep::schedules_oracle
