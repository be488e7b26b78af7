// Chains of operators drawn from seeds, on layouts drawn from them too, against one device: every value on the way and
// the gradients of all leaves. A failure names the seed and the first operator whose result differs.
#include "tests/support/dtensor_cases.h"

#include "lockstep/comm/world.h"
#include "lockstep/testing/gtest.h"

namespace lockstep::random_chains_test {
namespace {

using namespace dtensor_cases;  // NOLINT: the vocabulary of this file

/// Where a chain runs: on one device, or on a mesh.
class Place {
 public:
  virtual ~Place() = default;
  virtual at::Tensor leaf(const Sizes& sizes) = 0;
  /// Values on the way, and what made them.
  virtual at::Tensor step(const std::string& name, const at::Tensor& value) = 0;
  /// A copy that can be written in place: what is linear can write sums that are still to be made.
  virtual at::Tensor writable(const at::Tensor& value, [[maybe_unused]] bool is_linear) { return value.clone(); }

  Tensors leaves;
  Tensors values;

 protected:
  at::Tensor next_values(const Sizes& sizes) { return values_of('g', sizes, 1000 + leaves.size()); }
};

class OneDevice : public Place {
 public:
  at::Tensor leaf(const Sizes& sizes) override {
    leaves.push_back(next_values(sizes).requires_grad_());
    return leaves.back();
  }
  at::Tensor step(const std::string&, const at::Tensor& value) override {
    values.push_back(value.detach().clone());
    return value;
  }
};

class OnMesh : public Place {
 public:
  OnMesh(const DeviceMesh& mesh, unsigned seed, const Place& one) : mesh_(mesh), random_(seed), one_(one) {}

  at::Tensor leaf(const Sizes& sizes) override {
    const auto all = layouts_of(mesh_, 'g', sizes);
    const Layout layout(mesh_, all[random_() % all.size()], sizes);
    leaves.push_back(distributed(next_values(sizes), layout).requires_grad_());
    trace_ += lockstep::str("  leaf ", to_string(layout.placements()), " of ", layout.sizes(), "\n");
    return leaves.back();
  }

  at::Tensor step(const std::string& name, const at::Tensor& value) override {
    if (!is_dtensor(value)) throw testing::CheckFailure(trace_ + "  " + name + " gives no DTensor");
    const DTensor tensor(value);
    trace_ += lockstep::str("  ", name, ": ", tensor.to_string(), "\n");
    check(value.detach(), one_.values.at(values.size()));
    values.push_back(value);
    if (random_() % 4 != 0) return value;
    auto all = layouts_of(mesh_, 'b', value.sizes().vec());  // without terms
    const auto moved = tensor.redistribute(all[random_() % all.size()]);
    trace_ += lockstep::str("  redistribute: ", moved.to_string(), "\n");
    return moved;
  }

  at::Tensor writable(const at::Tensor& value, bool is_linear) override {
    auto placements = DTensor(value).placements();
    for (auto& each : placements) {
      const bool stays = is_linear && !(each == Placement(Partial(ReduceOp::MAX)));
      if (is_terms(each) && !stays) each = Replicate();
    }
    return DTensor(value).redistribute(placements).tensor().clone();
  }

  void check(const at::Tensor& actual, const at::Tensor& expected) const {
    const at::NoGradGuard no_grad;
    if (!is_dtensor(actual)) throw testing::CheckFailure(trace_ + "no DTensor");
    const auto full = DTensor(actual).full_tensor();
    if (full.sizes() != expected.sizes() || !at::allclose(full, expected, 1e-7, 1e-9, /*equal_nan=*/true)) {
      throw testing::CheckFailure(lockstep::str(trace_, "differs from one device: ", DTensor(actual).to_string()));
    }
  }

  const std::string& trace() const { return trace_; }

 private:
  const DeviceMesh& mesh_;
  std::mt19937 random_;
  const Place& one_;
  std::string trace_;
};

/// The operators: each takes a value and gives the next one. What it draws depends on sizes alone, so all places draw
/// alike.
class Chain {
 public:
  Chain(unsigned seed, Place& place) : random_(seed), place_(place) {}

