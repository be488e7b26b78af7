// Which gradients are reduced together, and in what order: a value that can be printed, saved, loaded and compared.
// Local and pure; nothing here communicates.
//
// What always holds for a BucketPlan: every parameter is in exactly one bucket, no bucket is empty, a bucket has one
// dtype and device, and a parameter with sparse gradients is alone.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <limits>
#include <string>
#include <vector>

#include "lockstep/nn/parameter_info.h"

namespace lockstep {

inline constexpr std::size_t kNoCap = std::numeric_limits<std::size_t>::max();
inline constexpr std::size_t kDefaultBucketCapBytes = std::size_t{25} << 20;
inline constexpr std::size_t kDefaultFirstBucketCapBytes = std::size_t{1} << 20;

struct PlannedBucket {
  std::vector<std::size_t> parameters = {};  // indices
  std::size_t cap_bytes = kNoCap;            // the limit it was filled under

  bool operator==(const PlannedBucket&) const = default;
};

class BucketPlan {
 public:
  BucketPlan() = default;
  /// Refuses a layout that breaks what is said above; the message names bucket and parameter.
  BucketPlan(std::vector<ParameterInfo> parameters, std::vector<PlannedBucket> buckets);

  const std::vector<ParameterInfo>& parameters() const { return parameters_; }
  const std::vector<PlannedBucket>& buckets() const { return buckets_; }
  std::size_t bytes(std::size_t bucket) const;
  /// Where a parameter is: its bucket, and its place in it.
  struct Place {
    std::size_t bucket = 0;
    std::size_t index = 0;
  };
  Place place_of(std::size_t parameter) const { return places_[parameter]; }

  /// A line per bucket: size, cap, and the parameters' names.
  std::string to_string() const;
  /// Text that load() reads. Parameters are named, so it fits another process with the same model.
  std::string save() const;
  /// The layout saved, for these parameters. Refuses names it does not know, names it misses, and changed sizes.
  static BucketPlan load(const std::string& text, std::vector<ParameterInfo> parameters);

  /// The same parameters in the same buckets in the same order.
  bool operator==(const BucketPlan& other) const;
  /// The first difference in words; empty if there is none.
  std::string difference_from(const BucketPlan& other) const;

 private:
  std::vector<ParameterInfo> parameters_;
  std::vector<PlannedBucket> buckets_;
  std::vector<Place> places_;
};

std::ostream& operator<<(std::ostream& out, const BucketPlan& plan);

/// Fills buckets per dtype and device and closes one when it holds at least its cap, so that a bucket may overshoot.
/// The first bucket of each kind has the first cap, the second the second; the last one repeats. Parameters come in
/// `order`, which lists each once; the result then keeps the order in which buckets were closed. Without one they come
/// as they are, and buckets are sorted by their smallest index.
std::vector<PlannedBucket> assign_buckets(const std::vector<ParameterInfo>& parameters,
                                          const std::vector<std::size_t>& caps_bytes,
                                          const std::vector<std::size_t>& order = {});

/// One bucket for each of `runs`, parameters in this order; or several, since a bucket has one dtype and device, and a
/// sparse gradient is alone.
std::vector<PlannedBucket> buckets_of_runs(const std::vector<ParameterInfo>& parameters,
                                           const std::vector<std::vector<std::size_t>>& runs);

/// The same for tensors, under the name and with the meaning it has in Python: tensors come in the order they are to be
/// filled in, `tensor_indices` are the indices they have in the result (their places, if it is empty), and the flags,
/// which may be empty too, go by index.
std::vector<PlannedBucket> compute_bucket_assignment_by_size(const std::vector<at::Tensor>& tensors,
                                                             const std::vector<std::size_t>& bucket_size_limits,
                                                             const std::vector<bool>& expect_sparse_gradient = {},
                                                             const std::vector<std::size_t>& tensor_indices = {});

/// How large buckets may become. See options.h for the settings behind it.
struct BucketCaps {
  std::size_t first_bytes = kDefaultFirstBucketCapBytes;
  std::size_t bytes = kDefaultBucketCapBytes;
  /// One per bucket, the last one repeating; empty: the two above.
  std::vector<std::size_t> list = {};

  /// What assign_buckets takes.
  std::vector<std::size_t> as_list() const;
};

/// The plan before the first backward: gradients are assumed to come in reverse order of registration. Unless unused
/// parameters are searched for in every step, there is one bucket per dtype and device: the order of registration may
/// not be the order of execution, and will be learnt in the first step.
BucketPlan first_plan(std::vector<ParameterInfo> parameters, const BucketCaps& caps, bool has_one_bucket);

/// The plan for gradients that come in `ready_order`, all parameters in it. With `has_small_bucket_last` the first cap
/// goes to the last bucket instead.
BucketPlan rebuilt_plan(std::vector<ParameterInfo> parameters, const BucketCaps& caps,
                        const std::vector<std::size_t>& ready_order, bool has_small_bucket_last = false);

}  // namespace lockstep
