// What a wrapper says about itself, what of it can be saved, and how it goes on with another group.
#include <torch/csrc/distributed/c10d/debug.h>

#include <thread>

#include "lockstep/ddp/logger.h"
#include "tests/support/ddp_models.h"

namespace lockstep::log_test {
namespace {

using namespace ddp_models;
using testing::expect_error;

at::Tensor input_of(const World& world) {
  return at::full({2, 4}, world.rank() + 1.0);
}

// DDP-102, DDP-104, DDP-105
LOCKSTEP_THREAD_TEST(DdpLog, HasEveryKeyAtConstruction, 2) {
  DistributedDataParallel ddp(mlp({4, 3}), world.group(), {.bucket_cap_mb = 2, .find_unused_parameters = true});
  const auto data = ddp.get_ddp_logging_data();
  const auto& texts = data.strs_map;
  EXPECT_NE(texts.at("module_name").find("Mlp"), std::string::npos);
  EXPECT_EQ(texts.at("device_ids"), "");
  EXPECT_EQ(texts.at("dtypes"), "float");
  EXPECT_EQ(texts.at("backend_name"), "threads");
  EXPECT_EQ(texts.at("bucket_sizes"), "60");
  EXPECT_EQ(texts.at("comm_hook"), "");
  EXPECT_EQ(texts.at("error"), "");
  for (const char* key : {"master_addr", "master_port", "cuda_visible_devices", "torch_distributed_debug",
                          "gloo_socket_ifname", "gloo_device_transport"}) {
    EXPECT_TRUE(texts.contains(key)) << key;
  }
  const std::map<std::string, int64_t> expected = {{"world_size", 2},
                                                   {"rank", world.rank()},
                                                   {"iteration", 0},
                                                   {"num_parameter_tensors", 2},
                                                   {"total_parameter_size_bytes", 60},
                                                   {"is_multi_device_module", 0},
                                                   {"output_device", -1},
                                                   {"has_sync_bn", 0},
                                                   {"broadcast_buffers", 1},
                                                   {"bucket_cap_bytes", 2 << 20},
                                                   {"find_unused_parameters", 1},
                                                   {"gradient_as_bucket_view", 0},
                                                   {"static_graph", 0},
                                                   {"has_error", 0},
                                                   {"join_uneven_inputs", 0},
                                                   {"can_set_static_graph", 0},
                                                   {"has_rebuilt_buckets", 0},
                                                   {"unused_parameter_size", 0},
                                                   {"num_buckets_reduced", 0}};
  for (const auto& [key, value] : expected) EXPECT_EQ(data.ints_map.at(key), value) << key;
  EXPECT_TRUE(data.ints_map.contains("gloo_num_threads"));
}

// DDP-103, DDP-106
LOCKSTEP_THREAD_TEST(DdpLog, TellsOfTheLastStepAtTheNextForward, 2) {
  DistributedDataParallel ddp(mlp({4, 4, 3}), world.group());
  for (int step = 0; step < 3; ++step) ddp(input_of(world)).sum().backward();
  const auto data = ddp.get_ddp_logging_data();
  EXPECT_EQ(data.ints_map.at("iteration"), 2);
  EXPECT_EQ(data.ints_map.at("has_rebuilt_buckets"), 1);
  EXPECT_EQ(data.strs_map.at("rebuilt_bucket_sizes"), "140");
  const auto& order = data.strs_map.at("prev_iteration_grad_ready_order_indices");
  EXPECT_EQ(order.size(), std::string("2, 3, 0, 1").size());
  std::string flat = order;
  std::erase(flat, ',');
  EXPECT_EQ(data.strs_map.at("rebuilt_per_bucket_param_indices"), flat);
  for (const char* key : {"forward_compute_time", "backward_compute_time", "backward_comm_time"}) {
    EXPECT_GT(data.ints_map.at(key), 0) << key;
    EXPECT_GT(data.ints_map.at(std::string("avg_") + key), 0) << key;
  }
  EXPECT_GE(data.ints_map.at("backward_compute_comm_overlap_time"), 0);
  EXPECT_LE(data.ints_map.at("backward_compute_comm_overlap_time"), data.ints_map.at("backward_comm_time"));
  EXPECT_LT(data.ints_map.at("forward_compute_time_start"), data.ints_map.at("backward_compute_time_start"));
  EXPECT_LE(data.ints_map.at("backward_compute_time_end"), data.ints_map.at("backward_comm_time_end"));
  EXPECT_LT(data.ints_map.at("backward_comm_time_start"), data.ints_map.at("backward_comm_time_end"));
}

// DDP-106
LOCKSTEP_THREAD_TEST(DdpLog, AveragesTimesAndShowsWhatIsHidden, 2) {
  DistributedDataParallel ddp(mlp({4, 4, 3}), world.group(), {.bucket_cap_mb = 0});
  // Its gradient is the last but one: other buckets are on their way while it sleeps.
  ddp.module()->layers[0]->weight.register_hook(
      [](const at::Tensor&) { std::this_thread::sleep_for(std::chrono::milliseconds(20)); });
  const auto train = [&] { ddp(input_of(world)).sum().backward(); };
  const auto figures = [&] { return ddp.get_ddp_logging_data().ints_map; };
  train();
  train();
  const auto first = figures();
  train();
  const auto second = figures();
  for (const std::string key :
       {"forward_compute_time", "backward_compute_time", "backward_comm_time", "backward_compute_comm_overlap_time"}) {
    EXPECT_EQ(first.at("avg_" + key), first.at(key)) << key;
    EXPECT_EQ(second.at("avg_" + key), first.at(key) + (second.at(key) - first.at(key)) / 2) << key;
  }
  constexpr int64_t kSlept = 20'000'000;
  EXPECT_GE(second.at("backward_compute_comm_overlap_time"), kSlept);
  EXPECT_GE(second.at("backward_compute_time"), kSlept);
}

// DDP-107
TEST(DdpLogSink, IsSentSamples) {
  std::vector<int64_t> sent;
  c10::SetPyTorchDDPUsageLogger(
      [&](const c10::DDPLoggingData& data) { sent.push_back(data.ints_map.at("iteration")); });
  testing::run_threads_in_gtest({.world_size = 1}, [&](const World& world) {
    {
      DistributedDataParallel ddp(mlp({4, 3}), world.group());
      expect_error([&] { ddp.set_ddp_runtime_logging_sample_rate(0); }, {"sample rate", "0"});
      ddp.set_ddp_runtime_logging_sample_rate(5);
      for (int step = 0; step < 71; ++step) ddp(input_of(world)).sum().backward();
      EXPECT_EQ(ddp.get_ddp_logging_data().ints_map.at("iteration"), 70);
    }
    // At construction; the tenth sample is step 10, the twentieth step 60; at the end of life.
    EXPECT_EQ(sent, (std::vector<int64_t>{0, 10, 60, 70}));
  });
  c10::SetPyTorchDDPUsageLogger([](const c10::DDPLoggingData&) {});
}

// DDP-107
TEST(DdpLogSink, IsToldAtTheEndWhatTheLastBackwardShowed) {
  std::vector<int64_t> sent;
  c10::SetPyTorchDDPUsageLogger(
      [&](const c10::DDPLoggingData& data) { sent.push_back(data.ints_map.at("can_set_static_graph")); });
  testing::run_threads_in_gtest({.world_size = 1}, [&](const World& world) {
    const Warnings quiet;
    for (const bool differs : {false, true}) {
      DistributedDataParallel ddp(seeded(Branchy()), world.group(), {.find_unused_parameters = true});
      for (int step = 0; step < 3; ++step) ddp(input_of(world), true, !differs || step < 2).sum().backward();
      EXPECT_EQ(ddp.get_ddp_logging_data().ints_map.at("can_set_static_graph"), 1) << "as of the last forward";
    }
    EXPECT_EQ(sent, (std::vector<int64_t>{0, 1, 0, 0}));
  });
  c10::SetPyTorchDDPUsageLogger([](const c10::DDPLoggingData&) {});
}

// DDP-20, DDP-108
LOCKSTEP_THREAD_TEST(DdpDebug, NoticesChangedParameters, 1) {
  c10d::setDebugLevel(c10d::DebugLevel::Info);
  const auto restore = std::shared_ptr<void>(nullptr, [](void*) { c10d::setDebugLevel(c10d::DebugLevel::Off); });
  const auto changed = [&](const std::function<void(Mlp&)>& change, const std::vector<std::string>& words) {
    auto module = mlp({4, 3, 2});
    DistributedDataParallel ddp(module, world.group());
    ddp(random_batch(1, 4, 1)).sum().backward();
    change(module);
    expect_error([&] { ddp(random_batch(1, 4, 1)); }, words);
  };
  changed([](Mlp& module) { module->register_parameter("extra", at::ones({2})); }, {"'extra'", "added"});
  changed([](Mlp& module) { module->layers[0]->weight.set_requires_grad(false); }, {"'layer0.weight'", "removed"});
  changed([](Mlp& module) { module->layers[0]->bias.set_data(at::ones({3}, at::kDouble)); },
          {"'layer0.bias'", "changed"});
  changed([](Mlp& module) { module->unregister_module("layer1"); }, {"'layer1.weight'", "removed"});
  const auto replace = [](Mlp& module) { module->replace_module("layer0", torch::nn::Linear(4, 3)); };
  changed(replace, {"'layer0.weight'", "replaced"});
  // Not below that level, where nobody is apart from others.
  c10d::setDebugLevel(c10d::DebugLevel::Off);
  auto module = mlp({4, 3, 2});
  DistributedDataParallel ddp(module, world.group());
  replace(module);
  ddp(random_batch(1, 4, 1)).sum().backward();
}

/// Everything that is logged while `body` runs, at a level of TORCH_DISTRIBUTED_DEBUG.
std::string logged_at(c10d::DebugLevel level, const std::function<void()>& body) {
  c10d::setDebugLevel(level);
  const int usual = FLAGS_caffe2_log_level;
  FLAGS_caffe2_log_level = 0;
  ::testing::internal::CaptureStderr();
  body();
  auto text = ::testing::internal::GetCapturedStderr();
  FLAGS_caffe2_log_level = usual;
  c10d::setDebugLevel(c10d::DebugLevel::Off);
  return text;
}

// DDP-108
TEST(DdpDebug, LevelsAddTheirDumps) {
  const auto train = [] {
    testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
      const Warnings quiet;
      DistributedDataParallel searching(seeded(Branchy()), world.group(), {.find_unused_parameters = true});
      DistributedDataParallel fixed(seeded(Branchy()), world.group(), {.static_graph = true});
      DistributedDataParallel rebuilding(mlp({4, 3, 2}), world.group());
      for (int step = 0; step < 2; ++step) {
        searching(random_batch(1, 4, 1), true, false).sum().backward();
        fixed(random_batch(1, 4, 1), false, true).sum().backward();
        rebuilding(random_batch(1, 4, 1)).sum().backward();
      }
      rebuilding(random_batch(1, 4, 1));
    });
  };
  const std::vector<std::string> at_info = {
      "rank 1 of 2 wraps", "env:NCCL_ALGO=", "buckets were rebuilt",
      "parameters without gradients in the first step: 'left.weight', 'left.bias'"};
  const std::vector<std::string> at_detail = {"unused parameters in this step: 'right.weight', 'right.bias'",
                                              "rank 0 of 2: step 1: forward ", "1 buckets reduced"};
  const auto off = logged_at(c10d::DebugLevel::Off, train);
  const auto info = logged_at(c10d::DebugLevel::Info, train);
  const auto detailed = logged_at(c10d::DebugLevel::Detail, train);
  for (const auto& words : at_info) {
    EXPECT_EQ(off.find(words), std::string::npos) << words;
    EXPECT_NE(info.find(words), std::string::npos) << words << "\n" << info;
    EXPECT_NE(detailed.find(words), std::string::npos) << words;
  }
  for (const auto& words : at_detail) {
    EXPECT_EQ(info.find(words), std::string::npos) << words;
    EXPECT_NE(detailed.find(words), std::string::npos) << words << "\n" << detailed;
  }
}

