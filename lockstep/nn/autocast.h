// Mixed precision by libtorch's autocast, as a scope: Python's torch.autocast.
//
//   const auto loss = [&] {
//     const lockstep::Autocast autocast(world.device().type(), at::kBFloat16);
//     return loss_of(ddp(batch.data), batch.target);
//   }();
//   loss.backward();  // outside of it
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <optional>

namespace lockstep {

/// While it lives, operators of this thread on tensors of `device` choose their precision, where it is enabled. Nests;
/// left by an exception, too, everything is as it was before. Local.
class Autocast {
 public:
  /// `dtype`: what products are computed in; without one, libtorch's for the device (bfloat16 on CPUs, half on GPUs).
  explicit Autocast(c10::DeviceType device, std::optional<at::ScalarType> dtype = std::nullopt, bool enabled = true);
  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  const c10::DeviceType device_;
  const bool was_enabled_;
  const at::ScalarType dtype_before_;
};

}  // namespace lockstep
