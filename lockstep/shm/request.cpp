#include "lockstep/shm/request.h"

#include <cstring>
#include <string_view>

#include "lockstep/base/str.h"
#include "lockstep/shm/errors.h"
#include "lockstep/shm/team.h"

namespace lockstep::shm {
namespace {

// Below this, copying once more is cheaper than waiting until everybody has read.
constexpr std::size_t kLeastExposed = std::size_t{16} << 10;

bool is_rooted(Kind kind) {
  return kind == Kind::kReduce || kind == Kind::kBroadcast || kind == Kind::kGather || kind == Kind::kScatter;
}

std::size_t streams_given(const Request& request, const Shape& shape, int ranks) {
  if (request.gives.empty()) return 0;
  return shape.gives_per_receiver ? static_cast<std::size_t>(ranks) : 1;
}

/// Behind the header: the label, bytes I give each rank, bytes I expect from each, locations of my spans.
std::uint64_t* sizes_in(std::byte* slot) {
  return reinterpret_cast<std::uint64_t*>(slot + sizeof(Header) + kLabelBytes);
}
const std::uint64_t* sizes_in(const std::byte* slot) {
  return reinterpret_cast<const std::uint64_t*>(slot + sizeof(Header) + kLabelBytes);
}

/// " of DDP bucket 3"; nothing without a text.
std::string label_suffix(std::string_view text, int index) {
  if (text.empty()) return "";
  return index < 0 ? str(" of ", text) : str(" of ", text, " ", index);
}

/// Of another rank's call as well.
std::string_view label_in(const std::byte* slot) {
  const auto& header = *reinterpret_cast<const Header*>(slot);
  return {reinterpret_cast<const char*>(slot + sizeof(Header)), header.label_bytes};
}

std::string describe_slot(const std::byte* slot) {
  const auto& header = *reinterpret_cast<const Header*>(slot);
  return describe(header) + label_suffix(label_in(slot), header.label_index);
}

bool have_same_purpose(const std::byte* one, const std::byte* other) {
  const auto& first = *reinterpret_cast<const Header*>(one);
  const auto& second = *reinterpret_cast<const Header*>(other);
  if (!first.is_label_compared && !second.is_label_compared) return true;
  return label_in(one) == label_in(other) && first.label_index == second.label_index;
}

/// Hash (FNV) of the span lengths of what must be alike: everything, except that a rank may give one tensor of another
/// size than the others' where sizes are compared pair by pair.
std::uint64_t layout_of(const Request& request, const Shape& shape, std::size_t streams) {
  const auto& spans = request.gives.empty() ? request.gets : request.gives;
  if (shape.has_sizes && spans.size() <= std::max<std::size_t>(1, streams)) return 0;
  std::uint64_t hash = 14695981039346656037ULL;
  for (const auto& span : spans) hash = (hash ^ span.bytes) * 1099511628211ULL;
  return hash;
}

Header header_of(const Request& request, const Shape& shape, int ranks) {
  Header header{.kind = static_cast<std::uint8_t>(request.kind),
                .op = request.op,
                .dtype = request.dtype,
                .root = request.root,
                .element_bytes = request.element_bytes,
                .factor = request.factor};
  const auto streams = streams_given(request, shape, ranks);
  header.layout = layout_of(request, shape, streams);
  header.bytes = length_of(request.gives.empty() ? request.gets : request.gives);
  header.largest = streams <= 1 ? length_of(request.gives) : 0;
  for (int to = 0; streams > 1 && to < ranks; ++to) {
    header.largest = std::max<std::uint64_t>(header.largest, length_of(given_to(request, shape, to, ranks)));
  }
  return header;
}

const Header& header_in(const std::byte* slot) {
  return *reinterpret_cast<const Header*>(slot);
}

const char* find_difference(const Header& mine, const Header& theirs, const Shape& shape) {
  if (mine.kind != theirs.kind) return "operations";
  if (mine.dtype != theirs.dtype) return "dtypes";
  if (shape.reduces && mine.op != theirs.op) return "reductions";
  if (is_rooted(static_cast<Kind>(mine.kind)) && mine.root != theirs.root) return "roots";
  if (mine.layout != theirs.layout) return mine.bytes == theirs.bytes ? "sizes of the single tensors" : "sizes";
  if (mine.sequence != theirs.sequence) return "numbers of calls";
  return nullptr;
}

}  // namespace

const char* name_of(Kind kind) {
  constexpr const char* kNames[] = {"all_reduce", "reduce",         "broadcast",  "all_gather", "gather",
                                    "scatter",    "reduce_scatter", "all_to_all", "barrier"};
  return kNames[static_cast<std::size_t>(kind)];
}

Shape::Shape(Kind kind) {
  gives_per_receiver = kind == Kind::kScatter || kind == Kind::kReduceScatter || kind == Kind::kAllToAll;
  gets_per_giver = kind == Kind::kAllGather || kind == Kind::kGather || kind == Kind::kAllToAll;
  reduces = kind == Kind::kAllReduce || kind == Kind::kReduce || kind == Kind::kReduceScatter;
  only_root_gives = kind == Kind::kBroadcast || kind == Kind::kScatter;
  only_root_gets = kind == Kind::kReduce || kind == Kind::kGather;
  has_sizes = kind == Kind::kAllGather || kind == Kind::kGather || kind == Kind::kScatter || kind == Kind::kAllToAll;
}

std::size_t length_of(Stream stream) {
  std::size_t bytes = 0;
  for (const auto& span : stream) bytes += span.bytes;
  return bytes;
}

namespace {

Stream part_of(Stream all, bool is_divided, int part, int parts) {
  if (!is_divided || all.empty()) return all;
  const auto spans = all.size() / static_cast<std::size_t>(parts);
  return all.subspan(static_cast<std::size_t>(part) * spans, spans);
}

}  // namespace

Stream given_to(const Request& request, const Shape& shape, int receiver, int ranks) {
  if (shape.only_root_gets && receiver != request.root) return {};
  return part_of(request.gives, shape.gives_per_receiver, receiver, ranks);
}

Stream received_from(const Request& request, const Shape& shape, int giver, int ranks) {
  if (shape.only_root_gives && giver != request.root) return {};
  return part_of(request.gets, shape.gets_per_giver, giver, ranks);
}

void write_header(const Request& request, const Shape& shape, const Team& team, std::uint64_t sequence,
                  std::byte* slot) {
  const int ranks = team.size();
  Header header = header_of(request, shape, ranks);
  header.sequence = sequence;
  if (request.label != nullptr) {
    header.label_index = request.label_index;
    header.is_label_compared = request.is_label_compared;
    header.label_bytes = static_cast<std::uint8_t>(::strnlen(request.label, kLabelBytes));
    std::memcpy(slot + sizeof(Header), request.label, header.label_bytes);
  }
  if (shape.has_sizes) {
    auto* sizes = sizes_in(slot);
    for (int rank = 0; rank < ranks; ++rank) {
      sizes[rank] = length_of(given_to(request, shape, rank, ranks));
      sizes[ranks + rank] = length_of(received_from(request, shape, rank, ranks));
    }
  }
  if (header.bytes >= kLeastExposed && request.gives.size() <= team.layout().locations) {
    auto* locations = sizes_in(slot) + 2 * static_cast<std::size_t>(ranks);
    header.is_exposed = true;
    for (std::size_t i = 0; i < request.gives.size(); ++i) {
      const auto location = team.locate(request.gives[i].at, request.gives[i].bytes);
      header.is_exposed = header.is_exposed && location.has_value();
      locations[i] = location.value_or(0);
    }
  }
  std::memcpy(slot, &header, sizeof(header));
}

std::uint64_t location_in(const std::byte* slot, const Team& team, std::size_t index) {
  return sizes_in(slot)[2 * static_cast<std::size_t>(team.size()) + index];
}

void check_headers(const Request& request, const Shape& shape, const Team& team, std::uint32_t step) {
  const int ranks = team.size();
  const auto& mine = header_in(team.slot(team.rank(), step));
  const auto both = [&](int one, int other, const std::string& problem) {
    return str(team.seat().who(), ": ", describe(request, mine.sequence), " on group '", team.seat().group,
               "': ", problem, ": rank ", team.seat().name_of(one), " calls ", describe_slot(team.slot(one, step)),
               ", rank ", team.seat().name_of(other), " calls ", describe_slot(team.slot(other, step)),
               ". All ranks must make the same calls in the same order.");
  };
  for (int rank = 0; rank < ranks; ++rank) {
    const auto& theirs = header_in(team.slot(rank, step));
    if (const char* difference = find_difference(mine, theirs, shape)) {
      throw MismatchError(both(team.rank(), rank, str("ranks disagree on ", difference)));
    }
    if (!have_same_purpose(team.slot(team.rank(), step), team.slot(rank, step))) {
      throw MismatchError(both(team.rank(), rank, "ranks disagree on what the call is for"));
    }
  }
  if (!shape.has_sizes) return;
  // Every rank looks at every pair, so that all of them refuse or none does.
  for (int from = 0; from < ranks; ++from) {
    if (shape.only_root_gives && from != request.root) continue;
    for (int to = 0; to < ranks; ++to) {
      if (shape.only_root_gets && to != request.root) continue;
      const auto gives = sizes_in(team.slot(from, step))[to];
      const auto expects = sizes_in(team.slot(to, step))[ranks + from];
      if (gives == expects) continue;
      throw MismatchError(
          both(from, to,
               str("rank ", team.seat().name_of(from), " gives ", gives / request.element_bytes, " elements to rank ",
                   team.seat().name_of(to), ", which expects ", expects / request.element_bytes)));
    }
  }
}

std::string describe(const Header& header) {
  const auto kind = static_cast<Kind>(header.kind);
  if (kind == Kind::kBarrier) return "barrier()";
  std::string text = str(name_of(kind), "(");
  if (Shape(kind).reduces) text += str(name_of(header.op), ", ");
  text += str(name_of(header.dtype), "[", header.bytes / std::max<std::uint64_t>(1, header.element_bytes), "]");
  if (is_rooted(kind)) text += str(", root ", header.root);
  return text + ")";
}

std::string describe(const Request& request) {
  return describe(header_of(request, Shape(request.kind), 1));
}

std::string describe(const Request& request, std::uint64_t sequence) {
  const auto label = request.label == nullptr ? "" : label_suffix(request.label, request.label_index);
  return str(describe(request), " #", sequence, label);
}

}  // namespace lockstep::shm
