#include "lockstep/zero/parameter_checks.h"

#include <c10/util/Exception.h>

#include <unordered_map>

#include "lockstep/base/str.h"

namespace lockstep::detail {
namespace {

std::string place(const ParameterGroups& groups, std::size_t group, std::size_t position) {
  return groups.size() == 1 ? str("parameter ", position) : str("parameter ", position, " of group ", group);
}

bool is_same_type(const at::Tensor& one, const at::Tensor& other) {
  return one.scalar_type() == other.scalar_type() && one.layout() == other.layout() &&
         one.device().type() == other.device().type();
}

}  // namespace

std::string type_text(const at::Tensor& parameter) {
  return lockstep::str(parameter.layout() == at::kStrided ? "dense" : "sparse", " ", parameter.scalar_type(), " on ",
                       c10::DeviceTypeName(parameter.device().type(), /*lower_case=*/true));
}

void check_parameters(const ParameterGroups& groups, const std::string& who) {
  const at::Tensor* first = nullptr;
  std::string first_place;
  std::unordered_map<const void*, std::string> seen;
  for (std::size_t i = 0; i < groups.size(); ++i) {
    for (std::size_t j = 0; j < groups[i].size(); ++j) {
      const auto& parameter = groups[i][j];
      const auto here = place(groups, i, j);
      TORCH_CHECK(parameter.defined(), who, ": ", here, " is undefined");
      TORCH_CHECK(parameter.is_leaf(), who, ": ", here, " is not a leaf: it was computed from other tensors, ",
                  "so it has no gradient of its own. Pass the tensors it was computed from.");
      if (first == nullptr) {
        TORCH_CHECK(parameter.layout() == at::kStrided, who, ": ", here, " is ", type_text(parameter),
                    ". All parameters must be of one dense type.");
        first = &parameter;
        first_place = here;
      }
      TORCH_CHECK(is_same_type(*first, parameter), who, ": ", first_place, " is ", type_text(*first), ", ", here,
                  " is ", type_text(parameter), ". All parameters must be of one dense type.");
      const auto [before, is_new] = seen.emplace(parameter.unsafeGetTensorImpl(), here);
      TORCH_CHECK(is_new, who, ": ", before->second, " and ", here, " are the same tensor. List it once.");
    }
  }
  TORCH_CHECK(first != nullptr, who, ": there is no parameter. Pass at least one.");
}

Facts facts_of(const ParameterGroups& groups) {
  Facts facts = {{"number of parameter groups", str(groups.size())}};
  for (std::size_t i = 0; i < groups.size(); ++i) {
    facts.emplace_back(str("number of parameters in group ", i), str(groups[i].size()));
    for (std::size_t j = 0; j < groups[i].size(); ++j) {
      const auto& parameter = groups[i][j];
      facts.emplace_back(place(groups, i, j), lockstep::str(parameter.scalar_type(), parameter.sizes()));
    }
  }
  return facts;
}

}  // namespace lockstep::detail
