#include "lockstep/zero/streaming.h"

#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <algorithm>
#include <cstdio>
#include <random>
#include <set>

#include "lockstep/base/str.h"
#include "lockstep/comm/failure_notice.h"
#include "lockstep/comm/objects.h"
#include "lockstep/state/files.h"
#include "lockstep/zero/state_access.h"

namespace lockstep {
namespace {

using detail::StateAccess;

void check_options(const ZeroOptimizer& optimizer, const StreamOptions& options) {
  const auto size = optimizer.process_group()->getSize();
  TORCH_CHECK(options.to >= 0 && options.to < size, StateAccess::who(optimizer), ": state cannot be collected on rank ",
              options.to, " of a group of ", size);
  TORCH_CHECK(options.max_bytes > 0, StateAccess::who(optimizer), ": state cannot be sent in chunks of ",
              options.max_bytes, " bytes");
}

/// The same on all ranks, and another one for every save.
int64_t agreed_save_id(const GroupPtr& group) {
  const auto id =
      broadcast_object(str(std::random_device()() & 0x7fffffffU, std::random_device()() & 0x7fffffffU), 0, group);
  return static_cast<int64_t>(std::hash<std::string>()(id) >> 1U);
}

/// What every rank says, in rank order. If `work` throws on some rank, all ranks remove their part, `own_part`, and
/// throw what it threw. A rank that cannot hear the others leaves the part: the index may be there already.
std::vector<std::string> say_or_throw_together(const GroupPtr& group, const std::string& own_part,
                                               const std::function<std::string()>& work) {
  std::string said;
  try {
    said = "1" + work();
  } catch (const std::exception& error) {
    said = str("0rank ", group->getRank(), ": ", error.what());
  }
  auto all = all_gather_object(said, group);
  for (auto& each : all) {
    if (each.at(0) != '1') {
      std::remove(own_part.c_str());
      TORCH_CHECK(false, "[lockstep/zero] state was not saved. ", each.substr(1, each.find('\n') - 1));
    }
    each.erase(0, 1);
  }
  return all;
}

std::string packed(const std::vector<detail::PlacedPiece>& placed) {
  const auto bytes = torch::jit::pickle_save(detail::to_ivalue(placed));
  return {bytes.begin(), bytes.end()};
}

detail::StateIndex index_of(const ZeroOptimizer& optimizer, int64_t save_id, int64_t parts) {
  detail::StateIndex index{.save_id = save_id, .parts = parts, .groups = StateAccess::groups(optimizer)};
  const auto names = StateAccess::names(optimizer);
  for (const auto& parameter : StateAccess::parameters(optimizer)) {
    index.tensors.push_back({names[index.tensors.size()], parameter.sizes().vec(), parameter.strides().vec()});
  }
  return index;
}

/// Writes the index on `writer` once all parts are there. `placed` is what the ranks say of their parts; nothing if
/// they wrote none.
void write_index_together(const ZeroOptimizer& optimizer, const std::string& path, int writer, int64_t save_id,
                          const std::string& own_part, const std::vector<std::string>& placed) {
  const auto& group = optimizer.process_group();
  say_or_throw_together(group, own_part, [&] {
    if (group->getRank() != writer) return std::string();
    const auto parts = std::count_if(placed.begin(), placed.end(), [](const auto& bytes) { return !bytes.empty(); });
    auto index = index_of(optimizer, save_id, parts);
    for (const auto& bytes : placed) {
      if (bytes.empty()) continue;
      auto pieces = detail::placed_from(torch::jit::pickle_load({bytes.begin(), bytes.end()}));
      index.pieces.insert(index.pieces.end(), std::make_move_iterator(pieces.begin()),
                          std::make_move_iterator(pieces.end()));
    }
    detail::write_index(path, index);
    return std::string();
  });
}

/// One state of each kind in the save, with a zero for each tensor: the same on all ranks, whatever they read of it.
OptimizerStateDict kinds_of(const detail::StateIndex& index) {
  OptimizerStateDict kinds;
  std::set<std::vector<std::string>> seen;
  for (const auto& placed : index.pieces) {
    std::vector<std::string> names;
    for (const auto& [name, value] : placed.piece.values) names.push_back(name);
    if (!seen.insert(std::move(names)).second) continue;
    auto values = placed.piece.values;
    for (auto& [name, value] : values) {
      const auto form = detail::form_of(value);
      if (form) value = at::zeros(form->sizes.empty() ? std::vector<int64_t>() : std::vector<int64_t>{1}, form->dtype);
    }
    kinds.state.emplace(placed.piece.index, std::move(values));
  }
  return kinds;
}

/// Nobody can tell whether the order is still that of the save.
void warn_of_positions(const std::vector<std::string>& names, const std::vector<std::string>& saved,
                       const std::string& who) {
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (!names[i].empty() || saved.at(i).empty()) continue;
    TORCH_WARN(who,
               ": the save knows its parameters by name, this optimizer does not, so state is loaded by position: ",
               "parameter ", i, " gets the state of '", saved[i], "', and so on. If the order may differ, make the ",
               "optimizer while the DistributedDataParallel that averages the parameters is there, or give ",
               "ZeroOptions::parameter_names.");
    return;
  }
}

}  // namespace

