#include "lockstep/checkpoint/safetensors.h"

#include <c10/util/Exception.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "lockstep/base/str.h"
#include "lockstep/checkpoint/json_text.h"

namespace lockstep::detail {
namespace {

using PlainJson = nlohmann::json;

constexpr int64_t kLengthBytes = 8;
/// Python's reader refuses longer ones, too.
constexpr int64_t kLongestHeader = 100'000'000;

struct Dtype {
  std::string_view name;
  at::ScalarType type;
};

constexpr std::array<Dtype, 19> kDtypes = {{{"F64", at::kDouble},
                                            {"F32", at::kFloat},
                                            {"F16", at::kHalf},
                                            {"BF16", at::kBFloat16},
                                            {"F8_E4M3", at::kFloat8_e4m3fn},
                                            {"F8_E5M2", at::kFloat8_e5m2},
                                            {"F8_E4M3FNUZ", at::kFloat8_e4m3fnuz},
                                            {"F8_E5M2FNUZ", at::kFloat8_e5m2fnuz},
                                            {"F8_E8M0", at::kFloat8_e8m0fnu},
                                            {"C64", at::kComplexFloat},
                                            {"I64", at::kLong},
                                            {"I32", at::kInt},
                                            {"I16", at::kShort},
                                            {"I8", at::kChar},
                                            {"U64", at::kUInt64},
                                            {"U32", at::kUInt32},
                                            {"U16", at::kUInt16},
                                            {"U8", at::kByte},
                                            {"BOOL", at::kBool}}};

int64_t length_at_start(std::string_view start) {
  uint64_t length = 0;
  for (int byte = kLengthBytes; byte-- > 0;) length = length << 8U | static_cast<unsigned char>(start[byte]);
  return length > static_cast<uint64_t>(kLongestHeader) ? -1 : static_cast<int64_t>(length);
}

/// A count in JSON: not negative, not beyond what an int64_t holds.
std::optional<int64_t> count_in(const PlainJson& value) {
  if (!value.is_number_unsigned()) return std::nullopt;
  const auto count = value.get<uint64_t>();
  if (count > static_cast<uint64_t>(INT64_MAX)) return std::nullopt;
  return static_cast<int64_t>(count);
}

std::optional<std::vector<int64_t>> counts_in(const PlainJson& value) {
  if (!value.is_array()) return std::nullopt;
  std::vector<int64_t> counts;
  for (const auto& each : value) {
    const auto count = count_in(each);
    if (!count) return std::nullopt;
    counts.push_back(*count);
  }
  return counts;
}

std::map<std::string, std::string> metadata_from(const PlainJson& value, const std::string& file) {
  std::map<std::string, std::string> metadata;
  const bool is_text =
      value.is_object() && std::all_of(value.begin(), value.end(), [](const auto& each) { return each.is_string(); });
  TORCH_CHECK(is_text, "[lockstep/checkpoint] ", file, ": its __metadata__ is not text by name");
  for (const auto& [name, text] : value.items()) metadata.emplace(name, text.template get<std::string>());
  return metadata;
}

SafetensorsEntry entry_from(const std::string& name, const PlainJson& value, int64_t data_begin, int64_t file_bytes,
                            const std::string& file) {
  const auto refuse = [&](const auto&... why) {
    TORCH_CHECK(false, "[lockstep/checkpoint] ", file, ": tensor '", name, "' ", why...);
  };
  if (!value.is_object() || !value.contains("dtype") || !value["dtype"].is_string()) refuse("has no dtype");
  const auto sizes = counts_in(value.value("shape", PlainJson()));
  if (!sizes) refuse("has no shape");
  const auto places = counts_in(value.value("data_offsets", PlainJson()));
  if (!places || places->size() != 2) refuse("has no data_offsets");
  SafetensorsEntry entry{.name = name, .dtype = value["dtype"].get<std::string>(), .sizes = *sizes};
  const auto begin = places->front();
  const auto end = places->back();
  const auto room = file_bytes - data_begin;
  if (begin > end || end > room) {
    refuse("lies at bytes ", begin, " to ", end, " of the ", room, " that follow the header");
  }
  const auto needed = safetensors_bytes(entry.dtype, entry.sizes);
  const bool is_known = dtype_from_safetensors(entry.dtype).has_value();
  // Types that came after this was written can be passed over, but not read.
  if (is_known && needed != end - begin) {
    refuse("of type ", entry.dtype, " and shape [", join(entry.sizes, ", "), "] cannot have ", end - begin, " bytes");
  }
  entry.begin = data_begin + begin;
  entry.end = data_begin + end;
  return entry;
}

}  // namespace

std::string_view safetensors_dtype(at::ScalarType dtype) {
  const auto* const found =
      std::find_if(kDtypes.begin(), kDtypes.end(), [&](const auto& each) { return each.type == dtype; });
  return found == kDtypes.end() ? std::string_view() : found->name;
}

std::optional<at::ScalarType> dtype_from_safetensors(std::string_view name) {
  const auto* const found =
      std::find_if(kDtypes.begin(), kDtypes.end(), [&](const auto& each) { return each.name == name; });
  return found == kDtypes.end() ? std::nullopt : std::optional(found->type);
}

std::optional<int64_t> safetensors_bytes(std::string_view dtype, const std::vector<int64_t>& sizes) {
  const auto type = dtype_from_safetensors(dtype);
  if (!type) return std::nullopt;
  auto bytes = static_cast<int64_t>(c10::elementSize(*type));
  bool is_too_large = false;
  for (const auto size : sizes) {
    if (size < 0) return std::nullopt;
    is_too_large = __builtin_mul_overflow(bytes, size, &bytes) || is_too_large;
  }
  // A dim of none makes any other size harmless.
  const bool is_empty = std::find(sizes.begin(), sizes.end(), 0) != sizes.end();
  if (is_empty) return 0;
  return is_too_large ? std::nullopt : std::optional(bytes);
}

SafetensorsHeader parse_safetensors(std::string_view start, int64_t file_bytes, const std::string& file) {
  TORCH_CHECK(file_bytes >= kLengthBytes && static_cast<int64_t>(start.size()) >= kLengthBytes,
              "[lockstep/checkpoint] ", file, " is no safetensors file: it has ", file_bytes, " bytes");
  const auto length = length_at_start(start);
  TORCH_CHECK(length >= 0 && length <= file_bytes - kLengthBytes, "[lockstep/checkpoint] ", file,
              " is no safetensors file, or was cut off: it has ", file_bytes,
              " bytes, which its header would not fit into");
  TORCH_CHECK(static_cast<int64_t>(start.size()) >= kLengthBytes + length, "[lockstep/checkpoint] ", file,
              " ends within its header");
  const auto text = start.substr(kLengthBytes, static_cast<std::size_t>(length));
  const auto json = parsed_json<PlainJson>(text, str(file, " is no safetensors file: its header"));
  TORCH_CHECK(json.is_object(), "[lockstep/checkpoint] ", file, " is no safetensors file: its header is no object");
  SafetensorsHeader header;
  for (const auto& [name, value] : json.items()) {
    if (name == "__metadata__") {
      header.metadata = metadata_from(value, file);
    } else {
      header.entries.push_back(entry_from(name, value, kLengthBytes + length, file_bytes, file));
    }
  }
  std::sort(header.entries.begin(), header.entries.end(), [](const auto& one, const auto& other) {
    return std::tie(one.begin, one.end, one.name) < std::tie(other.begin, other.end, other.name);
  });
  auto end = kLengthBytes + length;
  for (const auto& entry : header.entries) {
    TORCH_CHECK(entry.begin == end, "[lockstep/checkpoint] ", file, ": tensor '", entry.name, "' begins at byte ",
                entry.begin, ", where the one before it ends at ", end);
    end = entry.end;
  }
  TORCH_CHECK(end == file_bytes, "[lockstep/checkpoint] ", file, " has ", file_bytes, " bytes, of which ",
              file_bytes - end, " belong to no tensor");
  return header;
}

SafetensorsHeader read_safetensors_header(const std::string& file) {
  struct stat about = {};
  std::ifstream in(file, std::ios::binary);
  TORCH_CHECK(in && ::stat(file.c_str(), &about) == 0 && S_ISREG(about.st_mode), "[lockstep/checkpoint] cannot read ",
              file, ": ", std::strerror(errno));
  std::string start(std::min<int64_t>(kLengthBytes, about.st_size), '\0');
  in.read(start.data(), static_cast<std::streamsize>(start.size()));
  if (static_cast<int64_t>(start.size()) == kLengthBytes) {
    // No more than the file has, whatever it says.
    const auto length = std::min<int64_t>(std::max<int64_t>(0, length_at_start(start)), about.st_size - kLengthBytes);
    start.resize(kLengthBytes + static_cast<std::size_t>(length));
    in.read(start.data() + kLengthBytes, length);
    start.resize(kLengthBytes + static_cast<std::size_t>(std::max<std::streamsize>(0, in.gcount())));
  }
  return parse_safetensors(start, about.st_size, file);
}

std::string laid_out_header(std::vector<SafetensorsEntry>& entries,
                            const std::map<std::string, std::string>& metadata) {
  PlainJson json = PlainJson::object();
  if (!metadata.empty()) json["__metadata__"] = metadata;
  int64_t end = 0;
  for (auto& entry : entries) {
    entry.begin = end;
    end += *safetensors_bytes(entry.dtype, entry.sizes);
    entry.end = end;
    json[entry.name] = {{"dtype", entry.dtype}, {"shape", entry.sizes}, {"data_offsets", {entry.begin, entry.end}}};
  }
  auto text = json.dump();
  text.append((kLengthBytes - text.size() % kLengthBytes) % kLengthBytes, ' ');  // so that data is aligned
  TORCH_CHECK(static_cast<int64_t>(text.size()) <= kLongestHeader, "[lockstep/checkpoint] ", entries.size(),
              " tensors are too many for one file. Set a smaller max_file_bytes.");
  std::string bytes;
  for (int byte = 0; byte < kLengthBytes; ++byte) bytes += static_cast<char>(text.size() >> (8U * byte) & 0xffU);
  for (auto& entry : entries) {
    entry.begin += kLengthBytes + static_cast<int64_t>(text.size());
    entry.end += kLengthBytes + static_cast<int64_t>(text.size());
  }
  return bytes + text;
}

}  // namespace lockstep::detail
