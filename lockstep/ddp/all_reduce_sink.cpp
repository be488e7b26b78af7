#include "lockstep/ddp/all_reduce_sink.h"

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/utils/grad_layout_contract.h>

#include <algorithm>

#include "lockstep/base/str.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/nn/gradient_copy.h"
#include "lockstep/shard/buffer.h"

namespace lockstep::detail {
namespace {

std::string reason_of(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  return torch_error != nullptr ? torch_error->what_without_backtrace() : error.what();
}

bool has_arrived(const Bucket::Progress& progress) {
  return progress.reduction ? progress.reduction->is_completed() : progress.future && progress.future->completed();
}

/// Copies that are made at once where that is cheaper than one by one, as on all devices but the CPU.
class Copies {
 public:
  void add(const at::Tensor& to, const at::Tensor& from) {
    if (to.device().is_cpu() || to.scalar_type() != from.scalar_type()) return copy_plain(to, from);
    to_.push_back(to);
    from_.push_back(from);
  }
  void run() const {
    if (!to_.empty()) at::_foreach_copy_(to_, from_);
  }

 private:
  std::vector<at::Tensor> to_;
  std::vector<at::Tensor> from_;
};

}  // namespace

void AllReduceSink::set_hook(CommHook hook) {
  TORCH_CHECK(hook.run, setup_.who(), ": register_comm_hook was given no hook");
  TORCH_CHECK(hook_slot_taken_by_.empty(), setup_.who(), ": a comm hook cannot be registered: ", hook_slot_taken_by_);
  TORCH_CHECK(!hook_, setup_.who(), ": a comm hook is registered already: '", hook_name(), "'. There can be one.");
  if (hook.check) hook.check(setup_.group, setup_.parameters[0].device());
  hook_ = std::move(hook);
}

const std::string& AllReduceSink::hook_name() const {
  static const std::string none = "none";
  return hook_ ? hook_->name : none;
}

FuturePtr AllReduceSink::run_hook(GradBucket& bucket) const {
  return hook_ ? hook_->run(bucket) : run_plain_sum(bucket);
}

FuturePtr AllReduceSink::run_plain_sum(GradBucket& bucket) const {
  return all_reduce_future(bucket.buffer(), setup_.group);
}

// ---- the way in ----

void AllReduceSink::set_up(Bucket& bucket) {
  attach_buffer(bucket);
  if (!setup_.options.gradient_as_bucket_view || bucket.is_sparse()) return;
  // Gradients that are there already move in.
  const at::NoGradGuard no_grad;
  for (std::size_t place = 0; place < bucket.size(); ++place) {
    const auto& view = bucket.view(place);
    auto& grad = bucket.parameter(place).mutable_grad();
    if (!grad.defined() || grad.is_alias_of(view) || grad.scalar_type() != view.scalar_type()) continue;
    copy_plain(view, grad);
    grad = view;
  }
}

void AllReduceSink::part_from_gradients(std::vector<Bucket>& buckets) {
  if (!setup_.options.gradient_as_bucket_view) return;
  for (auto& bucket : buckets) {
    bool is_shared = false;
    for (std::size_t place = 0; !bucket.is_sparse() && place < bucket.size(); ++place) {
      const auto& grad = bucket.parameter(place).grad();
      is_shared = is_shared || (grad.defined() && bucket.buffer().defined() && grad.is_alias_of(bucket.view(place)));
    }
    if (is_shared) bucket.detach_buffer();
    attach_buffer(bucket);
  }
}

double AllReduceSink::scale(double divisor) const {
  // Hooks divide by the number of ranks themselves.
  return (hook_ ? static_cast<double>(setup_.group->getSize()) : 1.0) / divisor;
}

bool AllReduceSink::is_identity(double divisor) const {
  return setup_.group->getSize() == 1 && !hook_ && !has_consumer() && !setup_.options.gradient_as_bucket_view &&
         divisor == 1;
}

void AllReduceSink::attach_buffer(Bucket& bucket) {
  // A sparse bucket's buffer is its gradient.
  if (bucket.is_sparse() || bucket.buffer().defined()) return;
  bucket.attach_buffer(allocate_buffer(bucket.elements(), bucket.buffer_options(), setup_.group));
}

bool AllReduceSink::replace_gradient(at::Tensor& grad, const at::Tensor& view) const {
  if (!setup_.options.gradient_as_bucket_view) return false;
  grad = view;
  return true;
}

void AllReduceSink::fail_for_hook(const Bucket& bucket, const std::exception& error) const {
  const auto message = str(setup_.who(), ": comm hook '", hook_name(), "' failed on ",
                           setup_.bucket_text(bucket.index()), ": ", reason_of(error));
  // Programs tell a peer that is gone from a hook that is wrong by the type.
  if (dynamic_cast<const c10::DistBackendError*>(&error) != nullptr) C10_THROW_ERROR(DistBackendError, message);
  TORCH_CHECK(false, message);
}

void AllReduceSink::launch(Bucket& bucket) {
  auto& progress = bucket.progress;
  if (!hook_ && !bucket.is_sparse()) {
    progress.reduction = launch_all_reduce(bucket.buffer(), setup_.group);
    return;
  }
  progress.given_to_hook =
      std::make_shared<GradBucket>(bucket.as_grad_bucket(setup_.plan.buckets().size(), bucket.buffer(), setup_.group));
  try {
    progress.future = run_hook(*progress.given_to_hook);
    TORCH_CHECK(progress.future, "it returned no future");
  } catch (const std::exception& error) {
    fail_for_hook(bucket, error);
  }
}

// ---- the way back ----

at::Tensor AllReduceSink::result_of(const Bucket& bucket) const {
  detail::wait_for(*bucket.progress.future, setup_.group, "what a comm hook has launched");
  const auto result = tensor_of(*bucket.progress.future);
  if (bucket.is_sparse()) {
    const auto& rows = bucket.sparse_rows();
    TORCH_CHECK(!rows || (!result.is_sparse() && result.size(0) == rows->numel()), "its result has ", result.size(0),
                " rows, but the sparse metadata ", rows->numel());
    return result;
  }
  const auto& buffer = bucket.buffer();
  TORCH_CHECK(result.numel() == buffer.numel() && result.device() == buffer.device(), "its result has ", result.numel(),
              " elements on ", result.device().str(), ", the bucket ", buffer.numel(), " on ", buffer.device().str());
  return result.is_same(buffer) ? buffer : result.reshape({-1});
}

void AllReduceSink::wait_for(Bucket& bucket) {
  auto& progress = bucket.progress;
  if (progress.result.defined()) return;
  if (progress.reduction) {
    progress.reduction->wait();
    progress.result = bucket.buffer();
    return;
  }
  try {
    progress.result = result_of(bucket);
  } catch (const std::exception& error) {
    fail_for_hook(bucket, error);
  }
}

at::Tensor AllReduceSink::sparse_gradient(const Bucket& bucket) const {
  const auto& parameter = bucket.parameter(0);
  auto gradient = bucket.progress.result;
  if (const auto& rows = bucket.sparse_rows()) {
    gradient = at::sparse_coo_tensor(rows->view({1, -1}), gradient, parameter.sizes());
  }
  return gradient.to(parameter.scalar_type());
}

std::vector<at::Tensor> AllReduceSink::reduced_gradients(const Bucket& bucket) const {
  if (bucket.is_sparse()) return {sparse_gradient(bucket)};
  if (!bucket.progress.result.is_same(bucket.buffer())) return bucket.views_of(bucket.progress.result);
  std::vector<at::Tensor> views;
  for (std::size_t place = 0; place < bucket.size(); ++place) views.push_back(bucket.view(place));
  return views;
}

void AllReduceSink::use_arrived(std::vector<Bucket>& buckets, std::size_t launched, const UsedMap* used) {
  if (!has_consumer() || !consumer_.is_eager) return;
  const at::NoGradGuard no_grad;
  for (; next_to_consume_ < launched; ++next_to_consume_) {
    auto& bucket = buckets[next_to_consume_];
    if (bucket.progress.is_skipped || bucket.is_sparse()) continue;
    if (!has_arrived(bucket.progress)) return;
    for (std::size_t place = 0; used != nullptr && place < bucket.size(); ++place) {
      // Whether another rank has used it is known at the end.
      if (!used->is_marked(bucket.parameter_index(place))) return;
    }
    wait_for(bucket);
    offer(bucket, reduced_gradients(bucket), [](std::size_t) { return true; });
  }
}

void AllReduceSink::offer(Bucket& bucket, const std::vector<at::Tensor>& reduced,
                          const std::function<bool(std::size_t)>& is_used) {
  auto& is_consumed = bucket.progress.is_consumed;
  if (!is_consumed.empty()) return;
  is_consumed.assign(bucket.size(), false);
  for (std::size_t place = 0; place < bucket.size(); ++place) {
    const auto index = bucket.parameter_index(place);
    if (is_used(index)) is_consumed[place] = consumer_.take(index, reduced[place]);
  }
}

void AllReduceSink::write(std::vector<Bucket>& buckets, UsedMap* used, const StepTerms& terms) {
  for (auto& bucket : buckets) {
    if (bucket.progress.is_skipped) continue;
    bucket.is_sparse() ? write_sparse(bucket, used, terms) : write_dense(bucket, used, terms);
    note_bucket(bucket, "done");
  }
}

void AllReduceSink::write_gradient(std::size_t index, const at::Tensor& gradient, const GradientAccess& access,
                                   const CopyInto& copy) const {
  const auto& parameter = setup_.parameters[index];
  access.with_gradient(parameter, [&](at::Tensor& grad) {
    const auto full = setup_.plan.parameters()[index].dtype;
    if (gradient.is_sparse()) {
      grad = gradient;
    } else if (grad.defined()) {
      copy(grad, gradient);
    } else if (gradient.scalar_type() != full) {
      grad = gradient.to(full, /*non_blocking=*/false, /*copy=*/true);
    } else {
      grad = torch::autograd::utils::clone_obey_contract(gradient, parameter);
    }
    return true;
  });
}

void AllReduceSink::write_dense(Bucket& bucket, UsedMap* used, const StepTerms& terms) {
  const auto& options = setup_.options;
  const auto& result = bucket.progress.result;
  const bool is_in_place = result.is_same(bucket.buffer());
  const auto reduced = is_in_place && !has_consumer() ? std::vector<at::Tensor>() : reduced_gradients(bucket);
  const auto is_used = [&](std::size_t index) { return used == nullptr || used->is_used(index); };
  if (has_consumer()) offer(bucket, reduced, is_used);
  const auto& is_consumed = bucket.progress.is_consumed;
  Copies copies;
  const CopyInto put = [&](const at::Tensor& to, const at::Tensor& from) { copies.add(to, from); };
  for (std::size_t place = 0; place < bucket.size(); ++place) {
    const auto index = bucket.parameter_index(place);
    if (!is_used(index) || (!is_consumed.empty() && is_consumed[place])) continue;
    const auto& view = bucket.view(place);
    const auto& gradient = is_in_place ? view : reduced[place];
    const auto& parameter = bucket.parameter(place);
    if (!options.gradient_as_bucket_view || terms.access.is_elsewhere()) {
      if (!terms.is_identity) write_gradient(index, gradient, terms.access, put);
      continue;
    }
    if (!is_in_place) copies.add(view, gradient);
    terms.access.with_gradient(parameter, [&](at::Tensor& grad) {
      TORCH_CHECK(!grad.defined() || grad.is_alias_of(view), setup_.who(), ": gradient of parameter '",
                  setup_.name_of(index), "' is no longer its part of the bucket, though gradient_as_bucket_view is ",
                  "on: something else replaced it during backward.");
      if (!grad.defined()) grad = view;
      return true;
    });
  }
  copies.run();
}

void AllReduceSink::write_sparse(Bucket& bucket, UsedMap* used, const StepTerms& terms) {
  const auto gradient = sparse_gradient(bucket);
  if (has_consumer()) {
    offer(bucket, {gradient}, [&](std::size_t index) { return used == nullptr || used->is_used(index); });
    if (bucket.progress.is_consumed[0]) return;
  }
  write_gradient(bucket.parameter_index(0), gradient, terms.access, copy_plain);
}

void AllReduceSink::give_up(std::vector<Bucket>& buckets, const StepTerms& terms) {
  for (auto& bucket : buckets) {
    // A callback of the hook's may still look at what the hook was given.
    const auto& future = bucket.progress.future;
    if (future) future->addCallback([kept = bucket.progress.given_to_hook](c10::ivalue::Future&) {});
    if (bucket.is_sparse()) continue;
    if (setup_.options.gradient_as_bucket_view && !terms.access.is_elsewhere()) {
      // Some are sums already, others are not: they mean nothing any more.
      for (std::size_t place = 0; place < bucket.size(); ++place) {
        terms.access.with_gradient(bucket.parameter(place), [&](at::Tensor& grad) {
          if (!grad.defined() || !grad.is_alias_of(bucket.view(place))) return false;
          grad = at::Tensor();
          return true;
        });
      }
    }
    // Other ranks may still read and write it.
    if (bucket.progress.is_launched) bucket.detach_buffer();
  }
}

}  // namespace lockstep::detail
