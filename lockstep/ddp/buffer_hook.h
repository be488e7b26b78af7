// Hooks that sync a module's buffers in the program's own way.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "lockstep/comm/futures.h"

namespace lockstep {

/// By dotted name.
using BufferMap = std::map<std::string, at::Tensor>;
/// Syncs the buffers its own way. What it returns is waited for at the end of backward.
using BufferHook = std::function<std::vector<FuturePtr>(BufferMap& buffers)>;
enum class BufferHookLocation { kPreForward, kPostForward };

}  // namespace lockstep
