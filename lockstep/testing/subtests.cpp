#include "lockstep/testing/subtests.h"

#include "lockstep/base/str.h"
#include "lockstep/comm/barrier.h"
#include "lockstep/comm/failure.h"
#include "lockstep/comm/threads/thread_backend.h"
#include "lockstep/testing/reset.h"
#include "lockstep/testing/run.h"
#include "lockstep/testing/seeds.h"

namespace lockstep::testing {

const SubtestValue& Subtest::find(const std::string& name) const {
  for (const auto& [known, value] : values_) {
    if (known == name) return value;
  }
  throw CheckFailure(str("subtest has no value '", name, "'; it has ", describe()));
}

void Subtest::refuse_type(const std::string& name) const {
  throw CheckFailure(str("subtest value '", name, "' has another type than was asked for; it has ", describe()));
}

std::string Subtest::describe() const {
  std::vector<std::string> parts;
  for (const auto& [name, value] : values_) {
    auto text = std::visit(
        [&, &name = name](const auto& held) {
          if constexpr (std::is_same_v<std::decay_t<decltype(held)>, bool>) {
            return str(name, "=", held ? "true" : "false");
          } else {
            return str(name, "=", held);
          }
        },
        value);
    const auto named = names_.find(text);
    parts.push_back(named != names_.end() ? named->second : text);
  }
  return join(parts, ", ");
}

void run_subtests(const World& world, const std::vector<std::pair<std::string, std::vector<SubtestValue>>>& values,
                  const std::function<void(const Subtest& subtest)>& body, const SubtestOptions& options) {
  std::size_t total = 1;
  for (const auto& [name, choices] : values) {
    TORCH_CHECK(!choices.empty(), "[lockstep/testing] run_subtests: '", name, "' has no values, so nothing would run");
    total *= choices.size();
  }
  for (std::size_t number = 0; number < total; ++number) {
    std::vector<std::pair<std::string, SubtestValue>> chosen(values.size());
    std::size_t rest = number;
    for (std::size_t i = values.size(); i-- > 0;) {
      const auto& [name, choices] = values[i];
      chosen[i] = {name, choices[rest % choices.size()]};
      rest /= choices.size();
    }
    const Subtest subtest(std::move(chosen), options.names);
    barrier(world.group());
    reset_all();
    options.reset();
    reseed_rank();
    try {
      body(subtest);
    } catch (const PeerFailure&) {
      throw;
    } catch (const std::exception& error) {
      throw CheckFailure(str("subtest ", number + 1, " of ", total, " (", subtest.describe(), "), rank ", world.rank(),
                             ": ", lockstep::detail::message_of(error)));
    }
    barrier(world.group());
  }
}

}  // namespace lockstep::testing
