// What the leaders of several hosts do among each other. Internal to comm: the middle stage of a Hierarchy.
//
// The transport only moves bytes; the arithmetic is that of shm/, in host order. So every dtype and reduction of the
// local stage works here too, half types are summed in float, and all leaders get the same bits in every run.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/backend_registry.h"
#include "lockstep/comm/deadline.h"
#include "lockstep/shm/reduce.h"

namespace lockstep::detail {

/// All of it is collective over the leaders and blocks. A *run* is a contiguous tensor of one dim.
class LeaderExchange {
 public:
  /// Among the leaders alone; rank h is host h's. `each` is what messages call one: "host".
  explicit LeaderExchange(BackendPtr transport, std::string each = "host")
      : transport_(std::move(transport)), each_(std::move(each)) {}

  /// What a call is to each of the others, in words: `told` to it, and `expected` to be told by it.
  struct Announcement {
    std::vector<std::string> told;
    std::vector<std::string> expected;
  };
  /// Tells the others what comes next; does not wait.
  void announce(Announcement call, const Deadline& deadline);
  /// Throws if one of them announced something else. Where all tell all the same, then all of them throw.
  void check_same_call();

  /// In place.
  void all_reduce(const at::Tensor& run, const shm::Reduction& reduction, const Deadline& deadline);
  /// In place on host `root`; the others keep theirs.
  void reduce(const at::Tensor& run, int root, const shm::Reduction& reduction, const Deadline& deadline);
  /// parts[h], of this host and of all others, is reduced on host h, in place; the other parts stay.
  void reduce_scatter(const std::vector<at::Tensor>& parts, const shm::Reduction& reduction, const Deadline& deadline);
  /// parts[h] goes from host h to all others.
  void all_gather(const std::vector<at::Tensor>& parts, const Deadline& deadline);
  void broadcast(const at::Tensor& run, int root, const Deadline& deadline);
  void barrier(const Deadline& deadline);

 private:
  int host() const { return transport_->getRank(); }
  int hosts() const { return transport_->getSize(); }
  // Messages are told apart by tags; what is empty does not travel, nor does this host's own part.
  using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;
  void receive(const std::vector<at::Tensor>& parts, int tag, Works& works);
  void send(const std::vector<at::Tensor>& parts, int tag, Works& works);
  static void wait(const Works& works, const Deadline& deadline);
  /// Sends sent[h] to host h and receives received[h] from it.
  void swap(const std::vector<at::Tensor>& sent, const std::vector<at::Tensor>& received, const Deadline& deadline);
  void all_reduce_slices(const at::Tensor& run, const shm::Reduction& reduction, const Deadline& deadline);
  /// Reduces this host's `mine` and the others' runs of its size, in host order, onto `mine`.
  void reduce_onto(const at::Tensor& mine, const std::vector<at::Tensor>& others,
                   const shm::Reduction& reduction) const;
  std::vector<at::Tensor> room_for_others(const at::Tensor& run) const;

  const BackendPtr transport_;
  const std::string each_;

  // From announce() to check_same_call().
  Announcement call_;
  at::Tensor announced_;  // a row per host
  Works announcing_;
  std::optional<Deadline> announced_until_;
};

}  // namespace lockstep::detail
