#include "lockstep/testing/combinations/trainer.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/randn.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/serialize.h>

#include <sstream>

#include "lockstep/base/str.h"

namespace lockstep::testing::combinations {
namespace {

constexpr uint64_t kOtherSeed = 1000;  // of nets that a saved one is loaded into

template <class Loaded>
void load(Loaded& what, const std::string& file) {
  std::istringstream stream(file);
  torch::load(what, stream);
}

std::string saved_model(const AnyNet& model) {
  std::ostringstream stream;
  torch::save(std::static_pointer_cast<torch::nn::Module>(model.net), stream);
  return stream.str();
}

void load(AnyNet& model, const std::string& file) {
  auto module = std::static_pointer_cast<torch::nn::Module>(model.net);
  load(module, file);
}

at::Tensor mean_square(const at::Tensor& values) {
  return values.pow(2).mean();
}

}  // namespace

std::string saved_optimizer(const torch::optim::Optimizer& optimizer) {
  std::ostringstream stream;
  torch::save(optimizer, stream);
  return stream.str();
}

void AnyOptimizer::step() const {
  if (!steps_in_backward) optimizer->step();
}

void AnyOptimizer::zero_grad() const {
  zero != nullptr ? zero->zero_grad() : optimizer->zero_grad();
}

void AnyOptimizer::add_param_group(const torch::optim::OptimizerParamGroup& group) const {
  zero != nullptr ? zero->add_param_group(group) : optimizer->add_param_group(group);
}

void Trainer::train() {
  run_epoch(0, kSecondEpoch);
  program_.event.run(*this);
  on_parameters_changed();
  run_epoch(kSecondEpoch, kSteps);
}

bool Trainer::has_inputs(int rank, int step) const {
  if (!program_.has_uneven_inputs || rank == program_.data_ranks - 1) return true;
  // Rank 0 has one batch in each epoch, the others miss the last one of the first.
  return rank == 0 ? step == 0 || step == kSecondEpoch : step != kSecondEpoch - 1;
}

void Trainer::run_epoch(int first_step, int end_step) {
  in_scope(
      [&] {
        for (int step = first_step; step < end_step; ++step) {
          if (has_step(step)) run_step(step);
        }
      },
      end_step - 1);
}

void Trainer::run_step(int step) {
  step_ = step;
  for (part_ = 0; part_ < parts_.size(); ++part_) {
    zero_grad();
    leaves_step_out_ = false;
    play_ranks();
    if (!leaves_step_out_) part().optimizer.step();
    on_parameters_changed();
  }
  part_ = 0;
  on_step(step);
}

void Trainer::zero_grad() {
  if (program_.zeroes_module) {
    part().model.net->zero_grad();
  } else {
    part().optimizer.zero_grad();
  }
}

at::Tensor batch_of(int step, int rank, int number) {
  auto generator = at::detail::createCPUGenerator((static_cast<uint64_t>(step) * 16 + static_cast<uint64_t>(rank)) * 4 +
                                                  static_cast<uint64_t>(number) + 1);
  // Ranks must not have gradients alike, else a missing average would hardly show.
  return at::randn({4, 4}, generator, at::TensorOptions(at::kFloat)) * (1 + 0.5 * rank) + 0.3 * rank;
}

at::Tensor Trainer::loss_of(const at::Tensor& input) {
  const auto choice = program_.kind.choice(step_, rank_);
  const auto run = [&](std::size_t index, const at::Tensor& data) {
    return forward_of(parts_[index])(data, choice).to(at::kFloat);
  };
  if (parts_.size() == 1) return mean_square(run(0, input) - 1);
  if (part_ == 0) return mean_square(run(0, input) - 1) + mean_square(run(0, run(1, input).detach()));
  return mean_square(run(0, run(1, input)) - 1);
}

at::Tensor Trainer::loss(int batch) {
  return loss_of(batch_of(step_, rank_, batch));
}

at::Tensor Trainer::loss_with_input_penalty() {
  const auto data = batch_of(step_, rank_).requires_grad_();
  const auto loss = loss_of(data);
  const auto gradient = torch::autograd::grad({loss}, {data}, /*grad_outputs=*/{}, /*retain_graph=*/true,
                                              /*create_graph=*/true)[0];
  return loss + 0.02 * gradient.pow(2).sum();
}

at::Tensor Trainer::weight_penalty() {
  at::Tensor sum;
  for (const auto& parameter : part().model.net->unique_parameters()) {
    if (!parameter.requires_grad()) continue;
    const auto square = parameter.abs().pow(2).sum();
    sum = sum.defined() ? sum + square : square;
  }
  return 0.1 * sum;
}

void Trainer::evaluate() {
  const at::NoGradGuard no_grad;
  auto& net = *part().model.net;
  net.eval();
  forward_of(part())(batch_of(step_, rank_, 1), program_.kind.choice(step_, rank_));
  net.train();
}

void Trainer::set_up(uint64_t seed) {
  for (auto& net : make_nets(program_.kind, seed)) parts_.push_back({.model = net});
  if (program_.event.begins_frozen) set_last_trainable(false);
  for (auto& each : parts_) wrap(each);
  for (auto& each : parts_) {
    each.first = saved_model(each.model);
    make_optimizer(each);
  }
  on_parameters_changed();
}

void Trainer::make_optimizer(Part& part) {
  auto parameters = part.model.net->unique_parameters();
  if (program_.event.begins_without_last) {
    for (const auto& [name, last] : part.model.net->last_layer()) {
      std::erase_if(parameters, [&last = last](const at::Tensor& each) { return each.is_same(last); });
    }
  }
  part.optimizer = made_optimizer(parameters, part);
}

void Trainer::load_first_model() {
  for (auto& each : parts_) load(each.model, each.first);
}

void Trainer::cast_there_and_back() {
  for (auto& each : parts_) {
    each.model.net->to(program_.kind.wide_dtype);
    each.model.net->to(program_.kind.dtype);
  }
}

void Trainer::set_last_trainable(bool is_trainable) {
  for (auto& each : parts_) {
    for (auto& [name, parameter] : each.model.net->last_layer()) {
      parameter.set_requires_grad(is_trainable);
      if (!is_trainable) parameter.mutable_grad().reset();
    }
  }
}

void Trainer::add_last_to_optimizer() {
  for (auto& each : parts_) {
    std::vector<at::Tensor> last;
    for (const auto& [name, parameter] : each.model.net->last_layer()) last.push_back(parameter);
    each.optimizer.add_param_group(torch::optim::OptimizerParamGroup(last));
  }
}

void Trainer::wrap_again() {
  for (auto& each : parts_) {
    each.ddp = {};
    wrap(each);
  }
}

void Trainer::save_and_resume() {
  const auto fresh = make_nets(program_.kind, kOtherSeed);
  for (std::size_t i = 0; i < parts_.size(); ++i) resume(parts_[i], fresh[i]);
}

void Trainer::resume(Part& part, const AnyNet& fresh) {
  const auto model_file = saved_model(part.model);
  const auto optimizer_file = saved(part.optimizer);
  part = {.model = fresh, .first = part.first};
  // Files of layers that are divided hold parts.
  const bool are_parts = program_.wrapper.tp_size > 1;
  if (!are_parts) load(part.model, model_file);
  wrap(part);
  if (are_parts) load(part.model, model_file);
  make_optimizer(part);
  load(*part.optimizer.optimizer, optimizer_file);
}

namespace {

void add_to(Snapshot& result, const std::string& prefix, const torch::OrderedDict<std::string, at::Tensor>& tensors) {
  for (const auto& each : tensors) result.emplace_back(prefix + each.key(), each.value().detach().clone());
}

}  // namespace

Snapshot Trainer::parameters() const {
  Snapshot result;
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    add_to(result,
           parts_.size() == 1 ? ""
           : i == 0           ? "discriminator."
                              : "generator.",
           parts_[i].model.net->named_parameters());
  }
  return result;
}

Snapshot Trainer::snapshot() const {
  auto result = parameters();
  // At the end: only one rank has them.
  for (std::size_t i = 0; counts_buffers() && i < parts_.size(); ++i) {
    add_to(result, "", parts_[i].model.net->named_buffers());
  }
  return result;
}

}  // namespace lockstep::testing::combinations
