#include "lockstep/fsdp/unit_registry.h"

#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>

#include <cstddef>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

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

/// Some bytes of a storage, which lives as long as another tensor is on it.
struct FormerMemory {
  std::string name;
  c10::weak_intrusive_ptr<c10::TensorImpl> parameter;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  const std::byte* begin;
  const std::byte* end;
};

struct UnitRegistry {
  std::mutex mutex;  // guards all
  std::vector<FormerMemory> memory;
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

void remember_memory(const std::string& name, const at::Tensor& parameter) {
  if (parameter.numel() == 0) return;
  auto& registry = unit_registry();
  const std::lock_guard lock(registry.mutex);
  std::erase_if(registry.memory, [](const auto& former) { return former.storage.expired(); });
  const auto* begin = static_cast<const std::byte*>(parameter.const_data_ptr());
  auto storage = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(parameter.storage().unsafeGetStorageImpl());
  registry.memory.push_back({name, c10::weak_intrusive_ptr<c10::TensorImpl>(parameter.getIntrusivePtr()),
                             c10::weak_intrusive_ptr<c10::StorageImpl>(storage), begin, begin + parameter.nbytes()});
}

std::optional<std::string> sharer_of(const at::Tensor& parameter) {
  if (parameter.numel() == 0) return std::nullopt;
  auto& registry = unit_registry();
  const std::lock_guard lock(registry.mutex);
  const auto* begin = static_cast<const std::byte*>(parameter.const_data_ptr());
  const auto* storage = parameter.storage().unsafeGetStorageImpl();
  for (const auto& former : registry.memory) {
    if (former.storage.expired() || former.storage._unsafe_get_target() != storage) continue;
    // Its own, of a fully_shard() that was refused.
    if (former.parameter._unsafe_get_target() == parameter.unsafeGetTensorImpl()) continue;
    if (begin < former.end && former.begin < begin + parameter.nbytes()) return former.name;
  }
  return std::nullopt;
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
