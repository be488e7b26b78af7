// Random sequences of collectives, the same on all ranks, with delays, waits and kinds of memory that differ from rank
// to rank. What each call must give is computed from the seed alone.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <random>
#include <thread>

#include "lockstep/lockstep.h"

namespace lockstep::shm_random {

using Random = std::mt19937_64;

/// Everything two ranks must agree on comes from `shared`, the rest from `own`.
class Sequence {
 public:
  Sequence(const World& world, uint64_t seed)
      : world_(world),
        seed_(seed),
        shared_(seed),
        own_(seed * 1000 + static_cast<uint64_t>(world.rank()) + 1),
        ranks_(world.world_size()),
        me_(world.rank()) {}

  void run() {
    const auto calls = 1 + shared_() % 8;
    for (call_ = 0; call_ < calls; ++call_) {
      pause();
      make_call();
      if (own_() % 3 == 0) finish_some();
    }
    while (!open_.empty()) finish_one(own_() % open_.size());
  }

 private:
  struct Open {
    Pending pending;
    std::function<void()> check;
  };

  void pause() {
    const auto what = own_() % 20;
    if (what == 0) std::this_thread::sleep_for(std::chrono::microseconds(own_() % 300));
    if (what < 5) std::this_thread::yield();
  }

  void finish_one(std::size_t index) {
    open_[index].pending.wait();
    open_[index].check();
    open_.erase(open_.begin() + static_cast<std::ptrdiff_t>(index));
  }
  void finish_some() {
    while (!open_.empty() && own_() % 2 == 0) finish_one(own_() % open_.size());
  }

