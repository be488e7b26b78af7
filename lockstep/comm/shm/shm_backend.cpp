#include "lockstep/comm/shm/shm_backend.h"

#include <ATen/EmptyTensor.h>

#include <algorithm>

#include "lockstep/comm/shm/call_spans.h"
#include "lockstep/comm/shm/shm_allocator.h"
#include "lockstep/comm/shm/shm_messages.h"
#include "lockstep/shm/errors.h"

namespace lockstep::detail {

shm::DType shm_dtype(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return shm::DType::kFloat;
    case at::kDouble:
      return shm::DType::kDouble;
    case at::kHalf:
      return shm::DType::kHalf;
    case at::kBFloat16:
      return shm::DType::kBFloat16;
    case at::kChar:
      return shm::DType::kInt8;
    case at::kShort:
      return shm::DType::kInt16;
    case at::kInt:
      return shm::DType::kInt32;
    case at::kLong:
      return shm::DType::kInt64;
    case at::kByte:
      return shm::DType::kUInt8;
    case at::kBool:
      return shm::DType::kBool;
    case at::kComplexFloat:
      return shm::DType::kComplexFloat;
    case at::kComplexDouble:
      return shm::DType::kComplexDouble;
    default:
      return static_cast<shm::DType>(static_cast<int>(shm::DType::kFirstOther) + static_cast<int>(type));
  }
}

namespace {

shm::Kind kind_of(CallKind kind) {
  switch (kind) {
    case CallKind::kAllReduce:
      return shm::Kind::kAllReduce;
    case CallKind::kReduce:
      return shm::Kind::kReduce;
    case CallKind::kBroadcast:
      return shm::Kind::kBroadcast;
    case CallKind::kAllGather:
    case CallKind::kAllGatherSingle:
      return shm::Kind::kAllGather;
    case CallKind::kReduceScatter:
    case CallKind::kReduceScatterSingle:
      return shm::Kind::kReduceScatter;
    case CallKind::kGather:
      return shm::Kind::kGather;
    case CallKind::kScatter:
      return shm::Kind::kScatter;
    case CallKind::kAllToAll:
    case CallKind::kAllToAllSingle:
      return shm::Kind::kAllToAll;
    case CallKind::kBarrier:
      return shm::Kind::kBarrier;
  }
  TORCH_INTERNAL_ASSERT(false, "unknown call kind ", static_cast<int>(kind));
}

/// One collective.
class ShmWork final : public QueuedWork {
 public:
  ShmWork(std::shared_ptr<CallQueue> queue, std::shared_ptr<shm::Collectives> collectives, Call call, int rank,
          uint64_t sequence)
      : QueuedWork(std::move(queue), rank, sequence), collectives_(std::move(collectives)), call_(std::move(call)) {}

  std::vector<at::Tensor> result() override { return call_.results(); }

 protected:
  void perform(bool is_background) override;

 private:
  const std::shared_ptr<shm::Collectives> collectives_;
  const Call call_;
};

void ShmWork::perform(bool is_background) {
  const auto& team = collectives_->team();
  const CallSpans spans(call_, rank_, team.size());
  const auto& subjects = call_.subjects();
  shm::Request request{.kind = kind_of(call_.kind),
                       .op = static_cast<shm::ReduceOp>(call_.op),
                       .root = call_.root,
                       .factor = call_.factor,
                       .label = call_.label.text,
                       .label_index = call_.label.index,
                       .is_label_compared = call_.label.is_compared,
                       .ends_together = call_.ends_together,
                       .gives = spans.gives(),
                       .gets = spans.gets(),
                       .timeout = call_.timeout};
  if (!subjects.empty()) {
    request.dtype = shm_dtype(subjects[0].scalar_type());
    request.element_bytes = subjects[0].element_size();
  }
  // If it fails on the way, a slow rank may still write to tensors it reaches directly. They are kept for good: their
  // owner must not give the memory to something else.
  const auto keep_reached_tensors = [&] {
    const bool are_reached = std::any_of(spans.gives().begin(), spans.gives().end(), [&](const shm::Span& span) {
      return team.locate(span.at, span.bytes).has_value();
    });
    if (are_reached) new Call(spans.call());
  };
  try {
    collectives_->run(request, is_background ? shm::Patience::of_background() : shm::Patience::of_caller(team.size()));
  } catch (const shm::MismatchError& error) {
    TORCH_CHECK(false, error.what());
  } catch (const shm::PeerError& error) {
    keep_reached_tensors();
    throw c10::DistBackendError(error.what());
  } catch (...) {
    keep_reached_tensors();
    throw;
  }
  spans.write_back();
}

static_assert(static_cast<int>(shm::ReduceOp::kPremulSum) == static_cast<int>(ReduceOp::PREMUL_SUM) &&
              static_cast<int>(shm::ReduceOp::kBxor) == static_cast<int>(ReduceOp::BXOR) &&
              static_cast<int>(shm::ReduceOp::kAvg) == static_cast<int>(ReduceOp::AVG));

}  // namespace

