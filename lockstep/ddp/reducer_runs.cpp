// The part of the Reducer that tells backwards apart: which forwards the one that runs goes through, and whether the
// last one came to its end.
//
// A run begins with the first output or gradient that autograd comes to, and ends with a callback of autograd's. If it
// throws, the callback is destroyed instead of called. Backwards inside of a backward belong to its run.
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "lockstep/base/str.h"
#include "lockstep/ddp/reducer.h"

namespace lockstep {
namespace {

bool contains(const std::vector<detail::PassPtr>& passes, const detail::PassPtr& pass) {
  return std::find(passes.begin(), passes.end(), pass) != passes.end();
}

/// The reducers to whose forwards the backward of this thread has come, for others that manage the same parameters.
struct ReachedReducers {
  int backward = -1;
  std::vector<std::weak_ptr<const Reducer>> reducers = {};
};
thread_local ReachedReducers reached_reducers;

}  // namespace

void Reducer::begin_run() {
  if (run_.is_open && !run_.is_alive.expired()) return;
  forget_failed_run();
  const int task = torch::autograd::get_current_graph_task_id();
  if (task == run_.abandoned) {
    setup_.fail(
        str(setup_.who(), ": while this backward ran, another thread has begun a step with the same wrapper, ",
            "and what was reduced of this one is forgotten. Run forwards with gradients before or after it; an ",
            "evaluation under torch::NoGradGuard may run meanwhile."));
  }
  const auto alive = std::make_shared<const bool>(true);
  run_.is_open = true;
  run_.task = task;
  run_.is_alive = alive;
  torch::autograd::Engine::get_default_engine().queue_callback([self = weak_from_this(), alive] {
    const auto reducer = self.lock();
    if (!reducer) return;
    const std::lock_guard lock(reducer->mutex_);
    reducer->end_run();
  });
}

void Reducer::end_run() {
  const auto run = std::exchange(run_, {});
  const at::NoGradGuard no_grad;
  if (!run.held.empty()) {
    for (const auto& pass : run.passes) pass->was_used = true;
    local_.note_end(setup_.parameters);
  }
  step_.terms.access.settle();
  if (static_graph_.is_counting()) {
    reduce_counted(run);
  } else if (std::exchange(step_.marks_unused_at_end, false)) {
    mark_unused();
  }
  // A context's gradients live no longer than it does.
  if (!step_.has_begun) step_.terms.access = {};
}

void Reducer::enter_place() {
  auto access = detail::GradientAccess::of_current_backward();
  const bool is_first = !run_.access;
  if (is_first && access.is_in_context()) check_context();
  if (is_first ? step_.has_begun && !step_.terms.access.is_same_place(access) : !run_.access->is_same_place(access)) {
    setup_.fail(str(
        setup_.who(),
        ": in one step some gradients go to one context of distributed autograd and some to another, or to .grad, ",
        "as from a plain backward inside of a context's (activations that are computed again by one). They would be ",
        "averaged in one place only: run all backwards of a step in the same."));
  }
  if (is_first) {
    local_.enter(access, searches_unused() ? &unused_.used : nullptr);
    run_.access = std::move(access);
  }
  step_.terms.access = *run_.access;
}

void Reducer::forget_failed_run() {
  if (!run_.is_open) return;
  const bool is_in_backward = torch::autograd::get_current_graph_task_id() >= 0;
  if (is_in_backward && !run_.is_alive.expired()) return;
  // It may go on, on another thread, and must not reduce the rest as if it were all.
  run_ = Run{.abandoned = run_.is_alive.expired() ? -1 : run_.task};
  static_graph_.give_up();
  if (step_.has_begun) give_up();
}

// ---- the forwards it goes through ----

void Reducer::add_open(const detail::PassPtr& pass) {
  std::erase_if(open_, [](const auto& weak) {
    const auto known = weak.lock();
    return !known || known->is_reduced || (known->was_used && !known->is_synced);
  });
  open_.push_back(pass);
}

bool Reducer::may_reduce() const {
  const std::lock_guard lock(mutex_);
  return step_.is_armed || std::any_of(open_.begin(), open_.end(), [](const auto& weak) {
           const auto pass = weak.lock();
           return pass && pass->is_synced && !pass->is_reduced;
         });
}

bool Reducer::others_may_add_gradients() const {
  const auto is_local = [](const auto& pass) { return !pass->is_synced; };
  const auto is_unused = [](const auto& weak) {
    const auto pass = weak.lock();
    return pass && !pass->was_used && !pass->is_reduced;
  };
  return std::any_of(run_.passes.begin(), run_.passes.end(), is_local) ||
         std::any_of(open_.begin(), open_.end(), is_unused);
}

void Reducer::reach(const detail::PassPtr& pass) {
  const std::lock_guard lock(mutex_);
  begin_run();
  if (contains(run_.passes, pass)) return;
  const int backward = torch::autograd::get_current_graph_task_id();
  if (reached_reducers.backward != backward) reached_reducers = {.backward = backward};
  reached_reducers.reducers.push_back(weak_from_this());
  run_.passes.push_back(pass);
  if (!pass->is_synced || pass->is_reduced) return;
  // Another forward's reduction lacks gradients, which this one's must not make up for.
  const bool is_of_others = !run_.is_mine && !step_.passes.empty() && !contains(step_.passes, pass);
  if (step_.has_begun && is_of_others) check_prior_reduction_finished();
  run_.is_mine = true;
  if (!step_.is_armed) {
    arm();
    step_.is_visible = true;
  }
  if (run_.held.empty()) return;
  // Only hooks on accumulators can ask autograd for it.
  step_.terms.access = *run_.access;
  for (const auto index : std::exchange(run_.held, {})) take(index);
}

std::optional<bool> Reducer::is_backward_synced() const {
  const std::lock_guard lock(mutex_);
  if (!run_.is_open || run_.passes.empty()) return std::nullopt;
  return run_.is_mine;
}

void Reducer::join_step() {
  for (; run_.passes_in_step < run_.passes.size(); ++run_.passes_in_step) {
    const auto& pass = run_.passes[run_.passes_in_step];
    pass->was_used = true;
    if (pass->is_synced && !pass->is_reduced && !contains(step_.passes, pass)) step_.passes.push_back(pass);
  }
}

bool Reducer::is_of_another_wrapper(std::size_t index) const {
  if (reached_reducers.backward != torch::autograd::get_current_graph_task_id()) return false;
  const auto* parameter = setup_.parameters[index].unsafeGetTensorImpl();
  return std::any_of(reached_reducers.reducers.begin(), reached_reducers.reducers.end(), [&](const auto& weak) {
    const auto reducer = weak.lock();
    return reducer && reducer.get() != this && reducer->setup_.managed.contains(parameter);
  });
}

bool Reducer::is_anothers(std::size_t index) const {
  if (run_.is_mine) return false;
  if (!run_.passes.empty()) return true;
  return step_.is_visible && is_of_another_wrapper(index);
}

void Reducer::warn_of_local_gradient(std::size_t index) {
  if (has_warned_of_local_backward_) return;
  if (run_.passes.empty()) {
    if (step_.is_armed || step_.is_local || is_of_another_wrapper(index)) return;
  } else if (std::none_of(run_.passes.begin(), run_.passes.end(), [](const auto& pass) { return pass->is_reduced; })) {
    return;
  }
  has_warned_of_local_backward_ = true;
  TORCH_WARN(setup_.who(), ": gradient of parameter '", setup_.name_of(index), "' was computed without a forward ",
             "pass of the wrapper before it (a second backward?): it is added up on this rank and not averaged.");
}

// ---- at its end ----

void Reducer::mark_unused() {
  if (searches_unused() && !step_.passes.empty()) {
    auto unused = step_.passes[0]->unused;
    for (std::size_t i = 1; i < step_.passes.size(); ++i) {
      const auto& others = step_.passes[i]->unused;
      std::vector<std::size_t> both;
      std::set_intersection(unused.begin(), unused.end(), others.begin(), others.end(), std::back_inserter(both));
      unused = std::move(both);
    }
    unused_.of_step = std::move(unused);
  }
  // At the end of backward they may have come by a forward that is not synced.
  for (const auto index : unused_.of_step) {
    if (!step_.is_ready[index]) mark_ready(index);
  }
}

}  // namespace lockstep
