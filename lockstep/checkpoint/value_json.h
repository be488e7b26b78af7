// Values that are no tensors, as JSON and back: numbers, text, tuples, lists, dicts by name. Internal to checkpoint.
#pragma once

#include <ATen/core/ivalue.h>

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace lockstep::detail {

/// Numbers come back as they were, infinities and NaN too. Refuses anything else, tensors for one: `name` opens the
/// message.
nlohmann::ordered_json json_of(const c10::IValue& value, const std::string& name);

/// Refuses what json_of() does not write.
c10::IValue value_from(const nlohmann::ordered_json& json, const std::string& name);

}  // namespace lockstep::detail
