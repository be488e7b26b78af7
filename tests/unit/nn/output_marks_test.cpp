// Which marked outputs a backward comes to.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <memory>
#include <stdexcept>
#include <vector>

#include "lockstep/nn/output_marks.h"
#include "lockstep/testing/checks.h"

namespace lockstep::detail {
namespace {

struct CountingMark : OutputMark {
  void reached() override {
    ++count;
    if (throws) throw std::runtime_error("not this way");
  }
  int count = 0;
  bool throws = false;
};

TEST(OutputMarks, AreReachedByBackwardsThroughTheirOutputs) {
  const auto leaf = at::ones({2}).requires_grad_();
  auto one = leaf * 2;
  auto other = leaf * 3;
  const auto mark_of_one = std::make_shared<CountingMark>();
  const auto mark_of_other = std::make_shared<CountingMark>();
  EXPECT_TRUE(mark_outputs({&one}, mark_of_one));
  EXPECT_TRUE(mark_outputs({&other}, mark_of_other));
  one.add_(1);  // the mark stays where the output came from
  const auto first = one.sum();
  std::vector<const OutputMark*> found;
  const auto note = [&](const OutputMark& mark) {
    found.push_back(&mark);
    return true;
  };
  visit_marks(first, note);
  EXPECT_EQ(found, std::vector<const OutputMark*>{mark_of_one.get()});
  first.backward();
  EXPECT_EQ(mark_of_one->count, 1);
  EXPECT_EQ(mark_of_other->count, 0);
  found.clear();
  visit_marks((other * leaf).sum() + other.sum(), note);
  EXPECT_EQ(found.size(), 1U) << "each node is visited once";
  mark_of_other->throws = true;
  testing::expect_error([&] { other.sum().backward(); }, {"not this way"});
}

TEST(OutputMarks, NeedATensorWithAHistory) {
  at::Tensor undefined;
  auto leaf = at::ones({2}).requires_grad_();
  const auto mark = std::make_shared<CountingMark>();
  EXPECT_FALSE(mark_outputs({&undefined, &leaf}, mark));
  EXPECT_FALSE(mark_outputs({}, mark));
  // And live as long as it does.
  auto output = leaf * 2;
  EXPECT_TRUE(mark_outputs({&output, &output}, mark));
  EXPECT_EQ(mark.use_count(), 2);
  output = at::Tensor();
  EXPECT_EQ(mark.use_count(), 1);
}

}  // namespace
}  // namespace lockstep::detail
