#include "lockstep/fsdp/flat_pieces.h"

#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>
#include <torch/nn/module.h>

#include "lockstep/fsdp/unit_registry.h"
#include "lockstep/nn/module_tensors.h"

namespace lockstep::detail {

FlatPieces flat_pieces(const torch::nn::Module& module) {
  FlatPieces pieces;
  for_each_module(module, [&](const std::string& prefix, const torch::nn::Module& each) {
    const auto unit = find_unit(each);
    if (!unit || unit->options().use_orig_params) return;
    TORCH_CHECK(unit->module_count() == 1, unit->who(),
                ": the flat parameter of several modules has no names in a state dict. Set use_orig_params.");
    for (const auto& group : unit->groups()) {
      for (const auto& member : group->members()) {
        auto& of_member = pieces[member.shard.unsafeGetTensorImpl()];
        for (const auto& flat : unit->flat_names()) {
          const auto& handle = member.handles[flat.handle];
          of_member.push_back(
              {joined_name(prefix, flat.name), handle.sizes, handle.offset, c10::multiply_integers(handle.sizes)});
        }
      }
    }
  });
  return pieces;
}

}  // namespace lockstep::detail
