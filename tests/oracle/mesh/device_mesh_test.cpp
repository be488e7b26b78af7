// Compares meshes with PyTorch's, rank by rank: text, coordinates, ranks and the ranks of every group.
#include "lockstep/mesh/device_mesh.h"

#include <cstdio>
#include <cstdlib>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include <torch/headeronly/version.h>

#include "lockstep/base/str.h"
#include "lockstep/comm/world.h"
#include "lockstep/testing/gtest.h"

namespace lockstep {
namespace {

constexpr int kWorldSize = 8;
const std::vector<std::string> kNames = {"a", "b", "c"};

/// What the reference script prints; every line begins with a label and the rank.
std::vector<std::string> reference_lines(const std::string& python, const std::string& source_dir) {
  const auto command = str("'", python, "' '", source_dir, "/tests/oracle/mesh/device_mesh_reference.py' 2>/dev/null");
  FILE* pipe = ::popen(command.c_str(), "r");
  if (pipe == nullptr) return {};
  std::vector<std::string> lines;
  std::string line;
  for (int c = std::fgetc(pipe); c != EOF; c = std::fgetc(pipe)) {
    if (c != '\n') {
      line.push_back(static_cast<char>(c));
    } else {
      lines.push_back(std::move(line));
      line.clear();
    }
  }
  return ::pclose(pipe) == 0 ? lines : std::vector<std::string>{};
}

std::string describe(const std::string& label, const DeviceMesh& mesh) {
  const auto start = str(label, " rank ", mesh.get_rank(), ": ", mesh);
  if (!mesh.is_member()) return start + " outside";
  std::vector<std::string> groups;
  for (const auto& group : mesh.get_all_groups()) groups.push_back(join(global_ranks(group), ","));
  return str(start, " at ", join(*mesh.get_coordinate(), ","), " ranks ", join(mesh.ranks(), ","), " groups ",
             join(groups, ";"));
}

std::vector<std::string> describe_all() {
  const std::vector<std::vector<int64_t>> shapes = {{8},    {2, 4},    {4, 2}, {2, 2, 2}, {1, 8},
                                                    {8, 1}, {2, 1, 4}, {3, 2}, {1, 1}};
  std::vector<std::string> lines;
  for (const auto& shape : shapes) {
    const std::vector<std::string> names(kNames.begin(), kNames.begin() + static_cast<int64_t>(shape.size()));
    const auto mesh = init_device_mesh("cpu", shape, {.mesh_dim_names = names});
    const auto label = join(shape, ",");
    lines.push_back(describe(label, mesh));
    if (!mesh.is_member()) continue;
    for (const auto& name : names) lines.push_back(describe(str(label, " slice ", name), mesh[name]));
    if (shape.size() != 3) continue;
    for (const auto& pair : std::vector<std::vector<std::string>>{{"a", "b"}, {"b", "c"}, {"a", "c"}}) {
      const auto part = mesh.slice(pair);
      lines.push_back(describe(str(label, " slice ", join(pair, ",")), part));
      lines.push_back(describe(str(label, " flatten ", join(pair, ",")), part.flatten()));
    }
    lines.push_back(describe(str(label, " concatenate c,a"), DeviceMesh::concatenate({mesh["c"], mesh["a"]})));
  }
  lines.push_back(describe("array", DeviceMesh::from_ranks("cpu", {.ranks = {1, 3, 5, 2, 4, 6}, .shape = {2, 3}},
                                                           {.mesh_dim_names = {"a", "b"}})));
  lines.push_back(describe("unnamed", init_device_mesh("cpu", {2, 4})));
  lines.push_back(describe("unnamed flat", init_device_mesh("cpu", {8})));
  return lines;
}

std::string without_strides(const std::string& line) {
  static const std::regex strides("stride=.*?\\) (at|outside)");
  return std::regex_replace(line, strides, "$1");
}

// TP-1, TP-3, TP-7, TP-8, TP-10: the same coordinates, ranks, groups and text as PyTorch's
TEST(DeviceMeshOracle, AgreesWithPyTorch) {
  const char* python = std::getenv("LOCKSTEP_PYTHON");
  const char* source_dir = std::getenv("LOCKSTEP_SOURCE_DIR");
  if (python == nullptr || *python == '\0' || source_dir == nullptr) {
    GTEST_SKIP() << "LOCKSTEP_PYTHON and LOCKSTEP_SOURCE_DIR must name a Python with torch and the sources";
  }
  const auto reference = reference_lines(python, source_dir);
  ASSERT_FALSE(reference.empty()) << "the reference script failed";
  std::vector<std::vector<std::string>> by_rank(kWorldSize);
  lockstep::testing::run_threads_in_gtest({.world_size = kWorldSize},
                                          [&](const World& world) { by_rank[world.rank()] = describe_all(); });
  std::vector<std::string> lines;
  for (const auto& part : by_rank) lines.insert(lines.end(), part.begin(), part.end());
  ASSERT_EQ(lines.size(), reference.size());
  for (std::size_t i = 0; i < lines.size(); ++i) {
    // Before torch 2.12, PyTorch printed the strides of axes of one rank, and of flattened ones, in another way.
    if (TORCH_VERSION_MINOR < 12) {
      EXPECT_EQ(without_strides(lines[i]), without_strides(reference[i]));
    } else {
      EXPECT_EQ(lines[i], reference[i]);
    }
  }
}

}  // namespace
}  // namespace lockstep
