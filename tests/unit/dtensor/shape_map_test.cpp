// Operators that change shapes, on every rank of many random layouts: the operator on the local tensors gives the local
// tensors of the operator's result. And the cuts that models have stay cut.
#include "lockstep/dtensor/shape_map.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/slice_backward.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <random>
#include <set>

#include "lockstep/base/str.h"
#include "lockstep/mesh/layout.h"
#include "lockstep/shard/layout.h"
#include "lockstep/testing/gtest.h"

namespace lockstep::shape_map_test {
namespace {

using Sizes = std::vector<int64_t>;
using Tensors = std::vector<at::Tensor>;
using Coordinate = std::vector<int>;

constexpr int kCases = 1000;

int64_t count_of(const Sizes& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

at::Tensor whole_of(const Sizes& sizes) {
  return at::arange(count_of(sizes)).view(sizes);
}

at::Tensor cut_at(const at::Tensor& whole, const Coordinate& coordinate, const Sizes& mesh,
                  const Placements& placements) {
  auto local = whole;
  const auto part = part_at(coordinate, mesh, placements, whole.sizes().vec());
  for (int64_t dim = 0; dim < whole.dim(); ++dim) {
    Tensors runs = {local.narrow(dim, 0, 0)};
    for (const auto& range : part.ranges()[static_cast<std::size_t>(dim)]) {
      runs.push_back(local.narrow(dim, range.begin, range.size()));
    }
    local = at::cat(runs, dim);
  }
  return local;
}

std::string text(const std::vector<Placements>& placements) {
  std::string text;
  for (const auto& each : placements) text += to_string(each);
  return text;
}

/// How often a map kept a cut and how often it asked for the whole tensor instead.
struct Tally {
  int kept = 0;
  int replicated = 0;
};

/// `local(coordinate, tensors)` is the operator as a rank runs it.
void expect_same(const ShapeMap& map, const Tensors& inputs, const Tensors& outputs, const Sizes& mesh,
                 const std::vector<Placements>& given,
                 const std::function<Tensors(const Coordinate&, const Tensors&)>& local, Tally& tally) {
  ASSERT_EQ(map.inputs.size(), inputs.size());
  ASSERT_EQ(map.outputs.size(), outputs.size());
  for (std::size_t axis = 0; axis < mesh.size(); ++axis) {
    for (std::size_t i = 0; i < given.size(); ++i) {
      if (!sharded_dim(given[i][axis])) continue;
      ++(map.inputs[i][axis] == given[i][axis] ? tally.kept : tally.replicated);
    }
  }
  for (int64_t rank = 0; rank < count_of(mesh); ++rank) {
    const auto coordinate = unravel(rank, mesh);
    Tensors local_inputs;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      local_inputs.push_back(cut_at(inputs[i], coordinate, mesh, map.inputs[i]));
    }
    const auto got = local(coordinate, local_inputs);
    ASSERT_EQ(got.size(), outputs.size());
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      const auto wanted = cut_at(outputs[i], coordinate, mesh, map.outputs[i]);
      ASSERT_EQ(local_sizes_at(coordinate, mesh, map.outputs[i], outputs[i].sizes().vec()), wanted.sizes().vec());
      ASSERT_TRUE(at::equal(got[i], wanted)) << "output " << i << " on rank " << rank << ":\n"
                                             << got[i] << "\ninstead of\n"
                                             << wanted;
    }
  }
}

class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}

  int64_t below(int64_t end) { return static_cast<int64_t>(engine_() % static_cast<unsigned>(end)); }
  bool once_in(int64_t times) { return below(times) == 0; }
  int64_t one_of(const Sizes& values) { return values[static_cast<std::size_t>(below(std::ssize(values)))]; }
  template <typename T>
  void shuffle(std::vector<T>& values) {
    std::shuffle(values.begin(), values.end(), engine_);
  }

  Sizes mesh() {
    const std::vector<Sizes> shapes = {{2}, {3}, {4}, {2, 2}, {2, 3}, {3, 2}, {1, 2}, {2, 1}, {4, 2}, {2, 2, 2}};
    return shapes[static_cast<std::size_t>(below(std::ssize(shapes)))];
  }

  Sizes sizes(int64_t min_dims = 0) {
    Sizes sizes;
    for (auto dims = min_dims + below(4); dims > 0; --dims) {
      sizes.push_back(once_in(40) ? 0 : one_of({1, 2, 2, 3, 4, 4, 5, 6, 7, 8, 10, 12}));
    }
    return sizes;
  }

  /// Other sizes for the same elements.
  Sizes view_of(const Sizes& sizes) {
    Sizes primes;
    for (auto size : sizes) {
      for (int64_t prime = 2; size > 1; ++prime) {
        for (; size % prime == 0; size /= prime) primes.push_back(prime);
      }
    }
    if (once_in(3)) shuffle(primes);
    Sizes view;
    for (const auto prime : primes) {
      if (once_in(8)) view.push_back(1);
      if (view.empty() || once_in(2)) {
        view.push_back(prime);
      } else {
        view.back() *= prime;
      }
    }
    if (count_of(sizes) == 0) view.insert(view.begin() + below(std::ssize(view) + 1), 0);
    if (once_in(8)) view.push_back(1);
    return view;
  }

  Placements placements(const Sizes& mesh, const Sizes& sizes) {
    Placements placements(mesh.size());
    if (sizes.empty()) return placements;
    std::set<int64_t> cut;
    std::set<int64_t> ragged;
    auto dim = below(std::ssize(sizes));
    for (std::size_t axis = 0; axis < mesh.size(); ++axis) {
      if (once_in(2)) dim = below(std::ssize(sizes));
      if (once_in(6)) {
        if (once_in(2)) placements[axis] = Partial();
        continue;
      }
      if (ragged.contains(dim)) continue;
      if (once_in(12) && !cut.contains(dim)) {
        ragged.insert(dim);
        placements[axis] = RaggedShard(dim, counts(mesh[axis], sizes[static_cast<std::size_t>(dim)]));
        continue;
      }
      cut.insert(dim);
      if (once_in(3)) {
        placements[axis] = StridedShard(dim, one_of({1, 2, 3, 4, 6}));
      } else {
        placements[axis] = Shard(dim);
      }
    }
    return placements;
  }

 private:
  Sizes counts(int64_t ranks, int64_t size) {
    Sizes counts(static_cast<std::size_t>(ranks));
    for (; size > 0; --size) ++counts[static_cast<std::size_t>(below(ranks))];
    return counts;
  }

  std::mt19937 engine_;
};

