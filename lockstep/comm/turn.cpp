#include "lockstep/comm/turn.h"

#include "lockstep/base/str.h"
#include "lockstep/comm/group_state.h"

namespace lockstep {

Turn::Turn(const std::string& name, int caller, const GroupPtr& group) : group_(group) {
  const auto& store = detail::state_of(group).description.store;
  if (!store) return;
  const auto number = store->add(str("turn/", name, "/of/", caller), 1);
  key_ = str("turn/", name, "/", number);
  is_first_ = store->add(key_, 1) == 1;
}

void Turn::tell(const std::string& result) const {
  const auto& store = detail::state_of(group_).description.store;
  if (store) store->set(key_ + "/told", std::vector<uint8_t>(result.begin(), result.end()));
}

std::string Turn::told() const {
  const auto& description = detail::state_of(group_).description;
  description.store->wait({key_ + "/told"}, description.timeout);
  const auto bytes = description.store->get(key_ + "/told");
  return {bytes.begin(), bytes.end()};
}

}  // namespace lockstep