// DDP-109, DDP-110
TEST(DdpEnvironment, DumpsEveryVariable) {
  ::setenv("NCCL_ALGO", "Ring", 1);
  const auto text = detail::relevant_environment();
  ::unsetenv("NCCL_ALGO");
  // PyTorch's list.
  const std::vector<std::string> names = {"RANK",
                                          "LOCAL_RANK",
                                          "WORLD_SIZE",
                                          "MASTER_PORT",
                                          "MASTER_ADDR",
                                          "CUDA_VISIBLE_DEVICES",
                                          "GLOO_SOCKET_IFNAME",
                                          "GLOO_DEVICE_TRANSPORT",
                                          "NCCL_SOCKET_IFNAME",
                                          "TORCH_NCCL_BLOCKING_WAIT",
                                          "NCCL_DEBUG",
                                          "NCCL_DEBUG_SUBSYS",
                                          "NCCL_IB_DISABLE",
                                          "NCCL_P2P_DISABLE",
                                          "NCCL_P2P_LEVEL",
                                          "NCCL_SHM_DISABLE",
                                          "NCCL_SOCKET_NTHREADS",
                                          "NCCL_NSOCKS_PERTHREAD",
                                          "NCCL_BUFFSIZE",
                                          "NCCL_NTHREADS",
                                          "NCCL_RINGS",
                                          "NCCL_MAX_NCHANNELS",
                                          "NCCL_MIN_NCHANNELS",
                                          "NCCL_CHECKS_DISABLE",
                                          "NCCL_CHECK_POINTERS",
                                          "NCCL_LAUNCH_MODE",
                                          "NCCL_IB_HCA",
                                          "NCCL_IB_TIMEOUT",
                                          "NCCL_IB_RETRY_CNT",
                                          "NCCL_IB_GID_INDEX",
                                          "NCCL_IB_SL",
                                          "NCCL_IB_TC",
                                          "NCCL_IB_AR_THRESHOLD",
                                          "NCCL_IB_CUDA_SUPPORT",
                                          "NCCL_NET_GDR_LEVEL",
                                          "NCCL_NET_GDR_READ",
                                          "NCCL_SINGLE_RING_THRESHOLD",
                                          "NCCL_LL_THRESHOLD",
                                          "NCCL_TREE_THRESHOLD",
                                          "NCCL_ALGO",
                                          "NCCL_PROTO",
                                          "NCCL_IGNORE_CPU_AFFINITY",
                                          "NCCL_DEBUG_FILE",
                                          "NCCL_COLLNET_ENABLE",
                                          "NCCL_TOPO_FILE",
                                          "NCCL_TOPO_DUMP_FILE",
                                          "TORCH_NCCL_ASYNC_ERROR_HANDLING"};
  ASSERT_EQ(names.size(), 47U);
  std::string expected;
  for (const auto& name : names) {
    const auto* const value = std::getenv(name.c_str());
    expected += "env:" + name + "=" + (name == "NCCL_ALGO" ? "Ring" : value != nullptr ? value : "N/A") + "\n";
  }
  EXPECT_EQ(text, expected);
}

