#include "lockstep/shard/torch_placement.h"

#include <c10/util/Exception.h>

namespace lockstep {
namespace {

namespace theirs = torch::distributed;

struct ToTorch {
  using Result = std::unique_ptr<theirs::Placement>;

  Result operator()(const Replicate&) const { return std::make_unique<theirs::Replicate>(); }
  Result operator()(const Shard& shard) const { return std::make_unique<theirs::Shard>(shard.dim); }
  Result operator()(const StridedShard& shard) const {
    return std::make_unique<theirs::StridedShard>(shard.dim, shard.split_factor);
  }
  Result operator()(const RaggedShard& shard) const {
    TORCH_CHECK(false, "[lockstep/shard] libtorch has no counterpart of ", Placement(shard),
                ". Use Shard, StridedShard, Replicate or Partial.");
  }
  Result operator()(const Partial& partial) const { return std::make_unique<theirs::Partial>(name_of(partial.op)); }
};

}  // namespace

std::unique_ptr<theirs::Placement> to_torch(const Placement& placement) {
  return std::visit(ToTorch(), placement);
}

Placement from_torch(const theirs::Placement& placement) {
  if (dynamic_cast<const theirs::Replicate*>(&placement) != nullptr) return Replicate();
  // Before Shard: in some releases it is one.
  if (const auto* strided = dynamic_cast<const theirs::StridedShard*>(&placement)) {
    return StridedShard(strided->dim, strided->split_factor);
  }
  if (const auto* shard = dynamic_cast<const theirs::Shard*>(&placement)) return Shard(shard->dim);
  const auto* partial = dynamic_cast<const theirs::Partial*>(&placement);
  TORCH_CHECK(partial != nullptr, "[lockstep/shard] there is no counterpart of the placement class ",
              typeid(placement).name(), ". Use Shard, StridedShard, Replicate or Partial.");
  for (const auto op : kPartialOps) {
    if (partial->reduce_op == name_of(op)) return Partial(op);
  }
  TORCH_CHECK(false, "[lockstep/shard] Partial('", partial->reduce_op, "') names no reduction. Use sum, avg, product, ",
              "min, max, band, bor or bxor.");
}

}  // namespace lockstep
