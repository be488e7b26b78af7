#include "lockstep/comm/rendezvous.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <sys/socket.h>

#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "lockstep/base/broken_pipe.h"
#include "lockstep/base/env.h"
#include "lockstep/base/str.h"
#include "lockstep/base/unique_fd.h"
#include "lockstep/comm/absent_ranks.h"
#include "lockstep/comm/deadline.h"
#include "lockstep/comm/failure.h"
#include "lockstep/comm/port_probe.h"

namespace lockstep {
namespace {

[[noreturn]] void report_no_store(const std::string& host, int port, const RankEnvironment& self,
                                  std::chrono::milliseconds timeout, const std::string& cause) {
  TORCH_CHECK_WITH(DistBackendError, false, "[lockstep/comm] rank ", self.rank, " of ", self.world_size,
                   ": no store at ", host, ":", port, " within ", timeout.count(), " ms: ", cause,
                   ". Is rank 0 running, and reachable by that name?");
}

/// Returns once somebody listens there. TCPStore would wait, too, but it logs every attempt and takes its time over.
void wait_for_server(const std::string& host, int port, const RankEnvironment& self,
                     std::chrono::milliseconds timeout) {
  const detail::Deadline deadline(timeout);
  const auto is_over = deadline_after(timeout);
  // The longest: a host that does not answer at all is asked anew, since its name may stand for another one by then.
  constexpr std::chrono::milliseconds kAttempt = std::chrono::seconds(5);
  auto pause = std::chrono::milliseconds(10);
  while (true) {
    const auto cause = detail::probe_port(host, port, std::min(kAttempt, deadline.left()));
    if (cause.empty()) return;
    const auto end = self.launcher_serves_store ? std::nullopt : detail::how_rank_ended(self.ended_dir, 0);
    TORCH_CHECK_WITH(DistBackendError, !end, "[lockstep/comm] rank ", self.rank, " of ", self.world_size,
                     ": no store at ", host, ":", port, ": rank 0 ended (", end.value_or(""), ") before it came");
    if (std::chrono::steady_clock::now() > is_over) report_no_store(host, port, self, timeout, cause);
    std::this_thread::sleep_for(std::min(pause, deadline.left()));
    pause = std::min(pause * 2, std::chrono::milliseconds(500));
  }
}

StorePtr tcp_store(const std::string& host, int port, bool is_server, const RankEnvironment& self,
                   std::chrono::milliseconds timeout) {
  const detail::Deadline deadline(timeout);
  if (!is_server) wait_for_server(host, port, self, timeout);
  // The store's client writes to its socket without asking for an error instead of a signal.
  keep_broken_pipes_from_killing();
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(port);
  options.isServer = is_server;
  // Whoever is missing is named when the first group is made; waiting here could not.
  options.waitWorkers = false;
  options.timeout = deadline.left();
  // A process may meet twice: for its groups and for RPC.
  options.multiTenant = true;
  try {
    auto store = c10::make_intrusive<c10d::TCPStore>(host, options);
    store->setTimeout(timeout);
    return store;
  } catch (const std::exception& error) {
    const auto cause = detail::first_line(error);
    TORCH_CHECK_WITH(DistBackendError, !is_server, "[lockstep/comm] rank ", self.rank, " of ", self.world_size,
                     ": cannot serve the store at port ", port, ": ", cause,
                     ". Is another job using the port? Choose one with MASTER_PORT or lockstep-run --master.");
    report_no_store(host, port, self, timeout, cause);
  }
}

/// Stores of "hash://name", shared by all ranks of the process that use the name and dropped with the last of them.
StorePtr shared_hash_store(const std::string& name) {
  static std::mutex mutex;
  static auto& stores = *new std::map<std::string, c10::weak_intrusive_ptr<c10d::HashStore>>;
  const std::lock_guard lock(mutex);
  const auto found = stores.find(name);
  if (found != stores.end()) {
    if (auto store = found->second.lock()) return store;
  }
  // A dead entry would keep the store's memory.
  std::erase_if(stores, [](const auto& item) { return item.second.expired(); });
  auto store = c10::make_intrusive<c10d::HashStore>();
  stores.insert_or_assign(name, c10::weak_intrusive_ptr<c10d::HashStore>(store));
  return store;
}

std::pair<std::string, int> split_host_port(const std::string& text, const std::string& init_method) {
  const auto colon = text.rfind(':');
  TORCH_CHECK(colon != std::string::npos && colon > 0, "[lockstep/comm] init method '", init_method,
              "' needs a host and a port: tcp://host:port");
  long port = 0;
  try {
    port = parse_integer("port", text.substr(colon + 1));
  } catch (const std::invalid_argument&) {
    port = -1;
  }
  TORCH_CHECK(port > 0 && port <= 65535, "[lockstep/comm] init method '", init_method, "' has no valid port");
  auto host = text.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  return {host, static_cast<int>(port)};
}

}  // namespace

std::string tcp_host(const std::string& init_method) {
  return split_host_port(init_method.substr(std::string("tcp://").size()), init_method).first;
}

std::string outside_address() {
  ifaddrs* found = nullptr;
  if (::getifaddrs(&found) != 0) return "";
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(found, &::freeifaddrs);
  for (const ifaddrs* each = found; each != nullptr; each = each->ifa_next) {
    if (each->ifa_addr == nullptr || each->ifa_addr->sa_family != AF_INET) continue;
    if ((each->ifa_flags & IFF_LOOPBACK) != 0 || (each->ifa_flags & IFF_UP) == 0) continue;
    char text[INET_ADDRSTRLEN] = "";
    const auto* address = reinterpret_cast<const sockaddr_in*>(each->ifa_addr);
    if (::inet_ntop(AF_INET, &address->sin_addr, text, sizeof(text)) != nullptr) return text;
  }
  return "";
}

StorePtr rendezvous(const std::string& init_method, const RankEnvironment& self, std::chrono::milliseconds timeout) {
  const auto rest_after = [&](const char* scheme) -> std::optional<std::string> {
    if (!init_method.starts_with(scheme)) return std::nullopt;
    return init_method.substr(std::string(scheme).size());
  };
  if (rest_after("env://")) {
    if (self.world_size == 1 && self.master_port == 0) return c10::make_intrusive<c10d::HashStore>();
    if (const auto file = env("LOCKSTEP_STORE_FILE")) return rendezvous("file://" + *file, self, timeout);
    auto store =
        tcp_store(self.master_addr, self.master_port, self.rank == 0 && !self.launcher_serves_store, self, timeout);
    // Torchrun keeps its store over restarts; ranks of one attempt must not see the keys of the one before.
    return c10::make_intrusive<c10d::PrefixStore>(str("lockstep/attempt_", self.restart_count), store);
  }
  if (const auto address = rest_after("tcp://")) {
    const auto [host, port] = split_host_port(*address, init_method);
    return tcp_store(host, port, self.rank == 0, self, timeout);
  }
  if (const auto path = rest_after("file://")) {
    TORCH_CHECK(!path->empty(), "[lockstep/comm] init method '", init_method, "' names no file: file:///path");
    auto store = c10::make_intrusive<c10d::FileStore>(*path, self.world_size);
    store->setTimeout(timeout);
    return store;
  }
  if (const auto name = rest_after("hash://")) {
    auto store = shared_hash_store(*name);
    store->setTimeout(timeout);
    return store;
  }
  TORCH_CHECK(false, "[lockstep/comm] init method '", init_method,
              "' is not one of env://, tcp://host:port, file:///path, hash://name");
}

std::string address_towards(const std::string& peer) {
  const std::string fallback = "127.0.0.1";
  addrinfo hints = {};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(peer.c_str(), "9", &hints, &found) != 0) return fallback;
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(found, &::freeaddrinfo);
  for (const addrinfo* candidate = found; candidate != nullptr; candidate = candidate->ai_next) {
    // Connecting a datagram socket sends nothing; it only makes the kernel choose a route.
    const UniqueFd socket(::socket(candidate->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    if (!socket || ::connect(socket.get(), candidate->ai_addr, candidate->ai_addrlen) != 0) continue;
    sockaddr_storage mine = {};
    socklen_t length = sizeof(mine);
    char text[INET6_ADDRSTRLEN] = "";
    if (::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&mine), &length) != 0) continue;
    if (::getnameinfo(reinterpret_cast<sockaddr*>(&mine), length, text, sizeof(text), nullptr, 0, NI_NUMERICHOST) ==
        0) {
      return text;
    }
  }
  return fallback;
}

}  // namespace lockstep
