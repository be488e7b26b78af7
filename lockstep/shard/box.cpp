#include "lockstep/shard/box.h"

#include <c10/util/accumulate.h>

#include <algorithm>
#include <numeric>

#include "lockstep/base/str.h"

namespace lockstep {
namespace {

/// Appends the boxes of a run inside of rows `prefix` of the dims before `dim`.
void add_boxes(std::vector<Box>& boxes, const std::vector<int64_t>& prefix, const ElementRange& run,
               const std::vector<int64_t>& sizes) {
  if (run.is_empty()) return;
  const auto dim = prefix.size();
  const auto add = [&](int64_t first, int64_t count) {
    Box box{.offsets = prefix, .sizes = std::vector<int64_t>(dim, 1)};
    if (dim < sizes.size()) {
      box.offsets.push_back(first);
      box.sizes.push_back(count);
    }
    for (auto rest = dim + 1; rest < sizes.size(); ++rest) {
      box.offsets.push_back(0);
      box.sizes.push_back(sizes[rest]);
    }
    boxes.push_back(std::move(box));
  };
  if (dim == sizes.size()) return add(0, 1);
  const auto row = c10::multiply_integers(sizes.begin() + static_cast<std::ptrdiff_t>(dim) + 1, sizes.end());
  const auto first_whole = (run.begin + row - 1) / row;
  const auto end_whole = run.end / row;
  const auto inside = [&](int64_t index, int64_t begin, int64_t end) {
    auto deeper = prefix;
    deeper.push_back(index);
    add_boxes(boxes, deeper, {begin - index * row, end - index * row}, sizes);
  };
  if (first_whole > end_whole) return inside(end_whole, run.begin, run.end);  // within one row
  if (run.begin < first_whole * row) inside(first_whole - 1, run.begin, first_whole * row);
  if (first_whole < end_whole) add(first_whole, end_whole - first_whole);
  if (end_whole * row < run.end) inside(end_whole, end_whole * row, run.end);
}

}  // namespace

int64_t Box::numel() const {
  // A dim of none makes any other size harmless.
  if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) return 0;
  return c10::multiply_integers(sizes);
}

std::string Box::to_string() const {
  return str("[", join(offsets, ", "), "]+[", join(sizes, ", "), "]");
}

Box whole_box(const std::vector<int64_t>& sizes) {
  return {.offsets = std::vector<int64_t>(sizes.size()), .sizes = sizes};
}

std::optional<Box> intersection(const Box& one, const Box& other) {
  Box common;
  for (std::size_t dim = 0; dim < one.sizes.size(); ++dim) {
    const auto range = intersection({one.offsets[dim], one.offsets[dim] + one.sizes[dim]},
                                    {other.offsets[dim], other.offsets[dim] + other.sizes[dim]});
    if (range.is_empty()) return std::nullopt;
    common.offsets.push_back(range.begin);
    common.sizes.push_back(range.size());
  }
  return common;
}

at::Tensor box_in(const at::Tensor& tensor, const Box& outer, const Box& inner) {
  auto view = tensor;
  for (std::size_t dim = 0; dim < inner.sizes.size(); ++dim) {
    view = view.narrow(static_cast<int64_t>(dim), inner.offsets[dim] - outer.offsets[dim], inner.sizes[dim]);
  }
  return view;
}

std::optional<ElementRange> run_in(const Box& inner, const Box& outer) {
  // Dims after the first that has several indices must be whole.
  bool must_be_whole = false;
  int64_t begin = 0;
  for (std::size_t dim = 0; dim < inner.sizes.size(); ++dim) {
    if (must_be_whole && inner.sizes[dim] != outer.sizes[dim]) return std::nullopt;
    must_be_whole = must_be_whole || inner.sizes[dim] != 1;
    begin = begin * outer.sizes[dim] + inner.offsets[dim] - outer.offsets[dim];
  }
  return ElementRange{begin, begin + inner.numel()};
}

std::vector<Box> boxes_of_run(const ElementRange& run, const std::vector<int64_t>& sizes) {
  std::vector<Box> boxes;
  add_boxes(boxes, {}, run, sizes);
  return boxes;
}

std::vector<BoxedValues> boxed_run(const ElementRange& run, const at::Tensor& row, const std::vector<int64_t>& sizes,
                                   const std::vector<int64_t>& strides) {
  // Dims from the one with the longest stride to that with the shortest: in this order, memory is row by row.
  std::vector<std::size_t> order(sizes.size());
  std::iota(order.begin(), order.end(), 0);
  if (!strides.empty()) {
    std::stable_sort(order.begin(), order.end(), [&](auto one, auto other) {
      // A dim of one index may have any stride.
      return strides[one] != strides[other] ? strides[one] > strides[other] : sizes[one] > sizes[other];
    });
  }
  std::vector<int64_t> ordered;
  for (const auto dim : order) ordered.push_back(sizes[dim]);
  std::vector<int64_t> back(sizes.size());  // where a dim of the tensor is in `order`
  for (std::size_t place = 0; place < order.size(); ++place) back[order[place]] = static_cast<int64_t>(place);

  std::vector<BoxedValues> boxed;
  int64_t begin = 0;
  for (const auto& box : boxes_of_run(run, ordered)) {
    auto& into = boxed.emplace_back();
    into.values = row.narrow(0, begin, box.numel()).view(box.sizes).permute(back);
    for (const auto place : back) {
      into.box.offsets.push_back(box.offsets[static_cast<std::size_t>(place)]);
      into.box.sizes.push_back(box.sizes[static_cast<std::size_t>(place)]);
    }
    begin += box.numel();
  }
  return boxed;
}

}  // namespace lockstep
