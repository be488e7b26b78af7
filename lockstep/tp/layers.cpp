#include "lockstep/tp/layers.h"

#include <ATen/EmptyTensor.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <utility>

#include "lockstep/base/str.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/intercept/deferred_init.h"
#include "lockstep/nn/module_access.h"
#include "lockstep/nn/norms.h"
#include "lockstep/shard/layout_of.h"

namespace lockstep::detail {
namespace {

Layer made(LayerKind kind, std::vector<LayerParameter> all) {
  Layer layer{.kind = kind};
  for (auto& each : all) {
    if (each.member->defined()) layer.parameters.push_back(std::move(each));
  }
  return layer;
}

/// Deferred tensors refuse is_alias_of(), which looks at addresses.
bool have_common_storage(const at::Tensor& a, const at::Tensor& b) {
  if (!a.is_meta() && !b.is_meta()) return a.is_alias_of(b);
  return a.storage().unsafeGetStorageImpl() == b.storage().unsafeGetStorageImpl();
}

bool have_common_memory(const at::Tensor& a, const at::Tensor& b) {
  if (!have_common_storage(a, b) || a.numel() == 0 || b.numel() == 0) return false;
  const auto begin = [](const at::Tensor& t) { return static_cast<std::size_t>(t.storage_offset()) * t.itemsize(); };
  const auto end = [](const at::Tensor& t) {
    return at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.itemsize(),
                                            static_cast<std::size_t>(t.storage_offset()));
  };
  return begin(a) < end(b) && begin(b) < end(a);
}

template <class... Dropouts>
bool drops(const torch::nn::Module& module) {
  return ([&] {
    const auto* dropout = dynamic_cast<const Dropouts*>(&module);
    return dropout != nullptr && dropout->options.p() > 0;
  }() || ...);
}

bool draws_in_training(const torch::nn::Module& module) {
  const auto* attention = dynamic_cast<const torch::nn::MultiheadAttentionImpl*>(&module);
  if (attention != nullptr) return attention->options.dropout() > 0;
  return drops<torch::nn::DropoutImpl, torch::nn::Dropout2dImpl, torch::nn::Dropout3dImpl, torch::nn::AlphaDropoutImpl,
               torch::nn::FeatureAlphaDropoutImpl>(module);
}

}  // namespace

Layer layer_of(torch::nn::Module& module) {
  if (auto* linear = dynamic_cast<torch::nn::LinearImpl*>(&module)) {
    return made(LayerKind::kLinear, {{"weight", &linear->weight}, {"bias", &linear->bias}});
  }
  if (auto* embedding = dynamic_cast<torch::nn::EmbeddingImpl*>(&module)) {
    return made(LayerKind::kEmbedding, {{"weight", &embedding->weight}});
  }
  if (auto* norm = dynamic_cast<torch::nn::LayerNormImpl*>(&module)) {
    return made(LayerKind::kNorm, {{"weight", &norm->weight}, {"bias", &norm->bias}});
  }
  if (auto* norm = dynamic_cast<nn::LayerNormImpl*>(&module)) {
    return made(LayerKind::kNorm, {{"weight", &norm->weight}, {"bias", &norm->bias}});
  }
  if (auto* norm = dynamic_cast<nn::RMSNormImpl*>(&module)) return made(LayerKind::kNorm, {{"weight", &norm->weight}});
  if (auto* attention = dynamic_cast<torch::nn::MultiheadAttentionImpl*>(&module)) {
    return made(LayerKind::kAttention, {{"in_proj_weight", &attention->in_proj_weight},
                                        {"in_proj_bias", &attention->in_proj_bias},
                                        {"q_proj_weight", &attention->q_proj_weight},
                                        {"k_proj_weight", &attention->k_proj_weight},
                                        {"v_proj_weight", &attention->v_proj_weight}});
  }
  if (dynamic_cast<torch::nn::DropoutImpl*>(&module) != nullptr) return {.kind = LayerKind::kDropout};
  return {};
}

