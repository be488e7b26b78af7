// A captured forward that is ready to run: cut into parts, each compiled by a backend, called one after another.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/graph/backends.h"
#include "lockstep/graph/split.h"

namespace lockstep::graph {

/// Where graphs and tables are shown: dump(what, text), such as dump("part 0", …).
using Dump = std::function<void(const std::string& what, const std::string& text)>;

class Program {
 public:
  /// Cuts by `split`, or not at all, and hands every part to the backend, in forward order. A part on which it fails
  /// runs as it was captured, with a warning. REQUIRES: `outer` are the graph's parameters and buffers, in its order.
  Program(Graph graph, const std::optional<SplitOptions>& split, Backend backend, const std::vector<at::Tensor>& outer,
          const Dump& dump = nullptr);

  /// Inputs of the program, then parameters and buffers as of the constructor.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& outer);

  const Graph& graph() const { return graph_; }
  const std::vector<Bucket>& buckets() const { return buckets_; }
  struct CompiledPart {
    Part part;
    GraphFunction function = nullptr;
    std::string name = "";    // "compiled_part_0"
    std::string reason = "";  // why it was cut off, and how to turn that off
    bool is_compiled = true;
    std::vector<TensorLook> looks = {};  // of its outputs, as compiled for
  };
  const std::vector<CompiledPart>& parts() const { return parts_; }
  /// How often a part was compiled again since an output before it had other strides than it was compiled for.
  int recompilations() const { return recompilations_; }
  /// Tables of buckets, and what is not as it might be.
  std::string describe() const;
  /// The graph with its parts, for Graphviz: save_svg() draws it.
  std::string to_dot() const;

 private:
  void compile(std::size_t index, const std::vector<at::Tensor>& outer);
  void check_looks(std::size_t index, const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& outer);

  Graph graph_;
  std::vector<Bucket> buckets_;
  Backend backend_;
  std::vector<CompiledPart> parts_;
  std::vector<std::vector<ValueId>> dead_after_;  // by part
  std::vector<TensorLook> known_looks_;           // by value, as parts are compiled for
  int recompilations_ = 0;
};

}  // namespace lockstep::graph
