#include "lockstep/ddp/gradient_intake.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <utility>

#include "lockstep/base/str.h"
#include "lockstep/nn/gradient_copy.h"

namespace lockstep::detail {

void GradientIntake::check_gradient(const Bucket& bucket, std::size_t place, const at::Tensor& grad) {
  const auto& view = bucket.view(place);
  const auto& name = setup_.name_of(bucket.parameter_index(place));
  if (grad.layout() != at::kStrided) {
    setup_.fail(str(setup_.who(), ": parameter '", name, "' got a sparse gradient, which was not expected. Only ",
                    "Embedding and EmbeddingBag with sparse(true) may have them."));
  }
  const auto dtype = setup_.plan.parameters()[bucket.parameter_index(place)].dtype;
  if (grad.scalar_type() != dtype) {
    setup_.fail(str(setup_.who(), ": gradient of parameter '", name, "' is ", c10::toString(grad.scalar_type()),
                    ", but its bucket was made for ", c10::toString(dtype),
                    ". Wrap the module again after its dtype has changed."));
  }
  if (has_warned_of_strides_ || grad.strides() == view.strides() || grad.numel() <= 1) return;
  // Strides of dims of one element mean nothing.
  for (int64_t dim = 0; dim < grad.dim(); ++dim) {
    if (grad.size(dim) == 1 || grad.stride(dim) == view.stride(dim)) continue;
    has_warned_of_strides_ = true;
    TORCH_WARN(setup_.who(), ": gradient of parameter '", name, "' has strides [", join(grad.strides(), ", "),
               "], its bucket [", join(view.strides(), ", "), "]: the copy is slower than it could be.");
    return;
  }
}

void GradientIntake::take(Bucket& bucket, std::size_t place, const StepTerms& terms, GradientSink& sink) {
  sink.attach_buffer(bucket);
  bucket.progress.streams.note(bucket.parameter(place).device());
  bucket.is_sparse() ? take_sparse(bucket, terms) : take_dense(bucket, place, terms, sink);
}

bool GradientIntake::puts_off(const at::Tensor& grad, const at::Tensor& view) const {
  // Copied first and divided afterwards, what loses digits on the way in would lose them twice.
  return setup_.options.batched_grad_copy || (view.is_cuda() && grad.scalar_type() == view.scalar_type());
}

void GradientIntake::take_dense(Bucket& bucket, std::size_t place, const StepTerms& terms, const GradientSink& sink) {
  const bool has_graph = c10::GradMode::is_enabled();
  const at::NoGradGuard no_grad;
  const auto& view = bucket.view(place);
  terms.access.with_gradient(bucket.parameter(place), [&](at::Tensor& grad) {
    if (!grad.defined()) {
      if (!terms.is_identity) view.zero_();
      return false;
    }
    check_gradient(bucket, place, grad);
    if (terms.is_identity) return false;
    auto& progress = bucket.progress;
    if (grad.is_alias_of(view)) {
      if (view.is_cuda() && !has_graph) {
        progress.undivided.push_back(place);
      } else {
        progress.has_divided = true;
        if (terms.scale != 1) view.mul_(terms.scale);
      }
      return false;
    } else if (!has_graph && puts_off(grad, view)) {
      progress.deferred.emplace_back(place, grad);
    } else {
      progress.has_divided = true;
      copy_scaled(view, grad, terms.scale);
    }
    return !terms.access.is_elsewhere() && sink.replace_gradient(grad, view);
  });
}

void GradientIntake::copy_deferred(Bucket& bucket, const StepTerms& terms) {
  auto& progress = bucket.progress;
  const bool has_other_streams = progress.streams.join_into_current();
  const auto deferred = std::exchange(progress.deferred, {});
  const auto undivided = std::exchange(progress.undivided, {});
  if (deferred.empty() && undivided.empty()) return;
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> to;
  std::vector<at::Tensor> from;
  for (const auto& [place, grad] : deferred) {
    to.push_back(bucket.view(place));
    from.push_back(grad);
    if (has_other_streams) keep_for_current_stream(grad);
  }
  // What is neither was zeroed: dividing it changes nothing.
  const bool is_divided_at_once = bucket.buffer().is_cuda() ? !progress.has_divided : deferred.size() == bucket.size();
  if (is_divided_at_once) return copy_all_scaled(to, from, bucket.buffer(), terms.scale);
  for (std::size_t i = 0; i < to.size(); ++i) copy_scaled(to[i], from[i], terms.scale);
  for (const auto place : undivided) bucket.view(place).mul_(terms.scale);
}

at::Tensor GradientIntake::over_known_rows(const at::Tensor& gradient, const at::Tensor& rows,
                                           const std::string& name) const {
  auto sizes = gradient.sizes().vec();
  sizes[0] = rows.numel();
  const auto places = at::searchsorted(rows, gradient.indices());
  const bool has_rows = rows.numel() > 0 || places.numel() == 0;
  if (!has_rows || !at::equal(rows.index({places[0].clamp_max(rows.numel() - 1)}), gradient.indices()[0])) {
    setup_.fail(str(setup_.who(), ": the sparse gradient of parameter '", name, "' has rows that its sparse metadata ",
                    "lacks. Set the rows of all ranks together, sorted."));
  }
  auto dense = at::zeros(sizes, gradient.values().options());
  dense.index_add_(0, places[0], gradient.values());
  return dense;
}

void GradientIntake::take_sparse(Bucket& bucket, const StepTerms& terms) {
  const at::NoGradGuard no_grad;
  const auto& name = setup_.name_of(bucket.parameter_index(0));
  terms.access.with_gradient(bucket.parameter(0), [&](at::Tensor& grad) {
    if (!grad.defined() || !grad.is_sparse()) {
      setup_.fail(str(setup_.who(), ": parameter '", name, "' belongs to a layer with sparse gradients, but got ",
                      grad.defined() ? "a dense one" : "none", "."));
    }
    auto gradient = setup_.options.reduce_dtype ? grad.to(*setup_.options.reduce_dtype) : grad;
    std::optional<at::Tensor> rows;
    if (!terms.sparse_metadata.empty()) {
      const auto found = terms.sparse_metadata.find(name);
      if (found == terms.sparse_metadata.end()) {
        setup_.fail(str(setup_.who(), ": sparse metadata was set, but not for parameter '", name, "'."));
      }
      rows = found->second.to(at::kLong).to(grad.device());
      // Dense over the rows all ranks have together: a plain sum will do.
      gradient = over_known_rows(gradient.coalesce(), *rows, name);
    }
    if (terms.scale != 1) gradient = gradient.mul(terms.scale);
    bucket.set_sparse_gradient(gradient, rows);
    return false;
  });
}

void GradientIntake::take_leftovers(Bucket& bucket, const StepTerms& terms, GradientSink& sink) {
  bool is_there = true;
  if (bucket.is_sparse()) {
    terms.access.with_gradient(bucket.parameter(0), [&](at::Tensor& grad) {
      is_there = grad.defined();
      return false;
    });
  }
  if (!is_there) return take_zeros(bucket, terms, sink);
  for (std::size_t place = 0; place < bucket.size(); ++place) take(bucket, place, terms, sink);
}

void GradientIntake::take_zeros(Bucket& bucket, const StepTerms& terms, GradientSink& sink) {
  sink.attach_buffer(bucket);
  if (!bucket.is_sparse()) {
    bucket.buffer().zero_();
    // Ranks with inputs zero theirs. A parameter that nobody uses in this backward must not be stepped with an old one.
    for (std::size_t place = 0; place < bucket.size(); ++place) {
      terms.access.with_gradient(bucket.parameter(place), [](at::Tensor& grad) {
        grad = at::Tensor();
        return true;
      });
    }
    return;
  }
  const auto& parameter = bucket.parameter(0);
  auto no_rows = parameter.sizes().vec();
  no_rows[0] = 0;
  const auto dtype = setup_.options.reduce_dtype.value_or(parameter.scalar_type());
  bucket.set_sparse_gradient(
      at::sparse_coo_tensor(at::empty({1, 0}, parameter.options().dtype(at::kLong)),
                            at::empty(no_rows, parameter.options().dtype(dtype)), parameter.sizes()),
      std::nullopt);
}

}  // namespace lockstep::detail
