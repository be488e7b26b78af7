#include "lockstep/graph/compiled.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <set>

#include "lockstep/ddp/ddp_base.h"
#include "lockstep/ddp/engine.h"
#include "lockstep/ddp/options.h"
#include "lockstep/ddp/reducer.h"
#include "lockstep/nn/module_access.h"
#include "lockstep/nn/module_tensors.h"
#include "lockstep/shard/layout_of.h"

namespace lockstep::graph {
namespace {

bool looks_like(const at::Tensor& tensor, const TensorLook& look) {
  return tensor.defined() && tensor.requires_grad() == look.requires_grad && tensor.scalar_type() == look.dtype &&
         tensor.sizes() == look.sizes && tensor.device() == look.device && tensor.layout() == at::kStrided &&
         tensor.strides() == look.strides;
}

/// A parameter where the module registered it, so that a run finds what is there now; or what modules do not exchange:
/// a buffer, or the whole of a parameter whose shard is registered.
struct Slot {
  const at::Tensor* registered = nullptr;
  at::Tensor kept = {};
  std::string name = "";
  bool is_parameter = true;

  const at::Tensor& tensor() const { return registered != nullptr ? *registered : kept; }
};

std::vector<Slot> slots_of(torch::nn::Module& module) {
  std::vector<Slot> slots;
  std::set<const c10::TensorImpl*> seen;
  const auto is_new = [&](const at::Tensor& tensor) {
    return tensor.defined() && seen.insert(tensor.unsafeGetTensorImpl()).second;
  };
  using lockstep::detail::joined_name;
  lockstep::detail::for_each_module(module, [&](const std::string& prefix, const torch::nn::Module& each) {
    auto& open = const_cast<torch::nn::Module&>(each);  // NOLINT(cppcoreguidelines-pro-type-const-cast): looked at only
    for (const auto& item : lockstep::detail::ModuleAccess::parameters_of(open).items()) {
      if (!is_new(item.value())) continue;
      const auto name = joined_name(prefix, item.key());
      if (!has_gathered_layout(item.value())) {
        slots.push_back({.registered = &item.value(), .name = name});
        continue;
      }
      // What forward computes with. Who touches it in a run finds it gathered.
      const auto wholes = gathered_wholes(item.value());
      for (std::size_t i = 0; i < wholes.size(); ++i) {
        slots.push_back({.kept = wholes[i], .name = wholes.size() == 1 ? name : str(name, ".", i)});
      }
    }
  });
  lockstep::detail::for_each_module(module, [&](const std::string& prefix, const torch::nn::Module& each) {
    for (const auto& item : each.named_buffers(/*recurse=*/false)) {
      if (is_new(item.value()))
        slots.push_back({.kept = item.value(), .name = joined_name(prefix, item.key()), .is_parameter = false});
    }
  });
  return slots;
}

}  // namespace

std::string detail::exact_text(double value) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%a;", value);
  return text.data();
}

/// A program and what must hold for it to be run.
struct Compiler::Entry {
  std::vector<std::optional<TensorLook>> inputs;
  std::string plain;
  bool has_grad_mode = true;
  AutocastState autocast;
  std::vector<const torch::nn::Module*> modules;
  std::vector<bool> are_training;
  const void* wrapper = nullptr;
  std::vector<Slot> slots;
  std::vector<TensorLook> looks;  // of what is in the slots
  std::unique_ptr<Program> program;
  std::shared_ptr<void> shape;

  bool fits(const std::vector<at::Tensor>& given, const std::string& plain_arguments) const {
    if (given.size() != inputs.size() || plain != plain_arguments || has_grad_mode != c10::GradMode::is_enabled() ||
        autocast != autocast_state() || wrapper != active_ddp()) {
      return false;
    }
    for (std::size_t i = 0; i < given.size(); ++i) {
      if (given[i].defined() != inputs[i].has_value() || (inputs[i] && !looks_like(given[i], *inputs[i]))) return false;
    }
    for (std::size_t i = 0; i < slots.size(); ++i) {
      if (!looks_like(slots[i].tensor(), looks[i])) return false;
    }
    for (std::size_t i = 0; i < modules.size(); ++i) {
      if (modules[i]->is_training() != are_training[i]) return false;
    }
    return true;
  }
  std::vector<at::Tensor> outer() const {
    std::vector<at::Tensor> tensors;
    tensors.reserve(slots.size());
    for (const auto& slot : slots) tensors.push_back(slot.tensor());
    return tensors;
  }
};

