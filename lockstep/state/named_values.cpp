#include "lockstep/state/named_values.h"

#include "lockstep/comm/values.h"

namespace lockstep {

NamedValues copied_to(const NamedValues& values, c10::Device device, bool non_blocking) {
  NamedValues copies;
  for (const auto& [name, value] : values) copies.emplace(name, copied_to(value, device, non_blocking));
  return copies;
}

int64_t bytes_of(const NamedValues& values) {
  int64_t bytes = 0;
  for (const auto& [name, value] : values) {
    if (value.isTensor() && value.toTensor().defined()) bytes += static_cast<int64_t>(value.toTensor().nbytes());
  }
  return bytes;
}

}  // namespace lockstep
