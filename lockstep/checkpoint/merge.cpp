#include "lockstep/checkpoint/merge.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <cstdio>

#include "lockstep/base/str.h"
#include "lockstep/checkpoint/file_writer.h"
#include "lockstep/checkpoint/folder.h"
#include "lockstep/checkpoint/reading.h"
#include "lockstep/checkpoint/safetensors.h"

namespace lockstep::dcp {
namespace {

using lockstep::detail::Catalog;
using lockstep::detail::SafetensorsEntry;
using lockstep::detail::StoredTensor;

struct MergedFile {
  std::string name = "";
  std::vector<SafetensorsEntry> entries = {};
  std::vector<std::string> sources = {};  // names in the checkpoint
};

int64_t bytes_of(const StoredTensor& tensor) {
  int64_t bytes = 0;
  for (const auto& piece : tensor.pieces) bytes += piece.bytes;
  return bytes;
}

std::vector<MergedFile> planned(const Catalog& catalog, const std::string& from, const MergeOptions& options) {
  std::vector<MergedFile> files;
  int64_t bytes = 0;
  const auto prefix = options.entry.empty() ? "" : options.entry + ".";
  for (const auto& [name, tensor] : catalog.tensors) {
    if (!name.starts_with(prefix)) continue;
    TORCH_CHECK(tensor.dtype == "C128" || lockstep::detail::dtype_from_safetensors(tensor.dtype),
                "[lockstep/checkpoint] ", from, ": '", name, "' is of type ", tensor.dtype,
                ", which this libtorch does not have");
    const auto size = bytes_of(tensor);
    if (files.empty() || (bytes > 0 && bytes + size > options.max_file_bytes)) {
      files.emplace_back();
      bytes = 0;
    }
    bytes += size;
    SafetensorsEntry entry{.name = name.substr(prefix.size()), .dtype = tensor.dtype, .sizes = tensor.sizes};
    if (tensor.dtype == "C128") {  // the format has none: pairs of reals
      entry.dtype = "F64";
      entry.sizes.push_back(2);
    }
    files.back().entries.push_back(std::move(entry));
    files.back().sources.push_back(name);
  }
  TORCH_CHECK(!files.empty(), "[lockstep/checkpoint] ", from, " has no tensors",
              options.entry.empty() ? "" : str(" of '", options.entry, "'"));
  for (std::size_t i = 0; i < files.size(); ++i) {
    std::string name(64, '\0');
    name.resize(static_cast<std::size_t>(
        std::snprintf(name.data(), name.size(), "model-%05zu-of-%05zu.safetensors", i + 1, files.size())));
    files[i].name = files.size() == 1 ? "model.safetensors" : name;
  }
  return files;
}

/// As Hugging Face's readers want it where there are several files.
std::string index_of(const std::vector<MergedFile>& files, int64_t bytes) {
  nlohmann::json map = nlohmann::json::object();
  for (const auto& file : files) {
    for (const auto& entry : file.entries) map[entry.name] = file.name;
  }
  return nlohmann::json{{"metadata", {{"total_size", bytes}}}, {"weight_map", map}}.dump(2);
}

}  // namespace

void merge(const std::string& from, const std::string& to, const MergeOptions& options) {
  const at::NoGradGuard no_grad;
  const auto catalog = lockstep::detail::open_catalog(from);
  auto files = planned(catalog, from, options);
  int64_t bytes = 0;
  for (const auto& file : files) {
    for (const auto& source : file.sources) bytes += bytes_of(catalog.tensors.at(source));
  }
  lockstep::detail::Reading reading(catalog, {}, 0, 1);
  lockstep::detail::ProgressTeller progress("writing " + to, bytes, options.progress);
  const lockstep::detail::NewFolder folder(to, lockstep::detail::Replaces::kWeights);
  for (auto& file : files) {
    const auto header = lockstep::detail::laid_out_header(file.entries, {{"format", "pt"}});
    lockstep::detail::FileWriter writer(folder.file(file.name));
    writer.write(header);
    for (const auto& source : file.sources) {
      const auto& stored = catalog.tensors.at(source);
      const auto whole = at::empty(stored.sizes, stored.scalar_type(source));
      reading.read_now(source, {{.box = whole_box(stored.sizes), .values = whole}});
      writer.write(whole, [&](int64_t count) { progress.add(count); });
    }
    writer.finish();
  }
  if (files.size() > 1) {
    lockstep::detail::write_text(folder.file("model.safetensors.index.json"), index_of(files, bytes));
  }
  for (const auto& [name, text] : options.texts) lockstep::detail::write_text(folder.file(name), text);
  folder.put_in_place();
  progress.finish();
}

}  // namespace lockstep::dcp
