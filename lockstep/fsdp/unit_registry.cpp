#include "lockstep/fsdp/unit_registry.h"

#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>

#include <mutex>
#include <unordered_map>

namespace lockstep::detail {
namespace {

struct Registered {
  std::weak_ptr<torch::nn::Module> module;
  std::weak_ptr<Unit> unit;
};

struct CastBuffer {
  c10::weak_intrusive_ptr<c10::TensorImpl> buffer;
  at::ScalarType dtype;
};

struct UnitRegistry {
  std::mutex mutex;  // guards both
  std::unordered_map<const torch::nn::Module*, Registered> units;
  std::unordered_map<const c10::TensorImpl*, CastBuffer> buffers;
};

UnitRegistry& unit_registry() {
  static auto* instance = new UnitRegistry;  // modules may outlive what is destroyed at exit
  return *instance;
}

}  // namespace

void register_unit(const std::shared_ptr<torch::nn::Module>& module, const UnitPtr& unit) {
  auto& registry = unit_registry();
  const std::lock_guard lock(registry.mutex);
  std::erase_if(registry.units, [](const auto& item) { return item.second.module.expired(); });
  registry.units[module.get()] = {module, unit};
}

UnitPtr find_unit(const torch::nn::Module& module) {
  auto& registry = unit_registry();
  const std::lock_guard lock(registry.mutex);
  const auto found = registry.units.find(&module);
  if (found == registry.units.end() || found->second.module.expired()) return nullptr;
  return found->second.unit.lock();
}

void set_original_dtype(const at::Tensor& buffer, at::ScalarType dtype) {
  auto& registry = unit_registry();
  const std::lock_guard lock(registry.mutex);
  std::erase_if(registry.buffers, [](const auto& item) { return item.second.buffer.expired(); });
  registry.buffers.insert_or_assign(
      buffer.unsafeGetTensorImpl(),
      CastBuffer{c10::weak_intrusive_ptr<c10::TensorImpl>(buffer.getIntrusivePtr()), dtype});
}

std::optional<at::ScalarType> original_dtype_of(const at::Tensor& buffer) {
  auto& registry = unit_registry();
  const std::lock_guard lock(registry.mutex);
  const auto found = registry.buffers.find(buffer.unsafeGetTensorImpl());
  if (found == registry.buffers.end() || found->second.buffer.expired()) return std::nullopt;
  return found->second.dtype;
}

bool can_be_called(const torch::nn::Module& module) {
  return dynamic_cast<const torch::nn::ModuleListImpl*>(&module) == nullptr &&
         dynamic_cast<const torch::nn::ModuleDictImpl*>(&module) == nullptr;
}

}  // namespace lockstep::detail
