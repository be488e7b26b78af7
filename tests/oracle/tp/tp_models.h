// The models of tp_models.py, in double precision and by the same names of parameters.
#pragma once

#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/nn/norms.h"
#include "tests/support/oracle_reference.h"

namespace lockstep::oracle {

inline constexpr int64_t kTpWidth = 8;
inline constexpr int64_t kTpHeads = 4;

inline at::Tensor tp_heads(const at::Tensor& x, int64_t size = kTpWidth / kTpHeads) {
  return x.view({x.size(0), x.size(1), x.size(2) / size, size}).transpose(1, 2);
}

inline at::Tensor tp_merged(const at::Tensor& x) {
  return x.transpose(1, 2).reshape({x.size(0), x.size(2), -1});
}

inline at::Tensor tp_attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool is_manual = false) {
  if (!is_manual) return at::scaled_dot_product_attention(q, k, v, {}, 0, /*is_causal=*/true);
  return at::softmax(q.matmul(k.transpose(2, 3)) / std::sqrt(static_cast<double>(q.size(3))), -1).matmul(v);
}

struct TpMlp : torch::nn::Module {
  explicit TpMlp(int64_t hidden = 4 * kTpWidth)
      : up(register_module("up", torch::nn::Linear(kTpWidth, hidden))),
        down(register_module("down", torch::nn::Linear(hidden, kTpWidth))) {}
  at::Tensor forward(const at::Tensor& x) { return down->forward(at::gelu(up->forward(x))); }

  torch::nn::Linear up;
  torch::nn::Linear down;
};

struct TpAttention : torch::nn::Module {
  explicit TpAttention(bool by_hand = false)
      : q(register_module("q", torch::nn::Linear(kTpWidth, kTpWidth))),
        k(register_module("k", torch::nn::Linear(kTpWidth, kTpWidth))),
        v(register_module("v", torch::nn::Linear(kTpWidth, kTpWidth))),
        out(register_module("out", torch::nn::Linear(kTpWidth, kTpWidth))),
        is_manual(by_hand) {}
  at::Tensor forward(const at::Tensor& x) {
    const auto of_q = tp_heads(q->forward(x));
    const auto of_k = tp_heads(k->forward(x));
    const auto of_v = tp_heads(v->forward(x));
    return out->forward(tp_merged(tp_attend(of_q, of_k, of_v, is_manual)));
  }

  torch::nn::Linear q;
  torch::nn::Linear k;
  torch::nn::Linear v;
  torch::nn::Linear out;
  bool is_manual;
};

struct TpFusedAttention : torch::nn::Module {
  TpFusedAttention()
      : qkv(register_module("qkv", torch::nn::Linear(kTpWidth, 3 * kTpWidth))),
        out(register_module("out", torch::nn::Linear(kTpWidth, kTpWidth))) {}
  at::Tensor forward(const at::Tensor& x) {
    const auto parts = tp_heads(qkv->forward(x), 3 * kTpWidth / kTpHeads).chunk(3, -1);
    return out->forward(tp_merged(tp_attend(parts[0], parts[1], parts[2])));
  }

  torch::nn::Linear qkv;
  torch::nn::Linear out;
};

inline torch::nn::LayerNorm tp_norm() {
  return torch::nn::LayerNorm(torch::nn::LayerNormOptions({kTpWidth}));
}

struct TpBlock : torch::nn::Module {
  TpBlock()
      : attention_norm(register_module("attention_norm", tp_norm())),
        attention(register_module("attention", std::make_shared<TpAttention>())),
        mlp_norm(register_module("mlp_norm", tp_norm())),
        mlp(register_module("mlp", std::make_shared<TpMlp>())) {}
  at::Tensor forward(const at::Tensor& input) {
    const auto x = input + attention->forward(attention_norm->forward(input));
    return x + mlp->forward(mlp_norm->forward(x));
  }

  torch::nn::LayerNorm attention_norm;
  std::shared_ptr<TpAttention> attention;
  torch::nn::LayerNorm mlp_norm;
  std::shared_ptr<TpMlp> mlp;
};

struct TpClassifierOptions {
  int64_t classes = 12;
  std::string reduction = "mean";
  int64_t ignore_index = -100;
  bool is_weighted = false;
};

