// Runs a reference script under Python and reads what it saved: plain dicts, lists and tensors.
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "lockstep/base/str.h"
#include "lockstep/testing/temp_dir.h"

namespace lockstep::oracle {

/// `script` is a path below tests/oracle that takes the path of the file it writes, and maybe another argument. False
/// if there is no Python to run it here.
inline bool run_script(const std::string& script, const std::string& file, const std::string& argument = "") {
  const char* python = std::getenv("LOCKSTEP_PYTHON");
  const char* source_dir = std::getenv("LOCKSTEP_SOURCE_DIR");
  if (python == nullptr || *python == '\0' || source_dir == nullptr) return false;
  const auto command = str("'", python, "' '", source_dir, "/tests/oracle/", script, "' '", file, "'",
                           argument.empty() ? "" : str(" '", argument, "'"));
  TORCH_CHECK(std::system(command.c_str()) == 0, "the reference script ", script, " failed");
  return true;
}

/// What such a script has saved; None if there is no Python.
inline c10::IValue run_reference(const std::string& script, const std::string& argument = "") {
  const testing::TempDir folder;
  const auto file = folder.file("reference");
  if (!run_script(script, file, argument)) return {};
  std::ifstream in(file, std::ios::binary);
  return torch::jit::pickle_load({std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()});
}

inline c10::IValue at_key(const c10::IValue& dict, const std::string& key) {
  return dict.toGenericDict().at(key);
}

/// None becomes an undefined tensor.
inline std::vector<at::Tensor> tensors_of(const c10::IValue& list) {
  std::vector<at::Tensor> tensors;
  for (const auto& each : list.toListRef()) tensors.push_back(each.isNone() ? at::Tensor() : each.toTensor());
  return tensors;
}

inline std::map<std::string, at::Tensor> tensors_by_name(const c10::IValue& dict) {
  std::map<std::string, at::Tensor> tensors;
  for (const auto& item : dict.toGenericDict()) tensors[item.key().toStringRef()] = item.value().toTensor();
  return tensors;
}

}  // namespace lockstep::oracle
