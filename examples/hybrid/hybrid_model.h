// Hybrid training: embeddings and one layer live on a server, trainers have the rest, and DDP averages what trainers
// share. One backward of distributed autograd goes through all of them.
#pragma once

#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <memory>
#include <optional>
#include <vector>

#include "examples/hybrid/log.h"
#include "lockstep/comm/group.h"
#include "lockstep/ddp/distributed_data_parallel.h"
#include "lockstep/join/join.h"
#include "lockstep/rpc/call.h"
#include "lockstep/rpc/dist_autograd.h"

namespace hybrid {

namespace rpc = lockstep::rpc;
using lockstep::DistributedDataParallel;

constexpr int kEmbeddingRows = 2;
constexpr int kSparse = 3;
constexpr int kDense = 2;
constexpr int kHidden = 3;
constexpr int kOutput = 1;
constexpr int kTrainers = 4;

/// Ranks 0 to 3 train, 4 serves, 5 leads.
enum class Role { kTrainer, kServer, kMaster };
inline Role role_of(int rank) {
  TORCH_CHECK(rank >= 0 && rank < kTrainers + 2, "hybrid training has ranks 0 to ", kTrainers + 1, ", not ", rank);
  if (rank < kTrainers) return Role::kTrainer;
  return rank == kTrainers ? Role::kServer : Role::kMaster;
}

/// Which part of a trainer's model DDP wraps.
enum class DdpMode { kNone, kOutside, kInside };

struct FeatureSet {
  at::Tensor dense_features;
  at::Tensor sparse_features;
  at::Tensor values;
};
inline auto rpc_fields(FeatureSet& set) {
  return std::tie(set.dense_features, set.sparse_features, set.values);
}
template <class Visit>
void for_each_tensor(FeatureSet& set, Visit&& visit) {
  for (auto* tensor : {&set.dense_features, &set.sparse_features, &set.values}) lockstep::visit_tensors(*tensor, visit);
}

/// Without bias; weights 1, the first one -1.
inline torch::nn::Linear make_linear(std::int64_t in, std::int64_t out) {
  torch::nn::Linear linear(torch::nn::LinearOptions(in, out).bias(false));
  const torch::NoGradGuard no_grad;
  linear->weight.fill_(1);
  linear->weight[0][0] = -1;
  return linear;
}

struct RemoteEM : torch::nn::Module {
  RemoteEM(std::int64_t rows, std::int64_t size)
      : em(register_module(
            "em",
            torch::nn::EmbeddingBag(torch::nn::EmbeddingBagOptions(rows, size)._weight(at::full({rows, size}, 0.5))))) {
  }
  at::Tensor forward(const at::Tensor& ids) { return em->forward(ids, at::arange(ids.size(0))); }
  torch::nn::EmbeddingBag em;
};

struct RemoteNet : torch::nn::Module {
  RemoteNet(std::int64_t in, std::int64_t out) : fc(register_module("fc", make_linear(in, out))) {}
  at::Tensor forward(const at::Tensor& input) { return at::relu(fc->forward(input)); }
  torch::nn::Linear fc;
};

using Embedding = rpc::RRef<RemoteEM>;
using Net = rpc::RRef<RemoteNet>;

struct HybridModel : torch::nn::Module {
  /// With a group, DDP averages fc2's gradients over it.
  HybridModel(Embedding embedding_, Net net_, const lockstep::GroupPtr& group)
      : embedding(std::move(embedding_)),
        net(std::move(net_)),
        fc1(register_module("fc1", make_linear(kDense, kDense))),
        fc2(make_linear(kHidden, kOutput)) {
    if (group) {
      ddp_fc2 = register_module("fc2", std::make_shared<DistributedDataParallel<torch::nn::Linear>>(fc2, group));
    } else {
      register_module("fc2", fc2);
    }
  }

  at::Tensor forward(const FeatureSet& input) {
    const auto sparse = embedding.rpc_sync(&RemoteEM::forward, input.sparse_features);
    TORCH_CHECK(sparse.size(0) == input.dense_features.size(0), "the lookup has ", sparse.size(0), " rows, the batch ",
                input.dense_features.size(0));
    const auto x = at::cat({fc1->forward(input.dense_features), sparse}, 1);
    const auto hidden = net.rpc_sync(&RemoteNet::forward, x);
    return ddp_fc2 ? ddp_fc2->forward(hidden) : fc2->forward(hidden);
  }

  Embedding embedding;
  Net net;
  torch::nn::Linear fc1;
  torch::nn::Linear fc2;
  std::shared_ptr<DistributedDataParallel<torch::nn::Linear>> ddp_fc2;
};

/// Gradients of parameters that DDP averages, and of the others.
using Gradients = std::pair<std::vector<at::Tensor>, std::vector<at::Tensor>>;

class Trainer {
 public:
  /// Makes the trainers' group unless there is no DDP: a collective of all ranks, so the others do it in main().
  Trainer(Embedding embedding, Net net, DdpMode mode)
      : group_(mode == DdpMode::kNone ? nullptr : lockstep::new_group({0, 1, 2, 3})),
        model_(std::make_shared<HybridModel>(std::move(embedding), std::move(net),
                                             mode == DdpMode::kInside ? group_ : nullptr)) {
    const std::vector<at::Tensor> fc1 = model_->fc1->parameters();
    const std::vector<at::Tensor> fc2 = model_->fc2->parameters();
    (mode == DdpMode::kOutside ? ddp_parameters_ : other_parameters_) = fc1;
    auto& place_of_fc2 = mode == DdpMode::kNone ? other_parameters_ : ddp_parameters_;
    place_of_fc2.insert(place_of_fc2.end(), fc2.begin(), fc2.end());
    log(Level::kDebug, "trainer with " + std::to_string(ddp_parameters_.size()) + " parameters under DDP, " +
                           std::to_string(other_parameters_.size()) + " others");
    if (mode == DdpMode::kOutside) {
      ddp_ = std::make_unique<DistributedDataParallel<std::shared_ptr<HybridModel>>>(model_, group_);
    }
  }

