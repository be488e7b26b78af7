#include "lockstep/checkpoint/foreign_folders.h"

#include <c10/util/Exception.h>

#include <set>

#include "lockstep/base/str.h"
#include "lockstep/checkpoint/folder.h"
#include "lockstep/checkpoint/json_text.h"
#include "lockstep/checkpoint/safetensors.h"

namespace lockstep::detail {
namespace {

using PlainJson = nlohmann::json;

constexpr const char* kSuffix = ".safetensors";
constexpr const char* kHuggingFaceIndex = "model.safetensors.index.json";
/// Where torch.distributed.checkpoint says which box of a tensor a file has.
constexpr const char* kShardingInfo = "DCP_SHARDING_INFO";
constexpr const char* kSavedOffsets = "saved_offsets";

std::vector<int64_t> offsets_in(const PlainJson& sharding, const SafetensorsEntry& entry, const std::string& file) {
  if (sharding.is_null()) return std::vector<int64_t>(entry.sizes.size());
  const auto of_entry = sharding.value(entry.name, PlainJson());
  const auto found = of_entry.is_object() ? of_entry.value(kSavedOffsets, PlainJson()) : PlainJson();
  const bool fits =
      found.is_array() && found.size() == entry.sizes.size() &&
      std::all_of(found.begin(), found.end(), [](const PlainJson& each) { return each.is_number_unsigned(); });
  TORCH_CHECK(fits, "[lockstep/checkpoint] ", file, " does not say where '", entry.name, "' begins");
  return found.get<std::vector<int64_t>>();
}

/// Sizes of tensors in pieces are as large as their pieces reach: nothing else tells.
void add_entry(Catalog& catalog, std::size_t file, const SafetensorsEntry& entry, std::vector<int64_t> offsets) {
  auto& tensor = catalog.tensors[entry.name];
  const auto path = catalog.path_of(catalog.files[file]);
  if (tensor.pieces.empty()) tensor = {.dtype = entry.dtype, .sizes = std::vector<int64_t>(entry.sizes.size())};
  TORCH_CHECK(tensor.dtype == entry.dtype && tensor.sizes.size() == entry.sizes.size(), "[lockstep/checkpoint] ", path,
              ": '", entry.name, "' is another tensor than in ", catalog.files[tensor.pieces.front().file].name);
  for (std::size_t dim = 0; dim < offsets.size(); ++dim) {
    int64_t end = 0;
    TORCH_CHECK(!__builtin_add_overflow(offsets[dim], entry.sizes[dim], &end), "[lockstep/checkpoint] ", path, ": '",
                entry.name, "' begins where no tensor can");
    tensor.sizes[dim] = std::max(tensor.sizes[dim], end);
  }
  tensor.pieces.push_back({.box = {.offsets = std::move(offsets), .sizes = entry.sizes},
                           .file = file,
                           .begin = entry.begin,
                           .bytes = entry.end - entry.begin});
}

void add_file(Catalog& catalog, const std::string& name) {
  const auto path = catalog.folder + name;
  const auto header = read_safetensors_header(path);
  catalog.files.push_back({name, bytes_of_file(path)});
  PlainJson sharding;
  if (const auto found = header.metadata.find(kShardingInfo); found != header.metadata.end()) {
    sharding = parsed_json<PlainJson>(found->second, str(path, ": its ", kShardingInfo));
    TORCH_CHECK(sharding.is_object(), "[lockstep/checkpoint] ", path, ": its ", kShardingInfo, " is no object");
  }
  for (const auto& entry : header.entries) {
    add_entry(catalog, catalog.files.size() - 1, entry, offsets_in(sharding, entry, path));
  }
}

/// The files that an index of Hugging Face's names.
std::set<std::string> indexed_files(const std::string& path) {
  const auto json = parsed_json<PlainJson>(text_of(path), path);
  const auto map = json.is_object() ? json.value("weight_map", PlainJson()) : PlainJson();
  TORCH_CHECK(map.is_object() && !map.empty(), "[lockstep/checkpoint] ", path, " has no weight_map");
  std::set<std::string> files;
  for (const auto& [name, file] : map.items()) {
    TORCH_CHECK(file.is_string(), "[lockstep/checkpoint] ", path, " names no file for '", name, "'");
    files.insert(file.template get<std::string>());
  }
  return files;
}

}  // namespace

Catalog catalog_of_file(const std::string& path) {
  const auto slash = path.rfind('/');
  Catalog catalog{.folder = slash == std::string::npos ? "" : path.substr(0, slash + 1)};
  add_file(catalog, path.substr(catalog.folder.size()));
  check_catalog(catalog, path);
  return catalog;
}

Catalog catalog_of_foreign_folder(const std::string& folder) {
  Catalog catalog{.folder = folder};
  const auto index = folder + kHuggingFaceIndex;
  std::set<std::string> files;
  if (is_file(index)) {
    files = indexed_files(index);
  } else {
    for (const auto& name : names_in(folder)) {
      if (name.ends_with(kSuffix)) files.insert(name);
    }
  }
  TORCH_CHECK(!files.empty(), "[lockstep/checkpoint] ", folder, " holds no checkpoint: neither ", kIndexName, " nor ",
              kHuggingFaceIndex, " nor any file named *", kSuffix);
  for (const auto& name : files) {
    TORCH_CHECK(name.find('/') == std::string::npos, "[lockstep/checkpoint] ", index,
                " names a file elsewhere: ", name);
    add_file(catalog, name);
  }
  check_catalog(catalog, folder);
  return catalog;
}

}  // namespace lockstep::detail
