// Work that several groups of ranks would each do alike, and one of them is to do for all: a file that replicas write.
#pragma once

#include <string>

#include "lockstep/comm/group.h"

namespace lockstep {

/// One caller's part in it. Of all callers that take their nth turn under one name, the first to come is to do the work
/// and the others wait for what it says. Needs the store of `group`; without one every caller is the first.
class Turn {
 public:
  /// `caller` tells callers apart. Local.
  Turn(const std::string& name, int caller, const GroupPtr& group = default_group());

  bool is_first() const { return is_first_; }
  /// Tells the others. REQUIRES: is_first(). Local.
  void tell(const std::string& result) const;
  /// What the first one told. Blocks until it has, at most for the group's timeout.
  std::string told() const;

 private:
  const GroupPtr group_;
  std::string key_;
  bool is_first_ = true;
};

}  // namespace lockstep
