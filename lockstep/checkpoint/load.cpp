#include "lockstep/checkpoint/load.h"

#include <c10/util/Exception.h>

#include "lockstep/base/str.h"
#include "lockstep/checkpoint/reading.h"

namespace lockstep::dcp {

Loaded load(const std::string& path, const State& state, const LoadOptions& options) {
  const lockstep::detail::Together together(options.process_group);
  const auto what = str("'", path, "' was not loaded");
  std::optional<lockstep::detail::Reading> reading;
  std::optional<lockstep::detail::ProgressTeller> progress;
  together.all_do(what, [&] {
    reading.emplace(lockstep::detail::open_catalog(path), options, together.rank(), together.size());
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
