#include "lockstep/testing/fsdp/parity.h"

#include <torch/optim/sgd.h>

#include <algorithm>
#include <utility>

#include "lockstep/base/str.h"
#include "lockstep/ddp/distributed_data_parallel.h"
#include "lockstep/fsdp/state_dict.h"
#include "lockstep/nn/autocast.h"
#include "lockstep/nn/module_tensors.h"
#include "lockstep/shard/layout_of.h"
#include "lockstep/testing/checks.h"
#include "lockstep/testing/fsdp/states.h"

namespace lockstep::testing {
namespace {

std::optional<at::ScalarType> input_dtype(const TrainOptions& options, bool is_sharded) {
  if (options.use_pure_fp16) return at::kHalf;
  // The sharded model casts them itself.
  if (is_sharded || !options.mixed_precision) return std::nullopt;
  return options.mixed_precision->param_dtype;
}

std::vector<at::Tensor> inputs_of(FsdpTestModel& model, std::optional<at::ScalarType> dtype) {
  auto inputs = model.get_input(compute_device());
  for (auto& input : inputs) {
    if (dtype && input.is_floating_point()) input = input.to(*dtype);
  }
  return inputs;
}

void check_loss_dtype(const at::Tensor& loss, const TrainOptions& options, bool is_sharded) {
  auto expected = at::kFloat;
  if (options.use_pure_fp16) {
    expected = at::kHalf;
  } else if (options.mixed_precision) {
    const auto low = options.mixed_precision->param_dtype.value_or(at::kFloat);
    // On the CPU autocast leaves sums in low precision.
    if (is_sharded || loss.is_cpu()) expected = low;
    if (!is_sharded && loss.scalar_type() == at::kFloat) expected = at::kFloat;
  }
  if (loss.scalar_type() == expected) return;
  throw CheckFailure(lockstep::str("the loss is ", loss.scalar_type(), ", expected ", expected));
}

std::vector<at::Tensor> trained_parameters(const torch::nn::Module& model) {
  std::vector<at::Tensor> parameters;
  for (const auto& [name, tensor] : lockstep::detail::parameters_of(model, {})) parameters.push_back(tensor);
  return parameters;
}

/// What a save and a load do, with nothing left in between.
void save_and_load(FsdpTestModel& model) {
  const auto state = full_state_dict(model);
  zero_model(model);
  load_full_state_dict(model, state);
}

void check_offload(const torch::nn::Module& model, const std::string& when) {
  const auto units = units_of(model);
  const bool offloads = std::any_of(units.begin(), units.end(),
                                    [](const FsdpUnit& unit) { return unit.options().offload_policy.has_value(); });
  if (!offloads) return;
  for (const auto& item : model.named_parameters()) {
    if (item.value().is_cpu()) continue;
    throw CheckFailure(str("parameter '", item.key(), "' is on ", item.value().device().str(), " ", when,
                           "; it should be in host memory"));
  }
}

at::Tensor loss_of_step(FsdpTestModel& model, const TrainOptions& options, const ModelForward& forward,
                        bool is_sharded) {
  const auto device = compute_device().type();
  const auto dtype = options.mixed_precision ? options.mixed_precision->param_dtype : std::nullopt;
  const Autocast autocast(device, dtype, options.autocast);
  const auto inputs = inputs_of(model, input_dtype(options, is_sharded));
  return model.get_loss(inputs, forward ? forward(inputs) : model.forward(inputs));
}

ModelForward with_ddp(const std::shared_ptr<FsdpTestModel>& model, const GroupPtr& group) {
  using Ddp = DistributedDataParallel<std::shared_ptr<FsdpTestModel>>;
  const auto ddp = std::make_shared<Ddp>(model, DdpOptions{.process_group = group});
  return [ddp](const std::vector<at::Tensor>& input) { return ddp->forward(input); };
}

void compare_losses(const at::Tensor& sharded, const at::Tensor& reference) {
  const auto one = Tolerance::of(sharded.scalar_type());
  const auto other = Tolerance::of(reference.scalar_type());
  auto tolerance = one.relative > other.relative ? one : other;
  tolerance.compare_dtype = false;
  check_equal("loss", sharded.to(reference.device()), reference, tolerance);  // an offloaded model's is on the host
}

void compare_parameters(const ModuleState& sharded, const ModuleState& reference, double tolerance) {
  if (sharded.size() != reference.size()) {
    throw CheckFailure(str("the sharded model has ", sharded.size(), " parameters, the reference ", reference.size()));
  }
  for (const auto& [name, tensor] : reference) {
    const auto found = sharded.find(name);
    if (found == sharded.end()) throw CheckFailure(str("the sharded model has no parameter '", name, "'"));
    const auto what = str("parameter '", name, "'");
    const auto value = found->second.to(tensor.device());
    if (tolerance > 0) {
      check_equal(what, value, tensor, {.relative = tolerance, .absolute = tolerance});
    } else {
      check_parameter(what, value, tensor);
    }
  }
}

}  // namespace

at::Tensor train_for_several_steps(FsdpTestModel& model, int num_steps, const TrainOptions& options,
                                   const ModelForward& forward) {
  const bool is_sharded = !units_of(model).empty();
  const auto parameters = trained_parameters(model);
  const auto parameter_device = parameters.front().device();
  auto scaling = options.grad_scaler;
  scaling.enabled = options.enable_grad_scaler;
  scaling.device = compute_device().type();
  GradScaler scaler(scaling);
  torch::optim::SGD optimizer(parameters, torch::optim::SGDOptions(options.lr).momentum(0.9));
  at::Tensor loss;
  for (int step = 0; step < num_steps; ++step) {
    optimizer.zero_grad();
    loss = loss_of_step(model, options, forward, is_sharded).to(parameter_device);
    check_offload(model, "after forward");
    check_loss_dtype(loss, options, is_sharded);
    loss = scaler.scale(loss);
    model.run_backward(loss);
    check_offload(model, "after backward");
    scaler.step(optimizer);
    scaler.update();
    if (options.save_model) save_and_load(model);
  }
  check_units_are_idle(model);
  return loss.detach();
}

void test_fsdp_parity(const TestGroups& groups, const ParityOptions& options, const std::string& model_name,
                      const ModelInit& init) {
  TORCH_CHECK(options.fsdp_init_mode != FsdpInitMode::kNoFsdp,
              "[lockstep/testing] test_fsdp_parity() with kNoFsdp would compare a model with itself. Use kRecursive.");
  TestModelOptions how{.deterministic = true};
  if (options.use_pure_fp16) how.dtype = at::kHalf;
  TrainOptions training{.use_pure_fp16 = options.use_pure_fp16,
                        .enable_grad_scaler = options.enable_grad_scaler,
                        .grad_scaler = options.grad_scaler};
  if (options.fsdp.mp_policy.param_dtype) training.mixed_precision = options.fsdp.mp_policy;

  const auto reference = init(how);
  const auto forward = options.ref_init_fn ? options.ref_init_fn(reference) : with_ddp(reference, groups.shard);
  auto reference_training = training;
  reference_training.autocast = training.mixed_precision.has_value();
  const auto reference_loss = train_for_several_steps(*reference, options.num_iters, reference_training, forward);

  how.fsdp_init_mode = options.fsdp_init_mode;
  how.device_init_mode = options.device_init_mode;
  how.fsdp = with_mesh(options.fsdp, groups);
  std::shared_ptr<FsdpTestModel> sharded;
  try {
    sharded = init(how);
    wrap_if(!unit_of(*sharded), *sharded, how.fsdp);
  } catch (const std::exception& error) {
    throw CheckFailure(str("making ", model_name, " sharded: ", error.what()));
  }
  move_if(options.device_init_mode == DeviceInitMode::kAfter, *sharded);
  training.save_model = options.save_model;
  if (options.fsdp.offload_policy && options.device_init_mode == DeviceInitMode::kAfter && !compute_device().is_cpu()) {
    expect_error([&] { train_for_several_steps(*sharded, 1, training); }, {compute_device().str()});
    return;
  }
  check_offload(*sharded, "before training");
  const auto loss = train_for_several_steps(*sharded, options.num_iters, training);
  try {
    compare_losses(loss, reference_loss);
    const bool is_low = training.mixed_precision || options.use_pure_fp16;
    const auto params = get_full_params(*sharded);
    if (!is_low) compare_parameters(params, get_full_params(*reference), options.tolerance);
  } catch (const CheckFailure& failure) {
    throw CheckFailure(str(model_name, " sharded does not train as the reference: ", failure.what()));
  }
}

void check_sharded_parity(const torch::nn::Module& replicated, const torch::nn::Module& sharded,
                          const std::vector<std::string>& prefixes_to_ignore, double tolerance) {
  const auto expected = replicated.named_parameters();
  const auto actual = sharded.named_parameters();
  if (expected.size() != actual.size()) {
    throw CheckFailure(str("the sharded module has ", actual.size(), " parameters, the other ", expected.size()));
  }
  const Tolerance within{.relative = tolerance, .absolute = tolerance};
  for (std::size_t i = 0; i < actual.size(); ++i) {
    auto name = actual[i].key();
    for (const auto& prefix : prefixes_to_ignore) {
      for (auto at = name.find(prefix); at != std::string::npos; at = name.find(prefix)) name.erase(at, prefix.size());
    }
    if (name != expected[i].key()) {
      throw CheckFailure(str("parameter ", i, " is '", name, "', expected '", expected[i].key(), "'"));
    }
    const auto& shard = actual[i].value();
    const auto& whole = expected[i].value();
    const auto layout = layout_of(shard);
    if (!layout) throw CheckFailure(str("parameter '", name, "' is not a shard"));
    const auto& placements = layout->placements();
    const auto cuts = std::count_if(placements.begin(), placements.end(),
                                    [](const Placement& each) { return sharded_dim(each) == 0; });
    if (cuts > 1) {
      throw CheckFailure(str("parameter '", name, "' lies as ", layout->to_string(),
                             ", which FSDP cuts in another order than a layout does: it cannot be compared"));
    }
    check_equal(str("parameter '", name, "'"), shard.detach(), layout->cut(whole.detach()), within);
    const auto& gradient = whole.grad();
    check_equal(str("gradient of '", name, "'"), shard.grad(), gradient.defined() ? layout->cut(gradient) : gradient,
                within);
  }
}

}  // namespace lockstep::testing
