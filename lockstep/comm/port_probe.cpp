#include "lockstep/comm/port_probe.h"

#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "lockstep/base/unique_fd.h"
#include "lockstep/comm/deadline.h"

namespace lockstep::detail {
namespace {

/// 0, or why there is no connection.
int connect_to(const addrinfo& address, std::chrono::milliseconds patience) {
  const UniqueFd socket(::socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket) return errno;
  if (::connect(socket.get(), address.ai_addr, address.ai_addrlen) == 0) return 0;
  if (errno != EINPROGRESS) return errno;
  pollfd event = {.fd = socket.get(), .events = POLLOUT, .revents = 0};
  if (::poll(&event, 1, static_cast<int>(patience.count())) <= 0) return ETIMEDOUT;
  int error = 0;
  socklen_t size = sizeof(error);
  return ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &size) == 0 ? error : errno;
}

}  // namespace

std::string probe_port(const std::string& host, int port, std::chrono::milliseconds patience) {
  const Deadline deadline(patience);
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int lookup = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (lookup != 0) return ::gai_strerror(lookup);
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(found, &::freeaddrinfo);
  int error = EADDRNOTAVAIL;
  for (const addrinfo* address = found; address != nullptr; address = address->ai_next) {
    error = connect_to(*address, deadline.left());
    if (error == 0) return "";
  }
  return std::strerror(error);
}

}  // namespace lockstep::detail
