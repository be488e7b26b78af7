// What a checkpoint holds, for people and for programs.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "lockstep/checkpoint/catalog.h"

namespace lockstep::checkpoint_cli {

/// A table of tensors, a list of values, and totals.
std::string listing(const detail::Catalog& catalog, const std::string& path);

/// {"path", "step", "world_size", "entries", "files", "tensors", "values", "bytes"}; no step if there is none.
nlohmann::ordered_json listing_json(const detail::Catalog& catalog, const std::string& path);

/// Of its pieces.
int64_t bytes_of(const detail::StoredTensor& tensor);
/// "1.25 GB".
std::string readable_bytes(int64_t bytes);
/// As JSON, on one line that is not too long, whatever bytes it holds.
std::string short_text(const nlohmann::ordered_json& value);

}  // namespace lockstep::checkpoint_cli
