#include "lockstep/state/archive_bridge.h"

namespace lockstep::detail {
namespace {

using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

// libtorch opens archives from bytes only, which would copy all state twice and bring a bound on memory to nothing.
// Both kinds hold a module, privately; an explicit instantiation may name private members.
template <class Key, typename Key::Member kMember>
struct Reach {
  friend typename Key::Member member_of(Key) { return kMember; }
};
struct Written {
  using Member = torch::jit::Module OutputArchive::*;
  friend Member member_of(Written);
};
struct Opened {
  using Member = torch::jit::Module InputArchive::*;
  friend Member member_of(Opened);
};
template struct Reach<Written, &OutputArchive::module_>;
template struct Reach<Opened, &InputArchive::module_>;

}  // namespace

InputArchive reopened(const OutputArchive& archive) {
  InputArchive opened;
  opened.*member_of(Opened{}) = archive.*member_of(Written{});
  return opened;
}

NamedValues values_in(InputArchive& archive) {
  NamedValues values;
  for (const auto& key : archive.keys()) {
    c10::IValue value;
    // Nested archives are objects.
    if (archive.try_read(key, value) && !value.isObject()) values.emplace(key, std::move(value));
  }
  return values;
}

}  // namespace lockstep::detail
