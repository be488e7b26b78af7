#include "lockstep/state/files.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "lockstep/base/str.h"
#include "lockstep/shard/flat.h"
#include "lockstep/state/disk.h"
#include "lockstep/state/pickled_file.h"
#include "lockstep/state/python_format.h"

namespace lockstep::detail {
namespace {

constexpr const char* kFormat = "lockstep state 3";
constexpr const char* kSecondFormat = "lockstep state 2";
constexpr const char* kFirstFormat = "lockstep optimizer state 1";
/// At the start of every part: which save it belongs to.
constexpr int64_t kHeaderBytes = sizeof(int64_t);

c10::impl::GenericList made_list() {
  return c10::impl::GenericList(c10::AnyType::get());
}

c10::IValue to_ivalue(const std::vector<SavedTensor>& tensors) {
  auto value = made_list();
  for (const auto& each : tensors) value.push_back(c10::ivalue::Tuple::create({each.name, each.sizes, each.strides}));
  return value;
}

std::vector<SavedTensor> tensors_from(const c10::IValue& value) {
  std::vector<SavedTensor> tensors;
  for (const auto& each : value.toListRef()) {
    const auto& fields = each.toTupleRef().elements();
    tensors.push_back({fields[0].toStringRef(), fields[1].toIntVector(), fields[2].toIntVector()});
  }
  return tensors;
}

/// Of the first format: two lists, by parameter.
std::vector<SavedTensor> tensors_from(const c10::IValue& sizes, const c10::IValue& strides) {
  std::vector<SavedTensor> tensors;
  const auto strides_of = strides.toListRef();
  for (const auto& each : sizes.toListRef()) {
    tensors.push_back({.sizes = each.toIntVector(), .strides = strides_of[tensors.size()].toIntVector()});
  }
  return tensors;
}

std::string file_of_part(const std::string& path, int64_t part, const StateIndex& index) {
  return index.has_named_parts ? part_path(path, part, index.save_id) : str(path, ".part", part);
}

/// The save a part belongs to; 0 if it cannot be read.
int64_t save_of(const std::string& file) {
  int64_t id = 0;
  std::ifstream(file, std::ios::binary).read(reinterpret_cast<char*>(&id), sizeof(id));
  return id;
}

/// Parts of older formats are counted by looking: those without a piece are not in the index.
void remove_parts(const std::string& path, const StateIndex& index) {
  for (int64_t part = 0;; ++part) {
    const auto file = file_of_part(path, part, index);
    const bool is_there = index.has_named_parts ? part < index.parts : save_of(file) == index.save_id;
    if (!is_there) return;
    std::remove(file.c_str());
  }
}

/// The index that a new one will replace, if it is one.
std::optional<StateIndex> index_before(const std::string& path) {
  if (!std::ifstream(path)) return std::nullopt;
  try {
    return read_index(path);
  } catch (const std::exception&) {
    return std::nullopt;  // something else, or damaged: it names no parts
  }
}

/// Reads bytes [begin, begin + size) of a part into `into`.
class PartReader {
 public:
  PartReader(const std::string& path, int64_t part, const StateIndex& index)
      : file_(file_of_part(path, part, index)), in_(file_, std::ios::binary) {
    TORCH_CHECK(in_, "[lockstep/state] cannot read ", file_, ": ", std::strerror(errno));
    int64_t id = 0;
    read(0, &id, sizeof(id));
    TORCH_CHECK(id == index.save_id, "[lockstep/state] ", file_, " belongs to another save than the index ", path);
  }
  void read(int64_t begin, void* into, int64_t size) {
    in_.seekg(begin);
    in_.read(static_cast<char*>(into), size);
    TORCH_CHECK(in_.gcount() == size, "[lockstep/state] ", file_, " ends before byte ", begin + size);
  }

