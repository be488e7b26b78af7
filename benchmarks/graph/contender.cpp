#include "benchmarks/graph/contender.h"

#include <ATen/ATen.h>

#include <latch>
#include <numeric>
#include <thread>

#include "benchmarks/kit/workload.h"
#include "lockstep/ddp/default_hooks.h"
#include "lockstep/ddp/distributed_data_parallel.h"
#include "lockstep/ddp/measured_plan.h"
#include "lockstep/graph/compiled.h"

namespace lockstep::bench {
namespace {

using Ddp = DistributedDataParallel<std::shared_ptr<Trainable>>;

/// Five buckets of the mlp, seven of the gpt.
double cap_mb(const std::string& model) {
  return model == "mlp" ? 8 : 0.25;
}

std::shared_ptr<Ddp> make_ddp(const std::string& name, const Case& which, const Workload& workload,
                              const GroupPtr& group) {
  if (name == "measured") {
    const auto measured = measure_plan(*workload.module, group,
                                       [&] { workload.module->forward(workload.input).pow(2).mean().backward(); });
    return std::make_shared<Ddp>(workload.module,
                                 DdpOptions{.process_group = group, .bucket_plan = measured.plan.save()});
  }
  DdpOptions ddp_options{.process_group = group};
  if (name != "default") ddp_options.bucket_cap_mb = cap_mb(which.model);
  auto ddp = std::make_shared<Ddp>(workload.module, ddp_options);
  if (name == "split" || name == "unsplit") {
    compile(*ddp, {.mode = name == "split" ? SplitMode::kSplit : SplitMode::kOff, .aligns_buckets = true});
  }
  return ddp;
}

/// Backwards that go on behind what was timed: nothing else is, before they are over.
std::vector<std::thread>& rests() {
  static std::vector<std::thread> threads;
  return threads;
}
void finish_rests() {
  for (auto& each : rests()) each.join();
  rests().clear();
}

TimedWork step_of(const std::shared_ptr<Ddp>& ddp, const Workload& workload) {
  return {"step",
          [ddp, workload] {
            forget_gradients(*workload.module);
            ddp->forward(workload.input).pow(2).mean().backward();
          },
          &finish_rests};
}

/// From the beginning of backward until a bucket is on its way; the rest of it is nobody's time.
class FirstBucket {
 public:
  FirstBucket(std::shared_ptr<Ddp> ddp, Workload workload, const GroupPtr& group)
      : ddp_(std::move(ddp)), workload_(std::move(workload)) {
    ddp_->register_comm_hook(
        CommHook{.name = "watch", .run = [this, run = allreduce_hook(group).run](GradBucket& bucket) {
                   if (!is_launched_.exchange(true)) launched_->count_down();
                   return run(bucket);
                 }});
  }
  ~FirstBucket() { finish_rests(); }
  FirstBucket(const FirstBucket&) = delete;
  FirstBucket& operator=(const FirstBucket&) = delete;

  void prepare() {
    finish_rests();
    forget_gradients(*workload_.module);
    loss_ = ddp_->forward(workload_.input).pow(2).mean();
    launched_ = std::make_unique<std::latch>(1);
    is_launched_ = false;
  }
  void run() {
    rests().emplace_back([this] { loss_.backward(); });
    launched_->wait();
  }

 private:
  const std::shared_ptr<Ddp> ddp_;
  const Workload workload_;
  at::Tensor loss_;
  std::unique_ptr<std::latch> launched_;
  std::atomic<bool> is_launched_ = true;
};

/// Capture, cuts, compilation and the first run.
TimedWork capture_of(const Case& which, const Workload& workload) {
  return {"capture",
          [workload, cap = cap_mb(which.model)] {
            const auto outer = graph::outer_tensors(*workload.module);
            std::vector<at::Tensor> tensors;
            for (const auto& each : outer) tensors.push_back(each.tensor);
            auto captured = graph::capture({workload.input}, outer, [&](const std::vector<at::Tensor>& fakes) {
              return std::vector<at::Tensor>{workload.module->forward(fakes[0])};
            });
            const auto bytes = static_cast<std::size_t>(cap * (1 << 20));
            graph::Program program(std::move(captured), graph::SplitOptions{.bucket_bytes_cap = bytes},
                                   graph::backend_named("autograd"), tensors);
            program.run({workload.input}, tensors);
          },
          &finish_rests};
}

}  // namespace

Contender make_contender(const std::string& name, const Case& which, const World& world) {
  const auto workload = make_workload(which.model, which.width, world.device());
  const auto ddp = make_ddp(name, which, workload, world.group());
  auto step = step_of(ddp, workload);
  auto exposed = step;
  exposed.what = "exposed";
  exposed.figure = [ddp] { return 100 * (1 - ddp->overlap_share().value_or(0)); };
  Contender contender{.name = name, .timed = {std::move(step), std::move(exposed)}};
  const auto watched = make_workload(which.model, which.width, world.device());
  // A group of its own: the rest of its backward meets the barriers between what is timed.
  std::vector<int> ranks(static_cast<std::size_t>(world.world_size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  const auto group = new_group(ranks);
  const auto first = std::make_shared<FirstBucket>(make_ddp(name, which, watched, group), watched, group);
  contender.timed.push_back({"first", [first] { first->run(); }, [first] { first->prepare(); }});
  if (name == "split")
    contender.timed.push_back(capture_of(which, make_workload(which.model, which.width, world.device())));
  return contender;
}

}  // namespace lockstep::bench
