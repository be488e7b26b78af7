#include "lockstep/checkpoint/owned_pieces.h"

#include <c10/util/Exception.h>

#include "lockstep/comm/world.h"
#include "lockstep/intercept/deferred_init.h"
#include "lockstep/shard/layout_of.h"

namespace lockstep::detail {
namespace {

std::vector<BoxedValues> boxes_in(const Layout& layout, const at::Tensor& local) {
  std::vector<BoxedValues> pieces;
  if (!layout.mesh().is_member()) return pieces;
  for (const auto& box : layout.part().boxes()) {
    pieces.push_back({.box = {.offsets = box.offsets, .sizes = box.sizes},
                      .values = box_in(local, {.offsets = std::vector<int64_t>(box.offsets.size())},
                                       {.offsets = box.local_offsets, .sizes = box.sizes})});
  }
  return pieces;
}

/// Of one original parameter in a flat one.
std::vector<BoxedValues> boxes_in(const FlatPiece& piece, const Layout& layout, const at::Tensor& local) {
  std::vector<BoxedValues> pieces;
  if (!layout.mesh().is_member()) return pieces;
  const auto part = layout.part();
  int64_t before = 0;  // in `local`
  for (const auto& range : part.ranges().front()) {
    const auto common = intersection(range, {piece.offset, piece.offset + piece.elements});
    if (!common.is_empty()) {
      const auto row = local.narrow(0, before + common.begin - range.begin, common.size());
      auto boxes = boxed_run({common.begin - piece.offset, common.end - piece.offset}, row, piece.sizes, {});
      pieces.insert(pieces.end(), boxes.begin(), boxes.end());
    }
    before += range.size();
  }
  return pieces;
}

}  // namespace

void give_memory(const at::Tensor& tensor) {
  if (!tensor.is_meta()) return;
  const auto world = current_world();
  is_deferred(tensor) ? materialize_tensor(tensor)
                      : materialize_empty(tensor, world ? world->device() : c10::Device(at::kCPU));
}

std::vector<int64_t> whole_sizes(const at::Tensor& parameter) {
  const auto layout = layout_of(parameter);
  return layout ? layout->sizes() : parameter.sizes().vec();
}

std::vector<OwnedPieces> owned_pieces(const std::string& name, const at::Tensor& parameter, const at::Tensor& local,
                                      const std::vector<FlatPiece>& flat) {
  const auto layout = layout_of(parameter);
  TORCH_CHECK(!layout || !layout->has_partial(), "[lockstep/checkpoint] '", name, "' is ",
              layout ? to_string(layout->placements()) : "",
              ": sums that are not reduced yet cannot be saved or loaded");
  if (!layout) {
    const auto sizes = local.sizes().vec();
    return {{.name = name, .sizes = sizes, .pieces = {{.box = whole_box(sizes), .values = local}}}};
  }
  if (flat.empty()) return {{.name = name, .sizes = layout->sizes(), .pieces = boxes_in(*layout, local)}};
  std::vector<OwnedPieces> owned;
  for (const auto& piece : flat) {
    owned.push_back({.name = piece.name, .sizes = piece.sizes, .pieces = boxes_in(piece, *layout, local)});
  }
  return owned;
}

}  // namespace lockstep::detail
