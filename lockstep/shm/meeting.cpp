#include "lockstep/shm/meeting.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <map>
#include <optional>

#include "lockstep/base/deadline.h"
#include "lockstep/base/str.h"
#include "lockstep/shm/descriptors.h"
#include "lockstep/shm/errors.h"
#include "lockstep/shm/letter.h"

namespace lockstep::shm {
namespace {

using Clock = std::chrono::steady_clock;
using Agree = std::function<std::string(const std::string&)>;

std::size_t place(int rank) {
  return static_cast<std::size_t>(rank);
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

/// Who sends half a letter, or takes none for a minute, is hung.
void set_patience(int socket) {
  const timeval reading = {.tv_sec = 5, .tv_usec = 0};
  const timeval writing = {.tv_sec = 60, .tv_usec = 0};
  ::setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &reading, sizeof(reading));
  ::setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &writing, sizeof(writing));
}

UniqueFd new_socket() {
  UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!socket) throw Refusal("socket: " + describe_error(errno));
  return socket;
}

/// The processes of all ranks: those this one has mapped, and those it comes to know.
class Processes {
 public:
  Processes(const OwnProcess& own, std::vector<ProcessId> ids) : ids_(std::move(ids)) {
    // Held from here on: nobody may forget a process that this rank has said it knows.
    known_[own.id()] = nullptr;
    for (const auto& id : ids_) {
      if (known_.contains(id)) continue;
      if (auto process = PeerProcess::find(id)) known_[id] = std::move(process);
    }
  }

  /// By rank, 'y' where the rank's pool is not mapped here; once for ranks that share a process.
  std::string needs() const {
    std::string needs(ids_.size(), 'n');
    for (std::size_t rank = 0; rank < ids_.size(); ++rank) {
      const auto first = std::find(ids_.begin(), ids_.end(), ids_[rank]) - ids_.begin();
      if (!known_.contains(ids_[rank]) && place(static_cast<int>(first)) == rank) needs[rank] = 'y';
    }
    return needs;
  }

  Peer peer(int rank, const std::string& name, UniqueFd memory, UniqueFd pool, UniqueFd lifeline) {
    const auto& id = ids_[place(rank)];
    if (pool) known_[id] = PeerProcess::adopt(id, std::move(pool), std::move(lifeline));
    Peer peer{SharedMemory::attach(str("memory of rank ", name), std::move(memory)), known_.at(id)};
    peer.memory.forget_fd();
    return peer;
  }

 private:
  const std::vector<ProcessId> ids_;
  std::map<ProcessId, std::shared_ptr<PeerProcess>> known_;
};

/// One rank's part in a meeting. What goes wrong is a Refusal.
class Meeting {
 public:
  Meeting(const Seat& seat, const Offer& mine) : seat_(seat), mine_(mine), peers_(place(seat.size)) {}
  virtual ~Meeting() = default;
  Meeting(const Meeting&) = delete;
  Meeting& operator=(const Meeting&) = delete;

  virtual void hold(const Agree& agree) = 0;
  virtual void say_farewell(const std::string& reason) = 0;
  std::vector<Peer> peers() { return std::move(peers_); }
  bool has_agreed() const { return has_agreed_; }

 protected:
  /// Whoever is late is so while the others wait here: their time begins afterwards.
  std::string agree_on(const std::string& word, const Agree& agree) {
    has_agreed_ = true;
    auto agreed = agree(word);
    deadline_ = deadline_after(seat_.timeout);
    return agreed;
  }

