// Compiled modules on an accelerator.
#include <torch/torch.h>

#include "lockstep/ddp/distributed_data_parallel.h"
#include "lockstep/fsdp/fully_shard.h"
#include "lockstep/graph/compiled.h"
#include "tests/support/on_gpu.h"

namespace lockstep::graph_gpu_test {
namespace {

struct NetImpl : torch::nn::Module {
  NetImpl() {
    for (int i = 0; i < 4; ++i) layers.push_back(register_module(std::to_string(i), torch::nn::Linear(16, 16)));
    norm = register_module("norm", torch::nn::BatchNorm1d(16));
  }
  at::Tensor forward(const at::Tensor& x) {
    auto y = x + torch::ones({16}, x.options());
    for (auto& layer : layers) y = at::tanh(layer->forward(y));
    return norm->forward(y);
  }
  std::vector<torch::nn::Linear> layers;
  torch::nn::BatchNorm1d norm = nullptr;
};
TORCH_MODULE(Net);

at::Tensor drawn(at::IntArrayRef sizes, std::uint64_t seed) {
  return at::randn(sizes, at::make_generator<at::CPUGeneratorImpl>(seed));
}

template <class Holder>
Holder on_device(Holder net, at::Device device) {
  const torch::NoGradGuard no_grad;
  std::uint64_t seed = 3;
  for (auto& parameter : net->parameters()) parameter.copy_(drawn(parameter.sizes(), seed++) * 0.3);
  net->to(device);
  return net;
}

template <class Model, class Module>
std::vector<at::Tensor> trained(Model&& model, Module& module, const World& world) {
  torch::optim::SGD optimizer(module.parameters(), 0.1);
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    model(drawn({8, 16}, static_cast<std::uint64_t>(10 * step + world.rank())).to(world.device()))
        .pow(2)
        .mean()
        .backward();
    optimizer.step();
  }
  std::vector<at::Tensor> values;
  for (const auto& parameter : module.parameters()) values.push_back(parameter.detach().cpu());
  for (const auto& buffer : module.buffers()) values.push_back(buffer.detach().cpu());
  return values;
}

void expect_close(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& expected,
                  const std::string& what) {
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(at::allclose(got[i], expected[i], 1e-4, 1e-6)) << what << i;
}

class GraphOnGpu : public testing::OnGpu {};

}  // namespace

// GRAPH-2, GRAPH-38
TEST_F(GraphOnGpu, CompiledModulesTrainAsOthersDo) {
  on_gpu([](const World& world) {
    const DdpOptions options{.bucket_cap_mb = 0.002};
    DistributedDataParallel<Net> plain(on_device(Net(), world.device()), options);
    const auto expected = trained(plain, *plain.module(), world);
    for (const auto* const backend : {"eager", "autograd", "executor"}) {
      DistributedDataParallel<Net> ddp(on_device(Net(), world.device()), options);
      const auto compiler = compile(ddp, {.backend = backend, .aligns_buckets = true});
      expect_close(trained(ddp, *ddp.module(), world), expected, backend);
      EXPECT_GE(compiler->program().parts().size(), 2);
      for (const auto& part : compiler->program().parts()) EXPECT_TRUE(part.is_compiled) << backend;
    }
  });
}

// FSDP-85
TEST_F(GraphOnGpu, CompiledUnitsTrainAsOthersDo) {
  on_gpu([](const World& world) {
    const auto run = [&](auto net) {
      fully_shard(*net, {.mesh = DeviceMesh::from_group(world.group(), "cuda"), .force_sharding = true});
      return trained([&](const at::Tensor& x) { return net->forward(x); }, *net, world);
    };
    const auto expected = run(on_device(Net(), world.device()));
    for (const auto* const backend : {"eager", "autograd"}) {
      Compiled<Net> net;
      net->set_compile_options({.backend = backend});
      expect_close(run(on_device(net, world.device())), expected, backend);
    }
  });
}

}  // namespace lockstep::graph_gpu_test
