// Communication hooks: what is done with a bucket of gradients instead of averaging it over the ranks.
//
// A hook gets the bucket when its turn comes, with gradients that are not yet divided, and returns a future of the
// tensor that shall take their place: as large as the bucket and on its device. Hooks run on the thread that computes
// gradients and must not block longer than it takes to launch what they launch.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/futures.h"
#include "lockstep/comm/group.h"

namespace lockstep {

/// The gradients that are reduced together, in one flat tensor.
class GradBucket {
 public:
  struct Parts {
    std::size_t index = 0;
    std::size_t bucket_count = 1;
    at::Tensor buffer = {};
    std::vector<int64_t> offsets = {};
    std::vector<int64_t> lengths = {};
    std::vector<at::Tensor> parameters = {};
    /// How each gradient lies in the buffer; empty where it is contiguous. Null: like its parameter.
    std::shared_ptr<const std::vector<std::vector<int64_t>>> strides = nullptr;
    /// Row ids of a sparse gradient's buffer, if they were set beforehand.
    std::optional<at::Tensor> sparse_rows = std::nullopt;
    /// Not kept alive, not even weakly: a future may be the last to hold its bucket, on a thread of the group, which
    /// could not end itself there.
    c10d::ProcessGroup* group = nullptr;
  };
  explicit GradBucket(Parts parts) : parts_(std::move(parts)) {}

  /// Its place in the plan. After the first step buckets may be laid out anew: what a hook remembers belongs to
  /// parameters(), not to this number.
  std::size_t index() const { return parts_.index; }
  /// The last one to be reduced in this backward.
  bool is_last() const { return parts_.index + 1 == parts_.bucket_count; }
  const at::Tensor& buffer() const { return parts_.buffer; }
  void set_buffer(at::Tensor buffer) { parts_.buffer = std::move(buffer); }
  /// Views of the buffer, one per parameter, of its sizes and (if it was dense when the bucket was made) the
  /// strides it had then; the buffer itself if the gradient is sparse.
  std::vector<at::Tensor> gradients() const;
  /// In the order of gradients().
  const std::vector<at::Tensor>& parameters() const { return parts_.parameters; }
  const std::optional<at::Tensor>& sparse_rows() const { return parts_.sparse_rows; }
  /// The wrapper's: over whose ranks the gradients are to be averaged. Null if no wrapper made the bucket. To be asked
  /// while the hook runs, not by futures.
  GroupPtr group() const { return parts_.group != nullptr ? GroupPtr::reclaim_copy(parts_.group) : nullptr; }

 private:
  Parts parts_;
};

struct CommHook {
  std::string name = "";  // for messages and the log
  std::function<FuturePtr(GradBucket& bucket)> run = nullptr;
  /// Asked at registration, with the wrapper's group and device: throws if these cannot do what the hook needs. May be
  /// collective.
  std::function<void(const GroupPtr& group, c10::Device device)> check = nullptr;
  /// Told when it has been registered. Hooks that wrap others pass it on.
  std::function<void()> on_registered = nullptr;
};

/// Called as hook(bucket).
template <class Hook>
concept BucketHook = std::is_invocable_r_v<FuturePtr, Hook, GradBucket&>;
/// Called as hook(state, bucket).
template <class Hook, class State>
concept StatefulBucketHook = std::is_invocable_r_v<FuturePtr, Hook, State&, GradBucket&>;

/// A future that has its tensor.
FuturePtr completed_future(const at::Tensor& tensor);

/// The tensor a hook's future holds: it may be one, or the first of a list. Waits; throws what the future holds.
at::Tensor tensor_of(c10::ivalue::Future& future);

/// A future of change(tensor), which is run when `future` has its tensor.
FuturePtr then(const FuturePtr& future, std::function<at::Tensor(const at::Tensor& tensor)> change);

/// Sums `tensor` over the ranks, in place, and has it. Local sums of sparse tensors too.
FuturePtr all_reduce_future(const at::Tensor& tensor, const GroupPtr& group);

}  // namespace lockstep
