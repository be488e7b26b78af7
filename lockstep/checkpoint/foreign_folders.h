// Checkpoints that others wrote, as catalogs. Internal to checkpoint.
#pragma once

#include <string>

#include "lockstep/checkpoint/catalog.h"

namespace lockstep::detail {

/// One safetensors file.
Catalog catalog_of_file(const std::string& path);

/// A Hugging Face folder, with model.safetensors.index.json or without, or the shards that Python's
/// torch.distributed.checkpoint writes as safetensors: files say where in their tensors they begin. `folder` ends with
/// a slash.
Catalog catalog_of_foreign_folder(const std::string& folder);

}  // namespace lockstep::detail