// DDP-111
LOCKSTEP_THREAD_TEST(DdpSnapshot, KeepsSettingsAndBuckets, 2) {
  DdpOptions options{.bucket_cap_mb = 0, .gradient_as_bucket_view = true};
  options.process_group = world.group();
  options.mixed_precision = MixedPrecision{.param_dtype = at::kBFloat16};
  options.params_and_buffers_to_ignore = {"some.buffer"};
  std::string text;
  std::vector<PlannedBucket> buckets;
  {
    DistributedDataParallel ddp(mlp({4, 3, 2}), options);
    for (int step = 0; step < 2; ++step) ddp(input_of(world)).sum().backward();
    buckets = ddp.bucket_plan().buckets();
    EXPECT_EQ(buckets.size(), 4U);
    text = ddp.snapshot().to_string();
  }
  const auto snapshot = DdpSnapshot::from_string(text);
  EXPECT_EQ(snapshot.to_string(), text);
  EXPECT_EQ(snapshot.options.bucket_cap_mb, 0);
  EXPECT_TRUE(snapshot.options.gradient_as_bucket_view);
  EXPECT_TRUE(snapshot.require_backward_grad_sync);
  EXPECT_EQ(snapshot.options.mixed_precision->param_dtype, at::kBFloat16);
  EXPECT_FALSE(snapshot.options.mixed_precision->reduce_dtype);
  DistributedDataParallel again(mlp({4, 3, 2}), world.group(), snapshot.options);
  EXPECT_EQ(again.bucket_plan().buckets(), buckets);
  for (int step = 0; step < 2; ++step) again(input_of(world)).sum().backward();
  EXPECT_EQ(again.bucket_plan().buckets(), buckets) << "a loaded layout is not rebuilt";
}