ShmBackend::ShmBackend(std::shared_ptr<shm::Team> team, std::chrono::milliseconds timeout)
    : CallBackend(team->rank(), team->size(), "shm", timeout),
      team_(std::move(team)),
      collectives_(std::make_shared<shm::Collectives>(team_)),
      queue_(std::make_shared<CallQueue>()),
      allocator_(shm_allocator(*team_), [](c10::Allocator*) {}),
      messages_(std::make_shared<shm::Messages>(team_)) {}

ShmBackend::~ShmBackend() {
  shutdown();
}

void ShmBackend::abort() {
  fail(team_->seat().who() + " aborted the group");
}

void ShmBackend::fail(const std::string& reason) {
  // A rank that only follows another's failure must not hide it.
  if (!team_->failure()) team_->fail(reason);
}

bool ShmBackend::is_at_home() const {
  return team_->is_at_home();
}

void ShmBackend::shutdown() {
  std::call_once(closed_, [&] {
    if (!team_->is_at_home()) return queue_->abandon();
    // Whatever still runs looks at this between naps and stops.
    const auto reason = team_->seat().who() + " destroyed group '" + team_->seat().group + "'";
    if (!queue_->is_idle() && !team_->failure()) team_->fail(reason + " with collectives under way");
    queue_->close(reason);
    messages_->close(reason);
    // Not left to the team's end: calls that nobody has collected may keep it for long.
    team_->leave();
  });
}

namespace {

const at::Tensor& only_tensor(const std::vector<at::Tensor>& tensors, const char* operation) {
  TORCH_CHECK(tensors.size() == 1, operation, " takes one tensor, got ", tensors.size());
  TORCH_CHECK(tensors[0].device().is_cpu() && tensors[0].layout() == at::kStrided, operation,
              ": backend shm takes dense CPU tensors, got ", describe(tensors[0]), " on ", tensors[0].device().str());
  return tensors[0];
}

}  // namespace

CallBackend::WorkPtr ShmBackend::send(std::vector<at::Tensor>& tensors, int to, int tag) {
  TORCH_CHECK(to >= 0 && to < size_, "send: rank ", to, " is not in a group of ", size_);
  return send_tensor(*messages_, only_tensor(tensors, "send"), to, tag, default_timeout());
}

CallBackend::WorkPtr ShmBackend::recv(std::vector<at::Tensor>& tensors, int from, int tag) {
  TORCH_CHECK(from >= 0 && from < size_, "recv: rank ", from, " is not in a group of ", size_);
  return receive_tensor(*messages_, only_tensor(tensors, "recv"), from, tag, default_timeout());
}

CallBackend::WorkPtr ShmBackend::recvAnysource(std::vector<at::Tensor>& tensors, int tag) {
  return receive_tensor(*messages_, only_tensor(tensors, "recv"), shm::Messages::kAnyRank, tag, default_timeout());
}

at::Tensor ShmBackend::allocateTensor(long size, at::TensorOptions options) {
  const auto device = options.device_opt().value_or(c10::Device(c10::kCPU));
  TORCH_CHECK(device.is_cpu(), "backend shm allocates CPU tensors, not ", device.str());
  TORCH_CHECK(size >= 0, "a tensor of ", size, " elements was asked for");
  const auto dtype = c10::typeMetaToScalarType(options.dtype());
  return at::detail::empty_generic({size}, allocator_.get(), c10::DispatchKeySet(c10::DispatchKey::CPU), dtype,
                                   at::MemoryFormat::Contiguous);
}

bool ShmBackend::supportsTensorAlloc(c10::DeviceIndex /*index*/) {
  return true;
}

uint64_t ShmBackend::sequence_number() const {
  return next_sequence_;
}

CallBackend::WorkPtr ShmBackend::submit(Call&& call) {
  const auto& subjects = call.subjects();
  for (const auto* tensors : {&call.inputs, &call.outputs}) {
    for (const auto& tensor : *tensors) {
      TORCH_CHECK(tensor.device().is_cpu(), "backend shm takes CPU tensors, got one on ", tensor.device().str());
    }
  }
  if (is_reduction(call.kind) && !subjects.empty()) {
    const auto dtype = shm_dtype(subjects[0].scalar_type());
    TORCH_CHECK(shm::can_reduce(static_cast<shm::ReduceOp>(call.op), dtype), name_of(call.kind), ": ",
                c10::toString(subjects[0].scalar_type()), " tensors have no ", name_of(call.op));
  }
  const bool is_async = call.is_async;
  auto work = c10::make_intrusive<ShmWork>(queue_, collectives_, std::move(call), rank_, next_sequence_++);
  if (is_async) {
    queue_->push(work);
  } else {
    queue_->run(work);
  }
  return work;
}

}  // namespace lockstep::detail
