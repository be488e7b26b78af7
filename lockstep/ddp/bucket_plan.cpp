#include "lockstep/ddp/bucket_plan.h"

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <optional>
#include <ostream>
#include <sstream>
#include <unordered_map>
#include <utility>

#include "lockstep/base/str.h"

namespace lockstep {
namespace {

constexpr char kHeader[] = "lockstep bucket plan 1";

std::string sizes_text(const ParameterInfo& parameter) {
  return str(c10::toString(parameter.dtype), "[", join(parameter.sizes, ","), "]");
}

}  // namespace

BucketPlan::BucketPlan(std::vector<ParameterInfo> parameters, std::vector<PlannedBucket> buckets)
    : parameters_(std::move(parameters)), buckets_(std::move(buckets)), places_(parameters_.size()) {
  std::vector<bool> is_placed(parameters_.size());
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    const auto& members = buckets_[b].parameters;
    TORCH_CHECK(!members.empty(), "[lockstep/ddp] bucket plan: bucket ", b, " is empty");
    for (std::size_t i = 0; i < members.size(); ++i) {
      const auto index = members[i];
      TORCH_CHECK(index < parameters_.size(), "[lockstep/ddp] bucket plan: bucket ", b, " lists parameter ", index,
                  ", but there are only ", parameters_.size());
      const auto& parameter = parameters_[index];
      TORCH_CHECK(!is_placed[index], "[lockstep/ddp] bucket plan: parameter ", parameter.describe(), " is in bucket ",
                  places_[index].bucket, " and again in bucket ", b);
      const auto& first = parameters_[members[0]];
      TORCH_CHECK(parameter.dtype == first.dtype && parameter.device == first.device,
                  "[lockstep/ddp] bucket plan: bucket ", b, " mixes ", first.describe(), " on ", first.device.str(),
                  " with ", parameter.describe(), " on ", parameter.device.str());
      TORCH_CHECK(!parameter.expects_sparse_gradient || members.size() == 1, "[lockstep/ddp] bucket plan: parameter ",
                  parameter.describe(), " has sparse gradients and must be alone, but shares bucket ", b, " with ",
                  members.size() - 1, " others");
      is_placed[index] = true;
      places_[index] = {.bucket = b, .index = i};
    }
  }
  const auto missing = std::find(is_placed.begin(), is_placed.end(), false) - is_placed.begin();
  TORCH_CHECK(missing == static_cast<std::ptrdiff_t>(is_placed.size()), "[lockstep/ddp] bucket plan: parameter ",
              parameters_[static_cast<std::size_t>(missing)].describe(), " is in no bucket");
}

std::size_t BucketPlan::bytes(std::size_t bucket) const {
  std::size_t total = 0;
  for (const auto index : buckets_[bucket].parameters) total += parameters_[index].bytes();
  return total;
}

std::string BucketPlan::to_string() const {
  std::ostringstream out;
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    const auto& bucket = buckets_[b];
    out << "bucket " << b << ": " << bytes(b) << " bytes";
    if (bucket.cap_bytes != kNoCap) out << " (cap " << bucket.cap_bytes << ")";
    out << ":";
    for (const auto index : bucket.parameters) out << " " << parameters_[index].name;
    out << "\n";
  }
  return std::move(out).str();
}

std::string BucketPlan::save() const {
  std::ostringstream out;
  out << kHeader << "\n";
  for (const auto& bucket : buckets_) {
    out << "bucket ";
    bucket.cap_bytes == kNoCap ? out << "none" : out << bucket.cap_bytes;
    out << "\n";
    for (const auto index : bucket.parameters) {
      out << "  " << sizes_text(parameters_[index]) << " " << parameters_[index].name << "\n";
    }
  }
  return std::move(out).str();
}

