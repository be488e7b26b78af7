#include "lockstep/checkpoint/catalog.h"

#include <c10/util/Exception.h>
#include <sys/stat.h>
#include <torch/version.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <numeric>

#include "lockstep/base/crc32c.h"
#include "lockstep/base/str.h"
#include "lockstep/checkpoint/folder.h"
#include "lockstep/checkpoint/foreign_folders.h"
#include "lockstep/checkpoint/json_text.h"
#include "lockstep/checkpoint/safetensors.h"

namespace lockstep::detail {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kFormat = "lockstep checkpoint";
constexpr int kVersion = 1;
/// Comes first in the text, so that it is found without reading the rest.
constexpr const char* kChecksumStart = "{\"checksum\":\"";
constexpr std::size_t kChecksumDigits = 8;

std::string hexadecimal(uint32_t number) {
  std::string text(kChecksumDigits + 1, '\0');
  std::snprintf(text.data(), text.size(), "%08x", number);
  text.resize(kChecksumDigits);
  return text;
}

/// Of the text without its checksum.
std::string checksum_of(const std::string& text) {
  const auto begin = std::strlen(kChecksumStart) + kChecksumDigits;
  return hexadecimal(crc32c(0, text.data() + begin, text.size() - begin));
}

std::optional<int64_t> element_bytes(const std::string& dtype) {
  if (dtype == "C128") return 16;
  return safetensors_bytes(dtype, {});
}

void check_piece(const Catalog& catalog, const std::string& what, const std::string& name, const StoredTensor& tensor,
                 const StoredPiece& piece) {
  const auto refuse = [&](const auto&... why) {
    TORCH_CHECK(false, "[lockstep/checkpoint] ", what, ": a piece of '", name, "' ", why...);
  };
  if (piece.file >= catalog.files.size()) refuse("is in a file that is not listed");
  const auto& file = catalog.files[piece.file];
  if (piece.begin < 0 || piece.bytes < 0 || piece.begin > file.bytes || piece.bytes > file.bytes - piece.begin) {
    refuse("lies beyond the ", file.bytes, " bytes of ", file.name);
  }
  const auto dims = tensor.sizes.size();
  if (piece.box.sizes.size() != dims || piece.box.offsets.size() != dims) refuse("has another number of dims");
  for (std::size_t dim = 0; dim < dims; ++dim) {
    const auto offset = piece.box.offsets[dim];
    const auto size = piece.box.sizes[dim];
    if (offset < 0 || size < 0 || offset > tensor.sizes[dim] || size > tensor.sizes[dim] - offset) {
      refuse("lies outside of it: ", piece.box.to_string(), " of [", join(tensor.sizes, ", "), "]");
    }
  }
  const auto item = element_bytes(tensor.dtype);
  if (item && piece.box.numel() * *item != piece.bytes) {
    refuse("of ", piece.box.numel(), " elements of type ", tensor.dtype, " cannot have ", piece.bytes, " bytes");
  }
}

/// How many elements there are; none if that is more than there can be.
std::optional<int64_t> element_count(const std::vector<int64_t>& sizes) {
  int64_t count = 1;
  bool is_too_large = false;
  for (const auto size : sizes) {
    if (size < 0) return std::nullopt;
    is_too_large = __builtin_mul_overflow(count, size, &count) || is_too_large;
  }
  if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) return 0;
  return is_too_large || count > INT64_MAX / 16 ? std::nullopt : std::optional(count);
}

void check_cover(const std::string& what, const std::string& name, const StoredTensor& tensor) {
  int64_t covered = 0;
  const auto whole = whole_box(tensor.sizes).numel();
  for (const auto& piece : tensor.pieces) covered = std::min(covered + piece.box.numel(), whole + 1);
  TORCH_CHECK(covered == whole, "[lockstep/checkpoint] ", what, ": the pieces of '", name, "' hold ",
              covered > whole ? "more" : "fewer", " elements than its ", whole,
              covered < whole ? ". Is a file missing?" : ": they overlap");
  if (tensor.pieces.size() < 2) return;
  // As many as there are, so any that meet leave out others. Sorted by the first dim, only neighbours can meet.
  std::vector<const Box*> boxes;
  for (const auto& piece : tensor.pieces) {
    if (piece.box.numel() > 0) boxes.push_back(&piece.box);
  }
  std::sort(boxes.begin(), boxes.end(), [](const Box* one, const Box* other) { return *one < *other; });
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    const auto end = boxes[i]->offsets[0] + boxes[i]->sizes[0];
    for (auto next = i + 1; next < boxes.size() && boxes[next]->offsets[0] < end; ++next) {
      TORCH_CHECK(!intersection(*boxes[i], *boxes[next]), "[lockstep/checkpoint] ", what, ": pieces of '", name,
                  "' overlap: ", boxes[i]->to_string(), " and ", boxes[next]->to_string());
    }
  }
}

