// Values across ranks: tensors, numbers, strings, and lists, tuples and dictionaries of them. Bytes are in objects.h.
#pragma once

#include <ATen/core/ivalue.h>

#include "lockstep/comm/group.h"

namespace lockstep {

/// The value of group rank `root` on all ranks; what others pass is ignored. Its bytes travel on `device`, and tensors
/// in it arrive there. Blocking and collective. Throws before anything is sent if `root` is not in the group.
c10::IValue broadcast_value(const c10::IValue& value, int root, const GroupPtr& group, c10::Device device);

/// The value of group rank `root` on group rank `to`, another one, with the tensors where they were pickled; none on
/// all others, which pass the bytes on and forget them. Blocking and collective: a broadcast, as not every backend can
/// send.
c10::IValue send_value(const c10::IValue& value, int root, int to, const GroupPtr& group, c10::Device device);

/// The value with every tensor copied to the device, through lists, tuples and dictionaries; a tensor that is in it
/// twice becomes two copies. Anything else is kept. Local.
c10::IValue copied_to(const c10::IValue& value, c10::Device device, bool non_blocking = true);

}  // namespace lockstep