// DDP-111: what was delayed is ordinary in a wrapper made from the snapshot, and reduced; flags come back
LOCKSTEP_THREAD_TEST(DdpSnapshot, LosesNoParameters, 2) {
  auto model = mlp({4, 3, 2});
  DistributedDataParallel delayed(model, world.group(),
                                  {.delay_all_reduce_named_params = {{"layer1.weight", model->layers[1]->weight}},
                                   .param_to_hook_all_reduce = model->layers[0]->weight,
                                   .params_and_buffers_to_ignore = {"layer1.bias"}});
  delayed(random_batch(2, 4, world.rank())).sum().backward();
  const auto snapshot = DdpSnapshot::from_string(delayed.snapshot().to_string());
  EXPECT_EQ(snapshot.options.params_and_buffers_to_ignore, std::set<std::string>{"layer1.bias"});
  auto copy = mlp({4, 3, 2});
  DistributedDataParallel again(copy, world.group(), snapshot.options);
  again(at::full({1, 4}, world.rank() + 1.0)).sum().backward();
  const auto gradient = copy->layers[1]->weight.grad();
  auto sum = gradient.clone();
  all_reduce(sum, world.group());
  EXPECT_TRUE(at::allclose(sum, 2 * gradient)) << "the same on both ranks";
  // Without a text between them too.
  EXPECT_FALSE(delayed.snapshot().options.param_to_hook_all_reduce.defined());
  DistributedDataParallel direct(mlp({4, 3, 2}), world.group(), delayed.snapshot().options);
  direct(at::full({1, 4}, world.rank() + 1.0)).sum().backward();
  testing::check_equal("average", direct.module()->layers[1]->weight.grad(), gradient);

  auto local = again.snapshot();
  local.require_backward_grad_sync = false;
  again.restore(DdpSnapshot::from_string(local.to_string()));
  EXPECT_FALSE(again.engine().is_sync_enabled());
}