/// One random tensor on one random mesh.
struct Case {
  explicit Case(Random& random, int64_t min_dims = 0)
      : mesh(random.mesh()), sizes(random.sizes(min_dims)), placements(random.placements(mesh, sizes)) {}

  int64_t ndim() const { return std::ssize(sizes); }
  std::string text() const {
    return str("[", join(sizes, ", "), "] as ", to_string(placements), " on [", join(mesh, ", "), "]");
  }

  Sizes mesh;
  Sizes sizes;
  Placements placements;
};

/// An operator with one input and one output.
void expect_same(const ShapeMap& map, const Case& one, const at::Tensor& output,
                 const std::function<at::Tensor(const at::Tensor&)>& local, Tally& tally) {
  expect_same(
      map, {whole_of(one.sizes)}, {output}, one.mesh, {one.placements},
      [&](const Coordinate&, const Tensors& inputs) { return Tensors{local(inputs[0])}; }, tally);
}

TEST(ShapeMap, ViewsWhatEachRankHolds) {
  Random random(1);
  Tally tally;
  for (int i = 0; i < 2 * kCases && !HasFatalFailure(); ++i) {
    const Case one(random);
    const auto to = random.view_of(one.sizes);
    const auto map = map_view(one.sizes, to, one.mesh, one.placements);
    SCOPED_TRACE(str(one.text(), " viewed as [", join(to, ", "), "]: ", text(map.inputs), " -> ", text(map.outputs)));
    const auto local = [&](const Coordinate& coordinate, const Tensors& inputs) {
      return Tensors{inputs[0].view(local_sizes_at(coordinate, one.mesh, map.outputs[0], to))};
    };
    const auto whole = whole_of(one.sizes);
    expect_same(map, {whole}, {whole.view(to)}, one.mesh, {one.placements}, local, tally);
    // What is asked for is enough.
    ASSERT_EQ(map_view(one.sizes, to, one.mesh, map.inputs[0]), map);
  }
  EXPECT_GT(tally.kept, tally.replicated);
}

