// What Python's DistributedDataParallel did: the file that reference.py writes. The parent process makes it, once per
// world size; rank processes find it through the environment.
#pragma once

#include <ATen/core/ivalue.h>

#include <memory>
#include <string>
#include <vector>

namespace lockstep::ddp_oracle {

/// The tensors of a packed part of the file; see packing.py.
struct PackedTensors {
  at::Tensor places;
  std::vector<at::Tensor> flats;
};

/// A part of the file: Python's dicts, lists, tensors and numbers.
class Node {
 public:
  explicit Node(c10::IValue value, std::shared_ptr<const PackedTensors> packed = nullptr)
      : value_(std::move(value)), packed_(std::move(packed)) {}

  /// Of what was packed.
  Node unpacked() const;

  /// Of a dict; throws if it has no such key.
  Node operator[](const std::string& key) const;
  bool has(const std::string& key) const;
  std::vector<std::string> keys() const;
  /// Of a list.
  Node operator[](std::size_t index) const { return Node(value_.toListRef()[index], packed_); }
  std::size_t size() const { return value_.toListRef().size(); }

  bool is_none() const { return value_.isNone(); }
  bool is_tensor() const { return value_.isTensor() || value_.isTuple(); }
  bool is_text() const { return value_.isString(); }
  /// A packed one is a view.
  at::Tensor tensor() const;
  const std::string& text() const { return value_.toStringRef(); }
  bool flag() const { return value_.toBool(); }
  int64_t integer() const { return value_.toInt(); }
  /// Of a float or an integer.
  double number() const { return value_.toScalar().toDouble(); }
  std::vector<int64_t> integers() const;
  std::vector<std::string> texts() const;

 private:
  c10::IValue value_;
  std::shared_ptr<const PackedTensors> packed_;
};

/// What was trained: what holds for all ranks, and what each rank was given and got.
struct Case {
  Node facts;
  std::vector<Node> ranks;
};

/// Whether there is a Python to ask. If not, tests are to be skipped for this reason.
bool has_python();
inline constexpr char kNoPython[] =
    "LOCKSTEP_PYTHON and LOCKSTEP_SOURCE_DIR must name a Python with torch and the sources";

/// Runs the script for this world size unless it has run already. Before ranks are started: they inherit the path.
/// Throws if it fails.
void make_reference(int world_size);

/// The file for this world size, which must have been made.
const Node& reference(int world_size);

/// The cases of one family in it.
std::vector<Case> cases_of(const std::string& family, int world_size);

}  // namespace lockstep::ddp_oracle
