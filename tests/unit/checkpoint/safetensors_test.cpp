// The safetensors format: what is written is read, and everything else is refused, by name.
#include "lockstep/checkpoint/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "lockstep/base/str.h"
#include "lockstep/testing/temp_dir.h"
#include "tests/support/error_text.h"

namespace lockstep::safetensors_test {
namespace {

using namespace lockstep::detail;
using error_text::error_of;
using ::testing::HasSubstr;

std::string file_of(const std::string& header, const std::string& bytes = "") {
  std::string length;
  for (int byte = 0; byte < 8; ++byte) length += static_cast<char>(header.size() >> (8 * byte) & 0xff);
  return length + header + bytes;
}

SafetensorsHeader parsed(const std::string& file) {
  return parse_safetensors(file, static_cast<int64_t>(file.size()), "x.safetensors");
}

/// The message, which names the file.
std::string refused(const std::string& header, const std::string& bytes = "") {
  const auto why = error_of([&] { parsed(file_of(header, bytes)); });
  EXPECT_THAT(why, HasSubstr("x.safetensors")) << header;
  return why;
}

std::string tensor(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return str(R"({"dtype":")", dtype, R"(","shape":)", shape, R"(,"data_offsets":)", offsets, "}");
}

TEST(Safetensors, ReadWhatTheyWrite) {
  std::vector<SafetensorsEntry> entries = {{.name = "b", .dtype = "F32", .sizes = {2, 3}},
                                           {.name = "a", .dtype = "I64", .sizes = {}},
                                           {.name = "empty", .dtype = "BF16", .sizes = {0, 7}},
                                           {.name = "ünïcode \"quoted\"", .dtype = "BOOL", .sizes = {3}}};
  const auto header = laid_out_header(entries, {{"format", "pt"}, {"by", "us"}});
  EXPECT_EQ(header.size() % 8, 0);
  EXPECT_EQ(entries[0].begin, static_cast<int64_t>(header.size()));
  EXPECT_EQ(entries[3].end, entries[0].begin + 24 + 8 + 0 + 3);
  const auto read = parsed(header + std::string(35, 'x'));
  EXPECT_EQ(read.metadata, (std::map<std::string, std::string>{{"format", "pt"}, {"by", "us"}}));
  ASSERT_EQ(read.entries.size(), 4);
  for (const auto& entry : entries) {
    const auto found = std::find_if(read.entries.begin(), read.entries.end(),
                                    [&](const auto& each) { return each.name == entry.name; });
    ASSERT_NE(found, read.entries.end()) << entry.name;
    EXPECT_EQ(found->dtype, entry.dtype);
    EXPECT_EQ(found->sizes, entry.sizes);
    EXPECT_EQ(found->begin, entry.begin);
    EXPECT_EQ(found->end, entry.end);
  }
}

TEST(Safetensors, HaveAFileWithoutTensors) {
  EXPECT_TRUE(parsed(file_of("{}")).entries.empty());
  EXPECT_EQ(parsed(file_of(R"({"__metadata__":{}})")).metadata.size(), 0);
}

TEST(Safetensors, HaveANameForEveryTypeAndBack) {
  for (const auto type :
       {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kFloat8_e4m3fn, at::kFloat8_e5m2, at::kFloat8_e8m0fnu,
        at::kFloat8_e4m3fnuz, at::kFloat8_e5m2fnuz, at::kComplexFloat, at::kLong, at::kInt, at::kShort, at::kChar,
        at::kUInt64, at::kUInt32, at::kUInt16, at::kByte, at::kBool}) {
    const auto name = safetensors_dtype(type);
    ASSERT_FALSE(name.empty()) << type;
    EXPECT_EQ(dtype_from_safetensors(name), type);
    EXPECT_EQ(safetensors_bytes(name, {3}), 3 * static_cast<int64_t>(c10::elementSize(type)));
  }
  EXPECT_EQ(safetensors_dtype(at::kQInt8), "");
  EXPECT_EQ(safetensors_dtype(at::kComplexDouble), "");
  EXPECT_FALSE(dtype_from_safetensors("F4"));
  EXPECT_FALSE(dtype_from_safetensors(""));
}

TEST(Safetensors, CountBytes) {
  EXPECT_EQ(safetensors_bytes("F32", {}), 4);
  EXPECT_EQ(safetensors_bytes("F32", {2, 3}), 24);
  EXPECT_EQ(safetensors_bytes("U8", {INT64_MAX}), INT64_MAX);
  EXPECT_FALSE(safetensors_bytes("U16", {INT64_MAX}));
  EXPECT_FALSE(safetensors_bytes("F32", {1L << 40, 1L << 40}));
  EXPECT_FALSE(safetensors_bytes("F32", {-1}));
  EXPECT_FALSE(safetensors_bytes("F32", {0, -1}));
  EXPECT_EQ(safetensors_bytes("F32", {1L << 40, 1L << 40, 0}), 0);
}

TEST(Safetensors, RefuseFilesThatAreTooShort) {
  for (std::size_t bytes = 0; bytes < 8; ++bytes) {
    const std::string file(bytes, '\0');
    EXPECT_THAT(error_of([&] { parsed(file); }), HasSubstr("is no safetensors file: it has " + std::to_string(bytes)));
  }
}

TEST(Safetensors, RefuseAHeaderThatIsLongerThanTheFile) {
  auto file = file_of("{}");
  file[0] = 3;
  EXPECT_THAT(error_of([&] { parsed(file); }), HasSubstr("its header would not fit into"));
  file[7] = '\xff';  // more than an int64_t holds
  EXPECT_THAT(error_of([&] { parsed(file); }), HasSubstr("its header would not fit into"));
}

TEST(Safetensors, RefuseAHeaderThatIsNoJson) {
  for (const auto* header : {"", "{", "[]", "1", "null", "{\"a\"}", "{\"\xff\":1}", "{}x"}) {
    EXPECT_THAT(refused(header), HasSubstr("is no safetensors file: its header is no")) << header;
  }
  const std::string deep(100'000, '[');
  EXPECT_THAT(refused(deep), HasSubstr("is nested too deep"));
  EXPECT_THAT(refused(str(R"({"a":)", deep)), HasSubstr("is nested too deep"));
}

TEST(Safetensors, RefuseATensorWithoutItsParts) {
  EXPECT_THAT(refused(R"({"a":1})"), HasSubstr("tensor 'a' has no dtype"));
  EXPECT_THAT(refused(R"({"a":{"shape":[],"data_offsets":[0,0]}})"), HasSubstr("tensor 'a' has no dtype"));
  EXPECT_THAT(refused(R"({"a":{"dtype":4,"shape":[],"data_offsets":[0,0]}})"), HasSubstr("tensor 'a' has no dtype"));
  for (const auto* shape : {"null", "3", "{}", "[-1]", "[1.5]", "[true]", "[\"1\"]", "[[1]]", "[18446744073709551615]",
                            "[99999999999999999999]", "[1e3]"}) {
    EXPECT_THAT(refused(str(R"({"a":)", tensor("F32", shape, "[0,4]"), "}"), "1234"),
                HasSubstr("tensor 'a' has no shape"))
        << shape;
  }
  for (const auto* offsets : {"null", "[]", "[0]", "[0,4,4]", "[-4,0]", "[0,4.0]", "{\"0\":4}"}) {
    EXPECT_THAT(refused(str(R"({"a":)", tensor("F32", "[1]", offsets), "}"), "1234"),
                HasSubstr("tensor 'a' has no data_offsets"))
        << offsets;
  }
}

TEST(Safetensors, RefuseWrongOffsets) {
  EXPECT_THAT(refused(str(R"({"a":)", tensor("F32", "[1]", "[4,0]"), "}"), "1234"),
              HasSubstr("tensor 'a' lies at bytes 4 to 0 of the 4 that follow the header"));
  EXPECT_THAT(refused(str(R"({"a":)", tensor("F32", "[1]", "[0,8]"), "}"), "1234"),
              HasSubstr("tensor 'a' lies at bytes 0 to 8 of the 4"));
  EXPECT_THAT(refused(str(R"({"a":)", tensor("F32", "[1]", "[0,9223372036854775807]"), "}"), "1234"),
              HasSubstr("tensor 'a' lies at bytes"));
  EXPECT_THAT(refused(str(R"({"a":)", tensor("F32", "[2]", "[0,4]"), "}"), "1234"),
              HasSubstr("tensor 'a' of type F32 and shape [2] cannot have 4 bytes"));
}

TEST(Safetensors, RefuseASizeThatOverflows) {
  EXPECT_THAT(refused(str(R"({"a":)", tensor("F32", "[4611686018427387904,4]", "[0,0]"), "}")),
              HasSubstr("tensor 'a' of type F32 and shape [4611686018427387904, 4] cannot have 0 bytes"));
  EXPECT_THAT(refused(str(R"({"a":)", tensor("F32", "[4294967296,4294967296,1]", "[0,4]"), "}"), "1234"),
              HasSubstr("cannot have 4 bytes"));
}

TEST(Safetensors, RefuseOverlapsAndGaps) {
  const auto two = [](const std::string& first, const std::string& second) {
    return str(R"({"a":)", tensor("U8", "[4]", first), R"(,"b":)", tensor("U8", "[4]", second), "}");
  };
  EXPECT_EQ(parsed(file_of(two("[0,4]", "[4,8]"), "12345678")).entries.size(), 2);
  EXPECT_EQ(parsed(file_of(two("[4,8]", "[0,4]"), "12345678")).entries.front().name, "b");
  EXPECT_THAT(refused(two("[0,4]", "[3,7]"), "1234567"), HasSubstr("tensor 'b' begins at byte"));
  EXPECT_THAT(refused(two("[0,4]", "[0,4]"), "1234"), HasSubstr("tensor 'b' begins at byte"));
  EXPECT_THAT(refused(two("[0,4]", "[5,9]"), "123456789"), HasSubstr("tensor 'b' begins at byte"));
  EXPECT_THAT(refused(two("[1,5]", "[5,9]"), "123456789"), HasSubstr("tensor 'a' begins at byte"));
  EXPECT_THAT(refused(two("[0,4]", "[4,8]"), "123456789"), HasSubstr("of which 1 belong to no tensor"));
}

TEST(Safetensors, PassOverTypesTheyDoNotKnow) {
  const auto read = parsed(
      file_of(str(R"({"a":)", tensor("F4", "[4]", "[0,2]"), R"(,"b":)", tensor("U8", "[1]", "[2,3]"), "}"), "123"));
  ASSERT_EQ(read.entries.size(), 2);
  EXPECT_EQ(read.entries[0].dtype, "F4");
}

TEST(Safetensors, RefuseANameThatIsThereTwice) {
  EXPECT_THAT(
      refused(str(R"({"a":)", tensor("U8", "[1]", "[0,1]"), R"(,"a":)", tensor("U8", "[1]", "[0,1]"), "}"), "1"),
      HasSubstr("its header names 'a' twice"));
  EXPECT_THAT(refused(R"({"":{"dtype":"U8","dtype":"U8"}})"), HasSubstr("its header names 'dtype' twice"));
  EXPECT_THAT(refused(R"({"":1,"":1})"), HasSubstr("its header names '' twice"));
}

TEST(Safetensors, RefuseMetadataThatIsNoText) {
  for (const auto* metadata : {"1", "\"pt\"", "[]", R"({"format":1})", R"({"format":{}})", "null"}) {
    EXPECT_THAT(refused(str(R"({"__metadata__":)", metadata, "}")), HasSubstr("its __metadata__ is not text by name"));
  }
}

TEST(Safetensors, AreReadFromFiles) {
  const testing::TempDir folder;
  const auto path = folder.file("x.safetensors");
  const auto bytes = file_of(str(R"({"a":)", tensor("U8", "[4]", "[0,4]"), "}"), "1234");
  std::ofstream(path, std::ios::binary) << bytes;
  EXPECT_EQ(read_safetensors_header(path).entries.size(), 1);
  for (std::size_t length = 0; length < bytes.size(); ++length) {
    std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes.substr(0, length);
    EXPECT_THAT(error_of([&] { read_safetensors_header(path); }), HasSubstr(path)) << length;
  }
  EXPECT_THAT(error_of([&] { read_safetensors_header(folder.file("none")); }), HasSubstr("cannot read"));
  EXPECT_THAT(error_of([&] { read_safetensors_header(folder.path()); }), HasSubstr("cannot read"));
}

}  // namespace
}  // namespace lockstep::safetensors_test