// DDP-111: before buckets are rebuilt there are none to keep
LOCKSTEP_THREAD_TEST(DdpSnapshot, KeepsNoBucketsBeforeTheRebuild, 2) {
  DistributedDataParallel ddp(mlp({4, 3, 2}), world.group(), {.bucket_cap_mb = 0});
  DistributedDataParallel again(mlp({4, 3, 2}), world.group(), ddp.snapshot().options);
  for (int step = 0; step < 2; ++step) again(random_batch(1, 4, step)).sum().backward();
  EXPECT_EQ(again.bucket_plan().buckets().size(), 4U);
}

/// Modules that can be copied derive from Cloneable.
struct CopiedImpl : torch::nn::Cloneable<CopiedImpl> {
  CopiedImpl() { reset(); }
  void reset() override { fc = register_module("fc", torch::nn::Linear(4, 2)); }
  at::Tensor forward(const at::Tensor& input) { return fc->forward(input); }
  torch::nn::Linear fc = nullptr;
};
TORCH_MODULE(Copied);

// DDP-112
LOCKSTEP_THREAD_TEST(DdpClone, WrapsACopyOfTheModule, 2) {
  DistributedDataParallel ddp(seeded(Copied()), world.group(), {.gradient_as_bucket_view = true});
  const auto copy = std::dynamic_pointer_cast<DistributedDataParallel<Copied>>(ddp.clone());
  ASSERT_TRUE(copy);
  EXPECT_TRUE(copy->engine().options().gradient_as_bucket_view);
  EXPECT_FALSE(copy->module()->fc->weight.is_alias_of(ddp.module()->fc->weight));
  EXPECT_TRUE(at::equal(copy->module()->fc->weight, ddp.module()->fc->weight));
  (*copy)(at::full({1, 4}, world.rank() + 1.0)).sum().backward();
  EXPECT_TRUE(at::equal(copy->module()->fc->weight.grad(), at::full({2, 4}, 1.5)));
  EXPECT_FALSE(ddp.module()->fc->weight.grad().defined());
}

