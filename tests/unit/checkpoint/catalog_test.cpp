// Indexes of checkpoints and of what others write: read as they were written, refused otherwise.
#include "lockstep/checkpoint/catalog.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <fstream>

#include "lockstep/base/crc32c.h"
#include "lockstep/base/str.h"
#include "lockstep/checkpoint/manager.h"
#include "lockstep/checkpoint/safetensors.h"
#include "lockstep/checkpoint/save.h"
#include "lockstep/checkpoint/verify.h"
#include "lockstep/testing/temp_dir.h"
#include "tests/support/error_text.h"

namespace lockstep::catalog_test {
namespace {

using namespace lockstep::detail;
using error_text::error_of;
using ::testing::HasSubstr;
using Json = nlohmann::ordered_json;

void write(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

/// A matrix of [4, 6] in three boxes, a scalar and an empty tensor, in two files.
Catalog sample() {
  const auto piece = [](std::vector<int64_t> offsets, std::vector<int64_t> sizes, std::size_t file, int64_t begin) {
    Box box{.offsets = std::move(offsets), .sizes = std::move(sizes)};
    const auto bytes = 4 * box.numel();
    return StoredPiece{.box = std::move(box), .file = file, .begin = begin, .bytes = bytes, .checksum = 7};
  };
  return {.folder = "run/",
          .files = {{"rank-00000.safetensors", 200}, {"rank-00001.safetensors", 100}},
          .tensors = {{"model.w",
                       {.dtype = "F32",
                        .sizes = {4, 6},
                        .pieces = {piece({0, 0}, {2, 6}, 0, 100), piece({2, 0}, {2, 3}, 1, 64),
                                   piece({2, 3}, {2, 3}, 0, 148)}}},
                      {"model.s", {.dtype = "F32", .sizes = {}, .pieces = {piece({}, {}, 0, 96)}}},
                      {"model.none", {.dtype = "BF16", .sizes = {0, 5}}}},
          .values = {{"epoch", 3}, {"model.groups", Json{{"dict", {{"lr", 0.1}}}}}},
          .entries = {"model", "epoch"},
          .step = 12,
          .world_size = 2};
}

std::string checked(const Catalog& catalog) {
  return error_of([&] { check_catalog(catalog, "here"); });
}

/// The text with a checksum that fits.
std::string sealed(Json json) {
  json["checksum"] = "00000000";
  auto text = json.dump();
  constexpr std::size_t kBegin = 13;
  std::string digits(9, '\0');
  std::snprintf(digits.data(), digits.size(), "%08x", crc32c(0, text.data() + kBegin + 8, text.size() - kBegin - 8));
  return text.replace(kBegin, 8, digits.c_str());
}

TEST(Index, IsReadAsItWasWritten) {
  const auto before = sample();
  const auto after = parse_index(index_text(before), "run/", "run/lockstep.json");
  EXPECT_EQ(index_text(after), index_text(before));
  EXPECT_EQ(after.step, 12);
  EXPECT_EQ(after.world_size, 2);
  EXPECT_EQ(after.entries, before.entries);
  EXPECT_EQ(after.values, before.values);
  EXPECT_EQ(after.tensors.at("model.w").pieces[2].box, before.tensors.at("model.w").pieces[2].box);
  EXPECT_EQ(after.tensors.at("model.w").pieces[2].checksum, 7);
  EXPECT_EQ(after.bytes(), 300);
  auto without = sample();
  without.step.reset();
  EXPECT_FALSE(parse_index(index_text(without), "run/", "").step);
}

TEST(Index, IsRefusedIfAnyByteOfItIsAnother) {
  const auto text = index_text(sample());
  for (std::size_t i = 0; i < text.size(); ++i) {
    for (const char mask : {'\x01', '\x20', '\x80'}) {
      auto damaged = text;
      damaged[i] = static_cast<char>(damaged[i] ^ mask);
      EXPECT_THAT(error_of([&] { parse_index(damaged, "run/", "run/lockstep.json"); }), HasSubstr("run/lockstep.json"))
          << i;
    }
    const auto cut = text.substr(0, i);
    EXPECT_THAT(error_of([&] { parse_index(cut, "run/", "run/lockstep.json"); }), HasSubstr("run/lockstep.json")) << i;
  }
}

TEST(Index, IsRefusedIfItIsOfAnotherVersionOrFormat) {
  auto json = Json::parse(index_text(sample()));
  json["version"] = 2;
  EXPECT_THAT(error_of([&] { parse_index(sealed(json), "", "x"); }),
              HasSubstr("x has version 2; this Lockstep reads version 1"));
  json["format"] = "other";
  EXPECT_THAT(error_of([&] { parse_index(sealed(json), "", "x"); }), HasSubstr("x is no index of a checkpoint"));
  for (const auto* text : {"", "[]", "{}", "nonsense", "null"}) {
    EXPECT_THAT(error_of([&] { parse_index(text, "", "x"); }), HasSubstr("no index of a checkpoint")) << text;
  }
}

TEST(Index, IsRefusedIfItsFormIsWrong) {
  const auto whole = Json::parse(index_text(sample()));
  EXPECT_EQ(error_of([&] { parse_index(sealed(whole), "", "x"); }), "");
  const auto changed = [&](const char* pointer, const Json& value) {
    auto json = whole;
    json[Json::json_pointer(pointer)] = value;
    return error_of([&] { parse_index(sealed(json), "", "x"); });
  };
  for (const auto* name : {"world_size", "files", "entries", "values", "tensors"}) {
    auto json = whole;
    json.erase(name);
    EXPECT_THAT(error_of([&] { parse_index(sealed(json), "", "x"); }), HasSubstr("x is no index of a checkpoint: "))
        << name;
    EXPECT_THAT(changed(str("/", name).c_str(), "text"), HasSubstr("x is no index of a checkpoint: ")) << name;
  }
  EXPECT_THAT(changed("/step", 1.5), HasSubstr("x is no index"));
  EXPECT_THAT(changed("/world_size", 0), HasSubstr("x: it cannot be of 0 ranks"));
  EXPECT_THAT(changed("/files/0/bytes", 1e300), HasSubstr("x is no index"));
  EXPECT_THAT(changed("/files/0/bytes", true), HasSubstr("x is no index"));
  EXPECT_THAT(changed("/files/0/bytes", UINT64_MAX), HasSubstr("x is no index"));
  EXPECT_THAT(changed("/files/0/bytes", -1), HasSubstr("x lists 'rank-00000.safetensors'"));
  EXPECT_THAT(changed("/files/0/name", "../secret"), HasSubstr("x lists '../secret', which is no name of a file"));
  EXPECT_THAT(changed("/tensors/model.w/pieces/0/file", 2),
              HasSubstr("x: a piece of 'model.w' is in a file that is not listed"));
  EXPECT_THAT(changed("/tensors/model.w/pieces/0/file", -1), HasSubstr("is in a file that is not listed"));
  EXPECT_THAT(changed("/tensors/model.w/shape", Json::array({4, "6"})), HasSubstr("x is no index"));
}

TEST(Catalog, LeadsNowhereElse) {
  EXPECT_EQ(checked(sample()), "");
  for (const auto* name : {"", ".", "..", "../x", "/etc/passwd", "a/b", ".hidden"}) {
    auto catalog = sample();
    catalog.files[1].name = name;
    EXPECT_THAT(checked(catalog), HasSubstr(str("here lists '", name, "', which is no name of a file in the folder")));
  }
}

TEST(Catalog, RefusesPiecesBeyondTheirFiles) {
  for (const auto& [begin, bytes] : std::vector<std::pair<int64_t, int64_t>>{
           {153, 48}, {-1, 48}, {201, 0}, {INT64_MAX, 48}, {0, INT64_MAX}, {0, -1}, {INT64_MIN, 48}}) {
    auto catalog = sample();
    catalog.tensors["model.w"].pieces[0].begin = begin;
    catalog.tensors["model.w"].pieces[0].bytes = bytes;
    EXPECT_THAT(checked(catalog), HasSubstr("here: a piece of 'model.w' lies beyond the 200 bytes of rank-00000"));
  }
}

TEST(Catalog, RefusesPiecesOutsideOfTheirTensors) {
  const auto with = [](std::vector<int64_t> offsets, std::vector<int64_t> sizes) {
    auto catalog = sample();
    catalog.tensors["model.w"].pieces[0].box = {.offsets = std::move(offsets), .sizes = std::move(sizes)};
    return checked(catalog);
  };
  EXPECT_THAT(with({3, 0}, {2, 6}), HasSubstr("lies outside of it: [3, 0]+[2, 6] of [4, 6]"));
  EXPECT_THAT(with({-1, 0}, {2, 6}), HasSubstr("lies outside of it"));
  EXPECT_THAT(with({0, 0}, {-2, -6}), HasSubstr("lies outside of it"));
  EXPECT_THAT(with({INT64_MAX, 0}, {INT64_MAX, 6}), HasSubstr("lies outside of it"));
  EXPECT_THAT(with({0}, {2, 6}), HasSubstr("has another number of dims"));
  EXPECT_THAT(with({0, 0}, {12}), HasSubstr("has another number of dims"));
  EXPECT_THAT(with({0, 0}, {2, 5}), HasSubstr("of 10 elements of type F32 cannot have 48 bytes"));
}

TEST(Catalog, RefusesPiecesThatOverlapOrLack) {
  auto lacking = sample();
  lacking.tensors["model.w"].pieces.pop_back();
  EXPECT_THAT(checked(lacking),
              HasSubstr("here: the pieces of 'model.w' hold fewer elements than its 24. Is a file missing?"));
  auto twice = sample();
  twice.tensors["model.w"].pieces.push_back(twice.tensors["model.w"].pieces[1]);
  EXPECT_THAT(checked(twice), HasSubstr("hold more elements than its 24: they overlap"));
  auto moved = sample();
  moved.tensors["model.w"].pieces[2].box.offsets = {1, 3};
  EXPECT_THAT(checked(moved), HasSubstr("here: pieces of 'model.w' overlap: [0, 0]+[2, 6] and [1, 3]+[2, 3]"));
  auto scalar = sample();
  scalar.tensors["model.s"].pieces.push_back(scalar.tensors["model.s"].pieces[0]);
  EXPECT_THAT(checked(scalar), HasSubstr("the pieces of 'model.s' hold more"));
}

TEST(Catalog, RefusesSizesThatNoTensorHas) {
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{-1}, {INT64_MAX}, {1L << 40, 1L << 40}, {0, -1}}) {
    auto catalog = sample();
    catalog.tensors["model.none"] = {.dtype = "U8", .sizes = sizes};
    EXPECT_THAT(checked(catalog), HasSubstr("here: 'model.none' has sizes ["));
  }
  auto empty = sample();
  empty.tensors["model.none"] = {.dtype = "U8", .sizes = {1L << 40, 1L << 40, 0}};
  EXPECT_EQ(checked(empty), "");
}

TEST(Catalog, AgreesWithBruteForceOnWhatCovers) {
  std::srand(1);
  int covered = 0;
  for (int round = 0; round < 3000; ++round) {
    // Two cuts of a grid, and one box of it now and then moved or changed.
    const int64_t rows = 1 + std::rand() % 4;
    const int64_t columns = 1 + std::rand() % 4;
    const auto row = std::rand() % (rows + 1);
    const auto column = std::rand() % (columns + 1);
    std::vector<Box> boxes = {{.offsets = {0, 0}, .sizes = {row, columns}},
                              {.offsets = {row, 0}, .sizes = {rows - row, column}},
                              {.offsets = {row, column}, .sizes = {rows - row, columns - column}}};
    if (std::rand() % 2 == 0) {
      auto& box = boxes[static_cast<std::size_t>(std::rand()) % 3];
      box.offsets = {std::rand() % rows, std::rand() % columns};
      box.sizes = {std::rand() % (rows - box.offsets[0] + 1), std::rand() % (columns - box.offsets[1] + 1)};
    }
    std::vector<int> times(static_cast<std::size_t>(rows * columns));
    Catalog catalog{.files = {{"x", 1000}}, .tensors = {{"w", {.dtype = "U8", .sizes = {rows, columns}}}}};
    for (const auto& box : boxes) {
      for (auto i = box.offsets[0]; i < box.offsets[0] + box.sizes[0]; ++i) {
        for (auto j = box.offsets[1]; j < box.offsets[1] + box.sizes[1]; ++j)
          ++times[static_cast<std::size_t>(i * columns + j)];
      }
      catalog.tensors["w"].pieces.push_back({.box = box, .bytes = box.numel()});
    }
    const bool is_covered = std::all_of(times.begin(), times.end(), [](int each) { return each == 1; });
    EXPECT_EQ(checked(catalog).empty(), is_covered)
        << boxes[0].to_string() << boxes[1].to_string() << boxes[2].to_string();
    covered += is_covered ? 1 : 0;
  }
  EXPECT_GT(covered, 1000);
  EXPECT_LT(covered, 2500);
}

class Foreign : public ::testing::Test {
 protected:
  /// A file with one tensor of bytes.
  void add(const std::string& file, const std::string& name, const std::vector<int64_t>& sizes,
           const std::map<std::string, std::string>& metadata = {}, const std::string& dtype = "U8") {
    std::vector<SafetensorsEntry> entries = {{.name = name, .dtype = dtype, .sizes = sizes}};
    const auto header = laid_out_header(entries, metadata);
    write(folder_.file(file), header + std::string(static_cast<std::size_t>(entries[0].end - entries[0].begin), 'x'));
  }
  void add_shard(const std::string& file, const std::string& name, const std::vector<int64_t>& sizes,
                 const std::string& info) {
    add(file, name, sizes, {{"DCP_SHARDING_INFO", info}});
  }
  std::string refused() {
    auto why = error_of([&] { open_catalog(folder_.path()); });
    EXPECT_THAT(why, HasSubstr(folder_.path()));
    return why;
  }

