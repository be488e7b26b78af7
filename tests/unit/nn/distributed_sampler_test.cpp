// U-8: which samples a rank gets. The indices are compared with Python's in tests/oracle/nn.
#include "lockstep/nn/distributed_sampler.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <set>
#include <sstream>

#include "lockstep/testing/checks.h"

namespace lockstep {
namespace {

using testing::expect_error;
using Indices = std::vector<std::size_t>;

DistributedSampler sampler_of(std::size_t size, int ranks, int rank, bool shuffle = false) {
  return DistributedSampler(size, {.num_replicas = ranks, .rank = rank, .shuffle = shuffle});
}

Indices rest_of(DistributedSampler& sampler, std::size_t batch_size) {
  Indices all;
  while (const auto batch = sampler.next(batch_size)) all.insert(all.end(), batch->begin(), batch->end());
  return all;
}

TEST(DistributedSampler, PadsFromTheBeginning) {
  EXPECT_EQ(sampler_of(7, 3, 0).indices(), (Indices{0, 3, 6}));
  EXPECT_EQ(sampler_of(7, 3, 1).indices(), (Indices{1, 4, 0}));
  EXPECT_EQ(sampler_of(7, 3, 2).indices(), (Indices{2, 5, 1}));
  EXPECT_EQ(sampler_of(2, 5, 4).indices(), (Indices{0}));
  EXPECT_EQ(sampler_of(0, 2, 0).indices(), Indices{});
}

TEST(DistributedSampler, LeavesTheRestOutIfToldTo) {
  const auto indices = [](std::size_t size, int rank) {
    return DistributedSampler(size, {.num_replicas = 3, .rank = rank, .shuffle = false, .drop_last = true}).indices();
  };
  EXPECT_EQ(indices(7, 0), (Indices{0, 3}));
  EXPECT_EQ(indices(7, 2), (Indices{2, 5}));
  EXPECT_EQ(indices(6, 1), (Indices{1, 4}));
  EXPECT_EQ(indices(2, 0), Indices{});
}

TEST(DistributedSampler, GivesEverySampleOnceIfNumbersMayDiffer) {
  for (const std::size_t size : {0, 1, 7, 8, 13}) {
    std::multiset<std::size_t> seen;
    for (int rank = 0; rank < 4; ++rank) {
      const DistributedSampler sampler(size, {.num_replicas = 4, .rank = rank, .even = false});
      const auto mine = sampler.indices();
      EXPECT_EQ(mine.size(), sampler.size());
      seen.insert(mine.begin(), mine.end());
    }
    EXPECT_EQ(seen.size(), size);
    EXPECT_EQ(std::set<std::size_t>(seen.begin(), seen.end()).size(), size);
  }
}

TEST(DistributedSampler, ShufflesEveryEpochInAnotherWay) {
  auto sampler = sampler_of(100, 2, 0, true);
  const auto first = sampler.indices();
  sampler.set_epoch(1);
  EXPECT_NE(sampler.indices(), first);
  sampler.set_epoch(0);
  EXPECT_EQ(sampler.indices(), first);
  EXPECT_NE(DistributedSampler(100, {.num_replicas = 2, .rank = 0, .seed = 1}).indices(), first);
}

TEST(DistributedSampler, GoesOnInTheMiddleOfAnEpoch) {
  auto sampler = sampler_of(23, 2, 1, true);
  sampler.set_epoch(3);
  sampler.reset();
  Indices all;
  for (int i = 0; i < 2; ++i) {
    const auto batch = sampler.next(4).value();
    all.insert(all.end(), batch.begin(), batch.end());
  }
  auto again = sampler_of(23, 2, 1, true);
  again.set_epoch(3, 8);
  again.reset();
  const auto rest = rest_of(again, 4);
  all.insert(all.end(), rest.begin(), rest.end());
  EXPECT_EQ(all, sampler.indices());
  again.reset();
  EXPECT_EQ(rest_of(again, 4), sampler.indices()) << "the pass after it is a whole one";
}

TEST(DistributedSampler, KeepsItsPlaceInAnArchive) {
  auto sampler = sampler_of(10, 2, 0, true);
  sampler.set_epoch(2);
  sampler.reset();
  sampler.next(3);
  std::stringstream file;
  torch::serialize::OutputArchive out;
  sampler.save(out);
  out.save_to(file);
  torch::serialize::InputArchive in;
  in.load_from(file);
  auto loaded = sampler_of(10, 2, 0, true);
  loaded.load(in);
  loaded.reset();
  EXPECT_EQ(rest_of(loaded, 5), rest_of(sampler, 5));
}

struct Numbers : torch::data::Dataset<Numbers> {
  torch::data::Example<> get(std::size_t index) override {
    return {at::scalar_tensor(static_cast<int64_t>(index), at::kLong), at::zeros({})};
  }
  std::optional<std::size_t> size() const override { return 11; }
};

// The loader has a copy; the one that is kept says which epoch comes.
// Between two passes the next one is what is saved, not the end of the last.
TEST(DistributedSampler, KeepsTheNextPassInAnArchive) {
  const DistributedSamplerOptions options{.num_replicas = 2, .rank = 0};
  for (const std::size_t done : {0, 2}) {
    DistributedSampler sampler(10, options);
    sampler.reset();
    while (sampler.next(2)) {
    }
    sampler.set_epoch(1, done);
    std::stringstream file;
    torch::serialize::OutputArchive out;
    sampler.save(out);
    out.save_to(file);
    DistributedSampler other(10, options);
    torch::serialize::InputArchive in;
    in.load_from(file);
    other.load(in);
    other.reset();
    EXPECT_EQ(other.epoch(), 1);
    EXPECT_EQ(other.next(10).value().size(), 5 - done);
  }
}

TEST(DistributedSampler, ServesADataLoader) {
  auto sampler = sampler_of(11, 2, 1, true);
  auto loader = torch::data::make_data_loader(Numbers().map(torch::data::transforms::Stack<>()), sampler, 4);
  for (const int epoch : {0, 1, 5}) {
    sampler.set_epoch(epoch);
    Indices seen;
    for (const auto& batch : *loader) {
      for (int64_t i = 0; i < batch.data.size(0); ++i) seen.push_back(batch.data[i].item<int64_t>());
    }
    EXPECT_EQ(seen, sampler.indices()) << epoch;
  }
}

TEST(DistributedSampler, RefusesNonsense) {
  expect_error([] { DistributedSampler(3, {.rank = 1}); }, {"both num_replicas and rank"});
  expect_error([] { sampler_of(3, 2, 2); }, {"rank 2", "num_replicas 2"});
  expect_error([] { DistributedSampler(3, {.num_replicas = 2, .rank = 0, .drop_last = true, .even = false}); },
               {"drop_last"});
  expect_error([] { DistributedSampler(3); }, {"call lockstep::init() first"});
  expect_error([] { sampler_of(3, 1, 0).set_epoch(-1); }, {"epoch -1"});
  expect_error([] { sampler_of(3, 1, 0).set_epoch(0, 4); }, {"of the 3 samples", "4 cannot be done"});
}

}  // namespace
}  // namespace lockstep
