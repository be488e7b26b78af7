// Gloo through c10d. Built with gloo's own headers or with the shim (see cmake/gloo_shim); nothing else includes them.
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <sstream>

#include "lockstep/base/broken_pipe.h"
#include "lockstep/base/env.h"
#include "lockstep/comm/builtin_backends.h"

namespace lockstep::detail {

BackendPtr make_gloo_backend(const BackendRequest& request) {
  // A rank whose peer died must live to say so.
  keep_broken_pipes_from_killing();
  auto options = c10d::ProcessGroupGloo::Options::create(request.timeout);
  // The same variable Python's torch.distributed reads: interfaces to use, separated by commas.
  if (const auto interfaces = env("GLOO_SOCKET_IFNAME")) {
    std::istringstream names(*interfaces);
    for (std::string name; std::getline(names, name, ',');) {
      options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForInterface(name));
    }
  } else {
    options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(request.address));
  }
  options->threads = static_cast<int>(options->devices.size()) * 2;
  options->group_name = request.group_name;
  return c10::make_intrusive<c10d::ProcessGroupGloo>(request.store, request.rank, request.size, options);
}

}  // namespace lockstep::detail
