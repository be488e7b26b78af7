// Attention over a sequence that no rank holds: each has the queries of its piece, and gathers keys and values. Weights
// are whole everywhere, and their gradients averaged as over a batch that is divided.
//   lockstep-run -n 2 build/examples/context_parallel
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdio>
#include <exception>
#include <optional>

namespace {

constexpr int64_t kWidth = 16;
constexpr int64_t kHeads = 4;
constexpr int64_t kSequence = 24;

struct AttentionImpl : torch::nn::Module {
  AttentionImpl() {
    register_module("qkv", qkv);
    register_module("out", out);
  }

  /// Of the whole sequence, or of this rank's piece of it if there is a mesh.
  at::Tensor forward(const at::Tensor& x) {
    const auto parts = qkv(x).chunk(3, 2);
    const auto q = heads(parts[0]);
    const auto k = whole(heads(parts[1]));
    const auto v = whole(heads(parts[2]));
    // A query sees what stands before it: the first one of this piece, all of the pieces of lower ranks.
    const auto offset = mesh ? mesh->get_local_rank() * q.size(2) : 0;
    const auto is_seen = torch::ones({q.size(2), k.size(2)}, torch::kBool).tril(offset);
    const auto mixed = torch::scaled_dot_product_attention(q, k, v, is_seen);
    return x + out(mixed.transpose(1, 2).flatten(2));
  }

  std::optional<lockstep::DeviceMesh> mesh;
  torch::nn::Linear qkv{kWidth, 3 * kWidth};
  torch::nn::Linear out{kWidth, kWidth};

 private:
  static at::Tensor heads(const at::Tensor& x) {
    return x.view({x.size(0), x.size(1), kHeads, kWidth / kHeads}).transpose(1, 2);
  }
  /// Every rank uses keys and values with its own queries: what it makes of them are terms of their gradient, and a
  /// reduce-scatter brings the sum back to the rank whose piece it is.
  at::Tensor whole(const at::Tensor& piece) const {
    if (!mesh) return piece;
    return lockstep::DTensor::from_local(piece, *mesh, {lockstep::Shard(2)})
        .redistribute({lockstep::Replicate()})
        .to_local({.grad_placements = lockstep::Placements{lockstep::Partial()}});
  }
};
TORCH_MODULE(Attention);

Attention fresh_attention() {
  torch::manual_seed(1);
  return Attention();
}

/// The loss of the last step, over the pieces of all ranks of `mesh`.
double train(Attention& attention, const std::optional<lockstep::DeviceMesh>& mesh) {
  const auto piece = [&](const at::Tensor& x) {
    return mesh ? x.chunk(mesh->size(), 1)[static_cast<std::size_t>(mesh->get_local_rank())] : x;
  };
  std::optional<lockstep::DistributedDataParallel<Attention>> ddp;
  if (mesh) ddp.emplace(attention, lockstep::DdpOptions{.process_group = mesh->get_group()});
  torch::optim::SGD optimizer(attention->parameters(), 0.5);
  torch::manual_seed(2);
  double loss = 0;
  for (int step = 0; step < 30; ++step) {
    const auto x = torch::rand({4, kSequence, kWidth});  // the same on all ranks
    const auto wanted = x.cumsum(1) / torch::arange(1, kSequence + 1).view({1, -1, 1});
    optimizer.zero_grad();
    const auto output = ddp ? (*ddp)(piece(x)) : attention->forward(x);
    const auto error = (output - piece(wanted)).pow(2).mean();  // pieces are alike: the mean of all is that of theirs
    error.backward();
    optimizer.step();
    auto all = error.detach().clone();
    if (mesh) lockstep::all_reduce(all, mesh->get_group(), lockstep::ReduceOp::AVG);
    loss = all.item<double>();
  }
  return loss;
}

bool run(const lockstep::World& world) {
  TORCH_CHECK(kSequence % world.world_size() == 0, "ranks must divide the ", kSequence, " places of the sequence");
  auto one = fresh_attention();
  const auto expected = train(one, std::nullopt);
  auto divided = fresh_attention();
  divided->mesh = lockstep::init_device_mesh("cpu", {world.world_size()}, {.mesh_dim_names = {"cp"}});
  const auto loss = train(divided, divided->mesh);
  if (world.rank() == 0) std::printf("loss: one rank %.6f, context parallel %.6f\n", expected, loss);
  return std::abs(loss - expected) < 1e-4 * expected;
}

}  // namespace

int main() {
  try {
    const auto world = lockstep::init();
    const bool is_equal = run(world);
    if (world.rank() == 0) {
      std::printf("%d rank(s) attend as one%s\n", world.world_size(), is_equal ? "" : ": NO, the losses differ");
    }
    return is_equal ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