/// Whether the local tensors of some placement of `to` are those of `placement` of `from`, viewed.
bool has_placement(const Case& one, const Sizes& to) {
  const auto flat = [&](const Sizes& sizes, const Placement& placement, int rank) {
    return cut_at(whole_of(sizes), {rank}, one.mesh, {placement}).flatten();
  };
  // Such a cut could be found in any place.
  if (flat(one.sizes, one.placements[0], 0).numel() == count_of(one.sizes)) return false;
  for (int64_t dim = 0; dim < std::ssize(to); ++dim) {
    for (int64_t split = 1; split <= to[static_cast<std::size_t>(dim)]; ++split) {
      bool is_same = true;
      for (int rank = 0; rank < one.mesh[0] && is_same; ++rank) {
        is_same = at::equal(flat(one.sizes, one.placements[0], rank), flat(to, StridedShard(dim, split), rank));
      }
      if (is_same) return true;
    }
  }
  return false;
}

TEST(ShapeMap, KeepsOnOneAxisWhatAViewCanExpress) {
  Random random(2);
  for (int i = 0; i < 2 * kCases; ++i) {
    const Case one(random, 1);
    const auto to = random.view_of(one.sizes);
    const auto dim = sharded_dim(one.placements[0]);
    if (one.mesh.size() > 1 || !dim || std::holds_alternative<RaggedShard>(one.placements[0])) continue;
    // Chunks of different lengths are left alone, though some are the equal chunks of another split factor.
    const auto* strided = std::get_if<StridedShard>(&one.placements[0]);
    if (strided != nullptr && one.sizes[static_cast<std::size_t>(*dim)] % strided->split_factor != 0) continue;
    if (map_view(one.sizes, to, one.mesh, one.placements).inputs[0] == one.placements) continue;
    ASSERT_FALSE(has_placement(one, to)) << one.text() << " viewed as [" << join(to, ", ") << "]";
  }
}

TEST(ShapeMap, MovesDims) {
  Random random(3);
  Tally tally;
  for (int i = 0; i < kCases / 3 && !HasFatalFailure(); ++i) {
    const Case one(random, 1);
    SCOPED_TRACE(one.text());
    const auto whole = whole_of(one.sizes);
    const auto dim = random.below(one.ndim());
    const auto other = random.below(one.ndim());
    const auto check = [&](const ShapeMap& map, const std::function<at::Tensor(const at::Tensor&)>& local) {
      expect_same(map, one, local(whole), local, tally);
    };
    check(map_unsqueeze(one.ndim(), dim, one.placements), [&](const auto& t) { return t.unsqueeze(dim); });
    check(map_unsqueeze(one.ndim(), one.ndim(), one.placements), [&](const auto& t) { return t.unsqueeze(-1); });
    check(map_transpose(one.ndim(), dim, other, one.placements),
          [&](const auto& t) { return t.transpose(dim, other); });
    Sizes order(one.sizes.size());
    std::iota(order.begin(), order.end(), 0);
    random.shuffle(order);
    check(map_permute(order, one.placements), [&](const auto& t) { return t.permute(order); });
    check(map_whole(one.ndim(), {dim, other}, one.placements),
          [&](const auto& t) { return dim == other ? t.flip({dim}) : t.flip({dim, other}); });
    check(map_whole(one.ndim(), {dim}, one.placements), [&](const auto& t) { return t.roll(2, dim); });
    check(map_whole(one.ndim(), {dim}, one.placements),
          [&](const auto& t) { return t.slice(dim, 0, std::nullopt, 2); });
    if (whole.size(dim) == 0) continue;
    const auto at = random.below(whole.size(dim));
    check(map_select(one.ndim(), dim, one.placements), [&](const auto& t) { return t.select(dim, at); });
    const auto count = static_cast<std::size_t>(whole.size(dim));
    expect_same(
        map_select(one.ndim(), dim, one.placements, count), {whole}, whole.unbind(dim), one.mesh, {one.placements},
        [&](const Coordinate&, const Tensors& inputs) { return inputs[0].unbind(dim); }, tally);
  }
  EXPECT_GT(tally.kept, tally.replicated);
}

