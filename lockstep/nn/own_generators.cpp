#include "lockstep/nn/own_generators.h"

#include <mutex>

#include "lockstep/base/rank_local.h"

namespace lockstep::detail {
namespace {

struct OwnGenerators {
  std::mutex mutex;
  std::vector<at::Generator> generators;  // guarded by mutex
};

}  // namespace

void add_own_generator(const at::Generator& generator) {
  auto& own = rank_local<OwnGenerators>();
  const std::lock_guard lock(own.mutex);
  own.generators.push_back(generator);
}

std::vector<at::Generator> own_generators() {
  auto& own = rank_local<OwnGenerators>();
  const std::lock_guard lock(own.mutex);
  return own.generators;
}

}  // namespace lockstep::detail
