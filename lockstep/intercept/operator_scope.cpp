#include "lockstep/intercept/operator_scope.h"

#include <c10/util/Exception.h>

#include <string_view>
#include <type_traits>

#include "lockstep/intercept/key.h"
#include "lockstep/intercept/scope_frame.h"

namespace lockstep {
namespace {

constexpr std::string_view kName = "LOCKSTEP_OPERATOR_SCOPES";

// A kind is a number up to torch 2.12 and the address of a name from then on.
template <class Kind>
Kind make_kind() {
  if constexpr (std::is_enum_v<Kind>) {
    constexpr int kOurs = 0x6c;  // far from libtorch's own
    return static_cast<Kind>(kOurs);
  } else {
    return Kind(&kName);
  }
}

c10::DebugInfoKind our_kind() {
  static const auto kind = make_kind<c10::DebugInfoKind>();
  return kind;
}

std::shared_ptr<detail::ScopeFrame> make_frame(std::shared_ptr<OperatorScope> scope) {
  TORCH_CHECK(scope, "[lockstep/intercept] EnterScope: there is no scope to enter.");
  scope->sees() == OperatorScope::Sees::kKernels ? install_kernel_interceptor() : install_interceptor();
  auto frame = std::make_shared<detail::ScopeFrame>();
  frame->scope = std::move(scope);
  frame->outer = detail::innermost_scope();
  return frame;
}

}  // namespace

std::shared_ptr<detail::ScopeFrame> detail::innermost_scope() {
  auto* found = static_cast<ScopeFrame*>(c10::ThreadLocalDebugInfo::get(our_kind()));
  return found != nullptr ? found->shared_from_this() : nullptr;
}

EnterScope::EnterScope(std::shared_ptr<OperatorScope> scope)
    : frame_(make_frame(std::move(scope))),
      carried_(our_kind(), frame_),
      included_(frame_->scope->sees() == OperatorScope::Sees::kKernels ? kKernelKey : kInterceptKey) {}

EnterScope::~EnterScope() {
  frame_->is_open = false;
}

NotIntercepted::NotIntercepted() : excluded_(c10::DispatchKeySet({kInterceptKey, kKernelKey})) {}

}  // namespace lockstep
