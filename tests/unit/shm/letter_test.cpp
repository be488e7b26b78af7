// Letters over a pair of sockets, with more enclosed than there is room for.
#include "lockstep/shm/letter.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <thread>

#include "lockstep/shm/errors.h"
#include "lockstep/shm/team.h"

namespace lockstep::shm {
namespace {

using ::testing::HasSubstr;

class Letters : public ::testing::Test {
 protected:
  void SetUp() override {
    int ends[2] = {-1, -1};
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
    mine_.reset(ends[0]);
    theirs_.reset(ends[1]);
    for (auto& file : files_) file.reset(::memfd_create("enclosed", MFD_CLOEXEC));
  }
  /// Descriptors of the enclosed files, however many others the process opens and closes meanwhile.
  int count_open() const {
    int count = 0;
    struct stat each = {};
    struct stat file = {};
    for (int fd = 0; fd < 1024; ++fd) {
      if (::fstat(fd, &each) != 0) continue;
      for (const auto& enclosed : files_) {
        if (::fstat(enclosed.get(), &file) == 0 && file.st_dev == each.st_dev && file.st_ino == each.st_ino) ++count;
      }
    }
    return count;
  }
  std::array<int, 3> fds() const { return {files_[0].get(), files_[1].get(), files_[2].get()}; }

  UniqueFd mine_;
  UniqueFd theirs_;
  UniqueFd files_[3];
};

TEST_F(Letters, ArriveWithWhatIsEnclosed) {
  const auto all = fds();
  ASSERT_TRUE(send_letter(mine_.get(), {.topic = Topic::kMemory, .rank = 3, .size = 5, .process = {7, 8}}, all));
  ASSERT_TRUE(send_letter(mine_.get(), {.topic = Topic::kTable, .body = std::string(50'000, 'x')}));
  Letter letter;
  ASSERT_TRUE(receive_letter(theirs_.get(), letter));
  EXPECT_EQ(letter.topic, Topic::kMemory);
  EXPECT_EQ(letter.rank, 3);
  EXPECT_EQ(letter.size, 5);
  EXPECT_EQ(letter.process, (ProcessId{7, 8}));
  EXPECT_EQ(letter.enclosed.size(), 3U);
  ASSERT_TRUE(receive_letter(theirs_.get(), letter));
  EXPECT_EQ(letter.body, std::string(50'000, 'x'));
  EXPECT_TRUE(letter.enclosed.empty());
}

// With room for none, one and two of three.
TEST_F(Letters, ThatDoNotFitTheLimitSaySoAndLeakNothing) {
  const auto all = fds();
  ASSERT_EQ(count_open(), 3);
  rlimit usual = {};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &usual), 0);
  for (const std::size_t room : {0, 1, 2}) {
    ASSERT_TRUE(send_letter(mine_.get(), {.topic = Topic::kMemory}, all));
    auto low = usual;
    low.rlim_cur = 100;
    ::setrlimit(RLIMIT_NOFILE, &low);
    std::vector<UniqueFd> fillers;
    for (int fd = -1; (fd = ::open("/dev/null", O_RDONLY | O_CLOEXEC)) >= 0;) fillers.emplace_back(fd);
    fillers.resize(fillers.size() - room);
    std::string message;
    {
      Letter letter;
      try {
        receive_letter(theirs_.get(), letter);
      } catch (const Refusal& refusal) {
        message = refusal.what();
      }
    }
    fillers.clear();
    ::setrlimit(RLIMIT_NOFILE, &usual);
    EXPECT_THAT(message, HasSubstr("out of file descriptors: this process may have 100 open. Raise the limit"));
    EXPECT_EQ(count_open(), 3) << room;
  }
  Letter letter;
  ASSERT_TRUE(send_letter(mine_.get(), {.topic = Topic::kMemory}, all));
  EXPECT_TRUE(receive_letter(theirs_.get(), letter));
  EXPECT_EQ(letter.enclosed.size(), 3U);
  EXPECT_EQ(count_open(), 6) << "of those that arrived there are two each";
}

// Whoever goes says why before, and is heard though it did not read everything.
TEST_F(Letters, AreReadWhenTheirSenderIsGone) {
  ASSERT_TRUE(send_letter(mine_.get(), {.topic = Topic::kTable}));
  ASSERT_TRUE(send_letter(theirs_.get(), {.topic = Topic::kFarewell, .body = "enough"}));
  theirs_.reset();
  EXPECT_FALSE(send_letter(mine_.get(), {.topic = Topic::kTable}));
  Letter letter;
  ASSERT_TRUE(receive_letter(mine_.get(), letter));
  EXPECT_EQ(letter.body, "enough");
  EXPECT_FALSE(receive_letter(mine_.get(), letter));
}

TEST_F(Letters, OfStrangersAreNone) {
  ASSERT_EQ(::send(mine_.get(), "hello", 5, 0), 5);
  Letter letter;
  EXPECT_FALSE(receive_letter(theirs_.get(), letter));
  EXPECT_EQ(count_open(), 3);
}

TEST_F(Letters, OfAnotherBuildAreRefused) {
  ASSERT_TRUE(send_letter(mine_.get(), {.topic = Topic::kHello, .rank = 1, .size = 2}));
  std::array<char, 256> bytes = {};
  const auto count = ::recv(theirs_.get(), bytes.data(), bytes.size(), 0);
  ASSERT_GT(count, 16);
  bytes[8] = static_cast<char>(bytes[8] ^ 1);  // of the hash of sizes, behind the magic number
  ASSERT_EQ(::send(mine_.get(), bytes.data(), static_cast<std::size_t>(count), 0), count);
  Letter letter;
  EXPECT_THROW(receive_letter(theirs_.get(), letter), Refusal);
}

/// A rank is an index to whoever reads it.
TEST(Meeting, RefusesLettersFromRanksThereAreNot) {
  const std::string name = "lockstep-letter-test-" + std::to_string(::getpid());
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  const UniqueFd door(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  ASSERT_EQ(::bind(door.get(), reinterpret_cast<const sockaddr*>(&address), length), 0);
  ASSERT_EQ(::listen(door.get(), 1), 0);
  std::thread host([&] {
    const UniqueFd socket(::accept(door.get(), nullptr, nullptr));
    Letter hello;
    receive_letter(socket.get(), hello);
    std::string table(2 * sizeof(ProcessId), '\1');
    send_letter(socket.get(), {.topic = Topic::kTable, .rank = 2, .size = 2, .body = std::move(table)});
  });
  std::string message;
  try {
    Team::of_processes({.rank = 1, .size = 2, .timeout = std::chrono::seconds(10)},
                       [&](const std::string&) { return name; });
  } catch (const PeerError& error) {
    message = error.what();
  }
  host.join();
  EXPECT_THAT(message, HasSubstr("rank 0 does not keep to the protocol"));
}

}  // namespace
}  // namespace lockstep::shm
