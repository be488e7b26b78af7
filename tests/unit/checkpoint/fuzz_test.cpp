// Files that are spoiled in every way: each is read, or refused by an error that names it. Nothing else happens: no
// crash, no other exception, no memory that the file does not account for.
//
// More by hand: LOCKSTEP_FUZZ_ROUNDS=1000000, best under ASan with ASAN_OPTIONS=max_allocation_size_mb=256. A failure
// prints what repeats it: LOCKSTEP_FUZZ_SEED.
#include <ATen/ATen.h>
#include <c10/core/Allocator.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <array>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>

#include "lockstep/base/crc32c.h"
#include "lockstep/base/str.h"
#include "lockstep/checkpoint/catalog.h"
#include "lockstep/checkpoint/folder.h"
#include "lockstep/checkpoint/load.h"
#include "lockstep/checkpoint/merge.h"
#include "lockstep/checkpoint/safetensors.h"
#include "lockstep/checkpoint/save.h"
#include "lockstep/checkpoint/verify.h"
#include "lockstep/testing/temp_dir.h"

namespace lockstep::checkpoint_fuzz_test {
namespace {

using Json = nlohmann::ordered_json;

int64_t setting(const char* name, int64_t otherwise) {
  const auto* const given = std::getenv(name);
  return given != nullptr ? std::atoll(given) : otherwise;
}

std::string bytes_in(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

void write(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

/// Saves tensors in pieces and values of every kind; loads whatever there is.
class Everything : public dcp::Stateful {
 public:
  void save(dcp::Outgoing& out) override {
    const auto whole = at::arange(24, at::kFloat).view({4, 6});
    std::vector<BoxedValues> pieces;
    for (const auto& box : {Box{.offsets = {0, 0}, .sizes = {2, 6}}, Box{.offsets = {2, 0}, .sizes = {2, 3}},
                            Box{.offsets = {2, 3}, .sizes = {2, 3}}}) {
      pieces.push_back({.box = box, .values = box_in(whole, whole_box({4, 6}), box)});
    }
    out.pieces("w", {4, 6}, at::kFloat, pieces);
    out.tensor("flags", at::ones({3}, at::kBool));
    out.tensor("half", at::ones({5}, at::kBFloat16));
    out.tensor("scalar", at::ones({}, at::kLong));
    out.tensor("none", at::ones({0, 2}));
    out.tensor("complex", at::ones({2}, at::kComplexDouble));
    out.bytes("bytes", "some bytes");
    out.value("number", 1.5);
    c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
    dict.insert("lr", std::nan(""));
    dict.insert("betas", c10::ivalue::Tuple::create({c10::IValue(0.9), c10::IValue("text")}));
    dict.insert("list", std::vector<int64_t>{1, 2, 3});
    out.value("options", dict);
    out.values("state", {{"step", at::ones({1})}, {"count", 7}});
  }
  void load(dcp::Incoming& in) override {
    in.bytes("bytes");
    in.values("state");
    for (const auto& name : in.names()) in.form(name) ? (void)in.tensor(name) : (void)in.find_value(name);
  }
};

/// A folder and what was in it before.
struct Sample {
  std::string path = "";
  std::map<std::string, std::string> files = {};
};

Sample sample_of(const std::string& path) {
  Sample sample{.path = path};
  for (const auto& name : detail::names_in(path)) sample.files[name] = bytes_in(path + "/" + name);
  return sample;
}

/// A checkpoint, shards without our index, a Hugging Face folder, and one file.
std::vector<Sample> made_samples(const testing::TempDir& folder) {
  Everything everything;
  dcp::State state;
  state.add("all", everything);
  dcp::save(folder.file("own"), state, {.step = 3});
  dcp::merge(folder.file("own"), folder.file("hf"), {.max_file_bytes = 64});
  dcp::merge(folder.file("own"), folder.file("one"));
  detail::make_folder(folder.file("shards"));
  for (const auto& [name, bytes] : sample_of(folder.file("own")).files) {
    if (name.ends_with(".safetensors")) write(folder.file("shards/" + name), bytes);
  }
  std::vector<Sample> samples;
  for (const auto* name : {"own", "hf", "one", "shards"}) samples.push_back(sample_of(folder.file(name)));
  return samples;
}

/// The largest block that libtorch was asked for on this thread.
class LargestBlock : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void* /*block*/, int64_t bytes, std::size_t /*allocated*/, std::size_t /*reserved*/,
                         c10::Device /*device*/) override {
    most_ = std::max(most_, bytes);
  }
  bool memoryProfilingEnabled() const override { return true; }
  int64_t bytes() const { return most_; }

 private:
  int64_t most_ = 0;
};

class Spoiler {
 public:
  explicit Spoiler(uint64_t seed) : random_(seed) {}