  /// False if the deadline came first.
  bool wait_readable(int fd) const {
    while (true) {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline_ - Clock::now());
      if (left.count() <= 0) return false;
      if (seat_.interrupt) seat_.interrupt();
      pollfd one = {.fd = fd, .events = POLLIN, .revents = 0};
      const int ready = ::poll(&one, 1, static_cast<int>(std::min<std::int64_t>(left.count(), 100)));
      if (ready > 0) return true;
      if (ready < 0 && errno != EINTR) return true;  // the read that follows will say what is wrong
    }
  }

  /// `rank`, at the socket's other end, went away. It may have said why.
  [[noreturn]] void explain(int socket, int rank) const {
    Letter last;
    while (receive_letter(socket, last)) {
      if (last.topic == Topic::kFarewell) throw Refusal(str("rank ", seat_.name_of(rank), " gave up: ", last.body));
    }
    throw Refusal(rank == 0 ? str("rank ", seat_.name_of(0), " gave up or is gone; its message says why")
                            : str("rank ", seat_.name_of(rank), " is gone"));
  }

  /// `rank` is at the socket's other end.
  Letter receive(int socket, int rank, Topic topic) const {
    if (!wait_readable(socket)) {
      throw Refusal(str("rank ", seat_.name_of(rank), " did not answer within ", seat_.timeout.count(), " ms"));
    }
    Letter letter;
    if (!receive_letter(socket, letter)) explain(socket, rank);
    if (letter.topic == Topic::kFarewell) {
      throw Refusal(str("rank ", seat_.name_of(rank), " gave up: ", letter.body));
    }
    if (letter.topic != topic || letter.rank < 0 || letter.rank >= seat_.size) {
      throw Refusal(
          str("rank ", seat_.name_of(rank), " does not keep to the protocol. Do all ranks run the same build?"));
    }
    return letter;
  }

  Letter note(Topic topic, std::string body = "") const {
    return {
        .topic = topic, .rank = seat_.rank, .size = seat_.size, .process = mine_.process.id(), .body = std::move(body)};
  }

  const Seat& seat_;
  const Offer& mine_;
  bool has_agreed_ = false;
  Clock::time_point deadline_;  // since then
  std::vector<Peer> peers_;
};

/// Rank 0's part.
class Host final : public Meeting {
 public:
  using Meeting::Meeting;

  void hold(const Agree& agree) override {
    welcome(agree);
    std::vector<ProcessId> ids;
    for (const auto& guest : guests_) ids.push_back(guest.process);
    Processes processes(mine_.process, ids);
    collect_needs(ids, processes.needs());
    collect_pools();
    relay();
    for (int rank = 1; rank < seat_.size; ++rank) {
      auto& guest = guests_[place(rank)];
      const bool is_new = guests_[0].needs[place(rank)] == 'y';
      peers_[place(rank)] = processes.peer(rank, seat_.name_of(rank), std::move(guest.memory),
                                           is_new ? std::move(guest.pool) : UniqueFd(), std::move(guest.lifeline));
    }
    for (int rank = 1; rank < seat_.size; ++rank) hear(rank, Topic::kDone);
    for (int rank = 1; rank < seat_.size; ++rank) tell(rank, note(Topic::kBegin));
  }

