#include "intra_node/ring.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

namespace herring::intra_node {
namespace {

struct Memory {
  explicit Memory(std::size_t bytes) : data(bytes) {}
  RingHeader header{};
  std::vector<std::byte> data;
};

std::vector<std::byte> message(std::size_t bytes, unsigned seed) {
  std::vector<std::byte> out(bytes);
  for (std::size_t i = 0; i < bytes; ++i) out[i] = static_cast<std::byte>(seed * 31 + i * 7);
  return out;
}

TEST(Ring, CarriesMessagesOfEverySizeAroundTheEnd) {
  Memory memory(4096);
  RingProducer producer(memory.header, memory.data);
  RingConsumer consumer(memory.header, memory.data);
  std::span<const std::byte> got;
  for (std::size_t bytes = 0; bytes <= max_ring_message(4096); ++bytes) {
    const auto sent = message(bytes, static_cast<unsigned>(bytes));
    const auto both = std::span(sent);
    ASSERT_TRUE(producer.push(both.first(bytes / 3), both.subspan(bytes / 3)).is_ok()) << bytes;
    EXPECT_FALSE(consumer.front(got)) << "not published yet";
    EXPECT_TRUE(producer.publish());
    ASSERT_TRUE(consumer.front(got)) << bytes;
    ASSERT_TRUE(std::ranges::equal(got, sent)) << bytes;
    EXPECT_FALSE(consumer.release()) << "nobody waits for room";
  }
  EXPECT_FALSE(producer.push(message(max_ring_message(4096) + 1, 0), {}).is_ok());
}

TEST(Ring, TellsTheConsumerToWakeAProducerThatFoundItFull) {
  Memory memory(4096);
  RingProducer producer(memory.header, memory.data);
  RingConsumer consumer(memory.header, memory.data);
  const auto part = message(1000, 1);
  int sent = 0;
  while (producer.push(part, {}).is_ok()) ++sent;
  EXPECT_EQ(sent, 4);
  EXPECT_TRUE(producer.push(part, {}).is_again());
  producer.publish();
  EXPECT_FALSE(producer.got_room());
  bool wake = false;
  std::span<const std::byte> got;
  while (consumer.front(got)) wake |= consumer.release();
  EXPECT_TRUE(wake);
  EXPECT_TRUE(producer.got_room());
  EXPECT_TRUE(producer.push(part, {}).is_ok());
}

TEST(Ring, SurvivesWhateverAPeerWritesIntoIt) {
  for (std::uint32_t seed = 1; seed <= 500; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    // Exactly sized, so that the address sanitizer sees a step outside.
    auto memory = std::make_unique<Memory>(4096);
    RingProducer producer(memory->header, memory->data);
    RingConsumer consumer(memory->header, memory->data);
    for (int step = 0; step < 50; ++step) {
      const std::uint64_t bad = random() % 3 == 0 ? random() : random() % 3 == 0 ? 8 * (random() % 1024) : ~0ull;
      switch (random() % 5) {
        case 0:
          memory->header.head = bad;
          break;
        case 1:
          memory->header.tail = bad;
          break;
        case 2:
          std::memcpy(memory->data.data() + 8 * (random() % 512), &bad, 8);
          break;
        default:
          break;
      }
      (void)producer.push(message(random() % 3000, 1), {});
      producer.publish();
      std::span<const std::byte> got;
      for (int i = 0; i < 1000 && consumer.front(got); ++i) {
        ASSERT_GE(got.data(), memory->data.data());
        ASSERT_LE(got.data() + got.size(), memory->data.data() + memory->data.size());
        (void)consumer.release();
      }
    }
  }
}

TEST(Ring, KeepsOrderBetweenThreads) {
  Memory memory(1 << 14);
  constexpr std::uint32_t kMessages = 50000;
  std::thread writer([&] {
    RingProducer producer(memory.header, memory.data);
    std::mt19937 random(7);
    for (std::uint32_t i = 0; i < kMessages; ++i) {
      std::vector<std::byte> bytes(4 + random() % 200, static_cast<std::byte>(i));
      std::memcpy(bytes.data(), &i, sizeof(i));
      while (!producer.push(bytes, {}).is_ok()) {
        producer.publish();
        std::this_thread::yield();
      }
      if (i % 7 == 0) producer.publish();
    }
    producer.publish();
  });
  RingConsumer consumer(memory.header, memory.data);
  std::mt19937 random(7);
  std::span<const std::byte> got;
  std::uint32_t bad = 0;
  for (std::uint32_t i = 0; i < kMessages; ++i) {
    while (!consumer.front(got)) std::this_thread::yield();
    std::uint32_t number = 0;
    std::memcpy(&number, got.data(), sizeof(number));
    bad +=
        number != i || got.size() != 4 + random() % 200 || (got.size() > 4 && got.back() != static_cast<std::byte>(i));
    (void)consumer.release();
  }
  writer.join();
  EXPECT_EQ(bad, 0u);
  EXPECT_FALSE(consumer.is_broken());
}

}  // namespace
}  // namespace herring::intra_node
