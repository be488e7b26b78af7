#include "lockstep/testing/seeds.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randn.h>

#include <mutex>

#include "lockstep/base/rank_local.h"

namespace lockstep::testing {
namespace {

struct RankRandom {
  at::Generator generator = at::detail::createCPUGenerator(kTestSeed);
};

/// Restores the default generator's state also when `build` throws.
class DefaultGeneratorScope {
 public:
  DefaultGeneratorScope() : generator_(at::detail::getDefaultCPUGenerator()) {
    const std::lock_guard lock(generator_.mutex());
    state_ = generator_.get_state();
  }
  ~DefaultGeneratorScope() {
    const std::lock_guard lock(generator_.mutex());
    generator_.set_state(state_);
  }
  DefaultGeneratorScope(const DefaultGeneratorScope&) = delete;
  DefaultGeneratorScope& operator=(const DefaultGeneratorScope&) = delete;

  void seed(uint64_t value) {
    const std::lock_guard lock(generator_.mutex());
    generator_.set_current_seed(value);
  }

 private:
  at::Generator generator_;
  at::Tensor state_;
};

}  // namespace

at::Generator rank_generator() {
  return rank_local<RankRandom>().generator;
}

void reseed_rank() {
  auto generator = rank_generator();
  const std::lock_guard lock(generator.mutex());
  generator.set_current_seed(kTestSeed);
}

at::Generator input_generator(const World& world) {
  return at::detail::createCPUGenerator(kInputSeed + world.rank());
}

at::Generator expert_generator(const World& world) {
  return at::detail::createCPUGenerator(kExpertSeed + world.rank());
}

at::Tensor rank_randn(at::IntArrayRef sizes, at::TensorOptions options) {
  const auto device = options.device();
  return at::randn(sizes, rank_generator(), options.device(at::kCPU)).to(device);
}

void build_deterministically(const std::function<void()>& build, uint64_t seed) {
  static std::mutex one_rank_at_a_time;
  const std::lock_guard lock(one_rank_at_a_time);
  DefaultGeneratorScope scope;
  scope.seed(seed);
  build();
}

}  // namespace lockstep::testing
