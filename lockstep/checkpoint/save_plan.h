// Who writes what, and where: made from what all ranks have, without any values, so that every rank comes to the same
// plan. What several ranks have is written once, spread over them by bytes. Internal to checkpoint.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "lockstep/checkpoint/catalog.h"
#include "lockstep/checkpoint/stateful.h"

namespace lockstep::detail {

/// What a rank has.
struct Offer {
  struct Tensor {
    std::string dtype = "";
    std::vector<int64_t> sizes = {};
    dcp::Replicas replicas = dcp::Replicas::kAlike;
    std::vector<Box> boxes = {};
  };
  std::map<std::string, Tensor> tensors = {};
  std::map<std::string, nlohmann::ordered_json> values = {};
};

Offer offer_of(const dcp::Outgoing& out);
std::string packed(const Offer& offer);
Offer unpacked_offer(const std::string& bytes);

/// A file that a rank writes: a header, and then these pieces of tensors, one after the other.
struct PlannedFile {
  struct Piece {
    std::string tensor = "";
    std::size_t place = 0;  // among the tensor's pieces in the catalog
  };
  std::string name = "";
  int rank = 0;
  std::string header = "";
  std::vector<Piece> pieces = {};
};

struct SavePlan {
  Catalog catalog = {};                 // without checksums
  std::vector<PlannedFile> files = {};  // as in the catalog

  /// Values that ranks have given differently, of which the first rank's is saved.
  std::set<std::string> differing_values = {};

  /// Bytes of all files.
  int64_t bytes() const { return catalog.bytes(); }
};

/// `offers` by rank. Files are at most `max_file_bytes` long, unless a piece is longer. Throws, naming the tensor, if
/// ranks have something else under one name, or if something of a tensor is missing.
SavePlan plan_save(const std::vector<Offer>& offers, int64_t max_file_bytes);

}  // namespace lockstep::detail
