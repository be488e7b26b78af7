#include "lockstep/rpc/shm_agent_record.h"

#include <c10/core/InferenceMode.h>

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>
#include <c10/util/strides.h>
#include <sys/mman.h>
#include <torch/csrc/distributed/rpc/utils.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "lockstep/base/str.h"

namespace lockstep::rpc {
namespace {

using torch::distributed::rpc::Message;
using torch::distributed::rpc::MessageType;

struct MessageHead {
  static constexpr std::uint32_t kMagic = 0x4c525043;
  enum Form : std::uint16_t { kDense, kGeneral };

  std::uint32_t magic = kMagic;
  std::uint16_t form = kDense;
  std::uint16_t type = 0;
  std::uint64_t body_bytes = 0;  // the payload; of the general form all of it
  std::uint64_t checksum = 0;    // of the general form's body
  std::uint32_t tensors = 0;
  std::uint32_t unused = 0;
};
static_assert(sizeof(MessageHead) == 32);

/// Sizes and then strides follow, a number of 64 bits for each dim.
struct TensorHead {
  static constexpr std::uint8_t kIsDefined = 1;
  static constexpr std::uint8_t kRequiresGrad = 2;

  std::uint8_t dtype = 0;
  std::uint8_t flags = 0;
  std::uint16_t dims = 0;
  std::uint32_t unused = 0;
};
static_assert(sizeof(TensorHead) == 8);
constexpr std::size_t kShapesAlignment = 8;
constexpr std::size_t kMostDims = 64;
constexpr std::size_t kElementsAlignment = 64;
// Fresh memory of this size is worth asking for huge pages: to touch it costs as much as to fill it.
constexpr std::size_t kHugeTensorBytes = std::size_t{4} << 20;

std::size_t record_align(std::size_t offset, std::size_t to) {
  return (offset + to - 1) / to * to;
}

std::uint64_t record_checksum(std::span<const std::byte> bytes) {
  std::uint64_t sum = 0x9e3779b97f4a7c15 ^ bytes.size();
  const auto add = [&sum](std::uint64_t word) {
    sum = (sum ^ word) * 0xff51afd7ed558ccd;
    sum ^= sum >> 32;
  };
  std::size_t at = 0;
  for (; at + 8 <= bytes.size(); at += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data() + at, 8);
    add(word);
  }
  std::uint64_t rest = 0;
  std::memcpy(&rest, bytes.data() + at, bytes.size() - at);
  add(rest);
  return sum;
}

/// A tensor that is no more than its elements on the CPU: not conjugated, not quantized, nobody's subclass.
bool is_plain(const at::Tensor& tensor) {
  static const auto plain = [] {
    const c10::InferenceMode off(false);
    return at::empty({0}, at::kFloat).set_requires_grad(true).key_set();
  }();
  return (tensor.key_set() | plain) == plain && tensor.has_storage();
}

/// Types whose elements are bytes and nothing else.
bool is_plain_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kByte:
    case at::kChar:
    case at::kShort:
    case at::kInt:
    case at::kLong:
    case at::kHalf:
    case at::kFloat:
    case at::kDouble:
    case at::kComplexHalf:
    case at::kComplexFloat:
    case at::kComplexDouble:
    case at::kBool:
    case at::kBFloat16:
    case at::kFloat8_e5m2:
    case at::kFloat8_e4m3fn:
    case at::kFloat8_e5m2fnuz:
    case at::kFloat8_e4m3fnuz:
    case at::kUInt16:
    case at::kUInt32:
    case at::kUInt64:
      return true;
    default:
      return false;
  }
}

/// Reads a record from front to back and never beyond its end.
class RecordReader {
 public:
  explicit RecordReader(std::span<const std::byte> record) : record_(record) {}

  std::size_t left() const { return record_.size() - at_; }

  std::span<const std::byte> take(std::uint64_t bytes, const char* what) {
    if (bytes > left()) throw BadRecord(str(what, " of ", bytes, " bytes where ", left(), " are left"));
    const auto taken = record_.subspan(at_, static_cast<std::size_t>(bytes));
    at_ += static_cast<std::size_t>(bytes);
    return taken;
  }

  /// A copy: others can write to the record while it is read.
  template <class T>
  T read(const char* what) {
    T value;
    std::memcpy(&value, take(sizeof(T), what).data(), sizeof(T));
    return value;
  }

  void align(std::size_t to) { take(record_align(at_, to) - at_, "padding"); }

 private:
  const std::span<const std::byte> record_;
  std::size_t at_ = 0;
};

/// What a TensorHead and its numbers say, checked.
struct TensorShape {
  bool is_defined = false;
  bool requires_grad = false;
  at::ScalarType dtype = at::kFloat;
  c10::SmallVector<int64_t, 8> sizes;
  c10::SmallVector<int64_t, 8> strides;
  std::uint64_t bytes = 0;
};

