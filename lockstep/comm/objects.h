// Bytes across ranks: for names, plans and settings, not for tensors. Blocking and collective over `group`.
#pragma once

#include <string>
#include <vector>

#include "lockstep/comm/group.h"

namespace lockstep {

/// Every rank's bytes, in rank order; they may differ in length.
std::vector<std::string> all_gather_object(const std::string& bytes, const GroupPtr& group = default_group());

/// Every rank's bytes on group rank `root`; empty elsewhere.
std::vector<std::string> gather_object(const std::string& bytes, int root, const GroupPtr& group = default_group());

/// The bytes of group rank `root`, on all ranks; what others pass is ignored.
std::string broadcast_object(const std::string& bytes, int root, const GroupPtr& group = default_group());

}  // namespace lockstep
