#include "lockstep/shm/memory.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <utility>

#include "lockstep/shm/errors.h"

namespace lockstep::shm {
namespace {

using ::testing::HasSubstr;

constexpr std::size_t kPage = 4096;

std::size_t pages_of(const SharedMemory& memory) {
  struct stat status = {};
  EXPECT_EQ(::fstat(memory.fd(), &status), 0);
  return static_cast<std::size_t>(status.st_blocks) * 512 / kPage;
}

UniqueFd copy_of(const SharedMemory& memory) {
  return UniqueFd(::fcntl(memory.fd(), F_DUPFD_CLOEXEC, 0));
}

TEST(SharedMemory, IsZeroAndCostsNothingUntilCommitted) {
  auto memory = SharedMemory::create("test", std::size_t{1} << 40);
  EXPECT_EQ(memory.size(), std::size_t{1} << 40);
  EXPECT_EQ(pages_of(memory), 0u);
  memory.commit(kPage, 3 * kPage);
  EXPECT_GE(pages_of(memory), 3u);
  EXPECT_LT(pages_of(memory), 2000u);
  for (std::size_t i = 0; i < 3 * kPage; ++i) ASSERT_EQ(memory.data()[kPage + i], std::byte{0}) << i;
}

TEST(SharedMemory, KeepsWhatIsThereWhenCommittedAgain) {
  auto memory = SharedMemory::create("test", 4 * kPage);
  memory.commit(0, kPage);
  memory.data()[17] = std::byte{42};
  memory.commit(0, 4 * kPage);
  memory.commit(0, 0);
  EXPECT_EQ(memory.data()[17], std::byte{42});
}

TEST(SharedMemory, CommitsWithoutItsDescriptorWhereTheKernelCan) {
  if (!SharedMemory::commits_without_fd()) GTEST_SKIP() << "the kernel is older than 5.14";
  auto memory = SharedMemory::create("test", 1000 * kPage);
  const auto fd = copy_of(memory);
  memory.forget_fd();
  memory.commit(kPage + 100, 3 * kPage);
  struct stat status = {};
  ASSERT_EQ(::fstat(fd.get(), &status), 0);
  EXPECT_GE(static_cast<std::size_t>(status.st_blocks) * 512, 4 * kPage);
  EXPECT_EQ(memory.data()[4 * kPage], std::byte{0});
}

TEST(SharedMemory, GivesPagesBack) {
  auto memory = SharedMemory::create("test", 1000 * kPage);
  memory.commit(0, 1000 * kPage);
  std::memset(memory.data(), 1, 1000 * kPage);
  EXPECT_TRUE(memory.discard(600 * kPage, 400 * kPage));
  EXPECT_LE(pages_of(memory), 600U);
  EXPECT_EQ(memory.data()[599 * kPage], std::byte{1});
  EXPECT_EQ(memory.data()[600 * kPage], std::byte{0});
}

TEST(SharedMemory, RefusesToCommitMoreThanThereIs) {
  const auto wanted = 2 * total_memory();
  auto memory = SharedMemory::create("test", wanted);
  try {
    memory.commit(0, wanted);
    ADD_FAILURE() << "more than all memory was committed";
  } catch (const MemoryError& error) {
    EXPECT_THAT(error.what(), HasSubstr(readable_bytes(wanted) + " of shared memory are wanted, but only "));
    EXPECT_THAT(error.what(), HasSubstr("iB are free here"));
  }
  EXPECT_EQ(pages_of(memory), 0u);
  memory.commit(0, kPage);
  memory.data()[0] = std::byte{1};
}

TEST(SharedMemory, IsSeenByWhoAttachesToItsDescriptor) {
  auto mine = SharedMemory::create("test", 8 * kPage);
  mine.commit(0, mine.size());
  auto theirs = SharedMemory::attach("theirs", copy_of(mine));
  ASSERT_EQ(theirs.size(), mine.size());
  EXPECT_NE(theirs.data(), mine.data());
  std::strcpy(reinterpret_cast<char*>(mine.data() + 5 * kPage), "hello");
  EXPECT_STREQ(reinterpret_cast<char*>(theirs.data() + 5 * kPage), "hello");
  theirs.data()[0] = std::byte{7};
  EXPECT_EQ(mine.data()[0], std::byte{7});
  // Committed by one, there for both.
  EXPECT_EQ(pages_of(theirs), pages_of(mine));
}

TEST(SharedMemory, LivesOnInThoseWhoAttached) {
  SharedMemory theirs;
  {
    auto mine = SharedMemory::create("test", kPage);
    mine.commit(0, kPage);
    mine.data()[9] = std::byte{9};
    theirs = SharedMemory::attach("theirs", copy_of(mine));
  }
  theirs.forget_fd();
  EXPECT_EQ(theirs.fd(), -1);
  EXPECT_EQ(theirs.data()[9], std::byte{9});
}

TEST(SharedMemory, SurvivesMoves) {
  auto first = SharedMemory::create("test", 2 * kPage);
  first.commit(0, kPage);
  first.data()[3] = std::byte{3};
  auto* const at = first.data();
  const int fd = first.fd();
  SharedMemory second(std::move(first));
  EXPECT_EQ(second.data(), at);
  EXPECT_EQ(second.fd(), fd);
  SharedMemory third = SharedMemory::create("other", kPage);
  third = std::move(second);
  EXPECT_EQ(third.data(), at);
  EXPECT_EQ(third.size(), 2 * kPage);
  EXPECT_EQ(third.data()[3], std::byte{3});
  third.commit(kPage, kPage);
  third.data()[kPage] = std::byte{4};
}

TEST(SharedMemory, CannotBeMadeSmallerByAnybody) {
  auto memory = SharedMemory::create("test", 4 * kPage);
  EXPECT_NE(::ftruncate(memory.fd(), kPage), 0);
  EXPECT_NE(::ftruncate(memory.fd(), 8 * kPage), 0);
}

TEST(SharedMemory, SaysWhichCallFailed) {
  try {
    SharedMemory::attach("nothing", UniqueFd(::open("/dev/null", O_RDWR | O_CLOEXEC)));
    ADD_FAILURE() << "attached to a device";
  } catch (const MemoryError& error) {
    EXPECT_THAT(error.what(), HasSubstr("nothing"));
    EXPECT_THAT(error.what(), HasSubstr(" failed: "));
  }
}

TEST(Memory, KnowsWhatTheMachineHas) {
  EXPECT_GT(available_memory(), 0u);
  EXPECT_LE(available_memory(), total_memory());
}

TEST(Memory, IsReadable) {
  EXPECT_EQ(readable_bytes(0), "0 B");
  EXPECT_EQ(readable_bytes(1023), "1023 B");
  EXPECT_EQ(readable_bytes(1024), "1.0 KiB");
  EXPECT_EQ(readable_bytes(1536), "1.5 KiB");
  EXPECT_EQ(readable_bytes((std::size_t{1} << 20) - 1), "1023.9 KiB");
  EXPECT_EQ(readable_bytes(std::size_t{3} << 29), "1.5 GiB");
  EXPECT_EQ(readable_bytes(std::size_t{8} << 40), "8.0 TiB");
  EXPECT_EQ(readable_bytes(std::size_t{5000} << 40), "5000.0 TiB");
}

}  // namespace
}  // namespace lockstep::shm
