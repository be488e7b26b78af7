// Modules in checkpoints: whatever divides their parameters has given these layouts.
#include <ATen/ops/empty.h>
#include <torch/nn/module.h>

#include <unordered_map>

#include "lockstep/checkpoint/owned_pieces.h"
#include "lockstep/checkpoint/state.h"
#include "lockstep/fsdp/unit_registry.h"

namespace lockstep::dcp {
namespace {

using lockstep::detail::owned_pieces;
using lockstep::detail::OwnedPieces;

/// In the dict of names that mean the tensor of another name.
constexpr const char* kTied = "tied";

struct Entry {
  std::vector<std::string> names = {};  // several if it is tied
  at::Tensor tensor = {};
  bool is_buffer = false;
};

std::vector<Entry> entries_of(const torch::nn::Module& module) {
  std::vector<Entry> entries;
  std::unordered_map<const void*, std::size_t> known;
  const auto add = [&](const std::string& name, const at::Tensor& tensor, bool is_buffer) {
    if (!tensor.defined()) return;
    const auto [found, is_new] = known.emplace(tensor.unsafeGetTensorImpl(), entries.size());
    if (is_new) entries.push_back({.tensor = tensor, .is_buffer = is_buffer});
    entries[found->second].names.push_back(name);
  };
  for (const auto& item : module.named_parameters()) add(item.key(), item.value(), false);
  for (const auto& item : module.named_buffers()) add(item.key(), item.value(), true);
  return entries;
}

class ModuleState : public Stateful {
 public:
  explicit ModuleState(torch::nn::Module& module) : module_(module) {}

  void save(Outgoing& out) override {
    const auto flat = lockstep::detail::flat_pieces(module_);
    c10::impl::GenericDict tied(c10::StringType::get(), c10::AnyType::get());
    for (const auto& entry : entries_of(module_)) {
      for (std::size_t i = 1; i < entry.names.size(); ++i) tied.insert(entry.names[i], entry.names.front());
      if (entry.is_buffer) {
        const auto dtype = lockstep::detail::original_dtype_of(entry.tensor);
        out.tensor(entry.names.front(), dtype ? entry.tensor.to(*dtype) : entry.tensor);
        continue;
      }
      for (auto& owned : owned(entry, flat)) {
        out.pieces(owned.name, owned.sizes, entry.tensor.scalar_type(), std::move(owned.pieces));
      }
    }
    if (!tied.empty()) out.value(kTied, tied);
  }

  void load(Incoming& in) override {
    const auto flat = lockstep::detail::flat_pieces(module_);
    const auto tied = tied_names(in);
    for (const auto& entry : entries_of(module_)) {
      lockstep::detail::give_memory(entry.tensor);
      // A write on all ranks, also on those that have nothing of it: FSDP gathers what was written to.
      const auto local = entry.tensor.detach();
      if (local.dim() > 0) in.then([local] { local.narrow(0, 0, 0).zero_(); });
      if (const auto dtype = lockstep::detail::original_dtype_of(entry.tensor); entry.is_buffer && dtype) {
        // FSDP computes with another than is saved.
        const auto whole = at::empty(entry.tensor.sizes(), entry.tensor.options().dtype(dtype));
        in.tensor(saved_name(in, entry, entry.names.front(), tied), whole);
        in.then([local, whole] { local.copy_(whole); });
        continue;
      }
      for (auto& owned : owned(entry, flat)) {
        const auto name = saved_name(in, entry, owned.name, tied);
        in.pieces(name, owned.sizes, std::move(owned.pieces));
      }
      for (const auto& name : entry.names) in.pass_over(name);
    }
  }

 private:
  static std::vector<OwnedPieces> owned(const Entry& entry, const lockstep::detail::FlatPieces& flat) {
    const auto found = flat.find(entry.tensor.unsafeGetTensorImpl());
    static const std::vector<lockstep::detail::FlatPiece> none;
    return owned_pieces(entry.names.front(), entry.tensor, entry.tensor.detach(),
                        found == flat.end() ? none : found->second);
  }

  static std::map<std::string, std::string> tied_names(Incoming& in) {
    std::map<std::string, std::string> tied;
    const auto saved = in.find_value(kTied);
    if (!saved || !saved->isGenericDict()) return tied;
    for (const auto& item : saved->toGenericDict()) tied[item.key().toStringRef()] = item.value().toStringRef();
    return tied;
  }

  /// The name under which a tensor that has several was saved.
  static std::string saved_name(Incoming& in, const Entry& entry, const std::string& name,
                                const std::map<std::string, std::string>& tied) {
    if (in.form(name)) return name;
    for (const auto& each : entry.names) {
      if (in.form(each)) return each;
      const auto first = tied.find(each);
      if (first != tied.end() && in.form(first->second)) return first->second;
    }
    return name;
  }

  torch::nn::Module& module_;
};

}  // namespace

StatefulPtr stateful(torch::nn::Module& module) {
  return std::make_shared<ModuleState>(module);
}

}  // namespace lockstep::dcp
