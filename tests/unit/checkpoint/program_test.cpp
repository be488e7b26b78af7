// lockstep-checkpoint: its command line, what it lists and compares, and the program itself.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdio>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>

#include "checkpoint_cli/commands.h"
#include "checkpoint_cli/differences.h"
#include "checkpoint_cli/listing.h"
#include "lockstep/checkpoint/load.h"
#include "lockstep/checkpoint/merge.h"
#include "lockstep/checkpoint/save.h"
#include "lockstep/testing/temp_dir.h"
#include "tests/support/error_text.h"

namespace lockstep::checkpoint_program_test {
namespace {

using namespace checkpoint_cli;
using error_text::error_of;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

using Tensors = std::map<std::string, at::Tensor>;
using Values = std::map<std::string, c10::IValue>;

/// An object that is these.
class Held : public dcp::Stateful {
 public:
  explicit Held(Tensors tensors, Values values = {}) : tensors_(std::move(tensors)), values_(std::move(values)) {}
  void save(dcp::Outgoing& out) override {
    for (const auto& [name, tensor] : tensors_) out.tensor(name, tensor);
    for (const auto& [name, value] : values_) out.value(name, value);
  }
  void load(dcp::Incoming& in) override {
    for (const auto& [name, tensor] : tensors_) in.tensor(name, tensor);
    for (const auto& [name, value] : values_) in.value(name);
  }

 private:
  const Tensors tensors_;
  const Values values_;
};

void save(const std::string& path, Tensors tensors, Values values = {}, std::optional<int64_t> step = std::nullopt) {
  Held held(std::move(tensors), std::move(values));
  dcp::State state;
  state.add("model", held);
  dcp::save(path, state, {.step = step});
}

void spoil(const std::string& path, int64_t from_end) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(-from_end, std::ios::end);
  const auto byte = static_cast<char>(file.get() ^ 1);
  file.seekp(-from_end, std::ios::end);
  file.put(byte);
}

struct Ran {
  int code = -1;
  std::string out;
  std::string err;
};

Ran run_here(const std::vector<std::string>& arguments) {
  const auto parsed = parse_command(arguments);
  if (!parsed.command) return {parsed.exit_code, parsed.text_for_stdout, parsed.text_for_stderr};
  std::ostringstream out;
  std::ostringstream err;
  const auto code = run(*parsed.command, out, err);
  return {code, out.str(), err.str()};
}

/// The program itself, both of its streams in one.
Ran run_program(const std::string& arguments) {
  const auto command = str("'", LOCKSTEP_CHECKPOINT_PATH, "' ", arguments, " 2>&1");
  std::FILE* pipe = ::popen(command.c_str(), "r");
  std::string out;
  for (int byte = std::fgetc(pipe); byte != EOF; byte = std::fgetc(pipe)) out += static_cast<char>(byte);
  const int status = ::pclose(pipe);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, out, ""};
}

