#include "lockstep/rpc/builtins.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <mutex>
#include <set>

#include "lockstep/base/str.h"
#include "lockstep/rpc/box.h"
#include "lockstep/rpc/function.h"
#include "lockstep/rpc/remote_error.h"

namespace lockstep::rpc {
namespace detail {
namespace {

struct Allowed {
  std::mutex mutex;
  // Arithmetic, shapes and factories; nothing that reads or writes anything but its arguments.
  std::set<std::string> names = {"aten::abs",
                                 "aten::add.Scalar",
                                 "aten::add.Tensor",
                                 "aten::addmm",
                                 "aten::arange",
                                 "aten::argmax",
                                 "aten::bmm",
                                 "aten::cat",
                                 "aten::clamp",
                                 "aten::clone",
                                 "aten::cos",
                                 "aten::detach",
                                 "aten::div.Scalar",
                                 "aten::div.Tensor",
                                 "aten::empty_like",
                                 "aten::exp",
                                 "aten::full",
                                 "aten::gelu",
                                 "aten::linear",
                                 "aten::log",
                                 "aten::log_softmax.int",
                                 "aten::matmul",
                                 "aten::max",
                                 "aten::mean",
                                 "aten::mean.dim",
                                 "aten::min",
                                 "aten::mm",
                                 "aten::mul.Scalar",
                                 "aten::mul.Tensor",
                                 "aten::neg",
                                 "aten::norm.Scalar",
                                 "aten::ones",
                                 "aten::ones_like",
                                 "aten::permute",
                                 "aten::pow.Tensor_Scalar",
                                 "aten::rand",
                                 "aten::randn",
                                 "aten::relu",
                                 "aten::reshape",
                                 "aten::sigmoid",
                                 "aten::sin",
                                 "aten::softmax.int",
                                 "aten::sqrt",
                                 "aten::stack",
                                 "aten::sub.Scalar",
                                 "aten::sub.Tensor",
                                 "aten::sum",
                                 "aten::sum.dim_IntList",
                                 "aten::t",
                                 "aten::tanh",
                                 "aten::transpose.int",
                                 "aten::zeros",
                                 "aten::zeros_like"};
};

Allowed& allowed() {
  static auto* const list = new Allowed;
  return *list;
}

c10::OperatorName operator_name(const std::string& name) {
  const auto dot = name.find('.');
  return dot == std::string::npos ? c10::OperatorName(name, "")
                                  : c10::OperatorName(name.substr(0, dot), name.substr(dot + 1));
}

/// Lists travel as tuples; operators want lists of their type.
c10::IValue as_schema_wants(const c10::IValue& value, const c10::TypePtr& type) {
  auto wanted = type;
  if (const auto optional = wanted->cast<c10::OptionalType>()) wanted = optional->getElementType();
  const auto list_type = wanted->cast<c10::ListType>();
  if (!list_type || !value.isTuple()) return value;
  c10::impl::GenericList list(list_type->getElementType());
  for (const auto& each : value.toTupleRef().elements()) list.push_back(each);
  return list;
}

}  // namespace

bool is_operator_name(const std::string& name) {
  return name.starts_with("aten::");
}

Answer run_operator(const std::string& name, const std::vector<c10::IValue>& arguments, Form form) {
  {
    auto& list = allowed();
    const std::lock_guard lock(list.mutex);
    if (!list.names.contains(name)) {
      throw Refused(
          "this operator is not allowed there. Allow it on that worker with rpc::allow_operator(), if it does no harm");
    }
  }
  const auto found = c10::Dispatcher::singleton().findSchema(operator_name(name));
  if (!found) throw Refused("libtorch has no operator of this name");
  const auto& schema = found->schema();
  torch::jit::Stack stack;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    stack.push_back(i < schema.arguments().size() ? as_schema_wants(arguments[i], schema.arguments()[i].type())
                                                  : arguments[i]);
  }
  try {
    schema.checkAndNormalizeInputs<c10::Type>(stack, {});
  } catch (const c10::Error& error) {
    throw Refused(error.what_without_backtrace());
  }
  found->callBoxed(stack);
  if (stack.size() != 1 || !stack[0].isTensor())
    throw std::runtime_error("the operator returned something else than one tensor");
  if (form == Form::kWire) return {.value = Wire<at::Tensor>::to(stack[0].toTensor())};
  return {.value = boxed(std::make_shared<at::Tensor>(stack[0].toTensor()))};
}

}  // namespace detail

void allow_operator(const std::string& schema_name) {
  TORCH_CHECK(c10::Dispatcher::singleton().findSchema(detail::operator_name(schema_name)),
              "[lockstep/rpc] libtorch has no operator '", schema_name, "'.");
  auto& list = detail::allowed();
  const std::lock_guard lock(list.mutex);
  list.names.insert(schema_name);
}

}  // namespace lockstep::rpc