  std::size_t below(std::size_t limit) { return std::uniform_int_distribution<std::size_t>(0, limit - 1)(random_); }
  template <class Items>
  const auto& one_of(const Items& items) {
    return *std::next(std::begin(items), static_cast<std::ptrdiff_t>(below(std::size(items))));
  }

  /// Of a file called `name`; pieces may come from `other`.
  std::string spoiled(const std::string& name, const std::string& bytes, const std::string& other) {
    if (below(3) == 0) {  // the JSON, by its form
      if (name.ends_with(".safetensors")) return with_header(spoiled_json(header_of(bytes)), data_of(bytes));
      const auto text = spoiled_json(bytes);
      return name == detail::kIndexName ? sealed(text) : text;
    }
    auto text = bytes;
    for (auto count = 1 + below(4); count-- > 0;) spoil_bytes(text, other);
    if (name == detail::kIndexName && below(2) == 0) return sealed(text);
    // So that what is in a header is looked at although its length has changed.
    if (name.ends_with(".safetensors") && below(2) == 0) {
      auto header = header_of(bytes);
      for (auto count = 1 + below(3); count-- > 0;) spoil_bytes(header, other);
      return with_header(header, data_of(bytes));
    }
    return text;
  }

 private:
  static std::size_t header_bytes(const std::string& file) {
    std::size_t bytes = 0;
    for (int byte = 8; byte-- > 0;)
      bytes = bytes << 8U | static_cast<unsigned char>(file[static_cast<std::size_t>(byte)]);
    return bytes;
  }
  static std::string header_of(const std::string& file) { return file.substr(8, header_bytes(file)); }
  static std::string data_of(const std::string& file) { return file.substr(8 + header_bytes(file)); }
  static std::string with_header(const std::string& header, const std::string& data) {
    std::string length;
    for (int byte = 0; byte < 8; ++byte) length += static_cast<char>(header.size() >> (8 * byte) & 0xff);
    return length + header + data;
  }
  /// With a checksum that fits.
  static std::string sealed(std::string text) {
    constexpr std::size_t kBegin = 13;
    if (text.size() < kBegin + 8) return text;
    std::array<char, 9> digits = {};
    std::snprintf(digits.data(), digits.size(), "%08x", crc32c(0, text.data() + kBegin + 8, text.size() - kBegin - 8));
    return text.replace(kBegin, 8, digits.data());
  }

  std::string any_value() {
    static const std::vector<std::string> kValues = {"0",
                                                     "-0",
                                                     "1",
                                                     "-1",
                                                     "2",
                                                     "7",
                                                     "1.5",
                                                     "1e300",
                                                     "1e999",
                                                     "-1e19",
                                                     "255",
                                                     "4294967295",
                                                     "4294967296",
                                                     "1099511627776",
                                                     "4611686018427387904",
                                                     "9223372036854775807",
                                                     "-9223372036854775808",
                                                     "9223372036854775808",
                                                     "18446744073709551615",
                                                     "18446744073709551616",
                                                     "true",
                                                     "null",
                                                     "[]",
                                                     "{}",
                                                     "\"\"",
                                                     "\"x\"",
                                                     "\"../x\"",
                                                     "\"nan\"",
                                                     "[0]",
                                                     "[0,0]",
                                                     "[1,2,3]",
                                                     "[9223372036854775807,2]",
                                                     "{\"dict\":{}}",
                                                     "{\"tuple\":[1]}",
                                                     "{\"float\":\"nan\"}",
                                                     "\"F4\"",
                                                     "\"F64\"",
                                                     "\"C128\"",
                                                     "\"U8\""};
    if (below(20) == 0) return std::string(1 + below(2000), below(2) == 0 ? '[' : '{');
    return one_of(kValues);
  }

