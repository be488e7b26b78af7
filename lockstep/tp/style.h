// Parallel styles: how a layer's parameters lie on the ranks of a tensor-parallel mesh, what layout its input comes in
// and its output leaves with. Names and defaults are those of Python's torch.distributed.tensor.parallel.
// parallelize_module() applies them to modules as they are.
//
// A plain tensor that reaches a layer is this rank's piece of a tensor with the style's input layout; a DTensor is
// redistributed if it has another. What leaves is a plain local tensor, or with use_local_output = false a DTensor.
#pragma once

#include <concepts>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/mesh/device_mesh.h"
#include "lockstep/shard/placement.h"

namespace torch::nn {
class Module;
}

namespace lockstep {

struct StyleContext;

class ParallelStyle {
 public:
  virtual ~ParallelStyle() = default;
  /// Cuts the parameters of `module`, which the plan's root knows as `path`. Refuses, naming it, a layer the style does
  /// not know. Collective over the mesh if weights come from a source rank.
  virtual void apply(torch::nn::Module& module, const std::string& path, const StyleContext& context) const = 0;
  /// "ColwiseParallel(output_layouts=Shard(dim=-1))".
  virtual std::string to_string() const = 0;
};

struct ColwiseOptions {
  Placement input_layouts = Replicate();
  Placement output_layouts = Shard(-1);
  bool use_local_output = true;
  /// Layers whose output is several side by side, as q, k and v of one Linear are: each of them is cut, so that every
  /// rank has its heads of all. Implies that the output is a DTensor.
  int64_t fused_parts = 1;
  /// The input that backward needs is kept cut over the ranks, and gathered when it is used: an all-gather for memory.
  bool input_reshard = false;
};

/// Linear: weight and bias Shard(0). Embedding: weight Shard(1). MultiheadAttention: q, k and v by heads.
class ColwiseParallel : public ParallelStyle {
 public:
  explicit ColwiseParallel(ColwiseOptions options = {}) : options_(std::move(options)) {}
  void apply(torch::nn::Module& module, const std::string& path, const StyleContext& context) const override;
  std::string to_string() const override;

 private:
  ColwiseOptions options_;
};

struct RowwiseOptions {
  std::optional<Placement> input_layouts = std::nullopt;  // Linear: Shard(-1). Embedding: Replicate()
  Placement output_layouts = Replicate();
  bool use_local_output = true;
};

/// Linear: weight Shard(1), bias whole and added once. Embedding: weight Shard(0).
class RowwiseParallel : public ParallelStyle {
 public:
  explicit RowwiseParallel(RowwiseOptions options = {}) : options_(std::move(options)) {}
  void apply(torch::nn::Module& module, const std::string& path, const StyleContext& context) const override;
  std::string to_string() const override;

 private:
  RowwiseOptions options_;
};

struct SequenceOptions {
  int64_t sequence_dim = 1;
  bool use_local_output = false;
  /// Compares the weights of all ranks instead of trusting them. Collective.
  bool check_weights = false;
};

/// LayerNorm, RMSNorm, Prepared<Dropout>: weights whole on every rank, input and output cut along the sequence.
class SequenceParallel : public ParallelStyle {
 public:
  explicit SequenceParallel(SequenceOptions options = {}) : options_(options) {}
  void apply(torch::nn::Module& module, const std::string& path, const StyleContext& context) const override;
  std::string to_string() const override;

 private:
  SequenceOptions options_;
};

/// Any style, as a value.
class Style {
 public:
  template <std::derived_from<ParallelStyle> S>
  Style(S style) : style_(std::make_shared<S>(std::move(style))) {}  // NOLINT(google-explicit-constructor): is a value

  const ParallelStyle& operator*() const { return *style_; }
  const ParallelStyle* operator->() const { return style_.get(); }

 private:
  std::shared_ptr<const ParallelStyle> style_;
};

}  // namespace lockstep