BucketPlan BucketPlan::load(const std::string& text, std::vector<ParameterInfo> parameters) {
  std::unordered_map<std::string, std::size_t> index_of;
  for (std::size_t i = 0; i < parameters.size(); ++i) index_of[parameters[i].name] = i;
  std::istringstream lines(text);
  std::string line;
  TORCH_CHECK(std::getline(lines, line) && line == kHeader, "[lockstep/ddp] this is no saved bucket plan: it begins '",
              line.substr(0, 40), "' instead of '", kHeader, "'");
  std::vector<PlannedBucket> buckets;
  while (std::getline(lines, line)) {
    if (line.starts_with("bucket ")) {
      const auto cap = line.substr(7);
      auto& bucket = buckets.emplace_back();
      if (cap != "none") bucket.cap_bytes = std::stoull(cap);
      continue;
    }
    const auto space = line.find(' ', 2);
    TORCH_CHECK(line.starts_with("  ") && space != std::string::npos && !buckets.empty(),
                "[lockstep/ddp] saved bucket plan: cannot read the line '", line, "'");
    const auto sizes = line.substr(2, space - 2);
    const auto name = line.substr(space + 1);
    const auto found = index_of.find(name);
    TORCH_CHECK(found != index_of.end(), "[lockstep/ddp] saved bucket plan: it has a parameter '", name,
                "', which this model has not. Load it into the model it was saved from.");
    const auto& parameter = parameters[found->second];
    TORCH_CHECK(sizes_text(parameter) == sizes, "[lockstep/ddp] saved bucket plan: parameter '", name, "' was ", sizes,
                " and is ", sizes_text(parameter), " now");
    buckets.back().parameters.push_back(found->second);
  }
  return {std::move(parameters), std::move(buckets)};
}

std::string BucketPlan::difference_from(const BucketPlan& other) const {
  if (parameters_.size() != other.parameters_.size()) {
    return str(parameters_.size(), " parameters and ", other.parameters_.size());
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const auto& mine = parameters_[i];
    const auto& theirs = other.parameters_[i];
    if (mine.name != theirs.name || mine.sizes != theirs.sizes || mine.dtype != theirs.dtype) {
      return str("parameter ", i, " is ", mine.describe(), " and ", theirs.describe());
    }
  }
  if (buckets_.size() != other.buckets_.size()) return str(buckets_.size(), " buckets and ", other.buckets_.size());
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    if (buckets_[b].parameters == other.buckets_[b].parameters) continue;
    return str("bucket ", b, " has parameters ", join(buckets_[b].parameters, ","), " and ",
               join(other.buckets_[b].parameters, ","));
  }
  return "";
}

bool BucketPlan::operator==(const BucketPlan& other) const {
  return difference_from(other).empty();
}

std::ostream& operator<<(std::ostream& out, const BucketPlan& plan) {
  return out << plan.to_string();
}

std::vector<PlannedBucket> assign_buckets(const std::vector<ParameterInfo>& parameters,
                                          const std::vector<std::size_t>& caps_bytes,
                                          const std::vector<std::size_t>& order) {
  TORCH_CHECK(!parameters.empty(), "[lockstep/ddp] there are no parameters to put into buckets");
  TORCH_CHECK(!caps_bytes.empty(), "[lockstep/ddp] no bucket size limit was given");
  TORCH_CHECK(order.empty() || order.size() == parameters.size(), "[lockstep/ddp] the order lists ", order.size(),
              " of ", parameters.size(), " parameters");
  struct Filling {
    PlannedBucket bucket;
    std::size_t bytes = 0;
    std::size_t next_cap = 0;
  };
  // In order of their first member, so that what is left over at the end does not depend on a hash.
  std::vector<std::pair<std::pair<at::ScalarType, c10::Device>, Filling>> kinds;
  const auto filling_of = [&](const ParameterInfo& parameter) -> Filling& {
    const std::pair key(parameter.dtype, parameter.device);
    const auto found = std::find_if(kinds.begin(), kinds.end(), [&](const auto& kind) { return kind.first == key; });
    return found != kinds.end() ? found->second : kinds.emplace_back(key, Filling{}).second;
  };
  std::vector<PlannedBucket> buckets;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto index = order.empty() ? i : order[i];
    TORCH_CHECK(index < parameters.size(), "[lockstep/ddp] the order has index ", index, " of ", parameters.size(),
                " parameters");
    const auto& parameter = parameters[index];
    if (parameter.expects_sparse_gradient) {
      buckets.push_back({.parameters = {index}, .cap_bytes = kNoCap});
      continue;
    }
    auto& filling = filling_of(parameter);
    filling.bucket.parameters.push_back(index);
    filling.bucket.cap_bytes = caps_bytes[filling.next_cap];
    filling.bytes += parameter.bytes();
    if (filling.bytes < filling.bucket.cap_bytes) continue;
    buckets.push_back(std::exchange(filling.bucket, {}));
    filling.bytes = 0;
    filling.next_cap = std::min(filling.next_cap + 1, caps_bytes.size() - 1);
  }
  for (auto& [key, filling] : kinds) {
    if (!filling.bucket.parameters.empty()) buckets.push_back(std::move(filling.bucket));
  }
  if (order.empty()) {
    const auto smallest = [](const PlannedBucket& bucket) {
      return *std::min_element(bucket.parameters.begin(), bucket.parameters.end());
    };
    std::sort(buckets.begin(), buckets.end(),
              [&](const auto& one, const auto& other) { return smallest(one) < smallest(other); });
  }
  return buckets;
}

