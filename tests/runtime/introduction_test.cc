#include "runtime/introduction.h"

#include <gtest/gtest.h>

#include <random>

#include "control/delta.h"
#include "control/hub_test_support.h"

namespace herring::runtime {
namespace {

using namespace control::test;
using namespace control;

Strings strings_of(const std::vector<std::string>& texts) {
  Strings strings;
  for (const std::string& text : texts) strings.push_back(bytes_of(text));
  return strings;
}

std::optional<Strings> decoded(std::span<const std::byte> bytes, std::size_t count, std::size_t most = 1 << 20) {
  BodyReader reader(bytes);
  const auto blobs = decode_list(reader, static_cast<std::uint32_t>(count), most);
  return blobs && reader.done() ? std::optional(blobs->apart()) : std::nullopt;
}

TEST(Lists, WhatIsAlikeTakesFewBytes) {
  const std::string address = "HTA1 10.0.0.7 port 4";
  const Strings alike = strings_of({address + "1", address + "2", address + "2", ""});
  const auto bytes = encode_list(alike);
  EXPECT_LE(bytes.size(), address.size() + 14);
  EXPECT_EQ(decoded(bytes, 4), alike);
}

TEST(Lists, EveryListComesBackAndNoneGrowsMuch) {
  std::mt19937_64 random(20260101);
  for (int round = 0; round < 2000; ++round) {
    Strings strings(random() % 6);
    std::size_t raw = 0;
    for (auto& string : strings) {
      string.resize(random() % 300);
      for (auto& byte : string) byte = static_cast<std::byte>(random() % (round % 2 == 0 ? 2 : 256));
      raw += string.size();
    }
    const auto bytes = encode_list(strings);
    ASSERT_LE(bytes.size(), raw + 8 * strings.size()) << "round " << round;
    ASSERT_EQ(decoded(bytes, strings.size()), strings) << "round " << round;
    for (std::size_t cut = 0; cut < bytes.size(); cut += 7) {
      ASSERT_FALSE(decoded(std::span(bytes).first(cut), strings.size())) << "round " << round << ", " << cut;
    }
  }
}

// A few bytes can stand for many: a hub that lies must not fill a member's memory.
TEST(Lists, MoreThanIsAllowedIsRefused) {
  const Strings alike(100, std::vector<std::byte>(1000));
  const auto bytes = encode_list(alike);
  EXPECT_LT(bytes.size(), 2000u);
  EXPECT_FALSE(decoded(bytes, 100, 99'999));
  EXPECT_TRUE(decoded(bytes, 100, 100'000));
}

OwnAddresses own_of(std::size_t i, bool is_worker) {
  const auto address = [](const std::string& text) { return bytes_of(text); };
  OwnAddresses own;
  if (is_worker) own.worker = {address("to-lanes-" + std::to_string(i)), address("to-workers-" + std::to_string(i))};
  if (!is_worker) own.lanes = {address("lane-a-" + std::to_string(i)), address("lane-b-" + std::to_string(i))};
  return own;
}

TEST(Introduction, EverybodyLearnsWhatItNeeds) {
  Hub hub(hub_options(3, 1));
  auto members = join_all(hub.port(), 3, 1);
  std::vector<OthersAddresses> heard(4);
  in_parallel(4, [&](std::size_t i) { heard[i] = introduce(*members[i], "A=1 B=2", own_of(i, i < 3), in(20s)); });
  for (std::size_t i = 0; i < 4; ++i) {
    ASSERT_EQ(heard[i].peers.size(), 3u);
    EXPECT_EQ(heard[i].peers.apart()[2], bytes_of("to-workers-2"));
    ASSERT_EQ(heard[i].lanes_of.size(), 4u);
    ASSERT_EQ(heard[i].lanes_of[3].size(), 2u);
    EXPECT_EQ(heard[i].lanes_of[3][1], bytes_of("lane-b-3"));
    EXPECT_EQ(heard[i].workers.size(), i < 3 ? 0u : 3u);
  }
  EXPECT_EQ(heard[3].workers[1], bytes_of("to-lanes-1"));
}

TEST(Introduction, SettingsThatDifferAreNamedWithBothValues) {
  Hub hub(hub_options(3));
  auto members = join_all(hub.port(), 3);
  in_parallel(3, [&](std::size_t i) {
    const std::string settings = std::string("HERRING_LANES=1 HERRING_WINDOW=") + (i == 1 ? "8" : "4") + " HERRING_B=2";
    try {
      introduce(*members[i], settings, {}, in(20s));
      ADD_FAILURE() << "member " << i << " goes on";
    } catch (const Error& error) {
      const std::string text = error.what();
      EXPECT_EQ(error.status().code(), Code::kMismatch);
      EXPECT_NE(text.find("HERRING_WINDOW=8"), std::string::npos) << text;
      EXPECT_NE(text.find("HERRING_WINDOW=4"), std::string::npos) << text;
      EXPECT_EQ(text.find("HERRING_LANES"), std::string::npos) << "it is the same: " << text;
      EXPECT_EQ(text.find("HERRING_B"), std::string::npos) << "it is the same: " << text;
      EXPECT_NE(text.find(i == 1 ? "worker 0 (pid" : "worker 1 (pid"), std::string::npos) << text;
    }
  });
}

TEST(Introduction, ASizeThatIsSetIsNotTheDefault) {
  Config set;
  set.embedded_eager_bytes = set.eager_bytes;
  EXPECT_NE(settings_that_must_agree(set), settings_that_must_agree(Config{}));
  Config other = set;
  other.eager_bytes = other.embedded_eager_bytes = 128 << 10;
  EXPECT_NE(settings_that_must_agree(other), settings_that_must_agree(Config{}));
}

// 2.6 GB went out of worker 0 at 2,304 members, and where cores were few the job did not start.
TEST(Introduction, BytesAMemberAreFew) {
  constexpr std::uint32_t kWorkers = 32;
  Hub hub(hub_options(kWorkers));
  auto members = join_all(hub.port(), kWorkers);
  in_parallel(kWorkers, [&](std::size_t i) {
    introduce(*members[i], settings_that_must_agree(Config{}), own_of(i, true), in(20s));
    members[i]->exchange("connected", {}, in(20s), Wants::kNothing);
  });
  EXPECT_LT(hub.counters().bytes_sent / kWorkers, 18u * kWorkers + 1000u);
}

}  // namespace
}  // namespace herring::runtime