  /// Each batch in a context of its own; the gradients of the last one. Uneven: in pieces of two under join, and who
  /// `has_less` runs out after half of them.
  Gradients train_batch(FeatureSet batch, bool has_less, bool is_uneven) {
    std::vector<FeatureSet> batches = {batch};
    if (is_uneven) {
      batches.clear();
      const auto dense = batch.dense_features.split(2);
      const auto sparse = batch.sparse_features.split(2);
      const auto values = batch.values.split(2);
      for (std::size_t i = 0; i < dense.size(); ++i) batches.push_back({dense[i], sparse[i], values[i]});
      if (has_less) batches.resize(batches.size() / 2);
    }
    Gradients gradients;
    const auto run = [&] {
      for (const auto& each : batches) gradients = step(each, batch.values);
    };
    if (is_uneven) {
      lockstep::Join join({ddp_.get()});
      run();
    } else {
      run();
    }
    return gradients;
  }

  /// Sizes of the two groups of parameters.
  std::pair<std::int64_t, std::int64_t> parameter_counts() const {
    return {static_cast<std::int64_t>(ddp_parameters_.size()), static_cast<std::int64_t>(other_parameters_.size())};
  }

  void destroy_pg() {
    ddp_.reset();
    model_.reset();
    group_.reset();
  }

 private:
  Gradients step(const FeatureSet& batch, const at::Tensor& values) {
    const lockstep::dist_autograd::Context context;
    const auto output = ddp_ ? ddp_->forward(batch) : model_->forward(batch);
    const auto loss = (output * values).sum();
    log(Level::kDebug, "loss " + std::to_string(loss.item<double>()));
    lockstep::dist_autograd::backward(context.id(), {loss});
    const auto all = lockstep::dist_autograd::get_gradients(context.id());
    Gradients gradients;
    for (const auto& parameter : ddp_parameters_) gradients.first.push_back(all.at(parameter));
    for (const auto& parameter : other_parameters_) gradients.second.push_back(all.at(parameter));
    return gradients;
  }

  lockstep::GroupPtr group_;
  std::shared_ptr<HybridModel> model_;
  std::unique_ptr<DistributedDataParallel<std::shared_ptr<HybridModel>>> ddp_;
  std::vector<at::Tensor> ddp_parameters_;
  std::vector<at::Tensor> other_parameters_;
};

/// Sixteen examples, four for each trainer. Every one has an opposite, so that averages of gradients vanish.
inline std::vector<FeatureSet> training_examples() {
  std::vector<at::Tensor> dense;
  std::vector<std::int64_t> sparse;
  std::vector<float> values;
  for (const float value : {-1.0F, 1.0F}) {
    for (const float x : {-value, value}) {
      for (const float y : {value, -value}) {
        for (const std::int64_t z : {0, 1}) {
          dense.push_back(at::tensor({x, y}));
          sparse.push_back(z);
          values.push_back(value);
        }
      }
    }
  }
  std::vector<FeatureSet> sets;
  const auto all = FeatureSet{at::stack(dense), at::tensor(sparse), at::tensor(values)};
  for (int trainer = 0; trainer < kTrainers; ++trainer) {
    const auto part = [&](const at::Tensor& tensor) { return tensor.narrow(0, 4 * trainer, 4); };
    sets.push_back({part(all.dense_features), part(all.sparse_features), part(all.values)});
  }
  return sets;
}

inline const auto em_class = rpc::class_<RemoteEM>("hybrid.RemoteEM")
                                 .constructor<std::int64_t, std::int64_t>()
                                 .method("forward", &RemoteEM::forward);
inline const auto net_class = rpc::class_<RemoteNet>("hybrid.RemoteNet")
                                  .constructor<std::int64_t, std::int64_t>()
                                  .method("forward", &RemoteNet::forward);
inline const auto trainer_class = rpc::class_<Trainer>("hybrid.Trainer")
                                      .constructor<Embedding, Net, DdpMode>()
                                      .method("train_batch", &Trainer::train_batch)
                                      .method("parameter_counts", &Trainer::parameter_counts)
                                      .method("destroy_pg", &Trainer::destroy_pg);

/// The master's part: three rounds on all trainers at once; `see` gets each round's gradients by trainer.
template <class See>
void lead(DdpMode mode, bool is_uneven, See see) {
  const auto embedding = rpc::remote<RemoteEM>(kTrainers, kEmbeddingRows, kSparse);
  const auto net = rpc::remote<RemoteNet>(kTrainers, kDense + kSparse, kHidden);
  std::vector<rpc::RRef<Trainer>> trainers;
  for (int rank = 0; rank < kTrainers; ++rank) trainers.push_back(rpc::remote<Trainer>(rank, embedding, net, mode));
  if (mode != DdpMode::kNone) lockstep::new_group({0, 1, 2, 3});
  const auto examples = training_examples();
  for (int round = 0; round < 3; ++round) {
    std::vector<rpc::Future<Gradients>> futures;
    for (int rank = 0; rank < kTrainers; ++rank) {
      futures.push_back(trainers[rank].rpc_async(&Trainer::train_batch, examples[rank],
                                                 is_uneven && rank < kTrainers / 2, is_uneven));
    }
    see(round, rpc::wait_all(futures));
  }
  for (const auto& trainer : trainers) trainer.rpc_sync(&Trainer::destroy_pg);
}

}  // namespace hybrid
