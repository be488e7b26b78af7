// What a checkpoint holds and where: tensors by name, each in pieces that lie in files. Made from an index of our own,
// or from what others write: a Hugging Face folder, shards of Python's torch.distributed.checkpoint, one file. Internal
// to checkpoint.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/shard/box.h"

namespace lockstep::detail {

struct StoredPiece {
  Box box = {};
  std::size_t file = 0;
  int64_t begin = 0;  // of its bytes, row by row, in the file
  int64_t bytes = 0;
  std::optional<uint32_t> checksum = std::nullopt;
};

struct StoredTensor {
  std::string dtype = "";  // as safetensors names it, or "C128"
  std::vector<int64_t> sizes = {};
  std::vector<StoredPiece> pieces = {};

  /// Throws, naming the tensor, if libtorch has none of it.
  at::ScalarType scalar_type(const std::string& name) const;
};

struct StoredFile {
  std::string name = "";  // in the folder
  int64_t bytes = 0;
};

struct Catalog {
  std::string folder = "";  // ends with a slash, or is empty
  std::vector<StoredFile> files = {};
  std::map<std::string, StoredTensor> tensors = {};
  std::map<std::string, nlohmann::ordered_json> values = {};
  /// Whose names tensors and values begin with; none in what others wrote.
  std::vector<std::string> entries = {};
  std::optional<int64_t> step = std::nullopt;
  int world_size = 1;  // of the ranks that saved

  std::string path_of(const StoredFile& file) const { return folder + file.name; }
  int64_t bytes() const;
};

/// The file that makes a folder a checkpoint of ours.
inline constexpr const char* kIndexName = "lockstep.json";

/// Throws unless pieces lie in their files and cover their tensors without overlapping; messages name the tensor, after
/// `what`, the file or folder that says so.
void check_catalog(const Catalog& catalog, const std::string& what);
/// Throws, naming the file, unless all files are there and as long as they were.
void check_files(const Catalog& catalog);

/// An index as text, with a checksum of itself, and back. `file` opens messages.
std::string index_text(const Catalog& catalog);
Catalog parse_index(const std::string& text, const std::string& folder, const std::string& file);

/// Of the folder or file at `path`, whoever wrote it. Everything is checked but for the tensors' bytes.
Catalog open_catalog(const std::string& path);

}  // namespace lockstep::detail
