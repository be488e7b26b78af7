#include "lockstep/checkpoint/save_plan.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdio>
#include <set>

#include "lockstep/base/str.h"
#include "lockstep/checkpoint/json_text.h"
#include "lockstep/checkpoint/safetensors.h"
#include "lockstep/checkpoint/value_json.h"

namespace lockstep::detail {
namespace {

using Json = nlohmann::ordered_json;

/// A box of a tensor, and who has it.
struct Candidate {
  const std::string* tensor = nullptr;
  const Offer::Tensor* about = nullptr;
  Box box = {};
  int64_t bytes = 0;
  std::vector<int> ranks = {};
  int writer = 0;
};

std::string dtype_name(at::ScalarType dtype, const std::string& name) {
  if (dtype == at::kComplexDouble) return "C128";
  const auto known = safetensors_dtype(dtype);
  TORCH_CHECK(!known.empty(), "[lockstep/checkpoint] '", name, "' is of type ", dtype,
              ", which safetensors files cannot hold");
  return std::string(known);
}

int64_t bytes_of(const std::string& dtype, const std::vector<int64_t>& sizes) {
  if (dtype == "C128") return 2 * *safetensors_bytes("F64", sizes);
  return *safetensors_bytes(dtype, sizes);
}

/// The format has none of these: pairs of reals.
SafetensorsEntry entry_of(const std::string& name, const std::string& dtype, std::vector<int64_t> sizes) {
  if (dtype != "C128") return {.name = name, .dtype = dtype, .sizes = std::move(sizes)};
  sizes.push_back(2);
  return {.name = name, .dtype = "F64", .sizes = std::move(sizes)};
}

/// All boxes, each once, in the order of names and places.
std::vector<Candidate> candidates_in(const std::vector<Offer>& offers) {
  struct First {
    const Offer::Tensor* tensor;
    std::size_t rank;
  };
  std::map<std::string, First> known;
  std::map<std::pair<std::string, Box>, std::vector<int>> holders;
  for (std::size_t rank = 0; rank < offers.size(); ++rank) {
    for (const auto& [name, tensor] : offers[rank].tensors) {
      const auto& first = known.try_emplace(name, First{&tensor, rank}).first->second;
      TORCH_CHECK(first.tensor->sizes == tensor.sizes && first.tensor->dtype == tensor.dtype, "[lockstep/checkpoint] '",
                  name, "' is ", first.tensor->dtype, " of sizes [", join(first.tensor->sizes, ", "), "] on rank ",
                  first.rank, " and ", tensor.dtype, " of [", join(tensor.sizes, ", "), "] on rank ", rank);
      for (const auto& box : tensor.boxes) holders[{name, box}].push_back(static_cast<int>(rank));
    }
  }
  std::vector<Candidate> candidates;
  for (auto& [key, ranks] : holders) {
    const auto& [name, box] = key;
    const auto& first = known.at(name);
    candidates.push_back({.tensor = &offers[first.rank].tensors.find(name)->first,
                          .about = first.tensor,
                          .box = box,
                          .bytes = bytes_of(first.tensor->dtype, box.sizes),
                          .ranks = std::move(ranks)});
  }
  return candidates;
}

/// What only one may write is theirs; the rest goes, the largest first, to whoever has least.
void choose_writers(std::vector<Candidate>& candidates, std::size_t ranks) {
  std::vector<int64_t> load(ranks);
  std::vector<Candidate*> open;
  for (auto& candidate : candidates) {
    candidate.writer = candidate.ranks.front();
    if (candidate.ranks.size() > 1 && candidate.about->replicas == dcp::Replicas::kAlike) {
      open.push_back(&candidate);
    } else {
      load[static_cast<std::size_t>(candidate.writer)] += candidate.bytes;
    }
  }
  std::stable_sort(open.begin(), open.end(), [](auto* one, auto* other) { return one->bytes > other->bytes; });
  for (auto* candidate : open) {
    candidate->writer = *std::min_element(candidate->ranks.begin(), candidate->ranks.end(), [&](int one, int other) {
      return load[static_cast<std::size_t>(one)] < load[static_cast<std::size_t>(other)];
    });
    load[static_cast<std::size_t>(candidate->writer)] += candidate->bytes;
  }
}

/// Divides what a rank writes into files: no two pieces of a tensor are in one, so that each is known by its tensor's
/// name, as Python's torch.distributed.checkpoint has it.
std::vector<std::vector<const Candidate*>> divided(const std::vector<const Candidate*>& pieces,
                                                   int64_t max_file_bytes) {
  struct Room {
    int64_t bytes = 0;
    std::set<std::string> names = {};
  };
  std::vector<std::vector<const Candidate*>> files;
  std::vector<Room> rooms;
  for (const auto* piece : pieces) {
    std::size_t file = 0;
    const auto fits = [&](const Room& room) {
      return (room.bytes == 0 || room.bytes + piece->bytes <= max_file_bytes) && !room.names.contains(*piece->tensor);
    };
    while (file < rooms.size() && !fits(rooms[file])) ++file;
    if (file == rooms.size()) {
      files.emplace_back();
      rooms.emplace_back();
    }
    files[file].push_back(piece);
    rooms[file].bytes += piece->bytes;
    rooms[file].names.insert(*piece->tensor);
  }
  for (auto& file : files) {
    // The widest elements first: then all are aligned.
    std::stable_sort(file.begin(), file.end(), [](const auto* one, const auto* other) {
      return bytes_of(one->about->dtype, {}) > bytes_of(other->about->dtype, {});
    });
  }
  return files;
}

std::string file_name(int rank, std::size_t number, std::size_t count) {
  std::string name(64, '\0');
  const auto length = count == 1 ? std::snprintf(name.data(), name.size(), "rank-%05d.safetensors", rank)
                                 : std::snprintf(name.data(), name.size(), "rank-%05d-%03zu.safetensors", rank, number);
  name.resize(static_cast<std::size_t>(length));
  return name;
}

/// What Python's reader of shards wants to know of a file: where in their tensors the pieces begin.
std::map<std::string, std::string> metadata_of(const std::vector<const Candidate*>& pieces) {
  std::map<std::string, std::string> metadata = {{"format", "pt"}};
  const bool is_sharded =
      std::any_of(pieces.begin(), pieces.end(), [](const auto* each) { return each->box.sizes != each->about->sizes; });
  if (!is_sharded) return metadata;
  Json offsets = Json::object();
  for (const auto* piece : pieces) {
    auto place = piece->box.offsets;
    if (piece->about->dtype == "C128") place.push_back(0);
    offsets[*piece->tensor] = {{"saved_offsets", place}};
  }
  metadata["DCP_VERSION"] = "1.0";
  metadata["DCP_SHARDING_INFO"] = offsets.dump();
  return metadata;
}

void add_file(SavePlan& plan, PlannedFile file, const std::vector<const Candidate*>& pieces) {
  std::vector<SafetensorsEntry> entries;
  for (const auto* piece : pieces) {
    entries.push_back(entry_of(*piece->tensor, piece->about->dtype, piece->box.sizes));
  }
  file.header = laid_out_header(entries, metadata_of(pieces));
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    auto& tensor = plan.catalog.tensors[*pieces[i]->tensor];
    file.pieces.push_back({.tensor = *pieces[i]->tensor, .place = tensor.pieces.size()});
    tensor.pieces.push_back({.box = pieces[i]->box,
                             .file = plan.catalog.files.size(),
                             .begin = entries[i].begin,
                             .bytes = entries[i].end - entries[i].begin});
  }
  const auto bytes = entries.empty() ? static_cast<int64_t>(file.header.size()) : entries.back().end;
  plan.catalog.files.push_back({file.name, bytes});
  plan.files.push_back(std::move(file));
}

}  // namespace

