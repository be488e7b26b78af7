#include "lockstep/shm/letter.h"

#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "lockstep/shm/descriptors.h"
#include "lockstep/shm/lane.h"

namespace lockstep::shm {
namespace {

constexpr std::size_t kMostEnclosed = 3;
// A table of some thousand ranks.
constexpr std::size_t kMostBytes = std::size_t{128} << 10;

constexpr std::uint64_t hash_of(std::initializer_list<std::uint64_t> numbers) {
  std::uint64_t hash = 0x4c6f636b73746570;  // "Lockstep"
  for (const auto number : numbers) hash = (hash ^ number) * 0x100000001b3;
  return hash;
}

/// Goes before the body. Ranks of different builds must not share memory.
struct Head {
  static constexpr std::uint64_t kMagic = 0x4c6f636b73746570;
  static constexpr std::uint64_t kLayout =
      hash_of({kSlots, kChunkBytes, kMessageSlots, kMessageChunkBytes, sizeof(Lane), sizeof(Header), sizeof(Channel)});
  std::uint64_t magic = kMagic;
  std::uint64_t layout = kLayout;
  Topic topic = Topic::kHello;
  std::int32_t rank = -1;
  std::int32_t size = 0;
  std::uint32_t unused = 0;
  ProcessId process = {};
};

/// Takes over every descriptor that came, also of a letter that will be refused.
std::vector<UniqueFd> enclosed_in(msghdr& message) {
  std::vector<UniqueFd> found;
  for (cmsghdr* each = CMSG_FIRSTHDR(&message); each != nullptr; each = CMSG_NXTHDR(&message, each)) {
    if (each->cmsg_level != SOL_SOCKET || each->cmsg_type != SCM_RIGHTS) continue;
    const auto count = (each->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(each) + i * sizeof(int), sizeof(int));
      found.emplace_back(fd);
    }
  }
  return found;
}

}  // namespace

bool send_letter(int socket, const Letter& letter, std::span<const int> enclosed) {
  Head head{.topic = letter.topic, .rank = letter.rank, .size = letter.size, .process = letter.process};
  auto body = letter.body;
  iovec parts[2] = {{.iov_base = &head, .iov_len = sizeof(head)}, {.iov_base = body.data(), .iov_len = body.size()}};
  alignas(cmsghdr) char control[CMSG_SPACE(kMostEnclosed * sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = parts;
  message.msg_iovlen = 2;
  if (!enclosed.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(enclosed.size_bytes());
    cmsghdr* rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(enclosed.size_bytes());
    std::memcpy(CMSG_DATA(rights), enclosed.data(), enclosed.size_bytes());
  }
  ssize_t sent = -1;
  // The kernel bounds how many descriptors of a user may be on their way: then the readers need a moment.
  for (int tries = 0; tries < 5000 && sent < 0; ++tries) {
    sent = ::sendmsg(socket, &message, MSG_NOSIGNAL);
    if (sent >= 0 || (errno != EINTR && errno != ETOOMANYREFS)) break;
    if (errno == ETOOMANYREFS) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return sent == static_cast<ssize_t>(sizeof(head) + body.size());
}

bool receive_letter(int socket, Letter& letter) {
  Head head;
  std::string body(kMostBytes, '\0');
  iovec parts[2] = {{.iov_base = &head, .iov_len = sizeof(head)}, {.iov_base = body.data(), .iov_len = body.size()}};
  alignas(cmsghdr) char control[CMSG_SPACE(kMostEnclosed * sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = parts;
  message.msg_iovlen = 2;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  ssize_t got = -1;
  // A peer that went without reading all its letters is an error once; its own last one comes behind.
  int resets = 0;
  do got = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  while (got < 0 && (errno == EINTR || (errno == ECONNRESET && resets++ == 0)));
  if (got < 0) return false;
  letter.enclosed = enclosed_in(message);
  if (got < static_cast<ssize_t>(sizeof(head)) || head.magic != Head::kMagic) return false;
  if (head.layout != Head::kLayout) throw Refusal("a rank of another build came. Do all ranks run the same build?");
  if ((message.msg_flags & MSG_CTRUNC) != 0) throw Refusal(out_of_descriptors());
  body.resize(static_cast<std::size_t>(got) - sizeof(head));
  letter.topic = head.topic;
  letter.rank = head.rank;
  letter.size = head.size;
  letter.process = head.process;
  letter.body = std::move(body);
  return true;
}

}  // namespace lockstep::shm