std::vector<PlannedBucket> compute_bucket_assignment_by_size(const std::vector<at::Tensor>& tensors,
                                                             const std::vector<std::size_t>& bucket_size_limits,
                                                             const std::vector<bool>& expect_sparse_gradient,
                                                             const std::vector<std::size_t>& tensor_indices) {
  TORCH_CHECK(expect_sparse_gradient.empty() || expect_sparse_gradient.size() == tensors.size(), "[lockstep/ddp] ",
              expect_sparse_gradient.size(), " flags were given for ", tensors.size(), " tensors");
  TORCH_CHECK(tensor_indices.empty() || tensor_indices.size() == tensors.size(), "[lockstep/ddp] ",
              tensor_indices.size(), " indices were given for ", tensors.size(), " tensors");
  std::vector<std::optional<ParameterInfo>> by_index(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    TORCH_CHECK(!tensors[i].is_sparse(), "[lockstep/ddp] tensor ", i,
                " is sparse: parameters must be dense, only their gradients may be sparse");
    const auto index = tensor_indices.empty() ? i : tensor_indices[i];
    TORCH_CHECK(index < tensors.size() && !by_index[index], "[lockstep/ddp] tensor ", i, " has index ", index, ", but ",
                tensors.size(), " tensors must have the indices 0 to ", tensors.size() - 1, ", each once");
    by_index[index] =
        info_of(str("tensor ", index), tensors[i], !expect_sparse_gradient.empty() && expect_sparse_gradient[index]);
  }
  std::vector<ParameterInfo> parameters;
  for (auto& info : by_index) parameters.push_back(std::move(*info));
  return assign_buckets(parameters, bucket_size_limits, tensor_indices);
}

std::vector<std::size_t> BucketCaps::as_list() const {
  if (!list.empty()) return list;
  return first_bytes < bytes ? std::vector{first_bytes, bytes} : std::vector{bytes};
}

BucketPlan first_plan(std::vector<ParameterInfo> parameters, const BucketCaps& caps, bool has_one_bucket) {
  const bool is_capped = !caps.list.empty() || !has_one_bucket;
  auto buckets = assign_buckets(parameters, is_capped ? caps.as_list() : std::vector{kNoCap});
  std::reverse(buckets.begin(), buckets.end());
  return {std::move(parameters), std::move(buckets)};
}

std::vector<PlannedBucket> buckets_of_runs(const std::vector<ParameterInfo>& parameters,
                                           const std::vector<std::vector<std::size_t>>& runs) {
  std::vector<PlannedBucket> planned;
  for (const auto& run : runs) {
    std::map<std::pair<at::ScalarType, std::string>, std::size_t> open;
    for (const auto index : run) {
      const auto& info = parameters[index];
      if (info.expects_sparse_gradient) {
        planned.push_back({.parameters = {index}});
        continue;
      }
      const auto [found, is_new] = open.try_emplace({info.dtype, info.device.str()}, planned.size());
      if (is_new) planned.emplace_back();
      planned[found->second].parameters.push_back(index);
    }
  }
  return planned;
}

BucketPlan rebuilt_plan(std::vector<ParameterInfo> parameters, const BucketCaps& caps,
                        const std::vector<std::size_t>& ready_order, bool has_small_bucket_last) {
  auto order = ready_order;
  if (has_small_bucket_last) std::reverse(order.begin(), order.end());
  auto buckets = assign_buckets(parameters, caps.as_list(), order);
  if (has_small_bucket_last) std::reverse(buckets.begin(), buckets.end());
  return {std::move(parameters), std::move(buckets)};
}

}  // namespace lockstep
