// Which wrapper averages a parameter's gradient: for those who are given parameters and must know over which ranks
// their gradients are the same, and what the wrapped module calls them. Thread-safe; ranks as threads have tensors of
// their own. Internal to ddp and zero.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/nn/parameter_info.h"

namespace lockstep {

class DdpEngine;

/// The group of the DistributedDataParallel that averages the parameter's gradient, one of them if there are
/// several; null if none does.
GroupPtr averaging_group(const at::Tensor& parameter);

/// The parameter's name in the module of such a wrapper: of `wrapper`, or of one of them if that is null. Empty if
/// there is none.
std::string averaged_name(const at::Tensor& parameter, const DdpEngine* wrapper);

namespace detail {

/// Notes that `engine` averages these, as long as it lives.
class AveragedParameters {
 public:
  AveragedParameters(const std::vector<at::Tensor>& parameters, const std::vector<ParameterInfo>& infos,
                     const DdpEngine& engine);
  ~AveragedParameters();
  AveragedParameters(const AveragedParameters&) = delete;
  AveragedParameters& operator=(const AveragedParameters&) = delete;

 private:
  const std::vector<at::Tensor> parameters_;
  const DdpEngine& engine_;
};

}  // namespace detail
}  // namespace lockstep
