// Where layers keep their parameters: in C++ a module holds a parameter twice, in its register and in a member, and
// only its own type knows the member. Internal to tp.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/tp/operator_style.h"

namespace torch::nn {
class Module;
}

namespace lockstep {
namespace detail {

enum class LayerKind { kLinear, kEmbedding, kNorm, kAttention, kDropout, kUnknown };

/// A registered parameter and the member that is a handle on it.
struct LayerParameter {
  std::string name;
  at::Tensor* member;
};

struct Layer {
  LayerKind kind = LayerKind::kUnknown;
  std::vector<LayerParameter> parameters = {};  // those that are there
};

Layer layer_of(torch::nn::Module& module);

/// What is to be cut, collected before anything is changed.
class Divisions {
 public:
  Divisions(DeviceMesh mesh, std::optional<int> src_data_rank) : mesh_(std::move(mesh)), source_(src_data_rank) {}

  const DeviceMesh& mesh() const { return mesh_; }
  const std::shared_ptr<InputMemo>& memo() const { return memo_; }

  /// `module`, which the root knows as `path`, is to register this rank's part of `parameter`, and its member to be a
  /// DTensor with `style`. Local. Refuses what is divided already, and ties whose placements differ.
  void add(torch::nn::Module& module, const LayerParameter& parameter, const std::string& path,
           const Placement& placement, std::shared_ptr<OperatorStyle> style);
  /// Finds a dropout of `root` that drops something: behind uneven local outputs ranks would draw different amounts of
  /// random numbers, and their generators part. Local.
  void look_for_dropouts(const torch::nn::Module& root);
  /// Refuses a local output of `features` features if they cannot be cut evenly and there is such a dropout. Local.
  void check_local_output(const std::string& path, const Placement& output, int64_t features) const;
  /// What else is to be done, on all ranks, once nothing can be refused any more. Local.
  void add_change(std::function<void()> change) { changes_.push_back(std::move(change)); }
  /// Refuses other parameters of `root` in the memory of those to be cut. Local.
  void check_memory(const torch::nn::Module& root) const;
  /// Cuts them all. Collective over the mesh unless there is no source.
  void run();

 private:
  struct Division {
    torch::nn::Module* module;
    LayerParameter parameter;
    std::string name;
    at::Tensor whole;
    Layout layout;
    std::shared_ptr<OperatorStyle> style;
  };

  at::Tensor part_of(const at::Tensor& whole, const Layout& layout) const;

  const DeviceMesh mesh_;
  const std::optional<int> source_;
  const std::shared_ptr<InputMemo> memo_ = std::make_shared<InputMemo>();
  std::optional<std::string> dropout_;  // its path
  std::vector<Division> divisions_;
  std::vector<std::function<void()>> changes_;
};

}  // namespace detail

/// What a style is given to work with.
struct StyleContext {
  detail::Divisions& divisions;
};

}  // namespace lockstep
