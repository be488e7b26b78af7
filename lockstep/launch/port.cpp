#include "lockstep/launch/port.h"

#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <system_error>

namespace lockstep {
namespace {

// Returns the socket bound to any free port, and that port; an empty socket on failure.
template <class Address>
UniqueFd bind_any(int family, const Address& any, in_port_t Address::*port_field, int& port) {
  UniqueFd socket(::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket) return {};
  const int on = 1;
  const int off = 0;
  ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (family == AF_INET6) ::setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
  Address address = any;
  socklen_t bytes = sizeof(address);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  if (::bind(socket.get(), generic, bytes) != 0 || ::getsockname(socket.get(), generic, &bytes) != 0) return {};
  port = ntohs(address.*port_field);
  return socket;
}

}  // namespace

PortReservation::PortReservation() {
  sockaddr_in6 any6{};
  any6.sin6_family = AF_INET6;
  any6.sin6_addr = in6addr_any;
  socket_ = bind_any(AF_INET6, any6, &sockaddr_in6::sin6_port, port_);
  if (socket_) return;
  sockaddr_in any4{};
  any4.sin_family = AF_INET;
  any4.sin_addr.s_addr = htonl(INADDR_ANY);
  socket_ = bind_any(AF_INET, any4, &sockaddr_in::sin_port, port_);
  if (!socket_) throw std::system_error(errno, std::generic_category(), "cannot reserve a TCP port");
}

}  // namespace lockstep
