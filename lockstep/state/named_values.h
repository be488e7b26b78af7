// The one form in which state has names: what an optimizer keeps of a parameter, a group's options, a weight.
// Optimizers of libtorch and ours, functional ones, ZeRO, files and messages between ranks all deal in it.
#pragma once

#include <ATen/core/ivalue.h>

#include <map>
#include <string>

namespace lockstep {

/// Options, or the state of one parameter, by Python's names: tensors, numbers, tuples. "step" is an integer, as
/// libtorch has it.
using NamedValues = std::map<std::string, c10::IValue>;

/// With every tensor copied to the device; see comm/values.h.
NamedValues copied_to(const NamedValues& values, c10::Device device, bool non_blocking = true);

/// With sparse tensors, such as the momenta of sparse gradients, as dense ones: these can be cut, sent and loaded
/// anywhere.
NamedValues with_dense_tensors(NamedValues values);

/// Of its tensors.
int64_t bytes_of(const NamedValues& values);

}  // namespace lockstep
