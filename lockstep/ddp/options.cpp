#include "lockstep/ddp/options.h"

#include <algorithm>

#include "lockstep/base/str.h"
#include "lockstep/comm/world.h"

namespace lockstep::detail {
namespace {

std::size_t bytes_of_mebibytes(double mebibytes) {
  TORCH_CHECK(mebibytes >= 0, "[lockstep/ddp] bucket_cap_mb is ", mebibytes, ": a size cannot be negative");
  return static_cast<std::size_t>(mebibytes * 1024 * 1024);
}

}  // namespace

BucketCaps caps_of(const DdpOptions& options) {
  BucketCaps caps;
  if (options.bucket_cap_mb) caps.first_bytes = caps.bytes = bytes_of_mebibytes(*options.bucket_cap_mb);
  for (const double cap : options.bucket_cap_mb_list) caps.list.push_back(bytes_of_mebibytes(cap));
  if (!caps.list.empty()) caps.first_bytes = caps.bytes = *std::max_element(caps.list.begin(), caps.list.end());
  return caps;
}

void check_options(const DdpOptions& options) {
  caps_of(options);
  const bool has_delayed = !options.delay_all_reduce_named_params.empty();
  const bool has_trigger = options.param_to_hook_all_reduce.defined();
  TORCH_CHECK(has_delayed == has_trigger, "[lockstep/ddp] ",
              has_delayed ? "delay_all_reduce_named_params is set, but param_to_hook_all_reduce is not"
                          : "param_to_hook_all_reduce is set, but delay_all_reduce_named_params is not",
              ": set both or neither");
  if (const auto& precision = options.mixed_precision) {
    for (const auto& dtype : {precision->param_dtype, precision->reduce_dtype, precision->buffer_dtype}) {
      TORCH_CHECK(!dtype || c10::isFloatingType(*dtype), "[lockstep/ddp] mixed_precision: ", c10::toString(*dtype),
                  " is no floating point dtype");
    }
  }
  if (options.per_parameter) {
    TORCH_CHECK(!options.bucket_cap_mb && options.bucket_cap_mb_list.empty() && !options.gradient_as_bucket_view &&
                    !options.find_unused_parameters && !options.static_graph && !options.batched_grad_copy &&
                    !options.skip_all_reduce_unused_params && !options.mixed_precision && !has_delayed,
                "[lockstep/ddp] per_parameter has no buckets: bucket_cap_mb, bucket_cap_mb_list, "
                "gradient_as_bucket_view, find_unused_parameters, static_graph, batched_grad_copy, "
                "skip_all_reduce_unused_params, mixed_precision and delayed reduction do not go with it");
  }
  if (options.recoverable) {
    const auto refuse_if = [](bool is_set, const char* what) {
      TORCH_CHECK(!is_set, "[lockstep/ddp] recoverable does not go with ", what);
    };
    refuse_if(options.gradient_as_bucket_view, "gradient_as_bucket_view: local gradients would be lost in the sums");
    refuse_if(options.per_parameter, "per_parameter, which has no end of a step to vote at");
    refuse_if(has_delayed, "delayed parameters");
    refuse_if(options.skip_all_reduce_unused_params, "skip_all_reduce_unused_params");
  }
  if (options.check_reduction) {
    TORCH_WARN("[lockstep/ddp] check_reduction is deprecated and has no effect");
  }
  if (options.broadcast_buffers && options.forward_sync_buffers) {
    TORCH_WARN("[lockstep/ddp] broadcast_buffers and forward_sync_buffers are both given: the former is ignored");
  }
}

GroupPtr group_of(const DdpOptions& options) {
  TORCH_CHECK(!options.process_group || !options.device_mesh,
              "[lockstep/ddp] process_group and device_mesh are both given: give one of them");
  if (options.device_mesh) {
    TORCH_CHECK(options.device_mesh->ndim() == 1, "[lockstep/ddp] device_mesh must have one axis, but is ",
                options.device_mesh->to_string(), ". Take a slice of it.");
    TORCH_CHECK(options.device_mesh->is_member(), "[lockstep/ddp] this rank is not in ",
                options.device_mesh->to_string());
    return options.device_mesh->get_group();
  }
  if (!options.process_group) return default_group();
  check_member(*options.process_group);
  return *options.process_group;
}

}  // namespace lockstep::detail
