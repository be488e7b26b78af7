// Gradients divided among the ranks: whole ones are freed as soon as they are in a bucket, and what becomes of a full
// bucket is a GradientScatter's business. Buckets share a few buffers. Internal to ddp.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "lockstep/ddp/gradient_scatter.h"
#include "lockstep/ddp/gradient_sink.h"
#include "lockstep/ddp/reducer_setup.h"
#include "lockstep/shard/buffer_pool.h"

namespace lockstep::detail {

class ScatterSink final : public GradientSink {
 public:
  /// `scatter` was made for the setup's plan; `setup` outlives it.
  ScatterSink(const ReducerSetup& setup, std::shared_ptr<GradientScatter> scatter);

  int64_t pool_bytes() const { return pool_.bytes(); }
  std::optional<at::ScalarType> reduce_dtype() const { return scatter_->reduce_dtype(); }

  void set_up(Bucket& /*bucket*/) override {}
  double scale(double divisor) const override { return 1 / divisor; }
  bool is_identity(double /*divisor*/) const override { return false; }
  void attach_buffer(Bucket& bucket) override;
  bool replace_gradient(at::Tensor& grad, const at::Tensor& view) const override;
  void launch(Bucket& bucket) override;
  void wait_for(Bucket& bucket) override;
  void write(std::vector<Bucket>& buckets, UsedMap* used, const StepTerms& terms) override;
  void give_up(std::vector<Bucket>& buckets, const StepTerms& terms) override;

 private:
  /// Ends the oldest reduction that is under way; false if there is none.
  bool wait_for_oldest();

  const ReducerSetup& setup_;
  const std::shared_ptr<GradientScatter> scatter_;
  BufferPool pool_;
  std::deque<Bucket*> under_way_;  // in plan order
};

}  // namespace lockstep::detail