  at::Tensor run() {
    auto value = step("leaf", place_.leaf(draw_sizes()));
    const auto length = 5 + draw(8);
    for (uint64_t i = 0; i < length; ++i) value = next(value);
    return value;
  }

 private:
  uint64_t draw(uint64_t below) { return random_() % below; }
  int64_t draw_dim(const at::Tensor& value) { return static_cast<int64_t>(draw(static_cast<uint64_t>(value.dim()))); }

  Sizes draw_sizes() {
    Sizes sizes;
    const auto dims = 2 + draw(2);
    for (uint64_t i = 0; i < dims; ++i) sizes.push_back(static_cast<int64_t>(1 + draw(5)));
    return sizes;
  }

  at::Tensor step(const std::string& name, const at::Tensor& value) { return place_.step(name, value); }
  at::Tensor leaf(const Sizes& sizes) { return place_.leaf(sizes); }

  at::Tensor next(const at::Tensor& x) {
    if (x.dim() == 0 || x.numel() < 3) return step("add a larger one", x.sum() + leaf({4, 3}));
    if (x.numel() > 300) return step("mean", x.mean({draw_dim(x)}));
    switch (draw(7)) {
      case 0:
        return by_element(x);
      case 1:
        return with_leaf(x);
      case 2:
        return in_place(x);
      case 3:
        return shape(x);
      case 4:
        return reduction(x);
      case 5:
        return product(x);
      default:
        return along_a_dim(x);
    }
  }

  at::Tensor by_element(const at::Tensor& x) {
    switch (draw(9)) {
      case 0:
        return step("gelu", at::gelu(x));
      case 1:
        return step("tanh", x.tanh());
      case 2:
        return step("relu", x.relu());
      case 3:
        return step("mul 0.5", x * 0.5);
      case 4:
        return step("add 1", x + 1);
      case 5:
        return step("neg", -x);
      case 6:
        return step("x times sigmoid", x * x.sigmoid());
      case 7:
        return step("x plus tanh", x + x.tanh());
      default:
        return step("div", x / (x * x + 1));
    }
  }

  at::Tensor with_leaf(const at::Tensor& x) {
    auto sizes = x.sizes().vec();
    if (draw(3) == 0) sizes.erase(sizes.begin());
    if (!sizes.empty() && draw(3) == 0) sizes[draw(sizes.size())] = 1;
    const auto y = leaf(sizes);
    switch (draw(6)) {
      case 0:
        return step("add", x + y);
      case 1:
        return step("sub", y - x);
      case 2:
        return step("mul", x * y);
      case 3:
        return step("div", x / (y * y + 1));
      case 4:
        return step("where", at::where(x.detach() > 0.1, x, y));
      default:
        return step("maximum", at::maximum(x, y));
    }
  }

  at::Tensor in_place(const at::Tensor& x) {
    const auto which = draw(4);
    auto written = place_.writable(x, /*is_linear=*/which != 2);
    switch (which) {
      case 0:
        written.add_(leaf({x.size(-1)}), 0.5);
        return step("add_", written);
      case 1:
        written.mul_(2);
        return step("mul_", written);
      case 2:
        written.relu_();
        return step("relu_", written);
      default: {
        const auto factor = leaf(x.sizes().vec());
        written.mul_(factor);
        return step("mul_ a tensor", written);
      }
    }
  }

  at::Tensor shape(const at::Tensor& x) {
    switch (draw(8)) {
      case 0:
        return step("transpose", x.transpose(0, -1));
      case 1:
        return step("flatten", x.flatten(0, 1 % x.dim()));
      case 2:
        return step("unsqueeze", x.unsqueeze(draw_dim(x)));
      case 3:
        return step("squeeze", x.squeeze());
      case 4: {
        const auto dim = draw_dim(x);
        const auto size = x.size(dim);
        return size % 2 == 0 && x.dim() < 4 ? step("unflatten", x.unflatten(dim, {2, size / 2}))
                                            : step("contiguous", x.contiguous());
      }
      case 5: {
        const auto dim = draw_dim(x);
        return step("narrow", x.narrow(dim, x.size(dim) / 2, x.size(dim) - x.size(dim) / 2));
      }
      case 6: {
        const auto dim = draw_dim(x);
        const auto parts = x.chunk(2, dim);
        return step("chunk and cat", at::cat({parts.back(), parts.front()}, dim));
      }
      default:
        return step("expand", x.sum({0}, /*keepdim=*/true).expand(x.sizes()));
    }
  }

