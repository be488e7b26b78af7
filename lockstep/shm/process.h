// A process as other processes see it: a pool for zero-copy tensors, and a lifeline that hangs up when it ends. One of
// each serves all its groups and all ranks in it, so every pair of processes maps and watches each other once.
// Internal to shm.
//
// Teams hold what they use, tensors hold the pool they lie in; what nobody holds is unmapped and closed.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "lockstep/base/unique_fd.h"
#include "lockstep/shm/memory.h"
#include "lockstep/shm/pool.h"

namespace lockstep::shm {

/// Random, so that it names one pool of one process and never another.
using ProcessId = std::array<std::uint64_t, 2>;

/// This process.
class OwnProcess {
 public:
  /// Made if nobody holds it. There is a second one only if LOCKSTEP_SHM_RESERVE_BYTES was changed in between.
  /// `ranks` is the size of the team that asks: pools of that many have to fit the address space.
  static std::shared_ptr<OwnProcess> get(int ranks);

  explicit OwnProcess(std::size_t reserve);
  ~OwnProcess();
  OwnProcess(const OwnProcess&) = delete;
  OwnProcess& operator=(const OwnProcess&) = delete;

  const ProcessId& id() const { return id_; }
  Pool& pool() { return pool_; }
  /// To pass on: the pool's memory, and what hangs up at this process's end.
  int pool_fd() const { return pool_.memory().fd(); }
  int watched_fd() const { return watched_end_.get(); }

 private:
  const ProcessId id_;
  const int home_;  // the fork_generation() that made it
  Pool pool_;
  UniqueFd lifeline_;
  UniqueFd watched_end_;
};

/// Another process.
class PeerProcess {
 public:
  /// Nothing if no team holds it.
  static std::shared_ptr<PeerProcess> find(const ProcessId& id);
  /// Maps its pool, unless another rank of this process just has.
  static std::shared_ptr<PeerProcess> adopt(const ProcessId& id, UniqueFd pool, UniqueFd lifeline);

  PeerProcess(UniqueFd pool, UniqueFd lifeline);

  std::byte* pool() const { return pool_.data(); }
  std::size_t pool_bytes() const { return pool_.size(); }
  /// Hangs up when it ends.
  int lifeline() const { return lifeline_.get(); }
  /// It has ended, however.
  bool is_gone() const;

 private:
  SharedMemory pool_;
  const UniqueFd lifeline_;
};

}  // namespace lockstep::shm