  void spoil_bytes(std::string& text, const std::string& other) {
    const auto place = below(text.size() + 1);
    const auto length = std::min(text.size() - place, below(below(10) == 0 ? 200 : 12));
    switch (below(9)) {
      case 0:
        if (place < text.size()) text[place] = static_cast<char>(text[place] ^ (1 << below(8)));
        break;
      case 1:
        if (place < text.size()) text[place] = static_cast<char>(below(256));
        break;
      case 2:
        text.resize(place);
        break;
      case 3:
        text.erase(place, length);
        break;
      case 4:
        text.insert(place, text.substr(place, length));
        break;
      case 5: {
        const auto from = below(other.size() + 1);
        text.insert(place, other.substr(from, below(100)));
        break;
      }
      case 6:
        text.insert(place, std::string(below(below(50) == 0 ? 200'000 : 20), one_of(std::string("[{\"\\\0\xff 9"))));
        break;
      case 7:
        text.insert(place, any_value());
        break;
      default:
        replace_number(text, place);
    }
  }

  void replace_number(std::string& text, std::size_t from) {
    constexpr const char* kDigits = "0123456789";
    const auto begin = text.find_first_of(kDigits, from);
    if (begin == std::string::npos) return;
    const auto end = std::min(text.find_first_not_of(kDigits, begin), text.size());
    text.replace(begin, end - begin, any_value());
  }

  /// One node is another value, is gone, or is there twice.
  std::string spoiled_json(const std::string& text) {
    auto json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
    std::vector<Json*> nodes;
    collect(json, nodes);
    auto& node = *nodes[below(nodes.size())];
    switch (below(4)) {
      case 0:
        if (node.is_structured() && !node.empty())
          node.erase(std::next(node.begin(), static_cast<std::ptrdiff_t>(below(node.size()))));
        break;
      case 1:
        node = *nodes[below(nodes.size())];
        break;
      case 2:
        if (node.is_number_integer()) {
          const auto change = static_cast<int64_t>(below(9)) - 4;
          node = static_cast<int64_t>(static_cast<uint64_t>(node.get<int64_t>()) + static_cast<uint64_t>(change));
          break;
        }
        [[fallthrough]];
      default:
        node = "REPLACED";
    }
    auto spoiled = json.dump(-1, ' ', false, Json::error_handler_t::replace);
    const std::string mark = "\"REPLACED\"";
    if (const auto found = spoiled.find(mark); found != std::string::npos)
      spoiled.replace(found, mark.size(), any_value());
    return spoiled;
  }

  static void collect(Json& json, std::vector<Json*>& nodes) {
    nodes.push_back(&json);
    if (json.is_structured()) {
      for (auto& each : json) collect(each, nodes);
    }
  }

  std::mt19937_64 random_;
};

/// What became of one reading.
enum class Outcome { kRead, kRefused };

/// Fails unless it succeeds, or throws an error of ours that names `path`.
template <class Read>
Outcome outcome_of(const std::string& path, const Read& read) {
  try {
    read();
    return Outcome::kRead;
  } catch (const c10::Error& error) {
    const std::string what = error.what_without_backtrace();
    EXPECT_NE(what.find(path), std::string::npos) << what;
    EXPECT_NE(what.find("[lockstep/checkpoint]"), std::string::npos) << what;
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another exception: " << error.what();
  }
  return Outcome::kRefused;
}

void load_all(const std::string& path, const std::string& entry) {
  Everything everything;
  dcp::State state;
  state.add(entry, everything);
  dcp::load(path, state, {.strict = false, .casts = true});
}

TEST(CheckpointFuzz, SpoiledFilesAreReadOrRefused) {
  const auto rounds = setting("LOCKSTEP_FUZZ_ROUNDS", 4000);
  const auto seed = setting("LOCKSTEP_FUZZ_SEED", 1);
  const testing::TempDir folder;
  const auto samples = made_samples(folder);
  for (const auto& sample : samples) {
    ASSERT_EQ(
        outcome_of(sample.path, [&] { load_all(sample.path, sample.files.contains(detail::kIndexName) ? "all" : ""); }),
        Outcome::kRead);
  }
  const auto blocks = std::make_shared<LargestBlock>();
  const c10::DebugInfoGuard watch(c10::DebugInfoKind::PROFILER_STATE, blocks);
  rusage before = {};
  ::getrusage(RUSAGE_SELF, &before);
  std::array<int64_t, 2> outcomes = {};
  for (int64_t round = 0; round < rounds && !::testing::Test::HasFailure(); ++round) {
    const auto seed_of_round = seed + round;
    SCOPED_TRACE(str("LOCKSTEP_FUZZ_ROUNDS=1 LOCKSTEP_FUZZ_SEED=", seed_of_round));
    Spoiler spoiler(static_cast<uint64_t>(seed_of_round));
    const auto& sample = spoiler.one_of(samples);
    const auto& [name, bytes] = spoiler.one_of(sample.files);
    const auto& other = spoiler.one_of(spoiler.one_of(samples).files).second;
    const auto spoiled = spoiler.spoiled(name, bytes, other);
    const auto file = sample.path + "/" + name;
    write(file, spoiled);
    const bool is_safetensors = name.ends_with(".safetensors");
    const auto& path = is_safetensors && spoiler.below(4) == 0 ? file : sample.path;
    outcome_of("memory", [&] {
      is_safetensors ? (void)detail::parse_safetensors(spoiled, static_cast<int64_t>(spoiled.size()), "memory")
                     : (void)detail::parse_index(spoiled, "memory/", "memory");
    });
    const auto opened = outcome_of(path, [&] { detail::open_catalog(path); });
    ++outcomes[static_cast<std::size_t>(opened)];
    // What cannot be opened is refused by whoever opens it: enough to see now and then.
    if (opened == Outcome::kRead || spoiler.below(8) == 0) {
      outcome_of(path, [&] {
        const auto problems = dcp::verify(path);
        EXPECT_TRUE(opened == Outcome::kRead || !problems.empty());
      });
      outcome_of(path, [&] { load_all(path, spoiler.below(2) == 0 ? "all" : ""); });
    }
    if (spoiler.below(500) == 0) outcome_of(path, [&] { dcp::merge(path, folder.file("merged")); });
    write(file, bytes);
  }
  // Both happen often: otherwise the files are spoiled too little, or too much to get anywhere.
  if (rounds >= 1000) {
    EXPECT_GT(outcomes[0], rounds / 50);
    EXPECT_GT(outcomes[1], rounds / 4);
  }
  rusage after = {};
  ::getrusage(RUSAGE_SELF, &after);
  constexpr int64_t kMostKilobytes = 500'000;
  EXPECT_LT(blocks->bytes(), 1'000'000);
  EXPECT_LT(after.ru_maxrss - before.ru_maxrss, kMostKilobytes);
  RecordProperty("read", std::to_string(outcomes[0]));
  RecordProperty("refused", std::to_string(outcomes[1]));
  if (rounds > 100'000)
    std::printf("%lld read, %lld refused\n", static_cast<long long>(outcomes[0]), static_cast<long long>(outcomes[1]));
}

}  // namespace
}  // namespace lockstep::checkpoint_fuzz_test
