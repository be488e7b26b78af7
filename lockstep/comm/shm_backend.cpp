#include "lockstep/comm/shm_backend.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/GradMode.h>
#include <c10/util/SmallVector.h>

#include "lockstep/comm/shm_allocator.h"
#include "lockstep/comm/shm_messages.h"
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

using Spans = c10::SmallVector<shm::Span, 4>;

shm::Span span_of(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.data_ptr()), tensor.nbytes()};
}

/// Piece `index` of `count` equal ones of a contiguous tensor.
shm::Span piece_of(const at::Tensor& tensor, int index, int count) {
  const auto bytes = tensor.nbytes() / static_cast<std::size_t>(count);
  return {static_cast<std::byte*>(tensor.data_ptr()) + static_cast<std::size_t>(index) * bytes, bytes};
}

void add_splits(Spans& spans, const at::Tensor& tensor, const std::vector<int64_t>& splits, int ranks) {
  const auto rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  const auto row_bytes = rows == 0 ? 0 : tensor.nbytes() / static_cast<std::size_t>(rows);
  auto* at = static_cast<std::byte*>(tensor.data_ptr());
  for (int rank = 0; rank < ranks; ++rank) {
    const auto share = splits.empty() ? rows / ranks : splits[static_cast<std::size_t>(rank)];
    const auto bytes = static_cast<std::size_t>(share) * row_bytes;
    spans.push_back({at, bytes});
    at += bytes;
  }
}

bool overlap(const shm::Span& one, const shm::Span& other) {
  return one.at < other.at + other.bytes && other.at < one.at + one.bytes;
}

/// One collective: the tensors, and the same as bytes.
class ShmWork final : public QueuedWork {
 public:
  ShmWork(std::shared_ptr<CallQueue> queue, std::shared_ptr<shm::Collectives> collectives, Call call, int rank,
          int ranks, uint64_t sequence)
      : QueuedWork(std::move(queue), rank, sequence), collectives_(std::move(collectives)), call_(std::move(call)) {
    make_contiguous();
    separate_inputs(ranks);
    collect_spans(ranks);
  }

  std::vector<at::Tensor> result() override { return results_.empty() ? call_.results() : results_; }

 protected:
  void perform(bool is_background) override;

 private:
  void make_contiguous();
  void separate_inputs(int ranks);
  bool is_own_piece(std::size_t input, std::size_t output, int ranks) const;
  void collect_spans(int ranks);
  bool is_root() const { return rank_ == call_.root; }

  const std::shared_ptr<shm::Collectives> collectives_;
  Call call_;                                                     // contiguous tensors only
  std::vector<at::Tensor> results_;                               // the caller's own, if others took their place
  std::vector<std::pair<at::Tensor, at::Tensor>> to_write_back_;  // from a contiguous one to the caller's own
  Spans gives_;
  Spans gets_;
};

bool is_contiguous(const std::vector<at::Tensor>& tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [](const auto& tensor) { return tensor.is_contiguous(); });
}

void ShmWork::make_contiguous() {
  if (is_contiguous(call_.inputs) && is_contiguous(call_.outputs)) return;
  results_ = call_.results();
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  // Others only give, and may be views that cannot be written, such as expanded ones.
  const bool inputs_change = call_.kind == CallKind::kAllReduce || (call_.kind == CallKind::kReduce && is_root()) ||
                             (call_.kind == CallKind::kBroadcast && !is_root());
  for (auto& input : call_.inputs) {
    if (input.is_contiguous()) continue;
    const auto own = input;
    input = own.contiguous();
    if (inputs_change) to_write_back_.emplace_back(input, own);
  }
  for (auto& output : call_.outputs) {
    if (output.is_contiguous()) continue;
    const auto own = output;
    output = at::empty_like(own, at::MemoryFormat::Contiguous);
    to_write_back_.emplace_back(output, own);
  }
}

/// True if an output may lie in an input, because only this rank reads there: its own piece, exactly.
bool ShmWork::is_own_piece(std::size_t input, std::size_t output, int ranks) const {
  const auto same = [](const shm::Span& one, const shm::Span& other) {
    return one.at == other.at && one.bytes == other.bytes;
  };
  const auto& from = call_.inputs[input];
  const auto& to = call_.outputs[output];
  switch (call_.kind) {
    case CallKind::kAllGatherSingle:
      return input == output && same(span_of(from), piece_of(to, rank_, ranks));
    case CallKind::kReduceScatterSingle:
      return input == output && same(piece_of(from, rank_, ranks), span_of(to));
    case CallKind::kAllGather:
    case CallKind::kGather:
      return output == static_cast<std::size_t>(rank_) * call_.inputs.size() + input &&
             same(span_of(from), span_of(to));
    case CallKind::kReduceScatter:
    case CallKind::kScatter:
      return input == static_cast<std::size_t>(rank_) && same(span_of(from), span_of(to));
    default:
      return false;
  }
}

