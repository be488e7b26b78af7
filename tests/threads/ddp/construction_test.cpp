// Making a wrapper: what it collects, what it compares and copies, what it refuses.
#include <torch/serialize.h>

#include <atomic>

#include "lockstep/ddp/state_sync.h"
#include "tests/support/ddp_models.h"

namespace lockstep {
namespace {

using namespace ddp_models;
using testing::expect_error;
using testing::Recorder;

// DDP-1
LOCKSTEP_THREAD_TEST(DdpConstruction, RegistersTheModuleAsAChild, 2) {
  DistributedDataParallel ddp(mlp({3, 2}), world.group());
  std::vector<std::string> names;
  for (const auto& item : ddp.named_parameters()) names.push_back(item.key());
  EXPECT_EQ(names, (std::vector<std::string>{"module.layer0.weight", "module.layer0.bias"}));
  EXPECT_EQ(strip_ddp_prefix(names[0]), "layer0.weight");
  EXPECT_EQ(strip_ddp_prefix("other.weight"), "other.weight");
  EXPECT_EQ(ddp.module()->layers.size(), 1U);
  ddp.train(false);
  EXPECT_FALSE(ddp.module()->is_training());
  // The bare module reads what the wrapper's module wrote.
  torch::serialize::OutputArchive out;
  ddp.module()->save(out);
  std::stringstream file;
  out.save_to(file);
  torch::serialize::InputArchive in;
  in.load_from(file);
  auto bare = mlp({3, 2}, 99);
  bare->load(in);
  EXPECT_TRUE(at::equal(bare->layers[0]->weight, ddp.module()->layers[0]->weight));
}

// DDP-2
LOCKSTEP_THREAD_TEST(DdpConstruction, RefusesModulesWithoutAnythingToReduce, 2) {
  auto frozen = mlp({3, 2});
  for (auto& parameter : frozen->parameters()) parameter.set_requires_grad(false);
  expect_error([&] { DistributedDataParallel(frozen, world.group()); }, {"no parameter that requires a gradient"});
  auto shapeless = mlp({3, 2});
  shapeless->register_parameter("lazy", at::empty({0}));
  expect_error([&] { DistributedDataParallel(shapeless, world.group()); }, {"'lazy'", "no shape"});
  // The group is as good as before.
  barrier(world.group());
  DistributedDataParallel(mlp({3, 2}), world.group());
}

// DDP-3
LOCKSTEP_THREAD_TEST(DdpConstruction, RefusesDeviceIdsForCpuModules, 2) {
  expect_error(
      [&] { DistributedDataParallel(mlp({3, 2}), world.group(), {.device_ids = std::vector<c10::DeviceIndex>{0}}); },
      {"device_ids [0]", "output_device none", "cpu"});
  expect_error([&] { DistributedDataParallel(mlp({3, 2}), world.group(), {.output_device = 0}); },
               {"device_ids []", "output_device 0"});
  expect_error(
      [&] { DistributedDataParallel(mlp({3, 2}), world.group(), {.device_ids = std::vector<c10::DeviceIndex>{0, 1}}); },
      {"0, 1"});
  DistributedDataParallel(mlp({3, 2}), world.group(), {.device_ids = std::vector<c10::DeviceIndex>{}});
}

// DDP-4
LOCKSTEP_THREAD_TEST(DdpConstruction, RefusesSeveralKindsOfDevices, 2) {
  auto mixed = mlp({3, 2});
  mixed->register_parameter("elsewhere", at::empty({2}, at::kMeta));
  expect_error([&] { DistributedDataParallel(mixed, world.group()); }, {"cpu", "meta"});
}

// D-11: buckets of other lengths on other ranks, which nothing else would show.
LOCKSTEP_THREAD_TEST(DdpConstruction, RefusesDifferentBucketCaps, 2) {
  const bool is_first = world.rank() == 0;
  expect_error([&] { DistributedDataParallel(mlp({3, 2}), world.group(), {.bucket_cap_mb = is_first ? 1.0 : 2.0}); },
               {"bucket_cap_mb", "rank 0", "rank 1"});
  expect_error(
      [&] {
        DistributedDataParallel(mlp({3, 2}), world.group(),
                                {.bucket_cap_mb_list = is_first ? std::vector{1.0, 2.0} : std::vector{2.0},
                                 .find_unused_parameters = true});
      },
      {"bucket_cap_mb_list", "[1, 2]", "[2]"});
  barrier(world.group());
  DistributedDataParallel(mlp({3, 2}), world.group(), {.bucket_cap_mb = 1.0});
}

// DDP-5, DDP-8, DDP-10
LOCKSTEP_THREAD_TEST(DdpConstruction, WarnsOfOldOptionsAndRefusesHalfAPair, 1) {
  const Warnings warnings;
  DistributedDataParallel(mlp({3, 2}), world.group(), {.check_reduction = true});
  EXPECT_EQ(warnings.count("check_reduction"), 1);
  DistributedDataParallel(mlp({3, 2}), world.group(), {.broadcast_buffers = false, .forward_sync_buffers = true});
  EXPECT_EQ(warnings.count("broadcast_buffers"), 1);
  auto module = mlp({3, 2});
  expect_error(
      [&] { DistributedDataParallel(module, world.group(), {.param_to_hook_all_reduce = module->layers[0]->weight}); },
      {"delay_all_reduce_named_params is not"});
  expect_error(
      [&] {
        DistributedDataParallel(module, world.group(),
                                {.delay_all_reduce_named_params = {{"layer0.bias", module->layers[0]->bias}}});
      },
      {"param_to_hook_all_reduce is not"});
}

// DDP-6
LOCKSTEP_THREAD_TEST(DdpConstruction, UsesTheDefaultGroupOrASubgroup, 4) {
  DistributedDataParallel on_world(mlp({3, 2}, world.rank()));
  EXPECT_EQ(on_world.process_group()->getSize(), 4);
  const auto odd = new_subgroups(world.group(), {{1, 3}});
  if (!odd) {
    expect_error([&] { DistributedDataParallel(mlp({3, 2}), odd); }, {"null", "not in it"});
    expect_error([&] { DistributedDataParallel(mlp({3, 2}), {.process_group = odd}); }, {"null", "not part of it"});
    return;
  }
  // Rank 0 of the group is rank 1 of the world.
  DistributedDataParallel ddp(mlp({3, 2}, world.rank()), odd);
  testing::check_equal("weight", ddp.module()->layers[0]->weight, mlp({3, 2}, 1)->layers[0]->weight);
}

// DDP-7
LOCKSTEP_THREAD_TEST(DdpConstruction, TakesAMeshOfOneAxis, 4) {
  const auto mesh = init_device_mesh("cpu", {2, 2}, {.mesh_dim_names = {"dp", "tp"}});
  expect_error([&] { DistributedDataParallel(mlp({3, 2}), DdpOptions{.device_mesh = mesh}); },
               {"one axis", "DeviceMesh"});
  expect_error([&] { DistributedDataParallel(mlp({3, 2}), world.group(), {.device_mesh = mesh["dp"]}); },
               {"process_group and device_mesh"});
  DistributedDataParallel ddp(mlp({3, 2}, world.rank()), DdpOptions{.device_mesh = mesh["dp"]});
  EXPECT_EQ(ddp.process_group()->getSize(), 2);
  testing::check_equal("weight", ddp.module()->layers[0]->weight, mlp({3, 2}, world.rank() % 2)->layers[0]->weight);
}

// DDP-9
LOCKSTEP_THREAD_TEST(DdpConstruction, TakesBucketCapsAndRefusesNegativeOnes, 2) {
  const auto bytes = [&](const DdpOptions& options) {
    DistributedDataParallel ddp(mlp({3, 2}), world.group(), options);
    return ddp.get_ddp_logging_data().ints_map.at("bucket_cap_bytes");
  };
  EXPECT_EQ(bytes({}), 25 << 20);
  EXPECT_EQ(bytes({.bucket_cap_mb = 3}), 3 << 20);
  EXPECT_EQ(bytes({.bucket_cap_mb = 0}), 0);
  EXPECT_EQ(bytes({.bucket_cap_mb_list = {1, 4, 2}}), 4 << 20);
  expect_error([&] { bytes({.bucket_cap_mb = -1}); }, {"bucket_cap_mb", "-1"});
}

// DDP-12
LOCKSTEP_THREAD_TEST(DdpConstruction, CommunicatesNothingWithoutInitSync, 3) {
  Recorder recorder;
  DistributedDataParallel ddp(mlp({3, 2}, world.rank()), world.group(), {.init_sync = false});
  EXPECT_TRUE(recorder.events("launch").empty());
  testing::check_equal("own weights", ddp.module()->layers[0]->weight, mlp({3, 2}, world.rank())->layers[0]->weight);
}

// DDP-14
LOCKSTEP_THREAD_TEST(DdpConstruction, OneBadRankIsToldToAll, 3) {
  auto module = mlp({3, 2});
  DdpOptions options;
  if (world.rank() == 1) options.bucket_cap_mb = -5;
  const auto text = expect_error([&] { DistributedDataParallel(module, world.group(), options); },
                                 {"on rank 1", "bucket_cap_mb is -5"});
  for (const auto& other : all_gather_object(text, world.group())) EXPECT_EQ(other, text);
}

/// A module that registers another's tensor under a name of its own.
struct SharedImpl : torch::nn::Module {
  SharedImpl() : first(register_module("first", torch::nn::Linear(4, 4))) {
    again = register_parameter("zz_again", first->weight);
    register_module("twice", first.ptr());
  }
  at::Tensor forward(const at::Tensor& input) { return at::matmul(first->forward(input), again); }
  torch::nn::Linear first;
  at::Tensor again;
};
TORCH_MODULE(Shared);

// DDP-15, DDP-18
LOCKSTEP_THREAD_TEST(DdpConstruction, CountsASharedTensorOnceUnderItsFirstName, 2) {
  DistributedDataParallel ddp(Shared(), world.group());
  std::vector<std::string> names;
  for (const auto& parameter : ddp.bucket_plan().parameters()) names.push_back(parameter.name);
  // The root's own parameters come before those of its children.
  EXPECT_EQ(names, (std::vector<std::string>{"zz_again", "first.bias"}));
}

// DDP-16, DDP-17
LOCKSTEP_THREAD_TEST(DdpConstruction, LeavesIgnoredTensorsAlone, 2) {
  auto module = mlp({3, 3, 2}, world.rank());
  module->register_buffer("counter", at::full({1}, world.rank()));
  const Warnings warnings;
  set_params_and_buffers_to_ignore_for_model(module.ptr(), {"layer0.weight", "counter", "no.such.name"});
  EXPECT_EQ(warnings.count("'no.such.name'"), 1);
  DistributedDataParallel ddp(module, world.group());
  EXPECT_EQ(ddp.bucket_plan().parameters().size(), 3U);
  testing::check_equal("ignored", ddp.module()->layers[0]->weight, mlp({3, 3, 2}, world.rank())->layers[0]->weight);
  testing::check_equal("managed", ddp.module()->layers[1]->weight, mlp({3, 3, 2}, 0)->layers[1]->weight);
  ddp(at::full({1, 3}, world.rank() + 1.0)).sum().backward();
  EXPECT_EQ(module->named_buffers()["counter"].item<int64_t>(), world.rank());
  const auto grads = [&](const at::Tensor& parameter) {
    const auto all = at::empty({2, parameter.numel()});
    all_gather_into_tensor(all, parameter.grad().reshape({1, -1}), world.group());
    return all;
  };
  const auto local = grads(ddp.module()->layers[0]->weight);
  EXPECT_FALSE(at::equal(local[0], local[1]));
  const auto reduced = grads(ddp.module()->layers[1]->bias);
  EXPECT_TRUE(at::equal(reduced[0], reduced[1]));
}

// DDP-21
LOCKSTEP_THREAD_TEST(DdpConstruction, DifferentNumbersOfParametersAreToldToAllRanks, 3) {
  expect_error([&] { DistributedDataParallel(world.rank() == 1 ? mlp({3, 3, 2}) : mlp({3, 2}), world.group()); },
               {"number of parameters", "rank 1", "4", "2"});
  barrier(world.group());
}

// DDP-22
LOCKSTEP_THREAD_TEST(DdpConstruction, DifferentParametersAreToldToAllRanks, 2) {
  expect_error([&] { DistributedDataParallel(world.rank() == 1 ? mlp({3, 4}) : mlp({3, 5}), world.group()); },
               {"parameter 0 'layer0.weight'", "[4, 3]", "[5, 3]", "rank 1"});
  auto module = mlp({3, 5});
  if (world.rank() == 1) module->layers[0]->to(at::kDouble);
  expect_error([&] { DistributedDataParallel(module, world.group()); }, {"'layer0.weight'", "Double", "Float"});
  auto strided = mlp({3, 5});
  if (world.rank() == 1) {
    strided->layers[0]->weight.set_data(strided->layers[0]->weight.detach().t().contiguous().t());
  }
  expect_error([&] { DistributedDataParallel(strided, world.group()); },
               {"'layer0.weight'", "strides [3, 1]", "strides [1, 5]"});
  barrier(world.group());
}

// DDP-22: strides that are the same everywhere are fine.
LOCKSTEP_THREAD_TEST(DdpConstruction, TakesChannelsLast, 2) {
  torch::nn::Conv2d conv(torch::nn::Conv2dOptions(3, 4, 3));
  seeded(conv);
  conv->to(at::kFloat);
  conv->weight.set_data(conv->weight.detach().contiguous(at::MemoryFormat::ChannelsLast));
  const auto batch = at::randn({4, 3, 6, 6}, at::detail::createCPUGenerator(1), at::TensorOptions());
  auto reference = torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 4, 3));
  seeded(reference);
  reference->forward(batch).pow(2).mean().backward();
  for (const bool as_view : {false, true}) {
    zero_grads(*conv);
    DistributedDataParallel ddp(conv, world.group(), {.gradient_as_bucket_view = as_view});
    for (int step = 0; step < 2; ++step) {
      zero_grads(*conv);
      ddp(my_rows(batch, world)).pow(2).mean().backward();
      expect_close(gradients_of(*conv), gradients_of(*reference));
      EXPECT_EQ(conv->weight.grad().strides(), conv->weight.strides());
    }
  }
}