// DDP-111, DDP-112
LOCKSTEP_THREAD_TEST(DdpSnapshot, RefusesWhatDoesNotFit, 2) {
  DistributedDataParallel ddp(mlp({4, 3}), world.group());
  for (int step = 0; step < 2; ++step) ddp(random_batch(1, 4, step)).sum().backward();
  auto options = ddp.snapshot().options;
  expect_error([&] { DistributedDataParallel(mlp({4, 2}), world.group(), options); }, {"layer0.bias", "[3]", "[2]"});
  expect_error([&] { DistributedDataParallel(mlp({4, 3, 2}), world.group(), options); },
               {"'layer1.weight'", "in no bucket"});
  if (world.rank() == 1) options.bucket_plan += " ";
  expect_error([&] { DistributedDataParallel(mlp({4, 3}), world.group(), options); }, {"bucket plan", "rank 1"});
  // Flags that an older file has not are true.
  EXPECT_TRUE(DdpSnapshot::from_string("lockstep ddp snapshot 1\n").require_forward_param_sync);
  expect_error([] { DdpSnapshot::from_string("something else"); }, {"no saved wrapper"});
  expect_error([] { DdpSnapshot::from_string("lockstep ddp snapshot 1\nno_such_key 1\n"); }, {"no_such_key"});
  static_assert(!std::is_copy_constructible_v<DistributedDataParallel<Mlp>>);
  barrier(world.group());
}

// DDP-98
LOCKSTEP_THREAD_TEST(DdpElastic, GoesOnWithFewerAndMoreRanks, 3) {
  DistributedDataParallel ddp(mlp({4, 3}), world.group());
  const auto mean = [&] {
    zero_grads(ddp);
    ddp(at::full({1, 4}, world.rank() + 1.0)).sum().backward();
    return ddp.module()->layers[0]->weight.grad()[0][0].item<float>();
  };
  for (int step = 0; step < 2; ++step) EXPECT_FLOAT_EQ(mean(), 2);
  const auto two = new_group(world.group(), {0, 2});
  ddp.update_process_group(two);
  if (world.rank() == 1) {
    EXPECT_EQ(ddp.process_group()->getSize(), 3);
  } else {
    EXPECT_FALSE(ddp.engine().reducer()->has_rebuilt_buckets());
    for (int step = 0; step < 2; ++step) EXPECT_FLOAT_EQ(mean(), 2);
    EXPECT_TRUE(ddp.engine().reducer()->has_rebuilt_buckets());
  }
  ddp.update_process_group(world.group());
  for (int step = 0; step < 3; ++step) EXPECT_FLOAT_EQ(mean(), 2);
}

