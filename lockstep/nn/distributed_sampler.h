// Which samples of a dataset are this rank's: Python's torch.utils.data.DistributedSampler, with the same indices.
//
//   lockstep::DistributedSampler sampler(dataset.size().value(), {.seed = 7});
//   auto loader = torch::data::make_data_loader(std::move(dataset), sampler, batch_size);
//   for (int64_t epoch = 0; epoch < epochs; ++epoch) {
//     sampler.set_epoch(epoch);
//     for (auto& batch : *loader) …
#pragma once

#include <torch/data/samplers/base.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "lockstep/comm/group.h"

namespace lockstep {

struct DistributedSamplerOptions {
  /// Whose ranks divide the dataset; null: the default group.
  GroupPtr process_group = nullptr;
  /// Instead of a group; give both or none.
  int num_replicas = -1;
  int rank = -1;
  /// Another order in every epoch, the same on all ranks.
  bool shuffle = true;
  uint64_t seed = 0;
  /// If the dataset does not divide evenly: leave the rest out. Otherwise some samples come twice.
  bool drop_last = false;
  /// False: neither. Some ranks have one sample less then, for scopes of Join.
  bool even = true;
};

/// Copies share their state: keep one for set_epoch(), and give one to the data loader. Local; used by one thread, the
/// one that begins epochs.
class DistributedSampler : public torch::data::samplers::Sampler<> {
 public:
  explicit DistributedSampler(std::size_t dataset_size, const DistributedSamplerOptions& options = {});

  /// The next pass over the data is this one, which says how it is shuffled. To go on in the middle of an epoch, say
  /// how many samples this rank has had of it: a loader reads ahead, so only the program knows. Later passes begin at
  /// the beginning, in the same order until this is called again.
  void set_epoch(int64_t epoch, std::size_t samples_done = 0);
  int64_t epoch() const;

  /// Samples of this rank in an epoch.
  std::size_t size() const;
  /// All of them, in order.
  std::vector<std::size_t> indices() const;

  /// Begins a pass. Data loaders do.
  void reset(std::optional<std::size_t> new_size = std::nullopt) override;
  /// At most `batch_size` indices, none at the end.
  std::optional<std::vector<std::size_t>> next(std::size_t batch_size) override;

  /// Epoch and place in it, as far as it was read by next().
  void save(torch::serialize::OutputArchive& archive) const override;
  /// The next pass goes on there.
  void load(torch::serialize::InputArchive& archive) override;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace lockstep
