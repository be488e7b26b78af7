// A layer divided among ranks: each multiplies by its part of the weights, and what they make is put together. The
// model is written, and used, as for one rank.
//   make build && build/bin/lockstep-run -n 2 build/examples/tensor_parallel
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdio>
#include <exception>
#include <functional>

namespace {

constexpr int64_t kWidth = 16;
constexpr int64_t kSequence = 12;

struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    register_module("norm", norm);
    register_module("in_proj", in_proj);
    register_module("out_proj", out_proj);
  }
  at::Tensor forward(const at::Tensor& x) { return x + out_proj(torch::gelu(in_proj(norm(x)))); }

  torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({kWidth})};
  torch::nn::Linear in_proj{kWidth, 4 * kWidth};
  torch::nn::Linear out_proj{4 * kWidth, kWidth};
};
TORCH_MODULE(Block);

/// Trains on the piece of the sequence that `part` cuts from the batch. The loss is that of all pieces.
double train(Block& block, const std::function<at::Tensor(const at::Tensor&)>& part,
             const lockstep::GroupPtr& sum_over) {
  torch::optim::SGD optimizer(block->parameters(), 0.5);  // after parallelize_module(): these are this rank's parts
  torch::manual_seed(2);
  double loss = 0;
  for (int step = 0; step < 30; ++step) {
    const auto x = torch::rand({4, kSequence, kWidth});  // the same on all ranks: they share the work on one batch
    const auto wanted = x.flip({2}).sin();
    optimizer.zero_grad();
    const auto error = (block->forward(part(x)) - part(wanted)).pow(2).sum() / x.numel();
    error.backward();
    optimizer.step();
    auto all = error.detach().clone();
    if (sum_over) lockstep::all_reduce(all, sum_over);
    loss = all.item<double>();
  }
  return loss;
}

Block fresh_block() {
  torch::manual_seed(1);
  return Block();
}

bool run(const lockstep::World& world) {
  const auto mesh = lockstep::init_device_mesh("cpu", {world.world_size()}, {.mesh_dim_names = {"tp"}});
  const auto all = [](const at::Tensor& x) { return x; };
  auto whole = fresh_block();
  const auto expected = train(whole, all, nullptr);

  // in_proj's columns and out_proj's rows are divided: one all-reduce forward, one backward.
  auto parallel = fresh_block();
  lockstep::parallelize_module(*parallel, mesh["tp"],
                               {{"in_proj", lockstep::ColwiseParallel()}, {"out_proj", lockstep::RowwiseParallel()}});
  const auto loss = train(parallel, all, nullptr);

  // Between the products each rank has its piece of the sequence: a gather before them, a reduce-scatter after.
  auto sequence = fresh_block();
  lockstep::parallelize_module(*sequence, mesh["tp"],
                               {{"norm", lockstep::SequenceParallel()},
                                {"in_proj", lockstep::ColwiseParallel({.input_layouts = lockstep::Shard(1)})},
                                {"out_proj", lockstep::RowwiseParallel({.output_layouts = lockstep::Shard(1)})}});
  const auto piece = [&](const at::Tensor& x) {
    return lockstep::distribute_tensor(x, mesh, {lockstep::Shard(1)}, {.src_data_rank = std::nullopt}).to_local();
  };
  const auto sequence_loss = train(sequence, piece, world.group());

  if (world.rank() == 0) {
    const auto weights = [](const Block& block) {
      return static_cast<long long>(block->in_proj->parameters()[0].numel());
    };
    std::printf("rank 0 holds %lld of %lld weights of in_proj\n", weights(parallel), weights(whole));
    std::printf("loss: one rank %.6f, tensor parallel %.6f, sequence parallel %.6f\n", expected, loss, sequence_loss);
  }
  return std::abs(loss - expected) < 1e-4 * expected && std::abs(sequence_loss - expected) < 1e-4 * expected;
}

}  // namespace

int main() {
  try {
    const auto world = lockstep::init();
    const bool is_equal = run(world);
    if (world.rank() == 0) {
      std::printf("%d rank%s train%s as one%s\n", world.world_size(), world.world_size() == 1 ? "" : "s",
                  world.world_size() == 1 ? "s" : "", is_equal ? "" : ": NO, the losses differ");
    }
    return is_equal ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
