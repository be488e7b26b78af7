// The table of what other workers may call. No code travels: a call is a name, and only names in this table run.
// Internal to rpc.
#pragma once

#include <ATen/core/ivalue.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/rpc/callable.h"

namespace lockstep::rpc::detail {

/// Null if there is none.
std::shared_ptr<const Callable> find_function(const std::string& name);

/// Names with their signatures, in order.
std::map<std::string, std::string> registered_functions();

}  // namespace lockstep::rpc::detail