  const testing::TempDir folder_;
};

TEST_F(Foreign, FoldersAreReadWithAnIndexAndWithout) {
  add("model-1.safetensors", "a", {3});
  add("model-2.safetensors", "b", {2, 2});
  add("adapter.safetensors", "c", {1});
  EXPECT_EQ(open_catalog(folder_.path()).tensors.size(), 3);
  write(folder_.file("model.safetensors.index.json"),
        R"({"metadata":{},"weight_map":{"a":"model-1.safetensors","b":"model-2.safetensors"}})");
  const auto catalog = open_catalog(folder_.path() + "/");
  EXPECT_EQ(catalog.tensors.size(), 2);
  EXPECT_EQ(catalog.tensors.at("b").sizes, (std::vector<int64_t>{2, 2}));
  EXPECT_TRUE(catalog.entries.empty());
  EXPECT_EQ(open_catalog(folder_.file("adapter.safetensors")).tensors.count("c"), 1);
}

TEST_F(Foreign, FoldersWithNothingAreRefused) {
  EXPECT_THAT(refused(), HasSubstr("holds no checkpoint: neither lockstep.json nor"));
  EXPECT_THAT(error_of([&] { open_catalog(folder_.file("none")); }), HasSubstr("cannot read " + folder_.file("none")));
}

TEST_F(Foreign, IndexesThatAreWrongAreRefused) {
  add("model-1.safetensors", "a", {3});
  const auto with = [&](const std::string& text) {
    write(folder_.file("model.safetensors.index.json"), text);
    return refused();
  };
  EXPECT_THAT(with(R"({"weight_map":{"a":"model-9.safetensors"}})"), HasSubstr("cannot read"));
  EXPECT_THAT(with(R"({"weight_map":{"a":"../model-1.safetensors"}})"), HasSubstr("names a file elsewhere"));
  EXPECT_THAT(with(R"({"weight_map":{"a":"/etc/passwd"}})"), HasSubstr("names a file elsewhere"));
  EXPECT_THAT(with(R"({"weight_map":{"a":""}})"), HasSubstr("cannot read"));
  EXPECT_THAT(with(R"({"weight_map":{"a":7}})"), HasSubstr("names no file for 'a'"));
  for (const auto* text : {"{}", "[]", R"({"weight_map":{}})", R"({"weight_map":[]})", R"({"weight_map":"x"})"}) {
    EXPECT_THAT(with(text), HasSubstr("has no weight_map")) << text;
  }
  EXPECT_THAT(with(""), HasSubstr("is no JSON"));
  EXPECT_THAT(with(R"({"weight_map":)" + std::string(100'000, '[')), HasSubstr("is nested too deep"));
}

TEST_F(Foreign, TensorsThatAreTwiceOrOtherwiseElsewhereAreRefused) {
  add("model-1.safetensors", "a", {3});
  add("model-2.safetensors", "a", {3});
  EXPECT_THAT(refused(), HasSubstr("the pieces of 'a' hold more elements"));
  add("model-2.safetensors", "a", {3}, {}, "I8");
  EXPECT_THAT(refused(), HasSubstr("'a' is another tensor than in model-1.safetensors"));
  add("model-2.safetensors", "a", {3, 1});
  EXPECT_THAT(refused(), HasSubstr("'a' is another tensor than in model-1.safetensors"));
}

TEST_F(Foreign, ShardsAreJoined) {
  add_shard("shard-1.safetensors", "a", {2, 3}, R"({"a":{"saved_offsets":[0,0]}})");
  add_shard("shard-2.safetensors", "a", {1, 3}, R"({"a":{"saved_offsets":[2,0]}})");
  const auto tensor = open_catalog(folder_.path()).tensors.at("a");
  EXPECT_EQ(tensor.sizes, (std::vector<int64_t>{3, 3}));
  EXPECT_EQ(tensor.pieces[1].box.offsets, (std::vector<int64_t>{2, 0}));
}

TEST_F(Foreign, ShardsThatAreWrongAreRefused) {
  add_shard("shard-1.safetensors", "a", {2, 3}, R"({"a":{"saved_offsets":[0,0]}})");
  const auto with = [&](const std::string& info) {
    add_shard("shard-2.safetensors", "a", {1, 3}, info);
    return refused();
  };
  for (const auto* info : {"", "{", "nonsense"}) EXPECT_THAT(with(info), HasSubstr("its DCP_SHARDING_INFO is no JSON"));
  EXPECT_THAT(with("[]"), HasSubstr("its DCP_SHARDING_INFO is no object"));
  for (const auto* info : {"{}", R"({"a":1})", R"({"a":{}})", R"({"a":{"saved_offsets":2}})",
                           R"({"a":{"saved_offsets":[2]}})", R"({"a":{"saved_offsets":[-2,0]}})",
                           R"({"a":{"saved_offsets":[2.0,0]}})", R"({"a":{"saved_offsets":["2",0]}})"}) {
    EXPECT_THAT(with(info), HasSubstr("shard-2.safetensors does not say where 'a' begins")) << info;
  }
  EXPECT_THAT(with(R"({"a":{"saved_offsets":[1,0]}})"), HasSubstr("the pieces of 'a' hold more elements"));
  EXPECT_THAT(with(R"({"a":{"saved_offsets":[3,0]}})"),
              HasSubstr("the pieces of 'a' hold fewer elements than its 12. Is a file missing?"));
  EXPECT_THAT(with(R"({"a":{"saved_offsets":[9223372036854775807,0]}})"), HasSubstr("'a' begins where no tensor can"));
  EXPECT_THAT(with(R"({"a":{"saved_offsets":[9223372036854775806,0]}})"), HasSubstr("'a' has sizes ["));
  EXPECT_THAT(with(R"({"a":{"saved_offsets":[18446744073709551615,0]}})"), HasSubstr("'a'"));
  const auto alone = error_of([&] { open_catalog(folder_.file("shard-2.safetensors")); });
  EXPECT_THAT(alone, HasSubstr("shard-2.safetensors"));
}

TEST(Checkpoints, AreRefusedIfAFileIsMissingOrCut) {
  const testing::TempDir folder;
  auto values = at::ones({50});
  dcp::State state;
  state.add("x", values);
  const auto path = folder.file("saved");
  const auto file = path + "/rank-00000.safetensors";
  dcp::save(path, state);
  EXPECT_TRUE(dcp::verify(path).empty());
  ASSERT_EQ(::truncate(file.c_str(), 100), 0);
  EXPECT_THAT(error_of([&] { open_catalog(path); }), HasSubstr(file + " has 100 bytes, but was written with"));
  ASSERT_EQ(::unlink(file.c_str()), 0);
  EXPECT_THAT(error_of([&] { open_catalog(path); }), HasSubstr("cannot read " + file));
  EXPECT_EQ(dcp::verify(path).size(), 1);
}

TEST(Checkpoints, OfAManagerHaveItsNames) {
  const testing::TempDir folder;
  auto values = at::ones({5});
  dcp::State state;
  state.add("x", values);
  const dcp::CheckpointManager manager(folder.path());
  for (const auto* name : {"step-7", "step-0000000000000007", "step-", "step-x", "other"}) {
    dcp::save(folder.file(name), state);
  }
  EXPECT_TRUE(manager.steps().empty());
  dcp::save(manager.path_of(7), state);
  EXPECT_EQ(manager.steps(), std::vector<int64_t>{7});
}

TEST(Checkpoints, AreVerifiedByteByByte) {
  const testing::TempDir folder;
  auto values = at::ones({5});
  auto others = at::zeros({3}, at::kBool);
  dcp::State state;
  state.add("x", values).add("y", others);
  const auto path = folder.file("saved");
  dcp::save(path, state);
  const auto file = path + "/rank-00000.safetensors";
  std::ifstream in(file, std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  const auto data_begin = bytes.size() - 23;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    auto damaged = bytes;
    damaged[i] = static_cast<char>(damaged[i] ^ 4);
    write(file, damaged);
    const auto problems = dcp::verify(path);
    // Of the header, what nobody reads may change: metadata and shapes.
    if (i >= data_begin) {
      ASSERT_EQ(problems.size(), 1) << i;
      EXPECT_THAT(problems[0],
                  HasSubstr(str(file, " is damaged: the bytes of '", i < data_begin + 20 ? "x" : "y", "'")));
    }
  }
  auto renamed = bytes;
  renamed.replace(bytes.find("\"x\""), 3, "\"z\"");
  write(file, renamed);
  EXPECT_THAT(dcp::verify(path).at(0), HasSubstr("is damaged: the index knows of no tensor 'z' of 20 bytes at"));
}

}  // namespace
}  // namespace lockstep::catalog_test