TEST(ShapeMap, SqueezesAndExpands) {
  Random random(4);
  Tally tally;
  for (int i = 0; i < kCases && !HasFatalFailure(); ++i) {
    const Case one(random, 1);
    SCOPED_TRACE(one.text());
    const auto whole = whole_of(one.sizes);
    Sizes ones;
    Sizes to = one.sizes;
    for (int64_t dim = 0; dim < one.ndim(); ++dim) {
      if (whole.size(dim) != 1) continue;
      ones.push_back(dim);
      if (random.once_in(2)) to[static_cast<std::size_t>(dim)] = 3;
    }
    if (random.once_in(3)) to.insert(to.begin(), {2, 1});
    const auto squeezed = map_squeeze(one.sizes, ones, one.placements);
    expect_same(
        squeezed, {whole}, {whole.squeeze()}, one.mesh, {one.placements},
        [&](const Coordinate&, const Tensors& inputs) { return Tensors{inputs[0].squeeze(ones)}; }, tally);
    const auto dim = random.below(one.ndim());
    expect_same(
        map_squeeze(one.sizes, {dim}, one.placements), {whole}, {whole.squeeze(dim)}, one.mesh, {one.placements},
        [&](const Coordinate&, const Tensors& inputs) {
          return Tensors{whole.size(dim) == 1 ? inputs[0].squeeze(dim) : inputs[0]};
        },
        tally);
    const auto expanded = map_expand(one.sizes, to, one.placements);
    expect_same(
        expanded, {whole}, {whole.expand(to)}, one.mesh, {one.placements},
        [&](const Coordinate& coordinate, const Tensors& inputs) {
          return Tensors{inputs[0].expand(local_sizes_at(coordinate, one.mesh, expanded.outputs[0], to))};
        },
        tally);
  }
  EXPECT_GT(tally.kept, tally.replicated);
}

/// Neighbouring ranges of a dim, now and then not all of it.
std::vector<ElementRange> ranges_of(Random& random, int64_t size) {
  std::vector<ElementRange> ranges;
  const auto length = random.once_in(3) ? random.below(size + 1) : size / random.one_of({1, 2, 2, 3, 4});
  for (int64_t begin = 0; begin < size;) {
    const auto end = std::min(size, begin + std::max<int64_t>(length, 1) * (random.once_in(4) ? 2 : 1));
    ranges.push_back({begin, end});
    begin = end;
  }
  if (random.once_in(2) || ranges.empty()) ranges.push_back({0, size});
  random.shuffle(ranges);
  return ranges;
}

