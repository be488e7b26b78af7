#include "tests/oracle/ddp/reference.h"

#include <torch/serialize.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>

#include "lockstep/base/env.h"
#include "lockstep/base/str.h"
#include "lockstep/testing/temp_dir.h"

namespace lockstep::ddp_oracle {
namespace {

std::string variable_of(int world_size) {
  return str("LOCKSTEP_TEST_DDP_REFERENCE_", world_size);
}

Node load(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK(file, "there is no ", path);
  const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  return Node(torch::pickle_load(bytes));
}

}  // namespace

Node Node::operator[](const std::string& key) const {
  const auto dict = value_.toGenericDict();
  const auto found = dict.find(key);
  TORCH_CHECK(found != dict.end(), "the reference has no '", key, "' here");
  return Node(found->value(), packed_);
}

Node Node::unpacked() const {
  auto packed = std::make_shared<PackedTensors>();
  packed->places = (*this)["places"].tensor();
  const auto flats = (*this)["flats"];
  for (std::size_t i = 0; i < flats.size(); ++i) packed->flats.push_back(flats[i].tensor());
  return Node((*this)["tree"].value_, std::move(packed));
}

at::Tensor Node::tensor() const {
  if (value_.isTensor()) return value_.toTensor();
  constexpr int64_t kMostDims = 4;
  const auto& table = packed_->places;
  const auto* row = table.const_data_ptr<int64_t>() + value_.toTupleRef().elements()[0].toInt() * table.size(1);
  const auto dims = static_cast<std::size_t>(row[2]);
  return packed_->flats[row[0]].as_strided({row + 3, dims}, {row + 3 + kMostDims, dims}, row[1]);
}

bool Node::has(const std::string& key) const {
  return value_.toGenericDict().contains(key);
}

std::vector<std::string> Node::keys() const {
  std::vector<std::string> result;
  for (const auto& entry : value_.toGenericDict()) result.push_back(entry.key().toStringRef());
  return result;
}

std::vector<int64_t> Node::integers() const {
  std::vector<int64_t> result;
  for (const auto& item : value_.toListRef()) result.push_back(item.toInt());
  return result;
}

std::vector<std::string> Node::texts() const {
  std::vector<std::string> result;
  for (const auto& item : value_.toListRef()) result.push_back(item.toStringRef());
  return result;
}

bool has_python() {
  return env("LOCKSTEP_PYTHON") && env("LOCKSTEP_SOURCE_DIR");
}

void make_reference(int world_size) {
  const auto variable = variable_of(world_size);
  if (env(variable)) return;
  static const testing::TempDir directory;
  const auto path = directory.file(str("world", world_size));
  const auto log = directory.file("log");
  const auto command = str("'", *env("LOCKSTEP_PYTHON"), "' -B '", *env("LOCKSTEP_SOURCE_DIR"),
                           "/tests/oracle/ddp/reference.py' ", world_size, " '", path, "' >'", log, "' 2>&1");
  if (std::system(command.c_str()) != 0) {
    std::ifstream file(log);
    const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    TORCH_CHECK(false, "the reference script failed: ", text);
  }
  ::setenv(variable.c_str(), path.c_str(), /*overwrite=*/1);
}

const Node& reference(int world_size) {
  static std::map<int, Node> files;
  const auto found = files.find(world_size);
  if (found != files.end()) return found->second;
  return files.emplace(world_size, load(env(variable_of(world_size)).value())).first->second;
}

std::vector<Case> cases_of(const std::string& family, int world_size) {
  const auto& file = reference(world_size);
  std::vector<Node> ranks;
  for (int rank = 0; rank < world_size; ++rank) ranks.push_back(file["ranks"][rank].unpacked());
  std::vector<Case> result;
  for (std::size_t i = 0; i < file["cases"].size(); ++i) {
    const auto facts = file["cases"][i];
    if (facts["family"].text() != family) continue;
    auto& added = result.emplace_back(Case{facts, {}});
    for (const auto& rank : ranks) added.ranks.push_back(rank[i]);
  }
  return result;
}

}  // namespace lockstep::ddp_oracle