namespace {

/// By what the wrapper around it reduces; none: the graph stays whole.
std::optional<SplitOptions> split_for(const CompileOptions& options, const DdpEngine* wrapper) {
  if (options.mode == SplitMode::kOff || wrapper == nullptr || wrapper->options().per_parameter) return std::nullopt;
  const auto caps = lockstep::detail::caps_of(wrapper->options());
  SplitOptions split{.bucket_bytes_cap = options.bucket_bytes_cap.value_or(caps.bytes),
                     .first_bucket_cap = options.first_bucket_cap,
                     .ignored = wrapper->ignored()};
  if (!split.first_bucket_cap) split.first_bucket_cap = std::min(caps.first_bytes, split.bucket_bytes_cap);
  // A plan that was given is better than caps, unless these were given for this very thing.
  if (!wrapper->options().bucket_plan.empty() && !options.bucket_bytes_cap && !options.first_bucket_cap) {
    const auto& plan = wrapper->reducer_for("a bucket plan").plan();
    for (const auto& bucket : plan.buckets()) {
      auto& names = split.buckets.emplace_back();
      for (const auto index : bucket.parameters) names.insert(plan.parameters()[index].name);
    }
  }
  return split;
}

/// The cuts as a plan for the reducer: what the last part needs is reduced first; what no part has, last.
void align(DdpEngine& wrapper, const Program& program) {
  auto& reducer = wrapper.reducer_for("aligned buckets");
  const auto& infos = reducer.plan().parameters();
  std::map<std::string, std::size_t> index_of;
  for (std::size_t i = 0; i < infos.size(); ++i) index_of.emplace(infos[i].name, i);
  std::vector<PlannedBucket> planned;
  std::set<std::size_t> placed;
  const auto add = [&](const std::vector<std::size_t>& parameters) {
    // A bucket has one dtype and device, and a sparse gradient is alone.
    std::map<std::pair<at::ScalarType, std::string>, std::size_t> open;
    for (const auto index : parameters) {
      if (!placed.insert(index).second) continue;
      const auto& info = infos[index];
      if (info.expects_sparse_gradient) {
        planned.push_back({.parameters = {index}});
        continue;
      }
      const auto [found, is_new] = open.try_emplace({info.dtype, info.device.str()}, planned.size());
      if (is_new) planned.emplace_back();
      planned[found->second].parameters.push_back(index);
    }
  };
  const auto& buckets = program.buckets();
  for (auto bucket = buckets.rbegin(); bucket != buckets.rend(); ++bucket) {
    std::vector<std::size_t> parameters;
    for (const auto& name : bucket->names) {
      if (const auto found = index_of.find(name); found != index_of.end()) parameters.push_back(found->second);
    }
    add(parameters);
  }
  std::vector<std::size_t> rest;
  for (std::size_t i = 0; i < infos.size(); ++i) rest.push_back(i);
  add(rest);
  wrapper.use_plan(BucketPlan(infos, std::move(planned)));
}

}  // namespace

Compiler::Compiler(CompileOptions options, std::string name) : options_(std::move(options)), name_(std::move(name)) {
  if (!options_.custom_backend) backend_named(options_.backend);
  TORCH_CHECK(options_.max_captures > 0, "[lockstep/graph] max_captures is 0.");
}

Compiler::~Compiler() = default;

const Program& Compiler::program() const {
  TORCH_CHECK(last_ != nullptr, "[lockstep/graph] nothing has been compiled yet: there was no forward.");
  return *last_->program;
}

std::size_t Compiler::captures() const {
  return entries_.size();
}

std::optional<Compiler::Result> Compiler::run(
    torch::nn::Module& module, const std::vector<at::Tensor>& inputs, const std::string& plain_arguments,
    const std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& fakes, std::shared_ptr<void>& shape)>&
        forward) {
  const auto found = std::find_if(entries_.begin(), entries_.end(),
                                  [&](const auto& entry) { return entry->fits(inputs, plain_arguments); });
  if (found == entries_.end()) {
    if (entries_.size() >= options_.max_captures) {
      if (!has_warned_) {
        TORCH_WARN("[lockstep/graph] ", name_, " was captured ", entries_.size(),
                   " times, for inputs, parameters or modes that differ. From now on calls that fit none of them run ",
                   "as they are. Raise CompileOptions::max_captures, or give inputs of equal sizes.");
        has_warned_ = true;
      }
      return std::nullopt;
    }
    auto entry = std::make_unique<Entry>();
    for (const auto& input : inputs) {
      entry->inputs.push_back(input.defined() ? std::optional(TensorLook::of(input)) : std::nullopt);
    }
    entry->plain = plain_arguments;
    entry->has_grad_mode = c10::GradMode::is_enabled();
    entry->autocast = autocast_state();
    lockstep::detail::for_each_module(module, [&](const std::string& /*name*/, const torch::nn::Module& each) {
      entry->modules.push_back(&each);
      entry->are_training.push_back(each.is_training());
    });
    auto* const wrapper = active_ddp();
    entry->wrapper = wrapper;
    entry->slots = slots_of(module);
    std::vector<OuterTensor> outer;
    for (const auto& slot : entry->slots) {
      entry->looks.push_back(TensorLook::of(slot.tensor()));
      outer.push_back({slot.name, slot.tensor(), slot.is_parameter});
    }
    const auto split = split_for(options_, wrapper);
    auto graph =
        capture(inputs, outer, [&](const std::vector<at::Tensor>& fakes) { return forward(fakes, entry->shape); },
                {.keeps_regions = options_.keeps_regions || !split});
    TORCH_CHECK(
        slots_of(module).size() == entry->slots.size(), "[lockstep/graph] capture: ", name_,
        " registered parameters or buffers while its forward was captured, which have no memory now. Register them ",
        "in its constructor, or run it once before it is compiled.");
    const auto backend = options_.custom_backend ? options_.custom_backend : backend_named(options_.backend);
    entry->program = std::make_unique<Program>(std::move(graph), split, backend, entry->outer(), options_.dump);
    const bool is_first = entries_.empty();
    entries_.push_back(std::move(entry));
    if (is_first && options_.aligns_buckets && wrapper != nullptr) align(*wrapper, *entries_.back()->program);
    last_ = entries_.back().get();
  } else {
    last_ = found->get();
  }
  return Result{last_->program->run(inputs, last_->outer()), last_->shape};
}

}  // namespace lockstep::graph
