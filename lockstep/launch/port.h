// Keeps a TCP port for a process that is yet to be started. The reservation is a socket that is bound and never
// listens: with SO_REUSEADDR on both sides the kernel lets another socket bind and listen there, while nobody is given
// the port by accident, neither by binding to port 0 nor by connecting.
#pragma once

#include "lockstep/base/unique_fd.h"

namespace lockstep {

class PortReservation {
 public:
  /// Reserves a free port on all addresses, IPv6 and IPv4, or IPv4 alone where there is no IPv6.
  /// Throws std::system_error.
  PortReservation();

  int port() const { return port_; }

 private:
  UniqueFd socket_;
  int port_ = 0;
};

}  // namespace lockstep