  int64_t random_size() {
    const auto what = shared_() % 40;
    if (what == 0) return static_cast<int64_t>(shared_() % 200'000);
    if (what < 5) return static_cast<int64_t>(shared_() % 20'000);
    if (what == 5) return 0;
    return static_cast<int64_t>(shared_() % 100);
  }

  /// What rank `rank` gives in this call: small whole numbers, whose sums are exact in every dtype.
  at::Tensor values(int rank, int64_t size, int shift = 0) const {
    const auto start = static_cast<int64_t>((seed_ * 31 + call_ * 7 + static_cast<uint64_t>(rank) * 3) % 11) + shift;
    return at::arange(start, start + size, at::kLong).remainder(13).to(dtype_);
  }
  at::Tensor reduced(int64_t size, int shift = 0) const {
    auto total = values(0, size, shift).to(at::kLong);
    for (int rank = 1; rank < ranks_; ++rank) {
      const auto next = values(rank, size, shift).to(at::kLong);
      total = op_ == ReduceOp::MAX   ? at::maximum(total, next)
              : op_ == ReduceOp::MIN ? at::minimum(total, next)
                                     : total + next;
    }
    return total.to(dtype_);
  }

  /// A tensor of this rank's own taste: in shared memory, ordinary, or with gaps.
  at::Tensor place(const at::Tensor& content) {
    const auto taste = own_() % 8;
    at::Tensor tensor;
    if (taste < 3) {
      const auto offset = static_cast<int64_t>(own_() % 3);
      tensor = world_.group()
                   ->getBackend(at::kCPU)
                   ->allocateTensor(content.numel() + offset, content.options())
                   .slice(0, offset);
    } else if (taste == 3) {
      tensor = at::empty({content.numel(), 2}, content.options()).select(1, 0);
    } else {
      tensor = at::empty_like(content);
    }
    return tensor.copy_(content);
  }
  at::Tensor room(int64_t size) { return place(at::zeros({size}, at::TensorOptions().dtype(dtype_))); }

  void expect(const at::Tensor& got, const at::Tensor& wanted, const char* what) {
    EXPECT_TRUE(at::equal(got, wanted.view(got.sizes())))
        << what << ", sequence " << seed_ << ", call " << call_ << ", rank " << me_;
  }
  /// `call` is what the check says if it fails.
  void add(Pending pending, std::function<void()> check) {
    const auto call = call_;
    open_.push_back({std::move(pending), [this, call, check = std::move(check)] {
                       const auto now = std::exchange(call_, call);
                       check();
                       call_ = now;
                     }});
    if (own_() % 3 == 0) finish_one(open_.size() - 1);
  }

  void make_call() {
    constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong, at::kByte};
    constexpr ReduceOp kOps[] = {ReduceOp::SUM, ReduceOp::MAX, ReduceOp::MIN};
    dtype_ = kDtypes[shared_() % std::size(kDtypes)];
    op_ = kOps[shared_() % std::size(kOps)];
    const auto kind = shared_() % 10;
    const auto size = random_size();
    const int root = static_cast<int>(shared_() % static_cast<uint64_t>(ranks_));
    const auto& group = world_.group();
    switch (kind) {
      case 0:
      case 1: {
        const auto tensor = place(values(me_, size));
        const auto wanted = reduced(size);
        return add(launch_all_reduce(tensor, group, op_), [=, this] { expect(tensor, wanted, "all_reduce"); });
      }
      case 2: {
        std::vector<at::Tensor> tensors;
        std::vector<at::Tensor> wanted;
        for (int i = 0; i < 3; ++i) {
          tensors.push_back(place(values(me_, size + i, i)));
          wanted.push_back(reduced(size + i, i));
        }
        return add(launch_all_reduce_coalesced(tensors, group, op_), [=, this] {
          for (int i = 0; i < 3; ++i) expect(tensors[i], wanted[i], "all_reduce_coalesced");
        });
      }
      case 3: {
        const auto tensor = place(values(me_, size));
        const auto wanted = reduced(size);
        return add(launch_reduce(tensor, root, group, op_), [=, this] {
          if (me_ == root) expect(tensor, wanted, "reduce");
        });
      }
      case 4: {
        const auto tensor = place(values(me_, size));
        const auto wanted = values(root, size);
        return add(launch_broadcast(tensor, root, group), [=, this] { expect(tensor, wanted, "broadcast"); });
      }
      case 5: {
        const auto output = room(size * ranks_);
        std::vector<at::Tensor> wanted;
        for (int rank = 0; rank < ranks_; ++rank) wanted.push_back(values(rank, size));
        // The single-tensor form wants a contiguous output.
        if (!output.is_contiguous()) return add_list_gather(wanted, size);
        return add(launch_all_gather_into_tensor(output, place(values(me_, size)), group),
                   [=, this] { expect(output, at::cat(wanted), "all_gather_into_tensor"); });
      }
      case 6: {
        std::vector<at::Tensor> inputs;
        for (int to = 0; to < ranks_; ++to) inputs.push_back(place(values(me_, size, to)));
        const auto output = room(size);
        const auto wanted = reduced(size, me_);
        return add(launch_reduce_scatter(output, inputs, group, op_),
                   [=, this] { expect(output, wanted, "reduce_scatter"); });
      }
      case 7: {
        std::vector<at::Tensor> outputs;
        for (int rank = 0; me_ == root && rank < ranks_; ++rank) outputs.push_back(room(size));
        std::vector<at::Tensor> wanted;
        for (int rank = 0; rank < ranks_; ++rank) wanted.push_back(values(rank, size));
        return add(launch_gather(place(values(me_, size)), outputs, root, group), [=, this] {
          for (std::size_t rank = 0; rank < outputs.size(); ++rank) expect(outputs[rank], wanted[rank], "gather");
        });
      }
      case 8: {
        std::vector<at::Tensor> inputs;
        for (int rank = 0; me_ == root && rank < ranks_; ++rank) inputs.push_back(place(values(root, size, rank)));
        const auto output = room(size);
        const auto wanted = values(root, size, me_);
        return add(launch_scatter(output, inputs, root, group), [=, this] { expect(output, wanted, "scatter"); });
      }
      default:
        return add_all_to_all(size % 3000);
    }
  }

  void add_list_gather(const std::vector<at::Tensor>& wanted, int64_t size) {
    // Of its own kind only if all ranks take this way; which they do not, so the same call in another form.
    const auto output = at::empty({size * ranks_}, at::TensorOptions().dtype(dtype_));
    add(launch_all_gather_into_tensor(output, place(values(me_, size)), world_.group()),
        [=, this] { expect(output, at::cat(wanted), "all_gather_into_tensor"); });
  }

  /// What `from` sends to `to` has a length of its own.
  void add_all_to_all(int64_t size) {
    const auto length = [&](int from, int to) { return (size * (from + 1) + 5 * to) % 3001; };
    std::vector<at::Tensor> sent;
    std::vector<at::Tensor> wanted;
    std::vector<int64_t> input_splits;
    std::vector<int64_t> output_splits;
    for (int other = 0; other < ranks_; ++other) {
      sent.push_back(values(me_, length(me_, other), other));
      wanted.push_back(values(other, length(other, me_), me_));
      input_splits.push_back(sent.back().numel());
      output_splits.push_back(wanted.back().numel());
    }
    const auto expected = at::cat(wanted);
    const auto output = room(expected.numel());
    add(launch_all_to_all_single(output, place(at::cat(sent)), world_.group(), output_splits, input_splits),
        [=, this] { expect(output, expected, "all_to_all_single"); });
  }

  const World& world_;
  const uint64_t seed_;
  Random shared_;
  Random own_;
  const int ranks_;
  const int me_;
  uint64_t call_ = 0;
  at::ScalarType dtype_ = at::kFloat;
  ReduceOp op_ = ReduceOp::SUM;
  std::vector<Open> open_;
};

inline void check_sequences(const World& world, uint64_t first_seed, uint64_t count) {
  for (uint64_t seed = first_seed; seed < first_seed + count; ++seed) {
    Sequence(world, seed).run();
    if (::testing::Test::HasFailure()) return;
  }
  barrier(world.group());
}

}  // namespace lockstep::shm_random
