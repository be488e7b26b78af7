// The conformance suite of collectives, written once and run per backend and harness. Each case computes what every
// rank must hold from the rank numbers alone, so it needs no second implementation to compare with.
#pragma once

#include <string>
#include <vector>

#include "lockstep/lockstep.h"
#include "lockstep/testing/checks.h"

namespace lockstep::conformance {

/// Where a case runs: a world's group, or any other.
class Place {
 public:
  Place(const World& world) : group_(world.group()) {}  // NOLINT: a world is a place
  explicit Place(GroupPtr group) : group_(std::move(group)) {}
  int rank() const { return group_->getRank(); }
  int world_size() const { return group_->getSize(); }
  const GroupPtr& group() const { return group_; }

 private:
  GroupPtr group_;
};

/// 0, 1, a prime, and one larger than any chunk a backend may use.
inline const std::vector<int64_t> kSizes = {0, 1, 31, 262'147};
inline const std::vector<at::ScalarType> kDtypes = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong};
inline const std::vector<ReduceOp> kOps = {ReduceOp::SUM, ReduceOp::AVG, ReduceOp::MIN, ReduceOp::MAX,
                                           ReduceOp::PRODUCT};

/// Rank r's data: small whole numbers that differ by rank and position, exact in every dtype also when reduced over 4
/// ranks.
inline at::Tensor values(int rank, int64_t size, at::ScalarType dtype, at::Device device, int shift = 0) {
  return (((at::arange(size, at::kLong) + shift) % 3) + 1 + rank).to(dtype).to(device);
}

/// What a reduction over all ranks of values(rank, …) must give.
inline at::Tensor reduced(int world_size, ReduceOp op, int64_t size, at::ScalarType dtype, at::Device device,
                          int shift = 0) {
  auto total = values(0, size, dtype, device, shift).to(at::kDouble);
  for (int rank = 1; rank < world_size; ++rank) {
    const auto next = values(rank, size, dtype, device, shift).to(at::kDouble);
    switch (op) {
      case ReduceOp::MIN:
        total = at::minimum(total, next);
        break;
      case ReduceOp::MAX:
        total = at::maximum(total, next);
        break;
      case ReduceOp::PRODUCT:
        total = total * next;
        break;
      default:
        total = total + next;
        break;
    }
  }
  if (op == ReduceOp::AVG) total = total / world_size;
  if (op == ReduceOp::AVG && dtype == at::kLong) total = total.trunc();
  return total.to(dtype);
}

/// Sums of small whole numbers are exact; an average rounds once, in whichever order the backend divides.
inline testing::Tolerance tolerance(ReduceOp op, at::ScalarType dtype) {
  return op == ReduceOp::AVG ? testing::Tolerance::of(dtype) : testing::Tolerance::exact();
}

inline std::string label(const char* operation, at::ScalarType dtype, int64_t size, ReduceOp op = ReduceOp::SUM) {
  return std::string(operation) + " " + c10::toString(dtype) + " " + std::to_string(size) + " " + name_of(op);
}

inline void check_all_reduce(const Place& place, at::ScalarType dtype, int64_t size, ReduceOp op, at::Device device) {
  auto tensor = values(place.rank(), size, dtype, device);
  all_reduce(tensor, place.group(), op);
  testing::check_equal(label("all_reduce", dtype, size, op), tensor,
                       reduced(place.world_size(), op, size, dtype, device), tolerance(op, dtype));
}

inline void check_all_reduce_coalesced(const Place& place, at::ScalarType dtype, ReduceOp op, at::Device device) {
  std::vector<at::Tensor> tensors;
  for (int i = 0; i < 3; ++i) tensors.push_back(values(place.rank(), 5 + i, dtype, device, i));
  all_reduce_coalesced(tensors, place.group(), op);
  for (int i = 0; i < 3; ++i) {
    testing::check_equal(label("all_reduce_coalesced", dtype, 5 + i, op), tensors[i],
                         reduced(place.world_size(), op, 5 + i, dtype, device, i), tolerance(op, dtype));
  }
}

inline void check_reduce(const Place& place, at::ScalarType dtype, int64_t size, ReduceOp op, at::Device device) {
  for (int root = 0; root < place.world_size(); ++root) {
    auto tensor = values(place.rank(), size, dtype, device);
    reduce(tensor, root, place.group(), op);
    if (place.rank() != root) continue;
    testing::check_equal(label("reduce", dtype, size, op), tensor, reduced(place.world_size(), op, size, dtype, device),
                         tolerance(op, dtype));
  }
}

inline void check_broadcast(const Place& place, at::ScalarType dtype, int64_t size, at::Device device) {
  for (int root = 0; root < place.world_size(); ++root) {
    auto tensor = values(place.rank(), size, dtype, device);
    broadcast(tensor, root, place.group());
    testing::check_equal(label("broadcast", dtype, size), tensor, values(root, size, dtype, device));
  }
}

inline void check_gathers(const Place& place, at::ScalarType dtype, int64_t size, at::Device device) {
  const int ranks = place.world_size();
  const auto mine = values(place.rank(), size, dtype, device);
  std::vector<at::Tensor> expected;
  for (int rank = 0; rank < ranks; ++rank) expected.push_back(values(rank, size, dtype, device));

  std::vector<at::Tensor> list;
  for (int rank = 0; rank < ranks; ++rank) list.push_back(at::empty_like(mine));
  all_gather(list, mine, place.group());
  for (int rank = 0; rank < ranks; ++rank)
    testing::check_equal(label("all_gather", dtype, size), list[rank], expected[rank]);

  const auto flat = at::empty({ranks * size}, mine.options());
  all_gather_into_tensor(flat, mine, place.group());
  testing::check_equal(label("all_gather_into_tensor", dtype, size), flat, at::cat(expected));
  const auto stacked = at::empty({ranks, size}, mine.options());
  all_gather_into_tensor(stacked, mine, place.group());
  testing::check_equal(label("all_gather_into_tensor stacked", dtype, size), stacked, at::stack(expected));

  for (int root = 0; root < ranks; ++root) {
    std::vector<at::Tensor> outputs;
    if (place.rank() == root) {
      for (int rank = 0; rank < ranks; ++rank) outputs.push_back(at::empty_like(mine));
    }
    gather(mine, outputs, root, place.group());
    for (std::size_t rank = 0; rank < outputs.size(); ++rank) {
      testing::check_equal(label("gather", dtype, size), outputs[rank], expected[rank]);
    }
    std::vector<at::Tensor> pieces;
    if (place.rank() == root) pieces = expected;
    const auto piece = at::empty_like(mine);
    scatter(piece, pieces, root, place.group());
    testing::check_equal(label("scatter", dtype, size), piece, mine);
  }
}

inline void check_gathers_coalesced(const Place& place, at::ScalarType dtype, at::Device device) {
  const int ranks = place.world_size();
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> outputs;
  for (int i = 0; i < 3; ++i) {
    inputs.push_back(values(place.rank(), 4 + i, dtype, device, i));
    outputs.push_back(at::empty({ranks * (4 + i)}, inputs.back().options()));
  }
  all_gather_into_tensor_coalesced(outputs, inputs, place.group());
  for (int i = 0; i < 3; ++i) {
    std::vector<at::Tensor> expected;
    for (int rank = 0; rank < ranks; ++rank) expected.push_back(values(rank, 4 + i, dtype, device, i));
    testing::check_equal(label("all_gather_into_tensor_coalesced", dtype, 4 + i), outputs[i], at::cat(expected));
  }
}

/// Lists of several tensors per rank; backends of ours only, and only through c10d: Python calls it deprecated.
inline void check_list_gathers_coalesced(const Place& place, at::ScalarType dtype) {
  const int ranks = place.world_size();
  Call call{.kind = CallKind::kAllGather};
  for (int i = 0; i < 3; ++i) call.inputs.push_back(values(place.rank(), 4 + i, dtype, at::kCPU, i));
  for (int rank = 0; rank < ranks; ++rank) {
    for (const auto& input : call.inputs) call.outputs.push_back(at::empty_like(input));
  }
  launch(call, place.group()).wait();
  for (int rank = 0; rank < ranks; ++rank) {
    for (int i = 0; i < 3; ++i) {
      testing::check_equal(label("all_gather_coalesced", dtype, 4 + i), call.outputs[rank * 3 + i],
                           values(rank, 4 + i, dtype, at::kCPU, i));
    }
  }
}

inline void check_reduce_scatters(const Place& place, at::ScalarType dtype, int64_t size, ReduceOp op,
                                  at::Device device) {
  const int ranks = place.world_size();
  std::vector<at::Tensor> inputs;
  for (int to = 0; to < ranks; ++to) inputs.push_back(values(place.rank(), size, dtype, device, to));
  const auto expected = reduced(ranks, op, size, dtype, device, place.rank());

  auto output = at::empty({size}, inputs[0].options());
  reduce_scatter(output, inputs, place.group(), op);
  testing::check_equal(label("reduce_scatter", dtype, size, op), output, expected, tolerance(op, dtype));

  auto flat = at::empty({size}, inputs[0].options());
  reduce_scatter_tensor(flat, at::cat(inputs), place.group(), op);
  testing::check_equal(label("reduce_scatter_tensor", dtype, size, op), flat, expected, tolerance(op, dtype));
}

inline void check_reduce_scatters_coalesced(const Place& place, at::ScalarType dtype, ReduceOp op, at::Device device) {
  const int ranks = place.world_size();
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> outputs;
  for (int i = 0; i < 2; ++i) {
    std::vector<at::Tensor> pieces;
    for (int to = 0; to < ranks; ++to) pieces.push_back(values(place.rank(), 3 + i, dtype, device, to + i));
    inputs.push_back(at::cat(pieces));
    outputs.push_back(at::empty({3 + i}, inputs.back().options()));
  }
  reduce_scatter_tensor_coalesced(outputs, inputs, place.group(), op);
  for (int i = 0; i < 2; ++i) {
    testing::check_equal(label("reduce_scatter_tensor_coalesced", dtype, 3 + i, op), outputs[i],
                         reduced(ranks, op, 3 + i, dtype, device, place.rank() + i), tolerance(op, dtype));
  }
}

inline void check_all_to_all(const Place& place, at::ScalarType dtype, int64_t size, at::Device device) {
  const int ranks = place.world_size();
  // What rank `from` sends to rank `to` carries both numbers; unequal pieces have from + to + 1 rows.
  const auto piece = [&](int from, int to, int64_t rows) { return values(from, rows, dtype, device, to); };
  std::vector<at::Tensor> sent;
  std::vector<at::Tensor> expected;
  for (int other = 0; other < ranks; ++other) {
    sent.push_back(piece(place.rank(), other, size));
    expected.push_back(piece(other, place.rank(), size));
  }
  const auto received = at::empty({ranks * size}, sent[0].options());
  all_to_all_single(received, at::cat(sent), place.group());
  testing::check_equal(label("all_to_all_single", dtype, size), received, at::cat(expected));

  std::vector<at::Tensor> uneven_sent;
  std::vector<at::Tensor> uneven_expected;
  std::vector<at::Tensor> outputs;
  std::vector<int64_t> rows;
  for (int other = 0; other < ranks; ++other) {
    rows.push_back(place.rank() + other + 1);
    uneven_sent.push_back(piece(place.rank(), other, rows.back()));
    uneven_expected.push_back(piece(other, place.rank(), rows.back()));
    outputs.push_back(at::empty({rows.back()}, sent[0].options()));
  }
  const auto uneven = at::empty({at::cat(uneven_expected).size(0)}, sent[0].options());
  all_to_all_single(uneven, at::cat(uneven_sent), place.group(), rows, rows);
  testing::check_equal(label("all_to_all_single with splits", dtype, size), uneven, at::cat(uneven_expected));
  all_to_all(outputs, uneven_sent, place.group());
  for (int other = 0; other < ranks; ++other) {
    testing::check_equal(label("all_to_all", dtype, rows[other]), outputs[other], uneven_expected[other]);
  }
}

/// Columns of a matrix: what lies between their elements must stay.
inline void check_strides(const Place& place, at::Device device) {
  const int ranks = place.world_size();
  const auto column = [&](double value) { return at::full({5, 3}, value, at::TensorOptions(device)).select(1, 1); };
  const auto check = [](const char* what, const at::Tensor& tensor, double expected, double beside) {
    const auto matrix = tensor.as_strided({5, 3}, {3, 1}, 0);
    testing::check_equal(what, tensor, at::full_like(tensor, expected));
    testing::check_equal(what, matrix.select(1, 0), at::full_like(tensor, beside));
    testing::check_equal(what, matrix.select(1, 2), at::full_like(tensor, beside));
  };
  const double mine = place.rank() + 1;
  const double sum = ranks * (ranks + 1) / 2.0;
  auto tensor = column(mine);
  all_reduce(tensor, place.group());
  check("all_reduce of a column", tensor, sum, mine);
  tensor = column(mine);
  launch_all_reduce(tensor, place.group()).future()->wait();
  check("the future of a column", tensor, sum, mine);
  tensor = column(mine);
  broadcast(tensor, ranks - 1, place.group());
  check("broadcast of a column", tensor, ranks, mine);
  tensor = column(mine);
  reduce(tensor, 0, place.group());
  if (place.rank() == 0) check("reduce of a column", tensor, sum, mine);
  std::vector<at::Tensor> outputs;
  for (int rank = 0; rank < ranks; ++rank) outputs.push_back(column(-1));
  all_gather(outputs, column(mine), place.group());
  for (int rank = 0; rank < ranks; ++rank) check("all_gather of columns", outputs[rank], rank + 1, -1);
  std::vector<at::Tensor> inputs;
  for (int rank = 0; place.rank() == 0 && rank < ranks; ++rank) inputs.push_back(column(10 + rank));
  tensor = column(-1);
  scatter(tensor, inputs, 0, place.group());
  check("scatter of columns", tensor, 10 + place.rank(), -1);
  // One element is contiguous whatever its stride.
  const auto lone = at::full({1, 2}, mine, at::TensorOptions(device)).select(1, 0);
  all_reduce(lone, place.group());
  testing::check_equal("one element", lone, at::full_like(lone, sum));
}

/// Everything, on one device.
inline void check_all(const Place& place, at::Device device) {
  for (const auto dtype : kDtypes) {
    for (const auto size : kSizes) {
      for (const auto op : kOps) {
        check_all_reduce(place, dtype, size, op, device);
        // The large size says nothing new about another reduction.
        if (size > 1000 && op != ReduceOp::SUM) continue;
        if (device.is_cpu() || op != ReduceOp::AVG) check_reduce(place, dtype, size, op, device);
        check_reduce_scatters(place, dtype, size, op, device);
      }
      check_broadcast(place, dtype, size, device);
      check_gathers(place, dtype, size, device);
      check_all_to_all(place, dtype, size, device);
    }
    check_all_reduce_coalesced(place, dtype, ReduceOp::SUM, device);
    check_all_reduce_coalesced(place, dtype, ReduceOp::AVG, device);
    check_gathers_coalesced(place, dtype, device);
    check_reduce_scatters_coalesced(place, dtype, ReduceOp::SUM, device);
  }
  check_strides(place, device);
  barrier(place.group());
}

}  // namespace lockstep::conformance
