#include "lockstep/rpc/wire.h"

namespace lockstep::rpc {

WireMismatch::WireMismatch(const std::string& expected, const c10::IValue& value)
    : WireMismatch(expected, value.isNone() ? "None" : value.tagKind()) {}

WireMismatch::WireMismatch(const std::string& expected, const std::string& got)
    : std::runtime_error(str("expected ", expected, ", got ", got)) {}

namespace detail {

c10::ArrayRef<c10::IValue> elements_of(const c10::IValue& value, const std::string& expected) {
  if (!value.isTuple()) throw WireMismatch(expected, value);
  return value.toTupleRef().elements().asArrayRef();
}

void check_count(std::size_t got, std::size_t expected, const std::string& what) {
  if (got != expected) throw WireMismatch(str(what, " with ", expected, " values"), str(got));
}

}  // namespace detail
}  // namespace lockstep::rpc
