#include "lockstep/state/sharded_state.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "lockstep/base/str.h"
#include "lockstep/shard/layout_of.h"
#include "lockstep/state/pickled_file.h"

namespace lockstep {
namespace {

constexpr const char* kShardFormat = "lockstep shard 1";
constexpr const char* kIndexFormat = "lockstep shards 1";
constexpr int64_t kRagged = -1;  // where a StridedShard has its split_factor

c10::impl::GenericDict any_dict() {
  return c10::impl::GenericDict(c10::StringType::get(), c10::AnyType::get());
}

c10::impl::GenericList any_list() {
  return c10::impl::GenericList(c10::AnyType::get());
}

c10::IValue ivalue_of(const Placement& placement) {
  if (const auto* strided = std::get_if<StridedShard>(&placement)) {
    return std::vector<int64_t>{strided->dim, strided->split_factor};
  }
  if (const auto* shard = std::get_if<Shard>(&placement)) return std::vector<int64_t>{shard->dim};
  if (const auto* ragged = std::get_if<RaggedShard>(&placement)) {
    std::vector<int64_t> numbers{ragged->dim, kRagged};
    numbers.insert(numbers.end(), ragged->counts.begin(), ragged->counts.end());
    return numbers;
  }
  TORCH_CHECK(std::holds_alternative<Replicate>(placement), "[lockstep/state] terms of a sum (", placement,
              ") cannot be saved. Reduce them first.");
  return std::vector<int64_t>{};
}

Placement placement_from(const c10::IValue& value) {
  const auto numbers = value.toIntVector();
  if (numbers.empty()) return Replicate();
  if (numbers.size() == 1) return Shard(numbers[0]);
  if (numbers[1] == kRagged) return RaggedShard(numbers[0], {numbers.begin() + 2, numbers.end()});
  return StridedShard(numbers[0], numbers[1]);
}

c10::IValue ivalue_of(const Sharding& sharding) {
  auto placements = any_list();
  for (const auto& each : sharding.placements) placements.push_back(ivalue_of(each));
  return c10::ivalue::Tuple::create({sharding.sizes, placements, sharding.mesh_shape,
                                     std::vector<int64_t>(sharding.coordinate.begin(), sharding.coordinate.end())});
}

Sharding sharding_from(const c10::IValue& value) {
  const auto& fields = value.toTupleRef().elements();
  Sharding sharding{.sizes = fields[0].toIntVector(), .mesh_shape = fields[2].toIntVector()};
  for (const auto& each : fields[1].toListRef()) sharding.placements.push_back(placement_from(each));
  for (const auto each : fields[3].toIntVector()) sharding.coordinate.push_back(static_cast<int>(each));
  return sharding;
}

/// A view would be written with all of the storage it is part of.
c10::IValue compact(const c10::IValue& value) {
  if (!value.isTensor()) return value;
  const auto tensor = value.toTensor().detach().cpu().contiguous();
  return tensor.storage().nbytes() == tensor.nbytes() ? tensor : tensor.clone();
}

c10::IValue ivalue_of(const NamedValues& values) {
  auto dict = any_dict();
  for (const auto& [name, value] : values) dict.insert(name, compact(value));
  return dict;
}

NamedValues values_from(const c10::IValue& value) {
  NamedValues values;
  for (const auto& item : value.toGenericDict()) values.emplace(item.key().toStringRef(), item.value());
  return values;
}

c10::IValue ivalue_of(const ShardedModuleState& model) {
  auto dict = any_dict();
  for (const auto& [name, tensor] : model) {
    const auto sharding = tensor.sharding ? ivalue_of(*tensor.sharding) : c10::IValue();
    dict.insert(name, c10::ivalue::Tuple::create({compact(tensor.local), sharding}));
  }
  return dict;
}

ShardedModuleState model_from(const c10::IValue& value) {
  ShardedModuleState model;
  for (const auto& item : value.toGenericDict()) {
    const auto& fields = item.value().toTupleRef().elements();
    auto& into = model[item.key().toStringRef()];
    into.local = fields[0].toTensor();
    if (!fields[1].isNone()) into.sharding = sharding_from(fields[1]);
  }
  return model;
}

c10::IValue ivalue_of(const NamedOptimizerState& optimizer) {
  auto state = any_dict();
  for (const auto& [name, values] : optimizer.state) state.insert(name, ivalue_of(values));
  auto shardings = any_dict();
  for (const auto& [name, sharding] : optimizer.shardings) shardings.insert(name, ivalue_of(sharding));
  auto groups = any_list();
  for (const auto& group : optimizer.param_groups) {
    auto names = any_list();
    for (const auto& name : group.params) names.push_back(name);
    groups.push_back(c10::ivalue::Tuple::create({ivalue_of(group.options), names}));
  }
  return c10::ivalue::Tuple::create({state, groups, shardings});
}

NamedOptimizerState optimizer_from(const c10::IValue& value) {
  const auto& fields = value.toTupleRef().elements();
  NamedOptimizerState optimizer;
  for (const auto& item : fields[0].toGenericDict()) {
    optimizer.state.emplace(item.key().toStringRef(), values_from(item.value()));
  }
  for (const auto& each : fields[1].toListRef()) {
    const auto& group = each.toTupleRef().elements();
    auto& into = optimizer.param_groups.emplace_back();
    into.options = values_from(group[0]);
    for (const auto& name : group[1].toListRef()) into.params.push_back(name.toStringRef());
  }
  for (const auto& item : fields[2].toGenericDict()) {
    optimizer.shardings.emplace(item.key().toStringRef(), sharding_from(item.value()));
  }
  return optimizer;
}

at::Tensor box_of(const at::Tensor& tensor, const std::vector<ElementRange>& ranges) {
  auto box = tensor;
  for (std::size_t dim = 0; dim < ranges.size(); ++dim) {
    box = box.narrow(static_cast<int64_t>(dim), ranges[dim].begin, ranges[dim].size());
  }
  return box;
}

/// What two boxes have in common, as ranges of the whole tensor; none if that is nothing.
std::optional<std::vector<ElementRange>> common_box(const TensorBox& one, const TensorBox& other) {
  std::vector<ElementRange> common;
  for (std::size_t dim = 0; dim < one.sizes.size(); ++dim) {
    common.push_back(intersection({one.offsets[dim], one.offsets[dim] + one.sizes[dim]},
                                  {other.offsets[dim], other.offsets[dim] + other.sizes[dim]}));
    if (common.back().is_empty()) return std::nullopt;
  }
  return common;
}

/// The same elements in a box's local tensor.
std::vector<ElementRange> inside(const TensorBox& box, std::vector<ElementRange> ranges) {
  for (std::size_t dim = 0; dim < ranges.size(); ++dim) {
    const auto by = box.local_offsets[dim] - box.offsets[dim];
    ranges[dim] = {ranges[dim].begin + by, ranges[dim].end + by};
  }
  return ranges;
}

}  // namespace

TensorPart Sharding::part() const {
  return part_at(coordinate, mesh_shape, placements, sizes);
}

std::string Sharding::to_string() const {
  return str("[", join(sizes, ", "), "], ", lockstep::to_string(placements), " on a mesh of [", join(mesh_shape, ", "),
             "], the part of [", join(coordinate, ", "), "]");
}

std::optional<Sharding> sharding_of(const at::Tensor& parameter) {
  const auto layout = layout_of(parameter);
  if (!layout || !layout->mesh().is_member()) return std::nullopt;
  return Sharding{.sizes = layout->sizes(),
                  .placements = layout->placements(),
                  .mesh_shape = layout->mesh().shape(),
                  .coordinate = *layout->mesh().get_coordinate()};
}

void save_state_shard(const std::string& path, const StateShard& shard) {
  auto whole = any_dict();
  whole.insert("format", kShardFormat);
  whole.insert("save", shard.save);
  whole.insert("parts", static_cast<int64_t>(shard.parts));
  whole.insert("model", ivalue_of(shard.model));
  whole.insert("optimizer", ivalue_of(shard.optimizer));
  detail::write_pickled(path, whole);
}

StateShard load_state_shard(const std::string& path) {
  constexpr const char* kWhat = "part of saved state";
  const auto whole = detail::read_pickled(path, kWhat);
  TORCH_CHECK(whole.at("format").toStringRef() == kShardFormat, "[lockstep/state] ", path, " is no ", kWhat);
  return {.save = whole.at("save").toStringRef(),
          .parts = static_cast<int>(whole.at("parts").toInt()),
          .model = model_from(whole.at("model")),
          .optimizer = optimizer_from(whole.at("optimizer"))};
}

void save_shard_index(const std::string& path, const ShardIndex& index) {
  auto whole = any_dict();
  whole.insert("format", kIndexFormat);
  whole.insert("save", index.save);
  whole.insert("parts", static_cast<int64_t>(index.parts));
  detail::write_pickled(path, whole);
}

ShardIndex load_shard_index(const std::string& path) {
  constexpr const char* kWhat = "index of saved shards";
  const auto whole = detail::read_pickled(path, kWhat);
  TORCH_CHECK(whole.at("format").toStringRef() == kIndexFormat, "[lockstep/state] ", path, " is no ", kWhat);
  return {.save = whole.at("save").toStringRef(), .parts = static_cast<int>(whole.at("parts").toInt())};
}

namespace detail {

PartialTensor::PartialTensor(std::string name, std::vector<int64_t> sizes, TensorPart wanted,
                             const at::TensorOptions& options)
    : name_(std::move(name)),
      sizes_(std::move(sizes)),
      wanted_(std::move(wanted)),
      values_(at::empty(wanted_.sizes(), options)) {}

void PartialTensor::add(const ShardedTensor& given) {
  const auto part = given.sharding ? given.sharding->part() : whole_part(given.local.sizes().vec());
  const auto& sizes = given.sharding ? given.sharding->sizes : part.sizes();
  TORCH_CHECK(sizes == sizes_, "[lockstep/state] '", name_, "' has sizes [", join(sizes_, ", "),
              "], the one that was saved [", join(sizes, ", "), "]");
  TORCH_CHECK(given.local.sizes() == at::IntArrayRef(part.sizes()), "[lockstep/state] a part of '", name_,
              "' has sizes ", given.local.sizes(), ", not [", join(part.sizes(), ", "), "]");
  for (const auto& box : part.boxes()) add(given.local, box);
}

void PartialTensor::add(const at::Tensor& local, const TensorBox& box) {
  if (!seen_.emplace(box.offsets, box.sizes).second) return;
  const at::NoGradGuard no_grad;
  for (const auto& ours : wanted_.boxes()) {
    const auto common = common_box(ours, box);
    if (!common) continue;
    const auto into = box_of(values_, inside(ours, *common));
    into.copy_(box_of(local, inside(box, *common)));
    covered_ += into.numel();
  }
}

const at::Tensor& PartialTensor::finished() const {
  TORCH_CHECK(covered_ == wanted_.numel(), "[lockstep/state] ", wanted_.numel() - covered_, " elements of '", name_,
              "' are in none of the parts that were given. Give those of all ranks that saved.");
  return values_;
}

TensorPart whole_part(const std::vector<int64_t>& sizes) {
  return part_at({}, {}, {}, sizes);
}

}  // namespace detail
}  // namespace lockstep
