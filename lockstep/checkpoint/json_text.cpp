#include "lockstep/checkpoint/json_text.h"

#include <c10/util/Exception.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <vector>

namespace lockstep::detail {

template <class Json>
Json parsed_json(std::string_view text, const std::string& what) {
  std::vector<std::set<std::string>> names;  // of the objects that are open
  bool is_too_deep = false;
  std::optional<std::string> twice;
  const auto look = [&](int depth, typename Json::parse_event_t event, Json& value) {
    is_too_deep = is_too_deep || depth > kDeepestJson;
    if (is_too_deep) return false;
    if (event == Json::parse_event_t::object_start) names.emplace_back();
    if (event == Json::parse_event_t::object_end) names.pop_back();
    if (event == Json::parse_event_t::key && !names.back().insert(value.template get<std::string>()).second) {
      twice = value.template get<std::string>();
    }
    return true;
  };
  auto json = Json::parse(text, look, /*allow_exceptions=*/false);
  TORCH_CHECK(!is_too_deep, "[lockstep/checkpoint] ", what, " is nested too deep");
  TORCH_CHECK(!json.is_discarded(), "[lockstep/checkpoint] ", what, " is no JSON");
  TORCH_CHECK(!twice, "[lockstep/checkpoint] ", what, " names '", *twice, "' twice");
  return json;
}

template nlohmann::json parsed_json<nlohmann::json>(std::string_view text, const std::string& what);
template nlohmann::ordered_json parsed_json<nlohmann::ordered_json>(std::string_view text, const std::string& what);

bool is_text(const std::string& bytes) {
  try {
    nlohmann::json(bytes).dump();
    return true;
  } catch (const nlohmann::json::exception&) {
    return false;
  }
}

}  // namespace lockstep::detail
