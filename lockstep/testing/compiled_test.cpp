#include "lockstep/testing/compiled_test.h"

#include <mutex>
#include <optional>

#include "lockstep/comm/barrier.h"

namespace lockstep::testing {
namespace {

std::mutex mutex;
std::optional<UnitCompiler> registered;

std::optional<UnitCompiler> compiler() {
  const std::lock_guard lock(mutex);
  return registered;
}

/// Switches back in any case.
class Compiling {
 public:
  Compiling(const UnitCompiler& compiler, const std::string& type_filter) : compiler_(compiler) {
    compiler_.enable(type_filter);
  }
  ~Compiling() { compiler_.disable(); }
  Compiling(const Compiling&) = delete;
  Compiling& operator=(const Compiling&) = delete;

 private:
  const UnitCompiler& compiler_;
};

}  // namespace

void set_unit_compiler(UnitCompiler compiler) {
  const std::lock_guard lock(mutex);
  registered = std::move(compiler);
}

void clear_unit_compiler() {
  const std::lock_guard lock(mutex);
  registered.reset();
}

void compiled_test(const World& world, const std::function<void(const std::string& mode)>& body,
                   const CompiledTestOptions& options) {
  for (const auto& mode : options.modes) {
    TORCH_CHECK(mode == "eager" || mode == "compiled", "[lockstep/testing] compiled_test has no mode '", mode,
                "'; it has eager and compiled");
  }
  for (const auto& mode : options.modes) {
    barrier(world.group());
    if (mode == "eager") {
      body(mode);
    } else if (const auto found = compiler()) {
      const Compiling scope(*found, options.type_filter);
      body(mode);
      barrier(world.group());  // rank threads share the compiler: nobody may switch it off while another still runs
    } else {
      TORCH_WARN("[lockstep/testing] no unit compiler is registered: the test runs eagerly only");
    }
  }
}

}  // namespace lockstep::testing
