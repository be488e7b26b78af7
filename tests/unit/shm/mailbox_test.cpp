#include "lockstep/shm/mailbox.h"

#include <gtest/gtest.h>

#include <cstring>
#include <future>
#include <numeric>
#include <random>
#include <string>
#include <thread>

namespace lockstep::shm::mailbox_test {
namespace {

using namespace std::chrono_literals;

/// Two ranks that are threads of this process, with memory as processes have it.
struct Pair {
  Pair() {
    std::promise<std::string> word;
    const auto said = word.get_future().share();
    const auto meet = [&](int rank) {
      return Team::of_processes({.rank = rank, .size = 2, .group = "mail"}, [&, rank](const std::string& mine) {
        if (rank == 0) word.set_value(mine);
        return said.get();
      });
    };
    auto other = std::async(std::launch::async, [&] { return meet(1); });
    teams[0] = meet(0);
    teams[1] = other.get();
    for (int rank = 0; rank < 2; ++rank) boxes[rank] = std::make_unique<Mailbox>(teams[rank]);
  }

  bool send(int from, const std::string& text) {
    auto* at = boxes[from]->reserve(1 - from, text.size());
    if (at == nullptr) return false;
    std::memcpy(at, text.data(), text.size());
    boxes[from]->send(1 - from);
    return true;
  }

  std::optional<std::string> take(int by) {
    const auto mail = boxes[by]->next(1 - by);
    if (!mail) return std::nullopt;
    std::string text(reinterpret_cast<const char*>(mail->data()), mail->size());
    boxes[by]->drop(1 - by);
    return text;
  }

  std::shared_ptr<Team> teams[2];
  std::unique_ptr<Mailbox> boxes[2];
};

TEST(Mailbox, BringsRecordsInTheirOrder) {
  Pair pair;
  EXPECT_EQ(pair.take(1), std::nullopt);
  ASSERT_TRUE(pair.send(0, "first"));
  ASSERT_TRUE(pair.send(0, ""));
  ASSERT_TRUE(pair.send(0, std::string(Mailbox::kMostBytes, 'x')));
  EXPECT_EQ(pair.take(1), "first");
  EXPECT_EQ(pair.take(1), "");
  EXPECT_EQ(pair.take(1), std::string(Mailbox::kMostBytes, 'x'));
  EXPECT_EQ(pair.take(1), std::nullopt);
  EXPECT_EQ(pair.take(0), std::nullopt);
}

TEST(Mailbox, GoesAroundTheRingWithRecordsOfAnyLength) {
  Pair pair;
  std::mt19937 random(7);
  std::deque<std::string> under_way;
  std::size_t moved = 0;
  while (moved < 50 * std::size_t{Mailbox::kRingBytes}) {
    const std::string text(random() % (random() % 8 == 0 ? Mailbox::kMostBytes : 300), static_cast<char>(random()));
    if (pair.send(0, text)) {
      under_way.push_back(text);
      moved += text.size();
      if (random() % 2 == 0) continue;
    } else {
      ASSERT_FALSE(under_way.empty());
    }
    ASSERT_EQ(pair.take(1), under_way.front());
    under_way.pop_front();
  }
}

TEST(Mailbox, HasNoRoomWhenFullAndRingsOnceThereIsSome) {
  Pair pair;
  while (pair.send(0, std::string(1000, 'x'))) {
  }
  const auto seen = pair.boxes[0]->bell();
  pair.take(1);
  EXPECT_EQ(pair.boxes[0]->bell(), seen) << "nobody asked";
  while (pair.send(0, std::string(1000, 'x'))) {
  }
  pair.boxes[0]->ask_for_room(1);
  EXPECT_EQ(pair.boxes[0]->bell(), seen);
  pair.take(1);
  EXPECT_NE(pair.boxes[0]->bell(), seen);
  EXPECT_TRUE(pair.send(0, std::string(1000, 'x')));
}

TEST(Mailbox, WakesOneWhoDozesWhileNobodyAttends) {
  Pair pair;
  auto& box = *pair.boxes[1];
  std::atomic<int> taken = 0;
  std::atomic<bool> is_over = false;
  std::vector<std::thread> readers;
  for (int i = 0; i < 3; ++i) {
    readers.emplace_back([&] {
      while (!is_over) {
        const auto seen = box.bell();
        if (!box.try_attend()) {
          box.doze(seen);
          continue;
        }
        while (pair.take(1)) ++taken;
        if (box.leave()) continue;
        if (!is_over) box.doze(seen);
      }
    });
  }
  std::mt19937 random(3);
  for (int i = 1; i <= 2000; ++i) {
    ASSERT_TRUE(pair.send(0, "mail"));
    if (random() % 4 != 0) continue;
    const auto end = std::chrono::steady_clock::now() + 20s;
    while (taken < i) {
      ASSERT_LT(std::chrono::steady_clock::now(), end) << "mail " << i << " was left lying";
      std::this_thread::yield();
    }
  }
  is_over = true;
  box.call_all();
  for (auto& reader : readers) reader.join();
}

TEST(Mailbox, TellsWhoLeavesThatThereIsMail) {
  Pair pair;
  auto& box = *pair.boxes[1];
  ASSERT_TRUE(box.try_attend());
  EXPECT_FALSE(box.try_attend());
  EXPECT_FALSE(box.leave());
  ASSERT_TRUE(box.try_attend());
  pair.send(0, "late");
  EXPECT_TRUE(box.leave());
  ASSERT_TRUE(box.try_attend());
  pair.take(1);
  EXPECT_FALSE(box.leave());
  pair.send(0, "from one who is not heard");
  box.close(0);
  EXPECT_FALSE(box.leave());
  EXPECT_EQ(pair.take(1), std::nullopt);
}

// Whatever lies in a ring: an error, or records within the ring.
TEST(Mailbox, ReadsNothingOutsideOfARingThatMakesNoSense) {
  std::mt19937 random(11);
  for (int round = 0; round < 40; ++round) {
    Pair pair;
    for (int i = 0; i < 20; ++i) pair.send(0, std::string(random() % 5000, 'x'));
    auto* ring = pair.teams[1]->message_chunk(0, 1, 0);
    auto& sent = pair.teams[1]->channel(0, 1).sent.value;
    const auto mutate = [&] {
      const auto at = random() % 3 == 0 ? random() % Mailbox::kRingBytes : random() % 1600 / 64 * 64 + random() % 8;
      ring[at] = static_cast<std::byte>(random());
      if (random() % 16 == 0) sent.store(static_cast<std::uint32_t>(random()));
    };
    for (int i = 0; i < 5; ++i) mutate();
    try {
      for (int i = 0; i < 5000; ++i) {
        const auto mail = pair.boxes[1]->next(0);
        if (!mail) break;
        ASSERT_GE(mail->data(), ring);
        ASSERT_LE(mail->data() + mail->size(), ring + Mailbox::kRingBytes);
        pair.boxes[1]->drop(0);
      }
    } catch (const BadMail&) {
    }
  }
}

TEST(Mailbox, RefusesToWriteForAReaderWhosePlaceIsImpossible) {
  Pair pair;
  pair.send(0, "mail");
  pair.teams[0]->channel(0, 1).taken.value.store(12345);
  EXPECT_THROW(pair.send(0, "mail"), BadMail);
}

}  // namespace
}  // namespace lockstep::shm::mailbox_test
