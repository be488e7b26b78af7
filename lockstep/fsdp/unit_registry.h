// Which modules are units, and which buffers were cast. Modules know nothing of it, so these are tables by address,
// with what tells a dead one from a new one at its place. Internal to fsdp. Thread-safe: ranks may be threads.
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <string>

#include "lockstep/fsdp/unit.h"

namespace lockstep::detail {

void register_unit(const std::shared_ptr<torch::nn::Module>& module, const UnitPtr& unit);
/// Null if it is none.
UnitPtr find_unit(const torch::nn::Module& module);

/// The memory a parameter has before it is sharded. Whoever shares it later is no part of the parameter any more: the
/// name of the one that had it, or nothing.
void remember_memory(const std::string& name, const at::Tensor& parameter);
std::optional<std::string> sharer_of(const at::Tensor& parameter);

/// The dtype a buffer had before a policy changed it; none if it was not changed.
void set_original_dtype(const at::Tensor& buffer, at::ScalarType dtype);
std::optional<at::ScalarType> original_dtype_of(const at::Tensor& buffer);

/// Whether it has a forward: lists and dicts of modules have none.
bool can_be_called(const torch::nn::Module& module);

}  // namespace lockstep::detail
