// One file of Hugging Face's safetensors format: eight bytes that say how long the header is, the header, JSON that
// says by name where tensors lie, and their bytes, row by row and without gaps. No code, and nothing to execute.
// Internal to checkpoint.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::detail {

/// "F32", "BF16", …; empty if the format has none for it.
std::string_view safetensors_dtype(at::ScalarType dtype);
std::optional<at::ScalarType> dtype_from_safetensors(std::string_view name);

struct SafetensorsEntry {
  std::string name = "";
  std::string dtype = "";  // the format's name, maybe one that libtorch does not have
  std::vector<int64_t> sizes = {};
  int64_t begin = 0;  // of its bytes, in the file
  int64_t end = 0;
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries = {};  // in the order of their bytes
  std::map<std::string, std::string> metadata = {};
};

/// What a header says, of which everything is checked against the file's size: entries lie in the file, side by side,
/// and have as many bytes as their sizes and dtypes take. `start` are the file's first bytes, as many as the header
/// has or all there are. Throws, naming the file and, if it is one's fault, the tensor.
SafetensorsHeader parse_safetensors(std::string_view start, int64_t file_bytes, const std::string& file);
/// Of a file on disk.
SafetensorsHeader read_safetensors_header(const std::string& file);

/// The bytes that a file with these entries begins with; gives them their places, side by side in this order.
std::string laid_out_header(std::vector<SafetensorsEntry>& entries, const std::map<std::string, std::string>& metadata);

/// Bytes that a tensor takes; none if that is more than there can be, if a size is negative or if the dtype is unknown.
std::optional<int64_t> safetensors_bytes(std::string_view dtype, const std::vector<int64_t>& sizes);

}  // namespace lockstep::detail
