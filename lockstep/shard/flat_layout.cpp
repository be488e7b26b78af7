#include "lockstep/shard/flat_layout.h"

#include <c10/util/Exception.h>

namespace lockstep {

FlatLayout::FlatLayout(const std::vector<int64_t>& elements, int world_size, const FlatAlignment& alignment) {
  TORCH_CHECK(alignment.parameters > 0, "[lockstep/shard] parameters cannot begin at multiples of ",
              alignment.parameters, " elements. Give at least 1.");
  int64_t end = 0;
  for (const auto size : elements) {
    TORCH_CHECK(size >= 0, "[lockstep/shard] parameter ", parameters_.size(), " cannot have ", size, " elements");
    const auto begin = (end + alignment.parameters - 1) / alignment.parameters * alignment.parameters;
    parameters_.push_back({begin, begin + size});
    end = begin + size;
  }
  plan_ = plan_slices(end, world_size, alignment.slices);
}

std::vector<FlatPiece> FlatLayout::pieces_of(int rank) const {
  const auto slice = plan_.slice_of(rank);
  std::vector<FlatPiece> pieces;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const auto& range = parameters_[i];
    const auto mine = range.is_empty() ? range : intersection(range, slice);
    if (mine.is_empty() && !(range.is_empty() && plan_.rank_of(range.begin) == rank)) continue;
    pieces.push_back(
        {.index = i, .elements = mine, .in_parameter = {mine.begin - range.begin, mine.end - range.begin}});
  }
  return pieces;
}

std::vector<ElementRange> FlatLayout::gaps() const {
  std::vector<ElementRange> gaps;
  int64_t end = 0;
  for (const auto& range : parameters_) {
    if (range.begin > end) gaps.push_back({end, range.begin});
    end = range.end;
  }
  if (plan_.padded() > end) gaps.push_back({end, plan_.padded()});
  return gaps;
}

}  // namespace lockstep