TEST(ShapeMap, TakesRangesOfADim) {
  Random random(5);
  Tally tally;
  for (int i = 0; i < kCases && !HasFatalFailure(); ++i) {
    const Case one(random, 1);
    const auto whole = whole_of(one.sizes);
    const auto dim = random.below(one.ndim());
    const auto size = whole.size(dim);
    const auto ranges = ranges_of(random, size);
    const auto map = map_ranges(one.sizes, dim, ranges, one.mesh, one.placements);
    SCOPED_TRACE(str(one.text(), " along ", dim, ": ", text(map.inputs), " -> ", text(map.outputs)));
    Tensors outputs;
    for (const auto& range : ranges) outputs.push_back(whole.narrow(dim, range.begin, range.size()));
    expect_same(
        map, {whole}, outputs, one.mesh, {one.placements},
        [&](const Coordinate&, const Tensors& inputs) {
          Tensors parts;
          for (const auto& range : ranges) {
            const auto own = local_range(range, size, inputs[0].size(dim));
            parts.push_back(inputs[0].narrow(dim, own.begin, own.size()));
          }
          return parts;
        },
        tally);
  }
  EXPECT_GT(tally.kept, tally.replicated);
}

TEST(ShapeMap, PutsARangeBack) {
  Random random(6);
  Tally tally;
  for (int i = 0; i < kCases && !HasFatalFailure(); ++i) {
    const Case one(random, 1);
    const auto part = whole_of(one.sizes);
    const auto dim = random.below(one.ndim());
    auto sizes = one.sizes;
    auto& size = sizes[static_cast<std::size_t>(dim)];
    const auto begin = random.one_of({0, 1, 2}) * (random.once_in(3) ? 1 : size);
    const ElementRange own = {begin, begin + size};
    size = own.end + random.one_of({0, 1, 2}) * (random.once_in(3) ? 1 : size);
    const auto map = map_slice_backward(sizes, dim, own, one.mesh, one.placements);
    SCOPED_TRACE(str(one.text(), " in [", join(sizes, ", "), "] from ", own.begin, " along ", dim, ": ",
                     text(map.inputs), " -> ", text(map.outputs)));
    expect_same(
        map, {part}, {at::slice_backward(part, sizes, dim, own.begin, own.end, 1)}, one.mesh, {one.placements},
        [&](const Coordinate& coordinate, const Tensors& inputs) {
          const auto local = local_sizes_at(coordinate, one.mesh, map.outputs[0], sizes);
          const auto at = local_range(own, size, local[static_cast<std::size_t>(dim)]);
          return Tensors{at::slice_backward(inputs[0], local, dim, at.begin, at.end, 1)};
        },
        tally);
  }
  EXPECT_GT(tally.kept, tally.replicated);
}

TEST(ShapeMap, JoinsTensors) {
  Random random(7);
  Tally tally;
  for (int i = 0; i < 2 * kCases && !HasFatalFailure(); ++i) {
    const Case one(random, 1);
    const auto dim = random.below(one.ndim());
    std::vector<Sizes> sizes(1 + static_cast<std::size_t>(random.below(3)), one.sizes);
    std::vector<Placements> placements(sizes.size(), one.placements);
    const bool are_ragged = std::any_of(one.placements.begin(), one.placements.end(), [](const auto& placement) {
      return std::holds_alternative<RaggedShard>(placement);
    });
    Tensors inputs = {whole_of(one.sizes)};
    for (std::size_t k = 1; k < sizes.size(); ++k) {
      const bool is_longer = random.once_in(2);
      if (is_longer) sizes[k][static_cast<std::size_t>(dim)] *= random.one_of({0, 2, 3});
      if ((is_longer && are_ragged) || random.once_in(4)) placements[k] = random.placements(one.mesh, sizes[k]);
      inputs.push_back(whole_of(sizes[k]) + 1000 * static_cast<int64_t>(k));
    }
    const auto map = map_cat(sizes, dim, one.mesh, placements);
    SCOPED_TRACE(str(one.text(), " and others along ", dim, ": ", text(placements), ", that is ", text(map.inputs),
                     " -> ", text(map.outputs)));
    expect_same(
        map, inputs, {at::cat(inputs, dim)}, one.mesh, placements,
        [&](const Coordinate&, const Tensors& locals) { return Tensors{at::cat(locals, dim)}; }, tally);
  }
  EXPECT_GT(tally.kept, tally.replicated);
}

