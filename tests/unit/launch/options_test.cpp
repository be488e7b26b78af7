#include "cli/options.h"

#include "tests/unit/launch/time_limit.h"

namespace lockstep::cli {
namespace {

using std::chrono::milliseconds;
using Arguments = std::vector<std::string>;

constexpr int kCores = 6;

RunOptions accepted(const Arguments& arguments) {
  const auto parsed = parse_options(arguments, kCores);
  EXPECT_TRUE(parsed.options) << parsed.text_for_stderr;
  return parsed.options.value_or(RunOptions{});
}

std::string refused(const Arguments& arguments) {
  const auto parsed = parse_options(arguments, kCores);
  EXPECT_FALSE(parsed.options);
  EXPECT_EQ(parsed.exit_code, 2);
  EXPECT_NE(parsed.text_for_stderr.find("Usage: lockstep-run"), std::string::npos);
  EXPECT_EQ(parsed.text_for_stdout, "");
  return parsed.text_for_stderr;
}

TEST(RunOptions, HaveDefaults) {
  const auto options = accepted({"train"});
  EXPECT_EQ(options.ranks_per_node, 1);
  EXPECT_EQ(options.node_count, 1);
  EXPECT_EQ(options.node_rank, 0);
  EXPECT_FALSE(options.master);
  EXPECT_EQ(options.max_restarts, 0);
  EXPECT_FALSE(options.log_dir);
  EXPECT_FALSE(options.timeout);
  EXPECT_EQ(options.grace, milliseconds(5000));
  EXPECT_TRUE(options.prefix);
  EXPECT_FALSE(options.survivors);
  EXPECT_EQ(options.command, Arguments{"train"});
}

TEST(RunOptions, TakeEveryOption) {
  const auto options =
      accepted({"-n", "4", "--nnodes", "2", "--node-rank", "1", "--master", "head:29500", "--max-restarts", "3",
                "--log-dir", "logs", "--timeout", "10m", "--grace", "2s", "--no-prefix", "train"});
  EXPECT_EQ(options.ranks_per_node, 4);
  EXPECT_EQ(options.node_count, 2);
  EXPECT_EQ(options.node_rank, 1);
  EXPECT_EQ(options.master, (Endpoint{"head", 29500}));
  EXPECT_EQ(options.max_restarts, 3);
  EXPECT_EQ(options.log_dir, "logs");
  EXPECT_EQ(options.timeout, milliseconds(600'000));
  EXPECT_EQ(options.grace, milliseconds(2000));
  EXPECT_FALSE(options.prefix);
}

// (U-9)
TEST(RunOptions, SayWhatMpirunsSpellingIsHere) {
  for (const Arguments& arguments : {Arguments{"-np", "2", "train"}, Arguments{"-np", "2", "--", "train"}}) {
    EXPECT_NE(refused(arguments).find("-np is -n here: lockstep-run -n 2 PROGRAM"), std::string::npos);
  }
}

TEST(RunOptions, TakeTheRankCountInAllItsSpellings) {
  EXPECT_EQ(accepted({"-n4", "train"}).ranks_per_node, 4);
  EXPECT_EQ(accepted({"--nproc-per-node", "4", "train"}).ranks_per_node, 4);
  EXPECT_EQ(accepted({"--nproc-per-node=4", "train"}).ranks_per_node, 4);
  EXPECT_EQ(accepted({"--nproc_per_node=4", "train"}).ranks_per_node, 4);
  EXPECT_EQ(accepted({"-n", "auto", "train"}).ranks_per_node, kCores);
}

TEST(RunOptions, LeaveTheProgramsArgumentsUntouched) {
  EXPECT_EQ(accepted({"-n", "2", "train", "-n", "3", "--help", "--", "--lr=1", ""}).command,
            (Arguments{"train", "-n", "3", "--help", "--", "--lr=1", ""}));
}

TEST(RunOptions, TakeADoubleDashBeforeTheProgram) {
  EXPECT_EQ(accepted({"-n", "2", "--", "train", "--", "-x"}).command, (Arguments{"train", "--", "-x"}));
  EXPECT_EQ(accepted({"--", "-odd"}).command, Arguments{"-odd"});
}

TEST(RunOptions, RefuseAMissingProgram) {
  EXPECT_NE(refused({}).find("PROGRAM is missing"), std::string::npos);
  EXPECT_NE(refused({"-n", "2"}).find("PROGRAM is missing"), std::string::npos);
  EXPECT_NE(refused({"--"}).find("PROGRAM is missing"), std::string::npos);
}

TEST(RunOptions, RefuseAnUnknownOptionByName) {
  EXPECT_NE(refused({"--bogus", "train"}).find("unknown option --bogus"), std::string::npos);
}

TEST(RunOptions, RefuseNumbersThatMakeNoSense) {
  for (const char* bad : {"0", "-1", "two", "1.5", "", "99999999999", "5000"}) refused({"-n", bad, "train"});
  refused({"-n"});
  refused({"--max-restarts", "-1", "train"});
  refused({"--timeout", "soon", "train"});
  refused({"--grace", "0", "train"});
}

TEST(RunOptions, RefuseANodeThatDoesNotExist) {
  const auto text = refused({"--nnodes", "2", "--node-rank", "2", "--master", "head:1", "train"});
  EXPECT_NE(text.find("--node-rank 2 does not exist with --nnodes 2"), std::string::npos);
}

TEST(RunOptions, NeedAMasterWithSeveralNodes) {
  EXPECT_NE(refused({"--nnodes", "2", "train"}).find("--master HOST:PORT is needed"), std::string::npos);
}

TEST(RunOptions, TakeSurvivorsOnOneNode) {
  EXPECT_TRUE(accepted({"--survivors", "train"}).survivors);
  EXPECT_TRUE(accepted({"-n", "4", "--survivors", "--max-restarts", "2", "--nnodes", "1", "train"}).survivors);
  EXPECT_EQ(accepted({"train", "--survivors"}).command, (Arguments{"train", "--survivors"}));
  EXPECT_FALSE(accepted({"train", "--survivors"}).survivors);
  const auto text = refused({"--survivors", "--nnodes", "2", "--master", "head:29500", "train"});
  EXPECT_NE(text.find("--survivors is for one node"), std::string::npos);
}

TEST(RunOptions, PrintHelpAndVersionOnStdout) {
  const auto help = parse_options({"--help"}, kCores);
  EXPECT_EQ(help.exit_code, 0);
  EXPECT_NE(help.text_for_stdout.find("PROGRAM [ARGUMENTS...]"), std::string::npos);
  const auto version = parse_options({"--version"}, kCores);
  EXPECT_EQ(version.exit_code, 0);
  EXPECT_EQ(version.text_for_stdout.rfind("lockstep-run ", 0), 0U);
}

TEST(Duration, HasUnits) {
  EXPECT_EQ(parse_duration("90"), milliseconds(90'000));
  EXPECT_EQ(parse_duration("90s"), milliseconds(90'000));
  EXPECT_EQ(parse_duration("250ms"), milliseconds(250));
  EXPECT_EQ(parse_duration("1.5m"), milliseconds(90'000));
  EXPECT_EQ(parse_duration("1h"), milliseconds(3'600'000));
}

TEST(Duration, IsPositiveAndFinite) {
  for (const char* bad : {"", "0", "-1", "1x", "s", "1 s", "1e400", "inf", "nan", "99999999999999h"}) {
    EXPECT_EQ(parse_duration(bad), std::nullopt) << bad;
  }
}

TEST(Endpoint, IsAHostAndAPort) {
  EXPECT_EQ(parse_endpoint("head:29500"), (Endpoint{"head", 29500}));
  EXPECT_EQ(parse_endpoint("[::1]:80"), (Endpoint{"::1", 80}));
  for (const char* bad : {"", "head", ":80", "head:", "head:0", "head:65536", "head:x", "::1:80", "[]:80"}) {
    EXPECT_EQ(parse_endpoint(bad), std::nullopt) << bad;
  }
}

}  // namespace
}  // namespace lockstep::cli
