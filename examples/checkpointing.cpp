// Trains a model whose activations do not fit into memory, by computing them again in backward: with a limit set, the
// plain model runs out of memory, and the checkpointed one has the gradients the plain one would have, bit by bit.
//   lockstep-run -n 2 build/examples/checkpointing
#include <lockstep/lockstep.h>
#include <malloc.h>
#include <sys/resource.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdio>
#include <exception>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

namespace {

constexpr double kMiB = 1 << 20;
constexpr double kLimit = 250;  // MiB beyond the model: more than one layer's activations, less than all layers'
constexpr int64_t kWidth = 64;

/// A line of a file in /proc/self, in MiB.
double mebibytes_of(const std::string& field) {
  std::string line;
  for (std::ifstream lines("/proc/self/status"); std::getline(lines, line);) {
    if (line.starts_with(field + ":")) return std::stod(line.substr(field.size() + 1)) / 1024;
  }
  return 0;
}

/// Layers of libtorch's, checkpointed or not: the same names, the same weights.
struct NetImpl : torch::nn::Module {
  explicit NetImpl(bool is_checkpointed) {
    const auto options = torch::nn::TransformerEncoderLayerOptions(kWidth, 4).dim_feedforward(4 * kWidth).dropout(0.1);
    for (int i = 0; i < 8; ++i) {
      if (is_checkpointed) {
        layers->push_back(lockstep::Checkpointed<torch::nn::TransformerEncoderLayer>(options));
      } else {
        layers->push_back(torch::nn::TransformerEncoderLayer(options));
      }
    }
    register_module("layers", layers);
  }
  at::Tensor forward(const at::Tensor& x) { return layers->forward(x); }
  torch::nn::Sequential layers;
};
TORCH_MODULE(Net);

/// This process gets so much more memory. Ends with the scope.
class MemoryLimit {
 public:
  explicit MemoryLimit(double mebibytes) {
    ::getrlimit(RLIMIT_DATA, &before_);
    auto limit = before_;
    limit.rlim_cur = static_cast<rlim_t>((mebibytes_of("VmData") + mebibytes) * kMiB);
    ::setrlimit(RLIMIT_DATA, &limit);
  }
  ~MemoryLimit() { ::setrlimit(RLIMIT_DATA, &before_); }
  MemoryLimit(const MemoryLimit&) = delete;
  MemoryLimit& operator=(const MemoryLimit&) = delete;

 private:
  rlimit before_ = {};
};

struct Step {
  std::vector<at::Tensor> gradients;
  double loss = 0;
  double peak = 0;  // MiB beyond what was there before
};

Step step(lockstep::DistributedDataParallel<Net>& model, const at::Tensor& x) {
  ::malloc_trim(0);
  std::ofstream("/proc/self/clear_refs") << "5";  // the peak begins anew
  const auto before = mebibytes_of("VmRSS");
  for (auto& parameter : model.parameters()) parameter.mutable_grad() = at::Tensor();
  torch::manual_seed(7);  // of the dropout
  const auto loss = model(x).pow(2).mean();
  loss.backward();
  Step result{.gradients = {}, .loss = loss.item<double>(), .peak = mebibytes_of("VmHWM") - before};
  for (const auto& parameter : model.parameters()) result.gradients.push_back(parameter.grad().clone());
  return result;
}

/// Nothing if there was not enough memory.
std::optional<Step> try_step(lockstep::DistributedDataParallel<Net>& model, const at::Tensor& x) {
  try {
    const MemoryLimit limit(kLimit);
    return step(model, x);
  } catch (const c10::DistBackendError&) {
    throw;  // a rank is gone
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

bool run(const lockstep::World& world) {
  torch::manual_seed(1);
  lockstep::DistributedDataParallel<Net> plain(Net(false), world.group());
  torch::manual_seed(1);
  lockstep::DistributedDataParallel<Net> checkpointed(Net(true), world.group());
  torch::manual_seed(100 + world.rank());
  step(plain, torch::randn({8, 1, kWidth}));  // threads and buckets are there from now on
  step(checkpointed, torch::randn({8, 1, kWidth}));
  const auto x = torch::randn({512, 4, kWidth});

  const auto refused = try_step(plain, x);
  const auto fitting = try_step(checkpointed, x);
  const auto unlimited = step(plain, x);
  bool is_same = fitting.has_value();
  for (std::size_t i = 0; is_same && i < unlimited.gradients.size(); ++i) {
    is_same = fitting->gradients[i].equal(unlimited.gradients[i]);
  }
  std::printf("rank %d: limit %.0f MiB; plain %s, with %.0f MiB; checkpointed %s, with %.0f MiB; gradients %s\n",
              world.rank(), kLimit, refused ? "fits" : "does not fit", unlimited.peak,
              fitting ? "fits" : "does not fit", fitting ? fitting->peak : 0, is_same ? "the same" : "DIFFERENT");
  return !refused && is_same && fitting->peak < unlimited.peak / 2 && std::isfinite(fitting->loss);
}

}  // namespace

int main() {
  try {
    ::mallopt(M_MMAP_THRESHOLD, 1 << 16);  // tensors that are gone leave no memory with the allocator
    const auto world = lockstep::init({.device = at::kCPU});
    const bool is_right = run(world);
    if (!is_right) std::fprintf(stderr, "rank %d: NO, see above\n", world.rank());
    lockstep::barrier(world.group());
    return is_right ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