TEST(ShapeMap, StacksTensors) {
  Random random(8);
  Tally tally;
  for (int i = 0; i < kCases && !HasFatalFailure(); ++i) {
    const Case one(random);
    const auto dim = random.below(one.ndim() + 1);
    std::vector<Placements> placements(1 + static_cast<std::size_t>(random.below(3)), one.placements);
    if (random.once_in(3)) placements.back() = random.placements(one.mesh, one.sizes);
    Tensors inputs;
    for (std::size_t k = 0; k < placements.size(); ++k) inputs.push_back(whole_of(one.sizes) + static_cast<int64_t>(k));
    SCOPED_TRACE(one.text());
    expect_same(
        map_stack(one.ndim(), dim, placements), inputs, {at::stack(inputs, dim)}, one.mesh, placements,
        [&](const Coordinate&, const Tensors& locals) { return Tensors{at::stack(locals, dim)}; }, tally);
  }
  EXPECT_GT(tally.kept, tally.replicated);
}

TEST(ShapeMap, Repeats) {
  Random random(9);
  Tally tally;
  for (int i = 0; i < kCases && !HasFatalFailure(); ++i) {
    const Case one(random);
    Sizes repeats(one.sizes.size() + static_cast<std::size_t>(random.below(2)));
    for (auto& times : repeats) times = random.one_of({0, 1, 1, 1, 2, 2, 3, 4});
    const auto map = map_repeat(one.sizes, repeats, one.mesh, one.placements);
    SCOPED_TRACE(str(one.text(), " times [", join(repeats, ", "), "]: ", text(map.inputs), " -> ", text(map.outputs)));
    expect_same(map, one, whole_of(one.sizes).repeat(repeats), [&](const auto& t) { return t.repeat(repeats); }, tally);
  }
  EXPECT_GT(tally.kept, tally.replicated);
}

ShapeMap unchanged(const Placements& placements, const Placements& output) {
  return {{placements}, {output}};
}

/// Placements of `from` become those of `to`, and back.
void expect_both_ways(const Sizes& from, const Sizes& to, const Sizes& mesh, const Placements& before,
                      const Placements& after) {
  EXPECT_EQ(map_view(from, to, mesh, before), unchanged(before, after)) << to_string(before);
  EXPECT_EQ(map_view(to, from, mesh, after), unchanged(after, before)) << to_string(after);
}

TEST(ShapeMap, KeepsHeadsCut) {
  // [time, batch, embedding] in attention: 4 heads of 2
  expect_both_ways({5, 3, 8}, {5, 12, 2}, {2}, {Shard(2)}, {StridedShard(1, 3)});
  expect_both_ways({5, 3, 8}, {5, 3, 4, 2}, {2}, {Shard(2)}, {Shard(2)});
  expect_both_ways({5, 3, 8}, {5, 3, 4, 2}, {2, 2}, {Shard(1), Shard(2)}, {Shard(1), Shard(2)});
  expect_both_ways({4, 3, 8}, {12, 4, 2}, {2, 2}, {Shard(0), Shard(2)}, {Shard(0), Shard(1)});
  // query, key and value side by side, each cut by heads
  expect_both_ways({5, 24}, {5, 3, 4, 2}, {2}, {StridedShard(1, 3)}, {Shard(2)});
  // 3 heads over 2 ranks, of which both have one and a half
  EXPECT_EQ(map_view({5, 12}, {5, 3, 4}, {2}, {Shard(1)}), unchanged({Replicate()}, {Replicate()}));
}

