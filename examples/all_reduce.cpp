// Sums a tensor over all ranks and says how fast that was.
//   lockstep-run -n 2 build/examples/all_reduce [MiB] [rounds]
#include <lockstep/lockstep.h>

#include <ATen/ops/full.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <vector>

namespace {

void run(double mebibytes, int rounds) {
  const auto world = lockstep::init();
  const auto elements = static_cast<int64_t>(mebibytes * 1024 * 1024 / sizeof(float));
  const auto options = at::TensorOptions(at::kFloat).device(world.device());

  // Whole numbers, so that the sum is exact: 1 + 2 + … + world size in every element.
  const float expected = static_cast<float>(world.world_size() * (world.world_size() + 1)) / 2;
  std::vector<double> milliseconds;
  bool is_correct = true;
  for (int round = 0; round < rounds; ++round) {
    auto tensor = at::full({elements}, world.rank() + 1, options);
    lockstep::barrier(world.group());
    const auto start = std::chrono::steady_clock::now();
    lockstep::all_reduce(tensor, world.group());
    is_correct = is_correct && tensor.min().item<float>() == expected && tensor.max().item<float>() == expected;
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
    milliseconds.push_back(took.count());
  }
  std::sort(milliseconds.begin(), milliseconds.end());
  const double median = milliseconds[milliseconds.size() / 2];
  if (world.rank() == 0) {
    std::printf("all-reduce of %.1f MiB on %d ranks started by %s, backend %s: sum %s\n", mebibytes, world.world_size(),
                world.launcher().c_str(), world.group()->getBackend(world.device().type())->getBackendName().c_str(),
                is_correct ? "correct" : "WRONG");
    std::printf("median %.2f ms of %d rounds (fastest %.2f, slowest %.2f), %.2f GB/s per rank\n", median, rounds,
                milliseconds.front(), milliseconds.back(), mebibytes * 1024 * 1024 / median / 1e6);
  }
  lockstep::barrier(world.group());
  if (!is_correct) std::exit(1);
}

}  // namespace

int main(int argc, char** argv) {
  const double mebibytes = argc > 1 ? std::atof(argv[1]) : 25;
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 20;
  if (mebibytes <= 0 || rounds < 1) {
    std::fprintf(stderr, "usage: all_reduce [MiB] [rounds]\n");
    return 2;
  }
  try {
    run(mebibytes, rounds);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
