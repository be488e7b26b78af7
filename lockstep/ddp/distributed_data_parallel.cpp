#include "lockstep/ddp/distributed_data_parallel.h"

namespace lockstep {

NoSyncGuard::NoSyncGuard(DdpEngine& engine) : engine_(engine), was_enabled_(engine.is_sync_enabled()) {
  engine_.set_sync_enabled(false);
}

NoSyncGuard::~NoSyncGuard() {
  engine_.set_sync_enabled(was_enabled_);
}

std::string strip_ddp_prefix(const std::string& name) {
  constexpr std::string_view kPrefix = "module.";
  return name.starts_with(kPrefix) ? name.substr(kPrefix.size()) : name;
}

}  // namespace lockstep