  void say_farewell(const std::string& reason) override {
    const auto farewell = note(Topic::kFarewell, reason);
    for (auto& guest : std::exchange(guests_, {})) {
      if (guest.socket) send_letter(guest.socket.get(), farewell);
    }
    // Those who stand at the door, or are about to: now there is a descriptor to let them in and say so.
    mine_.memory.forget_fd();
    const auto until = std::min(deadline_, Clock::now() + std::chrono::seconds(1));
    pollfd door = {.fd = listener_.get(), .events = POLLIN, .revents = 0};
    for (; come_ < seat_.size; ++come_) {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now());
      if (::poll(&door, 1, static_cast<int>(std::max<std::int64_t>(0, left.count()))) <= 0) return;
      const UniqueFd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      if (socket) send_letter(socket.get(), farewell);
    }
  }

 private:
  struct Guest {
    UniqueFd socket;
    ProcessId process = {};
    std::string needs;
    UniqueFd memory;
    UniqueFd pool;
    UniqueFd lifeline;
  };

  Letter hear(int rank, Topic topic) { return receive(guests_[place(rank)].socket.get(), rank, topic); }

  void tell(int rank, const Letter& letter, std::span<const int> enclosed = {}) {
    const int socket = guests_[place(rank)].socket.get();
    if (!send_letter(socket, letter, enclosed)) explain(socket, rank);
  }

  void welcome(const Agree& agree) {
    listener_ = new_socket();
    const auto name = random_name();
    const auto [address, length] = address_of(name);
    if (::bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) {
      throw Refusal("bind: " + describe_error(errno));
    }
    if (::listen(listener_.get(), seat_.size) != 0) throw Refusal("listen: " + describe_error(errno));
    agree_on(name, agree);
    guests_.resize(place(seat_.size));
    guests_[0].process = mine_.process.id();
    while (come_ < seat_.size) {
      if (wait_readable(listener_.get())) {
        accept_one();
        continue;
      }
      std::vector<std::string> absent;
      for (int rank = 1; rank < seat_.size; ++rank) {
        if (!guests_[place(rank)].socket) absent.push_back(seat_.name_of(rank));
      }
      throw Refusal(str("rank ", join(absent, ", "), " did not come within ", seat_.timeout.count(), " ms"));
    }
  }

  /// Whoever is not one of us is turned away, and may not keep the others waiting.
  void accept_one() {
    UniqueFd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!socket && (errno == EMFILE || errno == ENFILE)) throw Refusal(describe_error(errno));
    if (!socket || !is_same_user(socket.get())) return;
    set_patience(socket.get());
    Letter hello;
    ++come_;
    try {
      if (!receive_letter(socket.get(), hello)) {
        --come_;
        return;
      }
      if (hello.topic != Topic::kHello || hello.enclosed.size() != 1 || hello.size != seat_.size || hello.rank < 1 ||
          hello.rank >= seat_.size || guests_[place(hello.rank)].socket) {
        throw Refusal(str("a process came as rank ", hello.rank, " of ", hello.size,
                          ", which does not fit. Do all ranks run the same build?"));
      }
    } catch (const Refusal& refusal) {
      send_letter(socket.get(), note(Topic::kFarewell, refusal.what()));
      throw;
    }
    auto& guest = guests_[place(hello.rank)];
    guest = {.socket = std::move(socket),
             .process = hello.process,
             .needs = "",
             .memory = std::move(hello.enclosed[0]),
             .pool = UniqueFd(),
             .lifeline = UniqueFd()};
  }

  void collect_needs(const std::vector<ProcessId>& ids, std::string mine) {
    const std::string table(reinterpret_cast<const char*>(ids.data()), ids.size() * sizeof(ProcessId));
    for (int rank = 1; rank < seat_.size; ++rank) tell(rank, note(Topic::kTable, table));
    guests_[0].needs = std::move(mine);
    for (int rank = 1; rank < seat_.size; ++rank) {
      guests_[place(rank)].needs = hear(rank, Topic::kNeeds).body;
      guests_[place(rank)].needs.resize(place(seat_.size), 'n');
    }
  }

  void collect_pools() {
    const auto is_wanted = [&](int rank) {
      return std::any_of(guests_.begin(), guests_.end(),
                         [&](const auto& each) { return each.needs[place(rank)] == 'y'; });
    };
    for (int rank = 1; rank < seat_.size; ++rank) tell(rank, note(Topic::kWanted, is_wanted(rank) ? "y" : "n"));
    for (int rank = 1; rank < seat_.size; ++rank) {
      if (!is_wanted(rank)) continue;
      auto pool = hear(rank, Topic::kPool);
      if (pool.enclosed.size() != 2) throw Refusal(str("rank ", seat_.name_of(rank), " did not show its pool"));
      guests_[place(rank)].pool = std::move(pool.enclosed[0]);
      guests_[place(rank)].lifeline = std::move(pool.enclosed[1]);
    }
  }

  void relay() {
    for (int to = 1; to < seat_.size; ++to) {
      for (int from = 0; from < seat_.size; ++from) {
        if (from == to) continue;
        const auto& guest = guests_[place(from)];
        const auto& own = mine_.process;
        std::vector<int> enclosed = {from == 0 ? mine_.memory.fd() : guest.memory.get()};
        if (guests_[place(to)].needs[place(from)] == 'y') {
          enclosed.push_back(from == 0 ? own.pool_fd() : guest.pool.get());
          enclosed.push_back(from == 0 ? own.watched_fd() : guest.lifeline.get());
        }
        tell(to, {.topic = Topic::kMemory, .rank = from, .size = seat_.size, .process = guest.process}, enclosed);
      }
    }
  }

  UniqueFd listener_;
  int come_ = 1;               // ranks that were here, with me
  std::vector<Guest> guests_;  // by rank; the first is me, without a socket
};

