// The part of the Reducer that moves gradients: into buckets when they are computed, and back when they are reduced.
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/utils/grad_layout_contract.h>

#include "lockstep/base/str.h"
#include "lockstep/ddp/reducer.h"
#include "lockstep/nn/gradient_copy.h"

namespace lockstep {

void Reducer::check_gradient(const detail::Bucket& bucket, std::size_t place, const at::Tensor& grad) {
  const auto& view = bucket.view(place);
  const auto& name = name_of(bucket.parameter_index(place));
  if (grad.layout() != at::kStrided) {
    fail(str(who(), ": parameter '", name, "' got a sparse gradient, which was not expected. Only Embedding and ",
             "EmbeddingBag with sparse(true) may have them."));
  }
  if (grad.scalar_type() != view.scalar_type()) {
    fail(str(who(), ": gradient of parameter '", name, "' is ", c10::toString(grad.scalar_type()),
             ", but its bucket holds ", c10::toString(view.scalar_type()), "."));
  }
  if (has_warned_of_strides_ || grad.strides() == view.strides() || grad.numel() <= 1) return;
  // Strides of dims of one element mean nothing.
  for (int64_t dim = 0; dim < grad.dim(); ++dim) {
    if (grad.size(dim) == 1 || grad.stride(dim) == view.stride(dim)) continue;
    has_warned_of_strides_ = true;
    TORCH_WARN(who(), ": gradient of parameter '", name, "' has strides [", join(grad.strides(), ", "),
               "], its bucket [", join(view.strides(), ", "), "]: the copy is slower than it could be.");
    return;
  }
}

void Reducer::take_dense_gradient(detail::Bucket& bucket, std::size_t place) {
  const bool has_graph = c10::GradMode::is_enabled();
  const at::NoGradGuard no_grad;
  const auto& view = bucket.view(place);
  access_.with_gradient(bucket.parameter(place), [&](at::Tensor& grad) {
    if (!grad.defined()) {
      if (!is_identity()) view.zero_();
      return false;
    }
    check_gradient(bucket, place, grad);
    if (is_identity()) return false;
    if (leaves_out_own_) {
      view.zero_();
    } else if (grad.is_alias_of(view)) {
      if (scale() != 1) view.mul_(scale());
      return false;
    } else if (options_.batched_grad_copy && !has_graph) {
      bucket.deferred.emplace_back(place, grad);
    } else {
      detail::copy_scaled(view, grad, scale());
    }
    if (scatter_) {
      grad = at::Tensor();
      return true;
    }
    if (!options_.gradient_as_bucket_view) return false;
    grad = view;
    return true;
  });
}

void Reducer::copy_deferred(detail::Bucket& bucket) {
  if (bucket.deferred.empty()) return;
  const at::NoGradGuard no_grad;
  if (bucket.deferred.size() == bucket.size()) {
    std::vector<at::Tensor> to;
    std::vector<at::Tensor> from;
    for (const auto& [place, grad] : bucket.deferred) {
      to.push_back(bucket.view(place));
      from.push_back(grad);
    }
    detail::copy_all_scaled(to, from, bucket.buffer(), scale());
  } else {
    // The others are in place already, divided.
    for (const auto& [place, grad] : bucket.deferred) detail::copy_scaled(bucket.view(place), grad, scale());
  }
  bucket.deferred.clear();
}

void Reducer::take_sparse_gradient(detail::Bucket& bucket) {
  const at::NoGradGuard no_grad;
  const auto index = bucket.parameter_index(0);
  access_.with_gradient(bucket.parameter(0), [&](at::Tensor& grad) {
    if (!grad.defined() || !grad.is_sparse()) {
      fail(str(who(), ": parameter '", name_of(index), "' belongs to a layer with sparse gradients, but got ",
               grad.defined() ? "a dense one" : "none", "."));
    }
    auto gradient = grad;
    std::optional<at::Tensor> rows;
    if (!sparse_metadata_.empty()) {
      const auto found = sparse_metadata_.find(name_of(index));
      if (found == sparse_metadata_.end()) {
        fail(str(who(), ": sparse metadata was set, but not for parameter '", name_of(index), "'."));
      }
      rows = found->second.to(at::kLong).to(grad.device());
      gradient = grad.coalesce();
      auto sizes = gradient.sizes().vec();
      sizes[0] = rows->numel();
      const auto places = at::searchsorted(*rows, gradient.indices());
      const bool has_rows = rows->numel() > 0 || places.numel() == 0;
      if (!has_rows || !at::equal(rows->index({places[0].clamp_max(rows->numel() - 1)}), gradient.indices()[0])) {
        fail(str(who(), ": the sparse gradient of parameter '", name_of(index), "' has rows that its sparse metadata ",
                 "lacks. Set the rows of all ranks together, sorted."));
      }
      // Dense over the rows all ranks have together: a plain sum will do.
      auto dense = at::zeros(sizes, gradient.values().options());
      dense.index_add_(0, places[0], gradient.values());
      gradient = dense;
    }
    if (leaves_out_own_) {
      gradient = at::zeros_like(gradient);
    } else if (scale() != 1) {
      gradient = gradient.mul(scale());
    }
    bucket.set_sparse_gradient(gradient, rows);
    return false;
  });
}

void Reducer::write_dense_gradients(detail::Bucket& bucket, const at::Tensor& result) {
  const bool is_in_place = result.is_same(bucket.buffer());
  const auto views = is_in_place ? std::vector<at::Tensor>() : bucket.views_of(result);
  const bool can_be_unused = is_static_graph_ || options_.find_unused_parameters;
  for (std::size_t place = 0; place < bucket.size(); ++place) {
    const auto index = bucket.parameter_index(place);
    if (can_be_unused && !used_.is_used(index)) continue;
    const auto& view = bucket.view(place);
    const auto& reduced = is_in_place ? view : views[place];
    const auto& parameter = bucket.parameter(place);
    if (consumer_ && consumer_(index, reduced)) continue;
    if (!options_.gradient_as_bucket_view) {
      if (is_identity()) continue;
      access_.with_gradient(parameter, [&](at::Tensor& grad) {
        const auto full = plan_.parameters()[index].dtype;
        if (options_.gradient_dtype || (!grad.defined() && reduced.scalar_type() != full)) {
          grad = reduced.to(full, /*non_blocking=*/false, /*copy=*/true);
        } else if (grad.defined()) {
          detail::copy_plain(grad, reduced);
        } else {
          grad = torch::autograd::utils::clone_obey_contract(reduced, parameter);
        }
        return true;
      });
      continue;
    }
    if (!is_in_place) detail::copy_plain(view, reduced);
    access_.with_gradient(parameter, [&](at::Tensor& grad) {
      if (!grad.defined()) {
        grad = view;
      } else if (!grad.is_alias_of(view)) {
        fail(str(who(), ": gradient of parameter '", name_of(index), "' is no longer its part of the bucket, though ",
                 "gradient_as_bucket_view is on: something else replaced it during backward."));
      }
      return true;
    });
  }
}

void Reducer::write_sparse_gradient(detail::Bucket& bucket, const at::Tensor& result) {
  const auto index = bucket.parameter_index(0);
  const auto& parameter = bucket.parameter(0);
  auto gradient = result;
  if (const auto& rows = bucket.sparse_rows()) {
    if (result.is_sparse() || result.size(0) != rows->numel()) {
      fail(str(who(), ": sparse gradient of parameter '", name_of(index), "' has ", result.size(0), " rows, but its ",
               "metadata ", rows->numel(), "."));
    }
    gradient = at::sparse_coo_tensor(rows->view({1, -1}), result, parameter.sizes());
  }
  access_.with_gradient(parameter, [&](at::Tensor& grad) {
    grad = gradient;
    return true;
  });
}

}  // namespace lockstep
