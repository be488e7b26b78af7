#include "lockstep/ddp/reducer_setup.h"

#include <c10/util/Exception.h>

#include "lockstep/base/str.h"

namespace lockstep::detail {
namespace {

constexpr std::size_t kMostNamesShown = 10;

}  // namespace

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
