// One operator on its way through the interceptor: what is called, with which arguments, and what comes next. The order
// is fixed and told in docs/intercept.md: scopes of the thread, innermost first; the rule of a tensor; owners of
// storages; libtorch. An OperatorCall lives for one call, on one thread.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <string>

namespace lockstep {

namespace detail {
struct ScopeFrame;
}
class TensorRule;

class OperatorCall {
 public:
  /// Where an operator is on its way: above autograd, or below it.
  enum class Level { kOperator, kKernel };

  OperatorCall(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack& stack,
               Level level = Level::kOperator);
  OperatorCall(const OperatorCall&) = delete;
  OperatorCall& operator=(const OperatorCall&) = delete;

  const c10::OperatorHandle& op() const { return op_; }
  const c10::FunctionSchema& schema() const { return schema_; }
  /// "aten::add_"
  const std::string& name() const { return schema_.name(); }

  std::size_t argument_count() const { return argument_count_; }
  /// May be changed before proceed(). REQUIRES: neither proceed() nor replace() has been called.
  c10::IValue& argument(std::size_t index) { return stack_[base_ + index]; }
  const c10::IValue& argument(std::size_t index) const { return stack_[base_ + index]; }

  /// REQUIRES: proceed() or replace() has been called.
  std::size_t result_count() const { return stack_.size() - base_; }
  c10::IValue& result(std::size_t index) { return stack_[base_ + index]; }

  /// Runs what comes next; at most once, and whoever is asked either does this or calls replace(). What the next ones
  /// throw passes through.
  void proceed();

  /// Answers instead of what would come next.
  void replace(torch::jit::Stack results);

 private:
  void run_kernel();
  void run_kernel_rule(TensorRule& rule);
  void run_rule(TensorRule& rule);
  void run_composite();
  void run_owned();
  bool next_scope_sees_it(const detail::ScopeFrame& frame) const;
  void check_answered(const char* who) const;

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  const c10::DispatchKeySet keys_;
  torch::jit::Stack& stack_;
  const std::size_t argument_count_;
  const std::size_t base_;

  const Level level_;
  int depth_;  // how many rules and composite operators it is inside of
  std::shared_ptr<detail::ScopeFrame> next_frame_;
  bool is_leaf_ = true;
  const TensorRule* asked_rule_ = nullptr;
  bool is_answered_ = false;
};

/// Calls visit(tensor, argument index) for every defined tensor among the arguments, those in lists included.
template <class Visit>
void for_each_tensor(const OperatorCall& call, const Visit& visit) {
  for (std::size_t i = 0; i < call.argument_count(); ++i) {
    const auto& value = call.argument(i);
    if (value.isTensor()) {
      if (const auto& tensor = value.toTensor(); tensor.defined()) visit(tensor, i);
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorList()) {
        if (tensor.defined()) visit(tensor, i);
      }
    } else if (value.isOptionalTensorList()) {
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
        if (tensor && tensor->defined()) visit(*tensor, i);
      }
    }
  }
}

}  // namespace lockstep
