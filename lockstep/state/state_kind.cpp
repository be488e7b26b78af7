#include "lockstep/state/state_kind.h"

#include <c10/util/Exception.h>

#include <array>
#include <vector>

#include "lockstep/base/str.h"
#include "lockstep/state/archive_bridge.h"

namespace lockstep::detail {
namespace {

struct TellingName {
  const char* name;
  const char* kinds;
};

/// The first that is there tells: some kinds keep what others keep, and more.
constexpr std::array<TellingName, 8> kTellingNames = {{{"acc_delta", "Adadelta"},
                                                       {"exp_inf", "Adamax"},
                                                       {"exp_avg_sq", "Adam or AdamW"},
                                                       {"square_avg", "RMSprop"},
                                                       {"sum", "Adagrad"},
                                                       {"step_size", "Rprop"},
                                                       {"n_iter", "LBFGS"},
                                                       {"momentum_buffer", "SGD"}}};

std::string quoted(const std::vector<std::string>& names) {
  return str("'", join(names, "', '"), "'");
}

}  // namespace

bool is_unused(const c10::IValue& value) {
  return value.isNone() || (value.isTensor() && !value.toTensor().defined());
}

std::string kind_of(const NamedValues& state) {
  std::vector<std::string> names;
  for (const auto& [name, value] : state) {
    if (!is_unused(value)) names.push_back(name);
  }
  for (const auto& [name, kinds] : kTellingNames) {
    if (state.contains(name) && !is_unused(state.at(name))) return str("state of ", kinds, " (", quoted(names), ")");
  }
  return str("state of an unknown optimizer (", quoted(names), ")");
}

void check_nothing_is_dropped(const NamedValues& given, const torch::optim::OptimizerParamState& taken,
                              const std::string& loader) {
  const auto kept = values_written_by(taken);
  std::vector<std::string> dropped;
  for (const auto& [name, value] : given) {
    if (!is_unused(value) && !kept.contains(name)) dropped.push_back(name);
  }
  TORCH_CHECK(dropped.empty(), "[lockstep/state] ", kind_of(given), " cannot be loaded into ", loader,
              ", which knows no ", quoted(dropped), ". Load it into an optimizer of its kind, or load none.");
}

}  // namespace lockstep::detail