// DDP-98: other ranks may use other parameters
LOCKSTEP_THREAD_TEST(DdpElastic, CountsAStaticGraphAnew, 3) {
  auto model = seeded(Branchy());
  DistributedDataParallel ddp(model, world.group(), {.static_graph = true});
  const auto mean = [&](bool uses_right) {
    zero_grads(ddp);
    ddp(at::ones({1, 4}), true, uses_right).mul(world.rank() + 1).sum().backward();
    return model->left->bias.grad()[0].item<float>();
  };
  for (int step = 0; step < 3; ++step) EXPECT_FLOAT_EQ(mean(false), 2);
  EXPECT_TRUE(ddp.engine().reducer()->has_counted_static_graph());
  ddp.update_process_group(new_group(world.group(), {0, 1}));
  if (world.rank() == 2) return;
  EXPECT_FALSE(ddp.engine().reducer()->has_counted_static_graph());
  for (int step = 0; step < 3; ++step) {
    EXPECT_FLOAT_EQ(mean(true), 1.5);
    EXPECT_FLOAT_EQ(model->right->bias.grad()[0].item<float>(), 1.5);
  }
  EXPECT_TRUE(ddp.engine().reducer()->has_counted_static_graph());
}

// DDP-98: a step that fails half way is forgotten with the group it failed on
LOCKSTEP_THREAD_TEST(DdpElastic, ForgetsAStepThatFailed, 2) {
  auto model = seeded(Branchy());
  DistributedDataParallel ddp(model, world.group(), {.bucket_cap_mb = 0});
  for (int step = 0; step < 2; ++step) ddp(random_batch(1, 4, step), true, true).sum().backward();
  ddp(random_batch(1, 4, 3), true, false).sum().backward();
  expect_error([&] { ddp(random_batch(1, 4, 3), true, true); }, {"'right.weight'", "no gradient"});
  const auto group = new_group(world.group(), {0, 1});
  ddp.update_process_group(group);
  for (int step = 0; step < 3; ++step) {
    zero_grads(ddp);
    ddp(at::full({1, 4}, world.rank() + 1.0), true, true).sum().backward();
    EXPECT_TRUE(model->right->weight.grad().defined());
  }
}

// DDP-98: in low precision too
LOCKSTEP_THREAD_TEST(DdpElastic, LowPrecisionFollowsTheGroup, 3) {
  DistributedDataParallel ddp(mlp({4, 3}), world.group(),
                              {.mixed_precision = MixedPrecision{.param_dtype = at::kBFloat16}});
  ddp.update_process_group(new_group(world.group(), {0, 2}));
  if (world.rank() == 1) return;
  ddp(at::full({1, 4}, world.rank() + 1.0)).sum().backward();
  EXPECT_FLOAT_EQ(ddp.module()->layers[0]->weight.grad()[0][0].item<float>(), 2);
}

struct InnerImpl : MlpImpl {
  InnerImpl() : MlpImpl({4, 4}) {}
  at::Tensor forward(const at::Tensor& input) {
    seen = active_ddp();
    return MlpImpl::forward(input);
  }
  DdpEngine* seen = nullptr;
};
TORCH_MODULE(Inner);

struct OuterImpl : torch::nn::Module {
  explicit OuterImpl(const GroupPtr& group)
      : inner(std::make_shared<DistributedDataParallel<Inner>>(Inner(), group)),
        fc(register_module("fc", torch::nn::Linear(4, 2))) {}
  at::Tensor forward(const at::Tensor& input) {
    seen.push_back(active_ddp());
    const auto hidden = inner->forward(input);
    seen.push_back(active_ddp());
    return fc->forward(hidden);
  }
  std::shared_ptr<DistributedDataParallel<Inner>> inner;
  torch::nn::Linear fc;
  std::vector<DdpEngine*> seen;
};

// DDP-100
LOCKSTEP_THREAD_TEST(DdpMarker, NamesTheInnermostWrapper, 1) {
  auto module = std::make_shared<OuterImpl>(world.group());
  DistributedDataParallel ddp(module, world.group());
  EXPECT_EQ(active_ddp(), nullptr);
  ddp(random_batch(1, 4, 1));
  EXPECT_EQ(module->seen, (std::vector<DdpEngine*>{&ddp.engine(), &ddp.engine()}));
  EXPECT_EQ(module->inner->module()->seen, &module->inner->engine());
  EXPECT_EQ(active_ddp(), nullptr);
}

}  // namespace
}  // namespace lockstep::log_test
