// A parameter of a unit, in its two forms: the shard that is registered, and the handles that modules compute with.
// Internal to fsdp.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "lockstep/fsdp/cut.h"
#include "lockstep/fsdp/freed_storage.h"
#include "lockstep/shard/layout.h"

namespace lockstep::detail {

/// What a unit registers in the place of its own parameters, with use_orig_params false.
inline constexpr char kFlatName[] = "_flat_param";

/// A parameter before it is sharded.
struct WholeParameter {
  std::string name;
  at::Tensor tensor;
  int64_t dim = 0;                   // along which it is cut
  std::vector<int64_t> counts = {};  // how many indices each rank has; none: by the chunk rule
  // What tensor parallelism had cut before: the tensor is this rank's part of it. None: it is all there is.
  std::optional<Layout> cut_before = std::nullopt;
};

/// What a module computes with. A flat parameter has many, others one.
struct WholeHandle {
  std::string name;
  std::vector<int64_t> sizes;
  int64_t offset = 0;  // in the member
  FreedStorage memory;
  at::Tensor kept_grad = {};     // of backwards without a reduction
  at::Tensor refused_grad = {};  // what the tensor has between steps

  /// Undefined if all handles are gone.
  at::Tensor tensor() const { return memory.tensor(); }
};

struct Member {
  std::string name;
  Cut cut;
  std::vector<WholeHandle> handles;
  std::optional<Layout> cut_before = std::nullopt;  // as of a WholeParameter
  int64_t offset = 0;                               // of its shard in the group's flat buffer
  at::Tensor shard = {};
  bool is_trainable = true;                   // as the handles were told last
  const void* address = nullptr;              // of the shard there
  const c10::StorageImpl* storage = nullptr;  // that buffer: empty shards have no address

  bool is_in_place() const {
    const auto& impl = *shard.unsafeGetTensorImpl();
    return impl.unsafe_storage().unsafeGetStorageImpl() == storage && impl.data() == address;
  }
};

}  // namespace lockstep::detail
