// Our fallback on the key, and who is asked in which order. docs/intercept.md gives the reasons.
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>
#include <torch/library.h>

#include <algorithm>

#include "lockstep/intercept/key.h"
#include "lockstep/intercept/operator_call.h"
#include "lockstep/intercept/scope_frame.h"
#include "lockstep/intercept/storage_owner.h"
#include "lockstep/intercept/tensor_access.h"
#include "lockstep/intercept/tensor_rule.h"

namespace lockstep {
namespace {

// How many rules and composite operators the thread is inside of.
thread_local int current_depth = 0;

/// Lets the thread's operators come to the interceptor again, as nested ones.
class Nested {
 public:
  Nested() : was_excluded_(c10::impl::tls_is_dispatch_key_excluded(kInterceptKey)) {
    c10::impl::tls_set_dispatch_key_excluded(kInterceptKey, false);
    ++current_depth;
  }
  ~Nested() {
    --current_depth;
    c10::impl::tls_set_dispatch_key_excluded(kInterceptKey, was_excluded_);
  }
  Nested(const Nested&) = delete;
  Nested& operator=(const Nested&) = delete;

 private:
  const bool was_excluded_;
};

/// The owners of a call's storages, told in the order of the arguments and in reverse.
class ToldOwners {
 public:
  explicit ToldOwners(OperatorCall& call) : call_(call) {
    for_each_tensor(call, [&](const at::Tensor& tensor, std::size_t argument) {
      if (!is_marked_intercepted(tensor)) return;
      auto owner = storage_owner_of(memory_of(tensor));
      if (!owner) return;
      const auto* alias = call.schema().arguments()[argument].alias_info();
      touched_of(std::move(owner))
          .push_back({.tensor = memory_of(tensor), .is_written = alias != nullptr && alias->isWrite()});
    });
  }
  ~ToldOwners() {
    const c10::impl::ExcludeDispatchKeyGuard excluded(kKernelKey);
    for (auto i = told_; i > 0; --i) owners_[i - 1].owner->after_operator(call_);
  }
  ToldOwners(const ToldOwners&) = delete;
  ToldOwners& operator=(const ToldOwners&) = delete;

  // What owners call is nobody's kernel: they gather in one run of a program, and not in the next.
  void tell() {
    const c10::impl::ExcludeDispatchKeyGuard excluded(kKernelKey);
    for (; told_ < owners_.size(); ++told_) owners_[told_].owner->before_operator(call_, owners_[told_].touched);
  }
  void tell_results() {
    const c10::impl::ExcludeDispatchKeyGuard excluded(kKernelKey);
    for (auto i = told_; i > 0; --i) owners_[i - 1].owner->on_result(call_);
  }

 private:
  struct Owner {
    std::shared_ptr<StorageOwner> owner;
    c10::SmallVector<TouchedTensor, 4> touched;
  };

  c10::SmallVector<TouchedTensor, 4>& touched_of(std::shared_ptr<StorageOwner> owner) {
    const auto found = std::find_if(owners_.begin(), owners_.end(), [&](const auto& o) { return o.owner == owner; });
    if (found != owners_.end()) return found->touched;
    owners_.push_back({.owner = std::move(owner), .touched = {}});
    return owners_.back().touched;
  }

  OperatorCall& call_;
  c10::SmallVector<Owner, 2> owners_;
  std::size_t told_ = 0;
};

bool has_open_leaf_scope(const detail::ScopeFrame* frame) {
  for (; frame != nullptr; frame = frame->outer.get()) {
    if (frame->is_open && frame->scope->sees() == OperatorScope::Sees::kLeaves) return true;
  }
  return false;
}

/// The fallback.
void intercept(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard excluded(kInterceptKey);
  OperatorCall call(op, keys, *stack);
  call.proceed();
}

/// The fallback below autograd.
void intercept_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard excluded(kKernelKey);
  OperatorCall call(op, keys, *stack, OperatorCall::Level::kKernel);
  call.proceed();
}

/// Never taken back: tensors that carry the key may outlive everything that is destroyed at exit.
template <auto* kFallback>
void register_fallback(c10::DispatchKey key) {
  auto library = std::make_unique<torch::Library>(torch::Library::IMPL, "_", key, __FILE__, __LINE__);
  try {
    static_cast<void>(library->fallback(torch::CppFunction::makeFromBoxedFunction<kFallback>()));
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, "[lockstep/intercept] another library of this process has registered a fallback for the ",
                "dispatch key ", c10::toString(key), ", and there can be only one: torchdistx, or a second copy of ",
                "Lockstep (a program and a plugin that each link their own). Load only one of them. libtorch says: ",
                error.what_without_backtrace());
  }
  [[maybe_unused]] const auto* kept = library.release();
}

bool is_composite(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
}

}  // namespace

