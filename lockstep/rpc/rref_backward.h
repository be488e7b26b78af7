// A backward that starts at what an RRef holds, on its owner. Internal to rpc.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <optional>

namespace lockstep::rpc::detail {

/// Throws if `object` is no tensor, or one that no backward can start at.
void backward_of(const c10::IValue& object, std::optional<std::int64_t> context_id, bool retain_graph);

}  // namespace lockstep::rpc::detail