/// Gives the loss.
struct TpClassifier : torch::nn::Module {
  explicit TpClassifier(TpClassifierOptions its)
      : options(std::move(its)), head(register_module("head", torch::nn::Linear(kTpWidth, options.classes))) {}
  at::Tensor forward(const at::Tensor& x, const at::Tensor& target) {
    const auto reduction = options.reduction == "mean"  ? at::Reduction::Mean
                           : options.reduction == "sum" ? at::Reduction::Sum
                                                        : at::Reduction::None;
    const auto weight =
        options.is_weighted ? at::linspace(0.5, 1.5, options.classes, x.options().requires_grad(false)) : at::Tensor();
    return at::cross_entropy_loss(head->forward(x).flatten(0, 1), target.flatten(), weight, reduction,
                                  options.ignore_index);
  }

  TpClassifierOptions options;
  torch::nn::Linear head;
};

/// Gives the loss.
struct TpTransformer : torch::nn::Module {
  explicit TpTransformer(int64_t vocabulary)
      : tokens(register_module("tokens", torch::nn::Embedding(vocabulary, kTpWidth))),
        blocks(
            register_module("blocks", torch::nn::ModuleList(std::make_shared<TpBlock>(), std::make_shared<TpBlock>()))),
        norm(register_module("norm", tp_norm())),
        head(register_module("head", torch::nn::Linear(kTpWidth, vocabulary))) {}
  at::Tensor forward(const at::Tensor& input, const at::Tensor& target) {
    auto x = tokens->forward(input);
    for (const auto& block : *blocks) x = std::dynamic_pointer_cast<TpBlock>(block)->forward(x);
    return at::cross_entropy_loss(head->forward(norm->forward(x)).flatten(0, 1), target.flatten());
  }

  torch::nn::Embedding tokens;
  torch::nn::ModuleList blocks;
  torch::nn::LayerNorm norm;
  torch::nn::Linear head;
};

struct TpModel {
  std::shared_ptr<torch::nn::Module> module;
  std::function<at::Tensor(const std::vector<at::Tensor>& inputs)> forward;
};

/// A model that takes `count` inputs.
template <int count = 1, class Module>
TpModel tp_model(const std::shared_ptr<Module>& module) {
  module->to(at::kDouble);
  return {module, [module](const std::vector<at::Tensor>& inputs) {
            if constexpr (count == 1) {
              return module->forward(inputs.at(0));
            } else {
              return module->forward(inputs.at(0), inputs.at(1));
            }
          }};
}

/// `arguments` has what differs from the defaults.
inline TpModel make_tp_model(const std::string& name, const c10::IValue& arguments) {
  const auto get = [&](const std::string& key, auto otherwise) {
    if (!arguments.toGenericDict().contains(key)) return otherwise;
    return at_key(arguments, key).to<decltype(otherwise)>();
  };
  if (name == "linear") {
    const auto features = get("features", 2 * kTpWidth);
    return tp_model(torch::nn::Linear(torch::nn::LinearOptions(kTpWidth, features).bias(get("bias", true))).ptr());
  }
  if (name == "embedding") return tp_model(torch::nn::Embedding(get("rows", int64_t{12}), kTpWidth).ptr());
  if (name == "layer_norm") return tp_model(tp_norm().ptr());
  if (name == "rms_norm") return tp_model(nn::RMSNorm(nn::RMSNormOptions{.normalized_shape = {kTpWidth}}).ptr());
  if (name == "mlp") return tp_model(std::make_shared<TpMlp>(get("hidden", 4 * kTpWidth)));
  if (name == "attention") return tp_model(std::make_shared<TpAttention>(get("is_manual", false)));
  if (name == "fused_attention") return tp_model(std::make_shared<TpFusedAttention>());
  if (name == "block") return tp_model(std::make_shared<TpBlock>());
  if (name == "transformer") return tp_model<2>(std::make_shared<TpTransformer>(get("vocabulary", int64_t{12})));
  TORCH_CHECK(name == "classifier", "no model ", name);
  return tp_model<2>(
      std::make_shared<TpClassifier>(TpClassifierOptions{.classes = get("classes", int64_t{12}),
                                                         .reduction = get("reduction", std::string("mean")),
                                                         .ignore_index = get("ignore_index", int64_t{-100}),
                                                         .is_weighted = get("is_weighted", false)}));
}

}  // namespace lockstep::oracle
