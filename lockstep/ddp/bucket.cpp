#include "lockstep/ddp/bucket.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/view_as_complex.h>
#include <c10/core/GradMode.h>

#include <utility>

#include "lockstep/base/observer.h"
#include "lockstep/base/str.h"

namespace lockstep::detail {
namespace {

bool keeps_strides(const at::Tensor& parameter) {
  return parameter.is_non_overlapping_and_dense();
}

}  // namespace

Bucket::Bucket(std::size_t index, const BucketPlan& plan, const std::vector<at::Tensor>& all_parameters,
               std::optional<at::ScalarType> dtype)
    : index_(index),
      members_(plan.buckets()[index].parameters),
      is_sparse_(plan.parameters()[members_[0]].expects_sparse_gradient) {
  const at::NoGradGuard no_grad;
  for (const auto member : members_) parameters_.push_back(all_parameters[member]);
  if (is_sparse_) {
    offsets_ = {0};
    lengths_ = {parameters_[0].numel()};
    return;
  }
  // As it was found: inside of another wrapper tensors may show low precision just now.
  const auto own = plan.parameters()[members_[0]].dtype;
  const auto element = dtype && c10::isFloatingType(own) ? *dtype : own;
  is_complex_ = c10::isComplexType(element);
  std::vector<std::vector<int64_t>> strides;
  for (const auto& parameter : parameters_) {
    offsets_.push_back(elements_);
    strides.push_back(keeps_strides(parameter) ? parameter.strides().vec() : std::vector<int64_t>());
    lengths_.push_back(parameter.numel() * (is_complex_ ? 2 : 1));
    elements_ += lengths_.back();
  }
  strides_ = std::make_shared<const std::vector<std::vector<int64_t>>>(std::move(strides));
  options_ = at::TensorOptions(is_complex_ ? c10::toRealValueType(element) : element).device(parameters_[0].device());
}

at::Tensor Bucket::detach_buffer() {
  return std::exchange(buffer_, at::Tensor());
}

void Bucket::attach_buffer(const at::Tensor& buffer) {
  buffer_ = buffer;
  // Mostly it is the one it had in the last step.
  if (buffer.const_data_ptr() == views_at_ && !views_.empty()) return;
  views_ = views_of(buffer);
  views_at_ = buffer.const_data_ptr();
}

std::vector<at::Tensor> Bucket::views_of(const at::Tensor& result) const {
  // Aliases that autograd does not track as views: Optimizer::zero_grad() detaches gradients in place, which it refuses
  // for views.
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  std::vector<at::Tensor> views;
  views.reserve(parameters_.size());
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const auto& parameter = parameters_[i];
    // Pairs of reals become complex first, so that strides count what they count in the parameter.
    auto part = result.narrow(0, offsets_[i], lengths_[i]);
    if (is_complex_) part = at::view_as_complex(part.view({-1, 2}));
    const auto& strides = (*strides_)[i];
    views.push_back(strides.empty() ? part.view(parameter.sizes()) : part.as_strided(parameter.sizes(), strides));
  }
  return views;
}

void Bucket::set_sparse_gradient(at::Tensor gradient, std::optional<at::Tensor> rows) {
  buffer_ = std::move(gradient);
  sparse_rows_ = std::move(rows);
}

GradBucket Bucket::as_grad_bucket(std::size_t bucket_count, const at::Tensor& buffer, const GroupPtr& group) const {
  return GradBucket({.index = index_,
                     .bucket_count = bucket_count,
                     .buffer = buffer,
                     .offsets = offsets_,
                     .lengths = lengths_,
                     .parameters = parameters_,
                     .strides = strides_,
                     .sparse_rows = sparse_rows_,
                     .group = group.get()});
}

void note_bucket(const Bucket& bucket, const char* state, std::size_t bytes) {
  if (!is_observed()) return;
  Event event;
  event.kind = "bucket";
  event.unit = str("bucket ", bucket.index());
  event.state = state;
  event.bytes = bytes;
  announce(std::move(event));
}

}  // namespace lockstep::detail
