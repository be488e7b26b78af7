// What the benchmark measures, and the names of it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep::bench {

enum class Operation { kAllReduce, kAllGather, kReduceScatter };

/// "allreduce", "allgather", "reducescatter".
std::string name_of(Operation operation);

/// REQUIRES: a name that name_of() gives.
Operation operation_of(const std::string& name);

/// "4B", "64KiB", "25MiB".
std::string size_name(int64_t bytes);

struct Plan {
  std::vector<Operation> operations = {Operation::kAllReduce, Operation::kAllGather, Operation::kReduceScatter};
  /// Of the whole tensor: what is reduced, gathered or scattered. At least one float for each rank.
  std::vector<int64_t> sizes = {4, 1 << 10, 64 << 10, 1 << 20, 25 << 20, 256 << 20};
  std::vector<int> worlds = {2, 4};
  int rounds = 4;
  /// For all contenders of one case in one round.
  double seconds_per_case = 1;
  /// The one of ours.
  std::string backend = "shm";
  bool with_mpi = true;
};

/// At this size a case is named after its kind of tensors; below, the plain name stands for ordinary ones.
inline constexpr int64_t kLargeBytes = 1 << 20;

/// From here on all_reduce is compared with the bandwidth of memory: less may stay in the caches.
inline constexpr int64_t kMemoryBoundBytes = 25 << 20;

// Contenders, as rows and lines name them.
inline constexpr const char* kOrdinary = "ordinary";
inline constexpr const char* kZeroCopy = "zero-copy";
inline constexpr const char* kGloo = "gloo";
inline constexpr const char* kMpi = "mpi";
inline constexpr const char* kMemory = "memory";
inline constexpr const char* kMemoryHuge = "memory-huge";

}  // namespace lockstep::bench