void Divisions::add(torch::nn::Module& module, const LayerParameter& parameter, const std::string& path,
                    const Placement& placement, std::shared_ptr<OperatorStyle> style) {
  const auto name = path.empty() ? parameter.name : path + "." + parameter.name;
  const auto* registered = ModuleAccess::parameters_of(module).find(parameter.name);
  TORCH_CHECK(registered != nullptr && layout_of(*registered) == nullptr, "[lockstep/tp] rank ", mesh_.get_rank(),
              ": parameter '", name, "' is divided among ranks already",
              registered != nullptr ? str(", as ", layout_of(*registered)->to_string()) : "",
              ". Call parallelize_module() once for a module, before fully_shard().");
  TORCH_CHECK(
      registered->is_same(*parameter.member), "[lockstep/tp] rank ", mesh_.get_rank(), ": parameter '", name,
      "' is not the tensor the module computes with. To tie a parameter to another, use tie_parameter(), which ",
      "exchanges what is registered too; call parallelize_module() before fully_shard().");
  const auto kind = registered->device().type();
  TORCH_CHECK(kind == at::kMeta || kind == at::Device(mesh_.device_type()).type(), "[lockstep/tp] rank ",
              mesh_.get_rank(), ": parameter '", name, "' is on ", registered->device(), ", and ", mesh_, " is one of ",
              mesh_.device_type(), " devices. Move the module there before parallelize_module().");
  TORCH_CHECK(!source_ || !is_deferred(*registered), "[lockstep/tp] rank ", mesh_.get_rank(), ": parameter '", name,
              "' has no memory yet that rank ", *source_,
              " could send. Build the module from one seed on all ranks, and ",
              "let each cut its own with src_data_rank = std::nullopt; or call materialize_module() first.");
  Layout layout(mesh_, {placement}, registered->sizes().vec());
  for (const auto& other : divisions_) {
    if (!other.whole.is_same(*registered)) continue;
    TORCH_CHECK(other.module != &module, "[lockstep/tp] rank ", mesh_.get_rank(), ": two styles of the plan name '",
                name, "'.");
    TORCH_CHECK(other.layout == layout, "[lockstep/tp] rank ", mesh_.get_rank(), ": parameters '", other.name,
                "' and '", name, "' are tied, and would be ", other.layout.to_string(), " and ", layout.to_string(),
                ". Tied parameters need one placement.");
  }
  divisions_.push_back({.module = &module,
                        .parameter = parameter,
                        .name = name,
                        .whole = *registered,
                        .layout = std::move(layout),
                        .style = std::move(style)});
}

void Divisions::look_for_dropouts(const torch::nn::Module& root) {
  for (const auto& each : root.named_modules()) {
    if (!draws_in_training(*each.value())) continue;
    dropout_ = each.key();
    return;
  }
}

void Divisions::check_local_output(const std::string& path, const Placement& output, int64_t features) const {
  // Which dim is that of the features is known of the last one only.
  if (!dropout_ || sharded_dim(output) != std::optional<int64_t>(-1) || features % mesh_.size() == 0) return;
  TORCH_CHECK(false, "[lockstep/tp] rank ", mesh_.get_rank(), ": '", path, "' would hand out uneven local parts of ",
              features, " features on ", mesh_.size(), " ranks, and the module has a dropout, '", *dropout_,
              "': ranks would draw different amounts of random numbers, and replicas differ from then on. Give the ",
              "style use_local_output = false: of DTensors dropouts drop what one device would.");
}

void Divisions::check_memory(const torch::nn::Module& root) const {
  for (const auto& other : root.named_parameters()) {
    for (const auto& each : divisions_) {
      TORCH_CHECK(
          each.whole.is_same(other.value()) || !have_common_memory(each.whole, other.value()), "[lockstep/tp] rank ",
          mesh_.get_rank(), ": parameters '", each.name, "' and '", other.key(),
          "' share memory and are two tensors, which would part when one is cut. Let the module use one tensor ",
          "for both.");
    }
  }
}

/// Of the source's values.
at::Tensor Divisions::part_of(const at::Tensor& whole, const Layout& layout) const {
  auto values = whole.detach();
  if (source_) {
    values = values.clone(at::MemoryFormat::Contiguous);
    broadcast(values, *source_, mesh_.get_group());
  }
  return layout.cut(values).clone(at::MemoryFormat::Contiguous);
}

/// A parameter becomes its part in place: optimizers that hold it, and modules it is tied to, go on with it.
void Divisions::run() {
  const at::NoGradGuard no_grad;
  for (auto& each : divisions_) {
    if (layout_of(each.whole) == nullptr) {
      const auto part = part_of(each.whole, each.layout);
      const auto gradient = each.whole.grad();
      each.whole.mutable_grad().reset();
      each.whole.set_data(part);
      if (gradient.defined()) each.whole.mutable_grad() = each.layout.cut(gradient).clone(at::MemoryFormat::Contiguous);
      set_layout(each.whole, each.layout);
    }
    *each.parameter.member = make_member(each.whole, each.style, each.name);
    // libtorch's clone() would make a plain layer of this rank's part, which computes, and something else. It counts
    // buffers before that: one too many, undefined and so seen by nobody else, makes it throw.
    each.module->register_buffer(each.parameter.name + " is divided among ranks", {});
  }
  divisions_.clear();
  for (const auto& change : std::exchange(changes_, {})) change();
}

}  // namespace lockstep::detail
