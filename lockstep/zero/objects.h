// Values across ranks: tensors, numbers, strings, and lists, tuples and dictionaries of them.
#pragma once

#include <ATen/core/ivalue.h>

#include "lockstep/comm/group.h"

namespace lockstep {

/// The value of group rank `root` on all ranks; what others pass is ignored. Its bytes travel on `device`, and tensors
/// in it arrive there. Blocking and collective. Throws before anything is sent if `root` is not in the group.
c10::IValue broadcast_object(const c10::IValue& value, int root, const GroupPtr& group, c10::Device device);

}  // namespace lockstep