 private:
  const std::string file_;
  std::ifstream in_;
};

at::Tensor read_tensor(PartReader& part, int64_t offset, const TensorForm& form) {
  auto tensor = form.empty();
  if (form.nbytes() > 0) part.read(offset, tensor.mutable_data_ptr(), form.nbytes());
  return tensor;
}

/// A value for each element of the piece's tensor, or of the piece.
bool is_by_element(const TensorForm& form, const StatePiece& piece, const std::vector<int64_t>& sizes) {
  if (piece.is_whole) return form.sizes == sizes;
  return !form.sizes.empty() && form.numel() == piece.elements.size();
}

class Reading {
 public:
  Reading(std::string path, const StateIndex& index, const std::vector<at::Tensor>& tensors)
      : path_(std::move(path)), index_(index), tensors_(tensors), of_tensor_(index.tensors.size()) {
    for (const auto& placed : index.pieces) of_tensor_.at(placed.piece.index).push_back(&placed);
  }

  std::optional<NamedValues> operator()(int64_t index, const ElementRange& elements, bool is_whole) {
    const auto& placed = of_tensor_.at(index);
    if (placed.empty()) return std::nullopt;
    NamedValues values;
    for (const auto& [name, value] : placed.front()->piece.values) {
      const auto form = form_of(value);
      if (!form) {
        values.emplace(name, value);
      } else if (!is_by_element(*form, placed.front()->piece, index_.tensors[index].sizes)) {
        values.emplace(name, read_tensor(part(placed.front()->part), placed.front()->offsets.at(name), *form));
      } else if (is_whole) {
        const auto row = read_row(index, name, *form, {0, tensors_[index].numel()});
        values.emplace(name, unflattened_like(row, tensors_[index]));
      } else {
        values.emplace(name, read_row(index, name, *form, elements));
      }
    }
    return values;
  }

 private:
  /// Elements of a tensor, in the order in which it lies in memory here.
  at::Tensor read_row(int64_t index, const std::string& name, const TensorForm& form, const ElementRange& elements) {
    const auto& tensor = tensors_[index];
    const auto& then = index_.tensors[index];
    const auto& first = *of_tensor_[index].front();
    if (first.piece.is_whole && form.strides != then.strides) {
      // Laid out unlike its parameter: momentum that began as a transposed gradient, say.
      const auto whole = read_tensor(part(first.part), first.offsets.at(name), form);
      return flattened_like(whole, tensor).narrow(0, elements.begin, elements.size()).clone();
    }
    if (tensor.strides() == at::IntArrayRef(then.strides)) return read_saved(index, name, form, elements);
    // It was saved in another memory format.
    const TensorForm saved{.dtype = form.dtype, .sizes = then.sizes, .strides = then.strides};
    const auto whole = saved.empty();
    row_of(whole).copy_(read_saved(index, name, form, {0, tensor.numel()}));
    return flattened_like(whole, tensor).narrow(0, elements.begin, elements.size()).clone();
  }

  at::Tensor read_saved(int64_t index, const std::string& name, const TensorForm& form, const ElementRange& elements) {
    const auto row = at::empty({elements.size()}, form.dtype);
    const auto item = static_cast<int64_t>(row.itemsize());
    for (const auto* placed : of_tensor_[index]) {
      const auto common = intersection(placed->piece.elements, elements);
      if (common.is_empty()) continue;
      const auto from = placed->offsets.at(name) + (common.begin - placed->piece.elements.begin) * item;
      part(placed->part)
          .read(from, static_cast<char*>(row.mutable_data_ptr()) + (common.begin - elements.begin) * item,
                common.size() * item);
    }
    return row;
  }

  PartReader& part(int64_t number) {
    auto found = parts_.find(number);
    if (found == parts_.end()) {
      found = parts_.emplace(number, std::make_shared<PartReader>(path_, number, index_)).first;
    }
    return *found->second;
  }

