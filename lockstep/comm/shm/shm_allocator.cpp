#include "lockstep/comm/shm/shm_allocator.h"

#include <c10/core/CPUAllocator.h>

#include <cstring>

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

class ShmAllocator final : public c10::Allocator {
 public:
  explicit ShmAllocator(const shm::Team& team) : pool_(team.pool()), who_(team.seat().who()) {}

  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::Device(c10::kCPU)};
    std::byte* at = nullptr;
    try {
      at = pool_->allocate(bytes, who_);
    } catch (const shm::MemoryError& error) {
      TORCH_CHECK_WITH(OutOfMemoryError, false, error.what());
    }
    return {at, new Block{pool_, at}, &free_block, c10::Device(c10::kCPU)};
  }

  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }

 private:
  const std::shared_ptr<shm::Pool> pool_;
  const std::string who_;
};

/// The process's own, behind an owner that does not free it.
std::shared_ptr<c10::Allocator> ordinary_allocator() {
  return {c10::GetCPUAllocator(), [](c10::Allocator*) {}};
}

}  // namespace

std::shared_ptr<c10::Allocator> make_shm_allocator(const shm::Team& team) {
  if (!team.pool()) return ordinary_allocator();
  return std::make_shared<ShmAllocator>(team);
}

}  // namespace lockstep::detail
