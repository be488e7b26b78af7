// What modules behind references have in common, whatever their type. Behind module_class() and RemoteModule.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <string>

namespace lockstep::rpc::detail {

/// Where a forward runs.
class ForwardPlace {
 public:
  explicit ForwardPlace(const std::string& device) : device_(device) {}
  /// Tensors moved to the device.
  c10::IValue brought(const c10::IValue& value) const;
  /// Tensors moved to the CPU, unless this worker may send them as they are.
  c10::IValue taken_back(const c10::IValue& value) const;

 private:
  c10::Device device_;
};

using ModuleIn = std::function<std::shared_ptr<torch::nn::Module>(const c10::IValue& object)>;

/// Registers `name`.parameters, `name`.train and `name`.is_training.
void register_module_functions(const std::string& name, ModuleIn module_in);

}  // namespace lockstep::rpc::detail
