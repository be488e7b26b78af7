#include "lockstep/state/pickled_file.h"

#include <c10/util/Exception.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <vector>

#include "lockstep/state/disk.h"

namespace lockstep::detail {

void write_pickled(const std::string& path, const c10::impl::GenericDict& dict) {
  const auto bytes = torch::jit::pickle_save(dict);
  const auto unfinished = path + ".new";
  std::ofstream out(unfinished, std::ios::binary | std::ios::trunc);
  out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  out.close();
  TORCH_CHECK(out, "[lockstep/state] cannot write ", path, ": ", std::strerror(errno));
  flush_to_disk(unfinished);
  rename_on_disk(unfinished, path);
}

c10::impl::GenericDict read_pickled(const std::string& path, const std::string& what) {
  std::ifstream in(path, std::ios::binary);
  TORCH_CHECK(in, "[lockstep/state] cannot read ", path, ": ", std::strerror(errno));
  const std::vector<char> bytes{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  c10::IValue value;
  try {
    value = torch::jit::pickle_load(bytes);
  } catch (const std::exception&) {
    TORCH_CHECK(false, "[lockstep/state] ", path, " is no ", what);
  }
  const bool has_format = value.isGenericDict() && value.toGenericDict().contains("format");
  TORCH_CHECK(has_format, "[lockstep/state] ", path, " is no ", what);
  return value.toGenericDict();
}

}  // namespace lockstep::detail
