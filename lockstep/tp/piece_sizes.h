// Plain pieces of inputs that are cut are taken for equal parts. On backends that compare what ranks call, a rank whose
// piece has another size is named by the collective that needs it; on the others, which may abort, and where none needs
// it, it is found here before. Internal to tp.
#pragma once

#include <ATen/core/Tensor.h>

#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/mesh/device_mesh.h"

namespace lockstep::detail {

/// Of layers on one mesh. Thread-safe.
class PieceSizes {
 public:
  /// Throws on all ranks of `mesh` if their pieces of what the module `path` gets have different sizes; "" if its path
  /// is not known. Collective the first time a rank sees these sizes, which it does on all ranks at once if they agree;
  /// local afterwards. Does nothing on backends that compare calls unless `is_needed`: no collective would tell.
  void check(const at::Tensor& piece, const DeviceMesh& mesh, const std::string& path, bool is_needed);

 private:
  static void compare(const at::Tensor& piece, const GroupPtr& group, const std::string& path, bool is_first);

  std::mutex mutex_;
  // Guarded by mutex_.
  std::optional<bool> compares_calls_;
  std::set<std::pair<std::vector<int64_t>, at::ScalarType>> known_;
};

}  // namespace lockstep::detail
