#include "intra_node/multicast_ring.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

namespace herring::intra_node {
namespace {

constexpr std::size_t kBytes = 4096;
constexpr std::uint64_t kSecret = 0x5eed;
constexpr std::size_t kReaders = 3;

struct Memory {
  std::array<MulticastTail, kReaders> tails{};
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  std::vector<Line> lines = std::vector<Line>(kBytes / sizeof(Line));

  std::span<std::byte> data() { return {lines.front().bytes, kBytes}; }
  MulticastProducer producer() { return {{&tails[0], &tails[1], &tails[2]}, data(), kSecret}; }
  MulticastConsumer consumer(std::size_t reader) { return {tails[reader], data(), kSecret}; }
};

std::vector<std::byte> message(std::size_t bytes, unsigned seed) {
  std::vector<std::byte> out(bytes);
  for (std::size_t i = 0; i < bytes; ++i) out[i] = static_cast<std::byte>(seed * 31 + i * 7);
  return out;
}

TEST(MulticastRing, CarriesMessagesOfEverySizeAroundTheEndToAll) {
  Memory memory;
  MulticastProducer producer = memory.producer();
  std::array consumers = {memory.consumer(0), memory.consumer(1), memory.consumer(2)};
  std::span<const std::byte> got;
  for (std::size_t bytes = 0; bytes <= max_multicast_message(kBytes); ++bytes) {
    const auto sent = message(bytes, static_cast<unsigned>(bytes));
    const auto all = std::span(sent);
    for (const MulticastConsumer& consumer : consumers) EXPECT_FALSE(consumer.has_message());
    ASSERT_TRUE(
        producer.push(all.first(bytes / 3), all.subspan(bytes / 3, bytes / 2), all.subspan(bytes / 3 + bytes / 2)))
        << bytes << ": there is room whenever everybody has read everything";
    for (MulticastConsumer& consumer : consumers) {
      ASSERT_TRUE(consumer.front(got)) << bytes;
      ASSERT_TRUE(std::ranges::equal(got, sent)) << bytes;
      ASSERT_TRUE(consumer.front(got)) << "until it is released";
      consumer.release();
      EXPECT_FALSE(consumer.front(got));
    }
  }
  EXPECT_FALSE(producer.push(message(max_multicast_message(kBytes) + 1, 0), {}, {}));
  EXPECT_FALSE(producer.is_broken());
}

TEST(MulticastRing, IsFullUntilTheSlowestHasRead) {
  Memory memory;
  MulticastProducer producer = memory.producer();
  std::array consumers = {memory.consumer(0), memory.consumer(1), memory.consumer(2)};
  const auto part = message(500, 1);
  int sent = 0;
  while (producer.push(part, {}, {})) ++sent;
  EXPECT_EQ(sent, 7);
  std::span<const std::byte> got;
  for (const std::size_t reader : {0, 2}) {
    while (consumers[reader].front(got)) consumers[reader].release();
    EXPECT_FALSE(producer.push(part, {}, {}));
  }
  int read = 0;
  for (; consumers[1].front(got); ++read) {
    EXPECT_TRUE(std::ranges::equal(got, part)) << "nothing was overwritten";
    consumers[1].release();
  }
  EXPECT_EQ(read, sent);
  EXPECT_TRUE(producer.push(part, {}, {}));
}

TEST(MulticastRing, WhatAnEarlierRoundLeftIsNoMessage) {
  // Messages that carry copies of the ring's own lines, stamps and all, at places where others begin a round later.
  Memory memory;
  MulticastProducer producer = memory.producer();
  std::array consumers = {memory.consumer(0), memory.consumer(1), memory.consumer(2)};
  std::mt19937 random(3);
  std::span<const std::byte> got;
  for (int i = 0; i < 5000; ++i) {
    std::vector<std::byte> copy(memory.data().begin(), memory.data().end());
    copy.resize(random() % max_multicast_message(kBytes));
    ASSERT_TRUE(producer.push(std::span(copy).first(copy.size() / 2), std::span(copy).subspan(copy.size() / 2), {}));
    for (MulticastConsumer& consumer : consumers) {
      ASSERT_TRUE(consumer.front(got));
      ASSERT_TRUE(std::ranges::equal(got, copy));
      consumer.release();
      ASSERT_FALSE(consumer.has_message());
    }
  }
}

TEST(MulticastRing, SurvivesWhateverAPeerWritesIntoIt) {
  std::uint32_t broken_by_tails = 0;
  std::uint32_t broken_by_lengths = 0;
  for (std::uint32_t seed = 1; seed <= 500; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    // Exactly sized, so that the address sanitizer sees a step outside.
    auto memory = std::make_unique<Memory>();
    MulticastProducer producer = memory->producer();
    std::array consumers = {memory->consumer(0), memory->consumer(1), memory->consumer(2)};
    for (int step = 0; step < 50; ++step) {
      const std::uint64_t bad = random() % 3 == 0 ? random() : random() % 3 == 0 ? 64 * (random() % 128) : ~0ull;
      // All lengths, or any word; a line without its stamp says nothing more.
      const bool spoils_any = random() % 16 == 0;
      const bool spoils_lengths = seed % 2 == 0 && random() % 8 == 0;
      if (seed % 2 == 1 && random() % 4 == 0) memory->tails[random() % kReaders].bytes = bad;
      (void)producer.push(message(random() % 1500, 1), {}, {});
      if (spoils_any) std::memcpy(memory->data().data() + 8 * (random() % 512), &bad, 8);
      for (std::size_t line = 0; spoils_lengths && line < memory->lines.size(); ++line) {
        std::memcpy(memory->lines[line].bytes + 8, &bad, 8);
      }
      for (MulticastConsumer& consumer : consumers) {
        std::span<const std::byte> got;
        for (int i = 0; i < 1000 && consumer.front(got); ++i) {
          ASSERT_GE(got.data(), memory->data().data());
          ASSERT_LE(got.data() + got.size(), memory->data().data() + memory->data().size());
          consumer.release();
        }
      }
    }
    broken_by_tails += producer.is_broken();
    broken_by_lengths += consumers[0].is_broken();
  }
  EXPECT_GT(broken_by_tails, 100u);
  EXPECT_GT(broken_by_lengths, 100u);
}

TEST(MulticastRing, KeepsOrderBetweenThreads) {
  Memory memory;
  constexpr std::uint32_t kMessages = 20000;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  const auto is_late = [deadline] { return std::chrono::steady_clock::now() > deadline; };
  std::thread writer([&memory, is_late] {
    MulticastProducer producer = memory.producer();
    std::mt19937 random(7);
    for (std::uint32_t i = 0; i < kMessages; ++i) {
      std::vector<std::byte> bytes(4 + random() % 200, static_cast<std::byte>(i));
      std::memcpy(bytes.data(), &i, sizeof(i));
      while (!producer.push(bytes, {}, {}) && !is_late()) std::this_thread::yield();
    }
  });
  std::array<std::uint32_t, kReaders> bad{};
  std::vector<std::thread> readers;
  for (std::size_t reader = 0; reader < kReaders; ++reader) {
    readers.emplace_back([&memory, &bad, is_late, reader] {
      MulticastConsumer consumer = memory.consumer(reader);
      std::mt19937 random(7);
      std::span<const std::byte> got;
      for (std::uint32_t i = 0; i < kMessages; ++i) {
        while (!consumer.front(got) && !is_late()) std::this_thread::yield();
        std::uint32_t number = kMessages;
        if (got.size() >= sizeof(number)) std::memcpy(&number, got.data(), sizeof(number));
        const bool good = number == i && got.size() == 4 + random() % 200 &&
                          (got.size() == 4 || got.back() == static_cast<std::byte>(i));
        bad[reader] += !good;
        consumer.release();
      }
    });
  }
  writer.join();
  for (std::thread& reader : readers) reader.join();
  EXPECT_EQ(bad, (std::array<std::uint32_t, kReaders>{}));
}

}  // namespace
}  // namespace herring::intra_node
