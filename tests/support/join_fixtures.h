// A joinable of the simplest kind, for tests of Join: every call is a number of all-reduces of 1, mirrored by as many
// of 0, and the last joiner's final value is broadcast at the end.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/join/join.h"
#include "lockstep/lockstep.h"

namespace lockstep::join_fixtures {

inline constexpr double kBefore = 41;
inline constexpr double kAfter = 42;

struct AllReducerHooks {
  bool has_main = true;
  bool has_post = true;
};

class AllReducer : public Joinable {
 public:
  explicit AllReducer(GroupPtr group, std::string name = "reducer", AllReducerHooks hooks = {})
      : group_(std::move(group)), name_(std::move(name)), hooks_(hooks) {}

  /// One iteration's share of a live rank; returns what the all-reduces summed to, and keeps the tally.
  double operator()(const JoinVote& vote = {}) {
    tally = Join::notify(*this, vote);
    double sum = 0;
    for (int64_t i = 0; i < times; ++i) sum += reduced(1);
    return sum;
  }

  std::unique_ptr<JoinHook> join_hook(const JoinOptions& options) override {
    times = options.get<int64_t>("num_allreduces", 1);
    events.clear();
    if (!hooks_.has_main && !hooks_.has_post) return std::make_unique<JoinHook>();
    return std::make_unique<Hook>(*this);
  }
  c10::Device join_device() const override { return c10::kCPU; }
  GroupPtr join_process_group() const override { return group_; }
  std::string join_name() const override { return name_; }
  JoinPhase join_phase() const override { return phase; }

  // Read and set by tests.
  int64_t times = 1;
  JoinPhase phase = JoinPhase::kAny;
  JoinTally tally;
  /// "main" and "post 0|1", in order.
  std::vector<std::string> events;
  std::vector<int> mirrored_live_counts;
  std::vector<int> mirrored_reducing_counts;
  at::Tensor final_value = at::full({1}, kBefore);
  int authoritative_rank = -1;
  std::function<void()> in_main_hook = nullptr;

 private:
  class Hook : public JoinHook {
   public:
    explicit Hook(AllReducer& owner) : owner_(owner) {}
    void main_hook() override {
      if (owner_.hooks_.has_main) owner_.mirror();
    }
    void post_hook(bool is_last_joiner) override {
      if (owner_.hooks_.has_post) owner_.agree(is_last_joiner);
    }

   private:
    AllReducer& owner_;
  };

  double reduced(double value) {
    const auto tensor = at::full({1}, value);
    all_reduce(tensor, group_);
    return tensor.item<double>();
  }
  void mirror() {
    events.emplace_back("main");
    mirrored_live_counts.push_back(Join::current_tally(*this).live_count());
    mirrored_reducing_counts.push_back(Join::current_tally(*this).reducing_count());
    if (in_main_hook) in_main_hook();
    for (int64_t i = 0; i < times; ++i) reduced(0);
  }
  void agree(bool is_last_joiner) {
    events.push_back(is_last_joiner ? "post 1" : "post 0");
    authoritative_rank = Join::authoritative_rank(*this);
    if (is_last_joiner) final_value.fill_(kAfter);
    broadcast(final_value, authoritative_rank, group_);
  }

  const GroupPtr group_;
  const std::string name_;
  const AllReducerHooks hooks_;
};

/// What rank `rank` of `world_size` sums up over 3 + rank iterations: rank j falls silent after 3 + j.
inline double expected_total(int rank, int world_size) {
  double total = 3 * world_size;
  for (int j = 1; j <= rank; ++j) total += world_size - j;
  return total;
}

/// A group of all ranks that a test may ruin: the world's own is needed by the harness afterwards.
inline GroupPtr spare_group(const World& world) {
  return new_group(world.group(), global_ranks(world.group()), {.name = "spare"});
}

}  // namespace lockstep::join_fixtures