Json json_of(const StoredTensor& tensor) {
  Json pieces = Json::array();
  for (const auto& piece : tensor.pieces) {
    auto& into = pieces.emplace_back(Json{{"file", piece.file},
                                          {"begin", piece.begin},
                                          {"bytes", piece.bytes},
                                          {"offsets", piece.box.offsets},
                                          {"shape", piece.box.sizes}});
    if (piece.checksum) into["crc32c"] = *piece.checksum;
  }
  return {{"dtype", tensor.dtype}, {"shape", tensor.sizes}, {"pieces", std::move(pieces)}};
}

/// Whatever number is in it, an int64_t holds it: get() would convert any other as well.
bool has_only_integers(const Json& json) {
  if (json.is_structured()) return std::all_of(json.begin(), json.end(), has_only_integers);
  if (json.is_number_unsigned()) return json.get<uint64_t>() <= static_cast<uint64_t>(INT64_MAX);
  return json.is_number_integer() || json.is_string();
}

StoredTensor tensor_from(const Json& json) {
  StoredTensor tensor{.dtype = json.at("dtype").get<std::string>(),
                      .sizes = json.at("shape").get<std::vector<int64_t>>()};
  for (const auto& each : json.at("pieces")) {
    StoredPiece piece{.box = {.offsets = each.at("offsets").get<std::vector<int64_t>>(),
                              .sizes = each.at("shape").get<std::vector<int64_t>>()},
                      .file = each.at("file").get<std::size_t>(),
                      .begin = each.at("begin").get<int64_t>(),
                      .bytes = each.at("bytes").get<int64_t>()};
    if (each.contains("crc32c")) piece.checksum = each.at("crc32c").get<uint32_t>();
    tensor.pieces.push_back(std::move(piece));
  }
  return tensor;
}

Catalog catalog_from(const Json& json, const std::string& folder) {
  Catalog catalog{.folder = folder, .world_size = json.at("world_size").get<int>()};
  if (json.contains("step")) catalog.step = json.at("step").get<int64_t>();
  for (const auto& file : json.at("files")) {
    catalog.files.push_back({file.at("name").get<std::string>(), file.at("bytes").get<int64_t>()});
  }
  catalog.entries = json.at("entries").get<std::vector<std::string>>();
  for (const auto& [name, tensor] : json.at("tensors").items()) catalog.tensors.emplace(name, tensor_from(tensor));
  for (const auto& [name, value] : json.at("values").items()) catalog.values.emplace(name, value);
  return catalog;
}

}  // namespace

at::ScalarType StoredTensor::scalar_type(const std::string& name) const {
  if (dtype == "C128") return at::kComplexDouble;
  const auto type = dtype_from_safetensors(dtype);
  TORCH_CHECK(type, "[lockstep/checkpoint] '", name, "' is of type ", dtype, ", which this libtorch does not have");
  return *type;
}

int64_t Catalog::bytes() const {
  return std::accumulate(files.begin(), files.end(), int64_t{0},
                         [](int64_t sum, const StoredFile& file) { return sum + file.bytes; });
}

