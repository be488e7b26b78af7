// Cuts a captured forward where gradient buckets end, so that in backward a bucket can be reduced while the parts
// before it still compute. Pure: no group, no communication; the same graph gives the same cuts on every rank.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "lockstep/graph/graph.h"

namespace lockstep::graph {

struct SplitOptions {
  std::size_t bucket_bytes_cap = std::size_t{25} << 20;
  /// Of the bucket that is reduced first. None: 1 MiB, or the cap if that is less.
  std::optional<std::size_t> first_bucket_cap = std::nullopt;
  /// Instead of caps: the buckets that parameters are reduced in, by name, the first one first. A bucket is full when
  /// all of it are there.
  std::vector<std::set<std::string>> buckets = {};
  /// Parameters that nobody reduces, by name: they are placed, not counted.
  std::set<std::string> ignored = {};
};

/// What one part of the graph has. Parts are numbered from the front; the last one's gradients are reduced first.
struct Bucket {
  std::size_t bytes = 0;  // of counted parameters
  std::vector<ValueId> parameters;
  std::vector<std::string> names;
  std::vector<std::size_t> nodes;
  /// Operators it took beyond its cap, since a cut before them would leave it without an output or cut through memory
  /// that is written in place; and its bytes before that.
  std::size_t extra_nodes = 0;
  std::size_t bytes_before = 0;
};

/// Every node is in exactly one bucket. Throws for caps that cannot be.
std::vector<Bucket> plan_split(const Graph& graph, const SplitOptions& options = {});

/// The part of the graph that holds these nodes, which follow each other: a graph of its own, whose inputs are what it
/// reads from outside, in order of first use, and whose outputs are what later nodes or the return need.
struct Part {
  Graph graph;
  std::vector<ValueId> inputs;   // by input of the part: the value in the whole graph
  std::vector<ValueId> outputs;  // the same for outputs
};
Part extract_part(const Graph& graph, const std::vector<std::size_t>& nodes);
/// The same with outputs that are given: values that these nodes make.
Part extract(const Graph& graph, const std::vector<std::size_t>& nodes, const std::vector<ValueId>& outputs);
/// One for each bucket. Several parts of which one has no output are an internal error: plan_split() makes none.
std::vector<Part> extract_parts(const Graph& graph, const std::vector<Bucket>& buckets);

/// Buckets as a table: the one reduced first has index 0. Then, if any were extended, by how much.
std::string bucket_table(const std::vector<Bucket>& buckets);

}  // namespace lockstep::graph
