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

std::string described(const TensorLook& look) {
  return str(look.to_string(), " with strides [", join(look.strides, ", "), "] on ", look.device.str(),
             look.requires_grad ? ", trainable" : "");
}
std::string described(const at::Tensor& tensor) {
  return tensor.defined() ? described(TensorLook::of(tensor)) : "none";
}

/// A parameter where the module registered it, so that a run finds what is there now; or what modules do not exchange:
/// a buffer, or the whole of a parameter whose shard is registered.
struct Slot {
  const at::Tensor* registered = nullptr;
  at::Tensor kept = {};
  std::string name = "";
  bool is_parameter = true;
  mutable bool is_trainable = false;  // as the shard was when somebody looked last

  const at::Tensor& tensor() const {
    if (!kept.defined()) return *registered;
    // A shard that was frozen or thawed tells its whole when that is touched next, which is behind guards.
    if (registered != nullptr && registered->requires_grad() != is_trainable) {
      is_trainable = registered->requires_grad();
      kept.set_requires_grad(is_trainable);
    }
    return kept;
  }
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
        // Whichever of the two was frozen or thawed, its owner knows, once it is touched.
        if (wholes[i].requires_grad() != item.value().requires_grad()) static_cast<void>(wholes[i].detach());
        slots.push_back({.registered = &item.value(),
                         .kept = wholes[i],
                         .name = wholes.size() == 1 ? name : str(name, ".", i),
                         .is_trainable = item.value().requires_grad()});
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

/// Gives tensors their memory back that a forward exchanged by set_data() while it was captured: for one without any.
class KeptMemory {
 public:
  explicit KeptMemory(const std::vector<Slot>& slots) {
    for (const auto& slot : slots) {
      const bool is_gathered = slot.registered != nullptr && slot.kept.defined();
      if (!is_gathered && !slot.tensor().is_meta()) kept_.push_back({slot.name, slot.tensor(), slot.tensor().detach()});
    }
  }
  ~KeptMemory() {
    for (const auto& [name, tensor, memory] : kept_) {
      // set_data() does not go this way.
      if (tensor.is_meta()) tensor.unsafeGetTensorImpl()->shallow_copy_from(memory.getIntrusivePtr());
    }
  }
  KeptMemory(const KeptMemory&) = delete;
  KeptMemory& operator=(const KeptMemory&) = delete;

  void check() const {
    for (const auto& [name, tensor, memory] : kept_) {
      TORCH_CHECK(!tensor.is_meta(), "[lockstep/graph] capture: the forward exchanges the memory of '", name,
                  "' by set_data(), which a graph does not hold. Write to it in place.");
    }
  }

 private:
  struct Kept {
    std::string name;
    at::Tensor tensor;
    at::Tensor memory;
  };
  std::vector<Kept> kept_;
};

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

