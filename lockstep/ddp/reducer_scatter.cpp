// The part of the Reducer that gives gradients to a GradientScatter instead of averaging them in .grad.
#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>

#include "lockstep/base/str.h"
#include "lockstep/ddp/reducer.h"

namespace lockstep {

void Reducer::set_scatter(const ScatterFactory& make, const std::string& reason) {
  const std::lock_guard lock(mutex_);
  const auto refuse_if = [&](bool is_wrong, const char* what) {
    TORCH_CHECK_VALUE(!is_wrong, who(), ": ", reason, ", which cannot be together with ", what);
  };
  TORCH_CHECK_VALUE(!scatter_, who(), ": ", reason, ", but another optimizer has them already");
  refuse_if(!hook_slot_taken_by_.empty(), hook_slot_taken_by_.c_str());
  refuse_if(hook_.has_value(), "a comm hook");
  refuse_if(consumer_ != nullptr, "optimizers that step in backward");
  refuse_if(options_.gradient_as_bucket_view, "gradient_as_bucket_view: there are no gradients to be views");
  refuse_if(options_.skip_all_reduce_unused_params, "skip_all_reduce_unused_params");
  for (const auto& bucket : buckets_) {
    refuse_if(bucket.is_sparse(), "sparse gradients");
    refuse_if(bucket.parameter(0).is_complex(), "complex parameters");
  }
  TORCH_CHECK(!has_begun_, who(), ": ", reason, ", which cannot begin while a backward is under way");
  auto plan = plan_;
  if (should_rebuild_buckets()) {
    std::vector<std::size_t> reversed(parameters_.size());
    std::iota(reversed.rbegin(), reversed.rend(), std::size_t{0});
    plan = rebuilt_plan(plan_.parameters(), options_.caps, reversed, /*has_small_bucket_last=*/false);
  }
  scatter_ = make(plan);
  plan_ = std::move(plan);
  int64_t longest = 0;
  for (std::size_t i = 0; i < plan_.buckets().size(); ++i) longest = std::max(longest, scatter_->buffer_elements(i));
  hook_slot_taken_by_ = reason;
  pool_.emplace(longest, group_);
  has_rebuilt_ = true;
  make_buckets();
}

void Reducer::clear_scatter() {
  const std::lock_guard lock(mutex_);
  if (!scatter_) return;
  forget_reduction();
  scatter_.reset();
  pool_.reset();
  hook_slot_taken_by_.clear();
  make_buckets();
}

int64_t Reducer::pool_bytes() const {
  const std::lock_guard lock(mutex_);
  return pool_ ? pool_->bytes() : 0;
}

void Reducer::lend_buffer(detail::Bucket& bucket) {
  if (bucket.buffer().defined()) return;
  bucket.lend(pool_->acquire(bucket.buffer_options(), [this] { return finish_oldest_scatter(); }));
}

bool Reducer::finish_oldest_scatter() {
  if (scattering_.empty()) return false;
  auto& bucket = buckets_[scattering_.front()];
  scatter_->finish(bucket.index());
  scattering_.pop_front();
  pool_->release(bucket.take_back());
  note_bucket(bucket, "done");
  return true;
}

void Reducer::end_scatter() {
  const bool can_be_unused = is_static_graph_ || options_.find_unused_parameters;
  std::vector<bool> is_used(parameters_.size(), true);
  for (std::size_t i = 0; can_be_unused && i < is_used.size(); ++i) is_used[i] = used_.is_used(i);
  scatter_->end_backward(is_used);
}

void Reducer::forget_scatter() {
  scatter_->forget();
  const bool has_none_lent =
      std::all_of(buckets_.begin(), buckets_.end(), [](const auto& bucket) { return !bucket.buffer().defined(); });
  if (has_none_lent) return;
  // Other ranks may still read what is under way.
  for (auto& bucket : buckets_) bucket.take_back();
  scattering_.clear();
  pool_->forget();
}

}  // namespace lockstep
