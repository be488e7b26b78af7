// A model is built without memory and gets it layer by layer, with the bits of an ordinary build from the same seed;
// and one that no machine here could hold is built, to be divided before it gets any.
//   lockstep-run -n 2 build/examples/deferred_init
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <cstdio>
#include <exception>
#include <fstream>

namespace {

torch::nn::TransformerEncoder make_encoder(int64_t width, int64_t layers) {
  return torch::nn::TransformerEncoder(torch::nn::TransformerEncoderOptions(
      torch::nn::TransformerEncoderLayerOptions(width, 8).dim_feedforward(4 * width), layers));
}

double resident_mebibytes() {
  std::ifstream file("/proc/self/statm");
  double pages = 0;
  file >> pages >> pages;
  return pages * 4096 / (1 << 20);
}

bool is_like_an_ordinary_build() {
  torch::manual_seed(1);
  const auto ordinary = make_encoder(64, 4);
  torch::manual_seed(1);
  const auto encoder = lockstep::deferred_init([] { return make_encoder(64, 4); });
  // Any order gives the same bits; this one runs nothing twice. Here a layer would be divided among the ranks.
  for (const auto& layer : *encoder->layers) lockstep::materialize_module(*layer);
  lockstep::materialize_module(*encoder);
  const auto expected = ordinary->parameters();
  const auto parameters = encoder->parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (!at::equal(parameters[i], expected[i])) return false;
  }
  return true;
}

}  // namespace

int main() {
  try {
    const auto world = lockstep::init({.device = at::kCPU});
    const auto before = resident_mebibytes();
    const auto huge = lockstep::deferred_init([] { return make_encoder(4096, 24); });
    const auto grown = resident_mebibytes() - before;
    double billions = 0;
    for (const auto& parameter : huge->parameters()) billions += static_cast<double>(parameter.numel()) / 1e9;
    const bool is_right = is_like_an_ordinary_build() && grown < 100;
    if (world.rank() == 0) {
      std::printf("%.1f billion parameters built in %.0f MiB\n", billions, grown);
      std::printf("layer by layer, the bits of an ordinary build: %s\n", is_right ? "correct" : "WRONG");
    }
    return is_right ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
