// send and recv over the shm backend, for ranks as threads and as processes.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "lockstep/lockstep.h"

namespace lockstep::shm_messages {

inline c10::intrusive_ptr<c10d::Backend> backend_of(const World& world) {
  return world.group()->getBackend(at::kCPU);
}

inline c10::intrusive_ptr<c10d::Work> send(const World& world, const at::Tensor& tensor, int to, int tag = 0) {
  std::vector<at::Tensor> tensors = {tensor};
  return backend_of(world)->send(tensors, to, tag);
}

inline c10::intrusive_ptr<c10d::Work> receive(const World& world, const at::Tensor& tensor, int from, int tag = 0) {
  std::vector<at::Tensor> tensors = {tensor};
  return backend_of(world)->recv(tensors, from, tag);
}

/// Everybody sends to everybody at once, more than the channels hold, before anybody receives.
inline void check_exchange(const World& world) {
  const int ranks = world.world_size();
  for (const int64_t size : {0, 1, 16384, 300'007}) {
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    std::vector<at::Tensor> received;
    for (int other = 0; other < ranks; ++other) {
      works.push_back(send(world, at::full({size}, world.rank() * 100 + other), other, 7));
    }
    for (int other = 0; other < ranks; ++other) {
      received.push_back(at::zeros({size}, at::kLong));
      works.push_back(receive(world, received.back(), other, 7));
    }
    for (const auto& work : works) work->wait();
    for (int other = 0; other < ranks; ++other) {
      EXPECT_TRUE(at::equal(received[other], at::full({size}, other * 100 + world.rank()))) << size;
    }
  }
}

/// Tags choose; within one tag the order of sending holds.
inline void check_tags(const World& world) {
  constexpr int kMessages = 40;
  if (world.rank() == 0) {
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    for (int i = 0; i < kMessages; ++i) works.push_back(send(world, at::full({1000}, i), 1, i % 2));
    for (const auto& work : works) work->wait();
  } else if (world.rank() == 1) {
    // All of tag 1 first, though a message of tag 0 was sent before each.
    for (int i = 0; i < kMessages; ++i) {
      const int expected = i < kMessages / 2 ? 2 * i + 1 : 2 * (i - kMessages / 2);
      const auto tensor = at::zeros({1000}, at::kLong);
      const auto work = receive(world, tensor, 0, expected % 2);
      work->wait();
      EXPECT_EQ(tensor[999].item<int64_t>(), expected);
      EXPECT_TRUE(work->getFuture()->completed());
    }
  }
}

/// A message that is being put aside when its receiver comes still goes before the next of its tag.
inline void check_order_around_the_store(const World& world) {
  for (int round = 0; round < 20; ++round) {
    if (world.rank() == 0) {
      std::vector<c10::intrusive_ptr<c10d::Work>> works;
      for (const int tag : {5, 5, 7}) {
        works.push_back(send(world, at::full({100'000}, static_cast<int>(works.size())), 1, tag));
      }
      for (const auto& work : works) work->wait();
    } else if (world.rank() == 1) {
      std::vector<at::Tensor> tensors(3);
      for (auto& tensor : tensors) tensor = at::full({100'000}, -1);
      const auto last = receive(world, tensors[2], 0, 7);
      std::this_thread::sleep_for(std::chrono::microseconds(round * 20));
      const auto first = receive(world, tensors[0], 0, 5);
      const auto second = receive(world, tensors[1], 0, 5);
      for (const auto& work : {first, second, last}) work->wait();
      for (int i = 0; i < 3; ++i) EXPECT_EQ(tensors[i][99'999].item<int64_t>(), i) << "round " << round;
    }
    barrier(world.group());
  }
}

/// Messages do not wait for collectives under way, nor these for messages.
inline void check_beside_collectives(const World& world) {
  const auto from = (world.rank() + world.world_size() - 1) % world.world_size();
  const auto to = (world.rank() + 1) % world.world_size();
  const auto received = at::zeros({50'000});
  const auto receiving = receive(world, received, from, 3);
  auto sum = at::ones({100'000});
  auto pending = launch_all_reduce(sum, world.group());
  const auto sending = send(world, at::full({50'000}, 1.0F * world.rank()), to, 3);
  receiving->wait();
  sending->wait();
  pending.wait();
  EXPECT_EQ(received[49'999].item<float>(), 1.0F * from);
  EXPECT_EQ(sum[0].item<float>(), 1.0F * world.world_size());
}

inline void check_any_source(const World& world) {
  if (world.rank() != 0) {
    send(world, at::full({3}, world.rank()), 0, 9)->wait();
    return;
  }
  std::vector<bool> seen(world.world_size());
  for (int i = 1; i < world.world_size(); ++i) {
    std::vector<at::Tensor> tensors = {at::zeros({3}, at::kLong)};
    const auto work = backend_of(world)->recvAnysource(tensors, 9);
    work->wait();
    EXPECT_EQ(tensors[0][0].item<int64_t>(), work->sourceRank());
    seen[work->sourceRank()] = true;
  }
  for (int rank = 1; rank < world.world_size(); ++rank) EXPECT_TRUE(seen[rank]) << rank;
}

/// Lazily conjugated tensors, and zeros without memory, travel as what they stand for, and one that cannot be written
/// to is an error of its own.
inline void check_odd_tensors(const World& world) {
  const auto plain = at::full({3}, c10::complex<double>(1, 2), at::kComplexDouble);
  if (world.rank() == 0) {
    send(world, plain.conj(), 1)->wait();
    send(world, plain, 1)->wait();
    send(world, at::_efficientzerotensor({3}, at::kComplexDouble), 1)->wait();
    send(world, at::ones({4}), 1)->wait();
    send(world, at::ones({4}), 1)->wait();
  } else if (world.rank() == 1) {
    auto tensor = at::zeros({3}, at::kComplexDouble);
    receive(world, tensor, 0)->wait();
    EXPECT_TRUE(at::equal(at::view_as_real(tensor), at::view_as_real(plain.conj().resolve_conj())));
    receive(world, tensor.conj(), 0)->wait();
    EXPECT_TRUE(at::equal(at::view_as_real(tensor), at::view_as_real(plain.conj().resolve_conj())));
    receive(world, tensor, 0)->wait();
    EXPECT_TRUE(at::equal(at::view_as_real(tensor), at::zeros({3, 2}, at::kDouble)));
    EXPECT_THROW(receive(world, at::zeros({1}).expand({4}), 0)->wait(), std::exception);
    const auto next = at::zeros({4});
    receive(world, next, 0)->wait();
    EXPECT_TRUE(at::equal(next, at::ones({4})));
  }
}

inline void check_strides_and_refusals(const World& world) {
  if (world.rank() == 0) {
    send(world, at::arange(12).view({3, 4}).t(), 1)->wait();
    send(world, at::ones({5}), 1)->wait();
    send(world, at::ones({6}), 1)->wait();
  } else if (world.rank() == 1) {
    const auto tensor = at::zeros({8, 3}, at::kLong).slice(0, 0, 8, 2);
    receive(world, tensor, 0)->wait();
    EXPECT_TRUE(at::equal(tensor, at::arange(12).view({3, 4}).t()));
    try {
      receive(world, at::ones({4}), 0)->wait();
      ADD_FAILURE() << "a message of another size was taken";
    } catch (const c10::DistBackendError& error) {
      EXPECT_NE(std::string(error.what()).find("rank 0 sends 20 bytes of float, 16 bytes of float are expected"),
                std::string::npos)
          << error.what();
    }
    const auto next = at::zeros({6});
    receive(world, next, 0)->wait();
    EXPECT_EQ(next[5].item<float>(), 1) << "the refused message must not be in the way of the next";
  }
  EXPECT_THROW(send(world, at::ones({1}), world.world_size()), c10::Error);
  EXPECT_THROW(receive(world, at::ones({1}), -1), c10::Error);
}

inline void check_all(const World& world) {
  check_exchange(world);
  check_tags(world);
  check_odd_tensors(world);
  check_order_around_the_store(world);
  check_any_source(world);
  check_strides_and_refusals(world);
  check_beside_collectives(world);
  barrier(world.group());
}

}  // namespace lockstep::shm_messages
