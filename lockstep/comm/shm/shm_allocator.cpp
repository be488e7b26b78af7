#include "lockstep/comm/shm/shm_allocator.h"

#include <c10/core/CPUAllocator.h>

#include <cstring>
#include <mutex>
#include <vector>

#include "lockstep/shm/errors.h"
#include "lockstep/shm/pool.h"

namespace lockstep::detail {
namespace {

/// One tensor's memory.
struct Block {
  std::shared_ptr<shm::Pool> pool;
  std::byte* at;
};

void free_block(void* context) {
  const std::unique_ptr<Block> block(static_cast<Block*>(context));
  block->pool->free(block->at);
}

/// Never destroyed: a tensor that can grow keeps a bare pointer to it.
class ShmAllocator final : public c10::Allocator {
 public:
  explicit ShmAllocator(const shm::Team& team) : pool_(team.pool()), who_(team.seat().who()) {}

  bool serves(const shm::Team& team) const { return pool_.lock() == team.pool() && who_ == team.seat().who(); }

  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::Device(c10::kCPU)};
    const auto pool = pool_.lock();
    // A tensor grew after all its groups are gone: nobody is left to share it with.
    if (!pool) return c10::GetCPUAllocator()->allocate(bytes);
    std::byte* at = nullptr;
    try {
      at = pool->allocate(bytes, who_);
    } catch (const shm::MemoryError& error) {
      TORCH_CHECK_WITH(OutOfMemoryError, false, error.what());
    }
    return {at, new Block{pool, at}, &free_block, c10::Device(c10::kCPU)};
  }

  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }

 private:
  const std::weak_ptr<shm::Pool> pool_;
  const std::string who_;
};

}  // namespace

c10::Allocator* shm_allocator(const shm::Team& team) {
  if (!team.pool()) return c10::GetCPUAllocator();
  static std::mutex mutex;
  static auto& all = *new std::vector<std::unique_ptr<ShmAllocator>>();
  const std::lock_guard lock(mutex);
  for (const auto& each : all) {
    if (each->serves(team)) return each.get();
  }
  return all.emplace_back(std::make_unique<ShmAllocator>(team)).get();
}

}  // namespace lockstep::detail
