// A dict with a format in a file, as torch pickles it: what indices and parts of saved state are. Internal to state.
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/ivalue.h>

#include <string>

namespace lockstep::detail {

/// Under another name first, and flushed: a file that is there is complete, and outlives a crash.
void write_pickled(const std::string& path, const c10::impl::GenericDict& dict);

/// Refuses a file that holds no dict with a "format": it "is no " `what`.
c10::impl::GenericDict read_pickled(const std::string& path, const std::string& what);

}  // namespace lockstep::detail
