// How ranks of tests that have no store agree on a word: rank 0 writes it to a file.
#pragma once

#include <chrono>
#include <cstdio>
#include <fstream>
#include <string>
#include <thread>

#include "lockstep/shm/errors.h"

namespace lockstep::shm {

inline std::string agree_by_file(const std::string& path, int rank, const std::string& word,
                                 std::chrono::milliseconds patience) {
  if (rank == 0) {
    std::ofstream(path + ".new") << word;
    std::rename((path + ".new").c_str(), path.c_str());
    return word;
  }
  const auto deadline = std::chrono::steady_clock::now() + patience;
  while (std::chrono::steady_clock::now() < deadline) {
    std::string found;
    if (std::ifstream(path) >> found) return found;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  throw PeerError("making the shared-memory group failed: rank 0 said nothing");
}

}  // namespace lockstep::shm
