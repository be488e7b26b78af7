#include "lockstep/join/join.h"

#include <algorithm>
#include <iterator>
#include <mutex>
#include <utility>

#include "lockstep/base/rank_local.h"
#include "lockstep/base/str.h"
#include "lockstep/comm/failure_notice.h"

namespace lockstep {
namespace {

// Beyond this a joined rank says that it costs the others time.
constexpr int64_t kManyMirrored = 1000;
// Tallies nobody asked for are read late, so that a live rank waits for no message; but not kept for ever.
constexpr std::size_t kMostUnread = 256;

std::string ranks_text(const std::vector<int>& ranks) {
  return str(ranks.size() == 1 ? "rank " : "ranks ", join(ranks, ", "));
}

std::string quoted(const Joinable& joinable) {
  return str("'", joinable.join_name(), "'");
}

/// Numbers that differ anywhere differ everywhere (splitmix64).
uint64_t scattered(uint64_t number) {
  number += 0x9e3779b97f4a7c15;
  number = (number ^ (number >> 30)) * 0xbf58476d1ce4e5b9;
  number = (number ^ (number >> 27)) * 0x94d049bb133111eb;
  return number ^ (number >> 31);
}

/// Those in which this rank's program is, for joinables that are in none.
struct OpenScopes {
  std::mutex mutex;
  std::vector<const Join*> all;  // guarded by mutex
};

}  // namespace

void JoinProgress::add_step(std::vector<std::pair<const char*, double>> step_options) {
  ++steps;
  options = std::move(step_options);
  // As floats: schedules may come to the same value by other roundings.
  for (const auto& [name, value] : options) {
    history = scattered(history + std::hash<float>()(static_cast<float>(value)));
  }
  history = scattered(history);
}

Join::Join(std::vector<Joinable*> joinables, JoinSettings settings)
    : joinables_(std::move(joinables)),
      settings_(std::move(settings)),
      exceptions_at_start_(std::uncaught_exceptions()),
      begun_(joinables_.size(), 0),
      last_begun_(joinables_.size(), 0) {
  check_list();
  check_callbacks();
  if (!settings_.enable) return;
  group_ = joinables_[0]->join_process_group();
  for (const auto* joinable : joinables_) joinable->check_join(settings_);
  for (auto* joinable : joinables_) {
    hooks_.push_back(joinable->join_hook(settings_.options));
    TORCH_CHECK(hooks_.back(), who(), ": joinable ", quoted(*joinable), " gave no hook. Return a JoinHook, which does ",
                "nothing by default.");
  }
  for (auto* joinable : joinables_) {
    joinable->scope_ = this;
    joinable->config_ = {.enable = true,
                         .throw_on_early_termination = settings_.throw_on_early_termination,
                         .is_first_joinable = joinable == joinables_[0]};
  }
  auto& open = rank_local<OpenScopes>();
  const std::lock_guard lock(open.mutex);
  open.all.push_back(this);
}

void Join::check_list() const {
  constexpr char kWhere[] = "[lockstep/join] a Join scope ";
  TORCH_CHECK(!joinables_.empty(), kWhere, "needs at least one joinable; the list is empty");
  TORCH_CHECK(settings_.max_mirrored_iterations.value_or(0) >= 0, kWhere,
              "was given max_mirrored_iterations = ", settings_.max_mirrored_iterations.value_or(0),
              ", which must not be negative");
  for (std::size_t i = 0; i < joinables_.size(); ++i) {
    const auto* joinable = joinables_[i];
    TORCH_CHECK(joinable != nullptr, kWhere, "was given a null joinable at position ", i);
    TORCH_CHECK(std::find(joinables_.begin(), joinables_.begin() + i, joinable) == joinables_.begin() + i, kWhere,
                "lists joinable ", quoted(*joinable), " twice");
    TORCH_CHECK(joinable->scope_ == nullptr, kWhere, "lists joinable ", quoted(*joinable),
                ", which is in another open scope. Finish that one first.");
    TORCH_CHECK(joinable->join_process_group(), kWhere, "lists joinable ", quoted(*joinable), " at position ", i,
                ", which has no process group");
    TORCH_CHECK(joinable->join_process_group() == joinables_[0]->join_process_group(), kWhere,
                "needs joinables of one process group; those at positions 0 and ", i, ", ", quoted(*joinables_[0]),
                " and ", quoted(*joinable), ", have different ones");
    if (joinable->join_phase() != JoinPhase::kGradients) continue;
    for (std::size_t before = 0; before < i; ++before) {
      const bool is_wrong = joinables_[before]->join_phase() == JoinPhase::kStep && gradients_before(before).empty();
      TORCH_CHECK(!is_wrong, kWhere, "lists ", quoted(*joinables_[before]), " before ", quoted(*joinable),
                  ", which communicates earlier in an iteration. List ", quoted(*joinable), " first.");
    }
  }
}

void Join::check_callbacks() const {
  constexpr char kWhere[] = "[lockstep/join] a Join scope ";
  for (const auto& [joinable, around] : settings_.mirrored_steps) {
    const auto found = std::find(joinables_.begin(), joinables_.end(), joinable);
    TORCH_CHECK(found != joinables_.end() && joinable->join_phase() == JoinPhase::kStep, kWhere,
                "was given mirrored_steps of ", joinable == nullptr ? "a null joinable" : quoted(*joinable),
                ", which is not in its list or does not step");
  }
  if (!settings_.before_mirrored_step) return;
  bool has_step_before = false;
  for (const auto* joinable : joinables_) {
    has_step_before = has_step_before || joinable->join_phase() == JoinPhase::kStep;
    TORCH_CHECK(!has_step_before || joinable->join_phase() != JoinPhase::kGradients, kWhere, "lists ",
                quoted(*joinable), " behind a joinable that steps, so before_mirrored_step, which comes before the ",
                "first step, could not prepare the second. Give each its own: JoinSettings{.mirrored_steps = ",
                "{{&optimizer, {.before = …}}}}.");
  }
}

std::string Join::who() const {
  const auto name = group_name(group_);
  return str("[lockstep/join] rank ", group_->getRank(), " of ", group_->getSize(),
             name == "world" ? "" : str(" in group '", name, "'"));
}

bool Join::is_attentive() const {
  return settings_.throw_on_early_termination || settings_.max_mirrored_iterations;
}

JoinTally Join::send(const detail::ControlFlags& flags, detail::Sending sending) const {
  // Through the host where the group can: a message of a device is behind the device's work, and reading it waits.
  const auto device = serves_device(group_, c10::kCPU) ? c10::Device(c10::kCPU) : joinables_[0]->join_device();
  return detail::send_flags(flags, group_, device, sending);
}

void Join::check_same_settings(const JoinTally& tally) const {
  const auto attentive = tally.ranks_in(JoinTally::kAttentive);
  TORCH_CHECK(attentive.empty() || static_cast<int>(attentive.size()) == group_->getSize(), who(), ": only ",
              ranks_text(attentive), " opened the scope with throw_on_early_termination or max_mirrored_iterations. ",
              "All ranks must give the same settings.");
}

std::size_t Join::position_of(const Joinable& joinable) const {
  return std::find(joinables_.begin(), joinables_.end(), &joinable) - joinables_.begin();
}

void Join::check_begun(const Joinable& joinable) {
  const auto position = position_of(joinable);
  TORCH_CHECK(begun_[position] < report_.own_iterations, who(), ": joinable ", quoted(joinable), " at position ",
              position, " began an iteration before ", quoted(*joinables_[0]), " at position 0 did. List joinables in ",
              "the order in which an iteration uses them, each once per iteration.");
  for (auto later = position + 1; later < joinables_.size(); ++later) {
    TORCH_CHECK(last_begun_[later] < report_.own_iterations, who(), ": joinable ", quoted(joinable), " at position ",
                position, " of the list is used after ", quoted(*joinables_[later]), " at position ", later,
                ". List joinables in the order in which an iteration uses them.");
  }
  ++begun_[position];
  last_begun_[position] = report_.own_iterations;
}

int64_t Join::progress() const {
  uint64_t number = 0;
  for (const auto* joinable : joinables_) number = scattered(number + joinable->join_progress().history);
  return static_cast<int64_t>(number >> (64 - detail::kProgressBits));
}

void Join::check_same_progress(const JoinTally& tally) const {
  // Between backward and step() live ranks may evaluate, while others have mirrored the step already.
  const bool is_evaluation = tally.live_count() > 0 && tally.reducing_count() == 0;
  if (is_evaluation || tally.has_same_progress()) return;
  std::vector<std::string> texts;
  for (const auto* joinable : joinables_) {
    const auto progress = joinable->join_progress();
    if (progress.steps == 0) continue;
    std::vector<std::string> options;
    for (const auto& [name, value] : progress.options) options.push_back(str(name, " ", value));
    texts.push_back(str(quoted(*joinable), " has taken ", progress.steps, " steps",
                        options.empty() ? "" : ", the last with ", join(options, ", ")));
  }
  TORCH_CHECK(
      false, who(), ": ranks have not stepped alike in this Join scope. On this rank, which has ",
      stage_ == Stage::kOpen ? "inputs" : "run out of inputs", ", ",
      texts.empty() ? "nothing was stepped" : join(texts, ", "),
      ". What a program does around step() ranks without inputs must do too, such as advancing a learning ",
      "rate or a momentum: JoinSettings{.on_mirrored_step = [&] { schedule.step(); }}. And every averaged backward is ",
      "followed by one step().");
}

void Join::check_same_votes(const JoinTally& tally) const {
  if (joinables_[0]->join_phase() != JoinPhase::kGradients) return;
  const auto live = tally.live_ranks();
  const auto reducing = tally.reducing_ranks();
  if (reducing.empty() || reducing.size() == live.size()) return;
  std::vector<int> others;
  std::set_difference(live.begin(), live.end(), reducing.begin(), reducing.end(), std::back_inserter(others));
  TORCH_CHECK(false, who(), ": in one iteration of ", quoted(*joinables_[0]), " ", ranks_text(reducing),
              " would average gradients and ", ranks_text(others), " would not, being in no_sync() or no_grad. Ranks ",
              "with inputs must do so alike: count iterations from the first, not towards a rank's own last one. ",
              "Ranks that run out give what they have added up to the next average.");
}

JoinTally Join::begin_iteration(Joinable& joinable, const JoinVote& vote) {
  // A hook may call what a live rank calls, such as an optimizer's step().
  if (stage_ != Stage::kOpen) return {};
  TORCH_CHECK(stop_reason_.empty(), stop_reason_);
  if (!joinable.config_.is_first_joinable) {
    check_begun(joinable);
    return {};
  }
  // Before anything is sent: what is wrong with the last iterations explains itself here, and nowhere else so well.
  read_own(false);
  const auto sending = is_attentive() ? detail::Sending::kBlocking : detail::Sending::kAsync;
  tally_ = send({.is_live = true,
                 .will_reduce = vote.will_reduce,
                 .leaves_grad = vote.leaves_grad,
                 .is_attentive = is_attentive(),
                 .progress = progress(),
                 .was_local = was_local_},
                sending);
  was_local_ = !vote.will_reduce;
  if (is_attentive()) {
    check_same_settings(tally_);
    if (!tally_.ranks_in(JoinTally::kStopping).empty()) stop_all(tally_);
    check_same_progress(tally_);
  }
  ++report_.own_iterations;
  last_begun_[0] = report_.own_iterations;
  unread_.push_back(tally_);
  return tally_;
}

void Join::stop_all(const JoinTally& tally) {
  const auto stopping = tally.ranks_in(JoinTally::kStopping);
  const bool is_mine = std::find(stopping.begin(), stopping.end(), group_->getRank()) != stopping.end();
  if (!settings_.throw_on_early_termination) {
    stop_reason_ = str(who(), ": ", ranks_text(stopping),
                       " would have to mirror more than max_mirrored_iterations = ", *settings_.max_mirrored_iterations,
                       ", all ranks stop. Give the ranks more even inputs.");
  } else if (is_mine) {
    stop_reason_ = str(who(), ": rank ", group_->getRank(), " ran out of inputs after ", report_.own_iterations,
                       " iterations while ", ranks_text(tally.live_ranks()), " had more, all ranks stop.");
  } else {
    stop_reason_ = str(who(), ": ", ranks_text(stopping), " ran out of inputs, all ranks stop; this one after ",
                       report_.own_iterations, " iterations.");
  }
  TORCH_CHECK(false, stop_reason_);
}

void Join::record(const JoinTally& tally) {
  const auto live = tally.live_ranks();
  report_.live_counts.push_back(static_cast<int>(live.size()));
  last_live_ = live.back();
}

void Join::read_own(bool all) {
  while (!unread_.empty() && (all || unread_.size() > kMostUnread || unread_.front().is_ready())) {
    const auto tally = unread_.front();
    unread_.pop_front();
    record(tally);
    check_same_progress(tally);
    check_same_votes(tally);
  }
}

void Join::mirror_others() {
  while (true) {
    const auto limit = settings_.max_mirrored_iterations;
    const bool wants_stop = settings_.throw_on_early_termination || (limit && report_.mirrored_iterations >= *limit);
    tally_ = send({.gives_leftovers = hooks_[0]->has_leftovers(),
                   .wants_stop = wants_stop,
                   .is_attentive = is_attentive(),
                   .progress = progress(),
                   .was_local = std::exchange(was_local_, false)},
                  detail::Sending::kBlocking);
    check_same_settings(tally_);
    const bool is_anybody_live = tally_.live_count() > 0;
    if (is_anybody_live && !tally_.ranks_in(JoinTally::kStopping).empty()) stop_all(tally_);
    check_same_progress(tally_);
    if (!is_anybody_live) return;
    check_same_votes(tally_);
    mirror_iteration();
    record(tally_);
    ++report_.mirrored_iterations;
    warn_of_skew();
  }
}

std::vector<std::size_t> Join::gradients_before(std::size_t position) const {
  std::vector<std::size_t> found;
  for (auto i = position; i-- > 0;) {
    const auto phase = joinables_[i]->join_phase();
    if (phase == JoinPhase::kStep && !found.empty()) break;
    if (phase == JoinPhase::kGradients) found.push_back(i);
  }
  return found;
}

bool Join::has_step(const std::vector<std::size_t>& positions) const {
  if (positions.empty()) return tally_.reducing_count() > 0;
  return std::any_of(positions.begin(), positions.end(), [&](std::size_t i) {
    const auto& own = own_tallies_[i];
    return (own.is_open() ? own : tally_).reducing_count() > 0;
  });
}

Join& Join::mirror(std::function<void()> update) {
  TORCH_CHECK(update, "[lockstep/join] mirror() was given no update");
  TORCH_CHECK(stage_ == Stage::kOpen && !update_, "[lockstep/join] mirror() is called once, before the scope ends");
  update_ = std::move(update);
  return *this;
}

void Join::mirror_iteration() {
  own_tallies_.assign(joinables_.size(), JoinTally());
  bool is_prepared = false;
  const auto prepare_step = [&] {
    if (!std::exchange(is_prepared, true) && settings_.before_mirrored_step) settings_.before_mirrored_step();
  };
  const auto run_step = [&](std::size_t position) {
    const auto found = settings_.mirrored_steps.find(joinables_[position]);
    const auto around = found == settings_.mirrored_steps.end() ? MirroredStep() : found->second;
    prepare_step();
    if (around.before) around.before();
    hooks_[position]->main_hook();
    if (around.after) around.after();
  };
  std::vector<std::size_t> all_gradients;
  for (std::size_t i = 0; i < hooks_.size(); ++i) {
    if (joinables_[i]->join_phase() == JoinPhase::kStep) {
      // Those that reduce its gradients stand before it, so their hooks have told what they know.
      if (has_step(gradients_before(i))) run_step(i);
      continue;
    }
    if (joinables_[i]->join_phase() == JoinPhase::kGradients) all_gradients.push_back(i);
    hooks_[i]->main_hook();
  }
  if (!has_step(all_gradients)) return;
  prepare_step();
  if (update_) update_();
  if (settings_.on_mirrored_step) settings_.on_mirrored_step();
}

void Join::warn_of_skew() {
  if (report_.mirrored_iterations != kManyMirrored + 1) return;
  TORCH_WARN(who(), ": this rank ran out of inputs after ", report_.own_iterations, " iterations and has mirrored ",
             report_.mirrored_iterations, " of ", ranks_text(tally_.live_ranks()),
             ". Training is slower than with even inputs.");
}

void Join::run_post_hooks() {
  // Who never saw a live rank is one of ranks that all had no inputs.
  report_.authoritative_rank = last_live_.value_or(group_->getSize() - 1);
  const bool is_last_joiner = report_.mirrored_iterations == 0;
  for (const auto& hook : hooks_) hook->post_hook(is_last_joiner);
}

JoinReport Join::finish() {
  TORCH_CHECK(stage_ != Stage::kEnded, "[lockstep/join] the scope has ended; finish() ends it once");
  TORCH_CHECK(stage_ == Stage::kOpen, "[lockstep/join] finish() was called from a hook of the same scope");
  // After a stop that the body caught nobody is left to mirror.
  if (settings_.enable && stop_reason_.empty()) {
    run_or_leave([&] {
      read_own(true);
      stage_ = Stage::kMirroring;
      mirror_others();
      stage_ = Stage::kPost;
      run_post_hooks();
    });
  }
  end();
  return report_;
}

JoinReport Join::run(const std::function<void()>& body) {
  TORCH_CHECK(stage_ == Stage::kOpen, "[lockstep/join] the scope has ended; open another one to run in");
  run_or_leave(body);
  return finish();
}

void Join::run_or_leave(const std::function<void()>& action) {
  try {
    action();
  } catch (...) {
    leave_by(std::current_exception());
    throw;
  }
}

void Join::leave_by(const std::exception_ptr& cause) noexcept {
  if (settings_.enable && stop_reason_.empty()) announce_failure(group_, cause);
  end();
}

void Join::end() noexcept {
  if (stage_ == Stage::kEnded) return;
  stage_ = Stage::kEnded;
  if (!settings_.enable) return;
  {
    auto& open = rank_local<OpenScopes>();
    const std::lock_guard lock(open.mutex);
    std::erase(open.all, this);
  }
  for (auto* joinable : joinables_) {
    joinable->config_ = {};
    joinable->scope_ = nullptr;
  }
}

Join::~Join() {
  if (stage_ == Stage::kEnded) return;
  // The exception is not ours to see: it is on its way.
  if (std::uncaught_exceptions() > exceptions_at_start_) {
    leave_by(nullptr);
    return;
  }
  std::string problem;
  try {
    finish();
    return;
  } catch (const std::exception& error) {
    problem = error.what();
  } catch (...) {
    problem = "one that is no std::exception";
  }
  try {
    TORCH_WARN("A Join scope left without finish() ended by an error: ", problem.substr(0, problem.find('\n')));
    // NOLINTNEXTLINE(bugprone-empty-catch): a warning may be made an error, and this is no place for one
  } catch (...) {
  }
}

JoinTally Join::notify(Joinable& joinable, const JoinVote& vote) {
  return joinable.scope_ == nullptr ? JoinTally() : joinable.scope_->begin_iteration(joinable, vote);
}

bool Join::is_preparation_mirrored(const Joinable& joinable) {
  if (joinable.scope_ == nullptr) return true;
  const auto& settings = joinable.scope_->settings_;
  if (settings.before_mirrored_step || settings.throw_on_early_termination) return true;
  const auto found = settings.mirrored_steps.find(&joinable);
  return found != settings.mirrored_steps.end() && found->second.before;
}

void Join::check_listed(const Joinable& joinable) {
  if (joinable.scope_ != nullptr) return;
  auto& open = rank_local<OpenScopes>();
  const std::lock_guard lock(open.mutex);
  for (const auto* scope : open.all) {
    // Callbacks and hooks know what they do, and so does who mirrors the whole update.
    if (scope->stage_ != Stage::kOpen || scope->settings_.throw_on_early_termination || scope->update_) continue;
    TORCH_CHECK(scope->group_ != joinable.join_process_group(), scope->who(), ": ", quoted(joinable),
                " is used inside a Join scope over its group without being in the list: ranks that run out of inputs ",
                "would not take part in its collectives. List it behind its DistributedDataParallel: ",
                "Join({&ddp, &optimizer}).");
  }
}

JoinTally Join::current_tally(const Joinable& joinable) {
  return joinable.scope_ == nullptr ? JoinTally() : joinable.scope_->tally_;
}

JoinTally Join::own_tally(Joinable& joinable, const JoinVote& vote) {
  auto* scope = joinable.scope_;
  if (scope == nullptr || scope->stage_ == Stage::kPost) return {};
  const bool is_live = scope->stage_ == Stage::kOpen;
  auto tally = scope->send({.is_live = is_live,
                            .will_reduce = is_live && vote.will_reduce,
                            .gives_leftovers = !is_live && vote.gives_leftovers,
                            .leaves_grad = is_live && vote.leaves_grad},
                           detail::Sending::kAsync);
  if (!is_live) scope->own_tallies_[scope->position_of(joinable)] = tally;
  return tally;
}

int Join::authoritative_rank(const Joinable& joinable) {
  TORCH_CHECK(joinable.scope_ != nullptr && joinable.scope_->stage_ == Stage::kPost, "[lockstep/join] joinable ",
              quoted(joinable), " asked for the authoritative rank outside a post hook, where it is not yet known");
  return *joinable.scope_->report_.authoritative_rank;
}

}  // namespace lockstep
