// What can go wrong between ranks that share memory. The messages are complete sentences that name ranks and operation.
#pragma once

#include <stdexcept>

namespace lockstep::shm {

/// A rank is gone, late or gave up. The group cannot be used any more.
class PeerError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The ranks asked for different things. Every rank gets this for the same call; nothing was moved, and the group stays
/// usable.
class MismatchError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// There is not enough memory, or no way to share it.
class MemoryError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace lockstep::shm
