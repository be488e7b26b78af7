#include "lockstep/dtensor/dim_factors.h"

#include <algorithm>
#include <numeric>

namespace lockstep {
namespace {

using Sizes = std::vector<int64_t>;

int64_t ceil_div(int64_t size, int64_t count) {
  return (size + count - 1) / count;
}

/// Ranks hold different lengths of it.
bool is_uneven(const Factor& factor, const Sizes& mesh_shape) {
  return !factor.is_free() && factor.size != mesh_shape[static_cast<std::size_t>(factor.axis)];
}

/// Whether a rank still holds several indices of it.
bool is_held(const Factor& factor, const Sizes& mesh_shape) {
  return factor.is_free() || is_uneven(factor, mesh_shape);
}

void insert_factor(Factors& factors, std::size_t at, Factor factor) {
  factors.insert(factors.begin() + static_cast<std::ptrdiff_t>(at), factor);
}

/// The factor that begins after `left` of the indices that are still held, a new one if need be. None if there is no
/// such place, or if it is not the same on all ranks.
std::optional<std::size_t> factor_after(Factors& factors, int64_t left, const Sizes& mesh_shape) {
  for (std::size_t i = 0; i < factors.size(); ++i) {
    if (!is_held(factors[i], mesh_shape)) continue;
    if (!factors[i].is_free()) return std::nullopt;
    if (left == 1) return i;
    auto& size = factors[i].size;
    if (left % size == 0) {
      left /= size;
    } else if (size % left == 0) {
      size /= left;
      insert_factor(factors, i, {left});
      return i + 1;
    } else {
      return std::nullopt;
    }
  }
  if (left > 1) return std::nullopt;
  factors.push_back({1});
  return factors.size() - 1;
}

/// Lets `axis` divide the free factor `at`.
bool divide_factor(Factors& factors, std::size_t at, int64_t axis, const Sizes& mesh_shape) {
  const auto ranks = mesh_shape[static_cast<std::size_t>(axis)];
  const auto size = factors[at].size;
  auto inside = size / ranks;
  if (size % ranks != 0) {
    const auto is_inside = [&](const Factor& factor) { return is_held(factor, mesh_shape); };
    if (std::any_of(factors.begin() + static_cast<std::ptrdiff_t>(at) + 1, factors.end(), is_inside)) return false;
    // Chunks and whole have a common divisor: that many neighbours stay together everywhere.
    inside = std::gcd(size, ceil_div(size, ranks));
  }
  factors[at] = {size / inside, axis};
  if (inside > 1) insert_factor(factors, at + 1, {inside});
  return true;
}

}  // namespace

std::optional<Factors> factors_of(int64_t size, int64_t dim, const Placements& placements, const Sizes& mesh_shape) {
  if (size == 0) return std::nullopt;
  Factors factors;
  append_factors(factors, {{size}});
  for (std::size_t axis = 0; axis < placements.size(); ++axis) {
    const auto& placement = placements[axis];
    if (sharded_dim(placement) != dim) continue;
    if (std::holds_alternative<RaggedShard>(placement)) return std::nullopt;
    const auto* strided = std::get_if<StridedShard>(&placement);
    const auto at = factor_after(factors, strided == nullptr ? 1 : strided->split_factor, mesh_shape);
    if (!at || !divide_factor(factors, *at, static_cast<int64_t>(axis), mesh_shape)) return std::nullopt;
  }
  return factors;
}

void append_factors(Factors& factors, const Factors& more) {
  for (const auto& factor : more) {
    if (factor.is_free() && factor.size == 1) continue;
    if (factor.is_free() && !factors.empty() && factors.back().is_free()) {
      factors.back().size *= factor.size;
    } else {
      factors.push_back(factor);
    }
  }
}

std::optional<std::vector<Factors>> regrouped(Factors factors, const Sizes& sizes) {
  std::vector<Factors> by_dim(sizes.size());
  std::size_t next = 0;
  for (std::size_t dim = 0; dim < sizes.size(); ++dim) {
    for (auto left = sizes[dim]; left > 1;) {
      auto& factor = factors[next];
      if (left % factor.size == 0) {
        by_dim[dim].push_back(factor);
        left /= factor.size;
        ++next;
      } else if (factor.is_free() && factor.size % left == 0) {
        by_dim[dim].push_back({left});
        factor.size /= left;
        left = 1;
      } else {
        return std::nullopt;
      }
    }
  }
  if (next == factors.size()) return by_dim;
  if (by_dim.empty()) return std::nullopt;
  // Only factors of size 1 are left over.
  by_dim.back().insert(by_dim.back().end(), factors.begin() + static_cast<std::ptrdiff_t>(next), factors.end());
  return by_dim;
}

bool place(const Factors& factors, int64_t dim, const Sizes& mesh_shape, Placements& placements) {
  for (std::size_t i = 0; i < factors.size(); ++i) {
    const auto [size, axis] = factors[i];
    if (factors[i].is_free()) continue;
    // What there is of the dim when this axis has its turn: what axes before it divide is no longer there.
    int64_t outside = 1;
    int64_t inside = 1;
    for (std::size_t j = 0; j < factors.size(); ++j) {
      const auto& other = factors[j];
      if (j == i) continue;
      if (other.is_free() || other.axis > axis) {
        (j < i ? outside : inside) *= other.size;
      } else if (is_uneven(other, mesh_shape) && (j < i || is_uneven(factors[i], mesh_shape))) {
        return false;
      }
    }
    const auto ranks = mesh_shape[static_cast<std::size_t>(axis)];
    if (ceil_div(size * inside, ranks) != ceil_div(size, ranks) * inside) return false;
    auto& placement = placements[static_cast<std::size_t>(axis)];
    if (outside == 1) {
      placement = Shard(dim);
    } else {
      placement = StridedShard(dim, outside);
    }
  }
  return true;
}

}  // namespace lockstep
