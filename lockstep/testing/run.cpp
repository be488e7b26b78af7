#include "lockstep/testing/run.h"

#include <algorithm>
#include <sstream>

#include "lockstep/base/env.h"
#include "lockstep/base/str.h"
#include "lockstep/comm/backend_registry.h"
#include "lockstep/comm/threads/thread_backend.h"
#include "lockstep/testing/reset.h"
#include "lockstep/testing/seeds.h"
#include "lockstep/testing/skip.h"

namespace lockstep::testing {

RunOptions with_defaults(RunOptions options, bool as_processes) {
  const int gpus = device_count();
  if (options.world_size == 0) options.world_size = gpus > 0 ? std::min(gpus, 8) : 4;
  TORCH_CHECK(options.world_size >= 1, "[lockstep/testing] world_size must be positive, got ", options.world_size);
  if (options.backend.empty()) {
    const bool has_nccl = gpus >= options.world_size && is_backend_registered("nccl");
    options.backend = !as_processes ? "threads" : has_nccl ? "cpu:gloo,cuda:nccl" : "gloo";
  }
  if (options.timeout.count() == 0) {
    options.timeout = std::chrono::seconds(env_integer(env, "LOCKSTEP_TEST_TIMEOUT").value_or(300));
  }
  if (options.collective_timeout.count() == 0) {
    options.collective_timeout = std::min<std::chrono::milliseconds>(options.timeout, std::chrono::seconds(60));
  }
  if (!options.chaos_seed) {
    if (const auto seed = env_integer(env, "LOCKSTEP_CHAOS_SEED")) options.chaos_seed = static_cast<uint64_t>(*seed);
  }
  return options;
}

void run_body(const RunOptions& options, const World& world, const RankBody& body) {
  reset_all();
  if (options.set_up) options.set_up(world);
  reseed_rank();
  std::exception_ptr failure;
  try {
    body(world);
  } catch (const PeerFailure&) {
    throw;
  } catch (...) {
    failure = std::current_exception();
  }
  if (options.tear_down) options.tear_down(world);
  reset_all();
  if (failure) std::rethrow_exception(failure);
}

bool RunReport::has_passed() const {
  return problem.empty() && std::all_of(ranks.begin(), ranks.end(), [](const RankOutcome& rank) {
           return rank.kind == RankOutcome::Kind::kPassed || rank.kind == RankOutcome::Kind::kSkipped;
         });
}

std::optional<std::string> RunReport::skipped() const {
  if (ranks.empty() || !has_passed() || ranks[0].kind != RankOutcome::Kind::kSkipped) return std::nullopt;
  return ranks[0].text;
}

std::string RunReport::describe() const {
  std::ostringstream out;
  if (!problem.empty()) out << problem << "\n";
  const auto describe_rank = [&](std::size_t rank) {
    const auto& [kind, text] = ranks[rank];
    switch (kind) {
      case RankOutcome::Kind::kPassed:
        break;
      case RankOutcome::Kind::kFailed:
        out << "rank " << rank << " failed: " << text << "\n";
        break;
      case RankOutcome::Kind::kSkipped:
        out << "rank " << rank << " skipped: " << text << "\n";
        break;
      case RankOutcome::Kind::kHung:
        out << "rank " << rank << " hung: " << text << "\n";
        break;
      case RankOutcome::Kind::kStopped:
        out << "rank " << rank << " was stopped because another failed" << (text.empty() ? "" : ": ") << text << "\n";
        break;
    }
  };
  // Logs are cut: first those that have something to say.
  for (const bool were_stopped : {false, true}) {
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
      if ((ranks[rank].kind == RankOutcome::Kind::kStopped) == were_stopped) describe_rank(rank);
    }
  }
  if (!replay.empty() && !has_passed()) out << "To see the same again: " << replay << "\n";
  return out.str();
}

void judge(RunReport& report) {
  if (!report.problem.empty()) return;
  const auto skipped = std::count_if(report.ranks.begin(), report.ranks.end(),
                                     [](const RankOutcome& rank) { return rank.kind == RankOutcome::Kind::kSkipped; });
  const auto passed = std::count_if(report.ranks.begin(), report.ranks.end(),
                                    [](const RankOutcome& rank) { return rank.kind == RankOutcome::Kind::kPassed; });
  if (skipped > 0 && passed > 0) {
    report.problem = str("the ranks did not end alike: ", passed, " passed, ", skipped, " skipped");
  }
  for (const auto& rank : report.ranks) {
    if (skipped == static_cast<long>(report.ranks.size()) && rank.text != report.ranks[0].text) {
      report.problem = "the ranks skipped for different reasons";
    }
  }
}

}  // namespace lockstep::testing
