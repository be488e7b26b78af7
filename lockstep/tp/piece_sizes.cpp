#include "lockstep/tp/piece_sizes.h"

#include "lockstep/base/str.h"
#include "lockstep/comm/agreement.h"
#include "lockstep/comm/call_label.h"
#include "lockstep/comm/failure_notice.h"

namespace lockstep::detail {

void PieceSizes::check(const at::Tensor& piece, const DeviceMesh& mesh, const std::string& path, bool is_needed) {
  if (mesh.size() == 1) return;
  bool is_first = false;
  {
    const std::lock_guard lock(mutex_);
    if (!compares_calls_) compares_calls_ = compares_calls(mesh.get_group());
    if (*compares_calls_ && !is_needed) return;
    is_first = known_.empty();
    if (known_.contains({piece.sizes().vec(), piece.scalar_type()})) return;
  }
  compare(piece, mesh.get_group(), path, is_first);
  const std::lock_guard lock(mutex_);
  known_.emplace(piece.sizes().vec(), piece.scalar_type());
}

void PieceSizes::compare(const at::Tensor& piece, const GroupPtr& group, const std::string& path, bool is_first) {
  const auto what = str("the sizes of plain pieces of what ", path.empty() ? "a prepared module" : str("'", path, "'"),
                        " gets, which are taken for equal parts");
  // A rank that comes alone is met by another collective, whose error shows this.
  const LabelScope label({interned(str("the sizes of plain pieces, here [", join(piece.sizes().vec(), ", "), "]"))});
  // At first all ranks compare. Later one may have a size that it had before, and not come.
  if (!is_first) {
    try {
      const auto elsewhere = meet(what, group);
      TORCH_CHECK(elsewhere.empty(), "[lockstep/tp] the ranks of a mesh disagree on ", what,
                  ": this rank's is new, of ", "different sizes than those before, [", join(piece.sizes().vec(), ", "),
                  "], but ", elsewhere, ". Give every rank as much, or DTensors, which know their sizes.");
    } catch (...) {
      announce_failure(group, std::current_exception());
      throw;
    }
  }
  check_same_on_all_ranks(what, lockstep::str(piece.scalar_type(), " [", join(piece.sizes().vec(), ", "), "]"), group);
}

}  // namespace lockstep::detail
