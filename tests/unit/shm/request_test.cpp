// Requests as values, and what ranks see of each other's before anything moves: a team whose ranks are all here.
#include "lockstep/shm/request.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>

#include <memory>
#include <vector>

#include "lockstep/shm/errors.h"
#include "lockstep/shm/team.h"

namespace lockstep::shm::request_test {
namespace {

using ::testing::HasSubstr;

/// Spans of as many bytes, at addresses nobody looks at.
std::vector<Span> spans_of(const std::vector<std::size_t>& bytes) {
  static std::byte memory[1 << 16];
  std::vector<Span> spans;
  for (const auto each : bytes) spans.push_back({memory, each});
  return spans;
}

TEST(Request, IsDescribedAsItsCallerSeesIt) {
  const auto one = spans_of({20});
  EXPECT_EQ(describe(Request{}), "barrier()");
  EXPECT_EQ(describe(Request{.kind = Kind::kAllReduce, .element_bytes = 4, .gives = one, .gets = one}),
            "all_reduce(sum, float[5])");
  EXPECT_EQ(describe(Request{.kind = Kind::kReduce,
                             .op = ReduceOp::kPremulSum,
                             .dtype = DType::kBFloat16,
                             .element_bytes = 2,
                             .root = 3,
                             .gives = one}),
            "reduce(premul_sum, bfloat16[10], root 3)");
  // Who only gets says how much.
  EXPECT_EQ(describe(Request{.kind = Kind::kBroadcast, .dtype = DType::kInt8, .root = 1, .gets = one}),
            "broadcast(int8[20], root 1)");
  const auto two = spans_of({12, 8});
  EXPECT_EQ(describe(Request{.kind = Kind::kAllToAll, .element_bytes = 4, .gives = two, .gets = one}),
            "all_to_all(float[5])");
  EXPECT_EQ(
      describe(Request{
          .kind = Kind::kAllGather, .dtype = static_cast<DType>(70), .element_bytes = 1, .gives = one, .gets = two}),
      "all_gather(type 70[20])");
}

TEST(Request, HasAsManyStreamsAsItsKindSays) {
  const auto four = spans_of({4, 8, 12, 16});
  EXPECT_EQ(length_of(four), 40u);
  EXPECT_EQ(length_of({}), 0u);
  const Request all_to_all{.kind = Kind::kAllToAll, .gives = four, .gets = four};
  const Shape divided(Kind::kAllToAll);
  EXPECT_EQ(length_of(given_to(all_to_all, divided, 1, 4)), 8u);
  EXPECT_EQ(length_of(received_from(all_to_all, divided, 3, 4)), 16u);
  // Two spans for each of two ranks.
  EXPECT_EQ(length_of(given_to(all_to_all, divided, 1, 2)), 28u);
  const Request reduce{.kind = Kind::kReduce, .root = 1, .gives = four, .gets = four};
  EXPECT_EQ(given_to(reduce, Shape(Kind::kReduce), 0, 2).size(), 0u);
  EXPECT_EQ(given_to(reduce, Shape(Kind::kReduce), 1, 2).size(), 4u);
  const Request broadcast{.kind = Kind::kBroadcast, .root = 1, .gets = four};
  EXPECT_EQ(received_from(broadcast, Shape(Kind::kBroadcast), 0, 2).size(), 0u);
  EXPECT_EQ(received_from(broadcast, Shape(Kind::kBroadcast), 1, 2).size(), 4u);
}

/// What two ranks say to each other's requests; empty if they agree.
std::vector<std::string> verdicts(const Request& first, const Request& second) {
  static int next = 0;
  const auto key = "verdicts" + std::to_string(next++);
  const auto join = [&](int rank) { return Team::of_threads({.rank = rank, .size = 2, .group = "g"}, key); };
  auto other = std::async(std::launch::async, join, 1);
  std::vector<std::shared_ptr<Team>> teams = {join(0)};
  teams.push_back(other.get());
  const Request* requests[] = {&first, &second};
  for (int rank = 0; rank < 2; ++rank) {
    write_header(*requests[rank], Shape(requests[rank]->kind), *teams[rank], 9, teams[rank]->slot(rank, 0));
  }
  std::vector<std::string> texts;
  for (int rank = 0; rank < 2; ++rank) {
    try {
      check_headers(*requests[rank], Shape(requests[rank]->kind), *teams[rank], 0);
      texts.emplace_back();
    } catch (const MismatchError& error) {
      texts.emplace_back(error.what());
    }
  }
  return texts;
}

Request all_reduce_of(const std::vector<Span>& spans) {
  return {.kind = Kind::kAllReduce, .element_bytes = 4, .gives = spans, .gets = spans};
}

TEST(Request, AgreesWithOneThatIsAlike) {
  const auto spans = spans_of({20, 24});
  for (const auto& text : verdicts(all_reduce_of(spans), all_reduce_of(spans))) EXPECT_EQ(text, "");
}

TEST(Request, DisagreesOnBothRanksNamingBothSides) {
  const auto spans = spans_of({20});
  const auto longer = spans_of({24});
  const auto pieces = spans_of({12, 8});
  const auto mine = all_reduce_of(spans);
  struct Case {
    Request theirs;
    const char* what;
    const char* side;
  };
  Request other_op = mine;
  other_op.op = ReduceOp::kMax;
  Request other_type = mine;
  other_type.dtype = DType::kInt32;
  Request broadcast{.kind = Kind::kBroadcast, .element_bytes = 4, .gets = spans};
  for (const auto& [theirs, what, side] :
       {Case{all_reduce_of(longer), "sizes", "all_reduce(sum, float[6])"},
        Case{all_reduce_of(pieces), "sizes", "all_reduce(sum, float[5])"},
        Case{other_op, "reductions", "all_reduce(max, float[5])"},
        Case{other_type, "dtypes", "all_reduce(sum, int32[5])"},
        Case{broadcast, "operations", "broadcast(float[5], root 0)"}, Case{Request{}, "operations", "barrier()"}}) {
    const auto texts = verdicts(mine, theirs);
    for (const auto& text : texts) {
      EXPECT_THAT(text, HasSubstr(std::string("ranks disagree on ") + what));
      EXPECT_THAT(text, HasSubstr("rank 0 calls all_reduce(sum, float[5])"));
      EXPECT_THAT(text, HasSubstr(std::string("rank 1 calls ") + side));
      EXPECT_THAT(text, HasSubstr("#9 on group 'g'"));
    }
  }
}

TEST(Request, ShowsTheLabelsOfBothSides) {
  const auto spans = spans_of({20});
  const auto longer = spans_of({24});
  auto bucket = all_reduce_of(spans);
  bucket.label = "DDP bucket";
  bucket.label_index = 3;
  auto message = all_reduce_of(longer);
  message.label = "Join's control message";
  EXPECT_EQ(describe(bucket, 12), "all_reduce(sum, float[5]) #12 of DDP bucket 3");
  for (const auto& text : verdicts(bucket, message)) {
    EXPECT_THAT(text, HasSubstr("rank 0 calls all_reduce(sum, float[5]) of DDP bucket 3"));
    EXPECT_THAT(text, HasSubstr("rank 1 calls all_reduce(sum, float[6]) of Join's control message"));
  }
  const std::string long_text(200, 'x');
  message.label = long_text.c_str();
  for (const auto& text : verdicts(bucket, message)) {
    EXPECT_THAT(text, HasSubstr(" of " + std::string(kLabelBytes, 'x')));
  }
}

TEST(Request, DisagreesOnRoots) {
  const auto spans = spans_of({20});
  const Request first{.kind = Kind::kReduce, .element_bytes = 4, .root = 0, .gives = spans, .gets = spans};
  const Request second{.kind = Kind::kReduce, .element_bytes = 4, .root = 1, .gives = spans, .gets = spans};
  for (const auto& text : verdicts(first, second)) EXPECT_THAT(text, HasSubstr("ranks disagree on roots"));
}

TEST(Request, ComparesWhatIsGivenWithWhatIsExpected) {
  // Rank 0 gives 8 bytes to itself and 12 to rank 1, which expects 16.
  const auto first_gives = spans_of({8, 12});
  const auto first_gets = spans_of({8, 4});
  const auto second_gives = spans_of({4, 4});
  const auto second_gets = spans_of({16, 4});
  const Request first{.kind = Kind::kAllToAll, .element_bytes = 4, .gives = first_gives, .gets = first_gets};
  const Request second{.kind = Kind::kAllToAll, .element_bytes = 4, .gives = second_gives, .gets = second_gets};
  for (const auto& text : verdicts(first, second)) {
    EXPECT_THAT(text, HasSubstr("rank 0 gives 3 elements to rank 1, which expects 4"));
  }
  const auto right = spans_of({12, 4});
  Request repaired = second;
  repaired.gets = right;
  for (const auto& text : verdicts(first, repaired)) EXPECT_EQ(text, "");
}

TEST(Request, ShowsWhereItsBytesAre) {
  std::vector<std::byte> memory(1 << 15);
  const Span span{memory.data() + 64, 1 << 14};
  const Request request{.kind = Kind::kAllReduce, .element_bytes = 4, .gives = {&span, 1}, .gets = {&span, 1}};
  const auto team = Team::of_threads({.rank = 0, .size = 1}, "shows");
  auto* slot = team->slot(0, 0);
  write_header(request, Shape(request.kind), *team, 0, slot);
  EXPECT_TRUE(reinterpret_cast<const Header*>(slot)->is_exposed);
  EXPECT_EQ(team->resolve(0, location_in(slot, *team, 0)), span.at);
}

}  // namespace
}  // namespace lockstep::shm::request_test
