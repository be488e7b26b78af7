#include "lockstep/tp/prepare.h"

#include <torch/nn/module.h>

#include <algorithm>

#include "lockstep/base/str.h"
#include "lockstep/dtensor/dtensor.h"
#include "lockstep/tp/layers.h"
#include "lockstep/tp/piece_sizes.h"
#include "lockstep/tp/prepared.h"

namespace lockstep {
namespace {

std::string text_of(const OptionalLayouts& layouts) {
  std::vector<std::string> texts;
  for (const auto& each : layouts) texts.push_back(each ? to_string(*each) : "none");
  return str("(", join(texts, ", "), ")");
}

void check_pairs(const OptionalLayouts& layouts, const OptionalLayouts& desired, const char* style, const char* what) {
  TORCH_CHECK(layouts.size() == desired.size(), "[lockstep/tp] ", style, ": ", what, "_layouts has ", layouts.size(),
              " and desired_", what, "_layouts ", desired.size(), ". Give both one for each ", what, ".");
}

[[noreturn]] void refuse_unprepared(const ParallelStyle& style, const torch::nn::Module& module,
                                    const std::string& path, const StyleContext& context, const char* instead) {
  TORCH_CHECK(false, "[lockstep/tp] rank ", context.divisions.mesh().get_rank(), ": ", style.to_string(), " for '",
              path, "', a ", module.name(), ": C++ modules have no hooks. Declare it as lockstep::Prepared<",
              module.name(), ">, or give ", instead, ".");
}

void refuse_twice(const ParallelStyle& style, const std::string& path, const StyleContext& context) {
  TORCH_CHECK(false, "[lockstep/tp] rank ", context.divisions.mesh().get_rank(), ": ", style.to_string(), ": '", path,
              "' has been prepared before. Name a module once, with PrepareModuleInputOutput for both.");
}

constexpr auto kInputAdvice = "input_layouts to the layers inside of it that use its input";
constexpr auto kOutputAdvice = "output_layouts to the layer that makes its output";

/// A layer whose parameters become replicas, prepared at the operator that uses them.
bool apply_to_layer(torch::nn::Module& module, const std::string& path, const StyleContext& context,
                    const PrepareInputOptions& input, std::optional<Placement> output, bool use_local_output) {
  using detail::LayerKind;
  const auto layer = detail::layer_of(module);
  const bool is_known =
      layer.kind == LayerKind::kLinear || layer.kind == LayerKind::kNorm || layer.kind == LayerKind::kEmbedding;
  if (!is_known || input.use_local_output || input.input_layouts.size() != 1 || !input.input_layouts[0]) return false;
  const auto desired = input.desired_input_layouts[0].value_or(*input.input_layouts[0]);
  const auto style = std::make_shared<detail::LayerStyle>(context.divisions.mesh(),
                                                          detail::LayerLayouts{.path = path,
                                                                               .input = *input.input_layouts[0],
                                                                               .desired = desired,
                                                                               .output = std::move(output),
                                                                               .use_local_output = use_local_output},
                                                          context.divisions.memo());
  for (const auto& parameter : layer.parameters) {
    context.divisions.add(module, parameter, path, Replicate(), style);
  }
  return !layer.parameters.empty();
}

}  // namespace

PrepareModuleInput::PrepareModuleInput(PrepareInputOptions options) : options_(std::move(options)) {
  check_pairs(options_.input_layouts, options_.desired_input_layouts, "PrepareModuleInput", "input");
}

void PrepareModuleInput::apply(torch::nn::Module& module, const std::string& path, const StyleContext& context) const {
  auto* prepared = dynamic_cast<PreparedModule*>(&module);
  if (prepared == nullptr) {
    if (apply_to_layer(module, path, context, options_, std::nullopt, /*use_local_output=*/false)) return;
    refuse_unprepared(*this, module, path, context, kInputAdvice);
  }
  if (prepared->is_input_prepared()) refuse_twice(*this, path, context);
  context.divisions.add_change(
      [prepared, mesh = context.divisions.mesh(), options = options_] { prepared->prepare_input(mesh, options); });
}

std::string PrepareModuleInput::to_string() const {
  return str("PrepareModuleInput(input_layouts=", text_of(options_.input_layouts),
             ", desired_input_layouts=", text_of(options_.desired_input_layouts),
             ", use_local_output=", options_.use_local_output ? "true" : "false", ")");
}

PrepareModuleOutput::PrepareModuleOutput(PrepareOutputOptions options) : options_(std::move(options)) {
  check_pairs(options_.output_layouts, options_.desired_output_layouts, "PrepareModuleOutput", "output");
}

void PrepareModuleOutput::apply(torch::nn::Module& module, const std::string& path, const StyleContext& context) const {
  auto* prepared = dynamic_cast<PreparedModule*>(&module);
  if (prepared == nullptr) refuse_unprepared(*this, module, path, context, kOutputAdvice);
  if (prepared->is_output_prepared()) refuse_twice(*this, path, context);
  context.divisions.add_change(
      [prepared, mesh = context.divisions.mesh(), options = options_] { prepared->prepare_output(mesh, options); });
}

std::string PrepareModuleOutput::to_string() const {
  return str("PrepareModuleOutput(output_layouts=", text_of(options_.output_layouts),
             ", desired_output_layouts=", text_of(options_.desired_output_layouts),
             ", use_local_output=", options_.use_local_output ? "true" : "false", ")");
}

PrepareModuleInputOutput::PrepareModuleInputOutput(PrepareInputOutputOptions options) : options_(std::move(options)) {
  check_pairs(options_.input_layouts, options_.desired_input_layouts, "PrepareModuleInputOutput", "input");
  check_pairs(options_.output_layouts, options_.desired_output_layouts, "PrepareModuleInputOutput", "output");
}

void PrepareModuleInputOutput::apply(torch::nn::Module& module, const std::string& path,
                                     const StyleContext& context) const {
  const PrepareInputOptions input{.input_layouts = options_.input_layouts,
                                  .desired_input_layouts = options_.desired_input_layouts,
                                  .use_local_output = options_.use_local_input};
  auto* prepared = dynamic_cast<PreparedModule*>(&module);
  if (prepared == nullptr) {
    const bool has_output = options_.desired_output_layouts.size() == 1 && options_.desired_output_layouts[0];
    if (has_output &&
        apply_to_layer(module, path, context, input, options_.desired_output_layouts[0], options_.use_local_output)) {
      return;
    }
    refuse_unprepared(*this, module, path, context, kInputAdvice);
  }
  if (prepared->is_input_prepared() || prepared->is_output_prepared()) refuse_twice(*this, path, context);
  const PrepareOutputOptions output{.output_layouts = options_.output_layouts,
                                    .desired_output_layouts = options_.desired_output_layouts,
                                    .use_local_output = options_.use_local_output};
  context.divisions.add_change([prepared, mesh = context.divisions.mesh(), input, output] {
    prepared->prepare_input(mesh, input);
    prepared->prepare_output(mesh, output);
  });
}

std::string PrepareModuleInputOutput::to_string() const {
  return str("PrepareModuleInputOutput(input_layouts=", text_of(options_.input_layouts),
             ", desired_input_layouts=", text_of(options_.desired_input_layouts),
             ", use_local_input=", options_.use_local_input ? "true" : "false",
             ", output_layouts=", text_of(options_.output_layouts),
             ", desired_output_layouts=", text_of(options_.desired_output_layouts),
             ", use_local_output=", options_.use_local_output ? "true" : "false", ")");
}

namespace {

void check_can_prepare(bool is_prepared, const DeviceMesh& mesh, const char* what) {
  TORCH_CHECK(mesh.ndim() == 1, "[lockstep/tp] rank ", mesh.get_rank(), ": ", what, "s are prepared on a mesh of one ",
              "axis, and not on ", mesh, ". Give it the axis that divides layers: mesh[\"tp\"].");
  TORCH_CHECK(!is_prepared, "[lockstep/tp] rank ", mesh.get_rank(), ": a module's ", what,
              "s can be prepared once, and have been before.");
}

}  // namespace

void PreparedModule::prepare_input(const DeviceMesh& mesh, const PrepareInputOptions& options) {
  check_can_prepare(input_.has_value(), mesh, "input");
  check_pairs(options.input_layouts, options.desired_input_layouts, "prepare_input()", "input");
  input_ = Preparation{.mesh = mesh,
                       .layouts = options.input_layouts,
                       .desired = options.desired_input_layouts,
                       .use_local_output = options.use_local_output,
                       .piece_sizes = std::make_shared<detail::PieceSizes>()};
}

void PreparedModule::prepare_output(const DeviceMesh& mesh, const PrepareOutputOptions& options) {
  check_can_prepare(output_.has_value(), mesh, "output");
  check_pairs(options.output_layouts, options.desired_output_layouts, "prepare_output()", "output");
  output_ = Preparation{.mesh = mesh,
                        .layouts = options.output_layouts,
                        .desired = options.desired_output_layouts,
                        .use_local_output = options.use_local_output,
                        .piece_sizes = std::make_shared<detail::PieceSizes>()};
}

void PreparedModule::Preparation::check_count(std::size_t count, const std::string& module, const char* things) const {
  TORCH_CHECK(count == layouts.size(), "[lockstep/tp] rank ", mesh.get_rank(), ": the forward of ", module, " has ",
              count, " ", things, ", and its preparation layouts for ", layouts.size(),
              ". Give one for each, std::nullopt for what is to be left as it is.");
}

void PreparedModule::Preparation::check_is_left(std::size_t index, const std::string& module) const {
  TORCH_CHECK(!layouts[index], "[lockstep/tp] rank ", mesh.get_rank(), ": argument ", index, " of the forward of ",
              module, " is no tensor, and its preparation has ", *layouts[index], " for it. Give std::nullopt.");
}

at::Tensor PreparedModule::Preparation::prepared(const at::Tensor& tensor, std::size_t index) const {
  const auto& layout = layouts[index];
  if (!layout || !tensor.defined()) return tensor;
  if (!is_dtensor(tensor) && sharded_dim(*layout)) {
    const bool is_moved = desired[index] && !(*desired[index] == *layout);
    piece_sizes->check(tensor, mesh, "", /*is_needed=*/!is_moved);
  }
  auto held = is_dtensor(tensor) ? DTensor(tensor) : DTensor::from_local(tensor, mesh, {*layout});
  TORCH_CHECK(held.device_mesh() == mesh, "[lockstep/tp] rank ", mesh.get_rank(), ": a module is prepared on ", mesh,
              " and gets a DTensor on ", held.device_mesh(), ".");
  if (desired[index]) held = held.redistribute({*desired[index]}, {.async_op = !use_local_output});
  return use_local_output ? held.to_local() : held.tensor();
}

}  // namespace lockstep
