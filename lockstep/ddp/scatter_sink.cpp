#include "lockstep/ddp/scatter_sink.h"

#include <algorithm>

namespace lockstep::detail {
namespace {

int64_t longest_buffer(const GradientScatter& scatter, std::size_t buckets) {
  int64_t longest = 0;
  for (std::size_t i = 0; i < buckets; ++i) longest = std::max(longest, scatter.buffer_elements(i));
  return longest;
}

}  // namespace

ScatterSink::ScatterSink(const ReducerSetup& setup, std::shared_ptr<GradientScatter> scatter)
    : setup_(setup),
      scatter_(std::move(scatter)),
      pool_(longest_buffer(*scatter_, setup_.plan.buckets().size()), setup_.group) {}

void ScatterSink::attach_buffer(Bucket& bucket) {
  if (bucket.buffer().defined()) return;
  scatter_->begin_bucket(bucket.index());
  bucket.attach_buffer(pool_.acquire(bucket.buffer_options(), [this] { return wait_for_oldest(); }));
}

bool ScatterSink::replace_gradient(at::Tensor& grad, const at::Tensor& /*view*/) const {
  grad = at::Tensor();
  return true;
}

void ScatterSink::launch(Bucket& bucket) {
  scatter_->launch(bucket.index(), bucket.buffer());
  under_way_.push_back(&bucket);
}

bool ScatterSink::wait_for_oldest() {
  if (under_way_.empty()) return false;
  auto& bucket = *under_way_.front();
  scatter_->wait_for(bucket.index());
  under_way_.pop_front();
  pool_.release(bucket.detach_buffer());
  note_bucket(bucket, "done");
  return true;
}

void ScatterSink::wait_for(Bucket& bucket) {
  // They are waited for in the order they were launched in; this one may have been already, to make room.
  while (!under_way_.empty() && under_way_.front()->index() <= bucket.index()) wait_for_oldest();
}

void ScatterSink::write(std::vector<Bucket>& /*buckets*/, UsedMap* used, const StepTerms& /*terms*/) {
  std::vector<bool> is_used(setup_.parameters.size(), true);
  for (std::size_t i = 0; used != nullptr && i < is_used.size(); ++i) is_used[i] = used->is_used(i);
  scatter_->end_backward(is_used);
}

void ScatterSink::give_up(std::vector<Bucket>& buckets, const StepTerms& /*terms*/) {
  scatter_->give_up();
  under_way_.clear();
  // Other ranks may still read what is under way.
  for (auto& bucket : buckets) bucket.detach_buffer();
  pool_.forget();
}

}  // namespace lockstep::detail
