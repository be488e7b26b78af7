// Buffers that go from hand to hand, on the CPU and on a device whose streams are only pretended.
#include "lockstep/shard/buffer_pool.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include "lockstep/base/str.h"
#include "lockstep/comm/fake/fake_backend.h"
#include "lockstep/testing/gtest.h"

namespace lockstep {
namespace {

using detail::BufferPool;

constexpr auto kPretend = c10::DeviceType::PrivateUse1;
const auto kNoRoom = [] { return false; };

/// What the pool asked of the device, and the stream that is current.
std::vector<std::string> asked;
c10::StreamId current = 0;
std::intptr_t events = 0;

struct PretendGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kPretend; }
  c10::Device exchangeDevice(c10::Device device) const override { return device; }
  c10::Device getDevice() const override { return {kPretend, 0}; }
  void setDevice(c10::Device /*device*/) const override {}
  void uncheckedSetDevice(c10::Device /*device*/) const noexcept override {}
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::UNSAFE, device, current); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex /*index*/,
              const c10::EventFlag /*flag*/) const override {
    *event = reinterpret_cast<void*>(++events);
    asked.push_back(str("record ", events, " on stream ", stream.id()));
  }
  void block(void* event, const c10::Stream& stream) const override {
    asked.push_back(str("stream ", stream.id(), " waits for ", reinterpret_cast<std::intptr_t>(event)));
  }
  void destroyEvent(void* /*event*/, const c10::DeviceIndex /*index*/) const noexcept override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, PretendGuard)

/// Memory of the pretended device.
struct PretendAllocator final : c10::Allocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    void* const memory = c10::GetCPUAllocator()->raw_allocate(bytes);
    return {memory, memory, [](void* each) { c10::GetCPUAllocator()->raw_deallocate(each); }, {kPretend, 0}};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};

at::Tensor pretended_empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                           std::optional<at::Layout> /*layout*/, std::optional<at::Device> /*device*/,
                           std::optional<bool> /*pinned*/, std::optional<at::MemoryFormat> /*format*/) {
  static PretendAllocator allocator;
  return at::detail::empty_generic(sizes, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   dtype.value_or(at::kFloat), std::nullopt);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", pretended_empty);
}

TEST(BufferPool, GivesAReleasedBufferAgain) {
  BufferPool pool(8, make_fake_group(0, 2).group);
  const auto options = at::TensorOptions(at::kFloat);
  auto first = pool.acquire(options, kNoRoom);
  const auto* const memory = first.const_data_ptr();
  pool.release(std::move(first));
  EXPECT_EQ(pool.acquire(options, kNoRoom).const_data_ptr(), memory);
  EXPECT_EQ(pool.bytes(), 32);
  EXPECT_EQ(pool.acquire(at::kDouble, kNoRoom).scalar_type(), at::kDouble) << "another dtype is another buffer";
  EXPECT_EQ(pool.bytes(), 96);
  pool.forget();
  EXPECT_EQ(pool.bytes(), 0);
}

TEST(BufferPool, AsksForRoomBeforeItMakesAThird) {
  BufferPool pool(8, make_fake_group(0, 2).group);
  const auto options = at::TensorOptions(at::kFloat);
  auto first = pool.acquire(options, kNoRoom);
  const auto second = pool.acquire(options, kNoRoom);
  const auto* const memory = first.const_data_ptr();
  const auto third = pool.acquire(options, [&] {
    pool.release(std::move(first));
    return true;
  });
  EXPECT_EQ(third.const_data_ptr(), memory);
  EXPECT_EQ(pool.bytes(), 64);
}

TEST(BufferPool, OnTheCpuThereAreNoEvents) {
  asked.clear();
  BufferPool pool(8, make_fake_group(0, 2).group);
  pool.release(pool.acquire(at::kFloat, kNoRoom));
  pool.acquire(at::kFloat, kNoRoom);
  EXPECT_TRUE(asked.empty());
}

TEST(BufferPool, TheNextStreamWaitsForTheLastOne) {
  asked.clear();
  events = 0;
  BufferPool pool(8, make_fake_group(0, 2).group);
  const auto options = at::TensorOptions(at::kFloat).device(at::Device(kPretend, 0));
  current = 3;
  auto first = pool.acquire(options, kNoRoom);
  auto second = pool.acquire(options, kNoRoom);
  EXPECT_TRUE(asked.empty()) << "new memory was used by nobody";
  current = 5;
  const auto* const memory = std::min(first.const_data_ptr(), second.const_data_ptr());
  const bool first_is_lower = first.const_data_ptr() == memory;
  pool.release(std::move(first));
  pool.release(std::move(second));
  EXPECT_EQ(asked, (std::vector<std::string>{"record 1 on stream 5", "record 2 on stream 5"}));
  asked.clear();
  current = 7;
  EXPECT_EQ(pool.acquire(options, kNoRoom).const_data_ptr(), memory);
  EXPECT_EQ(asked, std::vector<std::string>{first_is_lower ? "stream 7 waits for 1" : "stream 7 waits for 2"});
}

}  // namespace
}  // namespace lockstep
