// The same Python program under lockstep-run and under torchrun. LOCKSTEP_PYTHON names a python with torch.
#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>

#include "lockstep/base/env.h"
#include "lockstep/base/str.h"
#include "lockstep/launch/port.h"
#include "tests/multiprocess/launch/processes.h"
#include "tests/unit/launch/time_limit.h"

namespace lockstep::torchrun_test {
namespace {

using testing_internal::Outcome;
using testing_internal::Program;
using testing_internal::TemporaryDirectory;

constexpr const char* kProgram = R"(
import datetime, os, sys
import torch
import torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
value = torch.arange(3.0) * (dist.get_rank() + 1)
dist.all_reduce(value)
names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE",
         "ROLE_NAME", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
seen = [f"{name}={os.environ.get(name)}" for name in names]
# One write per rank: under torchrun nobody keeps lines of different ranks apart.
os.write(1, f"{dist.get_rank()} of {dist.get_world_size()}: {value.tolist()} {sys.argv[1:]} {seen}\n".encode())
dist.destroy_process_group()
)";

std::vector<std::string> sorted_lines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  std::sort(lines.begin(), lines.end());
  return lines;
}

TEST(LockstepRun, RunsAPythonProgramAsTorchrunDoes) {
  const auto python = env("LOCKSTEP_PYTHON");
  if (!python) GTEST_SKIP() << "LOCKSTEP_PYTHON does not name a python with torch";
  const TemporaryDirectory directory;
  const std::string script = directory / "program.py";
  testing_internal::write_file(script, kProgram);

  const Outcome ours =
      Program(testing_internal::lockstep_run({"-n", "2", "--no-prefix", *python, script, "--flag", "x"})).wait();
  ASSERT_EQ(ours.code, 0) << ours.err;
  int port = 0;
  { port = PortReservation().port(); }
  const Outcome theirs = Program({*python, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr",
                                  "127.0.0.1", "--master-port", std::to_string(port), script, "--flag", "x"})
                             .wait();
  ASSERT_EQ(theirs.code, 0) << theirs.err;
  EXPECT_EQ(testing_internal::count_lines(ours.out), 2);
  EXPECT_EQ(sorted_lines(ours.out), sorted_lines(theirs.out));
}

}  // namespace
}  // namespace lockstep::torchrun_test
