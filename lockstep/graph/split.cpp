#include "lockstep/graph/split.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <unordered_map>

#include "lockstep/base/str.h"

namespace lockstep::graph {
namespace {

constexpr std::size_t kFirstBucketCap = std::size_t{1} << 20;

std::size_t bytes_of(const TensorLook& look) {
  const auto count = std::accumulate(look.sizes.begin(), look.sizes.end(), std::int64_t{1}, std::multiplies<>());
  return static_cast<std::size_t>(count) * c10::elementSize(look.dtype);
}

/// Transposes and other views of parameters belong to whoever uses them: libtorch's linear takes weight.t().
struct ParameterViews {
  /// By value: the parameter it is a view of, itself for parameters.
  std::vector<std::optional<ValueId>> parameter_of;
  /// By node: it makes such a view and nothing else, and the node that uses it follows.
  std::vector<bool> is_view;
};

ParameterViews find_views(const Graph& graph) {
  ParameterViews views{.parameter_of = std::vector<std::optional<ValueId>>(graph.values.size()),
                       .is_view = std::vector<bool>(graph.nodes.size(), false)};
  for (ValueId id = 0; id < graph.values.size(); ++id) {
    if (graph.values[id].kind == ValueKind::kParameter) views.parameter_of[id] = id;
  }
  for (std::size_t n = 0; n < graph.nodes.size(); ++n) {
    const auto& node = graph.nodes[n];
    if (node.reads.size() != 1 || node.makes.size() != 1 || !node.writes.empty()) continue;
    const auto parameter = views.parameter_of[node.reads[0]];
    if (!parameter || graph.values[node.makes[0]].alias_group != graph.values[*parameter].alias_group) continue;
    views.parameter_of[node.makes[0]] = parameter;
    const auto next = n + 1;
    views.is_view[n] = next < graph.nodes.size() &&
                       std::find(graph.nodes[next].reads.begin(), graph.nodes[next].reads.end(), node.makes[0]) !=
                           graph.nodes[next].reads.end();
  }
  return views;
}

/// By node: the counted parameters whose earliest use it is; that is where their gradient completes.
std::vector<std::vector<ValueId>> counted_parameters(const Graph& graph, const ParameterViews& views,
                                                     const std::set<std::string>& ignored) {
  std::vector<std::vector<ValueId>> counted(graph.nodes.size());
  std::set<ValueId> seen;
  for (std::size_t n = 0; n < graph.nodes.size(); ++n) {
    if (views.is_view[n]) continue;
    for (const auto id : graph.nodes[n].reads) {
      const auto parameter = views.parameter_of[id];
      if (!parameter) continue;
      const auto& value = graph.values[*parameter];
      if (!value.look.requires_grad || ignored.contains(value.name)) continue;
      if (seen.insert(*parameter).second) counted[n].push_back(*parameter);
    }
    std::sort(counted[n].begin(), counted[n].end());  // as they are registered
  }
  return counted;
}

/// True at n if the graph may be cut before node n: no memory that is made before and written behind the cut.
std::vector<bool> possible_cuts(const Graph& graph) {
  struct Span {
    std::size_t first = 0;
    std::size_t last_write = 0;
    bool is_written = false;
  };
  std::unordered_map<std::size_t, Span> spans;
  for (std::size_t n = 0; n < graph.nodes.size(); ++n) {
    const auto& node = graph.nodes[n];
    const auto touch = [&](ValueId id) -> Span& {
      return spans.try_emplace(graph.values[id].alias_group, Span{.first = n}).first->second;
    };
    for (const auto id : node.reads) touch(id);
    for (const auto id : node.makes) touch(id);
    for (const auto id : node.writes) {
      // Statistics that no gradient goes through are written wherever their operator is.
      const auto kind = graph.values[id].kind;
      if (kind == ValueKind::kBuffer || kind == ValueKind::kConstant) continue;
      auto& span = touch(id);
      span.is_written = true;
      span.last_write = n;
    }
  }
  std::vector<bool> possible(graph.nodes.size(), true);
  for (const auto& [group, span] : spans) {
    if (!span.is_written) continue;
    for (auto n = span.first + 1; n <= span.last_write; ++n) possible[n] = false;
  }
  return possible;
}

}  // namespace

std::vector<Bucket> plan_split(const Graph& graph, const SplitOptions& options) {
  const auto cap = options.bucket_bytes_cap;
  const auto first_cap = options.first_bucket_cap.value_or(std::min(cap, kFirstBucketCap));
  TORCH_CHECK(cap > 0 && first_cap > 0 && first_cap <= cap, "[lockstep/graph] caps of buckets are ", first_cap,
              " bytes for the first and ", cap, " for the others: both must be more than 0, the first no larger.");
  const auto views = find_views(graph);
  const auto counted = counted_parameters(graph, views, options.ignored);
  const auto possible = possible_cuts(graph);
  // By value: the last node that reads it; the return reads behind all nodes.
  std::vector<std::size_t> last_read(graph.values.size(), 0);
  std::vector<bool> is_read(graph.values.size(), false);
  for (std::size_t n = 0; n < graph.nodes.size(); ++n) {
    for (const auto id : graph.nodes[n].reads) {
      last_read[id] = n;
      is_read[id] = true;
    }
  }
  for (const auto& id : graph.outputs) {
    if (!id) continue;
    last_read[*id] = graph.nodes.size();
    is_read[*id] = true;
  }

  // By given bucket: how many of it the graph has and no part yet.
  std::vector<std::size_t> missing(options.buckets.size(), 0);
  const auto bucket_of = [&](ValueId id) {
    const auto found = std::find_if(options.buckets.begin(), options.buckets.end(),
                                    [&](const auto& names) { return names.contains(graph.values[id].name); });
    return static_cast<std::size_t>(found - options.buckets.begin());
  };
  for (const auto& parameters : counted) {
    for (const auto id : parameters) {
      if (const auto bucket = bucket_of(id); bucket < missing.size()) ++missing[bucket];
    }
  }
  // Given buckets that the parts behind the front one have all of; those that the graph has nothing of count from the
  // start.
  auto whole = static_cast<std::size_t>(std::count(missing.begin(), missing.end(), std::size_t{0}));

  std::vector<Bucket> buckets(1);        // from the back
  std::size_t end = graph.nodes.size();  // of the front bucket: one behind its last node
  // What a later bucket or the return reads of what the front bucket has made or written.
  bool has_output = false;
  for (auto n = graph.nodes.size(); n-- > 0;) {
    auto* front = &buckets.back();
    const bool is_capped = front->bytes >= cap || (buckets.size() == 1 && front->bytes >= first_cap);
    const auto whole_now = static_cast<std::size_t>(std::count(missing.begin(), missing.end(), std::size_t{0}));
    const bool is_full = !views.is_view[n] && (options.buckets.empty() ? is_capped : whole_now > whole);
    if (is_full && has_output && possible[n + 1]) {
      end = n + 1;
      has_output = false;
      whole = whole_now;
      front = &buckets.emplace_back();
    } else if (is_full) {
      if (front->extra_nodes++ == 0) front->bytes_before = front->bytes;
    }
    const auto& node = graph.nodes[n];
    for (const auto id : counted[n]) {
      front->bytes += bytes_of(graph.values[id].look);
      if (const auto bucket = bucket_of(id); bucket < missing.size()) --missing[bucket];
    }
    front->nodes.push_back(n);
    for (const auto id : node.makes) has_output = has_output || (is_read[id] && last_read[id] >= end);
    for (const auto id : node.writes) {
      // What comes from outside is the same tensor in every part.
      if (graph.values[id].kind != ValueKind::kResult) continue;
      has_output = has_output || (is_read[id] && last_read[id] >= end);
    }
  }
  std::reverse(buckets.begin(), buckets.end());
  for (auto& bucket : buckets) {
    std::reverse(bucket.nodes.begin(), bucket.nodes.end());
    for (const auto n : bucket.nodes) {
      for (const auto id : counted[n]) {
        bucket.parameters.push_back(id);
        bucket.names.push_back(graph.values[id].name);
      }
    }
  }
  // Only what comes before the first parameter: no gradient to wait for. Or nothing that is read behind it.
  if (buckets.size() > 1 && (buckets.front().bytes == 0 || !has_output)) {
    const auto front = std::move(buckets.front());
    buckets.erase(buckets.begin());
    auto& next = buckets.front();
    next.bytes += front.bytes;
    next.nodes.insert(next.nodes.begin(), front.nodes.begin(), front.nodes.end());
    next.parameters.insert(next.parameters.begin(), front.parameters.begin(), front.parameters.end());
    next.names.insert(next.names.begin(), front.names.begin(), front.names.end());
  }
  return buckets;
}

Part extract(const Graph& graph, const std::vector<std::size_t>& nodes, const std::vector<ValueId>& outputs) {
  Part part;
  std::unordered_map<ValueId, ValueId> place;
  const auto put = [&](ValueId id) {
    const auto [found, is_new] = place.try_emplace(id, part.graph.values.size());
    if (is_new) part.graph.values.push_back(graph.values[id]);
    return found->second;
  };
  for (const auto n : nodes) {
    const auto& node = graph.nodes[n];
    auto copy = node;
    for (const auto id : node.reads) {
      const bool is_new = !place.contains(id);
      const auto here = put(id);
      if (!is_new) continue;
      part.graph.inputs.push_back(here);
      part.inputs.push_back(id);
    }
    for (const auto id : node.makes) put(id);
    const auto renumber = [&](std::vector<ValueId>& ids) {
      for (auto& id : ids) id = place.at(id);
    };
    const auto renumber_some = [&](std::vector<std::optional<ValueId>>& ids) {
      for (auto& id : ids) {
        if (id) id = place.at(*id);
      }
    };
    for (auto& argument : copy.arguments) renumber_some(argument.values);
    for (auto& result : copy.results) renumber_some(result);
    renumber(copy.reads);
    renumber(copy.makes);
    renumber(copy.writes);
    part.graph.nodes.push_back(std::move(copy));
  }
  for (const auto id : outputs) {
    part.outputs.push_back(id);
    part.graph.outputs.emplace_back(place.at(id));
  }
  return part;
}

Part extract_part(const Graph& graph, const std::vector<std::size_t>& nodes) {
  std::set<ValueId> made;
  for (const auto n : nodes) {
    made.insert(graph.nodes[n].makes.begin(), graph.nodes[n].makes.end());
    made.insert(graph.nodes[n].writes.begin(), graph.nodes[n].writes.end());
  }
  std::vector<ValueId> outputs;
  const auto add_output = [&](ValueId id) {
    // What comes from outside and is written here is the same tensor there.
    if (graph.values[id].kind != ValueKind::kResult || made.erase(id) == 0) return;
    outputs.push_back(id);
  };
  for (auto n = nodes.back() + 1; n < graph.nodes.size(); ++n) {
    for (const auto id : graph.nodes[n].reads) add_output(id);
  }
  for (const auto& id : graph.outputs) {
    if (id) add_output(*id);
  }
  return extract(graph, nodes, outputs);
}

std::vector<Part> extract_parts(const Graph& graph, const std::vector<Bucket>& buckets) {
  std::vector<Part> parts;
  for (const auto& bucket : buckets) {
    if (bucket.nodes.empty()) continue;  // a forward without operators
    parts.push_back(extract_part(graph, bucket.nodes));
    TORCH_INTERNAL_ASSERT(buckets.size() == 1 || !parts.back().outputs.empty(), "[lockstep/graph] part ",
                          parts.size() - 1, " of ", buckets.size(), " has no output");
  }
  return parts;
}

std::string bucket_table(const std::vector<Bucket>& buckets) {
  std::vector<std::vector<std::string>> rows = {{"index", "bytes", "parameter"}};
  for (std::size_t i = 0; i < buckets.size(); ++i) {
    const auto& bucket = buckets[buckets.size() - 1 - i];
    bool is_first = true;
    for (const auto& name : bucket.names) {
      rows.push_back({is_first ? str(i) : "", is_first ? str(bucket.bytes) : "", name});
      is_first = false;
    }
    if (is_first) rows.push_back({str(i), "0", "(none)"});
  }
  const auto print = [](const std::vector<std::vector<std::string>>& table) {
    std::vector<std::size_t> widths(table.front().size(), 0);
    for (const auto& row : table) {
      for (std::size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], row[c].size());
    }
    std::string text;
    for (const auto& row : table) {
      for (std::size_t c = 0; c < row.size(); ++c) {
        text += row[c];
        text += c + 1 < row.size() ? std::string(widths[c] - row[c].size() + 2, ' ') : "\n";
      }
    }
    return text;
  };
  auto text = print(rows);
  std::vector<std::vector<std::string>> extended = {{"index", "extra ops", "extra bytes"}};
  for (std::size_t i = 0; i < buckets.size(); ++i) {
    const auto& bucket = buckets[buckets.size() - 1 - i];
    if (bucket.extra_nodes == 0) continue;
    extended.push_back({str(i), str(bucket.extra_nodes), str(bucket.bytes - bucket.bytes_before)});
  }
  if (extended.size() > 1) {
    text +=
        "Some buckets were extended beyond their cap: a part needs an output, and memory that is written in place "
        "stays in one part. Fewer cuts overlap less.\n";
    text += print(extended);
  }
  return text;
}

}  // namespace lockstep::graph
