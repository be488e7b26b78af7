#include "benchmarks/rpc/worker.h"

#include <ATen/ATen.h>
#include <torch/nn/modules/linear.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <functional>
#include <latch>
#include <memory>
#include <thread>
#include <vector>

#include "examples/hybrid/hybrid_model.h"
#include "lockstep/base/str.h"
#include "lockstep/comm/world.h"
#include "lockstep/rpc/dist_autograd.h"
#include "lockstep/rpc/remote_module.h"

namespace lockstep::bench {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::duration<double, std::milli>;

constexpr auto kPatience = 5min;  // of a call beside others' work
constexpr int kWidth = 64;

// Callees wait here, so that they do nothing but serve.
std::latch stop_called(1);

const auto plus_one = rpc::function("bench.plus_one", [](const at::Tensor& x) { return x + 1; });
const auto stop = rpc::function("bench.stop", [] { stop_called.count_down(); });
const auto process_id = rpc::function("bench.process_id", [] { return static_cast<std::int64_t>(::getpid()); });
const auto hang = rpc::function("bench.hang", [] { std::this_thread::sleep_for(kPatience); });
const auto linear_class =
    rpc::module_class<torch::nn::LinearImpl>("bench.Linear").constructor<std::int64_t, std::int64_t>();

/// `calls` of them are a sample.
struct Work {
  std::string what;
  int calls;
  std::function<void()> run;
};

void print(const std::string& what, double milliseconds) {
  std::printf("%s %.6f\n", what.c_str(), milliseconds);
  std::fflush(stdout);
}

void measure(const Work& work, int samples) {
  for (int sample = 0; sample <= samples; ++sample) {
    const auto start = Clock::now();
    for (int i = 0; i < work.calls; ++i) work.run();
    const auto took = Milliseconds(Clock::now() - start).count();
    if (sample > 0) print(work.what, took / work.calls);
  }
}

Work round_trip(const std::string& size, int calls, const at::Tensor& tensor) {
  TORCH_CHECK(at::equal(rpc::rpc_sync(1, plus_one, tensor), tensor + 1), "a call's result is wrong");
  return {"round-trip-" + size, calls, [tensor] { rpc::rpc_sync(1, plus_one, tensor); }};
}

Work in_flight(const at::Tensor& tensor) {
  return {"in-flight", 1, [tensor] {
            std::vector<rpc::Future<at::Tensor>> futures;
            futures.reserve(kInFlight);
            for (int i = 0; i < kInFlight; ++i) futures.push_back(rpc::rpc_async(1, plus_one, tensor));
            rpc::wait_all(futures);
          }};
}

Work forward_backward() {
  const rpc::RemoteModule<torch::nn::LinearImpl> linear("worker1/cpu", kWidth, kWidth);
  const auto input = at::ones({8, kWidth}).requires_grad_();
  const auto step = [linear, input] {
    const dist_autograd::Context context;
    const auto loss = linear.forward(input).sum();
    dist_autograd::backward(context.id(), {loss});
    return dist_autograd::get_gradients(context.id()).contains(input);
  };
  TORCH_CHECK(step(), "the input of the remote module got no gradient");
  return {"forward-backward", 50, step};
}

/// A server that takes its time, as one with a large table or many clients does.
const auto look_up = rpc::function("bench.look_up", [](const at::Tensor& ids) {
  static const auto table = at::ones({1000, kWidth}).requires_grad_();
  std::this_thread::sleep_for(3ms);
  return table.index_select(0, ids);
});

struct LookedUp {
  std::unique_ptr<dist_autograd::Context> context = nullptr;
  rpc::Future<at::Tensor> rows = {};
};

/// Eight batches, each a lookup and a step through some layers; with `ahead` a lookup is asked for one batch early.
Work lookups(const std::string& what, bool ahead) {
  constexpr int kBatches = 8;
  const auto weight = at::ones({kWidth, kWidth}).div(kWidth).requires_grad_();
  const auto ids = at::arange(256);
  const auto ask = [ids] {
    LookedUp batch{.context = std::make_unique<dist_autograd::Context>(dist_autograd::Context::ForLater())};
    const dist_autograd::WorkFor it(*batch.context);
    batch.rows = rpc::rpc_async(1, look_up, ids);
    return batch;
  };
  return {what, 1, [=] {
            LookedUp next;
            for (int i = 0; i < kBatches; ++i) {
              auto batch = next.context ? std::move(next) : ask();
              next = ahead && i + 1 < kBatches ? ask() : LookedUp();
              auto x = batch.rows.wait();
              for (int layer = 0; layer < 20; ++layer) x = at::relu(x.mm(weight));
              dist_autograd::backward(batch.context->id(), {x.sum()});
            }
          }};
}

void call(int samples) {
  const auto small = at::ones({8, kWidth});
  measure(round_trip("8x64", 50, small), samples);
  measure(in_flight(small), samples);
  measure(forward_backward(), samples);
  measure(lookups("lookups-in-turn", false), samples);
  measure(lookups("lookups-ahead", true), samples);
  measure(round_trip("1MiB", 5, at::ones({1 << 18})), samples);
  measure(round_trip("64MiB", 1, at::ones({1 << 24})), samples);
}

/// The master's part of the hybrid example, with DDP around all of a trainer's model.
void lead_hybrid(int samples) {
  using hybrid::Trainer;
  const auto embedding = rpc::remote<hybrid::RemoteEM>(hybrid::kTrainers, hybrid::kEmbeddingRows, hybrid::kSparse);
  const auto net = rpc::remote<hybrid::RemoteNet>(hybrid::kTrainers, hybrid::kDense + hybrid::kSparse, hybrid::kHidden);
  std::vector<rpc::RRef<Trainer>> trainers;
  for (int rank = 0; rank < hybrid::kTrainers; ++rank) {
    trainers.push_back(rpc::remote<Trainer>(rank, embedding, net, hybrid::DdpMode::kOutside));
  }
  new_group({0, 1, 2, 3});
  const auto examples = hybrid::training_examples();
  const auto round = [&] {
    std::vector<rpc::Future<hybrid::Gradients>> futures;
    for (int rank = 0; rank < hybrid::kTrainers; ++rank) {
      futures.push_back(trainers[rank].rpc_async(&Trainer::train_batch, examples[rank], false, false));
    }
    return rpc::wait_all(futures);
  };
  for (const auto& [averaged, others] : round()) {
    for (const auto& each : averaged) TORCH_CHECK(each.count_nonzero().item<int64_t>() == 0, "an average is wrong");
  }
  measure({"hybrid", 2, round}, samples);
  for (const auto& trainer : trainers) trainer.rpc_sync(&Trainer::destroy_pg);
}

void kill_callee() {
  const auto victim = static_cast<pid_t>(rpc::rpc_sync(1, process_id));
  const auto answer = rpc::rpc_async(1, hang);
  std::this_thread::sleep_for(200ms);  // it is under way there
  const auto start = Clock::now();
  ::kill(victim, SIGKILL);
  answer.impl()->wait();
  const auto took = Milliseconds(Clock::now() - start).count();
  TORCH_CHECK(answer.has_error(), "a call of a process that was killed has no error");
  print("kill", took);
}

}  // namespace

int caller_of(const std::string& which) {
  return which == "hybrid" ? hybrid::kTrainers + 1 : 0;
}

void run_worker(const WorkerPlan& plan) {
  const bool is_hybrid = plan.which == "hybrid";
  const auto world = init();
  rpc::RpcOptions options{.rpc_timeout = kPatience, .agent = plan.agent};
  if (!plan.transports.empty()) options.transports = plan.transports;
  rpc::init_rpc(str("worker", world.rank()), world.rank(), world.world_size(), options);
  const bool is_caller = world.rank() == caller_of(plan.which);
  if (plan.which == "kill") {
    is_caller ? kill_callee() : stop_called.wait();
    rpc::shutdown(/*graceful=*/false);
    return;
  }
  if (is_caller) {
    is_hybrid ? lead_hybrid(plan.samples) : call(plan.samples);
    for (int rank = 0; rank < world.world_size(); ++rank) {
      if (rank != world.rank()) rpc::rpc_sync(rank, stop);
    }
  } else {
    if (is_hybrid && hybrid::role_of(world.rank()) == hybrid::Role::kServer) new_group({0, 1, 2, 3});
    stop_called.wait();
  }
  rpc::shutdown();
}

}  // namespace lockstep::bench
