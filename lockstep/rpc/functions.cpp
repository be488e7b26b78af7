#include "lockstep/rpc/functions.h"

#include <c10/util/Exception.h>

#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "lockstep/base/str.h"
#include "lockstep/rpc/remote_error.h"

namespace lockstep::rpc::detail {
namespace {

struct Functions {
  std::shared_mutex mutex;
  std::unordered_map<std::string, std::shared_ptr<const Callable>> by_name;
};

// Never destroyed: functions are registered by other files' statics, in any order, and called by threads until the end.
Functions& functions() {
  static auto* const all = new Functions;
  return *all;
}

}  // namespace

void register_function(const std::string& name, std::shared_ptr<const Callable> callable) {
  TORCH_CHECK(!name.empty(), "[lockstep/rpc] a function needs a name.");
  auto& all = functions();
  const std::unique_lock lock(all.mutex);
  const auto taken = all.by_name.find(name);
  TORCH_CHECK(taken == all.by_name.end(), "[lockstep/rpc] function '", name, "' is registered twice: as ",
              taken->second->signature(), " and as ", callable->signature(), ". Choose another name for one of them.");
  all.by_name.emplace(name, std::move(callable));
}

std::shared_ptr<const Callable> find_function(const std::string& name) {
  auto& all = functions();
  const std::shared_lock lock(all.mutex);
  const auto found = all.by_name.find(name);
  return found == all.by_name.end() ? nullptr : found->second;
}

std::map<std::string, std::string> registered_functions() {
  auto& all = functions();
  const std::shared_lock lock(all.mutex);
  std::map<std::string, std::string> names;
  for (const auto& [name, callable] : all.by_name) names.emplace(name, callable->signature());
  return names;
}

void refuse_count(const std::string& signature, std::size_t got) {
  throw Refused(str("it is ", signature, ", and was given ", got, got == 1 ? " argument" : " arguments"));
}

void refuse_argument(const std::string& signature, std::size_t position, const std::string& why) {
  throw Refused(str("argument ", position + 1, " of ", signature, ": ", why));
}

}  // namespace lockstep::rpc::detail
