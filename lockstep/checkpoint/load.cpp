#include "lockstep/checkpoint/load.h"

#include <c10/util/Exception.h>

#include "lockstep/base/crc32c.h"
#include "lockstep/base/str.h"
#include "lockstep/checkpoint/reading.h"

namespace lockstep::dcp {

Loaded load(const std::string& path, const State& state, const LoadOptions& options) {
  const lockstep::detail::Together together(options.process_group);
  const auto what = str("'", path, "' was not loaded");
  std::optional<lockstep::detail::Reading> reading;
  std::optional<lockstep::detail::ProgressTeller> progress;
  const auto identities = together.all_say(what, [&] {
    auto catalog = lockstep::detail::open_catalog(path);
    const auto text = lockstep::detail::index_text(catalog);
    reading.emplace(std::move(catalog), options, together.rank(), together.size());
    return std::to_string(crc32c(0, text.data(), text.size()));
  });
  together.all_do(what, [&] {
    for (std::size_t rank = 1; rank < identities.size(); ++rank) {
      TORCH_CHECK(identities[rank] == identities[0], "[lockstep/checkpoint] what rank ", rank,
                  " finds there is another checkpoint than rank 0's. All ranks must see the same folder.");
    }
    for (const auto& [name, object] : state.entries()) {
      reading->begin_entry(name);
      object->load(*reading);
    }
    reading->check();
    if (together.rank() == 0) progress.emplace("loading " + path, reading->bytes_to_read(), options.progress);
    if (options.verify == Verify::kFirst) reading->verify();
  });
  together.all_do(what, [&] { reading->fill(progress ? &*progress : nullptr); });
  together.all_do(what, [&] { reading->finish(); });
  if (progress) progress->finish();
  return reading->loaded();
}

}  // namespace lockstep::dcp