OperatorCall::OperatorCall(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack& stack,
                           Level level)
    : op_(op),
      schema_(op.schema()),
      keys_(keys),
      stack_(stack),
      argument_count_(schema_.arguments().size()),
      base_(stack.size() - argument_count_),
      level_(level),
      depth_(current_depth),
      next_frame_(detail::innermost_scope()) {
  if (level_ == Level::kOperator && has_open_leaf_scope(next_frame_.get()))
    is_leaf_ = !is_composite(op) && find_rule(*this) == nullptr;
}

bool OperatorCall::next_scope_sees_it(const detail::ScopeFrame& frame) const {
  const auto sees = frame.scope->sees();
  if (!frame.is_open || (sees == OperatorScope::Sees::kKernels) != (level_ == Level::kKernel)) return false;
  if (level_ == Level::kKernel) return true;
  return sees == OperatorScope::Sees::kLeaves ? is_leaf_ : depth_ == 0;
}

void OperatorCall::proceed() {
  TORCH_INTERNAL_ASSERT(!is_answered_, "[lockstep/intercept] ", name(), ": a scope or rule answered twice.");
  while (next_frame_) {
    const auto frame = std::exchange(next_frame_, next_frame_->outer);
    if (!next_scope_sees_it(*frame)) continue;
    frame->scope->on_operator(*this);
    check_answered("scope");
    return;
  }
  if (level_ == Level::kKernel) {
    auto* rule = find_kernel_rule(*this);
    return rule != nullptr && rule != asked_rule_ ? run_kernel_rule(*rule) : run_kernel();
  }
  // A rule that has been asked goes on with other arguments, which may have another rule.
  if (auto* rule = find_rule(*this); rule != nullptr && rule != asked_rule_) return run_rule(*rule);
  if (!is_leaf_ && is_composite(op_)) return run_composite();
  run_owned();
}

void OperatorCall::replace(torch::jit::Stack results) {
  TORCH_INTERNAL_ASSERT(!is_answered_, "[lockstep/intercept] ", name(), ": a scope or rule answered twice.");
  stack_.resize(base_);
  std::move(results.begin(), results.end(), std::back_inserter(stack_));
  is_answered_ = true;
}

void OperatorCall::check_answered(const char* who) const {
  TORCH_INTERNAL_ASSERT(is_answered_, "[lockstep/intercept] ", name(), ": a ", who,
                        " neither went on nor answered. It must call proceed() or replace().");
}

void OperatorCall::run_kernel() {
  is_answered_ = true;
  op_.redispatchBoxed(keys_ & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKernelKey), &stack_);
}

// What the rule calls is below autograd as well, and nobody's kernel: scopes have seen the operator itself.
void OperatorCall::run_kernel_rule(TensorRule& rule) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  asked_rule_ = &rule;
  rule.run(*this);
  check_answered("rule");
}

void OperatorCall::run_rule(TensorRule& rule) {
  const Nested nested;
  // If the rule goes on, the operator itself runs after all: scopes that look for that have not seen it yet.
  asked_rule_ = &rule;
  is_leaf_ = true;
  ++depth_;
  next_frame_ = detail::innermost_scope();
  rule.run(*this);
  check_answered("rule");
}

// Its parts come back one by one. The keys are those of the call: no one has changed the arguments of an operator that
// scopes want to see in parts.
void OperatorCall::run_composite() {
  const Nested nested;
  is_answered_ = true;
  op_.redispatchBoxed(keys_ & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kInterceptKey), &stack_);
}

void OperatorCall::run_owned() {
  // A rule lets the thread's operators in; from here on they are libtorch's own business again.
  const c10::impl::ExcludeDispatchKeyGuard excluded(kInterceptKey);
  ToldOwners owners(*this);
  owners.tell();
  is_answered_ = true;
  op_.callBoxed(&stack_);
  owners.tell_results();
}

void install_interceptor() {
  static const bool is_installed = [] {
    register_fallback<&intercept>(kInterceptKey);
    return true;
  }();
  static_cast<void>(is_installed);
}

void install_kernel_interceptor() {
  static const bool is_installed = [] {
    register_fallback<&intercept_kernel>(kKernelKey);
    return true;
  }();
  static_cast<void>(is_installed);
}

void mark_intercepted(const at::Tensor& tensor) {
  install_interceptor();
  auto& keys = detail::TensorAccess::keys_of(*tensor.unsafeGetTensorImpl());
  keys = keys.add(kInterceptKey);
}

void unmark_intercepted(const at::Tensor& tensor) {
  auto& keys = detail::TensorAccess::keys_of(*tensor.unsafeGetTensorImpl());
  keys = keys.remove(kInterceptKey);
}

bool is_marked_intercepted(const at::Tensor& tensor) {
  return tensor.defined() && tensor.unsafeGetTensorImpl()->key_set().has(kInterceptKey);
}

}  // namespace lockstep