// DDP-23
LOCKSTEP_THREAD_TEST(DdpConstruction, CopiesRankZerosParametersAndBuffers, 3) {
  auto module = mlp({3, 4, 2}, world.rank());
  module->layers[1]->bias.set_requires_grad(false);
  module->register_buffer("empty", at::empty({0}));
  module->register_buffer("count", at::full({2}, world.rank(), at::kLong));
  module->register_buffer("half", at::full({3}, world.rank(), at::kHalf));
  DistributedDataParallel ddp(module, world.group());
  expect_close(module->parameters(), mlp({3, 4, 2}, 0)->parameters(), 0);
  EXPECT_EQ(module->named_buffers()["count"].sum().item<int64_t>(), 0);
  EXPECT_EQ(module->named_buffers()["half"].sum().item<float>(), 0);
}

// DDP-23: in chunks, whatever their size.
LOCKSTEP_THREAD_TEST(DdpConstruction, BroadcastsInChunks, 2) {
  for (const std::size_t chunk : {std::size_t{1}, std::size_t{100}, kBroadcastChunkBytes}) {
    std::vector<at::Tensor> tensors;
    for (int i = 0; i < 10; ++i)
      tensors.push_back(at::full({i * 3}, world.rank() * 100 + i, i % 2 == 0 ? at::kFloat : at::kLong));
    tensors.push_back(at::full({2, 3}, world.rank()).t());
    tensors.push_back(at::full({4, 4}, world.rank()).slice(1, 0, 2));
    broadcast_coalesced(tensors, world.group(), chunk, 1);
    for (int i = 0; i < 10; ++i) EXPECT_TRUE((tensors[i] == 100 + i).all().item<bool>()) << i;
    EXPECT_TRUE((tensors[10] == 1).all().item<bool>());
    EXPECT_TRUE((tensors[11] == 1).all().item<bool>());
  }
}

