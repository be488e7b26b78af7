#include "lockstep/ddp/added_gradients.h"

#include <c10/util/Exception.h>

namespace lockstep::detail {

void AddedGradients::watch(bool is_watched) {
  is_watched_ = is_watched && !has_warned_;
  if (!is_watched_) averages_.clear();
}

void AddedGradients::note_averages(const ReducerSetup& setup, const GradientAccess& access) {
  averages_.clear();
  if (!is_watched_) return;
  for (const auto& parameter : setup.parameters) {
    access.with_gradient(parameter, [&](at::Tensor& gradient) {
      const bool has_version = gradient.defined() && gradient.layout() == at::kStrided && gradient.has_storage();
      averages_.push_back(has_version ? Average{gradient.unsafeGetTensorImpl(), gradient._version()} : Average{});
      return false;
    });
  }
}

void AddedGradients::look_at(std::size_t parameter, const ReducerSetup& setup, const GradientAccess& access) {
  if (averages_.empty()) return;
  const auto& before = averages_[parameter];
  bool is_added = false;
  access.with_gradient(setup.parameters[parameter], [&](at::Tensor& gradient) {
    // Adding counts one version more; whoever zeroes or replaces a gradient first leaves other traces.
    is_added = gradient.defined() && gradient.unsafeGetTensorImpl() == before.gradient &&
               gradient._version() == before.version + 1;
    return false;
  });
  if (!is_added) return;
  has_warned_ = true;
  watch(false);
  TORCH_WARN(
      setup.who(), ": in a Join scope the gradient of parameter '", setup.name_of(parameter), "' was added to an ",
      "average that was not zeroed. Ranks that have run out of inputs add nothing to it, so the earlier average ",
      "is divided once more, as in Python: its part of the step becomes smaller. Zero gradients after each ",
      "averaged backward, and accumulate under no_sync().");
}

}  // namespace lockstep::detail
