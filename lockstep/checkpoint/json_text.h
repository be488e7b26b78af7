// JSON of files, which anybody may have written. Internal to checkpoint.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace lockstep::detail {

/// Whatever recurses into JSON recurses no deeper.
inline constexpr int kDeepestJson = 200;

/// For nlohmann::json and ordered_json. Throws, `what` opening the message, if the text is no JSON, is nested deeper
/// than that, or has a name twice in one object.
template <class Json>
Json parsed_json(std::string_view text, const std::string& what);

/// Whether JSON can hold it: it is UTF-8.
bool is_text(const std::string& bytes);

}  // namespace lockstep::detail
