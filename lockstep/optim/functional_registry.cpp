#include "lockstep/optim/functional_registry.h"

#include <c10/util/Exception.h>
#include <c10/util/Logging.h>

#include <map>
#include <mutex>

#include "lockstep/optim/rules.h"

namespace lockstep::optim {
namespace {

template <class Rule>
std::unique_ptr<FunctionalOptimizer> make(std::vector<at::Tensor> parameters,
                                          const torch::optim::OptimizerOptions& options) {
  return std::make_unique<Functional<Rule>>(std::move(parameters), options_from<typename Rule::Options>(options));
}

class Registry {
 public:
  static Registry& instance() {
    static auto& registry = *new Registry;
    return registry;
  }

  void add(const std::string& key, FunctionalFactory factory) {
    const std::lock_guard lock(mutex_);
    factories_.emplace(key, std::move(factory));
  }

  /// Empty if there is none.
  FunctionalFactory find(const std::string& key) {
    const std::lock_guard lock(mutex_);
    const auto found = factories_.find(key);
    return found == factories_.end() ? nullptr : found->second;
  }

 private:
  Registry() : Registry(AllRules()) {}
  template <class... Rules>
  explicit Registry(RuleList<Rules...> /*rules*/) {
    (add_rule<Rules>(), ...);
  }

  /// Names that libtorch does not have do no harm.
  template <class Rule>
  void add_rule() {
    for (const auto* space : {"torch::optim::", "lockstep::optim::"}) {
      factories_.emplace(std::string(space) + Rule::kName, make<Rule>);
    }
  }

  std::mutex mutex_;
  std::map<std::string, FunctionalFactory> factories_;
};

}  // namespace

void register_functional(const std::string& key, FunctionalFactory factory) {
  TORCH_CHECK(factory, "[lockstep/optim] register_functional was given no factory for '", key, "'");
  Registry::instance().add(key, std::move(factory));
}

bool has_functional_form(const std::string& key) {
  return Registry::instance().find(key) != nullptr;
}

std::unique_ptr<FunctionalOptimizer> functional_form_of(const std::string& key, std::vector<at::Tensor> parameters,
                                                        const torch::optim::OptimizerOptions& options) {
  const auto factory = Registry::instance().find(key);
  TORCH_CHECK(factory, "[lockstep/optim] optimizer ", key,
              " has no functional form. Give it one with register_functional().");
  auto made = factory(std::move(parameters), options);
  TORCH_CHECK(made, "[lockstep/optim] the factory of the functional form of ", key, " made none");
  LOG(INFO) << "[lockstep/optim] " << key << " steps in its functional form, " << made->name();
  return made;
}

}  // namespace lockstep::optim
