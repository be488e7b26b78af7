#include "lockstep/checkpoint/weights.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <random>

#include "lockstep/base/str.h"
#include "lockstep/checkpoint/catalog.h"
#include "lockstep/checkpoint/folder.h"
#include "lockstep/checkpoint/merge.h"
#include "lockstep/checkpoint/save.h"
#include "lockstep/checkpoint/together.h"

namespace lockstep {

dcp::Loaded load_weights(torch::nn::Module& module, const std::string& path, const LoadWeightsOptions& options) {
  const detail::Together together(options.process_group);
  std::string entry;
  together.all_do(str("'", path, "' was not loaded"), [&] {
    const auto entries = detail::open_catalog(path).entries;
    const bool is_named = !entries.empty() && std::find(entries.begin(), entries.end(), "") == entries.end();
    if (is_named) entry = options.entry;
  });
  dcp::State state;
  state.add(entry, module);
  dcp::LoadOptions load{.process_group = options.process_group,
                        .strict = options.strict,
                        .casts = options.casts,
                        .progress = options.progress};
  if (options.name_in_file) {
    const auto prefix = entry.empty() ? entry : entry + ".";
    load.name_in_checkpoint = [prefix, rename = options.name_in_file](const std::string& name) {
      return prefix + rename(name.substr(prefix.size()));
    };
  }
  return dcp::load(path, state, load);
}

void save_weights(const torch::nn::Module& module, const std::string& folder, const SaveWeightsOptions& options) {
  const detail::Together together(options.process_group);
  dcp::State state;
  // It is only read.
  state.add("", const_cast<torch::nn::Module&>(module));
  const auto [above, name] = detail::split_path(folder);
  const auto parts = together.first_says(str("'", folder, "' was not saved"), [above = above, name = name] {
    return str(above, ".", name, ".parts-", std::random_device()());
  });
  dcp::save(parts, state, {.process_group = options.process_group, .progress = options.progress});
  together.first_says(str("'", folder, "' was not saved"), [&] {
    struct Removed {
      ~Removed() { detail::remove_folder(path); }
      const std::string& path;
    } const removed{parts};
    dcp::merge(parts, folder,
               {.max_file_bytes = options.max_file_bytes, .texts = options.texts, .progress = options.progress});
    return std::string();
  });
}

}  // namespace lockstep
