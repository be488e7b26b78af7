#include "lockstep/nn/module_tensors.h"

#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>

#include <map>
#include <mutex>
#include <unordered_set>

#include "lockstep/base/str.h"

namespace lockstep {
namespace {

/// C++ modules have no attributes to note it in.
struct IgnoreLists {
  std::mutex mutex;
  std::map<const torch::nn::Module*, std::pair<std::weak_ptr<torch::nn::Module>, std::set<std::string>>> of_module;

  static IgnoreLists& instance() {
    static auto& lists = *new IgnoreLists;
    return lists;
  }
};

bool makes_sparse_gradients(const torch::nn::Module& module) {
  if (const auto* embedding = dynamic_cast<const torch::nn::EmbeddingImpl*>(&module)) {
    return embedding->options.sparse();
  }
  const auto* bag = dynamic_cast<const torch::nn::EmbeddingBagImpl*>(&module);
  return bag != nullptr && bag->options.sparse();
}

/// Calls visit(full name, tensor, owner) for each tensor once.
template <class Own, class Visit>
void for_each_tensor_of(const torch::nn::Module& root, const Own& own, const Visit& visit) {
  std::unordered_set<const c10::TensorImpl*> seen;
  detail::for_each_module(root, [&](const std::string& prefix, const torch::nn::Module& module) {
    for (const auto& item : own(module)) {
      const at::Tensor& tensor = item.value();
      if (!tensor.defined() || !seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
      visit(detail::joined_name(prefix, item.key()), tensor, module);
    }
  });
}

const auto own_parameters = [](const torch::nn::Module& module) { return module.named_parameters(/*recurse=*/false); };
const auto own_buffers = [](const torch::nn::Module& module) { return module.named_buffers(/*recurse=*/false); };

}  // namespace

void set_params_and_buffers_to_ignore_for_model(const std::shared_ptr<torch::nn::Module>& module,
                                                const std::vector<std::string>& names) {
  TORCH_CHECK(module, "[lockstep/ddp] set_params_and_buffers_to_ignore_for_model was given no module");
  std::set<std::string> known;
  const auto note = [&](const std::string& name, const at::Tensor&, const torch::nn::Module&) { known.insert(name); };
  for_each_tensor_of(*module, own_parameters, note);
  for_each_tensor_of(*module, own_buffers, note);
  for (const auto& name : names) {
    if (!known.contains(name)) {
      TORCH_WARN("[lockstep/ddp] '", name, "' is to be ignored, but the module has no such parameter or buffer");
    }
  }
  auto& lists = IgnoreLists::instance();
  const std::lock_guard lock(lists.mutex);
  std::erase_if(lists.of_module, [](const auto& entry) { return entry.second.first.expired(); });
  lists.of_module[module.get()] = {module, std::set<std::string>(names.begin(), names.end())};
}

namespace detail {

std::string joined_name(const std::string& prefix, const std::string& name) {
  return prefix.empty() ? name : prefix + "." + name;
}

void for_each_module(const torch::nn::Module& root,
                     const std::function<void(const std::string&, const torch::nn::Module&)>& visit) {
  std::unordered_set<const torch::nn::Module*> seen;
  const std::function<void(const std::string&, const torch::nn::Module&)> walk = [&](const std::string& name,
                                                                                     const torch::nn::Module& module) {
    if (!seen.insert(&module).second) return;
    visit(name, module);
    for (const auto& child : module.named_children()) walk(joined_name(name, child.key()), *child.value());
  };
  walk("", root);
}

std::set<std::string> ignored_names(const torch::nn::Module& module) {
  auto& lists = IgnoreLists::instance();
  const std::lock_guard lock(lists.mutex);
  const auto found = lists.of_module.find(&module);
  if (found == lists.of_module.end() || found->second.first.expired()) return {};
  return found->second.second;
}

NamedTensors parameters_of(const torch::nn::Module& module, const std::set<std::string>& ignored) {
  NamedTensors result;
  for_each_tensor_of(module, own_parameters,
                     [&](const std::string& name, const at::Tensor& tensor, const torch::nn::Module&) {
                       if (!ignored.contains(name)) result.emplace_back(name, tensor);
                     });
  return result;
}

NamedTensors buffers_of(const torch::nn::Module& module, const std::set<std::string>& ignored) {
  NamedTensors result;
  for_each_tensor_of(module, own_buffers,
                     [&](const std::string& name, const at::Tensor& tensor, const torch::nn::Module&) {
                       if (!ignored.contains(name)) result.emplace_back(name, tensor);
                     });
  return result;
}

ManagedParameters managed_parameters(const torch::nn::Module& module, const std::set<std::string>& ignored) {
  ManagedParameters result;
  for_each_tensor_of(module, own_parameters,
                     [&](const std::string& name, const at::Tensor& tensor, const torch::nn::Module& owner) {
                       if (ignored.contains(name) || !tensor.requires_grad()) return;
                       result.tensors.push_back(tensor);
                       result.infos.push_back(info_of(name, tensor, makes_sparse_gradients(owner)));
                     });
  return result;
}

}  // namespace detail
}  // namespace lockstep