// DDP-32
LOCKSTEP_THREAD_TEST(DdpConstruction, MayBeWrappedAgain, 2) {
  auto module = mlp({3, 2});
  for (int i = 0; i < 3; ++i) {
    zero_grads(*module);
    DistributedDataParallel ddp(module, world.group());
    ddp(at::full({1, 3}, world.rank() + 1.0)).sum().backward();
    // Reduced once, not once per wrapper there has been.
    EXPECT_TRUE(at::allclose(module->layers[0]->weight.grad(), at::full({2, 3}, 1.5)));
  }
}

// What decides the collectives of a step is compared when the wrapper is made
LOCKSTEP_THREAD_TEST(DdpConstruction, NamesOptionsThatDifferBetweenRanks, 2) {
  const bool is_odd = world.rank() == 1;
  const auto differ = [&](const DdpOptions& options, const std::string& name) {
    expect_error([&] { DistributedDataParallel(mlp({4, 2}), world.group(), options); }, {"options", name, "rank 1"});
  };
  differ({.find_unused_parameters = is_odd}, "find_unused_parameters");
  differ({.static_graph = is_odd}, "static_graph");
  differ({.mixed_precision = is_odd ? std::optional(MixedPrecision{.param_dtype = at::kHalf}) : std::nullopt},
         "param_dtype");
  expect_error(
      [&] {
        DistributedDataParallel(mlp({4, 2}), world.group(),
                                {.mixed_precision = MixedPrecision{.param_dtype = at::kInt}});
      },
      {"Int", "floating point"});
  DistributedDataParallel(mlp({4, 2}), world.group());
}

}  // namespace
}  // namespace lockstep
