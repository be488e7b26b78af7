#include "lockstep/ddp/logger.h"

#include <c10/core/ScalarTypeToTypeMeta.h>
#include <torch/csrc/distributed/c10d/debug.h>

#include <algorithm>
#include <iterator>
#include <set>

#include "lockstep/base/env.h"
#include "lockstep/base/str.h"

namespace lockstep::detail {
namespace {

using Mark = StepTimes::Mark;

constexpr int64_t kSamplesSent[] = {10, 20, 50, 100, 500, 800, 1000};
constexpr int kFirstIterations = 10;

std::string bucket_sizes(const BucketPlan& plan) {
  std::vector<std::size_t> sizes;
  for (std::size_t i = 0; i < plan.buckets().size(); ++i) sizes.push_back(plan.bytes(i));
  return join(sizes, ", ");
}

}  // namespace

DdpLogger::DdpLogger(std::shared_ptr<Reducer> reducer, const DdpOptions& options, const Wrapper& wrapper)
    : reducer_(std::move(reducer)), has_times_(!wrapper.is_multi_device) {
  const auto& plan = reducer_->plan();
  std::set<std::string> dtypes;
  std::size_t bytes = 0;
  for (const auto& parameter : plan.parameters()) {
    dtypes.emplace(c10::scalarTypeToTypeMeta(parameter.dtype).name());
    bytes += parameter.bytes();
  }
  const auto& group = reducer_->group();
  const auto device = plan.parameters()[0].device.type();
  set("module_name", wrapper.module_name);
  set("device_ids", wrapper.device_ids);
  set("dtypes", join(dtypes, ", "));
  set("backend_name", serves_device(group, device) ? group->getBackend(device)->getBackendName() : backend_spec(group));
  set("bucket_sizes", bucket_sizes(plan));
  set("comm_hook", "");
  set("error", "");
  set("world_size", group->getSize());
  set("rank", group->getRank());
  set("iteration", 0);
  set("num_parameter_tensors", static_cast<int64_t>(plan.parameters().size()));
  set("total_parameter_size_bytes", static_cast<int64_t>(bytes));
  set("is_multi_device_module", wrapper.is_multi_device ? 1 : 0);
  set("output_device", wrapper.output_device);
  set("has_sync_bn", wrapper.has_sync_bn ? 1 : 0);
  set("broadcast_buffers", wrapper.broadcast_buffers ? 1 : 0);
  set("bucket_cap_bytes", static_cast<int64_t>(caps_of(options).bytes));
  set("find_unused_parameters", options.find_unused_parameters ? 1 : 0);
  set("gradient_as_bucket_view", options.gradient_as_bucket_view ? 1 : 0);
  set("static_graph", wrapper.is_static_graph ? 1 : 0);
  for (const char* key : {"has_error", "join_uneven_inputs", "can_set_static_graph", "has_rebuilt_buckets",
                          "unused_parameter_size", "num_buckets_reduced"}) {
    set(key, 0);
  }
  set_environment();
  c10::LogPyTorchDDPUsage(data());
}

DdpLogger::~DdpLogger() {
  try {
    set("can_set_static_graph", reducer_->last_step().is_graph_static ? 1 : 0);
    c10::LogPyTorchDDPUsage(data());
  } catch (const std::exception& error) {
    LOG(WARNING) << "[lockstep/ddp] the log's sink failed: " << error.what();
  }
}

void DdpLogger::set(const std::string& key, const std::string& value) {
  const std::lock_guard lock(mutex_);
  data_.strs_map[key] = value;
}

void DdpLogger::set(const std::string& key, int64_t value) {
  const std::lock_guard lock(mutex_);
  data_.ints_map[key] = value;
}

void DdpLogger::set_environment() {
  const auto note = [&](const std::string& key, const char* variable) { set(key, env(variable).value_or("N/A")); };
  note("master_addr", "MASTER_ADDR");
  note("master_port", "MASTER_PORT");
  note("cuda_visible_devices", "CUDA_VISIBLE_DEVICES");
  note("torch_distributed_debug", "TORCH_DISTRIBUTED_DEBUG");
  const auto backend = data().strs_map["backend_name"];
  if (backend == "nccl") {
    note("nccl_socket_ifname", "NCCL_SOCKET_IFNAME");
    note("nccl_blocking_wait", "TORCH_NCCL_BLOCKING_WAIT");
    note("nccl_async_error_handling", "TORCH_NCCL_ASYNC_ERROR_HANDLING");
    note("nccl_debug", "NCCL_DEBUG");
    note("nccl_nthreads", "NCCL_NTHREADS");
    note("nccl_ib_timeout", "NCCL_IB_TIMEOUT");
  } else {
    note("gloo_socket_ifname", "GLOO_SOCKET_IFNAME");
    note("gloo_device_transport", "GLOO_DEVICE_TRANSPORT");
    set("gloo_num_threads", int64_t{backend == "gloo" ? 2 : 0});
  }
}

void DdpLogger::set_sample_rate(int sample_rate) {
  TORCH_CHECK(sample_rate >= 1, "[lockstep/ddp] the sample rate is ", sample_rate, ": it must be at least 1");
  sample_rate_ = sample_rate;
}

void DdpLogger::set_error_and_log(const std::string& error) {
  set("has_error", 1);
  set("error", error);
  set("iteration", reducer_->iterations());
  c10::LogPyTorchDDPUsage(data());
}

void DdpLogger::set_runtime_stats_and_log() {
  const auto iteration = reducer_->iterations();
  if (iteration == 0 || (iteration > kFirstIterations && iteration % sample_rate_ != 0)) return;
  ++samples_;
  set("iteration", iteration);
  const auto last = reducer_->last_step();
  std::size_t unused_bytes = 0;
  for (const auto index : last.unused_parameters) unused_bytes += reducer_->plan().parameters()[index].bytes();
  set("unused_parameter_size", static_cast<int64_t>(unused_bytes));
  set("num_buckets_reduced", last.buckets_reduced);
  set("can_set_static_graph", last.is_graph_static ? 1 : 0);
  set("prev_iteration_grad_ready_order_indices", join(last.ready_order, ", "));
  set("has_rebuilt_buckets", reducer_->has_rebuilt_buckets() ? 1 : 0);
  if (reducer_->has_rebuilt_buckets()) {
    const auto& plan = reducer_->plan();
    set("rebuilt_bucket_sizes", bucket_sizes(plan));
    std::vector<std::string> indices;
    for (const auto& bucket : plan.buckets()) indices.push_back(join(bucket.parameters, " "));
    set("rebuilt_per_bucket_param_indices", join(indices, ", "));
  }
  set_times();
  if (c10d::debug_level() == c10d::DebugLevel::Detail) LOG(INFO) << times_text();
  if (std::find(std::begin(kSamplesSent), std::end(kSamplesSent), samples_) != std::end(kSamplesSent)) {
    c10::LogPyTorchDDPUsage(data());
  }
}

void DdpLogger::set_times() {
  if (!has_times_) {
    if (!has_warned_of_times_) {
      TORCH_WARN("[lockstep/ddp] times of a step are not measured for a module on several devices");
    }
    has_warned_of_times_ = true;
    return;
  }
  const auto& times = reducer_->times();
  const auto note = [&](const std::string& key, std::optional<int64_t> value) {
    if (!value) return;
    const std::lock_guard lock(mutex_);
    data_.ints_map[key] = *value;
    auto& average = data_.ints_map["avg_" + key];
    average += (*value - average) / samples_;
  };
  const auto forward = times.between(Mark::kForwardStart, Mark::kBackwardComputeStart);
  const auto compute = times.between(Mark::kBackwardComputeStart, Mark::kBackwardComputeEnd);
  const auto comm = times.between(Mark::kBackwardCommStart, Mark::kBackwardCommEnd);
  auto overlap = times.between(Mark::kBackwardCommStart, Mark::kBackwardComputeEnd);
  if (overlap && *overlap < 0) overlap = 0;
  note("forward_compute_time", forward);
  note("backward_compute_time", compute);
  note("backward_comm_time", comm);
  note("backward_compute_comm_overlap_time", overlap);
  const auto stamp = [&](const std::string& key, Mark mark) {
    if (const auto value = times.stamp(mark)) set(key, *value);
  };
  stamp("forward_compute_time_start", Mark::kForwardStart);
  stamp("backward_compute_time_start", Mark::kBackwardComputeStart);
  stamp("backward_compute_time_end", Mark::kBackwardComputeEnd);
  stamp("backward_comm_time_start", Mark::kBackwardCommStart);
  stamp("backward_comm_time_end", Mark::kBackwardCommEnd);
}

std::string DdpLogger::times_text() const {
  const std::lock_guard lock(mutex_);
  const auto microseconds = [&](const std::string& key) {
    const auto found = data_.ints_map.find(key);
    return found == data_.ints_map.end() ? std::string("unknown") : str(found->second / 1000, " us");
  };
  return str("[lockstep/ddp] rank ", reducer_->group()->getRank(), " of ", reducer_->group()->getSize(), ": step ",
             data_.ints_map.at("iteration"), ": forward ", microseconds("forward_compute_time"), ", backward ",
             microseconds("backward_compute_time"), ", communication ", microseconds("backward_comm_time"),
             ", of which hidden ", microseconds("backward_compute_comm_overlap_time"), "; ",
             data_.ints_map.at("num_buckets_reduced"), " buckets reduced");
}

c10::DDPLoggingData DdpLogger::data() const {
  const std::lock_guard lock(mutex_);
  return data_;
}

std::optional<double> DdpLogger::overlap_share() const {
  const std::lock_guard lock(mutex_);
  const auto comm = data_.ints_map.find("backward_comm_time");
  const auto overlap = data_.ints_map.find("backward_compute_comm_overlap_time");
  if (comm == data_.ints_map.end() || overlap == data_.ints_map.end() || comm->second <= 0) return std::nullopt;
  return static_cast<double>(overlap->second) / static_cast<double>(comm->second);
}

std::string relevant_environment() {
  constexpr const char* kVariables[] = {"RANK",
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
  std::string text;
  for (const char* variable : kVariables) {
    text += str("env:", variable, "=", env(variable).value_or("N/A"), "\n");
  }
  return text;
}

}  // namespace lockstep::detail
