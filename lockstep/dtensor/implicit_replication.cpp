#include "lockstep/dtensor/implicit_replication.h"

#include <memory>
#include <optional>

#include "lockstep/dtensor/autograd.h"
#include "lockstep/dtensor/dtensor.h"
#include "lockstep/dtensor/rule.h"
#include "lockstep/intercept/operator_call.h"

namespace lockstep {
namespace {

/// Above autograd, so that what it makes of the arguments is recorded.
class ReplicateArguments : public OperatorScope {
 public:
  ReplicateArguments() : OperatorScope(Sees::kLeaves) {}

  void on_operator(OperatorCall& call) override {
    const auto mesh = mesh_of(call);
    if (mesh) {
      const bool has_rule = detail::find_op_rule(call.op()) != nullptr;
      for (std::size_t i = 0; i < call.argument_count(); ++i) {
        auto& value = call.argument(i);
        if (value.isTensor()) value = converted(value.toTensor(), *mesh, has_rule);
        if (value.isTensorList()) {
          c10::List<at::Tensor> list;
          for (const at::Tensor& each : value.toTensorList()) list.push_back(converted(each, *mesh, has_rule));
          value = std::move(list);
        }
        if (value.isOptionalTensorList()) {
          c10::List<std::optional<at::Tensor>> list;
          for (const std::optional<at::Tensor>& each : value.toOptionalTensorList()) {
            list.push_back(each ? std::optional(converted(*each, *mesh, has_rule)) : std::nullopt);
          }
          value = std::move(list);
        }
      }
    }
    call.proceed();
  }

 private:
  static std::optional<DeviceMesh> mesh_of(const OperatorCall& call) {
    std::optional<DeviceMesh> mesh;
    for_each_tensor(call, [&](const at::Tensor& tensor, std::size_t) {
      const auto* impl = detail::dtensor_impl(tensor);
      if (impl != nullptr && !mesh) mesh = impl->mesh();
    });
    return mesh;
  }

  static at::Tensor converted(const at::Tensor& tensor, const DeviceMesh& mesh, bool has_rule) {
    if (!tensor.defined()) return tensor;
    const Placements whole(static_cast<std::size_t>(mesh.ndim()), Replicate());
    if (!is_dtensor(tensor)) return has_rule ? DTensor::from_local(tensor, mesh, whole).tensor() : tensor;
    return has_rule ? tensor : DTensor(tensor).full_tensor();
  }
};

}  // namespace

ImplicitReplication::ImplicitReplication() : scope_(std::make_shared<ReplicateArguments>()) {}

}  // namespace lockstep
