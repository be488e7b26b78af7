// A checkpoint as a Hugging Face folder: whole tensors, in as few files as their size allows. Read and written tensor
// by tensor, so that memory for the largest is enough. Local.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "lockstep/checkpoint/progress.h"

namespace lockstep::dcp {

struct MergeOptions {
  /// Only tensors of this entry, without its name: "model" makes "head.weight" of "model.head.weight". Empty: all, by
  /// their full names.
  std::string entry = "";
  /// Several files rather than longer ones, unless a tensor is.
  int64_t max_file_bytes = int64_t{5} << 30;
  /// Other files that belong into the folder, by name: config.json, say.
  std::map<std::string, std::string> texts = {};
  ProgressFunction progress = nullptr;
};

/// Writes `to` from the checkpoint at `from`, whoever wrote that. In place of a folder that is there, once everything
/// is on the disk. Values that are no tensors are left out. Throws, naming it, if there is no such entry, or if bytes
/// are not those that were written.
void merge(const std::string& from, const std::string& to, const MergeOptions& options = {});

}  // namespace lockstep::dcp
