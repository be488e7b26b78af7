// Archives in memory: what was written into one, read without a file. Internal to state, optim and zero.
#pragma once

#include <torch/serialize/archive.h>

#include "lockstep/state/optimizer_state.h"

namespace lockstep::detail {

/// The archive as if it had been saved and opened again, except that tensors are the ones that were written.
torch::serialize::InputArchive reopened(const torch::serialize::OutputArchive& archive);

/// Everything in the archive that is not an archive of its own.
NamedValues values_in(torch::serialize::InputArchive& archive);

/// What `subject`, an OptimizerOptions or OptimizerParamState, writes of itself.
template <class Subject>
NamedValues values_written_by(const Subject& subject) {
  torch::serialize::OutputArchive archive;
  subject.serialize(archive);
  auto opened = reopened(archive);
  return values_in(opened);
}

}  // namespace lockstep::detail
