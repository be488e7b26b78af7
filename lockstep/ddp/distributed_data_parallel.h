// DistributedDataParallel: a module whose gradients are averaged over the ranks while backward still runs.
//
//   auto world = lockstep::init();
//   Net net;
//   lockstep::DistributedDataParallel ddp(net, world.group());
//   auto loss = ddp(batch).sum();
//   loss.backward();      // on return every rank's .grad is the mean over the ranks
//
// The wrapper is a torch::nn::Module with one child, "module". It is not copied; keep it until backward has run.
// Constructor, forward of a synced step and its backward are collective over the group. What can be asked of it is in
// DdpBase. See docs/ddp.md.
#pragma once

#include <ATen/record_function.h>
#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "lockstep/ddp/ddp_base.h"
#include "lockstep/ddp/scatter_gather.h"
#include "lockstep/nn/module_cast.h"
#include "lockstep/nn/wrapped_module.h"

namespace lockstep {

template <class M>
class DistributedDataParallel : public WrappedModule<M>, public DdpBase {
 public:
  /// Collective over the group.
  explicit DistributedDataParallel(M module, const DdpOptions& options = {})
      : WrappedModule<M>("DistributedDataParallel", std::move(module)),
        DdpBase(detail::as_module(this->module()), options) {}
  DistributedDataParallel(M module, const GroupPtr& group, DdpOptions options = {})
      : DistributedDataParallel(std::move(module), with_group(std::move(options), group)) {}

  /// What the module's forward takes and returns.
  template <class... Args>
  auto forward(Args&&... args) {
    RECORD_FUNCTION("DistributedDataParallel.forward", std::vector<c10::IValue>());
    return WrappedModule<M>::forward(std::forward<Args>(args)...);
  }
  template <class... Args>
  auto operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

  /// As holders are used: ddp->forward(batch), ddp->train(). Members of the module are ddp.module()->weight.
  DistributedDataParallel* operator->() { return this; }
  const DistributedDataParallel* operator->() const { return this; }

  /// A batch in parts along options.dim, one per device, and back; see scatter_gather.h.
  template <class Tree>
  std::vector<Tree> scatter(const Tree& inputs, const std::vector<c10::Device>& devices) const {
    return scatter_to_devices(inputs, devices, options().dim);
  }
  template <class Tree>
  Tree gather(const std::vector<Tree>& outputs, c10::Device output_device) const {
    return gather_from_devices(outputs, output_device, options().dim);
  }

  /// Wraps a copy of the module, which must be cloneable, with the same options. Collective. Hooks are not copied.
  std::shared_ptr<torch::nn::Module> clone(const std::optional<c10::Device>& device = std::nullopt) const override {
    check_clone();
    const auto copy = detail::as_module(this->module())->clone(device);
    return std::make_shared<DistributedDataParallel>(detail::module_cast<M>(copy), process_group(), options());
  }

 protected:
  void pre_forward() override { begin_forward(); }
  void post_forward(const std::vector<at::Tensor*>& outputs) override { end_forward(outputs); }
  void enter_inner() override { enter_module(); }
  void leave_inner() noexcept override { leave_module(); }
  bool changes_inputs() const override { return casts_or_moves_inputs(); }
  at::Tensor prepare_input(const at::Tensor& input) const override { return cast_and_move(input); }
};

template <class M>
DistributedDataParallel(M) -> DistributedDataParallel<M>;
template <class M>
DistributedDataParallel(M, DdpOptions) -> DistributedDataParallel<M>;
template <class M>
DistributedDataParallel(M, GroupPtr) -> DistributedDataParallel<M>;
template <class M>
DistributedDataParallel(M, GroupPtr, DdpOptions) -> DistributedDataParallel<M>;

}  // namespace lockstep
