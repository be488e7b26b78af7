// Runs a test eagerly and with the compute of its units compiled. Without a compiler it warns and runs eagerly only.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "lockstep/comm/world.h"

namespace lockstep::testing {

/// Switches compilation of units on and off. `type_filter` empty: all units; else units of that type only.
struct UnitCompiler {
  std::function<void(const std::string& type_filter)> enable;
  std::function<void()> disable;
};

/// Registers the compiler compiled_test() uses, for this process.
void set_unit_compiler(UnitCompiler compiler);
void clear_unit_compiler();

struct CompiledTestOptions {
  std::string type_filter = "";
  /// Any of "eager" and "compiled", in this order; others are refused.
  std::vector<std::string> modes = {"eager", "compiled"};
};

/// Runs `body(mode)` in each mode with a barrier between; settings are put back also after an error. Collective.
void compiled_test(const World& world, const std::function<void(const std::string& mode)>& body,
                   const CompiledTestOptions& options = {});

}  // namespace lockstep::testing