std::uint64_t checked_product(std::uint64_t a, std::uint64_t b) {
  std::uint64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product) || product > std::numeric_limits<int64_t>::max()) {
    throw BadRecord("a tensor larger than any memory");
  }
  return product;
}

TensorShape read_shape(RecordReader& reader) {
  const auto head = reader.read<TensorHead>("a tensor's head");
  TensorShape shape;
  shape.is_defined = (head.flags & TensorHead::kIsDefined) != 0;
  if (!shape.is_defined) return shape;
  if (head.dtype >= static_cast<std::uint8_t>(at::ScalarType::NumOptions) ||
      !is_plain_dtype(static_cast<at::ScalarType>(head.dtype))) {
    throw BadRecord(str("a tensor of dtype ", int{head.dtype}));
  }
  shape.dtype = static_cast<at::ScalarType>(head.dtype);
  shape.requires_grad = (head.flags & TensorHead::kRequiresGrad) != 0;
  if (shape.requires_grad && !at::isFloatingType(shape.dtype) && !at::isComplexType(shape.dtype)) {
    throw BadRecord("a tensor of integers that requires gradients");
  }
  if (head.dims > kMostDims) throw BadRecord(str("a tensor of ", head.dims, " dims"));
  std::uint64_t elements = 1;
  std::uint64_t memory = 1;  // what sizes ask for if each counts as one at least
  for (std::size_t dim = 0; dim < head.dims; ++dim) {
    const auto size = reader.read<int64_t>("a tensor's size");
    if (size < 0) throw BadRecord(str("a tensor's size of ", size));
    memory = checked_product(memory, static_cast<std::uint64_t>(std::max<int64_t>(size, 1)));
    elements *= static_cast<std::uint64_t>(size);
    shape.sizes.push_back(size);
  }
  checked_product(memory, c10::elementSize(shape.dtype));
  shape.bytes = elements * c10::elementSize(shape.dtype);
  std::uint64_t reach = 1;  // elements from the first to the last
  for (std::size_t dim = 0; dim < head.dims; ++dim) {
    const auto stride = reader.read<int64_t>("a tensor's stride");
    const auto steps = static_cast<std::uint64_t>(std::max<int64_t>(shape.sizes[dim], 1) - 1);
    if (stride < 0) throw BadRecord(str("a tensor's stride of ", stride));
    reach += checked_product(steps, static_cast<std::uint64_t>(stride));
    if (reach > std::numeric_limits<int64_t>::max()) throw BadRecord("a tensor larger than any memory");
    shape.strides.push_back(stride);
  }
  if (elements > 0 && reach != elements) {
    throw BadRecord(str("a tensor of ", elements, " elements whose strides reach over ", reach));
  }
  return shape;
}

at::Tensor read_tensor(const TensorShape& shape, RecordReader& reader) {
  if (!shape.is_defined) return {};
  reader.align(kElementsAlignment);
  const auto elements = reader.take(shape.bytes, "a tensor");
  at::Tensor tensor(at::detail::empty_strided_cpu(shape.sizes, shape.strides, shape.dtype));
  if (!elements.empty()) {
    auto* to = static_cast<std::byte*>(tensor.mutable_data_ptr());
    if (elements.size() >= kHugeTensorBytes) {
      const auto begin = record_align(reinterpret_cast<std::size_t>(to), 4096);
      const auto end = (reinterpret_cast<std::size_t>(to) + elements.size()) / 4096 * 4096;
      // NOLINTNEXTLINE(performance-no-int-to-ptr): the same pointer, rounded up
      ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // a wish
    }
    std::memcpy(to, elements.data(), elements.size());
  }
  if (shape.requires_grad) tensor.set_requires_grad(true);
  return tensor;
}

c10::intrusive_ptr<Message> read_general(const MessageHead& head, RecordReader& reader, int64_t id) {
  const auto body = reader.take(head.body_bytes, "a message");
  // A copy of my own: the checksum would be of no use if it could change afterwards.
  const std::vector<std::byte> own(body.begin(), body.end());
  if (record_checksum(own) != head.checksum) throw BadRecord("a message whose checksum is wrong");
  try {
    auto [payload, tensors] = torch::distributed::rpc::wireDeserialize(own.data(), own.size());
    return c10::make_intrusive<Message>(std::move(payload), std::move(tensors), static_cast<MessageType>(head.type),
                                        id);
  } catch (const std::exception& error) {
    throw BadRecord(str("a message that libtorch cannot read (", error.what(), ")"));
  }
}

}  // namespace

