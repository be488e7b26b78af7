// Runs a reference script of this folder under Python and reads what it saved.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "lockstep/base/str.h"
#include "lockstep/testing/temp_dir.h"

namespace lockstep::optim_oracle {

/// None if the script cannot run here.
inline c10::IValue reference(const std::string& script) {
  const char* python = std::getenv("LOCKSTEP_PYTHON");
  const char* source_dir = std::getenv("LOCKSTEP_SOURCE_DIR");
  if (python == nullptr || *python == '\0' || source_dir == nullptr) return {};
  const testing::TempDir folder;
  const auto file = folder.file("reference");
  const auto command = str("'", python, "' '", source_dir, "/tests/oracle/optim/", script, "' '", file, "'");
  TORCH_CHECK(std::system(command.c_str()) == 0, "the reference script failed");
  std::ifstream in(file, std::ios::binary);
  return torch::pickle_load({std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()});
}

inline c10::IValue at_key(const c10::IValue& dict, const std::string& key) {
  return dict.toGenericDict().at(key);
}

/// None becomes an undefined tensor.
inline std::vector<at::Tensor> tensors_of(const c10::IValue& list) {
  std::vector<at::Tensor> tensors;
  for (const c10::IValue& each : list.toList()) tensors.push_back(each.isNone() ? at::Tensor() : each.toTensor());
  return tensors;
}

/// Bit by bit, if the tolerance is 0; NaN equals NaN.
inline void expect_agreement(const at::Tensor& actual, const at::Tensor& expected, double tolerance,
                             const std::string& what) {
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  ASSERT_EQ(actual.scalar_type(), expected.scalar_type()) << what;
  EXPECT_TRUE(at::allclose(actual, expected, tolerance, tolerance, /*equal_nan=*/true))
      << what << ", apart by " << (actual - expected).abs().max();
}

}  // namespace lockstep::optim_oracle
