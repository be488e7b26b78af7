#include "lockstep/rpc/remote_module.h"

namespace lockstep::rpc::detail {

void refuse_on_remote_module(const char* function, const char* instead) {
  TORCH_CHECK(false, "[lockstep/rpc] RemoteModule has no ", function, "(): the module is on another worker. Use ",
              instead, ".");
}

}  // namespace lockstep::rpc::detail