MessageRecord::MessageRecord(const Message& message) : message_(message) {
  bytes_ = sizeof(MessageHead);
  bool is_general = false;
  for (const auto& tensor : message.tensors()) {
    if (!tensor.defined()) continue;
    TORCH_CHECK(
        tensor.device().is_cpu(), "[lockstep/rpc] a tensor on ", tensor.device(),
        " cannot be sent through shared memory. Use the TensorPipe agent with a device map, or send tensor.cpu().");
    is_general |= !is_plain(tensor) || !is_plain_dtype(tensor.scalar_type());
  }
  if (is_general) {
    general_ = torch::distributed::rpc::wireSerialize(message.payload(), message.tensors());
    bytes_ += general_.size();
    return;
  }
  bytes_ = record_align(bytes_ + message.payload().size(), kShapesAlignment);
  for (const auto& tensor : message.tensors()) {
    bytes_ +=
        sizeof(TensorHead) + (tensor.defined() ? 2 * sizeof(int64_t) * static_cast<std::size_t>(tensor.dim()) : 0);
  }
  for (const auto& tensor : message.tensors()) {
    if (tensor.defined()) bytes_ = record_align(bytes_, kElementsAlignment);
    offsets_.push_back(bytes_);
    if (tensor.defined()) bytes_ += tensor.nbytes();
  }
}

void MessageRecord::write(std::byte* at) const {
  const auto& payload = message_.payload();
  const auto& tensors = message_.tensors();
  auto* const begin = at;
  const auto put = [&at](const void* from, std::size_t bytes) {
    if (bytes > 0) std::memcpy(at, from, bytes);
    at += bytes;
  };
  MessageHead head{.type = static_cast<std::uint16_t>(message_.type())};
  if (!general_.empty()) {
    head.form = MessageHead::kGeneral;
    head.body_bytes = general_.size();
    head.checksum = record_checksum(std::as_bytes(std::span(general_)));
    put(&head, sizeof(head));
    put(general_.data(), general_.size());
    return;
  }
  head.body_bytes = payload.size();
  head.tensors = static_cast<std::uint32_t>(tensors.size());
  put(&head, sizeof(head));
  put(payload.data(), payload.size());
  at = begin + record_align(static_cast<std::size_t>(at - begin), kShapesAlignment);
  const c10::NoGradGuard no_grad;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto& tensor = tensors[i];
    TensorHead each;
    if (!tensor.defined()) {
      put(&each, sizeof(each));
      continue;
    }
    each.dtype = static_cast<std::uint8_t>(tensor.scalar_type());
    each.flags = TensorHead::kIsDefined | (tensor.requires_grad() ? TensorHead::kRequiresGrad : 0);
    each.dims = static_cast<std::uint16_t>(tensor.dim());
    const bool is_dense = tensor.is_non_overlapping_and_dense();
    put(&each, sizeof(each));
    put(tensor.sizes().data(), tensor.sizes().size() * sizeof(int64_t));
    if (is_dense) {
      put(tensor.strides().data(), tensor.strides().size() * sizeof(int64_t));
    } else {
      const auto strides = c10::contiguous_strides(tensor.sizes());
      put(strides.data(), strides.size() * sizeof(int64_t));
    }
    if (tensor.numel() == 0) continue;
    auto* to = begin + offsets_[i];
    if (is_dense) {
      std::memcpy(to, tensor.const_data_ptr(), tensor.nbytes());
    } else {
      at::from_blob(to, tensor.sizes(), tensor.options().requires_grad(false)).copy_(tensor);
    }
  }
}

c10::intrusive_ptr<Message> read_message(std::span<const std::byte> record, int64_t id) {
  // Whoever waits reads others' mail too: its own mode is not theirs.
  const c10::InferenceMode off(false);
  RecordReader reader(record);
  const auto head = reader.read<MessageHead>("a message's head");
  if (head.magic != MessageHead::kMagic) throw BadRecord("a message that does not begin as messages do");
  if (head.form == MessageHead::kGeneral) return read_general(head, reader, id);
  if (head.form != MessageHead::kDense) throw BadRecord(str("a message of the form ", head.form));
  const auto payload = reader.take(head.body_bytes, "a payload");
  reader.align(kShapesAlignment);
  if (head.tensors > reader.left() / sizeof(TensorHead)) throw BadRecord(str(head.tensors, " tensors"));
  c10::SmallVector<TensorShape, 4> shapes;
  for (std::uint32_t i = 0; i < head.tensors; ++i) shapes.push_back(read_shape(reader));
  std::vector<at::Tensor> tensors;
  tensors.reserve(head.tensors);
  for (const auto& shape : shapes) tensors.push_back(read_tensor(shape, reader));
  const auto* chars = reinterpret_cast<const char*>(payload.data());
  return c10::make_intrusive<Message>(std::vector<char>(chars, chars + payload.size()), std::move(tensors),
                                      static_cast<MessageType>(head.type), id);
}

c10::intrusive_ptr<Message> copy_message(const Message& message) {
  const c10::InferenceMode off(false);
  std::vector<at::Tensor> tensors;
  tensors.reserve(message.tensors().size());
  for (const auto& tensor : message.tensors()) {
    auto& copy = tensors.emplace_back();
    if (!tensor.defined()) continue;
    copy = tensor.detach().clone();
    copy.set_requires_grad(tensor.requires_grad());
  }
  return c10::make_intrusive<Message>(std::vector<char>(message.payload()), std::move(tensors), message.type(),
                                      message.id());
}

}  // namespace lockstep::rpc