Offer offer_of(const dcp::Outgoing& out) {
  Offer offer;
  const auto check_name = [](const std::string& name) {
    TORCH_CHECK(is_text(name) && name != "__metadata__",
                "[lockstep/checkpoint] nothing in a checkpoint can be called '", name, "'");
  };
  for (const auto& [name, tensor] : out.all_tensors()) {
    check_name(name);
    auto& into = offer.tensors[name];
    into = {.dtype = dtype_name(tensor.dtype, name), .sizes = tensor.sizes, .replicas = tensor.replicas};
    for (const auto& piece : tensor.pieces) into.boxes.push_back(piece.box);
  }
  for (const auto& [name, value] : out.all_values()) {
    check_name(name);
    offer.values.emplace(name, json_of(value, name));
  }
  return offer;
}

std::string packed(const Offer& offer) {
  Json tensors = Json::object();
  for (const auto& [name, tensor] : offer.tensors) {
    Json boxes = Json::array();
    for (const auto& box : tensor.boxes) boxes.push_back({box.offsets, box.sizes});
    tensors[name] = {tensor.dtype, tensor.sizes, tensor.replicas == dcp::Replicas::kFirst, std::move(boxes)};
  }
  Json values = Json::object();
  for (const auto& [name, value] : offer.values) values[name] = value;
  const auto bytes = Json::to_msgpack(Json::array({std::move(tensors), std::move(values)}));
  return {bytes.begin(), bytes.end()};
}

Offer unpacked_offer(const std::string& bytes) {
  const auto json = Json::from_msgpack(bytes);
  Offer offer;
  for (const auto& [name, each] : json.at(0).items()) {
    auto& tensor = offer.tensors[name];
    tensor = {.dtype = each.at(0).get<std::string>(),
              .sizes = each.at(1).get<std::vector<int64_t>>(),
              .replicas = each.at(2).get<bool>() ? dcp::Replicas::kFirst : dcp::Replicas::kAlike};
    for (const auto& box : each.at(3)) {
      tensor.boxes.push_back(
          {.offsets = box.at(0).get<std::vector<int64_t>>(), .sizes = box.at(1).get<std::vector<int64_t>>()});
    }
  }
  for (const auto& [name, value] : json.at(1).items()) offer.values.emplace(name, value);
  return offer;
}

SavePlan plan_save(const std::vector<Offer>& offers, int64_t max_file_bytes) {
  SavePlan plan;
  plan.catalog.world_size = static_cast<int>(offers.size());
  for (const auto& offer : offers) {
    for (const auto& [name, tensor] : offer.tensors) {
      plan.catalog.tensors.try_emplace(name, StoredTensor{.dtype = tensor.dtype, .sizes = tensor.sizes});
    }
    for (const auto& [name, value] : offer.values) {
      const bool is_same = plan.catalog.values.try_emplace(name, value).first->second == value;
      if (!is_same) plan.differing_values.insert(name);
    }
  }
  auto candidates = candidates_in(offers);
  choose_writers(candidates, offers.size());
  for (std::size_t rank = 0; rank < offers.size(); ++rank) {
    std::vector<const Candidate*> own;
    for (const auto& candidate : candidates) {
      if (candidate.writer == static_cast<int>(rank)) own.push_back(&candidate);
    }
    const auto files = divided(own, max_file_bytes);
    for (std::size_t i = 0; i < files.size(); ++i) {
      add_file(plan, {.name = file_name(static_cast<int>(rank), i, files.size()), .rank = static_cast<int>(rank)},
               files[i]);
    }
  }
  check_catalog(plan.catalog, "what ranks have");
  return plan;
}

}  // namespace lockstep::detail
