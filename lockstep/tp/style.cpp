#include "lockstep/tp/style.h"

#include <torch/nn/module.h>

#include "lockstep/base/str.h"
#include "lockstep/comm/agreement.h"
#include "lockstep/tp/layers.h"
#include "lockstep/tp/prepared.h"

namespace lockstep {
namespace {

using detail::Layer;
using detail::LayerKind;
using detail::LayerLayouts;
using detail::LayerParameter;
using detail::LayerStyle;

std::shared_ptr<LayerStyle> make_style(const StyleContext& context, LayerLayouts layouts) {
  return std::make_shared<LayerStyle>(context.divisions.mesh(), std::move(layouts), context.divisions.memo());
}

/// Of a Linear or an Embedding.
void check_output(const Layer& layer, const std::string& path, const Placement& output, const StyleContext& context) {
  const auto features = layer.parameters.at(0).member->size(layer.kind == LayerKind::kEmbedding ? 1 : 0);
  context.divisions.check_local_output(path, output, features);
}

[[noreturn]] void refuse(const ParallelStyle& style, const torch::nn::Module& module, const std::string& path,
                         const StyleContext& context, const char* known) {
  TORCH_CHECK(false, "[lockstep/tp] rank ", context.divisions.mesh().get_rank(), ": ", style.to_string(),
              " does not know the layer '", path, "', a ", module.name(), ". It is for ", known, ".");
}

}  // namespace

void ColwiseParallel::apply(torch::nn::Module& module, const std::string& path, const StyleContext& context) const {
  const auto layer = detail::layer_of(module);
  const bool is_attention = layer.kind == LayerKind::kAttention;
  if (layer.kind != LayerKind::kLinear && layer.kind != LayerKind::kEmbedding && !is_attention) {
    refuse(*this, module, path, context, "Linear, Embedding and MultiheadAttention");
  }
  TORCH_CHECK(!options_.input_reshard || layer.kind != LayerKind::kEmbedding, "[lockstep/tp] rank ",
              context.divisions.mesh().get_rank(), ": input_reshard for '", path,
              "', an Embedding: its input are ids, and backward keeps no more than those. Leave it out.");
  const bool is_fused = options_.fused_parts > 1 || is_attention;
  const auto style =
      make_style(context, {.path = path,
                           .input = options_.input_layouts,
                           .desired = Replicate(),
                           .output = is_fused ? Placement(StridedShard(-1, is_attention ? 3 : options_.fused_parts))
                                              : options_.output_layouts,
                           .use_local_output = options_.use_local_output && !is_fused,
                           .input_reshard = options_.input_reshard,
                           .takes_masks = is_attention});
  if (options_.use_local_output && !is_fused) check_output(layer, path, options_.output_layouts, context);
  for (const auto& parameter : layer.parameters) {
    Placement placement = Shard(layer.kind == LayerKind::kEmbedding ? 1 : 0);
    if (is_attention && parameter.name.starts_with("in_proj")) placement = StridedShard(0, 3);
    if (!is_attention && is_fused) placement = StridedShard(0, options_.fused_parts);
    context.divisions.add(module, parameter, path, placement, style);
  }
}

std::string ColwiseParallel::to_string() const {
  return str("ColwiseParallel(input_layouts=", options_.input_layouts, ", output_layouts=", options_.output_layouts,
             ", use_local_output=", options_.use_local_output ? "true" : "false",
             options_.input_reshard ? ", input_reshard=true)" : ")");
}

void RowwiseParallel::apply(torch::nn::Module& module, const std::string& path, const StyleContext& context) const {
  const auto layer = detail::layer_of(module);
  const bool is_linear = layer.kind == LayerKind::kLinear;
  if (!is_linear && layer.kind != LayerKind::kEmbedding) {
    refuse(*this, module, path, context, "Linear and Embedding");
  }
  const auto desired = is_linear ? Placement(Shard(-1)) : Placement(Replicate());
  const auto style = make_style(context, {.path = path,
                                          .input = options_.input_layouts.value_or(desired),
                                          .desired = desired,
                                          .output = options_.output_layouts,
                                          .use_local_output = options_.use_local_output});
  if (options_.use_local_output) check_output(layer, path, options_.output_layouts, context);
  for (const auto& parameter : layer.parameters) {
    const auto placement = parameter.name == "bias" ? Placement(Replicate()) : Placement(Shard(is_linear ? 1 : 0));
    context.divisions.add(module, parameter, path, placement, style);
  }
}

std::string RowwiseParallel::to_string() const {
  return str("RowwiseParallel(input_layouts=",
             options_.input_layouts ? lockstep::to_string(*options_.input_layouts) : "default",
             ", output_layouts=", options_.output_layouts,
             ", use_local_output=", options_.use_local_output ? "true" : "false", ")");
}

void SequenceParallel::apply(torch::nn::Module& module, const std::string& path, const StyleContext& context) const {
  const auto layer = detail::layer_of(module);
  if (layer.kind != LayerKind::kNorm && layer.kind != LayerKind::kDropout) {
    refuse(*this, module, path, context, "LayerNorm, RMSNorm and Dropout");
  }
  const auto sequence = Placement(Shard(options_.sequence_dim));
  if (layer.kind == LayerKind::kDropout) {
    TORCH_CHECK(dynamic_cast<PreparedModule*>(&module) != nullptr, "[lockstep/tp] rank ",
                context.divisions.mesh().get_rank(), ": ", to_string(), " for '", path, "', a Dropout: it has no ",
                "parameter at which a style could act, and of plain pieces every rank would draw a mask of its own. ",
                "Declare it as lockstep::Prepared<torch::nn::Dropout>; or leave it out of the plan, if what it gets ",
                "are DTensors: of them it drops what one device would.");
    return PrepareModuleInputOutput({.input_layouts = {sequence},
                                     .desired_input_layouts = {sequence},
                                     .output_layouts = {sequence},
                                     .desired_output_layouts = {sequence},
                                     .use_local_output = options_.use_local_output})
        .apply(module, path, context);
  }
  const auto style = make_style(context, {.path = path,
                                          .input = sequence,
                                          .desired = sequence,
                                          .output = sequence,
                                          .use_local_output = options_.use_local_output,
                                          .compares_pieces = true});
  for (const auto& parameter : layer.parameters) {
    if (options_.check_weights) {
      check_same_on_all_ranks(str("the values of '", path, ".", parameter.name, "'"),
                              str(parameter.member->detach().to(at::kDouble).sum().item<double>()),
                              context.divisions.mesh().get_group());
    }
    context.divisions.add(module, parameter, path, Replicate(), style);
  }
}

std::string SequenceParallel::to_string() const {
  return str("SequenceParallel(sequence_dim=", options_.sequence_dim,
             ", use_local_output=", options_.use_local_output ? "true" : "false", ")");
}

}  // namespace lockstep
