#include "checkpoint_cli/listing.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "lockstep/base/str.h"

namespace lockstep::checkpoint_cli {
namespace {

using Json = nlohmann::ordered_json;
using Row = std::array<std::string, 5>;

/// Columns of numbers, whose ends stand below each other.
constexpr std::size_t kFirstNumber = 3;

std::string aligned(const std::vector<Row>& rows) {
  std::array<std::size_t, 5> widths = {};
  for (const auto& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const auto& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i) {
      const std::string padding(widths[i] - row[i].size(), ' ');
      if (i > 0) text += "  ";
      text += i < kFirstNumber ? row[i] + padding : padding + row[i];
    }
    text += "\n";
  }
  return text;
}

std::string counted(std::size_t count, const char* what) {
  return str(count, " ", what, count == 1 ? "" : "s");
}

}  // namespace

int64_t bytes_of(const detail::StoredTensor& tensor) {
  int64_t bytes = 0;
  for (const auto& piece : tensor.pieces) bytes += piece.bytes;
  return bytes;
}

std::string readable_bytes(int64_t bytes) {
  constexpr std::array<const char*, 5> kUnits = {"kB", "MB", "GB", "TB", "PB"};
  constexpr double kThousand = 1e3;
  if (bytes < static_cast<int64_t>(kThousand)) return str(bytes, " bytes");
  double amount = static_cast<double>(bytes) / kThousand;
  std::size_t unit = 0;
  for (; amount >= kThousand && unit + 1 < kUnits.size(); ++unit) amount /= kThousand;
  std::array<char, 32> text = {};
  std::snprintf(text.data(), text.size(), "%.2f %s", amount, kUnits[unit]);
  return text.data();
}

std::string short_text(const Json& value) {
  constexpr std::size_t kLongest = 120;
  auto text = value.dump(-1, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace);
  if (text.size() <= kLongest) return text;
  text.resize(kLongest);
  return text + "…";
}

std::string listing(const detail::Catalog& catalog, const std::string& path) {
  std::vector<Row> rows = {{"name", "dtype", "shape", "pieces", "bytes"}};
  int64_t bytes = 0;
  for (const auto& [name, tensor] : catalog.tensors) {
    rows.push_back({name, tensor.dtype, str("[", join(tensor.sizes, ", "), "]"), std::to_string(tensor.pieces.size()),
                    std::to_string(bytes_of(tensor))});
    bytes += bytes_of(tensor);
  }
  std::string text = path + "\n";
  if (catalog.step) text += str("step ", *catalog.step, "\n");
  text += str("saved by ", counted(static_cast<std::size_t>(catalog.world_size), "rank"), "\n");
  if (!catalog.tensors.empty()) text += "\n" + aligned(rows);
  if (!catalog.values.empty()) text += "\n";
  for (const auto& [name, value] : catalog.values) text += str(name, " = ", short_text(value), "\n");
  return text + str("\n", counted(catalog.tensors.size(), "tensor"), " of ", readable_bytes(bytes), " and ",
                    counted(catalog.values.size(), "value"), ", in ", counted(catalog.files.size(), "file"), " of ",
                    readable_bytes(catalog.bytes()), "\n");
}

Json listing_json(const detail::Catalog& catalog, const std::string& path) {
  Json json = {{"path", path}};
  if (catalog.step) json["step"] = *catalog.step;
  json["world_size"] = catalog.world_size;
  json["entries"] = catalog.entries;
  json["files"] = Json::array();
  for (const auto& file : catalog.files) json["files"].push_back({{"name", file.name}, {"bytes", file.bytes}});
  json["tensors"] = Json::object();
  int64_t bytes = 0;
  for (const auto& [name, tensor] : catalog.tensors) {
    Json pieces = Json::array();
    for (const auto& piece : tensor.pieces) {
      pieces.push_back({{"file", catalog.files[piece.file].name},
                        {"offsets", piece.box.offsets},
                        {"shape", piece.box.sizes},
                        {"bytes", piece.bytes}});
    }
    json["tensors"][name] = {
        {"dtype", tensor.dtype}, {"shape", tensor.sizes}, {"bytes", bytes_of(tensor)}, {"pieces", std::move(pieces)}};
    bytes += bytes_of(tensor);
  }
  json["values"] = Json::object();
  for (const auto& [name, value] : catalog.values) json["values"][name] = value;
  json["bytes"] = bytes;
  return json;
}

}  // namespace lockstep::checkpoint_cli
