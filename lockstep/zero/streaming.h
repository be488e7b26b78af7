// State of a ZeroOptimizer that is too large to be sent or held at once: collected in chunks, in memory or in a file,
// or written by every rank for itself. Files load at any number of ranks and under any division. Parameters are known
// by name where saver and loader know names (ZeroOptions::parameter_names, or those of DDP), so that their order may
// differ within a group; else by position, with a warning where the file has names and the loader none.
//
// A save is an index, at the path that was given, and parts beside it, with the save's number in their names:
// `path`.<number>.part0, … The index is written last, in place of the one before, and only then the parts before are
// removed: a save that fails or is cut off leaves the last one as it was. Parts that a crash has left are nobody's.
#pragma once

#include <cstdint>
#include <string>

namespace lockstep {

class ZeroOptimizer;

struct StreamOptions {
  /// Group rank that collects.
  int to = 0;
  /// At most so many bytes of tensors are held on any rank for passing them on.
  int64_t max_bytes = 16 << 20;
};

/// As ZeroOptimizer::consolidate_state_dict(), in chunks. Collective and blocking.
void consolidate_in_chunks(ZeroOptimizer& optimizer, const StreamOptions& options = {});

/// Writes all state to one part on rank `to`, in chunks, without ever holding it there. Collective and blocking. If the
/// file cannot be written, all ranks throw.
void save_in_chunks(ZeroOptimizer& optimizer, const std::string& path, const StreamOptions& options = {});

/// Every rank writes its own part, and rank 0 the index. All ranks must see the same folder when they load. Collective
/// and blocking. If a file cannot be written, all ranks throw, naming it.
void save_sharded(ZeroOptimizer& optimizer, const std::string& path);

/// Reads what a save above wrote: options, and this rank's shard of the state and no more. Local, to be called on all
/// ranks. Throws if something is missing or does not fit, having changed nothing.
void load_sharded(ZeroOptimizer& optimizer, const std::string& path);

}  // namespace lockstep
