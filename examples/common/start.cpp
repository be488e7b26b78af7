#include "examples/common/start.h"

#include <lockstep/lockstep.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

#include "lockstep/base/str.h"

namespace lockstep::examples {
namespace {

/// Becomes lockstep-run with this program as its ranks. Returns only by throwing.
[[noreturn]] void become_launcher(const TrainingOptions& options, int argc, char** argv) {
  std::vector<std::string> command = {LOCKSTEP_RUN_PATH, "-n", std::to_string(options.ranks), "--no-prefix"};
  command.insert(command.end(), argv, argv + argc);
  // Ranks write to a pipe: only we know that a terminal is behind it.
  if (options.progress == "auto" && ::isatty(STDOUT_FILENO) == 1) {
    command.insert(command.end(), {"--progress", "bar"});
  }
  std::vector<char*> arguments;
  for (auto& word : command) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  ::execv(arguments[0], arguments.data());
  throw std::runtime_error(str("cannot start ", command[0], ": build it first (make demo does)"));
}

InitOptions init_options(const TrainingOptions& options) {
  InitOptions init_options{.backend = options.backend};
  if (options.device == "cpu") {
    init_options.device = at::kCPU;
    return init_options;
  }
  const int gpus = gpu_count();
  TORCH_CHECK(gpus > 0, "--device ", options.device, ": no GPU was found. Use --device cpu.");
  // Without a number init() chooses: ranks of a host take its GPUs in turn.
  if (options.device == "cuda") return init_options;
  init_options.device = at::Device(options.device);
  TORCH_CHECK(init_options.device->index() < gpus, "--device ", options.device, ": there are ", gpus, " GPUs, from 0");
  return init_options;
}

World join(const TrainingOptions& options) {
  const auto world = init(init_options(options));
  TORCH_CHECK(options.ranks == 0 || options.ranks == world.world_size(), "--ranks ", options.ranks, ", but ",
              world.launcher(), " has started ", world.world_size());
  TORCH_CHECK(options.batch_size >= world.world_size(), "--batch-size ", options.batch_size, " leaves some of the ",
              world.world_size(), " ranks without a sequence");
  return world;
}

}  // namespace

int start(const char* program, const TrainingOptions& options, int argc, char** argv,
          const std::function<void(const World& world)>& train) {
  try {
    const bool has_launcher = detect_rank_environment().launcher != "none";
    if (options.ranks > 1 && !has_launcher) become_launcher(options, argc, argv);
    const auto world = join(options);
    torch::manual_seed(static_cast<std::uint64_t>(options.seed));
    train(world);
    barrier(world.group());
    return 0;
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "%s: %s\n", program, error.what_without_backtrace());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", program, error.what());
  }
  return 1;
}

}  // namespace lockstep::examples
