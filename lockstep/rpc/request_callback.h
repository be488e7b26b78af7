// What a worker does with requests of others: libtorch's own handling of references and gradients, and our table of
// functions in place of TorchScript's. Internal to rpc.
#pragma once

#include <torch/csrc/distributed/rpc/request_callback_no_python.h>

#include <memory>

namespace lockstep::rpc::detail {

std::unique_ptr<torch::distributed::rpc::RequestCallback> make_request_callback();

}  // namespace lockstep::rpc::detail
