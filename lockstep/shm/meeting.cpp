#include "lockstep/shm/meeting.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <thread>

#include "lockstep/base/str.h"
#include "lockstep/shm/errors.h"

namespace lockstep::shm {
namespace {

using Clock = std::chrono::steady_clock;

struct Greeting {
  static constexpr std::uint64_t kMagic = 0x4c6f636b73746570;  // "Lockstep"
  std::uint64_t magic = kMagic;
  std::uint32_t layout =
      kSlots * 1000U + std::uint32_t{sizeof(Lane)};  // ranks of different builds must not share memory
  std::int32_t rank = -1;
  std::int32_t size = 0;
};

[[noreturn]] void fail(const Seat& seat, const std::string& what) {
  throw PeerError(str(seat.who(), ": making the shared-memory group '", seat.group, "' failed: ", what));
}

std::string last_error() {
  return std::strerror(errno);
}

/// A socket address that is no file: the first byte is zero, and only processes of this network namespace see it.
std::pair<sockaddr_un, socklen_t> address_of(const std::string& name) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), std::min(name.size(), sizeof(address.sun_path) - 1));
  return {address, static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size())};
}

std::string random_name() {
  unsigned char bytes[16];
  if (::getrandom(bytes, sizeof(bytes), 0) != sizeof(bytes)) throw MemoryError("[lockstep/shm] getrandom failed");
  constexpr char kDigits[] = "0123456789abcdef";
  std::string name = "lockstep-";
  for (const auto byte : bytes) name += {kDigits[byte >> 4], kDigits[byte & 15]};
  return name;
}

bool is_same_user(int socket) {
  ucred peer = {};
  socklen_t length = sizeof(peer);
  return ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.uid == ::geteuid();
}

/// False if the deadline came first.
bool wait_readable(int fd, Clock::time_point deadline, const Seat& seat) {
  while (true) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
    if (left.count() <= 0) return false;
    if (seat.interrupt) seat.interrupt();
    pollfd one = {.fd = fd, .events = POLLIN, .revents = 0};
    const int ready = ::poll(&one, 1, static_cast<int>(std::min<std::int64_t>(left.count(), 100)));
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) return true;  // the read that follows will say what is wrong
  }
}

bool send_greeting(int socket, const Greeting& greeting, const Offer& offer) {
  Greeting copy = greeting;
  iovec part = {.iov_base = &copy, .iov_len = sizeof(copy)};
  const int fds[2] = {offer.memory, offer.lifeline};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(fds))] = {};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  cmsghdr* rights = CMSG_FIRSTHDR(&message);
  rights->cmsg_level = SOL_SOCKET;
  rights->cmsg_type = SCM_RIGHTS;
  rights->cmsg_len = CMSG_LEN(sizeof(fds));
  std::memcpy(CMSG_DATA(rights), fds, sizeof(fds));
  ssize_t sent = -1;
  // The kernel bounds how many descriptors of a user may be on their way: then the readers need a moment.
  for (int tries = 0; tries < 5000 && sent < 0; ++tries) {
    sent = ::sendmsg(socket, &message, MSG_NOSIGNAL);
    if (sent >= 0 || (errno != EINTR && errno != ETOOMANYREFS)) break;
    if (errno == ETOOMANYREFS) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return sent == sizeof(copy);
}

/// False if the other end closed or sent something else.
bool receive_greeting(int socket, Greeting& greeting, Peer& peer) {
  iovec part = {.iov_base = &greeting, .iov_len = sizeof(greeting)};
  int fds[2] = {-1, -1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(fds))] = {};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  ssize_t got = -1;
  do got = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_WAITALL);
  while (got < 0 && errno == EINTR);
  const cmsghdr* rights = CMSG_FIRSTHDR(&message);
  if (rights != nullptr && rights->cmsg_type == SCM_RIGHTS && rights->cmsg_len == CMSG_LEN(sizeof(fds))) {
    std::memcpy(fds, CMSG_DATA(rights), sizeof(fds));
    peer.memory.reset(fds[0]);
    peer.lifeline.reset(fds[1]);
  }
  return got == sizeof(greeting) && greeting.magic == Greeting::kMagic && peer.memory && peer.lifeline;
}

