#include "lockstep/ddp/averaging_group.h"

#include <mutex>
#include <unordered_map>

#include "lockstep/ddp/engine.h"

namespace lockstep {
namespace {

struct Averaging {
  const DdpEngine* engine = nullptr;
  std::string name;
};

/// Tensors have no attributes to note it in.
struct AveragingEngines {
  std::mutex mutex;
  std::unordered_multimap<const c10::TensorImpl*, Averaging> of_parameter;

  static AveragingEngines& instance() {
    static auto& engines = *new AveragingEngines;
    return engines;
  }
};

}  // namespace

GroupPtr averaging_group(const at::Tensor& parameter) {
  auto& engines = AveragingEngines::instance();
  const std::lock_guard lock(engines.mutex);
  const auto found = engines.of_parameter.find(parameter.unsafeGetTensorImpl());
  return found == engines.of_parameter.end() ? nullptr : found->second.engine->group();
}

std::string averaged_name(const at::Tensor& parameter, const DdpEngine* wrapper) {
  auto& engines = AveragingEngines::instance();
  const std::lock_guard lock(engines.mutex);
  const auto [first, last] = engines.of_parameter.equal_range(parameter.unsafeGetTensorImpl());
  for (auto each = first; each != last; ++each) {
    if (wrapper == nullptr || each->second.engine == wrapper) return each->second.name;
  }
  return "";
}

namespace detail {

AveragedParameters::AveragedParameters(const std::vector<at::Tensor>& parameters,
                                       const std::vector<ParameterInfo>& infos, const DdpEngine& engine)
    : parameters_(parameters), engine_(engine) {
  auto& engines = AveragingEngines::instance();
  const std::lock_guard lock(engines.mutex);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    engines.of_parameter.emplace(parameters_[i].unsafeGetTensorImpl(), Averaging{&engine_, infos[i].name});
  }
}

AveragedParameters::~AveragedParameters() {
  auto& engines = AveragingEngines::instance();
  const std::lock_guard lock(engines.mutex);
  for (const auto& parameter : parameters_) {
    const auto [first, last] = engines.of_parameter.equal_range(parameter.unsafeGetTensorImpl());
    for (auto each = first; each != last; ++each) {
      if (each->second.engine != &engine_) continue;
      engines.of_parameter.erase(each);
      break;
    }
  }
}

}  // namespace detail
}  // namespace lockstep
