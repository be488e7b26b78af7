// A whole training program: samples divided among ranks, warm-up and cosine, gradient accumulation, clipping, bfloat16
// by autocast, uneven inputs, and a checkpoint from which it goes on in the middle of an epoch.
//   lockstep-run -n 2 build/examples/training_loop --checkpoint run [--stop-after STEPS] [--losses FILE]
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <cstdio>
#include <exception>
#include <fstream>
#include <limits>
#include <string>

namespace {

namespace optim = lockstep::optim;

constexpr int64_t kEpochs = 6;
constexpr std::size_t kSamples = 101;
constexpr int64_t kBatchSize = 5;
constexpr int64_t kAccumulate = 3;  // batches of a step
constexpr int64_t kWarmUp = 4;      // steps

/// Sample i, the same wherever it is asked for.
struct Samples : torch::data::Dataset<Samples> {
  torch::data::Example<> get(std::size_t index) override {
    const auto x = (torch::arange(1, 9) * (0.37 * static_cast<double>(index + 1))).sin();
    return {x, x.sum(0, true)};
  }
  std::optional<std::size_t> size() const override { return kSamples; }
};

struct Settings {
  std::string checkpoint;
  std::string losses;
  int64_t stop_after = std::numeric_limits<int64_t>::max();  // steps, for tests
};

/// What is done: whole epochs, and steps of the one that follows.
struct Progress {
  int64_t epoch = 0;
  int64_t step = 0;
};

/// Moved before it is wrapped.
torch::nn::Sequential make_net(at::Device device) {
  torch::manual_seed(1);
  torch::nn::Sequential net(torch::nn::Linear(8, 32), torch::nn::Tanh(), torch::nn::Linear(32, 1));
  net->to(device);
  return net;
}

class Training {
 public:
  Training(const lockstep::World& world, const Settings& settings)
      : world_(world), settings_(settings), net_(make_net(world.device())) {
    load();
  }

  /// Whether the loss has fallen.
  bool run() {
    while (progress_.epoch < kEpochs && steps_here_ < settings_.stop_after) run_epoch();
    save();
    return world_.rank() != 0 || last_loss_ < 0.5 * first_loss_;
  }

 private:
  void run_epoch() {
    // Of every step before, this rank has had kAccumulate batches, or all it has.
    const auto done = static_cast<std::size_t>(progress_.step * kAccumulate * kBatchSize);
    sampler_.set_epoch(progress_.epoch, std::min(done, sampler_.size()));
    // Ranks that run out take part in the others' steps, so that their optimizers and schedules stay alike.
    ddp_.join({.options = {.weighted = true}}).mirror([&] { update(); }).run([&] { train_on_my_batches(); });
    if (progress_.step == steps_per_epoch()) progress_ = {.epoch = progress_.epoch + 1, .step = 0};
  }

  void train_on_my_batches() {
    auto number = progress_.step * kAccumulate;
    for (const auto& batch : *loader_) {
      if (steps_here_ == settings_.stop_after) return;
      ++number;
      const bool completes_step = number % kAccumulate == 0 || number == most_batches();
      const auto guard = ddp_.no_sync(!completes_step);
      const auto loss = loss_of(batch);
      // Weighted by its samples: the mean over all samples of the step, however many batches they came in.
      ddp_.backward(loss, static_cast<double>(batch.data.size(0)));
      if (!completes_step) continue;
      note(loss.item<double>());
      update();
    }
  }

  at::Tensor loss_of(const torch::data::Example<>& batch) {
    const lockstep::Autocast autocast(world_.device().type(), at::kBFloat16);
    const auto output = ddp_(batch.data.to(world_.device()));
    return torch::mse_loss(output.to(at::kFloat), batch.target.to(world_.device()));
  }

  void update() {
    lockstep::clip_grad_norm_(ddp_.parameters(), 1.0);
    optimizer_.step();
    optimizer_.zero_grad();
    schedule_.step();
    ++progress_.step;
    ++steps_here_;
  }

  void note(double loss) {
    if (world_.rank() != 0) return;
    if (steps_here_ == 0) first_loss_ = loss;
    last_loss_ = loss;
    if (progress_.step == 0) {
      std::printf("epoch %lld: loss %.4f, learning rate %.5f\n", static_cast<long long>(progress_.epoch), loss,
                  schedule_.last_lr()[0]);
    }
    if (settings_.losses.empty()) return;
    char text[64];
    std::snprintf(text, sizeof(text), "%a\n", loss);
    std::ofstream(settings_.losses, std::ios::app) << text;
  }

  /// Everything that the next run needs. Ranks may be more or fewer then.
  lockstep::dcp::State state() {
    lockstep::dcp::State state;
    state.add("model", ddp_).add("optimizer", optimizer_, net_).add("schedule", schedule_);
    state.add("epoch", progress_.epoch).add("step", progress_.step);
    return state;
  }
  void save() {
    if (!settings_.checkpoint.empty()) lockstep::dcp::save(settings_.checkpoint, state());
  }
  /// If there is one.
  void load() {
    if (settings_.checkpoint.empty() || !std::ifstream(settings_.checkpoint + "/lockstep.json")) return;
    lockstep::dcp::load(settings_.checkpoint, state());
  }

  /// Of the rank that has the most samples.
  int64_t most_batches() const {
    const auto samples = (static_cast<int64_t>(kSamples) + world_.world_size() - 1) / world_.world_size();
    return (samples + kBatchSize - 1) / kBatchSize;
  }
  int64_t steps_per_epoch() const { return (most_batches() + kAccumulate - 1) / kAccumulate; }

  const lockstep::World world_;
  const Settings settings_;
  Progress progress_;
  int64_t steps_here_ = 0;
  double first_loss_ = 0;
  double last_loss_ = 0;

  torch::nn::Sequential net_;
  // Every sample once in an epoch: some ranks have one more than others.
  lockstep::DistributedSampler sampler_{kSamples, {.seed = 7, .even = false}};
  decltype(torch::data::make_data_loader(Samples().map(torch::data::transforms::Stack<>()), sampler_, 1)) loader_ =
      torch::data::make_data_loader(Samples().map(torch::data::transforms::Stack<>()), sampler_, kBatchSize);
  lockstep::DistributedDataParallel<torch::nn::Sequential> ddp_{net_, world_.group()};
  optim::AdamW optimizer_{ddp_.parameters(), {.lr = 0.02, .weight_decay = 0.01}};
  optim::SequentialLR schedule_{optimizer_,
                                {optim::LinearLROptions{.start_factor = 0.1, .total_iters = kWarmUp},
                                 optim::CosineAnnealingLROptions{.T_max = kEpochs * steps_per_epoch() - kWarmUp}},
                                {kWarmUp}};
};

Settings read_settings(int count, char** values) {
  Settings settings;
  for (int i = 1; i + 1 < count; i += 2) {
    const std::string name = values[i];
    if (name == "--checkpoint") settings.checkpoint = values[i + 1];
    if (name == "--losses") settings.losses = values[i + 1];
    if (name == "--stop-after") settings.stop_after = std::stoll(values[i + 1]);
  }
  return settings;
}

}  // namespace

int main(int count, char** values) {
  try {
    const auto world = lockstep::init();
    const auto settings = read_settings(count, values);
    const bool has_learned = Training(world, settings).run();
    const bool is_whole_run = settings.checkpoint.empty();
    return has_learned || !is_whole_run ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
