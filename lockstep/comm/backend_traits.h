// What launch() must know of a backend beyond c10d's interface. Kept by the registry, looked up once for each group and
// device: nobody compares names of backends.
//
// The defaults describe a backend that can do everything; a backend of your own states what it cannot do when it is
// registered (backend_registry.h), or in CallBackend::traits().
#pragma once

namespace lockstep {

struct BackendTraits {
  /// Knows ReduceOp::AVG. Otherwise it is asked for sums, which are divided afterwards.
  bool averages = true;
  /// Takes a call with several tensors. Otherwise it is asked once for each.
  bool coalesces = true;
  /// Its works of reduce-scatter have futures. Otherwise such a call can only be waited for.
  bool has_reduce_scatter_futures = true;
  /// Its errors name the ranks that are missing. Otherwise waiting ranks look into the store for others that gave up,
  /// and survivors find out there who did not (docs/comm.md, "Who is missing").
  bool names_missing_ranks = true;
  /// Ranks whose calls do not match all get an error that says so. Otherwise they may hang, abort or mix values, and
  /// whoever is about to make a call that others may leave out has to meet() them first.
  bool compares_calls = true;
  /// Threads of a process may start calls at the same time, also of different groups. Otherwise one starts at a time.
  bool starts_concurrently = true;
  /// A call that is not async runs on the current stream of its tensors' device, and the host does not wait. Such a
  /// backend gets a stream of the group's own (docs/comm.md, "Streams").
  bool runs_on_current_stream = false;
  /// A group of one rank need not ask it: it would do nothing that can be seen.
  bool is_idle_alone = false;
};

}  // namespace lockstep