TEST(CheckpointCommand, IsParsed) {
  const auto merge = parse_command({"merge", "a", "b", "--entry", "model", "--max-file-size", "2GiB"}).command;
  ASSERT_TRUE(merge);
  EXPECT_EQ(merge->action, Action::kMerge);
  EXPECT_EQ(merge->path, "a");
  EXPECT_EQ(merge->other, "b");
  EXPECT_EQ(merge->entry, "model");
  EXPECT_EQ(merge->max_file_bytes, int64_t{2} << 30);
  EXPECT_EQ(parse_command({"merge", "a", "b"}).command->max_file_bytes, 5'000'000'000);
  const auto diff = parse_command({"diff", "a", "b", "--tolerance", "1e-3"}).command;
  ASSERT_TRUE(diff);
  EXPECT_EQ(diff->action, Action::kDiff);
  EXPECT_EQ(diff->tolerance, 1e-3);
  EXPECT_TRUE(parse_command({"inspect", "a", "--json"}).command->is_json);
  EXPECT_EQ(parse_command({"verify", "a"}).command->action, Action::kVerify);
}

TEST(CheckpointCommand, RefusesMistakes) {
  for (const auto& arguments : std::vector<std::vector<std::string>>{{},
                                                                     {"list", "a"},
                                                                     {"inspect"},
                                                                     {"inspect", "a", "b"},
                                                                     {"merge", "a"},
                                                                     {"diff", "a"},
                                                                     {"diff", "a", "b", "--tolerance", "-1"},
                                                                     {"merge", "a", "b", "--max-file-size", "big"}}) {
    const auto parsed = parse_command(arguments);
    EXPECT_FALSE(parsed.command);
    EXPECT_EQ(parsed.exit_code, 2);
    EXPECT_THAT(parsed.text_for_stderr, HasSubstr("lockstep-checkpoint: "));
  }
}

TEST(CheckpointCommand, TellsOfItself) {
  EXPECT_THAT(parse_command({"--version"}).text_for_stdout, HasSubstr("lockstep-checkpoint "));
  EXPECT_THAT(parse_command({"--help"}).text_for_stdout, HasSubstr("verify"));
  EXPECT_THAT(parse_command({"merge", "--help"}).text_for_stdout, HasSubstr("--max-file-size"));
}

TEST(CheckpointCommand, ReadsSizes) {
  EXPECT_EQ(parse_bytes("4096"), 4096);
  EXPECT_EQ(parse_bytes("1B"), 1);
  EXPECT_EQ(parse_bytes("500MB"), 500'000'000);
  EXPECT_EQ(parse_bytes("1.5KiB"), 1536);
  for (const auto* wrong : {"", "GB", "0", "-1", "5gb", "5GBs", "1e9", "nan", "inf", "99999999TB"}) {
    EXPECT_FALSE(parse_bytes(wrong)) << wrong;
  }
}

TEST(CheckpointListing, HasTensorsValuesAndTotals) {
  const testing::TempDir folder;
  const auto path = folder.file("saved");
  save(path, {{"w", at::ones({2, 3})}, {"n", at::ones({}, at::kLong)}}, {{"epoch", 3}}, 7);
  const auto text = run_here({"inspect", path}).out;
  EXPECT_THAT(text, HasSubstr(path + "\nstep 7\nsaved by 1 rank\n"));
  EXPECT_THAT(text, HasSubstr("name     dtype  shape   pieces  bytes\n"));
  EXPECT_THAT(text, HasSubstr("model.n  I64    []           1      8\n"));
  EXPECT_THAT(text, HasSubstr("model.w  F32    [2, 3]       1     24\n"));
  EXPECT_THAT(text, HasSubstr("model.epoch = 3\n"));
  EXPECT_THAT(text, HasSubstr("2 tensors of 32 bytes and 1 value, in 1 file of "));

  const auto json = nlohmann::json::parse(run_here({"inspect", path, "--json"}).out);
  EXPECT_EQ(json["step"], 7);
  EXPECT_EQ(json["world_size"], 1);
  EXPECT_EQ(json["entries"], nlohmann::json({"model"}));
  EXPECT_EQ(json["tensors"]["model.w"]["shape"], nlohmann::json({2, 3}));
  EXPECT_EQ(json["tensors"]["model.w"]["pieces"][0]["file"], "rank-00000.safetensors");
  EXPECT_EQ(json["values"]["model.epoch"], 3);
  EXPECT_EQ(json["bytes"], 32);
}

TEST(CheckpointListing, ShowsTypesThatLibtorchDoesNotHave) {
  const testing::TempDir folder;
  const std::string header = R"({"x":{"dtype":"F4","shape":[4],"data_offsets":[0,2]}})";
  std::string length(8, '\0');
  length[0] = static_cast<char>(header.size());
  std::ofstream(folder.file("f4.safetensors"), std::ios::binary) << length << header << "ab";
  const auto merged = run_here({"merge", folder.file("f4.safetensors"), folder.file("merged")});
  EXPECT_EQ(merged.code, 2);
  EXPECT_THAT(merged.err, HasSubstr("f4.safetensors: 'x' is of type F4, which this libtorch does not have"));
  EXPECT_THAT(run_here({"inspect", folder.file("f4.safetensors")}).out, HasSubstr("x     F4     [4]         1      2"));
}

TEST(CheckpointListing, KeepsLinesShort) {
  EXPECT_LT(short_text(std::string(1000, 'x')).size(), 200);
  EXPECT_EQ(short_text("\xff"), "\"\\ufffd\"");
  EXPECT_EQ(readable_bytes(999), "999 bytes");
  EXPECT_EQ(readable_bytes(1'250'000'000), "1.25 GB");
}

TEST(CheckpointDifferences, AreNoneForAnotherDivisionOfFiles) {
  const testing::TempDir folder;
  const Tensors tensors = {{"w", at::randn({20, 30})}, {"nan", at::full({3}, std::nan(""))}, {"empty", at::ones({0})}};
  save(folder.file("a"), tensors, {{"epoch", 3}}, 1);
  dcp::merge(folder.file("a"), folder.file("hf"), {.max_file_bytes = 100});
  save(folder.file("b"), tensors, {{"epoch", 3}}, 2);
  EXPECT_TRUE(compare(folder.file("a"), folder.file("b"), 0).is_none());
  const auto with_merged = compare(folder.file("a"), folder.file("hf"), 0);
  EXPECT_THAT(with_merged.only_in_first, ElementsAre("model.epoch"));
  EXPECT_TRUE(with_merged.only_in_second.empty());
  EXPECT_TRUE(with_merged.changed.empty());
  EXPECT_EQ(with_merged.compared, 3);
}

TEST(CheckpointDifferences, NameWhatChanged) {
  const testing::TempDir folder;
  const Tensors before = {{"a", at::ones({2})},
                          {"b", at::ones({2, 3})},
                          {"c", at::ones({2})},
                          {"d", at::zeros({4})},
                          {"same", at::ones({1})}};
  const Tensors after = {{"b", at::ones({3, 2})},
                         {"c", at::ones({2}, at::kHalf)},
                         {"d", at::tensor({0.0, 0.5, -2.0, 0.0}, at::kFloat)},
                         {"e", at::ones({1})},
                         {"same", at::ones({1})}};
  save(folder.file("a"), before);
  save(folder.file("b"), after);
  const auto text = described(compare(folder.file("a"), folder.file("b"), 0), "A", "B");
  EXPECT_EQ(text,
            "only in A: model.a\n"
            "only in B: model.e\n"
            "model.b: shape [2, 3] and [3, 2]\n"
            "model.c: dtype F32 and F16\n"
            "model.d: 2 of 4 elements differ, by up to 2\n");
  const auto near = compare(folder.file("a"), folder.file("b"), 0.5).changed.back().what;
  EXPECT_EQ(near, "1 of 4 elements differ, by up to 2");
}

TEST(CheckpointDifferences, AreSeenInEveryType) {
  const testing::TempDir folder;
  for (const auto type : {at::kDouble,
                          at::kFloat,
                          at::kHalf,
                          at::kBFloat16,
                          at::kFloat8_e4m3fn,
                          at::kFloat8_e5m2,
                          at::kFloat8_e8m0fnu,
                          at::kFloat8_e4m3fnuz,
                          at::kFloat8_e5m2fnuz,
                          at::kComplexFloat,
                          at::kComplexDouble,
                          at::kLong,
                          at::kInt,
                          at::kShort,
                          at::kChar,
                          at::kUInt64,
                          at::kUInt32,
                          at::kUInt16,
                          at::kByte,
                          at::kBool}) {
    const auto one = at::zeros({3, 5}).to(type);
    const auto other = at::zeros({3, 5}).index_put_({at::tensor(1), at::tensor(2)}, at::ones({})).to(type);
    save(folder.file("a"), {{"x", one}});
    save(folder.file("b"), {{"x", other}});
    const auto found = compare(folder.file("a"), folder.file("b"), 0).changed;
    ASSERT_EQ(found.size(), 1) << type;
    EXPECT_THAT(found[0].what, HasSubstr("1 of 15 elements differ, by up to 1")) << type;
    EXPECT_TRUE(compare(folder.file("b"), folder.file("b"), 0).is_none()) << type;
  }
}

TEST(CheckpointDifferences, TellIntegersApartThatDoublesDoNot) {
  const testing::TempDir folder;
  save(folder.file("a"), {{"x", at::full({1}, INT64_MAX, at::kLong)}});
  save(folder.file("b"), {{"x", at::full({1}, INT64_MAX - 1, at::kLong)}});
  EXPECT_EQ(compare(folder.file("a"), folder.file("b"), 0).changed.at(0).what, "1 of 1 elements differ, by up to 1");
}

TEST(CheckpointDifferences, AreInfiniteWhereOneIsNoNumber) {
  const testing::TempDir folder;
  const auto infinity = std::numeric_limits<float>::infinity();
  save(folder.file("a"), {{"x", at::tensor({std::nanf(""), infinity, 1.0F, 0.0F})}});
  save(folder.file("b"), {{"x", at::tensor({std::nanf(""), infinity, std::nanf(""), -0.0F})}});
  EXPECT_EQ(compare(folder.file("a"), folder.file("b"), 1e30).changed.at(0).what,
            "1 of 4 elements differ, by up to inf");
}

TEST(CheckpointDifferences, SpanMoreThanIsReadAtATime) {
  const testing::TempDir folder;
  const auto one = at::zeros({3, 500'009});
  auto other = one.clone();
  other.index_put_({at::tensor(0), at::tensor(0)}, 1.0).index_put_({at::tensor(2), at::tensor(500'008)}, 3.0);
  save(folder.file("a"), {{"x", one}});
  save(folder.file("b"), {{"x", other}});
  EXPECT_EQ(compare(folder.file("a"), folder.file("b"), 0).changed.at(0).what,
            "2 of 1500027 elements differ, by up to 3");
}

TEST(CheckpointDifferences, GoIntoValues) {
  const testing::TempDir folder;
  const auto groups = [](double lr, bool has_more) {
    c10::impl::GenericDict group(c10::StringType::get(), c10::AnyType::get());
    group.insert("lr", lr);
    group.insert("betas", c10::ivalue::Tuple::create({c10::IValue(0.5), c10::IValue(lr)}));
    if (has_more) group.insert("eps", 1);
    c10::impl::GenericList list(c10::AnyType::get());
    list.push_back(group);
    return c10::IValue(list);
  };
  save(folder.file("a"), {}, {{"groups", groups(0.1, false)}, {"epoch", 1}, {"name", "x"}});
  save(folder.file("b"), {}, {{"groups", groups(0.2, true)}, {"epoch", 2}, {"name", "x"}});
  EXPECT_EQ(described(compare(folder.file("a"), folder.file("b"), 0), "A", "B"),
            "model.epoch: 1 and 2\n"
            "model.groups[0].lr: 0.1 and 0.2\n"
            "model.groups[0].betas[1]: 0.1 and 0.2\n"
            "model.groups[0].eps: null and 1\n");
  EXPECT_EQ(compare(folder.file("a"), folder.file("b"), 0.5).changed.size(), 2);
}

TEST(CheckpointProgram, Inspects) {
  const testing::TempDir folder;
  save(folder.file("a"), {{"w", at::ones({2, 3})}});
  const auto ran = run_program("inspect " + folder.file("a"));
  EXPECT_EQ(ran.code, 0) << ran.out;
  EXPECT_THAT(ran.out, HasSubstr("model.w"));
  const auto missing = run_program("inspect " + folder.file("none"));
  EXPECT_EQ(missing.code, 2);
  EXPECT_THAT(missing.out, HasSubstr("lockstep-checkpoint: cannot read " + folder.file("none")));
}

TEST(CheckpointProgram, Verifies) {
  const testing::TempDir folder;
  const auto path = folder.file("a");
  save(path, {{"w", at::ones({2, 3})}, {"v", at::ones({5})}});
  EXPECT_EQ(run_program("verify " + path).code, 0);
  spoil(path + "/rank-00000.safetensors", 3);
  const auto ran = run_program("verify " + path);
  EXPECT_EQ(ran.code, 1);
  EXPECT_THAT(ran.out, HasSubstr("a/rank-00000.safetensors is damaged: the bytes of 'model.w'"));
  EXPECT_EQ(run_program("verify " + folder.file("none")).code, 2);
}

TEST(CheckpointProgram, Merges) {
  const testing::TempDir folder;
  const auto weight = at::randn({2, 3});
  save(folder.file("a"), {{"w", weight}, {"v", at::ones({5})}}, {{"epoch", 1}});
  const auto ran =
      run_program(str("merge ", folder.file("a"), " ", folder.file("hf"), " --entry model --max-file-size 30"));
  EXPECT_EQ(ran.code, 0) << ran.out;
  EXPECT_THAT(ran.out, HasSubstr("2 tensors in 2 files"));
  auto read = at::zeros({2, 3});
  Held held({{"w", read}});
  dcp::State state;
  state.add("", held);
  dcp::load(folder.file("hf"), state, {.strict = false});
  EXPECT_TRUE(read.equal(weight));
  EXPECT_EQ(run_program(str("merge ", folder.file("a"), " ", folder.file("x"), " --entry nobody")).code, 2);
}

TEST(CheckpointProgram, Compares) {
  const testing::TempDir folder;
  save(folder.file("a"), {{"w", at::ones({3})}});
  save(folder.file("b"), {{"w", at::full({3}, 1.25)}});
  const auto both = str(folder.file("a"), " ", folder.file("b"));
  const auto ran = run_program("diff " + both);
  EXPECT_EQ(ran.code, 1);
  EXPECT_EQ(ran.out, "model.w: 3 of 3 elements differ, by up to 0.25\n");
  const auto near = run_program("diff --tolerance 0.25 " + both);
  EXPECT_EQ(near.code, 0);
  EXPECT_EQ(near.out, "the same: 1 tensors and values\n");
  EXPECT_EQ(run_program(str("diff ", folder.file("a"), " ", folder.file("none"))).code, 2);
  EXPECT_EQ(run_program("diff " + folder.file("a")).code, 2);
}

}  // namespace
}  // namespace lockstep::checkpoint_program_test
