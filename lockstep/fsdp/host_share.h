// Whole parameters without a gather, among ranks of one host: each shows its parts to the others, and parts of whole
// pages are seen side by side as the whole parameter. The rest, which is little, is copied from where it is shown.
// Internal to fsdp.
//
// What ranks show is a copy of the shards, made by the gather of a forward when all have come to it. So a rank may
// write to its shards at any time, also while others still compute with the values before; and backward, which needs
// the values of its forward, finds them shown already: it waits for nobody.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/pending.h"
#include "lockstep/comm/shared_blocks.h"
#include "lockstep/fsdp/member.h"

namespace lockstep::detail {

class HostShare {
 public:
  /// Whether a member's parts can lie side by side if they begin at pages.
  static bool is_mapped(const Member& member, at::ScalarType dtype);

  /// Null if the ranks cannot, or if much would have to be copied. Local, and the same on all ranks. The offsets of
  /// members are fixed; in the flat buffer of `elements`, those that are mapped come first.
  static std::unique_ptr<HostShare> make(const std::vector<Member>& members, int64_t elements, at::ScalarType dtype,
                                         const GroupPtr& group);

  /// Shows `source`, the flat buffer of a unit of this name. Nothing on all ranks if it turned out that they cannot.
  /// Collective.
  std::optional<Pending> launch(const at::Tensor& source, const std::string& unit);
  /// Whether all ranks show values, of the last launch().
  bool is_shown() const { return is_shown_; }
  /// By member, the parts of all ranks one behind the other. Once what was launched is done.
  std::vector<at::Tensor> gathered() const;

  /// Bytes that are shown, and bytes that gathered() copies.
  int64_t shown_bytes() const;
  int64_t copied_bytes() const { return copied_bytes_; }

 private:
  HostShare(const std::vector<Member>& members, int64_t elements, at::ScalarType dtype, GroupPtr group);
  void connect(const std::string& unit);

  struct Part {
    std::string name;
    std::string sizes;
    int64_t offset;
    int64_t elements;
    bool is_mapped;
  };
  const GroupPtr group_;
  const int64_t elements_;
  const at::ScalarType dtype_;
  std::vector<Part> parts_;  // by member
  int64_t copied_bytes_ = 0;
  std::shared_ptr<SharedBlocks> blocks_;
  std::vector<at::Tensor> mapped_;  // by member; undefined for others
  bool is_shown_ = false;
};

}  // namespace lockstep::detail
