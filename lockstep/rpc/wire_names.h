// The one name that all calls of ours have for libtorch: which function is meant is the first argument. Internal to
// rpc.
#pragma once

#include <ATen/core/qualified_name.h>

namespace lockstep::rpc::detail {

inline const c10::QualifiedName& call_name() {
  static const c10::QualifiedName name("lockstep.call");
  return name;
}

}  // namespace lockstep::rpc::detail
