#include "lockstep/intercept/deferred_init.h"

#include <ATen/ops/empty_strided.h>
#include <c10/core/InferenceMode.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <map>
#include <vector>

#include "lockstep/intercept/operator_call.h"
#include "lockstep/intercept/recording.h"
#include "lockstep/intercept/scope_frame.h"
#include "lockstep/intercept/shape_run.h"
#include "lockstep/intercept/tensor_access.h"

namespace lockstep {
namespace {

bool returns_tensors(const c10::FunctionSchema& schema) {
  return std::any_of(schema.returns().begin(), schema.returns().end(), [](const c10::Argument& result) {
    return result.type()->isSubtypeOf(*c10::TensorType::get()) ||
           result.type()->isSubtypeOf(*c10::ListType::ofTensors());
  });
}

/// Turns what makes tensors from nothing over to the recording. Operators on tensors of the recording reach it by
/// themselves, inside of the scope and after.
class FactoryScope : public OperatorScope {
 public:
  explicit FactoryScope(at::Device device)
      : OperatorScope(Sees::kProgram), recording_(std::make_shared<detail::Recording>(device)) {}

  void on_operator(OperatorCall& call) override {
    bool has_tensor = false;
    bool has_deferred = false;
    for_each_tensor(call, [&](const at::Tensor& tensor, std::size_t) {
      has_tensor = true;
      has_deferred = has_deferred || is_deferred(tensor);
    });
    if (!has_tensor && returns_tensors(call.schema())) return recording_->run_factory(call);
    TORCH_CHECK(!has_tensor || has_deferred || !detail::is_random(call.op()),
                "[lockstep/intercept] deferred_init: ", call.name(),
                " draws random numbers for a tensor that has memory. Which ones an ordinary build would "
                "draw is not known before the others are drawn. Make the tensor inside of the scope too.");
    call.proceed();
  }

  detail::Recording& recording() { return *recording_; }

 private:
  const std::shared_ptr<detail::Recording> recording_;
};

bool is_inside_of_a_build() {
  for (auto frame = detail::innermost_scope(); frame; frame = frame->outer) {
    if (frame->is_open && dynamic_cast<FactoryScope*>(frame->scope.get()) != nullptr) return true;
  }
  return false;
}

void materialize(const std::vector<at::Tensor>& tensors) {
  std::map<std::shared_ptr<detail::Recording>, std::vector<at::Tensor>> by_recording;
  for (const auto& tensor : tensors) {
    if (auto* storage = detail::DeferredStorage::of(tensor)) by_recording[storage->recording()].push_back(tensor);
  }
  for (const auto& [recording, its_tensors] : by_recording) recording->materialize(its_tensors);
}

}  // namespace

struct DeferredInitScope::Build {
  explicit Build(at::Device device) : scope(std::make_shared<FactoryScope>(device)), entered(scope) {}

  std::shared_ptr<FactoryScope> scope;
  EnterScope entered;
};

DeferredInitScope::DeferredInitScope(DeferredInitOptions options) {
  TORCH_CHECK(!options.device.is_meta(),
              "[lockstep/intercept] deferred_init: the device is where tensors get memory, "
              "and meta has none. Name another.");
  if (!is_inside_of_a_build()) build_ = std::make_unique<Build>(options.device);
}

DeferredInitScope::~DeferredInitScope() {
  if (!build_) return;
  const auto scope = build_->scope;
  build_.reset();
  scope->recording().leave();
}

bool is_deferred(const at::Tensor& tensor) {
  return detail::DeferredStorage::of(tensor) != nullptr;
}

void materialize_tensor(const at::Tensor& tensor) {
  materialize({tensor});
}

void materialize_empty(const at::Tensor& tensor, at::Device device) {
  TORCH_CHECK(tensor.is_meta() && !is_deferred(tensor), "[lockstep/intercept] materialize_empty: a tensor on ",
              tensor.device(), " has memory already, or a value that materialize_tensor() gives it.");
  const c10::InferenceMode mode(tensor.is_inference());
  const auto memory = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device));
  detail::TensorAccess::adopt(*tensor.unsafeGetTensorImpl(), *memory.unsafeGetTensorImpl());
}

void materialize_module(const torch::nn::Module& module, MaterializeOptions options) {
  auto tensors = module.parameters(options.recurse);
  const auto buffers = module.buffers(options.recurse);
  tensors.insert(tensors.end(), buffers.begin(), buffers.end());
  materialize(tensors);
}

}  // namespace lockstep
