#include "elastic/message.h"

#include <gtest/gtest.h>

#include <random>

#include "elastic/plan.h"

namespace herring::elastic {
namespace {

TEST(ElasticMessage, WhatIsSaidIsHeard) {
  Message message;
  message.kind = MessageKind::kGo;
  message.generation = 7;
  message.role = control::Role::kServer;
  message.at_boundary = true;
  message.rank = 3;
  message.workers = 5;
  message.port = 4711;
  message.host = "node-b";
  message.text = "worker 2 is lost";
  message.members = {9, 1, 4};
  message.operations = {{0, 17}, {3, std::uint64_t{1} << 63}};
  message.counts = {5, 2};
  const auto heard = decode_message(encode(message));
  ASSERT_TRUE(heard.has_value());
  EXPECT_EQ(*heard, message);
}

TEST(ElasticMessage, JournalsCrossTheWireWhole) {
  Summary summary;
  summary.is_new = true;
  summary.groups = {{0, 12, {{5, 2}, {6, 1}}}, {3, 1, {}}};
  summary.start = {0, 4, {{5, 1}}};
  Record record;
  record.id = {3, 0};
  record.state = Record::State::kComplete;
  record.bytes = 100;
  record.root = 8;
  record.members = 3;
  for (int number = 1; name(static_cast<Collective>(number)) != "unknown"; ++number) {
    record.collective = static_cast<Collective>(number);
    summary.operations.push_back(record);
  }
  ASSERT_EQ(summary.operations.size(), 10u);
  const auto heard = decode_summary(encode(summary));
  ASSERT_TRUE(heard.has_value());
  EXPECT_EQ(*heard, summary);
}

// Others send this: no length, number or missing byte may do more than be refused.
TEST(ElasticMessage, NonsenseIsRefused) {
  Message message;
  message.members = {1, 2};
  message.operations = {{0, 1}};
  const std::vector<std::byte> good = encode(message);
  for (std::size_t size = 0; size < good.size(); ++size) {
    EXPECT_FALSE(decode_message(std::span(good).first(size)).has_value()) << size << " bytes";
  }
  std::mt19937_64 random(1);
  for (int round = 0; round < 20'000; ++round) {
    std::vector<std::byte> bytes = good;
    for (int i = 0; i < 3; ++i) bytes[random() % bytes.size()] = static_cast<std::byte>(random());
    static_cast<void>(decode_message(bytes));
    static_cast<void>(decode_summary(bytes));
  }
}

}  // namespace
}  // namespace herring::elastic