  /// What keeps this call from running it; empty: nothing.
  std::string obstacle(const std::vector<at::Tensor>& given, const std::string& plain_arguments) const {
    if (given.size() != inputs.size()) return str(given.size(), " input tensors instead of ", inputs.size());
    if (plain != plain_arguments) return "arguments that are no tensors, or what capture_guard() says";
    if (has_grad_mode != c10::GradMode::is_enabled()) return has_grad_mode ? "no gradients" : "gradients";
    if (autocast != autocast_state()) return "autocast";
    if (wrapper != active_ddp()) return "another wrapper";
    for (std::size_t i = 0; i < given.size(); ++i) {
      if (given[i].defined() == inputs[i].has_value() && (!inputs[i] || looks_like(given[i], *inputs[i]))) continue;
      return str("input ", i, ": ", described(given[i]), " instead of ", inputs[i] ? described(*inputs[i]) : "none");
    }
    for (std::size_t i = 0; i < slots.size(); ++i) {
      if (looks_like(slots[i].tensor(), looks[i])) continue;
      return str("'", slots[i].name, "': ", described(slots[i].tensor()), " instead of ", described(looks[i]));
    }
    for (std::size_t i = 0; i < modules.size(); ++i) {
      if (modules[i]->is_training() != are_training[i]) {
        return str(modules[i]->name(), are_training[i] ? " in eval()" : " in train()");
      }
    }
    return {};
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
  std::vector<std::vector<std::size_t>> runs;
  std::set<std::size_t> placed;
  const auto& buckets = program.buckets();
  for (auto bucket = buckets.rbegin(); bucket != buckets.rend(); ++bucket) {
    auto& run = runs.emplace_back();
    for (const auto& name : bucket->names) {
      const auto found = index_of.find(name);
      if (found != index_of.end() && placed.insert(found->second).second) run.push_back(found->second);
    }
  }
  auto& rest = runs.emplace_back();
  for (std::size_t i = 0; i < infos.size(); ++i) {
    if (!placed.contains(i)) rest.push_back(i);
  }
  wrapper.use_plan(BucketPlan(infos, buckets_of_runs(infos, runs)));
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

const Compiler::Entry* Compiler::find(const std::vector<at::Tensor>& inputs, const std::string& plain_arguments) const {
  const auto fits = [&](const Entry& entry) { return entry.obstacle(inputs, plain_arguments).empty(); };
  if (last_ != nullptr && fits(*last_)) return last_;
  const auto found = std::find_if(entries_.begin(), entries_.end(), [&](const auto& entry) { return fits(*entry); });
  return found == entries_.end() ? nullptr : found->get();
}

const Compiler::Entry* Compiler::add(torch::nn::Module& module, const std::vector<at::Tensor>& inputs,
                                     const std::string& plain_arguments, const OnFakes& forward) {
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
  // Wholes follow their shards where these are known, so that none has to be touched, which is for the program to do.
  for (const auto& other : entries_) static_cast<void>(other->outer());
  entry->slots = slots_of(module);
  std::vector<OuterTensor> outer;
  for (const auto& slot : entry->slots) {
    entry->looks.push_back(TensorLook::of(slot.tensor()));
    outer.push_back({slot.name, slot.tensor(), slot.is_parameter});
  }
  const auto split = split_for(options_, wrapper);
  const KeptMemory memory(entry->slots);
  auto graph =
      capture(inputs, outer, [&](const std::vector<at::Tensor>& fakes) { return forward(fakes, entry->shape); },
              {.keeps_regions = options_.keeps_regions || !split});
  memory.check();
  TORCH_CHECK(
      slots_of(module).size() == entry->slots.size(), "[lockstep/graph] capture: ", name_,
      " registered parameters or buffers while its forward was captured, which have no memory now. Register them ",
      "in its constructor, or run it once before it is compiled.");
  const auto backend = options_.custom_backend ? options_.custom_backend : backend_named(options_.backend);
  entry->program = std::make_unique<Program>(std::move(graph), split, backend, entry->outer(), options_.dump);
  if (last_ != nullptr) recapture_reasons_.push_back(last_->obstacle(inputs, plain_arguments));
  entries_.push_back(std::move(entry));
  if (entries_.size() == 1 && options_.aligns_buckets && wrapper != nullptr) align(*wrapper, *entries_[0]->program);
  return entries_.back().get();
}

std::optional<Compiler::Result> Compiler::run(torch::nn::Module& module, const std::vector<at::Tensor>& inputs,
                                              const std::string& plain_arguments, const OnFakes& forward) {
  const auto* entry = find(inputs, plain_arguments);
  if (entry == nullptr && entries_.size() >= options_.max_captures) {
    if (!has_warned_) {
      TORCH_WARN("[lockstep/graph] ", name_, " was captured ", entries_.size(),
                 " times, for inputs, parameters or modes that differ; this call has ",
                 last_->obstacle(inputs, plain_arguments),
                 ". From now on calls that fit none of them run as they are. Raise CompileOptions::max_captures, or ",
                 "give inputs of equal sizes.");
      has_warned_ = true;
    }
    return std::nullopt;
  }
  last_ = entry != nullptr ? entry : add(module, inputs, plain_arguments, forward);
  return Result{last_->program->run(inputs, last_->outer()), last_->shape};
}

}  // namespace lockstep::graph
