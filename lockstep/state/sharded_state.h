// State of which each rank has a part, by name, with what says where the part belongs: so parts that some ranks have
// saved can be put together by any other number of ranks. Values, without groups; fsdp makes and loads them.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "lockstep/shard/layout.h"
#include "lockstep/state/named_values.h"

namespace lockstep {

/// How a tensor was divided, and whose part this is: a Layout that outlives its mesh.
struct Sharding {
  std::vector<int64_t> sizes = {};  // of the whole tensor
  Placements placements = {};       // one per axis of the mesh
  std::vector<int64_t> mesh_shape = {};
  std::vector<int> coordinate = {};  // in the mesh, of the rank that has the part

  TensorPart part() const;
  /// "[7, 5], (Shard(dim=0),) on a mesh of [4], the part of [1]".
  std::string to_string() const;
  bool operator==(const Sharding&) const = default;
};

/// By the layout that a parameter carries; none if it carries none, or if this rank is outside of its mesh.
std::optional<Sharding> sharding_of(const at::Tensor& parameter);

struct ShardedTensor {
  at::Tensor local = {};
  std::optional<Sharding> sharding = std::nullopt;  // none: every rank has all of it
};

/// Parameters and buffers by dotted name.
using ShardedModuleState = std::map<std::string, ShardedTensor>;

/// An optimizer's state by the names its parameters have in a module: Python's get_optimizer_state_dict(). A parameter
/// that has several names is in it by one.
struct NamedOptimizerState {
  struct Group {
    NamedValues options = {};
    std::vector<std::string> params = {};
  };
  /// Parameters without state are absent.
  std::map<std::string, NamedValues> state = {};
  std::vector<Group> param_groups = {};
  /// Of parameters whose tensors in `state` are one rank's part; those of others are whole.
  std::map<std::string, Sharding> shardings = {};
};

/// What one rank has of a training run, in a file. Throw, naming the file, if it cannot be written or read.
struct StateShard {
  std::string save = "";  // the same in all parts of a save
  int parts = 1;          // how many there are
  ShardedModuleState model = {};
  NamedOptimizerState optimizer = {};
};
void save_state_shard(const std::string& path, const StateShard& shard);
StateShard load_state_shard(const std::string& path);

/// What says which parts a save has. Written once all of them are there.
struct ShardIndex {
  std::string save = "";
  int parts = 1;
};
void save_shard_index(const std::string& path, const ShardIndex& index);
ShardIndex load_shard_index(const std::string& path);

namespace detail {

/// A tensor that is put together of parts: all of it, or the part of it that one rank is to have.
class PartialTensor {
 public:
  /// `options` and `wanted` of the result; `name` opens messages.
  PartialTensor(std::string name, std::vector<int64_t> sizes, TensorPart wanted, const at::TensorOptions& options);

  /// Takes what it needs of a part. Throws if the part is of a tensor of other sizes.
  void add(const ShardedTensor& part);
  /// The elements of a box, which lie in `local` as it says.
  void add(const at::Tensor& local, const TensorBox& box);
  /// Throws unless all of it has come.
  const at::Tensor& finished() const;

 private:
  const std::string name_;
  const std::vector<int64_t> sizes_;
  const TensorPart wanted_;
  at::Tensor values_;
  int64_t covered_ = 0;                                                   // elements
  std::set<std::pair<std::vector<int64_t>, std::vector<int64_t>>> seen_;  // offsets and sizes: replicas hold the same
};

/// All of a tensor of `sizes`.
TensorPart whole_part(const std::vector<int64_t>& sizes);

}  // namespace detail
}  // namespace lockstep
