#include "benchmarks/collectives/plan.h"

#include <stdexcept>

namespace lockstep::bench {

std::string name_of(Operation operation) {
  switch (operation) {
    case Operation::kAllReduce:
      return "allreduce";
    case Operation::kAllGather:
      return "allgather";
    case Operation::kReduceScatter:
      return "reducescatter";
  }
  throw std::invalid_argument("no such operation");
}

Operation operation_of(const std::string& name) {
  for (const auto operation : Plan{}.operations) {
    if (name_of(operation) == name) return operation;
  }
  throw std::invalid_argument("no such operation: " + name);
}

std::string size_name(int64_t bytes) {
  if (bytes % (1 << 20) == 0) return std::to_string(bytes >> 20) + "MiB";
  if (bytes % (1 << 10) == 0) return std::to_string(bytes >> 10) + "KiB";
  return std::to_string(bytes) + "B";
}

}  // namespace lockstep::bench
