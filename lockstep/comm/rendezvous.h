// Where ranks first meet: a store, by init method or from the launcher's variables.
#pragma once

#include <chrono>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lockstep/comm/rank_environment.h"

namespace lockstep {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

/// The store behind `init_method`: "env://" (what the launcher said), "tcp://host:port", "file:///path" or
/// "hash://name" (ranks that are threads of one process). Rank 0 serves a TCP store, unless the launcher does. Throws
/// c10::DistBackendError if it does not come about within `timeout`, c10::Error if the method is malformed.
StorePtr rendezvous(const std::string& init_method, const RankEnvironment& self, std::chrono::milliseconds timeout);

/// The host in "tcp://host:port"; throws c10::Error if there is none.
std::string tcp_host(const std::string& init_method);

/// An IPv4 address of this host that is not loopback; empty if it has none.
std::string outside_address();

/// The address of this host that packets to `peer` leave from; "127.0.0.1" if that cannot be found out.
std::string address_towards(const std::string& peer);

}  // namespace lockstep
