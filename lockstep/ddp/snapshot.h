// What of a wrapper can be saved: its settings and its buckets. Groups, hooks and optimizers are the program's to make
// again.
#pragma once

#include <string>

#include "lockstep/ddp/options.h"

namespace lockstep {

struct DdpSnapshot {
  /// Without process_group, device_mesh and the delayed parameters; with the buckets in bucket_plan.
  DdpOptions options = {};
  bool require_backward_grad_sync = true;
  bool require_forward_param_sync = true;

  /// Lines "key value"; the plan comes last.
  std::string to_string() const;
  /// Keys that are missing have their defaults; ones it does not know are refused.
  static DdpSnapshot from_string(const std::string& text);
};

}  // namespace lockstep
