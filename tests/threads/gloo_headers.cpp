// Gloo through c10d with the headers this program was built with: once the system's, once our shim's. Both must lay out
// c10d::ProcessGroupGloo as libtorch does, so an all-reduce has to come out right.
#include <ATen/ops/ones.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <cstdio>
#include <thread>
#include <vector>

int main() {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::thread> ranks;
  std::vector<float> sums(3);
  for (int rank = 0; rank < 3; ++rank) {
    ranks.emplace_back([&, rank] {
      auto options = c10d::ProcessGroupGloo::Options::create(std::chrono::seconds(60));
      options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
      auto group = c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, 3, options);
      std::vector<at::Tensor> tensors = {at::ones({5}) * (rank + 1)};
      group->allreduce(tensors, c10d::AllreduceOptions())->wait();
      sums[rank] = tensors[0][4].item<float>();
    });
  }
  for (auto& rank : ranks) rank.join();
  const bool is_right = sums == std::vector<float>{6, 6, 6};
  std::printf("sum over 3 ranks: %g %g %g\n", sums[0], sums[1], sums[2]);
  return is_right ? 0 : 1;
}
