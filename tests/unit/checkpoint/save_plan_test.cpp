// Who writes what: everything once, evenly, in files of a size.
#include "lockstep/checkpoint/save_plan.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "lockstep/base/str.h"
#include "lockstep/checkpoint/safetensors.h"
#include "tests/support/error_text.h"

namespace lockstep::save_plan_test {
namespace {

using namespace lockstep::detail;
using error_text::error_of;
using ::testing::HasSubstr;

constexpr int64_t kLarge = int64_t{1} << 40;

Offer::Tensor offered(std::vector<int64_t> sizes, std::vector<Box> boxes,
                      dcp::Replicas replicas = dcp::Replicas::kAlike) {
  return {.dtype = "U8", .sizes = std::move(sizes), .replicas = replicas, .boxes = std::move(boxes)};
}

Offer::Tensor whole(std::vector<int64_t> sizes, dcp::Replicas replicas = dcp::Replicas::kAlike) {
  auto box = whole_box(sizes);
  return offered(std::move(sizes), {std::move(box)}, replicas);
}

std::vector<int64_t> bytes_by_rank(const SavePlan& plan, std::size_t ranks) {
  std::vector<int64_t> bytes(ranks);
  for (const auto& file : plan.files) {
    for (const auto& piece : file.pieces) {
      bytes[static_cast<std::size_t>(file.rank)] += plan.catalog.tensors.at(piece.tensor).pieces[piece.place].bytes;
    }
  }
  return bytes;
}

/// Every file is what the catalog says of it.
void check(const SavePlan& plan) {
  ASSERT_EQ(plan.files.size(), plan.catalog.files.size());
  for (std::size_t i = 0; i < plan.files.size(); ++i) {
    const auto& file = plan.files[i];
    const auto bytes = plan.catalog.files[i].bytes;
    EXPECT_EQ(file.name, plan.catalog.files[i].name);
    const auto header = parse_safetensors(file.header, bytes, file.name);
    ASSERT_EQ(header.entries.size(), file.pieces.size());
    for (const auto& entry : header.entries) {
      const auto found = std::find_if(file.pieces.begin(), file.pieces.end(),
                                      [&](const auto& each) { return each.tensor == entry.name; });
      ASSERT_NE(found, file.pieces.end());
      const auto& piece = plan.catalog.tensors.at(entry.name).pieces[found->place];
      EXPECT_EQ(piece.file, i);
      EXPECT_EQ(piece.begin, entry.begin);
      EXPECT_EQ(piece.bytes, entry.end - entry.begin);
    }
  }
}

TEST(SavePlan, SpreadsWhatAllHaveByBytes) {
  for (const std::size_t ranks : {1, 2, 3, 4}) {
    Offer offer;
    for (int i = 0; i < 40; ++i) offer.tensors[str("t", i)] = whole({(i * 37) % 101 + 1, 10});
    const auto plan = plan_save(std::vector<Offer>(ranks, offer), kLarge);
    check(plan);
    const auto bytes = bytes_by_rank(plan, ranks);
    const auto [least, most] = std::minmax_element(bytes.begin(), bytes.end());
    EXPECT_LE(*most - *least, 200) << ranks;
    for (const auto& [name, tensor] : plan.catalog.tensors) EXPECT_EQ(tensor.pieces.size(), 1) << name;
    EXPECT_EQ(plan.catalog.world_size, static_cast<int>(ranks));
  }
}

TEST(SavePlan, CountsWhatOnlyOneCanWrite) {
  Offer first;
  first.tensors["own"] = offered({2000}, {{.offsets = {0}, .sizes = {1000}}});
  Offer second;
  second.tensors["own"] = offered({2000}, {{.offsets = {1000}, .sizes = {1000}}});
  Offer third;
  third.tensors["own"] = offered({2000}, {});
  for (auto* offer : {&first, &second, &third}) {
    for (int i = 0; i < 9; ++i) offer->tensors[str("shared", i)] = whole({100});
  }
  const auto plan = plan_save({first, second, third}, kLarge);
  check(plan);
  EXPECT_EQ(bytes_by_rank(plan, 3), (std::vector<int64_t>{1000, 1000, 900}));
}

TEST(SavePlan, LetsTheFirstWriteWhatMayDiffer) {
  Offer without;
  without.tensors["weight"] = whole({1000});
  Offer with = without;
  for (int i = 0; i < 5; ++i) with.tensors[str("buffer", i)] = whole({10}, dcp::Replicas::kFirst);
  const auto plan = plan_save({without, with, with}, kLarge);
  check(plan);
  for (int i = 0; i < 5; ++i) {
    const auto& piece = plan.catalog.tensors.at(str("buffer", i)).pieces.at(0);
    EXPECT_EQ(plan.files[piece.file].rank, 1) << "the first that has it";
  }
}

TEST(SavePlan, HasNoTwoPiecesOfATensorInAFile) {
  Offer offer;
  std::vector<Box> rows;
  for (int64_t row = 0; row < 3; ++row) rows.push_back({.offsets = {row, 0}, .sizes = {1, 5}});
  offer.tensors["w"] = offered({3, 5}, rows);
  offer.tensors["v"] = whole({2});
  const auto plan = plan_save({offer}, kLarge);
  check(plan);
  ASSERT_EQ(plan.files.size(), 3);
  EXPECT_EQ(plan.files[0].name, "rank-00000-000.safetensors");
  EXPECT_EQ(plan.files[0].pieces.size(), 2);
  EXPECT_EQ(plan.files[2].pieces.size(), 1);
  for (const auto& file : plan.files) {
    EXPECT_THAT(file.header, HasSubstr("DCP_SHARDING_INFO"));
  }
  EXPECT_EQ(plan_save({Offer{.tensors = {{"v", whole({2})}}}}, kLarge).files[0].name, "rank-00000.safetensors");
}

TEST(SavePlan, KeepsFilesToTheirSize) {
  Offer offer;
  for (int i = 0; i < 20; ++i) offer.tensors[str("t", 10 + i)] = whole({40});
  offer.tensors["long"] = whole({1000});
  const auto plan = plan_save({offer}, 100);
  check(plan);
  for (const auto& file : plan.files) {
    int64_t bytes = 0;
    for (const auto& piece : file.pieces) bytes += plan.catalog.tensors.at(piece.tensor).pieces[piece.place].bytes;
    EXPECT_TRUE(bytes <= 100 || file.pieces.size() == 1) << file.name;
  }
  EXPECT_EQ(plan.files.size(), 11);
}

TEST(SavePlan, PutsTheWidestElementsFirst) {
  Offer offer;
  offer.tensors["a"] = {.dtype = "BOOL", .sizes = {3}, .boxes = {whole_box({3})}};
  offer.tensors["b"] = {.dtype = "F64", .sizes = {3}, .boxes = {whole_box({3})}};
  offer.tensors["c"] = {.dtype = "BF16", .sizes = {3}, .boxes = {whole_box({3})}};
  offer.tensors["d"] = {.dtype = "C128", .sizes = {3}, .boxes = {whole_box({3})}};
  const auto plan = plan_save({offer}, kLarge);
  for (const auto& [name, item] : std::map<std::string, int64_t>{{"b", 8}, {"c", 2}, {"d", 8}}) {
    EXPECT_EQ(plan.catalog.tensors.at(name).pieces[0].begin % item, 0) << name;
  }
  EXPECT_EQ(plan.catalog.tensors.at("d").pieces[0].bytes, 48);
}

TEST(SavePlan, SaysWhereShardsBegin) {
  Offer first;
  first.tensors["w"] = offered({4, 2}, {{.offsets = {0, 0}, .sizes = {3, 2}}});
  Offer second;
  second.tensors["w"] = offered({4, 2}, {{.offsets = {3, 0}, .sizes = {1, 2}}});
  const auto plan = plan_save({first, second}, kLarge);
  const auto header = parse_safetensors(plan.files[1].header, plan.catalog.files[1].bytes, "x");
  EXPECT_EQ(header.metadata.at("DCP_SHARDING_INFO"), R"({"w":{"saved_offsets":[3,0]}})");
  EXPECT_EQ(header.metadata.at("format"), "pt");
}

TEST(SavePlan, IsTheSameForAllWhoMakeIt) {
  Offer offer;
  offer.tensors["w"] = offered({4, 2}, {{.offsets = {0, 0}, .sizes = {3, 2}}, {.offsets = {3, 0}, .sizes = {1, 2}}});
  offer.tensors["s"] = whole({}, dcp::Replicas::kFirst);
  offer.values["epoch"] = 3;
  offer.values["nested"] = {{"dict", {{"lr", -0.0}, {"betas", {0.9, 1e-300}}, {"n", INT64_MIN}}}};
  const auto again = unpacked_offer(packed(offer));
  EXPECT_EQ(index_text(plan_save({again, offer}, kLarge).catalog),
            index_text(plan_save({offer, again}, kLarge).catalog));
  EXPECT_EQ(again.values, offer.values);
  EXPECT_EQ(again.tensors.at("s").replicas, dcp::Replicas::kFirst);
  EXPECT_EQ(again.tensors.at("w").boxes, offer.tensors.at("w").boxes);
}

TEST(SavePlan, TakesValuesOfTheFirstThatHasThem) {
  const auto plan = plan_save({Offer{.values = {{"a", 1}}}, Offer{.values = {{"a", 2}, {"b", 3}}}}, kLarge);
  EXPECT_EQ(plan.catalog.values.at("a"), 1);
  EXPECT_EQ(plan.catalog.values.at("b"), 3);
  EXPECT_TRUE(plan.files.empty());
}

TEST(SavePlan, KeepsEmptyTensors) {
  Offer offer;
  offer.tensors["none"] = whole({0, 3});
  offer.tensors["nowhere"] = offered({0}, {});
  const auto plan = plan_save({offer, offer}, kLarge);
  check(plan);
  EXPECT_EQ(plan.catalog.tensors.size(), 2);
}

TEST(SavePlan, RefusesWhatDoesNotFitTogether) {
  const auto refused = [](const Offer::Tensor& one, const Offer::Tensor& other) {
    return error_of([&] { plan_save({Offer{.tensors = {{"w", one}}}, Offer{.tensors = {{"w", other}}}}, kLarge); });
  };
  EXPECT_THAT(refused(whole({2}), whole({3})), HasSubstr("'w' is U8 of sizes [2] on rank 0 and U8 of [3] on rank 1"));
  auto half = whole({2});
  half.dtype = "F16";
  EXPECT_THAT(refused(whole({2}), half), HasSubstr("'w' is U8 of sizes [2] on rank 0 and F16 of [2] on rank 1"));
  const auto first = offered({4}, {{.offsets = {0}, .sizes = {2}}});
  EXPECT_THAT(refused(first, offered({4}, {{.offsets = {3}, .sizes = {1}}})),
              HasSubstr("the pieces of 'w' hold fewer"));
  EXPECT_THAT(refused(first, offered({4}, {{.offsets = {1}, .sizes = {3}}})), HasSubstr("the pieces of 'w' hold more"));
  EXPECT_THAT(refused(first, offered({4}, {{.offsets = {1}, .sizes = {2}}})), HasSubstr("pieces of 'w' overlap"));
}

TEST(SavePlan, RefusesNamesAndTypesThatFilesCannotHold) {
  const auto refused = [](const std::string& name, const at::Tensor& tensor) {
    dcp::Outgoing out(0, 1);
    out.tensor(name, tensor);
    return error_of([&] { offer_of(out); });
  };
  EXPECT_EQ(refused("x", at::ones({2})), "");
  EXPECT_THAT(refused("\xff", at::ones({2})), HasSubstr("nothing in a checkpoint can be called"));
  EXPECT_THAT(refused("__metadata__", at::ones({2})),
              HasSubstr("nothing in a checkpoint can be called '__metadata__'"));
  EXPECT_THAT(refused("x", at::empty({2}, at::kComplexHalf)),
              HasSubstr("'x' is of type ComplexHalf, which safetensors files cannot hold"));
}

}  // namespace
}  // namespace lockstep::save_plan_test
