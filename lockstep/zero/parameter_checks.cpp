#include "lockstep/zero/parameter_checks.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <unordered_map>

#include "lockstep/base/str.h"
#include "lockstep/comm/call.h"
#include "lockstep/shard/layout_of.h"
#include "lockstep/zero/shared_memory.h"

namespace lockstep::detail {
namespace {

std::string place(const ParameterGroups& groups, std::size_t group, std::size_t position) {
  return groups.size() == 1 ? str("parameter ", position) : str("parameter ", position, " of group ", group);
}

std::string place_of(const ParameterGroups& groups, const at::Tensor& parameter) {
  for (std::size_t i = 0; i < groups.size(); ++i) {
    for (std::size_t j = 0; j < groups[i].size(); ++j) {
      if (groups[i][j].is_same(parameter)) return place(groups, i, j);
    }
  }
  return "a parameter";
}

bool is_same_type(const at::Tensor& one, const at::Tensor& other) {
  return one.layout() == other.layout() && one.device().type() == other.device().type();
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
      const auto cut = layout_of(parameter);
      TORCH_CHECK(!cut || cut->is_replicated(), who, ": ", here, " is a shard already (", *cut, "). Its state is as ",
                  "small as it is: use an ordinary optimizer, and fully_shard() to divide it further.");
      if (first == nullptr) {
        TORCH_CHECK(parameter.layout() == at::kStrided, who, ": ", here, " is ", type_text(parameter),
                    ". All parameters must be dense.");
        first = &parameter;
        first_place = here;
      }
      TORCH_CHECK(is_same_type(*first, parameter), who, ": ", first_place, " is ", type_text(*first), ", ", here,
                  " is ", type_text(parameter), ". All parameters must be dense and on one type of device.");
      const auto [before, is_new] = seen.emplace(parameter.unsafeGetTensorImpl(), here);
      TORCH_CHECK(is_new, who, ": ", before->second, " and ", here, " are the same tensor. List it once.");
    }
  }
  TORCH_CHECK(first != nullptr, who, ": there is no parameter. Pass at least one.");
}

void check_memory_is_apart(const ParameterGroups& groups, const std::string& who) {
  struct Extent {
    ByteRange bytes = {};
    std::size_t group = 0;
    std::size_t position = 0;
  };
  std::vector<Extent> extents;
  for (std::size_t i = 0; i < groups.size(); ++i) {
    for (std::size_t j = 0; j < groups[i].size(); ++j) {
      const auto& parameter = groups[i][j];
      if (parameter.numel() > 0 && !parameter.is_meta()) extents.push_back({bytes_spanned_by(parameter), i, j});
    }
  }
  std::stable_sort(extents.begin(), extents.end(),
                   [](const Extent& a, const Extent& b) { return a.bytes.begin < b.bytes.begin; });
  for (auto one = extents.begin(); one != extents.end(); ++one) {
    for (auto other = one + 1; other != extents.end() && other->bytes.begin < one->bytes.end; ++other) {
      // Gaps of one may hold the other.
      TORCH_CHECK(!share_memory(groups[one->group][one->position], groups[other->group][other->position]), who, ": ",
                  place(groups, one->group, one->position), " and ", place(groups, other->group, other->position),
                  " share memory. Divided among ranks they would be updated apart: let the module use one tensor for ",
                  "both, or use ZeroStage::kReplicated.");
    }
  }
}

void take_back_moved(const std::vector<const FlatShard*>& buffers, const ParameterGroups& groups,
                     const std::string& who) {
  std::vector<std::pair<const FlatShard*, std::size_t>> moved;
  for (const auto* flat : buffers) {
    for (const auto index : flat->moved(flat->parameters().size())) moved.emplace_back(flat, index);
  }
  if (moved.empty()) return;
  for (const auto& [flat, index] : moved) {
    const auto& parameter = flat->parameters()[index];
    TORCH_CHECK(flat->fits(index), who, ": ", place_of(groups, parameter), " is ", lockstep::describe(parameter),
                " on ", parameter.device(), " now. The optimizer has it in a buffer of ", flat->buffer().scalar_type(),
                " on ", flat->buffer().device(),
                " with the sizes it had. Make the optimizer anew after such a change; with ",
                "DDP's mixed_precision, let the backward of every forward run before the step.");
  }
  check_memory_is_apart(groups, who);
  for (const auto& [flat, index] : moved) flat->take_back(index);
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
