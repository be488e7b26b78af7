// How calls name an object behind an RRef. Behind methods of classes; internal to rpc otherwise.
#pragma once

#include <torch/csrc/distributed/rpc/types.h>

#include <functional>

#include "lockstep/rpc/callable.h"
#include "lockstep/rpc/wire.h"

namespace lockstep::rpc {

using torch::distributed::rpc::RRefId;

template <>
struct Wire<RRefId> {
  static c10::IValue to(const RRefId& id) {
    return c10::ivalue::Tuple::create(
        {c10::IValue(static_cast<std::int64_t>(id.createdOn_)), c10::IValue(id.localId_)});
  }
  static RRefId from(const c10::IValue& value) {
    const auto [created_on, local_id] = Wire<std::pair<std::int16_t, std::int64_t>>::from(value);
    return {created_on, local_id};
  }
  static std::string name() { return "RRefId"; }
};

namespace detail {

/// Calls `next` with the object that `handle` names and this worker owns, at once if it exists, else when it does: a
/// call may overtake the one which makes the object. Errors of its making are the answer's. A handle is an id, from
/// workers whose references keep the object, or the owner's reference itself, which nothing else may keep.
Answer with_object(const c10::IValue& handle, const std::function<Answer(const c10::IValue& object)>& next);

}  // namespace detail
}  // namespace lockstep::rpc
