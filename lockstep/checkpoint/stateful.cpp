#include "lockstep/checkpoint/stateful.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

#include <utility>

#include "lockstep/checkpoint/names.h"

namespace lockstep::dcp {
namespace {

/// In a dict of values: a tensor is in its place, under a name of its own.
constexpr const char* kTensorMark = "lockstep.tensor";

c10::IValue tensor_mark() {
  return c10::ivalue::Tuple::create({c10::IValue(std::string(kTensorMark))});
}

bool is_tensor_mark(const c10::IValue& value) {
  if (!value.isTuple()) return false;
  const auto& items = value.toTupleRef().elements();
  return items.size() == 1 && items[0].isString() && items[0].toStringRef() == kTensorMark;
}

bool is_unused(const c10::IValue& value) {
  return value.isNone() || (value.isTensor() && !value.toTensor().defined());
}

}  // namespace

void Outgoing::begin_entry(const std::string& entry) {
  entry_ = entry;
}

std::string Outgoing::full_name(const std::string& name) const {
  return lockstep::detail::full_name(entry_, name);
}

void Outgoing::value(const std::string& name, c10::IValue value) {
  const bool is_new = values_.emplace(full_name(name), std::move(value)).second;
  TORCH_CHECK(is_new, "[lockstep/checkpoint] two values are called '", full_name(name), "'");
}

void Outgoing::tensor(const std::string& name, const at::Tensor& tensor, Replicas replicas) {
  TORCH_CHECK(tensor.defined(), "[lockstep/checkpoint] '", full_name(name), "' is undefined");
  pieces(name, tensor.sizes().vec(), tensor.scalar_type(),
         {{.box = whole_box(tensor.sizes().vec()), .values = tensor.detach()}}, replicas);
}

void Outgoing::pieces(const std::string& name, const std::vector<int64_t>& sizes, at::ScalarType dtype,
                      std::vector<BoxedValues> pieces, Replicas replicas) {
  const auto full = full_name(name);
  for (const auto& piece : pieces) {
    TORCH_CHECK(piece.values.layout() == at::kStrided && !piece.values.is_quantized(), "[lockstep/checkpoint] '", full,
                "' is sparse or quantized, which a checkpoint cannot hold. Save it as dense tensors.");
    TORCH_CHECK(!piece.values.is_meta(), "[lockstep/checkpoint] '", full,
                "' has no memory yet: materialize the module before it is saved");
    TORCH_CHECK(piece.values.scalar_type() == dtype && piece.values.sizes() == at::IntArrayRef(piece.box.sizes),
                "[lockstep/checkpoint] '", full, "' was given as ", piece.values.scalar_type(), " of sizes ",
                piece.values.sizes(), " for the box ", piece.box.to_string());
  }
  const bool is_new =
      tensors_.emplace(full, Tensor{.sizes = sizes, .dtype = dtype, .replicas = replicas, .pieces = std::move(pieces)})
          .second;
  TORCH_CHECK(is_new, "[lockstep/checkpoint] two tensors are called '", full, "'");
}

void Outgoing::bytes(const std::string& name, std::string_view bytes) {
  const auto tensor = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
  std::copy(bytes.begin(), bytes.end(), tensor.mutable_data_ptr<uint8_t>());
  this->tensor(name, tensor);
}

void Outgoing::values(const std::string& name, const NamedValues& values) {
  c10::impl::GenericDict others(c10::StringType::get(), c10::AnyType::get());
  for (const auto& [key, value] : values) {
    if (is_unused(value)) continue;
    others.insert(key, value.isTensor() ? tensor_mark() : value);
    if (value.isTensor()) tensor(lockstep::detail::full_name(name, key), value.toTensor());
  }
  value(name, others);
}

void Outgoing::object(const std::string& name, Stateful& object) {
  const auto before = std::exchange(entry_, full_name(name));
  object.save(*this);
  entry_ = before;
}

c10::IValue Incoming::value(const std::string& name) {
  auto found = find_value(name);
  if (!found) note_missing(name);
  return found ? std::move(*found) : c10::IValue();
}

void Incoming::tensor(const std::string& name, const at::Tensor& into) {
  pieces(name, into.sizes().vec(), {{.box = whole_box(into.sizes().vec()), .values = into.detach()}});
}

at::Tensor Incoming::tensor(const std::string& name) {
  const auto found = form(name);
  if (!found) {
    note_missing(name);
    return {};
  }
  auto tensor = at::empty(found->sizes, found->dtype);
  this->tensor(name, tensor);
  return tensor;
}

std::optional<std::string> Incoming::bytes(const std::string& name) {
  const auto found = form(name);
  if (!found || found->dtype != at::kByte || found->sizes.size() != 1) {
    note_missing(name);
    return std::nullopt;
  }
  std::string bytes(static_cast<std::size_t>(found->sizes[0]), '\0');
  pass_over(name);
  read_now(name, {{.box = whole_box(found->sizes), .values = at::from_blob(bytes.data(), found->sizes, at::kByte)}});
  return bytes;
}

NamedValues Incoming::values(const std::string& name) {
  const auto dict = value(name);
  NamedValues values;
  if (!dict.isGenericDict()) return values;
  for (const auto& item : dict.toGenericDict()) {
    const auto& key = item.key().toStringRef();
    if (is_tensor_mark(item.value())) {
      values.emplace(key, tensor(lockstep::detail::full_name(name, key)));
    } else {
      values.emplace(key, item.value());
    }
  }
  return values;
}

}  // namespace lockstep::dcp