/// What others still have to read must not be written: an input that overlaps an output is copied first.
void ShmWork::separate_inputs(int ranks) {
  const auto hull = [](const std::vector<at::Tensor>& tensors) {
    shm::Span all;
    const std::byte* end = nullptr;
    for (const auto& tensor : tensors) {
      const auto span = span_of(tensor);
      if (span.bytes == 0) continue;
      if (all.at == nullptr || span.at < all.at) all.at = span.at;
      end = std::max<const std::byte*>(end, span.at + span.bytes);
    }
    all.bytes = static_cast<std::size_t>(end - all.at);
    return all;
  };
  if (call_.inputs.empty() || call_.outputs.empty() || !overlap(hull(call_.inputs), hull(call_.outputs))) return;
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (std::size_t i = 0; i < call_.inputs.size(); ++i) {
    for (std::size_t o = 0; o < call_.outputs.size(); ++o) {
      if (!overlap(span_of(call_.inputs[i]), span_of(call_.outputs[o])) || is_own_piece(i, o, ranks)) continue;
      call_.inputs[i] = call_.inputs[i].clone();
      break;
    }
  }
}

void ShmWork::collect_spans(int ranks) {
  const auto add = [](Spans& spans, const std::vector<at::Tensor>& tensors) {
    for (const auto& tensor : tensors) spans.push_back(span_of(tensor));
  };
  const auto add_pieces = [&](Spans& spans, const std::vector<at::Tensor>& tensors) {
    for (int rank = 0; rank < ranks; ++rank) {
      for (const auto& tensor : tensors) spans.push_back(piece_of(tensor, rank, ranks));
    }
  };
  switch (call_.kind) {
    case CallKind::kAllReduce:
      add(gives_, call_.inputs);
      gets_ = gives_;
      return;
    case CallKind::kReduce:
      add(gives_, call_.inputs);
      if (is_root()) gets_ = gives_;
      return;
    case CallKind::kBroadcast:
      add(is_root() ? gives_ : gets_, call_.inputs);
      return;
    case CallKind::kAllGatherSingle:
      add(gives_, call_.inputs);
      add_pieces(gets_, call_.outputs);
      return;
    case CallKind::kReduceScatterSingle:
      add_pieces(gives_, call_.inputs);
      add(gets_, call_.outputs);
      return;
    case CallKind::kAllToAllSingle:
      add_splits(gives_, call_.inputs[0], call_.input_splits, ranks);
      add_splits(gets_, call_.outputs[0], call_.output_splits, ranks);
      return;
    default:
      add(gives_, call_.inputs);
      add(gets_, call_.outputs);
      return;
  }
}

void ShmWork::perform(bool is_background) {
  const auto& team = collectives_->team();
  const auto& subjects = call_.subjects();
  shm::Request request{.kind = kind_of(call_.kind),
                       .op = static_cast<shm::ReduceOp>(call_.op),
                       .root = call_.root,
                       .factor = call_.factor,
                       .gives = gives_,
                       .gets = gets_,
                       .timeout = call_.timeout};
  if (!subjects.empty()) {
    request.dtype = shm_dtype(subjects[0].scalar_type());
    request.element_bytes = subjects[0].element_size();
  }
  try {
    collectives_->run(request, is_background ? shm::Patience::of_background() : shm::Patience::of_caller(team.size()));
  } catch (const shm::PeerError& error) {
    // A slow rank may still write to tensors it reaches directly. They are kept for good: their owner must not give the
    // memory to something else.
    if (team.shares_address_space()) new Call(call_);
    throw c10::DistBackendError(error.what());
  } catch (const shm::MismatchError& error) {
    TORCH_CHECK(false, error.what());
  }
  if (to_write_back_.empty()) return;
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (const auto& [from, to] : to_write_back_) to.copy_(from);
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
      allocator_(make_shm_allocator(team_)),
      messages_(team_) {}

ShmBackend::~ShmBackend() {
  shutdown();
}

void ShmBackend::abort() {
  team_->fail(team_->seat().who() + " aborted the group");
}

void ShmBackend::shutdown() {
  std::call_once(closed_, [&] {
    if (!team_->is_at_home()) return queue_->abandon();
    // Whatever still runs looks at this between naps and stops.
    const auto reason = team_->seat().who() + " destroyed group '" + team_->seat().group + "'";
    if (!queue_->is_idle()) team_->fail(reason + " with collectives under way");
    queue_->close(reason);
    messages_.close(reason);
    // Not left to the team's end: zero-copy tensors may keep it for long.
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
  return send_tensor(messages_, only_tensor(tensors, "send"), to, tag, default_timeout());
}

CallBackend::WorkPtr ShmBackend::recv(std::vector<at::Tensor>& tensors, int from, int tag) {
  TORCH_CHECK(from >= 0 && from < size_, "recv: rank ", from, " is not in a group of ", size_);
  return receive_tensor(messages_, only_tensor(tensors, "recv"), from, tag, default_timeout());
}

CallBackend::WorkPtr ShmBackend::recvAnysource(std::vector<at::Tensor>& tensors, int tag) {
  return receive_tensor(messages_, only_tensor(tensors, "recv"), shm::Messages::kAnyRank, tag, default_timeout());
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

CallBackend::WorkPtr ShmBackend::submit(Call call) {
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
  auto work = c10::make_intrusive<ShmWork>(queue_, collectives_, std::move(call), rank_, size_, next_sequence_++);
  if (is_async) {
    queue_->push(work);
  } else {
    queue_->run(work);
  }
  return work;
}

}  // namespace lockstep::detail
