#include "lockstep/comm/fake/fake_backend.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/ivalue.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <thread>

#include "lockstep/comm/group_state.h"

namespace lockstep {
namespace {

class FakeWork : public c10d::Work {
 public:
  FakeWork(int rank, std::vector<at::Tensor> results, std::chrono::milliseconds delay, std::exception_ptr error)
      : Work(rank),
        results_(std::move(results)),
        ready_at_(std::chrono::steady_clock::now() + delay),
        error_(std::move(error)) {}

  bool isCompleted() override { return std::chrono::steady_clock::now() >= ready_at_; }
  bool isSuccess() const override { return !error_; }
  std::exception_ptr exception() const override { return error_; }
  std::vector<at::Tensor> result() override { return results_; }

  bool wait(std::chrono::milliseconds) override {
    std::this_thread::sleep_until(ready_at_);
    if (error_) std::rethrow_exception(error_);
    return true;
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors());
    if (error_) {
      future->setError(error_);
    } else {
      future->markCompleted(c10::IValue(results_));
    }
    return future;
  }

 private:
  const std::vector<at::Tensor> results_;
  const std::chrono::steady_clock::time_point ready_at_;
  const std::exception_ptr error_;
};

void copy_flat(const at::Tensor& to, const at::Tensor& from) {
  to.copy_(from.reshape(to.sizes()));
}

/// Fills what the header says is filled.
void pretend(const Call& call, int rank, int size) {
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  switch (call.kind) {
    case CallKind::kAllGather:
    case CallKind::kGather:
      for (const auto& output : call.outputs) copy_flat(output, call.inputs[0]);
      break;
    case CallKind::kAllGatherSingle:
      for (std::size_t i = 0; i < call.inputs.size(); ++i) {
        for (const auto& piece : pieces_of(call.outputs[i], {}, size)) copy_flat(piece, call.inputs[i]);
      }
      break;
    case CallKind::kReduceScatter:
      copy_flat(call.outputs[0], call.inputs[rank]);
      break;
    case CallKind::kReduceScatterSingle:
      for (std::size_t i = 0; i < call.inputs.size(); ++i) {
        copy_flat(call.outputs[i], pieces_of(call.inputs[i], {}, size)[rank]);
      }
      break;
    case CallKind::kScatter:
      if (!call.inputs.empty()) copy_flat(call.outputs[0], call.inputs[rank]);
      break;
    case CallKind::kAllToAll:
      for (int i = 0; i < size; ++i) {
        if (call.outputs[i].numel() == call.inputs[i].numel()) copy_flat(call.outputs[i], call.inputs[i]);
      }
      break;
    case CallKind::kAllToAllSingle:
      if (call.outputs[0].numel() == call.inputs[0].numel()) copy_flat(call.outputs[0], call.inputs[0]);
      break;
    default:
      break;
  }
}

}  // namespace

FakeBackend::FakeBackend(int rank, int size, std::chrono::milliseconds timeout)
    : CallBackend(rank, size, "fake", timeout) {}

std::vector<Call> FakeBackend::calls() const {
  const std::lock_guard lock(mutex_);
  return calls_;
}

void FakeBackend::clear_calls() {
  const std::lock_guard lock(mutex_);
  calls_.clear();
}

void FakeBackend::delay_call(std::size_t n, std::chrono::milliseconds duration) {
  const std::lock_guard lock(mutex_);
  delays_[n] = duration;
}

void FakeBackend::fail_call(std::size_t n, const std::string& message) {
  const std::lock_guard lock(mutex_);
  failures_[n] = message;
}

uint64_t FakeBackend::sequence_number() const {
  const std::lock_guard lock(mutex_);
  return next_;
}

CallBackend::WorkPtr FakeBackend::submit(Call&& call) {
  auto results = call.results();
  std::chrono::milliseconds delay{0};
  std::exception_ptr error;
  {
    const std::lock_guard lock(mutex_);
    const auto n = next_++;
    if (const auto found = delays_.find(n); found != delays_.end()) delay = found->second;
    if (const auto found = failures_.find(n); found != failures_.end()) {
      error = std::make_exception_ptr(c10::DistBackendError(found->second));
    }
    calls_.push_back(call);
  }
  if (!error) pretend(call, rank_, size_);
  return c10::make_intrusive<FakeWork>(rank_, std::move(results), delay, std::move(error));
}

FakeGroup make_fake_group(int rank, int size) {
  auto backend = c10::make_intrusive<FakeBackend>(rank, size);
  auto group = detail::wrap_backends({{at::kCPU, backend}, {at::kCUDA, backend}},
                                     {.store = c10::make_intrusive<c10d::HashStore>(),
                                      .rank = rank,
                                      .size = size,
                                      .name = "fake",
                                      .global_ranks = detail::first_ranks(size),
                                      .timeout = std::chrono::minutes(30)});
  return {.group = std::move(group), .backend = std::move(backend)};
}

}  // namespace lockstep
