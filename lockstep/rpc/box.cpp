#include "lockstep/rpc/box.h"

#include <c10/util/Exception.h>
#include <c10/util/Type.h>

#include <mutex>
#include <typeindex>
#include <unordered_map>

namespace lockstep::rpc::detail {
namespace {

struct BoxCounts {
  std::mutex mutex;
  std::unordered_map<std::type_index, int> by_type;
};

// Never destroyed: objects may outlive statics.
BoxCounts& box_counts() {
  static auto* const counts = new BoxCounts;
  return *counts;
}

}  // namespace

void count_box(const std::type_info& type, int by) {
  auto& counts = box_counts();
  const std::lock_guard lock(counts.mutex);
  counts.by_type[type] += by;
}

std::map<std::string, int> living_boxes() {
  auto& counts = box_counts();
  const std::lock_guard lock(counts.mutex);
  std::map<std::string, int> by_name;
  for (const auto& [type, count] : counts.by_type) {
    if (count > 0) by_name[c10::demangle(type.name())] += count;
  }
  return by_name;
}

PyObject* AnyBox::getPyObject() {
  TORCH_CHECK(false, "[lockstep/rpc] a C++ object is no Python object.");
}

c10::InferredType AnyBox::tryToInferType() {
  return c10::InferredType("a C++ object");
}

c10::IValue AnyBox::toIValue(const c10::TypePtr& /*type*/, std::optional<std::int32_t> /*count*/) {
  return wire();
}

std::string AnyBox::toStr() {
  return readable(type());
}

std::vector<at::Tensor> tensors_of(const c10::IValue& wire) {
  std::vector<at::Tensor> tensors;
  c10::IValue::HashAliasedIValues parts;
  wire.getSubValues(parts);
  for (const auto& part : parts) {
    if (part.isTensor()) tensors.push_back(part.toTensor());
  }
  return tensors;
}

std::string readable(const std::type_info& type) {
  return c10::demangle(type.name());
}

void refuse_other_type(const std::type_info& held, const std::type_info& wanted) {
  TORCH_CHECK(false, "[lockstep/rpc] the RRef holds a ", readable(held), ", not a ", readable(wanted), ".");
}

void refuse_to_travel(const std::type_info& type) {
  TORCH_CHECK(false, "[lockstep/rpc] a ", readable(type),
              " does not travel: call its methods through the RRef, or say what it consists of with rpc_fields().");
}

const AnyBox& any_box(const c10::IValue& value) {
  TORCH_CHECK(value.isPyObject(), "[lockstep/rpc] the RRef holds a ", value.tagKind(),
              " that this library did not make.");
  const auto holder = value.toPyObjectHolder();
  const auto* box = dynamic_cast<const AnyBox*>(holder.get());
  TORCH_CHECK(box != nullptr, "[lockstep/rpc] the RRef holds an object that this library did not make.");
  return *box;  // alive while `value` is
}

}  // namespace lockstep::rpc::detail
