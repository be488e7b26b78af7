// Trains a model that would not fit a rank's memory: it is built without memory, sharded layer by layer, each of which
// is whole for a moment only, and trained. No rank ever has all of it.
//   lockstep-run -n 2 build/examples/fsdp_deferred_init
#include <lockstep/lockstep.h>
#include <malloc.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdio>
#include <exception>
#include <fstream>
#include <string>

namespace {

constexpr double kMiB = 1 << 20;
// What a rank may use, as a part of what it would need to train the whole model.
constexpr double kLimit = 0.9;

torch::nn::TransformerEncoder make_encoder() {
  constexpr int64_t kWidth = 512;
  return torch::nn::TransformerEncoder(torch::nn::TransformerEncoderOptions(
      torch::nn::TransformerEncoderLayerOptions(kWidth, 8).dim_feedforward(4 * kWidth).dropout(0), /*layers=*/12));
}

/// A line of a file in /proc/self.
double mebibytes_of(const std::string& file, const std::string& field) {
  std::string line;
  for (std::ifstream lines("/proc/self/" + file); std::getline(lines, line);) {
    if (line.starts_with(field + ":")) return std::stod(line.substr(field.size() + 1)) / 1024;
  }
  return 0;
}

/// Resident memory at its highest. Memory that ranks share counts once, in equal parts.
double peak_mebibytes() {
  return mebibytes_of("status", "VmHWM") - mebibytes_of("status", "RssShmem") +
         mebibytes_of("smaps_rollup", "Pss_Shmem");
}

bool train(const lockstep::World& world) {
  const auto before = mebibytes_of("status", "VmRSS");
  torch::manual_seed(1);
  auto encoder = lockstep::deferred_init(make_encoder);
  double parameters = 0;
  for (const auto& parameter : encoder->parameters()) parameters += static_cast<double>(parameter.nbytes()) / kMiB;
  // The bits of an ordinary build from this seed, as far as this rank keeps them.
  for (const auto& layer : *encoder->layers) lockstep::fully_shard(*layer);
  lockstep::fully_shard(encoder);
  lockstep::optim::AdamW optimizer(encoder->parameters(), {.lr = 1e-3});

  torch::manual_seed(100 + world.rank());
  const auto x = torch::randn({8, 2, 512});
  double first_loss = 0;
  double loss = 0;
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    const auto error = encoder->forward(x).pow(2).mean();
    error.backward();
    optimizer.step();
    loss = error.item<double>();
    if (step == 0) first_loss = loss;
  }

  // Weights, gradients, and two numbers of the optimizer's state for each weight.
  const double unsharded = 4 * parameters;
  const double limit = kLimit * unsharded;
  const double peak = peak_mebibytes() - before;
  std::printf("rank %d: unsharded %.0f MiB, peak %.0f MiB, limit %.0f MiB; loss %.4f, then %.4f\n", world.rank(),
              unsharded, peak, limit, first_loss, loss);
  // Alone, a rank has all of it.
  const bool fits = peak < limit || world.world_size() == 1;
  return fits && std::isfinite(loss) && loss < first_loss;
}

}  // namespace

int main() {
  try {
    ::mallopt(M_MMAP_THRESHOLD, 1 << 16);  // tensors that are gone leave no memory with the allocator
    const auto world = lockstep::init({.device = at::kCPU});
    const bool is_right = train(world);
    if (!is_right)
      std::fprintf(stderr, "rank %d: NO, too much memory was needed, or nothing was learnt\n", world.rank());
    lockstep::barrier(world.group());
    return is_right ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
