// A message of libtorch's RPC as bytes, for workers that share memory. Internal to rpc.
//
//   | head | payload | what each tensor is: dtype, sizes, strides | elements of each tensor |
//
// Dense CPU tensors travel as their elements alone: a view as what it shows, not what it was cut from. A message with
// any other tensor is written by libtorch and guarded by a checksum, since libtorch's reader trusts what it reads.
#pragma once

#include <c10/util/SmallVector.h>
#include <torch/csrc/distributed/rpc/message.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>

namespace lockstep::rpc {

/// Bytes that are no message: part of a sentence.
class BadRecord : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A message that is about to be written. The message must outlive it, unchanged.
class MessageRecord {
 public:
  /// Refuses tensors that are not on the CPU, naming the remedy.
  explicit MessageRecord(const torch::distributed::rpc::Message& message);

  std::size_t bytes() const { return bytes_; }
  void write(std::byte* at) const;

 private:
  const torch::distributed::rpc::Message& message_;
  c10::SmallVector<std::size_t, 4> offsets_;  // of each tensor's elements; one entry per tensor
  std::string general_;                       // the whole message in libtorch's form, if it takes that
  std::size_t bytes_ = 0;
};

/// The message in `record`, whose tensors have memory of their own. Throws BadRecord; reads nothing outside of `record`
/// and may be given anything.
c10::intrusive_ptr<torch::distributed::rpc::Message> read_message(std::span<const std::byte> record, int64_t id);

/// What another worker would read of it: tensors with memory and history of their own, which whoever gets the message
/// may write to and autograd may link. For messages to oneself.
c10::intrusive_ptr<torch::distributed::rpc::Message> copy_message(const torch::distributed::rpc::Message& message);

}  // namespace lockstep::rpc
