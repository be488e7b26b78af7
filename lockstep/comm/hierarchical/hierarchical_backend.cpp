#include "lockstep/comm/hierarchical/hierarchical_backend.h"

#include "lockstep/comm/shm/shm_messages.h"

namespace lockstep::detail {
namespace {

class HierarchicalWork final : public QueuedWork {
 public:
  HierarchicalWork(std::shared_ptr<CallQueue> queue, std::shared_ptr<Hierarchy> hierarchy, Call call, int rank,
                   uint64_t sequence)
      : QueuedWork(std::move(queue), rank, sequence), hierarchy_(std::move(hierarchy)), call_(std::move(call)) {}

  std::vector<at::Tensor> result() override { return call_.results(); }

 protected:
  void perform(bool /*is_background*/) override { hierarchy_->run(call_); }

 private:
  const std::shared_ptr<Hierarchy> hierarchy_;
  const Call call_;
};

/// What the stages could not do, or would notice on one host and not on the other.
void check_call(const Call& call) {
  for (const auto* tensors : {&call.inputs, &call.outputs}) {
    for (const auto& tensor : *tensors) {
      TORCH_CHECK(tensor.device().is_cpu(), "backend hierarchical takes CPU tensors, got one on ",
                  tensor.device().str());
    }
  }
  const auto& subjects = call.subjects();
  if (is_reduction(call.kind) && !subjects.empty()) {
    const auto dtype = subjects[0].scalar_type();
    TORCH_CHECK(shm::can_reduce(static_cast<shm::ReduceOp>(call.op), shm_dtype(dtype)), name_of(call.kind), ": ",
                c10::toString(dtype), " tensors have no ", name_of(call.op));
  }
  const auto check_same_size = [&](const at::Tensor& one, const std::vector<at::Tensor>& others) {
    for (const auto& other : others) {
      TORCH_CHECK(other.numel() == one.numel(), name_of(call.kind), ": tensors must be of one size: ", describe(one),
                  " and ", describe(other));
    }
  };
  if (call.kind == CallKind::kAllGather || call.kind == CallKind::kGather)
    check_same_size(call.inputs[0], call.outputs);
  if (call.kind == CallKind::kReduceScatter || call.kind == CallKind::kScatter) {
    check_same_size(call.outputs[0], call.inputs);
  }
}

}  // namespace

HierarchicalBackend::HierarchicalBackend(std::shared_ptr<Hierarchy> hierarchy, int rank, int size, std::string who,
                                         std::chrono::milliseconds timeout)
    : CallBackend(rank, size, "hierarchical", timeout),
      hierarchy_(std::move(hierarchy)),
      queue_(std::make_shared<CallQueue>()),
      who_(std::move(who)) {}

HierarchicalBackend::~HierarchicalBackend() {
  shutdown();
}

void HierarchicalBackend::abort() {
  hierarchy_->local().abort();
}

void HierarchicalBackend::shutdown() {
  std::call_once(closed_, [&] {
    if (!hierarchy_->local().is_at_home()) return queue_->abandon();
    // Ends a stage on this host at once; one across hosts ends when the other leader goes, or by its timeout.
    if (!queue_->is_idle()) hierarchy_->local().abort();
    queue_->close(who_ + " destroyed the group");
  });
}

CallBackend::WorkPtr HierarchicalBackend::send(std::vector<at::Tensor>& tensors, int to, int tag) {
  return hierarchy_->flat().send(tensors, to, tag);
}

CallBackend::WorkPtr HierarchicalBackend::recv(std::vector<at::Tensor>& tensors, int from, int tag) {
  return hierarchy_->flat().recv(tensors, from, tag);
}

CallBackend::WorkPtr HierarchicalBackend::recvAnysource(std::vector<at::Tensor>& tensors, int tag) {
  return hierarchy_->flat().recvAnysource(tensors, tag);
}

at::Tensor HierarchicalBackend::allocateTensor(long size, at::TensorOptions options) {
  return hierarchy_->local().allocateTensor(size, options);
}

bool HierarchicalBackend::supportsTensorAlloc(c10::DeviceIndex index) {
  return hierarchy_->local().supportsTensorAlloc(index);
}

CallBackend::WorkPtr HierarchicalBackend::submit(Call&& call) {
  check_call(call);
  auto work = c10::make_intrusive<HierarchicalWork>(queue_, hierarchy_, std::move(call), rank_, next_sequence_++);
  // Always in the background, even if the caller waits at once: it has to look whether others have given up.
  queue_->push(work);
  return work;
}

}  // namespace lockstep::detail