TEST(ShapeMap, KeepsBatchAndSequenceCut) {
  expect_both_ways({4, 6, 5}, {24, 5}, {2}, {Shard(0)}, {Shard(0)});
  expect_both_ways({4, 6, 5}, {24, 5}, {2}, {Shard(1)}, {StridedShard(0, 4)});
  expect_both_ways({4, 6, 5}, {24, 5}, {2}, {Shard(2)}, {Shard(1)});
  expect_both_ways({1, 6, 5}, {6, 5}, {2}, {Shard(1)}, {Shard(0)});
  // What the left axis has divided is no longer there when the right one has its turn.
  expect_both_ways({4, 6, 5}, {24, 5}, {2, 2}, {Shard(0), Shard(1)}, {Shard(0), StridedShard(0, 2)});
  expect_both_ways({4, 6, 5}, {24, 5}, {2, 2}, {Shard(1), Shard(0)}, {StridedShard(0, 4), Shard(0)});
  expect_both_ways({4, 6, 5}, {24, 5}, {2, 2}, {Shard(0), Shard(0)}, {Shard(0), Shard(0)});
  // Parameters that are cut over data-parallel ranks after tensor-parallel ones.
  expect_both_ways({8, 3}, {2, 4, 3}, {2, 2}, {StridedShard(0, 2), Shard(0)}, {Shard(1), Shard(0)});
}

TEST(ShapeMap, FollowsUnevenCuts) {
  const auto replicated = unchanged({Replicate()}, {Replicate()});
  expect_both_ways({5, 4}, {5, 2, 2}, {2}, {Shard(0)}, {Shard(0)});
  expect_both_ways({4, 5}, {20}, {2}, {Shard(1)}, {StridedShard(0, 4)});
  // 2, 2, 2 and 1 rows are 4, 4, 4 and 2 elements
  expect_both_ways({7, 2}, {14}, {4}, {Shard(0)}, {Shard(0)});
  // 3 and 2 rows are no halves
  EXPECT_EQ(map_view({5, 4}, {20}, {2}, {Shard(0)}), replicated);
  EXPECT_EQ(map_view({20}, {5, 4}, {2}, {Shard(0)}), replicated);
  // The other axis stays cut.
  EXPECT_EQ(map_view({5, 4}, {20}, {2, 2}, {Shard(0), Shard(1)}),
            unchanged({Replicate(), Shard(1)}, {Replicate(), StridedShard(0, 5)}));
  // An axis cannot divide inside of what ranks before it hold different lengths of.
  EXPECT_EQ(map_view({5, 2}, {10}, {3, 2}, {Shard(0), Shard(1)}),
            unchanged({Shard(0), Replicate()}, {Shard(0), Replicate()}));
  EXPECT_EQ(map_view({10}, {5, 2}, {3, 2}, {Shard(0), Shard(0)}),
            unchanged({Shard(0), Replicate()}, {Shard(0), Replicate()}));
  EXPECT_EQ(map_view({12}, {3, 4}, {2, 2}, {StridedShard(0, 3), Shard(0)}),
            unchanged({StridedShard(0, 3), Replicate()}, {Shard(1), Replicate()}));
  expect_both_ways({5, 4}, {1, 5, 4}, {2}, {RaggedShard(0, {4, 1})}, {RaggedShard(1, {4, 1})});
  EXPECT_EQ(map_view({5, 4}, {20}, {2}, {RaggedShard(0, {4, 1})}), replicated);
}

TEST(ShapeMap, LeavesWhatIsNotCut) {
  const Placements placements = {Partial(), Replicate()};
  EXPECT_EQ(map_view({5, 4}, {20}, {2, 2}, placements), unchanged(placements, placements));
  EXPECT_EQ(map_select(2, 0, placements), unchanged(placements, placements));
  EXPECT_EQ(map_expand({1, 4}, {5, 4}, placements), unchanged(placements, placements));
  EXPECT_EQ(map_repeat({5, 4}, {2, 2}, {2, 2}, placements), unchanged(placements, placements));
}

