// A JSON file, its keys in their order.
#pragma once

#include <c10/util/Exception.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

namespace lockstep::examples {

using Json = nlohmann::ordered_json;

inline Json read_json(const std::string& file) {
  std::ifstream in(file);
  TORCH_CHECK(in, "cannot read ", file);
  auto json = Json::parse(in, nullptr, /*allow_exceptions=*/false);
  TORCH_CHECK(json.is_object(), file, " is no JSON object");
  return json;
}

}  // namespace lockstep::examples
