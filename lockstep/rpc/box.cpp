#include "lockstep/rpc/box.h"

#include <c10/util/Exception.h>
#include <c10/util/Type.h>

namespace lockstep::rpc::detail {

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
