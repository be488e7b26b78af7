#include "lockstep/launch/port.h"

#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstdint>

#include "tests/unit/launch/time_limit.h"

#ifndef IP_LOCAL_PORT_RANGE
#define IP_LOCAL_PORT_RANGE 51
#endif

namespace lockstep {
namespace {

UniqueFd make_socket(bool reuse) {
  UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int on = reuse ? 1 : 0;
  ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  return fd;
}

int bind_to(const UniqueFd& fd, in_addr_t host, int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(host);
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  return ::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0 ? 0 : errno;
}

int connect_to(const UniqueFd& fd, int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  return ::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0 ? 0 : errno;
}

// Lets the kernel choose only this port for the socket; false where it is too old for that (before Linux 6.3).
bool allow_only(const UniqueFd& fd, int port) {
  const std::uint32_t range = static_cast<std::uint32_t>(port) << 16 | static_cast<std::uint32_t>(port);
  return ::setsockopt(fd.get(), IPPROTO_IP, IP_LOCAL_PORT_RANGE, &range, sizeof(range)) == 0;
}

TEST(PortReservation, LetsASocketWithReuseaddrListenAndBeReached) {
  const PortReservation reservation;
  const UniqueFd server = make_socket(true);
  ASSERT_EQ(bind_to(server, INADDR_ANY, reservation.port()), 0);
  ASSERT_EQ(::listen(server.get(), 8), 0);
  const UniqueFd client = make_socket(false);
  ASSERT_EQ(connect_to(client, reservation.port()), 0);
  EXPECT_TRUE(UniqueFd(::accept(server.get(), nullptr, nullptr)));
}

TEST(PortReservation, LetsAnIpv6SocketListen) {
  const PortReservation reservation;
  const UniqueFd server(::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!server) GTEST_SKIP() << "no IPv6 here";
  const int on = 1;
  ::setsockopt(server.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  sockaddr_in6 address{};
  address.sin6_family = AF_INET6;
  address.sin6_port = htons(static_cast<std::uint16_t>(reservation.port()));
  ASSERT_EQ(::bind(server.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  EXPECT_EQ(::listen(server.get(), 8), 0);
}

TEST(PortReservation, IsRefusedToASocketWithoutReuseaddr) {
  const PortReservation reservation;
  EXPECT_EQ(bind_to(make_socket(false), INADDR_ANY, reservation.port()), EADDRINUSE);
}

TEST(PortReservation, RefusesConnectionsUntilSomebodyListens) {
  const PortReservation reservation;
  EXPECT_EQ(connect_to(make_socket(false), reservation.port()), ECONNREFUSED);
}

TEST(PortReservation, IsNotHandedOutWhenThePortIsLeftToTheKernel) {
  const PortReservation reservation;
  for (const bool reuse : {false, true}) {
    const UniqueFd fd = make_socket(reuse);
    if (!allow_only(fd, reservation.port())) GTEST_SKIP() << "the kernel has no IP_LOCAL_PORT_RANGE";
    EXPECT_EQ(bind_to(fd, INADDR_ANY, 0), EADDRINUSE) << "reuse " << reuse;
  }
}

TEST(PortReservation, IsNotTheSourceOfAConnection) {
  const UniqueFd server = make_socket(true);
  ASSERT_EQ(bind_to(server, INADDR_LOOPBACK, 0), 0);
  ASSERT_EQ(::listen(server.get(), 8), 0);
  sockaddr_in address{};
  socklen_t bytes = sizeof(address);
  ASSERT_EQ(::getsockname(server.get(), reinterpret_cast<sockaddr*>(&address), &bytes), 0);

  const PortReservation reservation;
  const UniqueFd client = make_socket(false);
  if (!allow_only(client, reservation.port())) GTEST_SKIP() << "the kernel has no IP_LOCAL_PORT_RANGE";
  EXPECT_EQ(connect_to(client, ntohs(address.sin_port)), EADDRNOTAVAIL);
}

TEST(PortReservation, EndsWithItsObject) {
  int port = 0;
  { port = PortReservation().port(); }
  EXPECT_EQ(bind_to(make_socket(false), INADDR_ANY, port), 0);
}

TEST(PortReservation, GivesEachItsOwnPort) {
  const PortReservation first;
  const PortReservation second;
  EXPECT_NE(first.port(), second.port());
}

}  // namespace
}  // namespace lockstep
