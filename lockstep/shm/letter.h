// What ranks say to each other while they meet, with descriptors enclosed. Internal to shm.
#pragma once

#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "lockstep/base/unique_fd.h"
#include "lockstep/shm/process.h"

namespace lockstep::shm {

/// Why the meeting cannot go on: a part of a sentence, for my own message and the others'.
class Refusal : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

enum class Topic : std::uint32_t { kHello, kTable, kNeeds, kWanted, kPool, kMemory, kDone, kBegin, kFarewell };

struct Letter {
  Topic topic = Topic::kHello;
  std::int32_t rank = -1;  // whom it is about
  std::int32_t size = 0;
  ProcessId process = {};
  std::string body = {};
  std::vector<UniqueFd> enclosed = {};
};

/// False if the other end is gone, or takes nothing. `enclosed` is borrowed.
bool send_letter(int socket, const Letter& letter, std::span<const int> enclosed = {});

/// What is there to read, or nothing: the other end closed, or is none of us. Throws Refusal if this process has no
/// descriptors left for what was enclosed, or if the sender is of another build.
bool receive_letter(int socket, Letter& letter);

}  // namespace lockstep::shm
