#include "lockstep/ddp/reducer.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/Logging.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/distributed/c10d/debug.h>

#include <algorithm>
#include <utility>

#include "lockstep/base/env.h"
#include "lockstep/base/observer.h"
#include "lockstep/base/str.h"
#include "lockstep/comm/call_label.h"
#include "lockstep/comm/objects.h"

namespace lockstep {
namespace {

void note_gradient(const std::string& name) {
  Event event;
  event.kind = "gradient";
  event.unit = name;
  event.state = "ready";
  announce(std::move(event));
}

std::string remedy_for_frozen(const detail::ReducerSetup& setup, const std::vector<std::size_t>& frozen) {
  return str("Since the module was wrapped ", setup.names_of(frozen), frozen.size() == 1 ? " was" : " were",
             " frozen: wrap it again after such changes.");
}

std::size_t bytes_of(const at::Tensor& tensor) {
  return tensor.is_sparse() ? tensor._indices().nbytes() + tensor._values().nbytes() : tensor.nbytes();
}

}  // namespace

Reducer::Reducer(std::vector<at::Tensor> parameters, std::vector<ParameterInfo> infos, GroupPtr group,
                 const ReducerOptions& options)
    : setup_{.parameters = std::move(parameters), .options = options, .group = std::move(group)},
      averages_(setup_),
      intake_(setup_),
      times_(setup_.parameters.at(0).device()),
      unused_(setup_),
      static_graph_(setup_.parameters.size(), options.static_graph),
      order_(setup_.parameters.size()) {
  TORCH_INTERNAL_ASSERT(infos.size() == setup_.parameters.size(), infos.size(), " names for ", setup_.parameters.size(),
                        " parameters");
  record_.ready_times_ns.assign(setup_.parameters.size(), -1);
  if (options.recoverable) recovery_.emplace();
  if (options.plan) {
    setup_.plan = *options.plan;
    order_.set_unwanted();
  } else {
    setup_.plan = first_plan(std::move(infos), options.caps, !searches_unused());
  }
  make_buckets();
  hooks_.add(setup_.parameters, [this](std::size_t index) { autograd_hook(index); });
}

Reducer::~Reducer() = default;

void Reducer::make_buckets() {
  const auto reduce_dtype = scatter_ ? scatter_->reduce_dtype() : setup_.options.reduce_dtype;
  buckets_.clear();
  buckets_.reserve(setup_.plan.buckets().size());
  for (std::size_t i = 0; i < setup_.plan.buckets().size(); ++i) {
    buckets_.emplace_back(i, setup_.plan, setup_.parameters, reduce_dtype);
    buckets_.back().progress.gradients_missing = buckets_.back().size();
    sink().set_up(buckets_.back());
  }
}

// ---- a step ----

void Reducer::refresh_hooks() {
  const std::lock_guard lock(mutex_);
  // One that another thread runs is not over.
  if (run_.is_alive.expired()) forget_failed_run();
  hooks_.refresh();
}

void Reducer::prepare_for_forward() {
  const std::lock_guard lock(mutex_);
  times_.clear();
  times_.record(Mark::kForwardStart);
}

void Reducer::arm() {
  failed_.compare(setup_);
  // What was asked of the next reduction may have been asked before.
  step_ = Step{.is_armed = true,
               .is_ready = std::vector<bool>(setup_.parameters.size()),
               .armed_at = std::chrono::steady_clock::now(),
               .terms = {.sparse_metadata = std::move(step_.terms.sparse_metadata)},
               .divisor_source = std::move(step_.divisor_source),
               .installed_futures = std::move(step_.installed_futures)};
  record_.buckets_reduced = 0;
  static_graph_.begin_backward();
  sink().begin_backward();
  for (auto& bucket : buckets_) bucket.progress = {.gradients_missing = bucket.size()};
  times_.record(Mark::kBackwardComputeStart);
}

void Reducer::prepare_for_backward(const std::vector<at::Tensor>& outputs, const detail::PassPtr& pass) {
  const std::lock_guard lock(mutex_);
  check_prior_reduction_finished();
  record_.iteration = ++iterations_;
  arm();
  step_.is_visible = pass->is_visible;
  add_open(pass);
  if (!searches_unused()) return;
  unused_.search(outputs, hooks_.index_of_accumulator());
  pass->unused = unused_.of_step;
}

void Reducer::expect_local_backward(const detail::PassPtr& pass) {
  const std::lock_guard lock(mutex_);
  step_.is_local = true;
  add_open(pass);
}

detail::UsedMap* Reducer::used_map() {
  return static_graph_.is_on() || setup_.options.find_unused_parameters ? &unused_.used : nullptr;
}

void Reducer::mark_used(std::size_t index) {
  step_.terms.access.with_gradient(setup_.parameters[index], [&](at::Tensor& grad) {
    // Without one it was reached, but did not count towards the loss.
    if (grad.defined()) unused_.used.mark(index);
    return false;
  });
}

void Reducer::autograd_hook(std::size_t index) {
  const std::lock_guard lock(mutex_);
  begin_run();
  enter_place();
  // Marks add up over local steps: a parameter used in one of them is used.
  if (searches_unused()) mark_used(index);
  if (step_.is_armed && !is_anothers(index)) return take(index);
  const bool is_local = run_.passes.empty() ? step_.is_local : !run_.is_mine;
  if (is_local) local_.note_added();
  warn_of_local_gradient(index);
  // This backward may still come to a synced forward, whose step it then belongs to.
  run_.held.push_back(index);
}

void Reducer::take(std::size_t index) {
  join_step();
  if (c10::GradMode::is_enabled()) {
    TORCH_WARN_ONCE(setup_.who(), ": backward with create_graph: gradients are averaged, gradients of gradients are ",
                    "not.");
  }
  if (static_graph_.is_counting()) {
    mark_used(index);
    return static_graph_.count(index);
  }
  if (!step_.has_begun) {
    added_.look_at(index, setup_, step_.terms.access);
    record_.ready_order.clear();  // the last backward's
  }
  if (!std::exchange(step_.has_marked_unused, true)) {
    forget_abandoned_marks();
    // Gradients of an earlier backward in a context are looked for when no thread adds any.
    step_.marks_unused_at_end = step_.terms.access.is_in_context() || (searches_unused() && others_may_add_gradients());
    if (!step_.marks_unused_at_end) mark_unused();
  }
  if (static_graph_.is_on()) {
    const auto arrival = static_graph_.arrive(index);
    if (arrival == detail::StaticGraph::Arrival::kTooMany) {
      setup_.fail(str(setup_.who(), ": parameter '", setup_.name_of(index), "' got one gradient more than in the ",
                      "first step. The graph has changed, which static_graph does not allow. Use ",
                      "find_unused_parameters instead."));
    }
    if (arrival == detail::StaticGraph::Arrival::kPartial) return;
  }
  record_.ready_order.push_back(index);
  if (should_rebuild_buckets()) order_.add(index);
  mark_ready(index);
}

void Reducer::forget_abandoned_marks() {
  if (!searches_unused()) return;
  for (std::size_t i = 0; i < setup_.parameters.size(); ++i) {
    if (!unused_.used.is_marked(i)) continue;
    step_.terms.access.with_gradient(setup_.parameters[i], [&](at::Tensor& grad) {
      if (!grad.defined()) unused_.used.unmark(i);
      return false;
    });
  }
}

void Reducer::check_not_ready_twice(std::size_t index) {
  if (!step_.is_ready[index]) return;
  setup_.fail(str(setup_.who(), ": gradient of parameter ", index, " '", setup_.name_of(index),
                  "' came a second time in one backward. ",
                  unused_.contains(index)
                      ? "It was taken for unused, because the wrapper's outputs do not lead to it: return from "
                        "forward() everything the loss is made of. "
                      : "Causes: the parameter is used outside of the wrapper's forward(), or re-entrant backward "
                        "passes (activation checkpointing) share it. ",
                  "If the graph is the same in every step, set static_graph."));
}

void Reducer::begin_reduction() {
  if (step_.has_begun) return;
  or_give_up([&] {
    step_.divisor = step_.divisor_source ? step_.divisor_source() : static_cast<double>(setup_.group->getSize());
    if (setup_.listeners.begin) setup_.listeners.begin();
    if (step_.terms.access.is_elsewhere() && !scatter_) averages_.part_from_gradients(buckets_);
  });
  step_.has_begun = true;
  step_.terms.scale = sink().scale(step_.divisor);
  step_.terms.is_identity = sink().is_identity(step_.divisor);
}

void Reducer::mark_ready(std::size_t index) {
  check_not_ready_twice(index);
  step_.is_ready[index] = true;
  record_.ready_times_ns[index] = (std::chrono::steady_clock::now() - step_.armed_at) / std::chrono::nanoseconds(1);
  if (is_observed()) note_gradient(setup_.name_of(index));
  begin_reduction();
  const auto place = setup_.plan.place_of(index);
  auto& bucket = buckets_[place.bucket];
  attach_buffer(bucket);
  intake_.take(bucket, place.index, step_.terms, sink());
  const bool is_full = --bucket.progress.gradients_missing == 0;
  if (is_full) launch_ready_buckets();
  if (averages_.has_consumer() && !c10::GradMode::is_enabled()) {
    or_give_up([&] { sink().use_arrived(buckets_, step_.next_bucket, used_map()); });
  }
  if (is_full && step_.next_bucket == buckets_.size()) queue_finish();
}

void Reducer::attach_buffer(detail::Bucket& bucket) {
  // To have one it may have to wait for a reduction, which may fail.
  or_give_up([&] { sink().attach_buffer(bucket); });
}

void Reducer::queue_finish() {
  if (searches_unused()) {
    for (const auto unused : unused_.of_step) {
      step_.terms.access.with_gradient(setup_.parameters[unused], [&](at::Tensor& grad) {
        if (grad.defined()) unused_.used.mark_kept(unused);
        return false;
      });
    }
    or_put_off([&] { unused_.used.launch(setup_.group); });
  }
  torch::autograd::Engine::get_default_engine().queue_callback([self = weak_from_this()] {
    const auto reducer = self.lock();
    if (!reducer) return;
    const std::lock_guard lock(reducer->mutex_);
    reducer->times_.record(Mark::kBackwardComputeEnd);
    reducer->step_.terms.access.settle();
    reducer->finish_backward();
  });
}

void Reducer::launch_ready_buckets() {
  // In plan order, not in the order they fill: all ranks must issue the same sequence.
  while (step_.next_bucket < buckets_.size() && buckets_[step_.next_bucket].progress.gradients_missing == 0) {
    launch(buckets_[step_.next_bucket++]);
  }
}

void Reducer::launch(detail::Bucket& bucket) {
  intake_.copy_deferred(bucket, step_.terms);
  const auto& members = setup_.plan.buckets()[bucket.index()].parameters;
  if (setup_.options.skip_all_reduce_unused_params &&
      std::all_of(members.begin(), members.end(), [&](std::size_t index) { return unused_.contains(index); })) {
    bucket.progress.is_skipped = true;
    return;
  }
  if (!times_.stamp(Mark::kBackwardCommStart)) times_.record(Mark::kBackwardCommStart);
  detail::note_bucket(bucket, "launch", bytes_of(bucket.buffer()));
  ++record_.buckets_reduced;
  bucket.progress.is_launched = true;
  const LabelScope label({setup_.options.label, static_cast<int>(bucket.index())});
  or_put_off([&] { detail::with_advice([&] { sink().launch(bucket); }, setup_.listeners.advice); });
}

template <class Action>
void Reducer::or_put_off(const Action& action) {
  if (!recovery_) return or_give_up(action);
  if (recovery_->has_put_off()) return;
  or_give_up([&] {
    try {
      action();
    } catch (...) {
      if (!recovery_->puts_off(std::current_exception())) throw;
    }
  });
}

// ---- the end of a backward ----

void Reducer::finish_backward() {
  const at::NoGradGuard no_grad;
  TORCH_INTERNAL_ASSERT(step_.next_bucket == buckets_.size());
  or_give_up([&] {
    if (recovery_) {
      recovery_->set_gives_zeros(step_.gives_zeros);
      recovery_->begin_end(left_if_it_fails());
    }
    wait_for_all();
    if (recovery_) vote_to_end();
    sink().write(buckets_, used_map(), step_.terms);
    if (step_.is_mirrored && searches_unused() && !scatter_) write_kept_gradients();
    unused_.used.finish();
    if (setup_.listeners.finish) setup_.listeners.finish();
  });
  local_.forget();
  if (searches_unused()) unused_.used.clear();
  for (const auto& pass : step_.passes) pass->is_reduced = true;
  added_.note_averages(setup_, step_.terms.access);
  if (recovery_) recovery_->end();
  end_step();
  times_.record(Mark::kBackwardCommEnd);
}

void Reducer::write_kept_gradients() {
  for (const auto& bucket : buckets_) {
    for (std::size_t place = 0; !bucket.is_sparse() && place < bucket.size(); ++place) {
      const auto index = bucket.parameter_index(place);
      const auto ranks = unused_.used.is_used(index) ? 0 : unused_.used.kept_by(index);
      if (ranks == 0) continue;
      step_.terms.access.with_gradient(bucket.parameter(place), [&](at::Tensor& grad) {
        if (grad.defined()) return false;
        // In the bucket is the sum of what they have, which is the same on all of them, divided as gradients are.
        const auto sum = averages_.reduced_gradients(bucket)[place];
        grad = sum.mul(step_.divisor / ranks).to(setup_.plan.parameters()[index].dtype);
        return true;
      });
    }
  }
}

void Reducer::wait_for_all() {
  for (auto& bucket : buckets_) {
    if (bucket.progress.is_skipped) continue;
    detail::with_advice([&] { sink().wait_for(bucket); }, setup_.listeners.advice);
  }
  for (const auto& future : step_.installed_futures) {
    future->wait();
    if (future->hasError()) std::rethrow_exception(future->exception_ptr());
  }
  unused_.used.wait();
}

template <class Action>
void Reducer::or_give_up(const Action& action) {
  try {
    action();
  } catch (const std::exception& error) {
    give_up();
    const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
    const auto& tell = setup_.listeners.error;
    if (tell) tell(torch_error != nullptr ? torch_error->what_without_backtrace() : error.what());
    throw;
  }
}

void Reducer::give_up() {
  if (step_.has_begun) {
    const auto launched =
        std::count_if(buckets_.begin(), buckets_.end(), [](const auto& bucket) { return bucket.progress.is_launched; });
    failed_.note(static_cast<std::size_t>(launched), averages_.has_consumer());
    sink().give_up(buckets_, step_.terms);
    if (searches_unused() || static_graph_.shares_marks_now()) unused_.used.give_up();
  }
  static_graph_.give_up();
  end_step();
}

/// What is left of a step must not meet the next.
void Reducer::end_step() {
  step_ = Step{};
  for (auto& bucket : buckets_) bucket.progress = {};
}

void Reducer::reduce_counted(const Run& run) {
  if (!step_.is_armed) return;
  const bool has_gradients = static_graph_.has_counted_any();
  // A backward inside of another may come before the other's outputs, and autograd::grad() brings no gradients.
  if (step_.is_visible ? !run.is_mine || (!has_gradients && detail::is_partial_backward()) : !has_gradients) return;
  unused_.of_step = static_graph_.unused();
  if (c10d::debug_level() != c10d::DebugLevel::Off && !unused_.of_step.empty()) {
    LOG(INFO) << setup_.who()
              << ": static graph: parameters without gradients in the first step: " << setup_.names_of(unused_.of_step);
  }
  // Nothing tells which context it is if this rank has used nothing.
  if (!run.access && detail::is_context_backward()) step_.terms.access = detail::GradientAccess::nowhere();
  begin_reduction();
  // If others counted while this rank had no inputs, they know already what is used.
  if (static_graph_.must_share_marks()) or_give_up([&] { unused_.used.launch(setup_.group); });
  times_.record(Mark::kBackwardComputeEnd);
  for (auto& bucket : buckets_) {
    attach_buffer(bucket);
    for (std::size_t place = 0; place < bucket.size(); ++place) intake_.take(bucket, place, step_.terms, sink());
    bucket.progress.gradients_missing = 0;
    launch_ready_buckets();
  }
  const bool is_first_of_all = static_graph_.shares_marks_now();
  finish_backward();
  static_graph_.end_counting();
  // Ranks that counted before have an order from this backward, and rebuild.
  if (!is_first_of_all && should_rebuild_buckets() && order_.is_empty()) order_.fill();
}

bool Reducer::has_leftovers() const {
  const std::lock_guard lock(mutex_);
  return local_.are_waiting(setup_.parameters);
}

void Reducer::forget_leftovers() {
  const std::lock_guard lock(mutex_);
  local_.forget();
}

void Reducer::launch_all_buckets() {
  for (auto& bucket : buckets_) {
    attach_buffer(bucket);
    step_.gives_zeros ? intake_.take_zeros(bucket, step_.terms, sink())
                      : intake_.take_leftovers(bucket, step_.terms, sink());
    bucket.progress.gradients_missing = 0;
    launch_ready_buckets();
  }
}

void Reducer::mirror_backward(bool leaves_grad) {
  const bool gives_leftovers = has_leftovers();
  const std::lock_guard lock(mutex_);
  check_prior_reduction_finished();
  const at::NoGradGuard no_grad;
  record_.iteration = ++iterations_;
  arm();
  step_.is_mirrored = true;
  step_.gives_zeros = !gives_leftovers;
  if (gives_leftovers) {
    step_.terms.access = local_.access();
  } else if (leaves_grad) {
    step_.terms.access = detail::GradientAccess::nowhere();
  }
  step_.terms.access.settle();
  begin_reduction();
  const bool is_first_of_static_graph = static_graph_.is_counting() && static_graph_.must_share_marks();
  if (is_first_of_static_graph) or_give_up([&] { unused_.used.launch(setup_.group); });
  if (searches_unused() && !gives_leftovers) unused_.used.clear();
  launch_all_buckets();
  if (searches_unused()) or_give_up([&] { unused_.used.launch(setup_.group); });
  finish_backward();
  // Ranks with inputs have an order now, and rebuild; a static graph has one from the second step.
  if (!is_first_of_static_graph && should_rebuild_buckets() && order_.is_empty()) order_.fill();
}

// ---- what must be finished before the next step ----

void Reducer::check_finalized() {
  const std::lock_guard lock(mutex_);
  check_prior_reduction_finished();
}

void Reducer::check_prior_reduction_finished() {
  failed_.check_not_stepped(setup_);
  forget_failed_run();
  if (!step_.has_begun) return;
  std::vector<std::size_t> missing;
  std::vector<std::size_t> frozen;
  for (std::size_t i = 0; i < step_.is_ready.size(); ++i) {
    if (step_.is_ready[i]) continue;
    missing.push_back(i);
    if (!setup_.parameters[i].requires_grad()) frozen.push_back(i);
  }
  std::string remedy;
  if (missing.empty()) {
    remedy = "This forward runs inside of that backward: run it before or after.";
  } else if (!frozen.empty()) {
    remedy = remedy_for_frozen(setup_, frozen);
  } else if (static_graph_.is_on()) {
    remedy =
        "static_graph promises that every step uses the parameters the first one used: this one did not. "
        "Turn it off and set find_unused_parameters.";
  } else if (!setup_.options.find_unused_parameters) {
    remedy = "Use them in forward() and let them reach the loss, or set find_unused_parameters.";
  } else {
    remedy =
        "find_unused_parameters is on, but forward() returned something the search could not look into, or the "
        "loss left out what it returned in a way the search cannot see: return tensors, containers of tensors or "
        "a type with for_each_tensor().";
  }
  const auto what = missing.empty() ? std::string("its backward is still under way")
                                    : str(missing.size() == 1 ? "parameter " : "parameters ", setup_.names_of(missing),
                                          " (", join(missing, ", "), ") got no gradient");
  setup_.fail(str(setup_.who(), ": the last step's reduction is unfinished: ", what, ". ", remedy));
}

void Reducer::check_none_frozen() const {
  const std::lock_guard lock(mutex_);
  if (searches_unused() || static_graph_.is_counting()) return;
  std::vector<std::size_t> frozen;
  for (std::size_t i = 0; i < setup_.parameters.size(); ++i) {
    if (!setup_.parameters[i].requires_grad()) frozen.push_back(i);
  }
  if (frozen.empty() || frozen.size() == setup_.parameters.size()) return;
  // A static graph waits for none that had no gradient when it counted.
  std::erase_if(frozen, [&](std::size_t index) { return static_graph_.is_on() && unused_.contains(index); });
  if (frozen.empty()) return;
  setup_.fail(str(setup_.who(), ": ", frozen.size() == 1 ? "parameter " : "parameters ", setup_.names_of(frozen), " (",
                  join(frozen, ", "), ") will get no gradient, and the step's reduction could not be finished. ",
                  remedy_for_frozen(setup_, frozen)));
}

void Reducer::reset_state() {
  const std::lock_guard lock(mutex_);
  give_up();
  failed_.forget_launched();
  // Nobody will finish these; the group they were made on may be gone.
  unused_.used.give_up();
  if (static_graph_.is_on()) unused_.of_step.clear();  // a search replaces them
  static_graph_.reset();
  record_.ready_order.clear();
  order_.clear();
}

void Reducer::update_process_group(GroupPtr group) {
  TORCH_CHECK(!scatter_, setup_.who(), ": the group cannot be replaced: ", hook_slot_taken_by());
  reset_state();
  const std::lock_guard lock(mutex_);
  setup_.group = std::move(group);
  order_.want_again();
  // In memory that the new group's ranks can reach.
  make_buckets();
}

// ---- buckets in the order gradients come ----

void Reducer::take_plan_of_first_rank(const BucketPlan& mine) {
  setup_.plan = BucketPlan::load(broadcast_object(mine.save(), 0, setup_.group), setup_.plan.parameters());
  make_buckets();
}

bool Reducer::should_rebuild_buckets() const {
  return order_.is_wanted() && !searches_unused();
}

bool Reducer::rebuild_buckets() {
  const std::lock_guard lock(mutex_);
  check_prior_reduction_finished();
  if (!should_rebuild_buckets() || order_.is_empty()) return false;
  const bool has_small_last = env("DDP_SET_LAST_BUCKET_CAP").value_or("0") == "1";
  // Parameters that a static graph never uses come last.
  const auto mine = rebuilt_plan(setup_.plan.parameters(), setup_.options.caps, order_.complete(), has_small_last);
  const LabelScope label({"DDP's new buckets"});
  // Gradients may come in another order elsewhere.
  take_plan_of_first_rank(mine);
  order_.set_used();
  if (c10d::debug_level() != c10d::DebugLevel::Off) {
    LOG(INFO) << setup_.who() << ": buckets were rebuilt:\n" << setup_.plan.to_string();
  }
  return true;
}

}  // namespace lockstep
