#include "lockstep/ddp/replica_check.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "lockstep/base/str.h"
#include "lockstep/comm/call_label.h"
#include "lockstep/comm/collectives.h"

namespace lockstep::detail {
namespace {

constexpr int64_t kSampled = 4;  // of each parameter, at most

/// From its middle: the first row of an embedding may be padding, which is never updated.
at::Tensor few_of(at::Tensor tensor) {
  if (tensor.is_complex()) tensor = at::view_as_real(tensor.resolve_conj());
  if (tensor.dim() == 0) tensor = tensor.reshape({1});
  while (tensor.dim() > 1) tensor = tensor.select(0, tensor.size(0) / 2);
  return tensor.narrow(0, 0, std::min(kSampled, tensor.size(0)));
}

/// How far elements may be apart, relative to the largest: machines of different kinds round differently.
double tolerance_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kBFloat16:
      return 0.03;
    case at::kHalf:
      return 0.004;
    default:
      return 1e-6;
  }
}

}  // namespace

at::Tensor sample_of(const std::vector<at::Tensor>& parameters) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> samples;
  for (const auto& parameter : parameters) {
    if (parameter.numel() == 0) continue;
    samples.push_back(few_of(parameter.detach()).to(parameters[0].device(), at::kDouble));
  }
  return samples.empty() ? at::Tensor() : at::cat(samples);
}

std::string difference_of(const at::Tensor& one, const at::Tensor& other, const ManagedParameters& parameters) {
  if (!one.defined()) return "";
  const auto ones = one.cpu();
  const auto others = other.cpu();
  const auto* a = ones.const_data_ptr<double>();
  const auto* b = others.const_data_ptr<double>();
  for (std::size_t i = 0; i < parameters.tensors.size(); ++i) {
    const auto& parameter = parameters.tensors[i];
    if (parameter.numel() == 0) continue;
    const auto count = few_of(parameter.detach()).size(0);
    double largest = 0;
    int64_t furthest = 0;
    for (int64_t j = 0; j < count; ++j) {
      largest = std::max({largest, std::abs(a[j]), std::abs(b[j])});
      if (std::abs(a[j] - b[j]) > std::abs(a[furthest] - b[furthest])) furthest = j;
    }
    if (std::abs(a[furthest] - b[furthest]) > tolerance_of(parameter.scalar_type()) * largest) {
      return str("parameter '", parameters.infos[i].name, "' is ", a[furthest], " and ", b[furthest]);
    }
    a += count;
    b += count;
  }
  return "";
}

void ReplicaCheck::begin(int64_t last) {
  reductions_ = 0;
  next_ = 2;  // the first step begins with the same parameters everywhere
  last_ = last;
}

void ReplicaCheck::prepare(const ManagedParameters& parameters, bool is_synced) {
  if (!is_next_compared() || is_from_local_forward_) return;
  sample_ = sample_of(parameters.tensors);
  is_from_local_forward_ = !is_synced;
}

std::string ReplicaCheck::on_reduction(const ManagedParameters& parameters, bool has_inputs, const GroupPtr& group) {
  const bool is_compared = is_next_compared();
  if (next_ != 0) ++reductions_;
  if (!is_compared) return "";
  next_ = 2 * next_ - 1;
  if (next_ > last_) stop();
  is_from_local_forward_ = false;
  const at::NoGradGuard no_grad;
  auto sample = has_inputs && sample_.defined() ? std::exchange(sample_, {}) : sample_of(parameters.tensors);
  if (!sample.defined()) return "";
  // Ranks without inputs may be behind, until the scope ends.
  if (!has_inputs) sample.fill_(-std::numeric_limits<double>::infinity());
  const auto both = at::cat({sample, has_inputs ? sample.neg() : sample});
  const LabelScope label({"DDP's comparison of replicas"});
  all_reduce(both, group, ReduceOp::MAX);
  const auto count = sample.numel();
  auto difference = difference_of(both.narrow(0, count, count).neg(), both.narrow(0, 0, count), parameters);
  if (!difference.empty()) stop();
  return difference;
}

}  // namespace lockstep::detail
