// Streams and events of a pretended accelerator, which notes what is asked of it: for code that orders streams, where
// there is no accelerator.
#pragma once

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/str.h"

namespace lockstep {

using Notes = std::vector<std::string>;

/// Streams and events for meta tensors.
class NotedStreams final : public c10::impl::NoOpDeviceGuardImpl<c10::kMeta> {
 public:
  static c10::Stream stream(c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kMeta, -1), id);
  }

  c10::Stream getStream(c10::Device /*device*/) const noexcept override { return stream(current); }
  c10::Stream exchangeStream(c10::Stream next) const noexcept override {
    return stream(std::exchange(current, next.id()));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device /*device*/, bool /*is_high_priority*/) const override {
    return stream(next_pooled++);
  }
  void record(void** event, const c10::Stream& on, c10::DeviceIndex /*device*/,
              c10::EventFlag /*flag*/) const override {
    // NOLINTNEXTLINE(performance-no-int-to-ptr): an event is a number here
    *event = reinterpret_cast<void*>(++events);
    notes.push_back(str("event ", events, " on stream ", on.id()));
  }
  void block(void* event, const c10::Stream& waiting) const override {
    notes.push_back(str("stream ", waiting.id(), " waits for event ", reinterpret_cast<std::uintptr_t>(event)));
  }
  bool queryEvent(void* /*event*/) const override { return is_finished; }
  void recordDataPtrOnStream(const c10::DataPtr& /*memory*/, const c10::Stream& user) const override {
    notes.push_back(str("memory is used on stream ", user.id()));
  }

  mutable c10::StreamId current = 0;
  mutable c10::StreamId next_pooled = 100;
  mutable std::uintptr_t events = 0;
  mutable Notes notes;
  bool is_finished = false;
};

/// Meta tensors have them while a test runs.
class NotedStreamsTest : public ::testing::Test {
 protected:
  void SetUp() override { c10::impl::DeviceGuardImplRegistrar(c10::kMeta, &streams_); }
  void TearDown() override { c10::impl::DeviceGuardImplRegistrar(c10::kMeta, before_); }

  Notes notes() { return std::exchange(streams_.notes, {}); }

  const c10::impl::DeviceGuardImplInterface* before_ = c10::impl::getDeviceGuardImpl(c10::kMeta);
  NotedStreams streams_;
};

}  // namespace lockstep
