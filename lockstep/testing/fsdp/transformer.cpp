#include "lockstep/testing/fsdp/transformer.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/transformercoder.h>
#include <torch/nn/modules/transformerlayer.h>

#include "lockstep/nn/tied_parameters.h"

namespace lockstep::testing {
namespace {

constexpr int64_t kWords = 23;
constexpr int64_t kWidth = 16;
constexpr int64_t kSequences = 2;  // of a batch

}  // namespace

TransformerWithSharedParams::TransformerWithSharedParams(const GroupPtr& group, bool add_bn, bool deterministic) {
  check_member(group);
  build_model(deterministic, [&] {
    embed_tokens = register_module("embed_tokens", torch::nn::Embedding(kWords, kWidth));
    transformer = register_module("transformer", torch::nn::Transformer(torch::nn::TransformerOptions(kWidth, 8)
                                                                            .num_encoder_layers(2)
                                                                            .num_decoder_layers(2)
                                                                            .dim_feedforward(8)
                                                                            .dropout(0.1)));
    output_proj = register_module("output_proj", torch::nn::Linear(kWidth, kWords));
  });
  tie_parameter(*output_proj, "weight", output_proj->weight, embed_tokens->weight);
  vocab_bias = register_buffer("vocab_bias", at::ones({kWidth}));
  long_buffer = register_buffer("long_buffer", at::zeros({kWidth}, at::kLong));
  if (add_bn) bn = register_module("bn", torch::nn::BatchNorm1d(kSequences));
  if (deterministic) eval();
}

std::shared_ptr<TransformerWithSharedParams> TransformerWithSharedParams::init(const TestGroups& groups,
                                                                               const TestModelOptions& options,
                                                                               const TransformerOptions& own) {
  auto model = std::make_shared<TransformerWithSharedParams>(groups.shard, own.add_bn, options.deterministic);
  init_model(*model, groups, options, [&](const FullyShardOptions& fsdp) {
    const auto layers =
        module_wrap_policy<torch::nn::TransformerEncoderLayerImpl, torch::nn::TransformerDecoderLayerImpl>();
    shard_by_policy(*model, own.auto_wrap_policy.value_or(layers), fsdp);
  });
  return model;
}

std::vector<at::Tensor> TransformerWithSharedParams::get_input(c10::Device device) {
  const auto words = [&](int64_t steps) {
    return at::arange(steps * kSequences, at::TensorOptions(at::kLong).device(device)).view({steps, kSequences});
  };
  return {words(6), words(4)};
}

at::Tensor TransformerWithSharedParams::forward(const std::vector<at::Tensor>& input) {
  auto source = embed_tokens->forward(input.at(0));
  source = source + vocab_bias + long_buffer.to(source.scalar_type());
  auto target = embed_tokens->forward(input.at(1));
  if (bn) target = bn->forward(target);
  return output_proj->forward(run_transformer(source, target));
}

// Layer by layer, as libtorch's does it, but each through its own forward: a layer that something was put around would
// be passed by otherwise.
at::Tensor TransformerWithSharedParams::run_transformer(const at::Tensor& source, const at::Tensor& target) {
  auto& encoder = transformer->encoder.get<torch::nn::TransformerEncoderImpl>();
  auto memory = source;
  for (const auto& layer : *encoder.layers) {
    memory = layer->as<torch::nn::TransformerEncoderLayerImpl>()->forward(memory);
  }
  memory = encoder.norm.get<torch::nn::LayerNormImpl>().forward(memory);
  auto& decoder = transformer->decoder.get<torch::nn::TransformerDecoderImpl>();
  auto output = target;
  for (const auto& layer : *decoder.layers) {
    output = layer->as<torch::nn::TransformerDecoderLayerImpl>()->forward(output, memory);
  }
  return decoder.norm.get<torch::nn::LayerNormImpl>().forward(output);
}

at::Tensor TransformerWithSharedParams::get_loss(const std::vector<at::Tensor>& input, const at::Tensor& output) {
  return at::cross_entropy_loss(output.view({-1, output.size(-1)}), input.at(1).view(-1), /*weight=*/{},
                                at::Reduction::Sum);
}

std::vector<std::shared_ptr<torch::nn::Module>> TransformerWithSharedParams::get_ignored_modules() const {
  return {transformer.ptr()};
}

}  // namespace lockstep::testing
