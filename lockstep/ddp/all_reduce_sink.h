// Averages in .grad: buckets are summed over the ranks, or given to a comm hook, and written back. Internal to ddp.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/ddp/comm_hook.h"
#include "lockstep/ddp/gradient_sink.h"
#include "lockstep/ddp/reducer_setup.h"

namespace lockstep {

/// Who uses reduced gradients up, in plan order, instead of having them in .grad.
struct GradientConsumer {
  /// Returns true if it has used the gradient up; .grad is then left alone.
  std::function<bool(std::size_t index, const at::Tensor& gradient)> take = nullptr;
  /// May be called while backward computes later gradients, for buckets that have arrived with all before them. Such
  /// buckets are final: they stay used up if the step fails afterwards.
  bool is_eager = false;
};

namespace detail {

class AllReduceSink final : public GradientSink {
 public:
  /// `setup` outlives it.
  explicit AllReduceSink(const ReducerSetup& setup) : setup_(setup) {}

  /// Refuses a second one, or any if the slot is taken.
  void set_hook(CommHook hook);
  /// Somebody else has taken the hook's place; hooks are refused with this reason. Empty: nobody has.
  void reserve_hook_slot(std::string reason) { hook_slot_taken_by_ = std::move(reason); }
  const std::string& hook_slot_taken_by() const { return hook_slot_taken_by_; }
  bool has_hook() const { return hook_.has_value(); }
  const std::string& hook_name() const;
  /// The hook, or the plain sum.
  FuturePtr run_hook(GradBucket& bucket) const;
  FuturePtr run_plain_sum(GradBucket& bucket) const;
  void set_consumer(GradientConsumer consumer) { consumer_ = std::move(consumer); }
  bool has_consumer() const { return consumer_.take != nullptr; }

  using CopyInto = std::function<void(const at::Tensor& to, const at::Tensor& from)>;
  /// A reduced gradient becomes the parameter's own, by `copy` if there is one to be overwritten.
  void write_gradient(std::size_t index, const at::Tensor& gradient, const GradientAccess& access,
                      const CopyInto& copy) const;
  /// Of a bucket that has arrived, by place.
  std::vector<at::Tensor> reduced_gradients(const Bucket& bucket) const;

  /// Buckets are about to be used for gradients that are not in .grad: what is there, as a part of a bucket, keeps its
  /// memory.
  void part_from_gradients(std::vector<Bucket>& buckets);

  void set_up(Bucket& bucket) override;
  void begin_backward() override { next_to_consume_ = 0; }
  double scale(double divisor) const override;
  bool is_identity(double divisor) const override;
  void attach_buffer(Bucket& bucket) override;
  bool replace_gradient(at::Tensor& grad, const at::Tensor& view) const override;
  void launch(Bucket& bucket) override;
  void use_arrived(std::vector<Bucket>& buckets, std::size_t launched, const UsedMap* used) override;
  void wait_for(Bucket& bucket) override;
  void write(std::vector<Bucket>& buckets, UsedMap* used, const StepTerms& terms) override;
  void give_up(std::vector<Bucket>& buckets, const StepTerms& terms) override;

 private:
  [[noreturn]] void fail_for_hook(const Bucket& bucket, const std::exception& error) const;
  at::Tensor result_of(const Bucket& bucket) const;
  at::Tensor sparse_gradient(const Bucket& bucket) const;
  void offer(Bucket& bucket, const std::vector<at::Tensor>& reduced, const std::function<bool(std::size_t)>& is_used);
  void write_dense(Bucket& bucket, UsedMap* used, const StepTerms& terms);
  void write_sparse(Bucket& bucket, UsedMap* used, const StepTerms& terms);

  const ReducerSetup& setup_;
  std::optional<CommHook> hook_;
  std::string hook_slot_taken_by_;
  GradientConsumer consumer_;
  std::size_t next_to_consume_ = 0;
};

}  // namespace detail
}  // namespace lockstep
