#include "lockstep/comm/shm/shm_messages.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include "lockstep/comm/failure.h"
#include "lockstep/comm/plain_memory.h"

namespace lockstep::detail {
namespace {

class MessageWork final : public c10d::Work {
 public:
  MessageWork(c10d::OpType type, at::Tensor tensor, at::Tensor buffer)
      : Work(-1, type), tensor_(std::move(tensor)), buffer_(std::move(buffer)) {}

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  std::vector<at::Tensor> result() override { return {tensor_}; }
  int sourceRank() const override { return peer_; }

  const at::Tensor& buffer() const { return buffer_; }

  void complete(std::exception_ptr error, int peer) {
    peer_ = peer;
    if (error) {
      error = with_libtorch_type(error);
      future_->setError(error);
      finish(error);
      return;
    }
    try {
      write_back();
    } catch (...) {
      // On the messages' own thread, where nobody else would catch it.
      future_->setError(std::current_exception());
      finish(std::current_exception());
      return;
    }
    // First the future: who has waited may ask for it.
    future_->markCompleted(c10::IValue(std::vector<at::Tensor>{tensor_}));
    finish();
  }

 private:
  void write_back() {
    if (buffer_.is_same(tensor_) || retrieveOpType() == c10d::OpType::SEND) return;
    const at::NoGradGuard no_grad;
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    tensor_.copy_(buffer_);
  }

  static std::exception_ptr with_libtorch_type(const std::exception_ptr& error) {
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& problem) {
      return std::make_exception_ptr(c10::DistBackendError(message_of(problem)));
    }
  }

  const at::Tensor tensor_;
  const at::Tensor buffer_;  // bytes as they travel; the tensor itself if it lies so
  const c10::intrusive_ptr<c10::ivalue::Future> future_ =
      c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors());
  std::atomic<int> peer_ = -1;
};

shm::Messages::Transfer transfer_for(const c10::intrusive_ptr<MessageWork>& work, int peer, int tag,
                                     std::chrono::milliseconds timeout) {
  const auto& buffer = work->buffer();
  return {.peer = peer,
          .tag = tag,
          .span = {static_cast<std::byte*>(buffer.data_ptr()), buffer.nbytes()},
          .dtype = shm_dtype(buffer.scalar_type()),
          .element_bytes = static_cast<std::size_t>(buffer.element_size()),
          .timeout = timeout,
          .done = [work](std::exception_ptr error, int who) { work->complete(std::move(error), who); }};
}

}  // namespace

c10::intrusive_ptr<c10d::Work> send_tensor(shm::Messages& messages, const at::Tensor& tensor, int to, int tag,
                                           std::chrono::milliseconds timeout) {
  const at::NoGradGuard no_grad;
  const auto work = c10::make_intrusive<MessageWork>(c10d::OpType::SEND, tensor, as_plain_memory(tensor));
  messages.send(transfer_for(work, to, tag, timeout));
  return work;
}

c10::intrusive_ptr<c10d::Work> receive_tensor(shm::Messages& messages, const at::Tensor& tensor, int from, int tag,
                                              std::chrono::milliseconds timeout) {
  const at::NoGradGuard no_grad;
  const auto buffer = is_plain_memory(tensor) ? tensor : at::empty(tensor.sizes(), tensor.options());
  const auto type = from == shm::Messages::kAnyRank ? c10d::OpType::RECVANYSOURCE : c10d::OpType::RECV;
  const auto work = c10::make_intrusive<MessageWork>(type, tensor, buffer);
  messages.receive(transfer_for(work, from, tag, timeout));
  return work;
}

}  // namespace lockstep::detail
