#include "lockstep/ddp/reducer_setup.h"

#include <c10/util/Exception.h>

#include <typeinfo>

#include "lockstep/base/str.h"

namespace lockstep::detail {
namespace {

constexpr std::size_t kMostNamesShown = 10;

}  // namespace

void with_advice(const std::function<void()>& action, const std::function<std::string()>& advice) {
  try {
    action();
  } catch (const c10::Error& error) {
    // Peers that failed themselves have a type of their own and say why; a hook's error is its own business.
    const bool is_lost = typeid(error) == typeid(c10::DistBackendError);
    const std::string message = error.what_without_backtrace();
    const auto is_from = [&](const char* layer) { return message.find(layer) != std::string::npos; };
    const bool is_mismatch =
        typeid(error) == typeid(c10::Error) && (is_from("[lockstep/comm]") || is_from("[lockstep/shm]"));
    const auto remedy = (is_lost || is_mismatch) && advice ? advice() : std::string();
    if (remedy.empty()) throw;
    // Not added in place: ranks that are threads share the exception.
    const auto text = str(message, " ", remedy);
    if (is_lost) C10_THROW_ERROR(DistBackendError, text);
    TORCH_CHECK(false, text);
  }
}

std::unordered_set<const c10::TensorImpl*> impls_of(const std::vector<at::Tensor>& tensors) {
  std::unordered_set<const c10::TensorImpl*> impls;
  for (const auto& tensor : tensors) impls.insert(tensor.unsafeGetTensorImpl());
  return impls;
}

std::string ReducerSetup::who() const {
  return str("[lockstep/ddp] rank ", group->getRank(), " of ", group->getSize());
}

std::string ReducerSetup::names_of(const std::vector<std::size_t>& indices) const {
  std::vector<std::string> names;
  for (const auto index : indices) {
    if (names.size() == kMostNamesShown) {
      names.push_back(str("and ", indices.size() - kMostNamesShown, " more"));
      break;
    }
    names.push_back(str("'", name_of(index), "'"));
  }
  return join(names, ", ");
}

std::string ReducerSetup::bucket_text(std::size_t bucket) const {
  return str("bucket ", bucket, " (", names_of(plan.buckets()[bucket].parameters), ")");
}

void ReducerSetup::fail(const std::string& message) const {
  if (listeners.error) listeners.error(message);
  TORCH_CHECK(false, message);
}

}  // namespace lockstep::detail
