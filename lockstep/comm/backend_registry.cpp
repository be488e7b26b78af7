#include "lockstep/comm/backend_registry.h"

#include <algorithm>
#include <map>
#include <mutex>

#include "lockstep/base/str.h"
#include "lockstep/comm/builtin_backends.h"
#include "lockstep/comm/call_backend.h"

namespace lockstep {
namespace {

struct Entry {
  std::vector<c10::DeviceType> devices;
  BackendFactory factory;
  std::optional<BackendTraits> traits = std::nullopt;
};

// Not every release of gloo averages, it coalesces CPU tensors only, and its reduce-scatter runs inside wait().
constexpr BackendTraits kGlooTraits{.averages = false,
                                    .coalesces = false,
                                    .has_reduce_scatter_futures = false,
                                    .names_missing_ranks = false,
                                    .compares_calls = false,
                                    .starts_concurrently = false};
// Its errors name nobody, but a wait only enqueues: there is nothing to look after.
constexpr BackendTraits kNcclTraits{.compares_calls = false, .runs_on_current_stream = true};

struct Registry {
  std::mutex mutex;
  std::map<std::string, Entry> entries;
};

Registry& registry() {
  // Built-ins are entered here, not by static initialisers: a linker may drop those from a static library.
  static Registry& instance = [&]() -> Registry& {
    auto& made = *new Registry;
    made.entries["gloo"] = {{c10::kCPU, c10::kCUDA}, detail::make_gloo_backend, kGlooTraits};
    made.entries["shm"] = {{c10::kCPU}, detail::make_shm_backend};
    made.entries["threads"] = {{c10::kCPU, c10::kCUDA}, detail::make_thread_backend};
    if (auto nccl = detail::nccl_backend_factory()) made.entries["nccl"] = {{c10::kCUDA}, *nccl, kNcclTraits};
    return made;
  }();
  return instance;
}

std::string known_names(Registry& registry) {
  std::vector<std::string> names;
  for (const auto& [name, entry] : registry.entries) names.push_back(name);
  return join(names, ", ");
}

Entry find_entry(const std::string& name) {
  auto& all = registry();
  const std::lock_guard lock(all.mutex);
  const auto found = all.entries.find(name);
  TORCH_CHECK(found != all.entries.end(), "[lockstep/comm] there is no backend '", name,
              "'. Known here: ", known_names(all), ". Add others with register_backend().");
  return found->second;
}

}  // namespace

void register_backend(const std::string& name, std::vector<c10::DeviceType> devices, BackendFactory factory,
                      std::optional<BackendTraits> traits) {
  TORCH_CHECK(!name.empty() && name.find_first_of(":,") == std::string::npos, "[lockstep/comm] '", name,
              "' is no backend name: ':' and ',' have a meaning in backend strings");
  TORCH_CHECK(!devices.empty(), "[lockstep/comm] backend '", name, "' serves no device");
  auto& all = registry();
  const std::lock_guard lock(all.mutex);
  all.entries[name] = {std::move(devices), std::move(factory), traits};
}

bool is_backend_registered(const std::string& name) {
  auto& all = registry();
  const std::lock_guard lock(all.mutex);
  return all.entries.contains(name);
}

std::optional<BackendTraits> registered_traits(const std::string& name) {
  auto& all = registry();
  const std::lock_guard lock(all.mutex);
  const auto found = all.entries.find(name);
  return found == all.entries.end() ? std::nullopt : found->second.traits;
}

BackendTraits traits_of(const c10d::Backend& backend) {
  if (const auto* ours = dynamic_cast<const CallBackend*>(&backend)) return ours->traits();
  return registered_traits(backend.getBackendName()).value_or(BackendTraits{});
}

BackendPtr make_backend(const std::string& name, const BackendRequest& request) {
  return find_entry(name).factory(request);
}

std::vector<std::pair<c10::DeviceType, std::string>> parse_backend_spec(const std::string& spec) {
  std::vector<std::pair<c10::DeviceType, std::string>> result;
  const auto add = [&](c10::DeviceType device, const std::string& name, const Entry& entry) {
    for (const auto& [taken, other] : result) {
      TORCH_CHECK(taken != device, "[lockstep/comm] backend '", spec, "' names two backends for ",
                  c10::DeviceTypeName(device, true), ": ", other, " and ", name);
    }
    TORCH_CHECK(std::find(entry.devices.begin(), entry.devices.end(), device) != entry.devices.end(),
                "[lockstep/comm] backend '", name, "' cannot serve ", c10::DeviceTypeName(device, true), " tensors");
    result.emplace_back(device, name);
  };
  std::size_t at = 0;
  while (at <= spec.size()) {
    const auto comma = std::min(spec.find(',', at), spec.size());
    const auto part = spec.substr(at, comma - at);
    const auto colon = part.find(':');
    if (colon == std::string::npos) {
      const auto entry = find_entry(part);
      for (const auto device : entry.devices) add(device, part, entry);
    } else {
      const auto name = part.substr(colon + 1);
      add(c10::Device(part.substr(0, colon)).type(), name, find_entry(name));
    }
    at = comma + 1;
  }
  std::sort(result.begin(), result.end());
  return result;
}

}  // namespace lockstep