namespace detail {

std::vector<StatePiece> StateAccess::pieces(ZeroOptimizer& optimizer) {
  optimizer.prepare_for_state("saving state");
  return optimizer.own_pieces();
}

void StateAccess::load_from(ZeroOptimizer& optimizer, const OptimizerStateDict& groups, const StateSource& source,
                            const std::string& description) {
  optimizer.load_from(groups, source, description);
}

}  // namespace detail

void consolidate_in_chunks(ZeroOptimizer& optimizer, const StreamOptions& options) {
  check_options(optimizer, options);
  const auto pieces = StateAccess::pieces(optimizer);
  const auto parameters = StateAccess::parameters(optimizer);
  StateAccess::set_consolidated(optimizer, std::nullopt);
  auto dict = StateAccess::groups(optimizer);
  const auto take = [&](const detail::StatePiece& piece, const std::string& name, int64_t begin,
                        const at::Tensor& bytes) {
    const auto place = detail::place_for(dict.state, piece, name, parameters[piece.index]);
    if (place.defined()) place.narrow(0, begin, bytes.numel()).copy_(bytes);
  };
  try {
    detail::stream_pieces(pieces, options.to, options.max_bytes, optimizer.process_group(), optimizer.join_device(),
                          take);
  } catch (...) {
    announce_failure(optimizer.process_group(), std::current_exception());
    throw;
  }
  if (optimizer.process_group()->getRank() == options.to) StateAccess::set_consolidated(optimizer, std::move(dict));
}

void save_in_chunks(ZeroOptimizer& optimizer, const std::string& path, const StreamOptions& options) {
  check_options(optimizer, options);
  const auto pieces = StateAccess::pieces(optimizer);
  const auto& group = optimizer.process_group();
  const auto save_id = agreed_save_id(group);
  // A full disk must not keep this rank from taking part until the end.
  std::optional<detail::PartWriter> writer;
  std::exception_ptr problem;
  const auto attempt = [&](const std::function<void()>& action) {
    try {
      if (!problem) action();
    } catch (...) {
      problem = std::current_exception();
    }
  };
  const bool is_writer = group->getRank() == options.to;
  const auto own_part = is_writer ? detail::part_path(path, 0, save_id) : "";
  if (is_writer) attempt([&] { writer.emplace(path, 0, save_id); });
  detail::stream_pieces(pieces, options.to, options.max_bytes, group, optimizer.join_device(),
                        [&](const auto&... chunk) { attempt([&] { writer->take(chunk...); }); });
  const auto placed = say_or_throw_together(group, own_part, [&] {
    if (problem) std::rethrow_exception(problem);
    return writer ? packed(writer->finish()) : std::string();
  });
  write_index_together(optimizer, path, options.to, save_id, own_part, placed);
}

void save_sharded(ZeroOptimizer& optimizer, const std::string& path) {
  const auto pieces = StateAccess::pieces(optimizer);
  const auto& group = optimizer.process_group();
  const auto save_id = agreed_save_id(group);
  const auto own_part = detail::part_path(path, group->getRank(), save_id);
  const auto placed = say_or_throw_together(group, own_part, [&] {
    detail::PartWriter writer(path, group->getRank(), save_id);
    for (const auto& piece : pieces) {
      const auto description = detail::described(piece);
      writer.take(description, "", 0, {});
      for (const auto& [name, value] : piece.values) {
        if (value.isTensor()) writer.take(description, name, 0, detail::bytes_of_state(value.toTensor()));
      }
    }
    return packed(writer.finish());
  });
  write_index_together(optimizer, path, 0, save_id, own_part, placed);
}

void load_sharded(ZeroOptimizer& optimizer, const std::string& path) {
  StateAccess::prepare_to_load(optimizer);
  const auto index = detail::read_index(path);
  const auto parameters = StateAccess::parameters(optimizer);
  const auto groups = StateAccess::groups(optimizer);
  std::vector<std::size_t> sizes;
  for (const auto& group : groups.param_groups) sizes.push_back(group.params.size());
  check_fits(index.groups, sizes, StateAccess::who(optimizer));
  const auto names = StateAccess::names(optimizer);
  const auto saved_at = detail::indices_by_name(names, index.names(), StateAccess::who(optimizer));
  warn_of_positions(names, index.names(), StateAccess::who(optimizer));
  std::vector<at::Tensor> as_saved(index.tensors.size());
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const at::IntArrayRef saved_sizes = index.tensors.at(saved_at[i]).sizes;
    TORCH_CHECK(parameters[i].sizes() == saved_sizes, StateAccess::who(optimizer), ": parameter ", i,
                names[i].empty() ? "" : str(" ('", names[i], "')"), " has sizes ", parameters[i].sizes(),
                ", the saved one ", saved_sizes);
    as_saved[saved_at[i]] = parameters[i];
  }
  const auto source = detail::source_of(path, index, as_saved);
  StateAccess::check_kind(optimizer, kinds_of(index));
  StateAccess::load_from(optimizer, index.groups, detail::with_indices(source, saved_at),
                         str("of save ", index.save_id));
}

}  // namespace lockstep