/// The part of every other rank.
class Attendee final : public Meeting {
 public:
  using Meeting::Meeting;

  void hold(const Agree& agree) override {
    // Before the others are asked, so that they can be told if there is none to have.
    auto socket = new_socket();
    connect(std::move(socket), agree_on("", agree));
    tell(note(Topic::kHello), {mine_.memory.fd()});
    const auto table = hear(Topic::kTable).body;
    if (table.size() != place(seat_.size) * sizeof(ProcessId)) throw Refusal("the table of processes is incomplete");
    std::vector<ProcessId> ids(place(seat_.size));
    std::memcpy(ids.data(), table.data(), table.size());
    Processes processes(mine_.process, std::move(ids));
    tell(note(Topic::kNeeds, processes.needs()));
    if (hear(Topic::kWanted).body == "y") {
      tell(note(Topic::kPool), {mine_.process.pool_fd(), mine_.process.watched_fd()});
    }
    for (int got = 1; got < seat_.size; ++got) {
      auto memory = hear(Topic::kMemory);
      auto& enclosed = memory.enclosed;
      if (enclosed.size() != 1 && enclosed.size() != 3) throw Refusal("a rank's memory did not come");
      enclosed.resize(3);
      peers_[place(memory.rank)] = processes.peer(memory.rank, seat_.name_of(memory.rank), std::move(enclosed[0]),
                                                  std::move(enclosed[1]), std::move(enclosed[2]));
    }
    tell(note(Topic::kDone));
    hear(Topic::kBegin);
  }

  void say_farewell(const std::string& reason) override {
    if (socket_) send_letter(socket_.get(), note(Topic::kFarewell, reason));
  }

 private:
  Letter hear(Topic topic) { return receive(socket_.get(), 0, topic); }

  void tell(const Letter& letter, std::initializer_list<int> enclosed = {}) {
    if (!send_letter(socket_.get(), letter, enclosed)) explain(socket_.get(), 0);
  }

  void connect(UniqueFd socket, const std::string& name) {
    if (name.starts_with(Team::kComplaint)) {
      throw Refusal(str("rank ", seat_.name_of(0), " gave up: ", name.substr(1)));
    }
    const auto [address, length] = address_of(name);
    int connected = -1;
    do connected = ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), length);
    while (connected != 0 && errno == EINTR);
    if (connected != 0) {
      throw Refusal(str("rank ", seat_.name_of(0), " cannot be reached: ", describe_error(errno),
                        ". Is it on this host, and alive?"));
    }
    if (!is_same_user(socket.get())) throw Refusal(str("rank ", seat_.name_of(0), " runs as another user"));
    set_patience(socket.get());
    socket_ = std::move(socket);
  }

  UniqueFd socket_;
};

}  // namespace

void complain(const Agree& agree, const std::string& reason) noexcept {
  try {
    agree(Team::kComplaint + reason);
  } catch (...) {  // NOLINT(bugprone-empty-catch): there is an error already, and this is only the word about it
  }
}

std::vector<Peer> meet(const Seat& seat, const Offer& mine, const Agree& agree) {
  if (seat.size == 1) return std::vector<Peer>(1);
  std::unique_ptr<Meeting> meeting;
  if (seat.rank == 0) {
    meeting = std::make_unique<Host>(seat, mine);
  } else {
    meeting = std::make_unique<Attendee>(seat, mine);
  }
  const auto tell_others = [&](const std::string& reason) {
    if (meeting->has_agreed()) return meeting->say_farewell(reason);
    mine.memory.forget_fd();  // asking around may take a descriptor, of which there may be no other
    complain(agree, reason);
  };
  try {
    meeting->hold(agree);
  } catch (const Refusal& refusal) {
    tell_others(refusal.what());
    throw PeerError(str(seat.who(), ": making the shared-memory group '", seat.group, "' failed: ", refusal.what()));
  } catch (const std::exception& error) {
    tell_others(error.what());
    throw;
  }
  return meeting->peers();
}

}  // namespace lockstep::shm
