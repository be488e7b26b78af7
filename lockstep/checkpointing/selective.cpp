#include "lockstep/checkpointing/selective.h"

#include <ATen/Context.h>
#include <ATen/core/List.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "lockstep/checkpointing/host_copy.h"

namespace lockstep {

namespace detail {
namespace {

const void* storage_of_kept(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() : nullptr;
}

/// Views, and what writes in place: the one costs nothing, the other must happen again.
bool has_aliases(const OperatorCall& call) {
  for (const auto& argument : call.schema().arguments()) {
    if (argument.alias_info() != nullptr) return true;
  }
  return false;
}

/// Calls change(tensor) for every tensor among results, and puts what it returns in its place.
template <class Change>
void replace_tensors(torch::jit::Stack& results, const Change& change) {
  for (auto& value : results) {
    if (value.isTensor()) {
      if (value.toTensor().defined()) value = change(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> tensors;
      for (const at::Tensor& tensor : value.toTensorList()) {
        tensors.push_back(tensor.defined() ? change(tensor) : tensor);
      }
      value = std::move(tensors);
    }
  }
}

bool is_drawing(const OperatorCall& call) {
  return call.op().hasTag(at::Tag::nondeterministic_seeded);
}

/// Those an operator may have drawn from: the one it was given, and those of its results' devices.
std::vector<at::Generator> generators_of(const std::optional<at::Generator>& given, torch::jit::Stack& results) {
  if (given) return {*given};
  std::vector<at::Generator> generators;
  replace_tensors(results, [&](const at::Tensor& tensor) {
    if (tensor.is_meta()) return tensor;
    const auto& generator = at::globalContext().defaultGenerator(tensor.device());
    if (std::find(generators.begin(), generators.end(), generator) == generators.end()) generators.push_back(generator);
    return tensor;
  });
  return generators;
}

std::optional<at::Generator> given_generator(const OperatorCall& call) {
  for (std::size_t i = 0; i < call.argument_count(); ++i) {
    if (call.argument(i).isGenerator()) return call.argument(i).toGenerator();
  }
  return std::nullopt;
}

int64_t version_of_kept(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : tensor._version();
}

torch::jit::Stack results_of(OperatorCall& call) {
  torch::jit::Stack results;
  for (std::size_t i = 0; i < call.result_count(); ++i) results.push_back(call.result(i));
  return results;
}

}  // namespace

class KeptResults::Saving final : public OperatorScope {
 public:
  explicit Saving(std::shared_ptr<KeptResults> kept) : OperatorScope(Sees::kKernels), kept_(std::move(kept)) {}
  void on_operator(OperatorCall& call) override { kept_->save(call, counts_); }

 private:
  const std::shared_ptr<KeptResults> kept_;
  Counts counts_;
};

class KeptResults::Replaying final : public OperatorScope {
 public:
  explicit Replaying(std::shared_ptr<KeptResults> kept) : OperatorScope(Sees::kKernels), kept_(std::move(kept)) {}
  void on_operator(OperatorCall& call) override { kept_->replay(call, counts_); }

