#include "lockstep/ddp/module_watch.h"

#include "lockstep/nn/module_access.h"

namespace lockstep::detail {

/// Depth first, until `visit` returns false; returns whether it never did.
template <class Visit>
bool ModuleWatch::for_each_part(torch::nn::Module& module, const Visit& visit) {
  const auto& parameters = ModuleAccess::parameters_of(module);
  const auto children = module.children();
  if (!visit(Part{&module, parameters.size(), children.size()})) return false;
  for (const auto& item : parameters) {
    const at::Tensor& tensor = item.value();
    if (!visit(Part{tensor.unsafeGetTensorImpl(), 0, tensor.requires_grad() ? 1U : 0U})) return false;
  }
  for (const auto& child : children) {
    if (!for_each_part(*child, visit)) return false;
  }
  return true;
}

void ModuleWatch::note(torch::nn::Module& module) {
  parts_.clear();
  for_each_part(module, [&](const Part& part) {
    parts_.push_back(part);
    return true;
  });
}

bool ModuleWatch::has_changed(torch::nn::Module& module) const {
  auto next = parts_.begin();
  const bool are_alike = for_each_part(module, [&](const Part& part) {
    if (next == parts_.end() || part != *next) return false;
    ++next;
    return true;
  });
  return !are_alike || next != parts_.end();
}

}  // namespace lockstep::detail
