#include "lockstep/dtensor/rules/positions.h"

#include <ATen/ops/ones_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

namespace lockstep::detail {

Positions positions_in_part(const at::Tensor& indices, const Layout& layout, int64_t dim) {
  const auto part = layout.part();
  auto positions = at::zeros_like(indices);
  auto is_other = at::ones_like(indices, indices.options().dtype(at::kBool));
  int64_t held = 0;
  for (const auto& run : part.ranges()[static_cast<std::size_t>(dim)]) {
    const auto is_mine = indices.ge(run.begin).logical_and_(indices.lt(run.begin + run.size()));
    positions = at::where(is_mine, indices - (run.begin - held), positions);
    is_other.logical_and_(is_mine.logical_not());
    held += run.size();
  }
  return {positions, is_other};
}

}  // namespace lockstep::detail
