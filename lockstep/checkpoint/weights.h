// Weights alone, as the rest of the world has them: Hugging Face folders.
//
//   load_weights(*model, "Llama-3.2-1B");     // into a module as it is: plain, FSDP, TP, on the meta device
//   save_weights(*model, "tuned");            // whole tensors, which Python's transformers opens
#pragma once

#include <functional>
#include <map>
#include <string>

#include "lockstep/checkpoint/load.h"

namespace lockstep {

struct LoadWeightsOptions {
  /// As in dcp::LoadOptions.
  GroupPtr process_group = nullptr;
  bool strict = true;
  bool casts = false;
  /// What a parameter or buffer of the module is called in the files.
  std::function<std::string(const std::string& name)> name_in_file = nullptr;
  /// Of a checkpoint that dcp::save() wrote: the name the module had in it.
  std::string entry = "model";
  ProgressFunction progress = nullptr;
};

/// From a folder with model.safetensors.index.json, a folder of safetensors files, one such file, or a checkpoint that
/// dcp::save() wrote. A rank reads what it needs. Collective and blocking; throws as dcp::load() does.
dcp::Loaded load_weights(torch::nn::Module& module, const std::string& path, const LoadWeightsOptions& options = {});

struct SaveWeightsOptions {
  GroupPtr process_group = nullptr;
  int64_t max_file_bytes = int64_t{5} << 30;
  /// Other files that belong into the folder, by name: config.json, say.
  std::map<std::string, std::string> texts = {};
  ProgressFunction progress = nullptr;
};

/// model.safetensors, or several files with an index, in place of a folder that is there. Tied parameters are in it
/// once, by the first of their names. Ranks write their parts first, to a folder beside it, and rank 0 puts them
/// together, tensor by tensor. Collective and blocking; if something goes wrong on one rank, all throw.
void save_weights(const torch::nn::Module& module, const std::string& folder, const SaveWeightsOptions& options = {});

/// Of what holders and pointers point to.
template <class Holder>
  requires requires(Holder& holder) { load_weights(*holder, ""); }
dcp::Loaded load_weights(Holder& module, const std::string& path, const LoadWeightsOptions& options = {}) {
  return load_weights(*module, path, options);
}
template <class Holder>
  requires requires(const Holder& holder) { save_weights(*holder, ""); }
void save_weights(const Holder& module, const std::string& folder, const SaveWeightsOptions& options = {}) {
  save_weights(*module, folder, options);
}

}  // namespace lockstep
