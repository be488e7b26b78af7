#include "lockstep/ddp/default_hooks.h"

#include <ATen/ops/ones.h>
#include <c10/core/GradMode.h>

#include "lockstep/base/str.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/world.h"

namespace lockstep {
namespace {

/// `result` in the dtype of `buffer`; in its memory, which is there anyway, unless sparse.
at::Tensor decompressed(const at::Tensor& buffer, const at::Tensor& result) {
  if (buffer.is_sparse()) return result.to(buffer.scalar_type());
  const at::NoGradGuard no_grad;
  return buffer.copy_(result);
}

CommHook compress_hook(const std::string& name, at::ScalarType dtype, const GroupPtr& group) {
  return {.name = name, .run = [dtype, group](GradBucket& bucket) {
            const at::NoGradGuard no_grad;
            const auto& buffer = bucket.buffer();
            return then(detail::average_future(buffer.to(dtype), detail::group_for(bucket, group)),
                        [buffer](const at::Tensor& result) { return decompressed(buffer, result); });
          }};
}

CommHook compress_wrapper(const std::string& name, at::ScalarType dtype, const CommHook& hook) {
  TORCH_CHECK(hook.run, "[lockstep/ddp] ", name, " was given no hook");
  const auto run = [dtype, inner = hook.run](GradBucket& bucket) {
    // The hook's future may look at its bucket until it completes.
    const auto low = std::make_shared<GradBucket>(bucket);
    low->set_buffer(bucket.buffer().to(dtype));
    const auto future = inner(*low);
    TORCH_CHECK(future, "the wrapped hook returned no future");
    return then(future,
                [buffer = bucket.buffer(), low](const at::Tensor& result) { return decompressed(buffer, result); });
  };
  return {.name = str(name, "(", hook.name, ")"), .run = run, .check = hook.check, .on_registered = hook.on_registered};
}

}  // namespace

namespace detail {

GroupPtr group_for(const GradBucket& bucket, const GroupPtr& group) {
  if (group) return group;
  auto of_wrapper = bucket.group();
  return of_wrapper ? of_wrapper : default_group();
}

FuturePtr average_future(const at::Tensor& tensor, const GroupPtr& group) {
  const at::NoGradGuard no_grad;
  tensor.div_(group->getSize());
  return all_reduce_future(tensor, group);
}

void check_can_sum(const std::string& what, at::ScalarType dtype, const GroupPtr& group, c10::Device device) {
  const auto refuse = [&](const std::string& reason) {
    TORCH_CHECK(false, "[lockstep/ddp] ", what, " needs sums of ", c10::toString(dtype), " on ", device.str(),
                ", which the backend '", backend_spec(group), "' of group '", group_name(group),
                "' cannot do: ", reason, ". Use fp16_compress_hook, or another backend.");
  };
  try {
    all_reduce(at::ones({1}, at::TensorOptions(dtype).device(device)), group);
  } catch (const c10::DistBackendError&) {
    throw;  // a peer's failure, which says nothing about the type
  } catch (const c10::Error& error) {
    refuse(error.what_without_backtrace());
  } catch (const std::exception& error) {
    refuse(error.what());
  }
}

}  // namespace detail

CommHook allreduce_hook(GroupPtr group) {
  return {.name = "allreduce_hook", .run = [group = std::move(group)](GradBucket& bucket) {
            return detail::average_future(bucket.buffer(), detail::group_for(bucket, group));
          }};
}

CommHook fp16_compress_hook(GroupPtr group) {  // NOLINT(performance-unnecessary-value-param)
  return compress_hook("fp16_compress_hook", at::kHalf, group);
}

CommHook bf16_compress_hook(GroupPtr group) {  // NOLINT(performance-unnecessary-value-param)
  auto hook = compress_hook("bf16_compress_hook", at::kBFloat16, group);
  hook.check = [group, name = hook.name](const GroupPtr& of_wrapper, c10::Device device) {
    detail::check_can_sum(name, at::kBFloat16, group ? group : of_wrapper, device);
  };
  return hook;
}

CommHook noop_hook() {
  return {.name = "noop_hook", .run = [](GradBucket& bucket) { return completed_future(bucket.buffer()); }};
}

CommHook fp16_compress_wrapper(const CommHook& hook) {
  return compress_wrapper("fp16_compress_wrapper", at::kHalf, hook);
}

CommHook bf16_compress_wrapper(const CommHook& hook) {
  auto wrapper = compress_wrapper("bf16_compress_wrapper", at::kBFloat16, hook);
  wrapper.check = [inner = hook.check, name = wrapper.name](const GroupPtr& group, c10::Device device) {
    detail::check_can_sum(name, at::kBFloat16, group, device);
    if (inner) inner(group, device);
  };
  return wrapper;
}

CommHook builtin_hook(BuiltinCommHookType type, GroupPtr group) {
  CommHook hook;
  switch (type) {
    case BuiltinCommHookType::kAllReduce:
      hook = allreduce_hook(std::move(group));
      hook.name = "BuiltinCommHookType.ALLREDUCE";
      return hook;
    case BuiltinCommHookType::kFp16Compress:
      hook = fp16_compress_hook(std::move(group));
      hook.name = "BuiltinCommHookType.FP16_COMPRESS";
      return hook;
  }
  TORCH_CHECK(false, "[lockstep/ddp] ", static_cast<int>(type), " is no built-in comm hook: there are kAllReduce and ",
              "kFp16Compress");
}

}  // namespace lockstep
