// FSDP over parameters that tensor parallelism has cut, against one process with the whole batch.
#include <torch/optim/adam.h>

#include "lockstep/checkpointing/checkpoint.h"
#include "lockstep/ddp/distributed_data_parallel.h"
#include "lockstep/fsdp/join.h"
#include "lockstep/fsdp/memory_plan.h"
#include "lockstep/fsdp/sharded_files.h"
#include "lockstep/join/join.h"
#include "lockstep/optim/clip_grad.h"
#include "lockstep/optim/grad_scaler.h"
#include "lockstep/testing/temp_dir.h"
#include "tests/support/tensor_parallel_models.h"

namespace lockstep::fsdp_two_dimensional_test {

using namespace tensor_parallel_models;
using testing::check_equal;
using torch::optim::Adam;
using torch::optim::SGD;

void on_mesh(int64_t dp, int64_t tp, const std::function<void(const DeviceMesh& mesh)>& body) {
  testing::run_threads_in_gtest({.world_size = static_cast<int>(dp * tp)},
                                [&](const World&) { body(mesh_of(dp, tp)); });
}

// TP-49, TP-50, TP-53, TP-54, TP-58: losses, gradients and weights, with inputs that are the same on tp ranks
TEST(FsdpTwoDimensional, TrainsAsOneProcess) {
  for (const auto& [dp, tp] : {std::pair(2, 2), std::pair(3, 2), std::pair(2, 3), std::pair(1, 2), std::pair(2, 1)}) {
    on_mesh(dp, tp, [](const DeviceMesh& mesh) {
      const auto what = mesh.to_string();
      expect_trains_as_one<SGD>(mesh, parallel_net(mesh["tp"]), {.mesh = mesh["dp"]}, what + " SGD");
      expect_trains_as_one<Adam>(mesh, parallel_net(mesh["tp"]), {.mesh = mesh["dp"]}, what + " Adam", 1e-4);
      expect_trains_as_one<SGD>(mesh, parallel_net(mesh["tp"]), {.mesh = mesh["dp"], .reshard_after_forward = false},
                                what + " kept whole");
      expect_trains_as_one<SGD>(mesh, parallel_net(mesh["tp"]),
                                {.mesh = mesh["dp"], .sharding_strategy = ShardingStrategy::kNoShard},
                                what + " not divided");
    });
  }
}

// TP-50, TP-51: rows that two axes have cut are cut last once more
TEST(FsdpTwoDimensional, ShardsRowsThatTwoAxesHaveCut) {
  testing::run_threads_in_gtest({.world_size = 8}, [](const World&) {
    const auto mesh = init_device_mesh("cpu", {2, 2, 2}, {.mesh_dim_names = {"dp", "a", "b"}});
    auto rows = built_from_seed([] { return torch::nn::Linear(torch::nn::LinearOptions(3, 16).bias(false)); });
    const auto whole = rows->weight.detach().clone();
    cut(rows->weight, mesh.slice({"a", "b"}), {Shard(0), Shard(0)});
    fully_shard(rows, {.mesh = mesh["dp"]});
    const auto shard = rows->parameters()[0];
    EXPECT_EQ(layout_of(shard)->placements(), (Placements{StridedShard(0, 4), Shard(0), Shard(0)}));
    check_equal("rows", gather_whole(shard.detach(), *layout_of(shard)), whole);
  });
}

// TP-49, TP-50
TEST(FsdpTwoDimensional, ShardsCarryTheLayoutOfBothAxes) {
  on_mesh(2, 2, [](const DeviceMesh& mesh) {
    auto net = parallel_net(mesh["tp"]);
    shard_net(net, {.mesh = mesh["dp"]});
    const auto parameters = net->named_parameters();
    const auto placements = [&](const std::string& name) { return layout_of(parameters[name])->placements(); };
    const auto both = [](Placement dp, Placement tp) { return Placements{std::move(dp), std::move(tp)}; };
    // Seven rows: in the order in which they were cut.
    EXPECT_EQ(placements("block0.up.weight"), both(Shard(0), Shard(0)));
    EXPECT_EQ(layout_of(parameters["block0.up.bias"])->mesh(), DeviceMesh::concatenate({mesh["tp"], mesh["dp"]}));
    auto even = built_from_seed([] { return torch::nn::Linear(4, 8); });
    const auto whole = even->weight.detach().clone();
    cut(even->weight, mesh["tp"], {Shard(0)});
    cut(even->bias, mesh["tp"], {StridedShard(0, 2)});
    fully_shard(even, {.mesh = mesh["dp"]});
    const auto rows_of = [&](std::size_t i) { return layout_of(even->parameters()[i]); };
    EXPECT_EQ(rows_of(0)->placements(), both(StridedShard(0, 2), Shard(0)));
    EXPECT_EQ(rows_of(0)->mesh(), mesh);
    check_equal("strided", gather_whole(even->parameters()[0].detach(), *rows_of(0)), whole);
    EXPECT_EQ(rows_of(1)->placements(), both(StridedShard(0, 2), Shard(0))) << "two layers' side by side";
    EXPECT_EQ(rows_of(1)->mesh().mesh_dim_names(), (std::vector<std::string>{"tp", "dp"}));
    check_equal("fused", gather_whole(even->parameters()[1].detach(), *rows_of(1)),
                built_from_seed([] { return torch::nn::Linear(4, 8); })->bias.detach());
    EXPECT_EQ(placements("block0.down.weight"), both(Shard(0), Shard(1)));
    EXPECT_EQ(placements("block0.norm.weight"), both(Shard(0), Replicate()));
    EXPECT_EQ(placements("first.weight"), Placements{Shard(0)});
    EXPECT_EQ(layout_of(parameters["block0.down.weight"])->mesh(), mesh);
    EXPECT_EQ(layout_of(parameters["block0.up.weight"])->sizes(), (std::vector<int64_t>{kHidden, kWidth}));
    // What modules compute with is this rank's part, as tensor parallelism left it.
    const auto rows = mesh.get_local_rank("tp") == 0 ? 4 : 3;
    EXPECT_EQ(net->blocks[0]->up->weight.sizes(), at::IntArrayRef({rows, kWidth}));
    EXPECT_EQ(parameters["block0.up.weight"].sizes(),
              at::IntArrayRef({mesh.get_local_rank("dp") == 0 ? 2 : rows - 2, kWidth}));
    expect_same_net(net, whole_net(), 0, "values");
  });
  // Another dim, on which tensor parallelism cuts other parameters.
  on_mesh(2, 2, [](const DeviceMesh& mesh) {
    const auto second = [](const std::string& name, const at::Tensor& parameter) -> std::optional<ShardPlacement> {
      if (parameter.dim() < 2 || !name.starts_with("up")) return std::nullopt;
      return ShardPlacement{.dim = 1};
    };
    const FullyShardOptions options{.mesh = mesh["dp"], .shard_placement_fn = second};
    auto net = parallel_net(mesh["tp"]);
    shard_net(net, options);
    EXPECT_EQ(layout_of(net->blocks[0]->named_parameters()["up.weight"])->placements(),
              (Placements{Shard(1), Shard(0)}));
    expect_trains_as_one<SGD>(mesh, parallel_net(mesh["tp"]), options, "dim 1");
  });
}

// TP-54: a rank that has nothing of a parameter
TEST(FsdpTwoDimensional, ShardsPartsWithoutElements) {
  on_mesh(2, 2, [](const DeviceMesh& mesh) {
    for (const auto& balance : {std::shared_ptr<ShardBalance>(), std::make_shared<ShardBalance>()}) {
      auto row = built_from_seed([] { return torch::nn::Linear(torch::nn::LinearOptions(4, 1).bias(false)); });
      const auto whole = row->weight.detach().clone();
      cut(row->weight, mesh["tp"], {Shard(0)});
      auto column = built_from_seed([] { return torch::nn::Linear(torch::nn::LinearOptions(1, 5).bias(false)); });
      cut(column->weight, mesh["tp"], {Shard(1)});
      fully_shard(row, {.mesh = mesh["dp"], .balance = balance});
      fully_shard(column, {.mesh = mesh["dp"], .balance = balance});
      const auto batch = part_of_batch(0, mesh.get_local_rank("dp"), 2);
      at::linear(batch, row->weight).sum().backward();
      const auto shard = row->parameters()[0];
      check_equal("values", gather_whole(shard.detach(), *layout_of(shard)), whole);
      const auto gradient = part_of_batch(0, 0, 1).sum(0, /*keepdim=*/true) / 2;
      EXPECT_TRUE(at::allclose(gather_whole(shard.grad(), *layout_of(shard)), gradient));
      EXPECT_EQ(gather_whole(column->parameters()[0].detach(), *layout_of(column->parameters()[0])).sizes(),
                at::IntArrayRef({5, 1}));
    }
  });
}

// TP-49, TP-54: replicas of shards
TEST(FsdpTwoDimensional, TrainsOnAMeshWithReplicas) {
  testing::run_threads_in_gtest({.world_size = 8}, [](const World&) {
    const auto mesh = init_device_mesh("cpu", {2, 2, 2}, {.mesh_dim_names = {"replicate", "shard", "tp"}});
    auto expected = whole_net();
    auto wanted = optimizer_of<Adam>(expected);
    const auto losses = train_whole(expected, wanted, 0, 3);
    auto net = parallel_net(mesh["tp"]);
    shard_net(net, {.mesh = mesh.slice({"replicate", "shard"})});
    EXPECT_EQ(layout_of(net->blocks[0]->named_parameters()["down.weight"])->placements(),
              (Placements{Replicate(), Shard(0), Shard(1)}));
    auto optimizer = optimizer_of<Adam>(net);
    const auto data = mesh.slice({"replicate", "shard"}).flatten("data").get_group();
    expect_same_losses(train_parts(net, optimizer, data, 0, 3), losses, 1e-5, "hybrid");
    expect_same_net(net, expected, 1e-4, "hybrid");
  });
}

// TP-54
TEST(FsdpTwoDimensional, TrainsInMixedPrecision) {
  on_mesh(2, 2, [](const DeviceMesh& mesh) {
    const MixedPrecisionPolicy policy{.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
    expect_trains_as_one<SGD>(mesh, parallel_net(mesh["tp"]), {.mesh = mesh["dp"], .mp_policy = policy}, "bfloat16",
                              0.05);
    // Nearer to what one process does in that precision.
    auto expected = whole_net();
    const auto alone = init_device_mesh("cpu", {4, 1}, {.mesh_dim_names = {"x", "alone"}})["alone"];
    shard_net(expected, {.mesh = alone, .mp_policy = policy});
    auto wanted = optimizer_of<SGD>(expected);
    const auto losses = train_whole(expected, wanted, 0, 3);
    auto net = parallel_net(mesh["tp"]);
    shard_net(net, {.mesh = mesh["dp"], .mp_policy = policy});
    auto optimizer = optimizer_of<SGD>(net);
    expect_same_losses(train_parts(net, optimizer, mesh.get_group("dp"), 0, 3), losses, 0.01, "bfloat16");
    expect_same_net(net, expected, 0.02, "bfloat16");
  });
}

// TP-54
TEST(FsdpTwoDimensional, TrainsOffloadedAndWithEveryOrderOfGathers) {
  on_mesh(2, 2, [](const DeviceMesh& mesh) {
    expect_trains_as_one<SGD>(mesh, parallel_net(mesh["tp"]),
                              {.mesh = mesh["dp"], .offload_policy = CPUOffloadPolicy{.pin_memory = false}},
                              "offloaded");
    for (const bool forward : {false, true}) {
      for (const auto backward :
           {BackwardPrefetch::kNone, BackwardPrefetch::kBackwardPre, BackwardPrefetch::kBackwardPost}) {
        expect_trains_as_one<SGD>(mesh, parallel_net(mesh["tp"]),
                                  {.mesh = mesh["dp"], .forward_prefetch = forward, .backward_prefetch = backward},
                                  str("prefetch ", forward, " ", static_cast<int>(backward)));
      }
    }
  });
}

// TP-54: gradients that are set aside are of this rank's part
TEST(FsdpTwoDimensional, AccumulatesGradients) {
  on_mesh(2, 2, [](const DeviceMesh& mesh) {
    auto expected = whole_net();
    auto net = parallel_net(mesh["tp"]);
    auto root = shard_net(net, {.mesh = mesh["dp"]});
    const auto data = mesh.get_group("dp");
    for (int step = 0; step < 2; ++step) {
      loss_of(expected, part_of_batch(step, 0, 1)).backward();
      std::optional<FsdpNoSync> scope;
      if (step == 0) scope.emplace(root.no_sync());
      loss_of(net, part_of_batch(step, data->getRank(), data->getSize())).backward();
    }
    expect_same_net(net, expected, 1e-5, "accumulated", /*of_gradients=*/true);
  });
}

// TP-49, TP-54: what is computed again sums over the tensor-parallel ranks again
TEST(FsdpTwoDimensional, TrainsWithCheckpointedUnits) {
  on_mesh(2, 2, [](const DeviceMesh& mesh) {
    auto expected = whole_net();
    auto net = parallel_net(mesh["tp"]);
    shard_net(net, {.mesh = mesh["dp"], .reshard_after_forward = true});
    const auto data = mesh.get_group("dp");
    loss_of(expected, part_of_batch(0, 0, 1)).backward();
    auto hidden = net->first->forward(part_of_batch(0, data->getRank(), data->getSize()));
    for (auto& block : net->blocks) hidden = checkpoint(block, hidden);
    net->head->forward(hidden).pow(2).mean().backward();
    expect_same_net(net, expected, 1e-5, "checkpointed", /*of_gradients=*/true);
  });
}

// TP-54: ranks for data that run out are mirrored by both of their tensor-parallel ranks
TEST(FsdpTwoDimensional, JoinsUnevenInputs) {
  on_mesh(2, 2, [](const DeviceMesh& mesh) {
    const auto train = [&](ParallelNet net, const DeviceMesh& on) {
      const auto root = shard_net(net, {.mesh = on});
      FsdpJoinable joinable(root);
      auto optimizer = optimizer_of<SGD>(net);
      const auto update = [&] { optimizer.step(); };
      Join({&joinable}).mirror(update).run([&] {
        for (int step = 0; step < 1 + 2 * on.get_local_rank(); ++step) {
          optimizer.zero_grad();
          loss_of(net, part_of_batch(step, on.get_local_rank(), 2)).backward();
          update();
        }
      });
      return net;
    };
    const auto expected = train(whole_net(), mesh["dp"]);
    const auto net = train(parallel_net(mesh["tp"]), mesh["dp"]);
    const auto wanted = full_state_dict(*expected);
    for (const auto& [name, value] : full_state_dict(*net)) {
      EXPECT_TRUE(at::allclose(value, wanted.at(name), 1e-5, 1e-5)) << name;
    }
  });
}

// TP-49, TP-51
TEST(FsdpTwoDimensional, RefusesWhatDoesNotGoTogether) {
  testing::run_threads_in_gtest({.world_size = 4}, [](const World& world) {
    const auto mesh = mesh_of(2, 2);
    const auto linear = [&](const DeviceMesh& on, const Placements& placements) {
      auto made = built_from_seed([] { return torch::nn::Linear(torch::nn::LinearOptions(4, 8).bias(false)); });
      cut(made->weight, on, placements);
      return made;
    };
    const auto expect_refusal = [&](const DeviceMesh& on, const Placements& placements, FullyShardOptions options,
                                    const std::vector<std::string>& words) {
      auto made = linear(on, placements);
      expect_error([&] { fully_shard(made, options); }, words);
      EXPECT_FALSE(has_gathered_layout(made->parameters()[0])) << "nothing has changed";
      EXPECT_EQ(layout_of(made->weight)->placements(), placements);
    };
    const auto other = mesh_of(2, 2);
    expect_refusal(mesh["tp"], {Shard(0)}, {.mesh = other["dp"]},
                   {"rank", "'weight'", "cut from different meshes", "mesh[\"dp\"]"});
    expect_refusal(mesh["tp"], {Shard(0)}, {.mesh = mesh["tp"]}, {"'weight'", "overlap"});
    expect_refusal(mesh["tp"], {Shard(0)}, {.mesh = mesh}, {"'weight'", "overlap"});
    expect_refusal(mesh["tp"], {Shard(0)}, {.mesh = std::nullopt}, {"'weight'", "mesh[\"dp\"]"});
    expect_refusal(mesh["tp"], {Partial()}, {.mesh = mesh["dp"]}, {"'weight'", "Partial(sum)", "Reduce them first"});
    expect_refusal(mesh["tp"], {Shard(0)}, {.mesh = mesh["dp"], .use_orig_params = false}, {"'weight'", "flat"});
    expect_refusal(mesh["tp"], {RaggedShard(0, {5, 3})}, {.mesh = mesh["dp"]}, {"'weight'", "ragged"});
    const auto rows = [](const std::string&, const at::Tensor&) {
      return std::optional(ShardPlacement{.rows = {1, 3}});
    };
    expect_refusal(mesh["tp"], {Shard(0)}, {.mesh = mesh["dp"], .shard_placement_fn = rows}, {"'weight'", "ragged"});
    const auto tall = init_device_mesh("cpu", {4, 1}, {.mesh_dim_names = {"dp", "tp"}});
    expect_refusal(tall["tp"], {Shard(0)}, {.mesh = tall["dp"], .reshard_after_forward = 2},
                   {"'weight'", "reshard_after_forward"});
    const auto many = init_device_mesh("cpu", {2, 2, 1, 1}, {.mesh_dim_names = {"dp", "a", "b", "c"}});
    expect_refusal(many.slice({"a", "b", "c"}), {Shard(0), Replicate(), Replicate()}, {.mesh = many["dp"]},
                   {"'weight'", "more than 2 axes"});
    // Rows of other sizes where tensor parallelism cuts columns, and a balance over both.
    auto wide = linear(mesh["tp"], {Shard(1)});
    const auto uneven = [](const std::string&, const at::Tensor&) {
      return std::optional(ShardPlacement{.rows = {1, 7}});
    };
    fully_shard(wide, {.mesh = mesh["dp"], .shard_placement_fn = uneven});
    EXPECT_EQ(layout_of(wide->parameters()[0])->placements(), (Placements{RaggedShard(0, {1, 7}), Shard(1)}));
    auto net = parallel_net(mesh["tp"]);
    shard_net(net, {.mesh = mesh["dp"], .balance = std::make_shared<ShardBalance>()});
    expect_same_net(net, whole_net(), 0, "balanced");
    barrier(world.group());
  });
}

// TP-52
TEST(FsdpTwoDimensional, TakesOneMeshWithNamedAxes) {
  on_mesh(2, 2, [](const DeviceMesh& mesh) {
    const auto data = [](std::vector<std::string> shard, std::vector<std::string> replicate) {
      return DataParallelMeshDims{.shard = std::move(shard), .replicate = std::move(replicate)};
    };
    const auto net_on = [](const DeviceMesh& on) { return parallel_net(on, /*has_plain=*/false); };
    auto net = net_on(mesh);
    shard_net(net, {.mesh = mesh, .dp_mesh_dims = data({"dp"}, {})});
    const auto down = layout_of(net->blocks[0]->named_parameters()["down.weight"]);
    EXPECT_EQ(down->placements(), (Placements{Shard(0), Shard(1)}));
    EXPECT_EQ(down->mesh(), mesh);
    expect_trains_as_one<SGD>(mesh, net_on(mesh), {.mesh = mesh, .dp_mesh_dims = data({"dp"}, {})}, "named");
    expect_trains_as_one<Adam>(mesh, net_on(mesh), {.mesh = mesh, .dp_mesh_dims = data({}, {"dp"})}, "replicas", 1e-4);

    const auto expect_refusal = [&](ParallelNet made, const FullyShardOptions& options,
                                    const std::vector<std::string>& words) {
      expect_error([&] { fully_shard(made, options); }, words);
    };
    expect_refusal(parallel_net(mesh), {.mesh = mesh, .dp_mesh_dims = data({"dp"}, {})},
                   {"'first.weight'", "a plain tensor"});
    expect_refusal(net_on(mesh["tp"]), {.mesh = mesh, .dp_mesh_dims = data({"dp"}, {})}, {"'first.weight'", "(tp=2)"});
    expect_refusal(net_on(mesh), {.mesh = mesh, .dp_mesh_dims = data({"tp"}, {})},
                   {"'block0.up.weight'", "mesh dim 'tp'", "Replicate"});
    expect_refusal(net_on(mesh), {.mesh = mesh, .dp_mesh_dims = data({}, {})}, {"names no axis"});
    expect_refusal(net_on(mesh), {.mesh = mesh, .dp_mesh_dims = data({"data"}, {})}, {"'data'", "(dp=2, tp=2)"});
    expect_refusal(net_on(mesh), {.mesh = mesh, .dp_mesh_dims = data({"dp"}, {"dp"})}, {"'dp'", "shard and replicate"});
    expect_refusal(net_on(mesh), {.dp_mesh_dims = data({"dp"}, {})}, {"without a mesh"});
    expect_refusal(net_on(mesh), {.mesh = mesh, .dp_mesh_dims = data({"dp"}, {}), .reshard_after_forward = 1},
                   {"reshard_after_forward"});
  });
  // Several axes that shard are one; and one that replicates beside one that shards.
  testing::run_threads_in_gtest({.world_size = 8}, [](const World&) {
    const auto mesh = init_device_mesh("cpu", {2, 2, 2}, {.mesh_dim_names = {"a", "b", "tp"}});
    auto expected = whole_net();
    auto wanted = optimizer_of<SGD>(expected);
    const auto losses = train_whole(expected, wanted, 0, 3);
    const auto group = mesh.slice({"a", "b"}).flatten().get_group();
    for (const auto& dims :
         {DataParallelMeshDims{.shard = {"a", "b"}}, DataParallelMeshDims{.shard = {"b"}, .replicate = {"a"}}}) {
      auto net = parallel_net(mesh, /*has_plain=*/false);
      shard_net(net, {.mesh = mesh, .dp_mesh_dims = dims});
      const auto rows = layout_of(net->blocks[0]->parameters()[2]);
      EXPECT_EQ(rows->mesh().ndim(), dims.replicate.empty() ? 2 : 3);
      auto optimizer = optimizer_of<SGD>(net);
      expect_same_losses(train_parts(net, optimizer, group, 0, 3), losses, 1e-5, "several");
      expect_same_net(net, expected, 1e-5, "several");
    }
  });
}

// TP-55
TEST(FsdpTwoDimensional, ClipsByTheNormOfTheWhole) {
  on_mesh(2, 2, [](const DeviceMesh& mesh) {
    auto expected = whole_net();
    loss_of(expected, part_of_batch(0, 0, 1)).backward();
    const auto data = mesh.get_group("dp");
    auto sharded = parallel_net(mesh["tp"]);
    auto root = shard_net(sharded, {.mesh = mesh["dp"]});
    loss_of(sharded, part_of_batch(0, data->getRank(), 2)).backward();
    auto alone = parallel_net(mesh["tp"]);  // all tp ranks have the whole batch
    loss_of(alone, part_of_batch(0, 0, 1)).backward();
    for (const double order : {2.0, 1.0, std::numeric_limits<double>::infinity()}) {
      const auto norm = clip_grad_norm_(expected->parameters(), 0.5, {.norm_type = order});
      EXPECT_NEAR(root.clip_grad_norm_(0.5, order).item<double>(), norm.item<double>(), 1e-4) << order;
      const auto of_alone = clip_grad_norm_(alone->parameters(), 0.5, {.norm_type = order});
      EXPECT_NEAR(of_alone.item<double>(), norm.item<double>(), 1e-4) << order;
    }
    expect_same_net(sharded, expected, 1e-5, "clipped", /*of_gradients=*/true);
    expect_same_net(alone, expected, 1e-5, "clipped without FSDP", /*of_gradients=*/true);
  });
}

// TP-55: inf on one rank
TEST(FsdpTwoDimensional, ScalersAgreeOverBothAxes) {
  on_mesh(2, 2, [](const DeviceMesh& mesh) {
    for (const bool has_fsdp : {true, false}) {
      for (int bad = 0; bad < 4; ++bad) {
        auto net = parallel_net(mesh["tp"]);
        if (has_fsdp) shard_net(net, {.mesh = mesh["dp"]});
        auto optimizer = optimizer_of<SGD>(net);
        GradScaler scaler({.device = at::kCPU, .init_scale = 4});
        scaler.scale(loss_of(net, part_of_batch(0, 0, 1))).backward();
        const auto weight = net->named_parameters()["block1.up.weight"];
        const auto before = weight.detach().clone();
        const bool is_bad = mesh.get_rank() == bad;
        if (is_bad) weight.mutable_grad().fill_(std::numeric_limits<float>::infinity());
        scaler.step(optimizer);
        scaler.update();
        // Without FSDP ranks of the other replica know nothing of it: DDP would have told them by its average.
        const bool is_told = has_fsdp || mesh.ranks()[2 * mesh.get_local_rank("dp")] == bad ||
                             mesh.ranks()[2 * mesh.get_local_rank("dp") + 1] == bad;
        EXPECT_EQ(weight.detach().equal(before), is_told);
        EXPECT_EQ(scaler.get_scale(), is_told ? 2 : 4);
      }
    }
  });
}

// TP-53, TP-55, DDP-7: averages over the axis for data
TEST(FsdpTwoDimensional, DdpGoesAroundTensorParallelModules) {
  on_mesh(2, 2, [](const DeviceMesh& mesh) {
    auto expected = whole_net();
    auto wanted = optimizer_of<Adam>(expected);
    const auto losses = train_whole(expected, wanted, 0, 3, /*max_norm=*/0.5);
    const auto data = mesh.get_group("dp");
    // The same by a slice of the mesh.
    for (const auto& options : {DdpOptions{.process_group = data}, DdpOptions{.device_mesh = mesh["dp"]}}) {
      auto net = parallel_net(mesh["tp"]);
      DistributedDataParallel<ParallelNet> ddp(net, options);
      auto optimizer = optimizer_of<Adam>(net);
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        ddp->forward(part_of_batch(step, data->getRank(), 2)).pow(2).mean().backward();
        clip_grad_norm_(optimizer, 0.5);
        optimizer.step();
      }
      expect_same_net(net, expected, 1e-4, "DDP");
    }
    auto other = parallel_net(mesh["tp"]);
    expect_error([&] { DistributedDataParallel<ParallelNet>(other, DdpOptions{}); },
                 {"'block0.up.weight'", "is a part", "get_group(\"dp\")"});
    auto sharded = parallel_net(mesh["tp"]);
    shard_net(sharded, {.mesh = mesh["dp"]});
    expect_error([&] { DistributedDataParallel<ParallelNet>(sharded, DdpOptions{.process_group = data}); },
                 {"is a shard", "leave DistributedDataParallel out"});
  });
}

void expect_whole_state(const ModuleState& state, const ParallelNet& whole, double tolerance) {
  for (const auto& item : whole->named_parameters()) {
    ASSERT_TRUE(state.contains(item.key())) << item.key();
    EXPECT_TRUE(at::allclose(state.at(item.key()), item.value().detach(), tolerance, tolerance)) << item.key();
  }
}

// TP-56: whole state, out of and into any mesh
TEST(FsdpTwoDimensional, HasTheStateOfTheWholeModel) {
  for (const auto& [dp, tp] : {std::pair(2, 2), std::pair(3, 2)}) {
    on_mesh(dp, tp, [](const DeviceMesh& mesh) {
      auto expected = whole_net();
      auto wanted = optimizer_of<Adam>(expected);
      train_whole(expected, wanted, 0, 2);
      auto net = parallel_net(mesh["tp"]);
      shard_net(net, {.mesh = mesh["dp"]});
      auto optimizer = optimizer_of<Adam>(net);
      train_parts(net, optimizer, mesh.get_group("dp"), 0, 2);
      const auto state = full_state_dict(*net);
      expect_whole_state(state, expected, 1e-4);
      const auto optimizer_state = full_optimizer_state_dict(*net, optimizer);
      const auto whole_optimizer_state = full_optimizer_state_dict(*expected, wanted);
      for (const auto& [name, values] : whole_optimizer_state.state) {
        const auto& found = optimizer_state.state.at(name).at("exp_avg").toTensor();
        EXPECT_TRUE(at::allclose(found, values.at("exp_avg").toTensor(), 1e-4, 1e-5)) << name;
      }
      for (const bool is_sent : {false, true}) {
        auto again = parallel_net(mesh["tp"], true, 6);
        shard_net(again, {.mesh = mesh["dp"]});
        auto resumed = optimizer_of<Adam>(again);
        const bool has_it = !is_sent || mesh.get_rank() == 0;
        const LoadFullStateOptions options{.broadcast_from_rank0 = is_sent};
        load_full_state_dict(*again, has_it ? state : ModuleState(), options);
        load_full_optimizer_state_dict(*again, resumed, has_it ? optimizer_state : NamedOptimizerState(), options);
        expect_same_net(again, expected, 1e-4, "loaded");
        auto copy = whole_net(7);
        auto copied = optimizer_of<Adam>(copy);
        load_full_state_dict(*copy, state);
        load_full_optimizer_state_dict(*copy, copied, optimizer_state);
        train_whole(copy, copied, 2, 4);
        train_parts(again, resumed, mesh.get_group("dp"), 2, 4);
        expect_same_net(again, copy, 1e-4, "resumed");
      }
    });
  }
}

// TP-56: save (2,2), load (4,1), (1,4), one
TEST(FsdpTwoDimensional, FilesLoadOnOtherMeshes) {
  const testing::TempDir dir;
  const auto path = dir.file("run");
  on_mesh(2, 2, [&](const DeviceMesh& mesh) {
    auto expected = whole_net();
    auto wanted = optimizer_of<Adam>(expected);
    train_whole(expected, wanted, 0, 4);
    auto net = parallel_net(mesh["tp"]);
    shard_net(net, {.mesh = mesh["dp"]});
    auto optimizer = optimizer_of<Adam>(net);
    train_parts(net, optimizer, mesh.get_group("dp"), 0, 2);
    save_sharded(*net, optimizer, path);
    for (const auto& [dp, tp] : {std::pair(2, 2), std::pair(4, 1), std::pair(1, 4)}) {
      const auto other = mesh_of(dp, tp);
      auto again = parallel_net(other["tp"], true, 6);
      shard_net(again, {.mesh = other["dp"]});
      auto resumed = optimizer_of<Adam>(again);
      load_sharded(*again, resumed, path);
      train_parts(again, resumed, other.get_group("dp"), 2, 4);
      expect_same_net(again, expected, 1e-4, other.to_string());
    }
    auto one = whole_net(6);
    auto alone = optimizer_of<Adam>(one);
    load_sharded(*one, alone, path);
    train_whole(one, alone, 2, 4);
    expect_same_net(one, expected, 1e-4, "one process");
    // Parts say where they belong, strided ones in pieces.
    const auto sharded = sharded_state_dict(*net);
    const auto& rows = sharded.at("block0.up.weight");
    EXPECT_EQ(rows.sharding->sizes, (std::vector<int64_t>{kHidden, kWidth}));
    EXPECT_EQ(rows.sharding->part().sizes(), rows.local.sizes().vec());
    expect_error(
        [&] {
          auto terms = torch::nn::Linear(4, 4);
          cut(terms->weight, mesh["tp"], {Partial()});
          save_sharded(*terms, path + ".terms");
        },
        {"Partial(sum)"});
    barrier(default_group());
  });
}

// TP-53: a summoned parameter is this rank's part, as modules compute with it
TEST(FsdpTwoDimensional, SummonsThePartThatModulesComputeWith) {
  on_mesh(2, 2, [](const DeviceMesh& mesh) {
    auto net = parallel_net(mesh["tp"]);
    auto root = shard_net(net, {.mesh = mesh["dp"]});
    const auto expected = parallel_net(mesh["tp"])->named_parameters();
    {
      const auto scope = root.summon_full_params();
      for (const auto& item : net->named_parameters()) {
        EXPECT_TRUE(item.value().detach().equal(expected[item.key()].detach())) << item.key();
      }
      const at::NoGradGuard no_grad;
      net->blocks[0]->up->weight.mul_(2);
    }
    auto doubled = whole_net();
    {
      const at::NoGradGuard no_grad;
      doubled->blocks[0]->up->weight.mul_(2);
    }
    expect_same_net(net, doubled, 0, "written");
    EXPECT_GT(memory_plan(*net).peak, 0);
    root.set_separate_reduce_scatter_group();
    auto optimizer = optimizer_of<SGD>(net);
    auto wanted = optimizer_of<SGD>(doubled);
    train_parts(net, optimizer, mesh.get_group("dp"), 0, 2);
    train_whole(doubled, wanted, 0, 2);
    expect_same_net(net, doubled, 1e-5, "with a group of its own");
  });
}

}  // namespace lockstep::fsdp_two_dimensional_test