TEST(ShapeMap, NeedsDimsWholeThatGoOrGrow) {
  const auto replicated = unchanged({Replicate()}, {Replicate()});
  EXPECT_EQ(map_squeeze({4, 1}, {1}, {Shard(1)}), replicated);
  EXPECT_EQ(map_squeeze({1, 4}, {0, 1}, {Shard(1)}), unchanged({Shard(1)}, {Shard(0)}));
  EXPECT_EQ(map_expand({1, 4}, {5, 4}, {Shard(0)}), replicated);
  EXPECT_EQ(map_expand({1, 4}, {3, 5, 4}, {Shard(1)}), unchanged({Shard(1)}, {Shard(2)}));
  EXPECT_EQ(map_select(3, 1, {Shard(1)}), replicated);
  EXPECT_EQ(map_select(3, 1, {Shard(2)}), unchanged({Shard(2)}, {Shard(1)}));
  EXPECT_EQ(map_whole(2, {1}, {Shard(1)}), replicated);
}

TEST(ShapeMap, SplitsAFusedProjectionAndJoinsIt) {
  const std::vector<ElementRange> thirds = {{0, 8}, {8, 16}, {16, 24}};
  const Placements fused = {StridedShard(1, 3)};
  const Placements own = {Shard(1)};
  EXPECT_EQ(map_ranges({5, 24}, 1, thirds, {2}, fused), (ShapeMap{{fused}, {own, own, own}}));
  EXPECT_EQ(map_cat({{5, 8}, {5, 8}, {5, 8}}, 1, {2}, {own, own, own}), (ShapeMap{{own, own, own}, {fused}}));
  EXPECT_EQ(map_slice_backward({5, 24}, 1, thirds[1], {2}, own), unchanged(own, fused));
  // two of them, and one
  EXPECT_EQ(map_ranges({5, 24}, 1, {{0, 16}, {16, 24}}, {2}, fused), (ShapeMap{{fused}, {{StridedShard(1, 2)}, own}}));
  EXPECT_EQ(map_cat({{5, 16}, {5, 8}}, 1, {2}, {{StridedShard(1, 2)}, own}).outputs[0], fused);
  // On each rank the third would be another one.
  const Placements whole = {Replicate()};
  EXPECT_EQ(map_ranges({5, 24}, 1, thirds, {2}, own), (ShapeMap{{whole}, {whole, whole, whole}}));
  EXPECT_EQ(map_ranges({5, 24}, 1, {{0, 24}}, {2}, own), unchanged(own, own));
  EXPECT_EQ(map_repeat({5, 24}, {1, 2}, {2}, own), unchanged(own, {StridedShard(1, 2)}));
}

TEST(ShapeMap, JoinsDifferentPlacements) {
  const auto inputs = [](const Placement& one, const Placement& other) {
    return map_cat({{4, 8}, {4, 6}}, 1, {2}, {{one}, {other}}).inputs;
  };
  const auto both = [](const Placement& placement) { return std::vector<Placements>{{placement}, {placement}}; };
  EXPECT_EQ(inputs(Replicate(), Shard(0)), both(Shard(0)));
  EXPECT_EQ(inputs(Shard(1), Shard(0)), both(Shard(0)));
  EXPECT_EQ(inputs(Partial(), Shard(0)), both(Shard(0)));
  EXPECT_EQ(inputs(Partial(), Partial()), both(Partial()));
  EXPECT_EQ(inputs(Partial(), Replicate()), both(Replicate()));
  EXPECT_EQ(inputs(Partial(), Partial(ReduceOp::MAX)), both(Replicate()));
  EXPECT_EQ(inputs(Shard(1), Shard(1)), both(Replicate()));
  EXPECT_EQ(map_stack(2, 1, {{Replicate()}, {Shard(1)}}), (ShapeMap{both(Shard(1)), {{Shard(2)}}}));
}

TEST(ShapeMap, TellsLocalSizes) {
  Random random(10);
  for (int i = 0; i < kCases; ++i) {
    const Case one(random);
    for (int64_t rank = 0; rank < count_of(one.mesh); ++rank) {
      const auto coordinate = unravel(rank, one.mesh);
      ASSERT_EQ(local_sizes_at(coordinate, one.mesh, one.placements, one.sizes),
                part_at(coordinate, one.mesh, one.placements, one.sizes).sizes())
          << one.text();
    }
  }
}

}  // namespace
}  // namespace lockstep::shape_map_test