  at::Tensor reduction(const at::Tensor& x) {
    const auto dim = draw_dim(x);
    switch (draw(5)) {
      case 0:
        return step("sum", x.sum({dim}, /*keepdim=*/true) * 0.3);
      case 1:
        return step("mean", x.mean({dim}));
      case 2:
        return step("amax", x.amax({dim}, /*keepdim=*/true));
      case 3:
        return step("x minus its mean", x - x.mean({dim}, /*keepdim=*/true));
      default:
        return step("norm", x / (x.pow(2).sum({dim}, /*keepdim=*/true) + 1).sqrt());
    }
  }

  at::Tensor product(const at::Tensor& x) {
    const auto features = static_cast<int64_t>(1 + draw(5));
    switch (draw(3)) {
      case 0:
        return step("matmul", at::matmul(x, leaf({x.size(-1), features})) * 0.5);
      case 1: {
        const auto weight = leaf({features, x.size(-1)});
        return step("linear", at::linear(x, weight, leaf({features})) * 0.5);
      }
      default:
        return step("product with itself", x.dim() > 1 ? at::matmul(x, x.transpose(-1, -2)) * 0.1 : x * x);
    }
  }

  at::Tensor along_a_dim(const at::Tensor& x) {
    const auto dim = draw_dim(x);
    switch (draw(4)) {
      case 0:
        return step("softmax", x.softmax(dim));
      case 1:
        return step("log_softmax", x.log_softmax(dim));
      case 2: {
        const auto weight = leaf({x.size(-1)});
        return step("layer_norm", at::layer_norm(x, {x.size(-1)}, weight, leaf({x.size(-1)}), 0.1));
      }
      default:
        return step("cumsum", x.cumsum(dim) * 0.3);
    }
  }

  std::mt19937 random_;
  Place& place_;
};

void run_chain(const DeviceMesh& mesh, unsigned seed) {
  OneDevice one;
  const auto expected = Chain(seed, one).run();
  const auto gradient = values_of('g', expected.sizes().vec(), 7);
  expected.backward(gradient);

  OnMesh place(mesh, seed + 1, one);
  try {
    const auto actual = Chain(seed, place).run();
    const auto whole = DTensor(actual).full_tensor();
    if (mesh.is_member()) whole.backward(gradient);
    for (std::size_t i = 0; i < one.leaves.size(); ++i) {
      const auto& of_leaf = one.leaves[i].grad();
      if (of_leaf.defined()) place.check(place.leaves[i].grad(), of_leaf);
    }
  } catch (const testing::CheckFailure& failure) {
    throw testing::CheckFailure(lockstep::str("seed ", seed, ":\n", failure.what()));
  } catch (const c10::Error& error) {
    throw testing::CheckFailure(lockstep::str("seed ", seed, ":\n", place.trace(), error.what_without_backtrace()));
  }
}

/// LOCKSTEP_CHAIN_SEED runs one of them.
void run_chains(const DeviceMesh& mesh, unsigned count) {
  const auto* given = std::getenv("LOCKSTEP_CHAIN_SEED");
  if (given != nullptr) return run_chain(mesh, static_cast<unsigned>(std::stoul(given)));
  for (unsigned seed = 0; seed < count; ++seed) run_chain(mesh, seed * 31 + 5);
}

// TP-18
LOCKSTEP_THREAD_TEST(DTensorChains, OnTwoRanks, 2) {
  run_chains(init_device_mesh("cpu", {2}), 150);
}

// TP-18
LOCKSTEP_THREAD_TEST(DTensorChains, OnThreeRanks, 3) {
  run_chains(init_device_mesh("cpu", {3}), 100);
}

// TP-18
LOCKSTEP_THREAD_TEST(DTensorChains, OnASquare, 4) {
  run_chains(init_device_mesh("cpu", {2, 2}), 100);
}

// TP-18
LOCKSTEP_THREAD_TEST(DTensorChains, OnUnequalAxes, 6) {
  run_chains(init_device_mesh("cpu", {3, 2}), 40);
}

}  // namespace
}  // namespace lockstep::random_chains_test
