// libtorch's operators, called by schema name. Internal to rpc.
#pragma once

#include <string>
#include <vector>

#include "lockstep/rpc/callable.h"

namespace lockstep::rpc::detail {

/// "aten::…"
bool is_operator_name(const std::string& name);

/// Throws Refused if the operator is not allowed, does not exist, or takes other arguments.
Answer run_operator(const std::string& name, const std::vector<c10::IValue>& arguments, Form form);

}  // namespace lockstep::rpc::detail
