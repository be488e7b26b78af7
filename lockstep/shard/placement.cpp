#include "lockstep/shard/placement.h"

#include <ostream>

#include "lockstep/base/str.h"

namespace lockstep {
namespace {

struct Text {
  std::string operator()(const Replicate&) const { return "Replicate()"; }
  std::string operator()(const Shard& shard) const { return str("Shard(dim=", shard.dim, ")"); }
  std::string operator()(const StridedShard& shard) const {
    return str("StridedShard(dim=", shard.dim, ", split_factor=", shard.split_factor, ")");
  }
  std::string operator()(const RaggedShard& shard) const {
    return str("RaggedShard(dim=", shard.dim, ", ", join(shard.counts, "+"), ")");
  }
  std::string operator()(const Partial& partial) const { return str("Partial(", name_of(partial.op), ")"); }
};

}  // namespace

std::optional<int64_t> sharded_dim(const Placement& placement) {
  if (const auto* shard = std::get_if<Shard>(&placement)) return shard->dim;
  if (const auto* strided = std::get_if<StridedShard>(&placement)) return strided->dim;
  if (const auto* ragged = std::get_if<RaggedShard>(&placement)) return ragged->dim;
  return std::nullopt;
}

std::string to_string(const Placement& placement) {
  return std::visit(Text(), placement);
}

std::string to_string(const Placements& placements) {
  return str("(", join(placements, ", "), placements.size() == 1 ? ",)" : ")");
}

std::ostream& operator<<(std::ostream& out, const Placement& placement) {
  return out << to_string(placement);
}

}  // namespace lockstep
