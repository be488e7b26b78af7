// One bucket of a plan at work: the flat buffer that is reduced, and each parameter's view of it. Internal to ddp.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

#include "lockstep/comm/pending.h"
#include "lockstep/ddp/bucket_plan.h"
#include "lockstep/ddp/comm_hook.h"
#include "lockstep/ddp/stream_join.h"

namespace lockstep::detail {

class Bucket {
 public:
  /// Without a buffer. `dtype` replaces the parameters' own if they are reduced in another.
  Bucket(std::size_t index, const BucketPlan& plan, const std::vector<at::Tensor>& all_parameters,
         std::optional<at::ScalarType> dtype);

  std::size_t index() const { return index_; }
  std::size_t size() const { return members_.size(); }
  bool is_sparse() const { return is_sparse_; }
  /// Index in the plan of the member at `place`.
  std::size_t parameter_index(std::size_t place) const { return members_[place]; }
  const at::Tensor& parameter(std::size_t place) const { return parameters_[place]; }
  /// Where the gradient of the member at `place` is written before the reduction. Dense buckets only.
  const at::Tensor& view(std::size_t place) const { return views_[place]; }
  /// Views of `result`, which is as long as the buffer, in the places of view().
  std::vector<at::Tensor> views_of(const at::Tensor& result) const;

  const at::Tensor& buffer() const { return buffer_; }
  const at::TensorOptions& buffer_options() const { return options_; }
  /// What a dense bucket's gradients need; a buffer may be longer.
  int64_t elements() const { return elements_; }
  /// Dense buckets only. Gradients lie at the buffer's beginning.
  void attach_buffer(const at::Tensor& buffer);
  /// The buffer, which is no longer the bucket's; undefined if it has none.
  at::Tensor detach_buffer();
  /// Sparse buckets only: the gradient itself is what is reduced.
  void set_sparse_gradient(at::Tensor gradient, std::optional<at::Tensor> rows);
  const std::optional<at::Tensor>& sparse_rows() const { return sparse_rows_; }

  /// As hooks see it.
  GradBucket as_grad_bucket(std::size_t bucket_count, const at::Tensor& buffer, const GroupPtr& group) const;

  /// How far it has come in one backward; the reducer's, and its sink's.
  struct Progress {
    std::size_t gradients_missing = 0;
    /// Places whose gradients are still to be copied in, with the gradients.
    std::vector<std::pair<std::size_t, at::Tensor>> deferred = {};
    /// Places whose gradients are there, but still to be divided.
    std::vector<std::size_t> undivided = {};
    /// Others are divided already.
    bool has_divided = false;
    /// Gradients were made, or copied in, on these.
    StreamJoin streams = {};
    bool is_launched = false;
    bool is_skipped = false;
    std::optional<Pending> reduction = std::nullopt;      // without a hook
    FuturePtr future = nullptr;                           // with one
    std::shared_ptr<GradBucket> given_to_hook = nullptr;  // lives as long as the hook may look at it
    at::Tensor result = {};                               // once it has arrived
    std::vector<bool> is_consumed = {};                   // by place, once the consumer was asked
  };
  Progress progress;

 private:
  const std::size_t index_;
  const std::vector<std::size_t> members_;
  const bool is_sparse_;
  std::vector<at::Tensor> parameters_;
  bool is_complex_ = false;       // then the buffer is real, two elements for each
  std::vector<int64_t> offsets_;  // in elements of the buffer
  /// Of parameters when the bucket was made: whoever divides it counts elements so. Empty where they are not kept.
  std::shared_ptr<const std::vector<std::vector<int64_t>>> strides_;
  std::vector<int64_t> lengths_;
  int64_t elements_ = 0;
  at::TensorOptions options_;
  at::Tensor buffer_;
  std::vector<at::Tensor> views_;
  const void* views_at_ = nullptr;  // the memory that views_ are of
  std::optional<at::Tensor> sparse_rows_;
};

/// Tells observers what happens to a bucket.
void note_bucket(const Bucket& bucket, const char* state, std::size_t bytes = 0);

}  // namespace lockstep::detail
