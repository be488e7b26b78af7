#include "lockstep/testing/continuous.h"

#include <atomic>
#include <csignal>
#include <thread>

#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include "lockstep/base/str.h"
#include "lockstep/comm/barrier.h"
#include "lockstep/testing/rank_job.h"
#include "lockstep/testing/rank_process.h"
#include "lockstep/testing/temp_dir.h"

namespace lockstep::testing {
namespace {

constexpr char kEnd[] = "the suite is over";
constexpr auto kPoll = std::chrono::milliseconds(5);

std::string turn_key(int turn) {
  return str("continuous/turn/", turn);
}
std::string verdict_key(int turn, int rank) {
  return str("continuous/verdict/", turn, "/", rank);
}

std::string read(c10d::Store& store, const std::string& key) {
  const auto bytes = store.get(key);
  return {bytes.begin(), bytes.end()};
}

void write(c10d::Store& store, const std::string& key, const std::string& text) {
  store.set(key, std::vector<uint8_t>(text.begin(), text.end()));
}

}  // namespace

class ContinuousRanks::Parent {
 public:
  Parent(RunOptions options, const ProcessCall& call)
      : options_(std::move(options)), store_(c10::make_intrusive<c10d::FileStore>(directory_.file("turns"), -1)) {
    auto job_options = detail::rank_job(options_, call, directory_.file("store"));
    // Each test has the time limit, not the suite.
    job_options.timeout.reset();
    job_ = std::make_unique<Job>(std::move(job_options));
    watcher_ = std::thread([this] {
      try {
        result_ = job_->run();
      } catch (const std::exception& error) {
        start_problem_ = error.what();
      }
      has_ended_ = true;
    });
  }

  ~Parent() {
    const auto wait_for_end = [&](std::chrono::milliseconds limit) {
      const auto deadline = std::chrono::steady_clock::now() + limit;
      while (!has_ended_ && std::chrono::steady_clock::now() < deadline) std::this_thread::sleep_for(kPoll);
    };
    if (broken_by_.empty()) {
      write(*store_, turn_key(turn_), kEnd);
      wait_for_end(std::chrono::seconds(20));
    }
    // The first asks, the second kills.
    for (int i = 0; i < 2 && !has_ended_; ++i) {
      job_->interrupt(SIGTERM);
      wait_for_end(std::chrono::seconds(10));
    }
    watcher_.join();
  }

  RunReport run(const std::string& test) {
    RunReport report;
    if (!broken_by_.empty()) {
      report.ranks.assign(options_.world_size,
                          {RankOutcome::Kind::kSkipped, str("the ranks were lost when ", broken_by_, " failed")});
      return report;
    }
    write(*store_, turn_key(turn_), test);
    const auto deadline = std::chrono::steady_clock::now() + options_.timeout;
    std::vector<std::string> keys;
    for (int rank = 0; rank < options_.world_size; ++rank) keys.push_back(verdict_key(turn_, rank));
    while (!store_->check(keys)) {
      const bool is_late = std::chrono::steady_clock::now() > deadline;
      if (is_late) job_->interrupt(SIGTERM);
      if (is_late || has_ended_) {
        broken_by_ = test;
        while (!has_ended_) std::this_thread::sleep_for(kPoll);
        report = detail::report_of(result_, options_);
        if (!start_problem_.empty()) report.problem = start_problem_;
        if (is_late) report.problem = str(test, " did not end within ", options_.timeout.count(), " ms");
        if (report.has_passed()) report.problem = str("the ranks ended before ", test, " was over");
        return report;
      }
      std::this_thread::sleep_for(kPoll);
    }
    for (const auto& key : keys) {
      const auto verdict = read(*store_, key);
      using Kind = RankOutcome::Kind;
      const Kind kind = verdict[0] == 'p' ? Kind::kPassed : verdict[0] == 's' ? Kind::kSkipped : Kind::kFailed;
      report.ranks.push_back({kind, verdict.substr(1)});
    }
    judge(report);
    if (!report.has_passed()) broken_by_ = test;
    ++turn_;
    return report;
  }

 private:
  const RunOptions options_;
  const TempDir directory_;
  const c10::intrusive_ptr<c10d::FileStore> store_;
  std::unique_ptr<Job> job_;
  int turn_ = 0;
  std::string broken_by_;  // the test that failed; empty while all is well

  std::thread watcher_;
  JobResult result_;           // both written before has_ended_ is set
  std::string start_problem_;  // why the ranks could not be run
  std::atomic<bool> has_ended_ = false;
};

class ContinuousRanks::Rank {
 public:
  Rank(const RunOptions& options, const detail::RankIdentity& self)
      : self_(self), options_(options), turns_path_(self.store_path.substr(0, self.store_path.rfind('/')) + "/turns") {
    detail::explain_rank_termination(self_);
    const auto outcome = detail::run_guarded([&] { world_.emplace(detail::join_world(self_, options_)); }, &skip_code_);
    if (!world_) detail::end_process(self_, outcome, skip_code_);
    store_ = c10::make_intrusive<c10d::FileStore>(turns_path_, -1);
    store_->setTimeout(std::chrono::hours(24));
  }

  ~Rank() {
    world_.reset();
    detail::end_process(self_, {}, std::nullopt);
  }

  RunReport run(const std::string& test, const RankBody& body) {
    const auto next = read(*store_, turn_key(turn_));
    if (next == kEnd) detail::end_process(self_, {}, std::nullopt);
    // A filter may leave out tests in the parent that this process still walks through.
    if (next != test) return {};
    skip_code_.reset();
    const auto outcome = detail::run_guarded(
        [&] {
          barrier(world_->group());
          run_body(options_, *world_, body);
          barrier(world_->group());
        },
        &skip_code_);
    const char* letter = outcome.kind == RankOutcome::Kind::kPassed ? "p" : skip_code_ ? "s" : "f";
    write(*store_, verdict_key(turn_, self_.rank), letter + outcome.text);
    ++turn_;
    if (outcome.kind == RankOutcome::Kind::kFailed) detail::end_process(self_, outcome, std::nullopt);
    return {};
  }

 private:
  const detail::RankIdentity self_;
  const RunOptions options_;
  const std::string turns_path_;
  c10::intrusive_ptr<c10d::FileStore> store_;
  std::optional<World> world_;
  std::optional<int> skip_code_;
  int turn_ = 0;
};

ContinuousRanks::ContinuousRanks(RunOptions options, const ProcessCall& call) {
  options = with_defaults(std::move(options), /*as_processes=*/true);
  const auto self = detail::rank_identity();
  if (self && self->call == call.name) {
    rank_ = std::make_unique<Rank>(options, *self);
  } else if (!self) {
    parent_ = std::make_unique<Parent>(std::move(options), call);
  }
}

ContinuousRanks::~ContinuousRanks() = default;

RunReport ContinuousRanks::run(const std::string& test, const RankBody& body) {
  if (rank_) return rank_->run(test, body);
  if (parent_) return parent_->run(test);
  return {};
}

}  // namespace lockstep::testing
