#include "lockstep/comm/shared_blocks.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>

#include <mutex>
#include <new>
#include <utility>

#include "lockstep/base/env.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/shm/shm_backend.h"
#include "lockstep/comm/threads/thread_backend.h"
#include "lockstep/shm/errors.h"
#include "lockstep/shm/lifeline.h"
#include "lockstep/shm/process.h"

namespace lockstep {
namespace {

constexpr std::size_t kFrontBytes = 4096;

enum class Kind { kNone, kThreads, kProcesses };

Kind kind_of(const GroupPtr& group) {
  if (!serves_device(group, at::kCPU)) return Kind::kNone;
  const auto* backend = group->getBackend(at::kCPU).get();
  const auto* shm = dynamic_cast<const detail::ShmBackend*>(backend);
  if (shm != nullptr && !shm->team()->shares_address_space()) return Kind::kProcesses;
  const bool are_threads = shm != nullptr || dynamic_cast<const ThreadBackend*>(backend) != nullptr;
  return are_threads && env("LOCKSTEP_SHARE_AMONG_THREADS").value_or("0") == "1" ? Kind::kThreads : Kind::kNone;
}

std::shared_ptr<shm::Team> team_of(const GroupPtr& group) {
  if (kind_of(group) != Kind::kProcesses) return nullptr;
  return dynamic_cast<const detail::ShmBackend&>(*group->getBackend(at::kCPU)).team();
}

std::shared_ptr<shm::Pool> pool_of(const std::shared_ptr<shm::Team>& team, int ranks) {
  if (team) return team->pool();
  const auto process = shm::OwnProcess::get(ranks);
  return {process, &process->pool()};
}

/// One number from every rank.
std::vector<int64_t> exchanged(int64_t number, const GroupPtr& group) {
  const auto mine = at::full({1}, number, at::kLong);
  const auto all = at::empty({group->getSize()}, at::kLong);
  all_gather_into_tensor(all, mine, group);
  return {all.const_data_ptr<int64_t>(), all.const_data_ptr<int64_t>() + all.numel()};
}

}  // namespace

struct SharedBlocks::Front {
  std::atomic<std::int64_t> readers = 0;  // ranks that have it mapped
  static_assert(std::atomic<std::int64_t>::is_always_lock_free);
};

struct SharedBlocks::Block {
  Block(std::shared_ptr<shm::Pool> from, std::size_t bytes)
      : pool(std::move(from)), at(pool->allocate(kFrontBytes + bytes)), front(*new(at) Front()) {}
  ~Block() { pool->free(at); }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  const std::shared_ptr<shm::Pool> pool;
  std::byte* const at;
  Front& front;
  const int home = shm::fork_generation();
};

bool SharedBlocks::are_possible(const GroupPtr& group) {
  return kind_of(group) != Kind::kNone;
}

std::shared_ptr<SharedBlocks> SharedBlocks::make(const Plan& plan, const GroupPtr& group) {
  free_unread();
  auto facts = plan.contents;
  facts.emplace_back("bytes", std::to_string(plan.bytes));
  check_same_on_all_ranks(plan.what, facts, group);
  const std::shared_ptr<SharedBlocks> blocks(new SharedBlocks(group, plan.bytes));
  blocks->meet();
  bool is_mapped = true;
  try {
    blocks->map(plan.pieces);
  } catch (const shm::MemoryError& error) {
    TORCH_WARN(error.what(), ". What other ranks show is copied instead.");
    is_mapped = false;
  }
  for (const auto each : exchanged(is_mapped ? 1 : 0, group)) is_mapped = is_mapped && each == 1;
  return is_mapped ? blocks : nullptr;
}

SharedBlocks::SharedBlocks(GroupPtr group, std::size_t bytes)
    : group_(std::move(group)),
      team_(team_of(group_)),
      bytes_(bytes),
      mine_(std::make_shared<Block>(pool_of(team_, group_->getSize()), bytes)) {}

/// Every rank learns where the blocks are, and notes in their fronts that it reads them.
void SharedBlocks::meet() {
  const auto place =
      team_ ? team_->locate(mine_->at, kFrontBytes + bytes_) : reinterpret_cast<std::uintptr_t>(mine_->at);
  TORCH_INTERNAL_ASSERT(place.has_value());
  const auto places = exchanged(static_cast<int64_t>(*place), group_);
  for (int rank = 0; rank < group_->getSize(); ++rank) {
    const auto number = static_cast<std::uint64_t>(places[static_cast<std::size_t>(rank)]);
    // NOLINTNEXTLINE(performance-no-int-to-ptr): it was a pointer of this process
    auto* front = team_ ? team_->resolve(rank, number) : reinterpret_cast<std::byte*>(number);
    reinterpret_cast<Front*>(front)->readers.fetch_add(1, std::memory_order_relaxed);
    blocks_.push_back(front + kFrontBytes);
  }
}

void SharedBlocks::map(const std::vector<Piece>& pieces) {
  for (const auto& piece : pieces) {
    std::vector<shm::Span> spans;
    for (auto* block : blocks_) spans.push_back({block + piece.offset, piece.bytes});
    pieces_.emplace_back(spans);
  }
}

/// Blocks whose owner is done with them while other ranks are not: their memory must not serve another purpose yet.
struct SharedBlocks::Retired {
  std::mutex mutex;
  std::vector<std::shared_ptr<Block>> blocks;

  static Retired& all() {
    static auto& list = *new Retired();
    return list;
  }
};

SharedBlocks::~SharedBlocks() {
  if (mine_->home != shm::fork_generation()) return;
  pieces_.clear();
  for (auto* block : blocks_) {
    reinterpret_cast<Front*>(block - kFrontBytes)->readers.fetch_sub(1, std::memory_order_release);
  }
  {
    auto& retired = Retired::all();
    const std::lock_guard lock(retired.mutex);
    retired.blocks.push_back(std::move(mine_));
  }
  free_unread();
}

void SharedBlocks::free_unread() {
  auto& retired = Retired::all();
  const std::lock_guard lock(retired.mutex);
  std::erase_if(retired.blocks,
                [](const auto& block) { return block->front.readers.load(std::memory_order_acquire) == 0; });
}

Pending SharedBlocks::launch_publish(const at::Tensor& source) const {
  TORCH_CHECK(source.is_contiguous() && source.nbytes() == bytes_, "a block of ", bytes_, " bytes was asked to hold ",
              source.nbytes());
  const auto own = at::from_blob(
      mine_->at + kFrontBytes, {source.numel()}, [block = mine_](void*) {}, at::TensorOptions(source.scalar_type()));
  // All to myself: what counts is who is there when.
  std::vector<int64_t> splits(static_cast<std::size_t>(group_->getSize()), 0);
  splits[static_cast<std::size_t>(group_->getRank())] = source.numel();
  Call call{.kind = CallKind::kAllToAllSingle,
            .inputs = {source},
            .outputs = {own},
            .input_splits = splits,
            .output_splits = splits,
            .ends_together = true};
  return launch(std::move(call), group_);
}

}  // namespace lockstep
