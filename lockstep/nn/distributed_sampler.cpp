#include "lockstep/nn/distributed_sampler.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/randperm.h>
#include <torch/serialize/archive.h>

#include <algorithm>

namespace lockstep {

struct DistributedSampler::State {
  std::size_t dataset_size;
  std::size_t ranks;
  std::size_t rank;
  DistributedSamplerOptions options;

  int64_t epoch = 0;
  std::size_t next_begin = 0;  // of the next pass
  bool is_next_set = false;    // since the last pass began
  std::size_t position = 0;    // in mine
  std::vector<std::size_t> mine = {};

  std::size_t size() const {
    if (!options.even) return (dataset_size + ranks - 1 - rank) / ranks;
    return (dataset_size + (options.drop_last ? 0 : ranks - 1)) / ranks;
  }

  /// Every rank draws the whole order and takes each `ranks`-th of it; at the end it begins again, for padding.
  std::vector<std::size_t> indices() const {
    if (dataset_size == 0) return {};
    const auto count = static_cast<int64_t>(dataset_size);
    at::Tensor order;
    if (options.shuffle) {
      const auto generator = at::detail::createCPUGenerator(options.seed + static_cast<uint64_t>(epoch));
      order = at::randperm(count, generator, at::kLong);
    } else {
      order = at::arange(count, at::kLong);
    }
    const auto* values = order.const_data_ptr<int64_t>();
    std::vector<std::size_t> result(size());
    for (std::size_t i = 0; i < result.size(); ++i) {
      result[i] = static_cast<std::size_t>(values[(rank + i * ranks) % dataset_size]);
    }
    return result;
  }
};

DistributedSampler::DistributedSampler(std::size_t dataset_size, const DistributedSamplerOptions& options) {
  int ranks = options.num_replicas;
  int rank = options.rank;
  TORCH_CHECK((ranks < 0) == (rank < 0), "[lockstep/nn] DistributedSampler: give both num_replicas and rank, or none");
  if (ranks < 0) {
    const auto group = options.process_group ? options.process_group : default_group();
    ranks = group->getSize();
    rank = group->getRank();
  }
  TORCH_CHECK(rank < ranks, "[lockstep/nn] DistributedSampler: rank ", rank, " is not below num_replicas ", ranks);
  TORCH_CHECK(options.even || !options.drop_last,
              "[lockstep/nn] DistributedSampler: drop_last makes ranks' numbers of samples even");
  state_ = std::make_shared<State>(State{.dataset_size = dataset_size,
                                         .ranks = static_cast<std::size_t>(ranks),
                                         .rank = static_cast<std::size_t>(rank),
                                         .options = options});
  state_->mine = state_->indices();
}

void DistributedSampler::set_epoch(int64_t epoch, std::size_t samples_done) {
  TORCH_CHECK(epoch >= 0, "[lockstep/nn] DistributedSampler: epoch ", epoch, " is negative");
  TORCH_CHECK(samples_done <= size(), "[lockstep/nn] DistributedSampler: of the ", size(), " samples of rank ",
              state_->rank, ", ", samples_done, " cannot be done");
  state_->epoch = epoch;
  state_->next_begin = samples_done;
  state_->is_next_set = true;
}

int64_t DistributedSampler::epoch() const {
  return state_->epoch;
}

std::size_t DistributedSampler::size() const {
  return state_->size();
}

std::vector<std::size_t> DistributedSampler::indices() const {
  return state_->indices();
}

void DistributedSampler::reset(std::optional<std::size_t> new_size) {
  if (new_size) state_->dataset_size = *new_size;
  state_->mine = state_->indices();
  state_->is_next_set = false;
  state_->position = std::min(std::exchange(state_->next_begin, 0), state_->mine.size());
}

std::optional<std::vector<std::size_t>> DistributedSampler::next(std::size_t batch_size) {
  const auto& mine = state_->mine;
  auto& position = state_->position;
  if (position >= mine.size()) return std::nullopt;
  const auto begin = mine.begin() + static_cast<std::ptrdiff_t>(position);
  const auto count = std::min(batch_size, mine.size() - position);
  position += count;
  return std::vector<std::size_t>(begin, begin + static_cast<std::ptrdiff_t>(count));
}

void DistributedSampler::save(torch::serialize::OutputArchive& archive) const {
  archive.write("epoch", c10::IValue(state_->epoch));
  // Between two passes it is the next one that counts.
  const auto position = state_->is_next_set ? state_->next_begin : state_->position;
  archive.write("position", c10::IValue(static_cast<int64_t>(position)));
}

void DistributedSampler::load(torch::serialize::InputArchive& archive) {
  c10::IValue epoch;
  c10::IValue position;
  archive.read("epoch", epoch);
  archive.read("position", position);
  set_epoch(epoch.toInt(), static_cast<std::size_t>(position.toInt()));
}

}  // namespace lockstep