std::vector<Peer> host_meeting(const Seat& seat, const Offer& mine,
                               const std::function<std::string(const std::string&)>& agree) {
  const UniqueFd listener(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!listener) fail(seat, "socket: " + last_error());
  const auto name = random_name();
  const auto [address, length] = address_of(name);
  if (::bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) {
    fail(seat, "bind: " + last_error());
  }
  if (::listen(listener.get(), seat.size) != 0) fail(seat, "listen: " + last_error());
  agree(name);

  const auto deadline = deadline_after(seat.timeout);
  std::vector<Peer> peers(static_cast<std::size_t>(seat.size));
  std::vector<UniqueFd> sockets(static_cast<std::size_t>(seat.size));
  for (int come = 1; come < seat.size;) {
    if (!wait_readable(listener.get(), deadline, seat)) {
      std::vector<std::string> absent;
      for (int rank = 1; rank < seat.size; ++rank) {
        if (!sockets[static_cast<std::size_t>(rank)]) absent.push_back(seat.name_of(rank));
      }
      fail(seat, str("rank ", join(absent, ", "), " did not come within ", seat.timeout.count(), " ms"));
    }
    UniqueFd socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!socket && (errno == EMFILE || errno == ENFILE)) fail(seat, "too many open files; raise ulimit -n");
    // Whoever is not one of us is turned away, and may not keep the others waiting.
    if (!socket || !is_same_user(socket.get())) continue;
    const timeval patience = {.tv_sec = 5, .tv_usec = 0};
    ::setsockopt(socket.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    Greeting greeting;
    Peer peer;
    if (!receive_greeting(socket.get(), greeting, peer)) continue;
    if (greeting.layout != Greeting().layout || greeting.size != seat.size || greeting.rank < 1 ||
        greeting.rank >= seat.size || sockets[static_cast<std::size_t>(greeting.rank)]) {
      fail(seat, str("a process came as rank ", greeting.rank, " of ", greeting.size,
                     ", which does not fit. Do all ranks run the same build?"));
    }
    peers[static_cast<std::size_t>(greeting.rank)] = std::move(peer);
    sockets[static_cast<std::size_t>(greeting.rank)] = std::move(socket);
    ++come;
  }
  for (int to = 1; to < seat.size; ++to) {
    for (int from = 0; from < seat.size; ++from) {
      if (from == to) continue;
      const auto& peer = peers[static_cast<std::size_t>(from)];
      const Offer offer = from == 0 ? mine : Offer{.memory = peer.memory.get(), .lifeline = peer.lifeline.get()};
      if (!send_greeting(sockets[static_cast<std::size_t>(to)].get(), {.rank = from, .size = seat.size}, offer)) {
        fail(seat, str("rank ", seat.name_of(to), " is gone"));
      }
    }
  }
  return peers;
}

std::vector<Peer> attend_meeting(const Seat& seat, const Offer& mine,
                                 const std::function<std::string(const std::string&)>& agree) {
  const auto name = agree("");
  const UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!socket) fail(seat, "socket: " + last_error());
  const auto [address, length] = address_of(name);
  int connected = -1;
  do connected = ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), length);
  while (connected != 0 && errno == EINTR);
  if (connected != 0) {
    fail(seat, str("rank ", seat.name_of(0), " cannot be reached: ", last_error(), ". Is it on this host, and alive?"));
  }
  if (!is_same_user(socket.get())) fail(seat, str("rank ", seat.name_of(0), " runs as another user"));
  if (!send_greeting(socket.get(), {.rank = seat.rank, .size = seat.size}, mine)) {
    fail(seat, str("rank ", seat.name_of(0), " is gone"));
  }
  const auto deadline = deadline_after(seat.timeout);
  std::vector<Peer> peers(static_cast<std::size_t>(seat.size));
  for (int got = 1; got < seat.size; ++got) {
    Greeting greeting;
    Peer peer;
    if (!wait_readable(socket.get(), deadline, seat)) {
      fail(seat, str("rank ", seat.name_of(0), " did not answer within ", seat.timeout.count(), " ms"));
    }
    if (!receive_greeting(socket.get(), greeting, peer)) {
      fail(seat, str("rank ", seat.name_of(0), " gave up or is gone. Its message says which rank was missing."));
    }
    peers[static_cast<std::size_t>(greeting.rank)] = std::move(peer);
  }
  return peers;
}

}  // namespace

std::vector<Peer> meet(const Seat& seat, const Offer& mine,
                       const std::function<std::string(const std::string&)>& agree) {
  if (seat.size == 1) return std::vector<Peer>(1);
  return seat.rank == 0 ? host_meeting(seat, mine, agree) : attend_meeting(seat, mine, agree);
}

}  // namespace lockstep::shm
