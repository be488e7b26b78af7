#include "lockstep/rpc/rref.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/distributed/autograd/autograd.h>
#include <torch/csrc/distributed/autograd/rpc_messages/rref_backward_req.h>
#include <torch/csrc/distributed/rpc/rref_context.h>

#include "lockstep/rpc/remote_error.h"
#include "lockstep/rpc/rref_backward.h"
#include "lockstep/rpc/session.h"

namespace lockstep::rpc::detail {

namespace trpc = torch::distributed::rpc;

namespace {

const trpc::RRef& real(const RRefPtr& impl) {
  TORCH_CHECK(impl, "[lockstep/rpc] this RRef refers to nothing.");
  return static_cast<const trpc::RRef&>(*impl);
}

/// Of a user; the name of the internal function that answers is below.
constexpr auto kFetch = "lockstep.fetch";

[[maybe_unused]] const auto fetch_function = [] {
  class Fetch final : public Callable {
   public:
    std::string signature() const override { return "(RRefId) -> value"; }
    Answer call(const std::vector<c10::IValue>& arguments, Form form) const override {
      if (arguments.size() != 1) refuse_count(signature(), arguments.size());
      return with_object(arguments[0], [form](const c10::IValue& object) {
        return Answer{.value = form == Form::kWire ? any_box(object).wire() : object};
      });
    }
  };
  register_function(kFetch, std::make_shared<Fetch>());
  return true;
}();

}  // namespace

Answer with_object(const c10::IValue& handle, const std::function<Answer(const c10::IValue& object)>& next) {
  const auto object_of = [](const RRefPtr& rref) {
    if (!rref->isOwner()) throw Refused("the object is another worker's");
    return trpc::fromRRefInterface(rref)->getFuture();
  };
  FuturePtr object;
  if (handle.isRRef()) {
    object = object_of(handle.toRRef());
  } else {
    const auto reference = trpc::RRefContext::getInstance().getOwnerRRef(Wire<RRefId>::from(handle));
    object =
        reference->completed()
            ? object_of(reference->value().toRRef())
            : reference->thenAsync([object_of](c10::ivalue::Future& done) { return object_of(done.value().toRRef()); },
                                   c10::AnyType::get());
  }
  if (object->completed()) return next(object->value());
  return {.value = {}, .pending = then_async(object, [next](c10::ivalue::Future& done) {
                         auto answer = next(done.value());
                         if (answer.pending) return answer.pending;
                         auto ready = new_future();
                         ready->markCompleted(std::move(answer.value));
                         return ready;
                       })};
}

RRefBase::RRefBase(RRefPtr impl) : impl_(std::move(impl)), session_(session_number()) {}

bool RRefBase::is_owner() const {
  return real(impl_).isOwner();
}

bool RRefBase::confirmed_by_owner() const {
  return real(impl_).confirmedByOwner();
}

const WorkerInfo& RRefBase::owner() const {
  return current_agent("an RRef's owner")->getWorkerInfo(real(impl_).owner());
}

std::string RRefBase::to_string() const {
  const auto& id = real(impl_).rrefId();
  return str("RRef(", id.createdOn_, ", ", id.localId_, ")");
}

void RRefBase::check_usable() const {
  const auto agent = current_agent("an RRef");
  const auto& rref = real(impl_);
  TORCH_CHECK(session_ == session_number(), "[lockstep/rpc] ", to_string(),
              " is of before the last shutdown(), which let go of its object. Make it anew.");
  const auto creation = rref.getOwnerCreationFuture();
  if (!creation || !creation->completed() || !creation->hasError()) return;
  TORCH_CHECK(false, "[lockstep/rpc] ", to_string(), " of worker '", owner_name(),
              "' may not exist: its creation failed: ", text_of(creation->exception_ptr()));
}

const c10::IValue& RRefBase::owned_value(const std::type_info& wanted) const {
  check_usable();
  TORCH_CHECK(is_owner(), "[lockstep/rpc] worker '", current_agent("an RRef")->getWorkerInfo().name_, "' asks for the ",
              readable(wanted), " behind ", to_string(), ", which worker '", owner_name(),
              "' owns. Ask for a copy with to_here(), if it travels, or call it there with rpc_sync().");
  return static_cast<const trpc::OwnerRRef&>(real(impl_)).getValue();
}

c10::IValue RRefBase::fetch() const {
  return call_and_wait(callee(), kFetch, with_handle({}));
}

Callee RRefBase::callee() const {
  check_usable();
  const Callee owner_of_it(owner());
  return limit_ ? owner_of_it.within(*limit_) : owner_of_it;
}

std::vector<c10::IValue> RRefBase::with_handle(std::vector<c10::IValue> arguments) const {
  arguments.insert(arguments.begin(), is_owner() ? c10::IValue(impl_) : Wire<RRefId>::to(real(impl_).rrefId()));
  return arguments;
}

void RRefBase::backward(std::optional<std::int64_t> context_id, bool retain_graph) const {
  check_usable();
  const auto agent = current_agent("an RRef's backward");
  if (is_owner()) {
    backward_of(owned_value(typeid(at::Tensor)), context_id, retain_graph);
    return;
  }
  TORCH_CHECK(context_id, "[lockstep/rpc] ", to_string(), " is worker '", owner_name(),
              "'s: its backward needs the id of a distributed autograd context.");
  auto request = torch::distributed::autograd::RRefBackwardReq(real(impl_).rrefId(), *context_id, retain_graph);
  const auto to = callee();
  const auto answer = agent->send(to.info(), std::move(request).toMessage(), to.timeout_seconds());
  answer->wait();
  if (answer->hasError()) throw translate(answer->exception_ptr(), to.info().name_, "RRef.backward");
}

RRefPtr new_owned(const c10::IValue& boxed_value) {
  current_agent("an RRef");
  auto rref = trpc::RRefContext::getInstance().createOwnerRRef(c10::AnyType::get());
  rref->setValue(c10::IValue(boxed_value));
  return rref;
}

RRefPtr received(RRefPtr impl) {
  auto& context = trpc::RRefContext::getInstance();
  const auto id = real(impl).rrefId();
  if (!impl->isOwner() || id.createdOn_ == context.getWorkerId()) return impl;
  const auto object = trpc::fromRRefInterface(impl)->getFuture();
  if (object->completed()) return impl;
  const auto hold = context.genGloballyUniqueId();
  context.addForkOfOwner(id, hold);
  object->addCallback([id, hold](c10::ivalue::Future& /*done*/) {
    try {
      trpc::RRefContext::getInstance().delForkOfOwner(id, hold);
    } catch (const c10::Error&) {  // NOLINT(bugprone-empty-catch): RPC has ended meanwhile
    }
  });
  return impl;
}

}  // namespace lockstep::rpc::detail
