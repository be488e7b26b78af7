#include "lockstep/state/named_values.h"

#include "lockstep/comm/values.h"

namespace lockstep {
namespace {

bool is_sparse(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() && value.toTensor().is_sparse();
}

}  // namespace

NamedValues copied_to(const NamedValues& values, c10::Device device, bool non_blocking) {
  NamedValues copies;
  for (const auto& [name, value] : values) copies.emplace(name, copied_to(value, device, non_blocking));
  return copies;
}

NamedValues with_dense_tensors(NamedValues values) {
  for (auto& [name, value] : values) {
    if (is_sparse(value)) value = value.toTensor().detach().to_dense();
  }
  return values;
}

int64_t bytes_of(const NamedValues& values) {
  int64_t bytes = 0;
  for (const auto& [name, value] : values) {
    if (is_sparse(value)) {
      bytes += static_cast<int64_t>(value.toTensor()._values().nbytes() + value.toTensor()._indices().nbytes());
    } else if (value.isTensor() && value.toTensor().defined())
      bytes += static_cast<int64_t>(value.toTensor().nbytes());
  }
  return bytes;
}

}  // namespace lockstep