  const std::string path_;
  const StateIndex& index_;
  const std::vector<at::Tensor>& tensors_;
  std::vector<std::vector<const PlacedPiece*>> of_tensor_;
  std::map<int64_t, std::shared_ptr<PartReader>> parts_;
};

}  // namespace

std::vector<std::string> StateIndex::names() const {
  std::vector<std::string> names;
  for (const auto& tensor : tensors) names.push_back(tensor.name);
  return names;
}

std::string part_path(const std::string& path, int64_t part, int64_t save_id) {
  return str(path, ".", save_id, ".part", part);
}

PartWriter::PartWriter(const std::string& path, int64_t part, int64_t save_id)
    : file_(part_path(path, part, save_id)), part_(part), out_(file_, std::ios::binary | std::ios::trunc) {
  out_.write(reinterpret_cast<const char*>(&save_id), sizeof(save_id));
  offset_ = kHeaderBytes;
  check();
}

void PartWriter::check() const {
  TORCH_CHECK(out_, "[lockstep/state] cannot write ", file_, ": ", std::strerror(errno));
}

void PartWriter::take(const StatePiece& piece, const std::string& name, int64_t begin, const at::Tensor& bytes) {
  const bool is_new = placed_.empty() || placed_.back().piece.index != piece.index ||
                      !(placed_.back().piece.elements == piece.elements);
  if (is_new) placed_.push_back({.piece = piece, .part = part_});
  if (name.empty()) return;
  if (begin == 0) placed_.back().offsets.emplace(name, offset_);
  const auto local = bytes.cpu();
  out_.write(static_cast<const char*>(local.const_data_ptr()), local.numel());
  offset_ += local.numel();
  check();
}

std::vector<PlacedPiece> PartWriter::finish() {
  out_.close();
  check();
  flush_to_disk(file_);
  return std::move(placed_);
}

c10::IValue to_ivalue(const std::vector<PlacedPiece>& placed) {
  std::vector<StatePiece> pieces;
  auto places = made_list();
  for (const auto& each : placed) {
    pieces.push_back(each.piece);
    c10::impl::GenericDict offsets(c10::StringType::get(), c10::AnyType::get());
    for (const auto& [name, offset] : each.offsets) offsets.insert(name, offset);
    places.push_back(c10::ivalue::Tuple::create({each.part, offsets}));
  }
  return c10::ivalue::Tuple::create({to_ivalue(pieces), places});
}

std::vector<PlacedPiece> placed_from(const c10::IValue& value) {
  const auto& fields = value.toTupleRef().elements();
  auto pieces = pieces_from(fields[0]);
  std::vector<PlacedPiece> placed;
  for (const auto& each : fields[1].toListRef()) {
    const auto& place = each.toTupleRef().elements();
    auto& into = placed.emplace_back(PlacedPiece{.piece = std::move(pieces[placed.size()]), .part = place[0].toInt()});
    for (const auto& item : place[1].toGenericDict())
      into.offsets.emplace(item.key().toStringRef(), item.value().toInt());
  }
  return placed;
}

void write_index(const std::string& path, const StateIndex& index) {
  c10::impl::GenericDict whole(c10::StringType::get(), c10::AnyType::get());
  whole.insert("format", kFormat);
  whole.insert("save", index.save_id);
  whole.insert("parts", index.parts);
  whole.insert("groups", to_python(index.groups));
  whole.insert("pieces", to_ivalue(index.pieces));
  whole.insert("tensors", to_ivalue(index.tensors));
  const auto before = index_before(path);
  write_pickled(path, whole);
  if (before && before->save_id != index.save_id) remove_parts(path, *before);
}

StateIndex read_index(const std::string& path) {
  constexpr const char* kWhat = "index of saved optimizer state";
  const auto whole = read_pickled(path, kWhat);
  const auto format = whole.at("format").toStringRef();
  const bool is_newest = format == kFormat;
  TORCH_CHECK(is_newest || format == kSecondFormat || format == kFirstFormat, "[lockstep/state] ", path, " is no ",
              kWhat);
  return {.save_id = whole.at("save").toInt(),
          .parts = is_newest ? whole.at("parts").toInt() : 0,
          .has_named_parts = is_newest,
          .groups = from_python(whole.at("groups")),
          .tensors = format == kFirstFormat ? tensors_from(whole.at("sizes"), whole.at("strides"))
                                            : tensors_from(whole.at("tensors")),
          .pieces = placed_from(whole.at("pieces"))};
}

StateSource source_of(const std::string& path, const StateIndex& index, const std::vector<at::Tensor>& tensors) {
  return Reading(path, index, tensors);
}

}  // namespace lockstep::detail