 private:
  const std::shared_ptr<KeptResults> kept_;
  Counts counts_;
};

std::shared_ptr<OperatorScope> KeptResults::saving() {
  return std::make_shared<Saving>(shared_from_this());
}

std::shared_ptr<OperatorScope> KeptResults::replaying() {
  return std::make_shared<Replaying>(shared_from_this());
}

void KeptResults::copy_before_write(const OperatorCall& call) {
  const std::lock_guard lock(mutex_);
  for_each_tensor(call, [&](const at::Tensor& tensor, std::size_t argument) {
    const auto* alias = call.schema().arguments()[argument].alias_info();
    if (alias == nullptr || !alias->isWrite()) return;
    const auto* storage = storage_of_kept(tensor);
    for (auto found = by_storage_.find(storage); found != by_storage_.end(); found = by_storage_.find(storage)) {
      const auto [schema, number] = found->second;
      by_storage_.erase(found);
      auto& entry = entries_[schema][number];
      std::size_t next = 0;
      replace_tensors(entry.results, [&](const at::Tensor& kept) {
        const auto index = next++;
        if (storage_of_kept(kept) != storage) return kept;
        auto copy = kept.clone();
        entry.versions[index] = version_of_kept(copy);
        by_storage_.emplace(storage_of_kept(copy), std::pair(schema, number));
        return copy;
      });
    }
  });
}

void KeptResults::save(OperatorCall& call, Counts& counts) {
  if (has_aliases(call)) {
    copy_before_write(call);
    return call.proceed();
  }
  const auto policy = policy_(call);
  const bool is_offloaded =
      policy == CheckpointPolicy::kMustCpuOffload || policy == CheckpointPolicy::kPreferCpuOffload;
  const bool is_kept = is_offloaded || policy == CheckpointPolicy::kMustSave || policy == CheckpointPolicy::kPreferSave;
  const auto generator = given_generator(call);
  call.proceed();
  Entry entry;
  if (is_kept) {
    entry.state = Entry::State::kKept;
    entry.results = results_of(call);
    if (is_drawing(call)) {
      for (const auto& each : generators_of(generator, entry.results)) {
        entry.generators.push_back(state_of_generator(each));
      }
    }
    replace_tensors(entry.results, [&](const at::Tensor& tensor) {
      // Counts versions with the tensor, and has no part in its graph.
      auto kept = is_offloaded ? copy_to_host(tensor, /*is_pinned=*/true) : tensor.tensor_data();
      entry.versions.push_back(version_of_kept(kept));
      entry.devices.push_back(tensor.device());
      return kept;
    });
  }
  const std::lock_guard lock(mutex_);
  auto& of_operator = entries_[&call.schema()];
  const auto index = counts[&call.schema()]++;
  of_operator.resize(std::max(of_operator.size(), index + 1));
  replace_tensors(entry.results, [&](const at::Tensor& tensor) {
    by_storage_.emplace(storage_of_kept(tensor), std::pair(&call.schema(), index));
    return tensor;
  });
  of_operator[index] = std::move(entry);
}

void KeptResults::replay(OperatorCall& call, Counts& counts) {
  if (has_aliases(call)) {
    copy_before_write(call);
    return call.proceed();
  }
  torch::jit::Stack results;
  {
    const std::lock_guard lock(mutex_);
    const auto index = counts[&call.schema()]++;
    auto& of_operator = entries_[&call.schema()];
    TORCH_CHECK(index < of_operator.size(), "[lockstep/checkpointing] ", call.name(), " is called ", index + 1,
                " times when a checkpointed function runs again, and was called ", of_operator.size(),
                " times the first time. The function must do the same again: it may depend on something that has ",
                "changed since.");
    auto& entry = of_operator[index];
    TORCH_CHECK(entry.state != Entry::State::kUsed, "[lockstep/checkpointing] a result of ", call.name(),
                " that the policy kept is needed again, after a backward that was to be the last one. Give that one ",
                "retain_graph.");
    if (entry.state == Entry::State::kKept) {
      results = entry.results;
      std::size_t next = 0;
      replace_tensors(results, [&](const at::Tensor& tensor) {
        const auto index_of_tensor = next++;
        TORCH_CHECK(allows_mutation_ || version_of_kept(tensor) == entry.versions[index_of_tensor],
                    "[lockstep/checkpointing] a result of ", call.name(), " that the policy kept, a ",
                    tensor.toString(), " of sizes ", tensor.sizes(), ", has been changed in place since. Change a ",
                    "clone of it, do not keep it, or set allow_cache_entry_mutation.");
        // Autograd makes the result part of a graph: another handle each time.
        return tensor.device() == entry.devices[index_of_tensor]
                   ? tensor.tensor_data()
                   : tensor.to(entry.devices[index_of_tensor], /*non_blocking=*/true);
      });
      for (const auto& each : entry.generators) restore(each);
      if (!torch::autograd::get_current_graph_task_keep_graph()) entry = {.state = Entry::State::kUsed};
    }
  }
  results.empty() ? call.proceed() : call.replace(std::move(results));
}

}  // namespace detail

CheckpointPolicyFn save_operators(const std::vector<std::string>& names) {
  auto& dispatcher = c10::Dispatcher::singleton();
  std::vector<const c10::FunctionSchema*> schemas;
  for (const auto& name : names) {
    const auto dot = name.find('.');
    const auto overload = dot == std::string::npos ? "" : name.substr(dot + 1);
    const auto op = dispatcher.findSchema({name.substr(0, dot), overload});
    TORCH_CHECK(op, "[lockstep/checkpointing] save_operators: there is no operator '", name,
                "'. Names are as libtorch has them, with the overload if there is one: aten::mm, aten::add.Tensor.");
    schemas.push_back(&op->schema());
  }
  return [schemas = std::move(schemas)](const OperatorCall& call) {
    const bool is_saved = std::find(schemas.begin(), schemas.end(), &call.schema()) != schemas.end();
    return is_saved ? CheckpointPolicy::kMustSave : CheckpointPolicy::kPreferRecompute;
  };
}

}  // namespace lockstep
