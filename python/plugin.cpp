// The compiled half of the Python package lockstep_torch: makes a Lockstep backend for torch.distributed, which then
// calls it as it calls its own. Python sees the result through torch's bindings of c10d::Backend.
#include <pybind11/functional.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <functional>
#include <memory>
#include <utility>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lockstep/checkpointing/checkpoint.h"
#include "lockstep/comm/backend_registry.h"
#include "lockstep/intercept/key.h"
#include "lockstep/intercept/operator_counter.h"

namespace {

// What Python calls "shm" is this backend of backend_registry.h.
constexpr auto kBackendName = "shm";

/// This rank's end of a group. Collective over the group's ranks; blocks until all have come or the timeout is over.
lockstep::BackendPtr create(const c10d::DistributedBackendOptions& options) {
  const auto& ranks = options.global_ranks_in_group;  // empty for the world
  return lockstep::make_backend(kBackendName,
                                {.store = options.store,
                                 .rank = options.group_rank,
                                 .size = options.group_size,
                                 .group_name = options.group_id,
                                 .timeout = std::chrono::duration_cast<std::chrono::milliseconds>(options.timeout),
                                 .address = "",  // torch.distributed does not say how others reach this host
                                 .global_ranks = {ranks.begin(), ranks.end()}});
}

/// The table of the operators that `work` calls, Python's included.
std::string count_operators(const pybind11::function& work) {
  lockstep::OperatorCounter counter;
  {
    const auto counting = counter.count();
    work();
  }
  return counter.to_string();
}

}  // namespace

PYBIND11_MODULE(_lockstep_torch, module) {
  module.attr("backend_name") = kBackendName;
  // Without the GIL: other threads may run while this one waits for ranks, and a store written in Python needs it.
  module.def("create", &create, pybind11::arg("options"), pybind11::call_guard<pybind11::gil_scoped_release>());
  // For tests: that the fallback in the dispatcher and Python's torch get along.
  module.def("install_interceptor", &lockstep::install_interceptor);
  module.def("count_operators", &count_operators, pybind11::arg("work"));
  // For tests: that our engine of autograd and Python's do. What it returns besides counts the runs.
  module.def("checkpointed_sine", [](const at::Tensor& x) {
    const auto runs = std::make_shared<int>();
    const auto output = lockstep::checkpoint(
        [runs](const at::Tensor& in) {
          ++*runs;
          return in.exp().sin();
        },
        x);
    return std::pair(output, std::function<int()>([runs] { return *runs; }));
  });
}
