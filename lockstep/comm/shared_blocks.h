// A block of memory from each rank of a group on one host, which all of them read where it is.
//
//   const auto blocks = SharedBlocks::make({.bytes = 8192, .pieces = {{0, 4096}}}, group);   // collective
//   blocks->launch_publish(mine).wait();                // mine is in my block, and theirs in theirs
//   blocks->side_by_side(0);                            // bytes 0 to 4095 of rank 0's, of rank 1's, …: nothing was
//   copied
//
// Publishing waits until all ranks have come to it, so nobody writes to a block while another reads what was there
// before: a rank comes when it reads no more.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/agreement.h"
#include "lockstep/comm/pending.h"
#include "lockstep/shm/side_by_side.h"

namespace lockstep {

namespace shm {
class Pool;
class Team;
}  // namespace shm

class SharedBlocks {
 public:
  struct Piece {
    std::size_t offset = 0;
    std::size_t bytes = 0;
  };
  struct Plan {
    std::size_t bytes = 0;
    /// What is wanted side by side; each of whole pages.
    std::vector<Piece> pieces = {};
    /// What the blocks hold, for errors; compared like the rest.
    std::string what = {};
    Facts contents = {};
  };

  /// Whether the ranks of the group are processes of one host that share memory. Local. Rank threads do not count, who
  /// have one memory anyway, unless LOCKSTEP_SHARE_AMONG_THREADS is 1: so that tests of threads see what processes do.
  static bool are_possible(const GroupPtr& group);
  static bool is_piece(std::size_t offset, std::size_t bytes) { return shm::SideBySide::fits(offset, bytes); }

  /// Null on all ranks if one of them cannot. Collective; ranks whose plans differ are told by the first difference.
  /// REQUIRES: are_possible().
  static std::shared_ptr<SharedBlocks> make(const Plan& plan, const GroupPtr& group);
  ~SharedBlocks();
  SharedBlocks(const SharedBlocks&) = delete;
  SharedBlocks& operator=(const SharedBlocks&) = delete;

  /// Copies `source`, contiguous and as long as the block, into my block once all ranks have come; done when all have
  /// copied. Collective.
  [[nodiscard]] Pending launch_publish(const at::Tensor& source) const;

  const std::byte* block_of(int rank) const { return blocks_[static_cast<std::size_t>(rank)]; }
  /// Piece `index` of all ranks' blocks, one behind the other. Must not be written to.
  std::byte* side_by_side(std::size_t index) const { return const_cast<std::byte*>(pieces_[index].data()); }

 private:
  struct Front;  // the first page of every block
  struct Block;
  struct Retired;
  SharedBlocks(GroupPtr group, std::size_t bytes);
  static void free_unread();
  void meet();
  void map(const std::vector<Piece>& pieces);

  const GroupPtr group_;
  const std::shared_ptr<shm::Team> team_;  // null among threads
  const std::size_t bytes_;
  std::shared_ptr<Block> mine_;
  std::vector<std::byte*> blocks_;  // by rank, behind the fronts
  std::vector<shm::SideBySide> pieces_;
};

}  // namespace lockstep