void check_catalog(const Catalog& catalog, const std::string& what) {
  TORCH_CHECK(catalog.world_size > 0, "[lockstep/checkpoint] ", what, ": it cannot be of ", catalog.world_size,
              " ranks");
  for (const auto& file : catalog.files) {
    // An index must not lead anywhere else.
    const bool is_plain = !file.name.empty() && file.name.find('/') == std::string::npos && file.name.front() != '.';
    TORCH_CHECK(is_plain && file.bytes >= 0, "[lockstep/checkpoint] ", what, " lists '", file.name,
                "', which is no name of a file in the folder");
  }
  for (const auto& [name, tensor] : catalog.tensors) {
    TORCH_CHECK(element_count(tensor.sizes), "[lockstep/checkpoint] ", what, ": '", name, "' has sizes [",
                join(tensor.sizes, ", "), "], which no tensor has");
    for (const auto& piece : tensor.pieces) check_piece(catalog, what, name, tensor, piece);
    check_cover(what, name, tensor);
  }
}

void check_files(const Catalog& catalog) {
  for (const auto& file : catalog.files) {
    struct stat about = {};
    const auto path = catalog.path_of(file);
    TORCH_CHECK(::stat(path.c_str(), &about) == 0, "[lockstep/checkpoint] cannot read ", path, ": ",
                std::strerror(errno));
    TORCH_CHECK(about.st_size == file.bytes, "[lockstep/checkpoint] ", path, " has ", about.st_size,
                " bytes, but was written with ", file.bytes);
  }
}

std::string index_text(const Catalog& catalog) {
  Json files = Json::array();
  for (const auto& file : catalog.files) files.push_back({{"name", file.name}, {"bytes", file.bytes}});
  Json tensors = Json::object();
  for (const auto& [name, tensor] : catalog.tensors) tensors[name] = json_of(tensor);
  Json values = Json::object();
  for (const auto& [name, value] : catalog.values) values[name] = value;
  Json json = {{"checksum", std::string(kChecksumDigits, '0')},
               {"format", kFormat},
               {"version", kVersion},
               {"torch", TORCH_VERSION},
               {"world_size", catalog.world_size}};
  if (catalog.step) json["step"] = *catalog.step;
  json["files"] = std::move(files);
  json["entries"] = catalog.entries;
  json["values"] = std::move(values);
  json["tensors"] = std::move(tensors);
  auto text = json.dump();
  text.replace(std::strlen(kChecksumStart), kChecksumDigits, checksum_of(text));
  return text;
}

Catalog parse_index(const std::string& text, const std::string& folder, const std::string& file) {
  const auto json = parsed_json<Json>(text, str(file, " is damaged, or no index of a checkpoint: it"));
  const bool is_ours = json.is_object() && json.value("format", Json()) == Json(kFormat);
  TORCH_CHECK(is_ours, "[lockstep/checkpoint] ", file, " is no index of a checkpoint");
  TORCH_CHECK(json.value("version", Json()) == Json(kVersion), "[lockstep/checkpoint] ", file, " has version ",
              json.value("version", Json()).dump(), "; this Lockstep reads version ", kVersion);
  const bool is_whole = text.starts_with(kChecksumStart) && json["checksum"] == Json(checksum_of(text));
  TORCH_CHECK(is_whole, "[lockstep/checkpoint] ", file, " is damaged: its checksum is that of another text");
  for (const auto* const name : {"tensors", "values"}) {
    TORCH_CHECK(json.contains(name) && json.at(name).is_object(), "[lockstep/checkpoint] ", file,
                " is no index of a checkpoint: it has no ", name);
  }
  for (const auto* const name : {"world_size", "step", "files", "tensors"}) {
    TORCH_CHECK(!json.contains(name) || has_only_integers(json.at(name)), "[lockstep/checkpoint] ", file,
                " is no index of a checkpoint: its ", name, " are no integers");
  }
  try {
    auto catalog = catalog_from(json, folder);
    check_catalog(catalog, file);
    return catalog;
  } catch (const nlohmann::json::exception& problem) {
    TORCH_CHECK(false, "[lockstep/checkpoint] ", file, " is no index of a checkpoint: ", problem.what());
  }
}

Catalog open_catalog(const std::string& path) {
  if (!is_folder(path)) return catalog_of_file(path);
  const auto folder = path.ends_with('/') ? path : path + "/";
  const auto index = folder + kIndexName;
  if (!is_file(index)) return catalog_of_foreign_folder(folder);
  auto catalog = parse_index(text_of(index), folder, index);
  check_files(catalog);
  return catalog;
}

}  // namespace lockstep::detail
