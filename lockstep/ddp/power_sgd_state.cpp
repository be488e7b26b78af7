#include "lockstep/ddp/power_sgd_state.h"

#include <ATen/core/Dict.h>
#include <c10/util/Logging.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <algorithm>
#include <sstream>

#include "lockstep/ddp/default_hooks.h"

namespace lockstep {
namespace {

using Saved = c10::Dict<std::string, c10::IValue>;
using SavedTensors = c10::Dict<int64_t, at::Tensor>;

SavedTensors as_dict(const std::map<int64_t, at::Tensor>& tensors) {
  SavedTensors dict;
  for (const auto& [bucket, tensor] : tensors) dict.insert(bucket, tensor);
  return dict;
}

const c10::IValue& value_of(const c10::impl::GenericDict& saved, const std::string& name) {
  const auto found = saved.find(name);
  TORCH_CHECK(found != saved.end(), "[lockstep/ddp] these bytes are no saved PowerSGDState: '", name, "' is missing");
  return found->value();
}

}  // namespace

PowerSGDState::PowerSGDState(PowerSGDOptions options) : options_(std::move(options)), seeds_(options_.random_seed) {
  TORCH_CHECK(options_.matrix_approximation_rank >= 1,
              "[lockstep/ddp] PowerSGDState: matrix_approximation_rank must be 1 or more, but is ",
              options_.matrix_approximation_rank);
  TORCH_CHECK((!options_.use_error_feedback && !options_.warm_start) || options_.start_power_sgd_iter > 1,
              "[lockstep/ddp] PowerSGDState: start_power_sgd_iter must be above 1 with use_error_feedback or "
              "warm_start, but is ",
              options_.start_power_sgd_iter,
              ": buckets are laid out anew after the first step, and what is remembered of them would not fit");
  options_.compression_stats_logging_frequency = std::max<int64_t>(1, options_.compression_stats_logging_frequency);
}

PowerSGDState::CompressionStats PowerSGDState::compression_stats() const {
  const auto rate = numel_after_ > 0 ? static_cast<double>(numel_before_) / static_cast<double>(numel_after_) : 0;
  return {.rate = rate, .numel_before = numel_before_, .numel_after = numel_after_};
}

std::map<int64_t, at::Tensor> PowerSGDState::error_dict() const {
  std::map<int64_t, at::Tensor> tensors;
  for (const auto& [bucket, memory] : memory_) {
    if (memory->error.defined()) tensors[bucket] = memory->error;
  }
  return tensors;
}

std::map<int64_t, at::Tensor> PowerSGDState::p_memory_dict() const {
  std::map<int64_t, at::Tensor> tensors;
  for (const auto& [bucket, memory] : memory_) {
    if (options_.warm_start && memory->p.defined()) tensors[bucket] = memory->p;
  }
  return tensors;
}

std::map<int64_t, at::Tensor> PowerSGDState::q_memory_dict() const {
  std::map<int64_t, at::Tensor> tensors;
  for (const auto& [bucket, memory] : memory_) {
    if (options_.warm_start && memory->q.defined()) tensors[bucket] = memory->q;
  }
  return tensors;
}

std::string PowerSGDState::save() const {
  std::ostringstream seeds;
  seeds << seeds_;
  c10::impl::GenericDict saved(c10::StringType::get(), c10::AnyType::get());
  saved.insert("matrix_approximation_rank", options_.matrix_approximation_rank);
  saved.insert("start_powerSGD_iter", options_.start_power_sgd_iter);
  saved.insert("min_compression_rate", options_.min_compression_rate);
  saved.insert("use_error_feedback", options_.use_error_feedback);
  saved.insert("warm_start", options_.warm_start);
  saved.insert("orthogonalization_epsilon", options_.orthogonalization_epsilon);
  saved.insert("random_seed", static_cast<int64_t>(options_.random_seed));
  saved.insert("compression_stats_logging_frequency", options_.compression_stats_logging_frequency);
  saved.insert("batch_tensors_with_same_shape", options_.batch_tensors_with_same_shape);
  saved.insert("rng", seeds.str());
  saved.insert("error_dict", as_dict(error_dict()));
  saved.insert("p_memory_dict", as_dict(p_memory_dict()));
  saved.insert("q_memory_dict", as_dict(q_memory_dict()));
  saved.insert("iter", iter_);
  saved.insert("total_numel_before_compression", numel_before_);
  saved.insert("total_numel_after_compression", numel_after_);
  saved.insert("next_stats_report", next_stats_report_);
  const auto bytes = torch::jit::pickle_save(saved);
  return {bytes.begin(), bytes.end()};
}

std::shared_ptr<PowerSGDState> PowerSGDState::load(const std::string& bytes, GroupPtr group) {
  const auto value = torch::jit::pickle_load({bytes.begin(), bytes.end()});
  TORCH_CHECK(value.isGenericDict(), "[lockstep/ddp] these bytes are no saved PowerSGDState");
  const auto saved = value.toGenericDict();
  const auto integer = [&](const char* name) { return value_of(saved, name).toInt(); };
  auto state = std::make_shared<PowerSGDState>(
      PowerSGDOptions{.process_group = std::move(group),
                      .matrix_approximation_rank = integer("matrix_approximation_rank"),
                      .start_power_sgd_iter = integer("start_powerSGD_iter"),
                      .min_compression_rate = value_of(saved, "min_compression_rate").toDouble(),
                      .use_error_feedback = value_of(saved, "use_error_feedback").toBool(),
                      .warm_start = value_of(saved, "warm_start").toBool(),
                      .orthogonalization_epsilon = value_of(saved, "orthogonalization_epsilon").toDouble(),
                      .random_seed = static_cast<uint32_t>(integer("random_seed")),
                      .compression_stats_logging_frequency = integer("compression_stats_logging_frequency"),
                      .batch_tensors_with_same_shape = value_of(saved, "batch_tensors_with_same_shape").toBool()});
  std::istringstream(value_of(saved, "rng").toStringRef()) >> state->seeds_;
  state->iter_ = integer("iter");
  state->numel_before_ = integer("total_numel_before_compression");
  state->numel_after_ = integer("total_numel_after_compression");
  state->next_stats_report_ = integer("next_stats_report");
  const auto load_tensors = [&](const char* name, at::Tensor detail::PowerSGDMemory::*member) {
    for (const auto& entry : value_of(saved, name).toGenericDict()) {
      auto& memory = state->memory_[entry.key().toInt()];
      if (!memory) memory = std::make_shared<detail::PowerSGDMemory>();
      (*memory).*member = entry.value().toTensor();
    }
  };
  load_tensors("error_dict", &detail::PowerSGDMemory::error);
  load_tensors("p_memory_dict", &detail::PowerSGDMemory::p);
  load_tensors("q_memory_dict", &detail::PowerSGDMemory::q);
  return state;
}

GroupPtr PowerSGDState::group() const {
  return options_.process_group ? options_.process_group : default_group();
}

GroupPtr PowerSGDState::group_for(const GradBucket& bucket) const {
  return detail::group_for(bucket, options_.process_group);
}

void PowerSGDState::count(const GradBucket& bucket) {
  if (!bucket.is_last()) return;
  ++iter_;
  if (iter_ == options_.start_power_sgd_iter) LOG(INFO) << "[lockstep/ddp] PowerSGD starts after " << iter_ << " steps";
}

void PowerSGDState::add_to_stats(int64_t numel_before, int64_t numel_after) {
  numel_before_ += numel_before;
  numel_after_ += numel_after;
}

void PowerSGDState::report_stats(const GradBucket& bucket) {
  if (!bucket.is_last() || iter_ < next_stats_report_) return;
  const auto stats = compression_stats();
  LOG(INFO) << "[lockstep/ddp] PowerSGD: step " << iter_ << ", " << stats.numel_before << " elements became "
            << stats.numel_after << ", rate " << stats.rate;
  next_stats_report_ = iter_ + options_.compression_stats_logging_frequency;
}

const std::shared_ptr<detail::PowerSGDMemory>& PowerSGDState::memory_of(const GradBucket& bucket) {
  auto& memory = memory_[static_cast<int64_t>(bucket.index())];
  std::vector<const c10::TensorImpl*> parameters;
  for (const auto& parameter : bucket.parameters()) parameters.push_back(parameter.unsafeGetTensorImpl());
  // Buckets may be laid out anew, and what was left over of other gradients must not be fed back to these.
  const bool is_another = memory && !memory->parameters.empty() && memory->parameters != parameters;
  if (!memory || is_another) memory = std::make_shared<detail::PowerSGDMemory>();
  memory->parameters = std::move(parameters);
  return memory;
}

uint64_t PowerSGDState::next_seed() {
  // As numpy's RandomState(random_seed).randint(1000000000): masked to as many bits, and drawn again if too large.
  constexpr uint64_t kSeeds = 1'000'000'000;
  constexpr uint64_t kMask = (uint64_t{1} << 30) - 1;
  while (true) {
    const auto seed = seeds_() & kMask;
    if (seed < kSeeds) return seed;
  }
}

}  // namespace lockstep
