#include "runtime/checked_endpoint.h"

#include <gtest/gtest.h>

#include <functional>
#include <map>

#include "runtime/checked_frame.h"
#include "transport/contract.h"
#include "transport/sim.h"
#include "wire/action.h"

namespace herring::runtime {
namespace {

using transport::Completion;
using transport::CompletionKind;
using transport::SimNetwork;
using transport::SimOptions;
using Bytes = std::vector<std::byte>;

CheckedOptions checked_options(std::uint32_t self, const SimNetwork& network) {
  CheckedOptions options;
  options.self = PeerId{self};
  options.job_id = 0xC0FFEE;
  options.max_head_bytes = 1 << 20;
  options.is_pooled = [](Tag tag) { return tag == kControlTag; };
  options.now = [&network] { return network.now(); };
  return options;
}

class CheckedWorld final : public transport::ContractWorld {
 public:
  CheckedWorld(std::size_t count, const SimOptions& options) : network_(20203, options) {
    for (std::uint32_t i = 0; i < count; ++i) {
      endpoints_.push_back(std::make_unique<CheckedEndpoint>(network_.open_endpoint(), checked_options(i, network_)));
    }
    for (auto& from : endpoints_) {
      for (std::uint32_t to = 0; to < count; ++to) from->add_peer(PeerId{to}, endpoints_[to]->address());
    }
  }
  transport::Endpoint& endpoint(std::size_t index) override { return *endpoints_[index]; }
  void drive() override {
    Instant next = network_.next_event();
    for (const auto& endpoint : endpoints_) next = std::min(next, endpoint->next_deadline());
    if (next != Instant::max()) network_.advance_to(std::max(next, network_.now()));
  }
  bool blocks() const override { return false; }

 private:
  SimNetwork network_;
  std::vector<std::unique_ptr<CheckedEndpoint>> endpoints_;
};

transport::ContractFactory factory(const std::string& name, const SimOptions& options) {
  return {name, [options](std::size_t endpoints, std::string&) -> std::unique_ptr<transport::ContractWorld> {
            return std::make_unique<CheckedWorld>(endpoints, options);
          }};
}

SimOptions refusing() {
  SimOptions options;
  options.again_chance = 0.3;
  options.max_sends = 8;
  options.straggler_chance = 0.1;
  return options;
}

/// Two endpoints on a network that does what it likes to messages.
class CheckedPair {
 public:
  CheckedPair(std::uint64_t seed, const SimOptions& sim, std::uint32_t max_damaged = 1000) : network_(seed, sim) {
    for (std::uint32_t i = 0; i < 2; ++i) {
      CheckedOptions options = checked_options(i, network_);
      options.max_damaged = max_damaged;
      options.on_damage = [this](const std::string& text) { texts_.push_back(text); };
      ends_.push_back(std::make_unique<CheckedEndpoint>(network_.open_endpoint(), options));
    }
    ends_[0]->add_peer(PeerId{1}, ends_[1]->address());
    ends_[1]->add_peer(PeerId{0}, ends_[0]->address());
  }

  CheckedEndpoint& end(std::size_t index) { return *ends_[index]; }
  SimNetwork& network() { return network_; }
  const std::vector<std::string>& texts() const { return texts_; }
  const Completion* find(std::size_t index, std::uint64_t token) const {
    const auto found = done_.find({index, token});
    return found == done_.end() ? nullptr : &found->second;
  }

  /// Until both know that everything has arrived, or the time is over.
  void run(Duration limit) {
    const Instant end = network_.now() + limit;
    while (true) {
      bool busy = false;
      for (std::size_t i = 0; i < 2; ++i) {
        Completion batch[8];
        for (std::size_t count = ends_[i]->poll(batch); count > 0; count = ends_[i]->poll(batch)) {
          busy = true;
          for (std::size_t k = 0; k < count; ++k) {
            EXPECT_TRUE(done_.emplace(std::pair{i, batch[k].token.value}, batch[k]).second) << "completed twice";
            if (on_receive && batch[k].kind == CompletionKind::kReceive) on_receive(i, batch[k]);
          }
        }
      }
      if (busy) continue;
      const Instant next = std::min({network_.next_event(), ends_[0]->next_deadline(), ends_[1]->next_deadline()});
      if (next > end) return;
      network_.advance_to(std::max(next, network_.now()));
    }
  }

  std::function<void(std::size_t, const Completion&)> on_receive;

 private:
  SimNetwork network_;
  std::vector<std::unique_ptr<CheckedEndpoint>> ends_;
  std::vector<std::string> texts_;
  std::map<std::pair<std::size_t, std::uint64_t>, Completion> done_;
};

Bytes pattern(std::size_t bytes, std::uint64_t seed) {
  Bytes data(bytes);
  for (std::size_t i = 0; i < bytes; ++i) data[i] = static_cast<std::byte>((seed * 131 + i * 7) >> (i % 3));
  return data;
}

// A sum may be kept while nothing can change what it is of. A refused post gives its memory back, which may hold
// something else at once: with the old sum it would arrive "damaged" for ever.
TEST(CheckedEndpoint, ARefusedPostLeavesNoSumForWhatComesIntoItsMemory) {
  int refused = 0;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    SimOptions sim;
    sim.again_chance = 0.5;
    CheckedPair pair(seed, sim);
    Bytes head = pattern(80, seed), memory = pattern(500, 1), in_head(80), in(500);
    while (!pair.end(1).post_receive(Tag{7}, in_head, in, Token{1}).is_ok()) {
    }
    if (pair.end(0).post_send(PeerId{1}, Tag{7}, head, memory, Token{1}).is_ok()) continue;
    ++refused;
    const Bytes next = pattern(500, 2);
    std::copy(next.begin(), next.end(), memory.begin());
    while (!pair.end(0).post_send(PeerId{1}, Tag{7}, head, memory, Token{2}).is_ok()) {
    }
    pair.run(std::chrono::seconds(20));
    ASSERT_NE(pair.find(1, 1), nullptr);
    EXPECT_TRUE(pair.find(1, 1)->status.is_ok()) << pair.find(1, 1)->status.to_string();
    EXPECT_EQ(in, pattern(500, 2));
    EXPECT_EQ(pair.texts().size(), 0u) << "nothing was damaged";
  }
  EXPECT_GT(refused, 3);
}

/// Else it would be sent again until its sender gives up.
TEST(CheckedEndpoint, WhatComesWhileItsReceiveIsTakenBackIsConfirmed) {
  SimOptions sim;
  sim.slow_cancel_chance = 1;
  CheckedPair pair(1, sim);
  const Bytes head = pattern(80, 1), data = pattern(500, 2);
  Bytes in_head(80), in(500);
  ASSERT_TRUE(pair.end(1).post_receive(Tag{7}, in_head, in, Token{1}).is_ok());
  ASSERT_TRUE(pair.end(0).post_send(PeerId{1}, Tag{7}, head, data, Token{1}).is_ok());
  pair.end(1).cancel_receive(Token{1});
  pair.run(std::chrono::seconds(1));
  ASSERT_NE(pair.find(1, 1), nullptr);
  EXPECT_EQ(pair.find(1, 1)->kind, CompletionKind::kCancelled);
  ASSERT_NE(pair.find(0, 1), nullptr) << "the sender still waits";
  EXPECT_TRUE(pair.find(0, 1)->status.is_ok());
}

TEST(CheckedEndpoint, DamagedMessagesComeAgainAndEachIsTakenOnce) {
  for (std::uint64_t seed = 1; seed <= 30; ++seed) {
    SimOptions sim;
    sim.damage_chance = 0.3;
    sim.straggler_chance = 0.2;
    CheckedPair pair(seed, sim);
    constexpr std::uint64_t kMessages = 40;
    std::vector<Bytes> heads, sent, in_heads, in;
    for (std::uint64_t i = 0; i < kMessages; ++i) {
      heads.push_back(pattern(80, i));
      sent.push_back(pattern(1 + i * 97, i + 5));
      in_heads.emplace_back(80);
      in.emplace_back(sent.back().size());
    }
    for (std::uint64_t i = 0; i < kMessages; ++i) {
      ASSERT_TRUE(pair.end(1).post_receive(Tag{100 + i}, in_heads[i], in[i], Token{1000 + i}).is_ok());
      ASSERT_TRUE(pair.end(0).post_send(PeerId{1}, Tag{100 + i}, heads[i], sent[i], Token{i}).is_ok());
    }
    pair.run(std::chrono::seconds(20));
    for (std::uint64_t i = 0; i < kMessages; ++i) {
      ASSERT_NE(pair.find(1, 1000 + i), nullptr) << "seed " << seed << ", message " << i << " never arrived";
      EXPECT_TRUE(pair.find(1, 1000 + i)->status.is_ok());
      EXPECT_EQ(pair.find(1, 1000 + i)->bytes, 80 + sent[i].size());
      EXPECT_TRUE(in_heads[i] == heads[i] && in[i] == sent[i]) << "seed " << seed << ", message " << i;
      ASSERT_NE(pair.find(0, i), nullptr) << "seed " << seed << ", send " << i << " never completed";
    }
    EXPECT_GT(pair.end(1).stats().damaged, 0u);
    // A copy too many would wait in the network for a receive for ever.
    EXPECT_EQ(pair.network().stats().unexpected, 0u) << "seed " << seed;
  }
}

/// Small messages to a pool of receives: what is silent is sent again, and taken once.
TEST(CheckedEndpoint, PooledMessagesAreTakenOnceHoweverOftenTheyCome) {
  for (std::uint64_t seed = 1; seed <= 30; ++seed) {
    SimOptions sim;
    sim.damage_chance = 0.3;
    CheckedPair pair(seed, sim);
    constexpr std::uint64_t kMessages = 30;
    std::vector<Bytes> pool(8, Bytes(200)), sent;
    std::map<Bytes, int> taken;
    std::uint64_t next_token = 1000;
    std::map<std::uint64_t, std::size_t> place;
    const auto post = [&](std::size_t index) {
      place[next_token] = index;
      ASSERT_TRUE(pair.end(1).post_receive(kControlTag, pool[index], {}, Token{next_token++}).is_ok());
    };
    for (std::size_t i = 0; i < pool.size(); ++i) post(i);
    pair.on_receive = [&](std::size_t, const Completion& completion) {
      const std::size_t index = place.at(completion.token.value);
      ++taken[Bytes(pool[index].begin(), pool[index].begin() + static_cast<std::ptrdiff_t>(completion.bytes))];
      post(index);
    };
    for (std::uint64_t i = 0; i < kMessages; ++i) sent.push_back(pattern(20 + i * 5, i));
    if (seed % 3 == 0) pair.network().partition(0, 1);
    for (std::uint64_t i = 0; i < kMessages; ++i) {
      // Head and data of the sender are one to the receiver.
      const std::span<const std::byte> all = sent[i];
      ASSERT_TRUE(pair.end(0).post_send(PeerId{1}, kControlTag, all.first(20), all.subspan(20), Token{i}).is_ok());
    }
    pair.run(std::chrono::seconds(seed % 3 == 0 ? 2 : 0));
    pair.network().heal(0, 1);
    pair.run(std::chrono::seconds(20));
    EXPECT_EQ(taken.size(), kMessages) << "seed " << seed;
    for (const Bytes& message : sent) EXPECT_EQ(taken[message], 1) << "seed " << seed;
    if (seed % 3 == 0) {
      EXPECT_GT(pair.end(1).stats().copies, 0u) << "nothing came twice: seed " << seed;
    }
  }
}

TEST(CheckedEndpoint, WhatNobodyEverConfirmsFailsAndNamesThePeer) {
  SimOptions sim;
  sim.damage_chance = 1;
  sim.damage_head_bytes = 0;
  CheckedPair pair(7, sim, 3);
  const Bytes data = pattern(1 << 20, 1);
  Bytes head(80), in(data.size());
  ASSERT_TRUE(pair.end(1).post_receive(Tag{5}, head, in, Token{1}).is_ok());
  ASSERT_TRUE(pair.end(0).post_send(PeerId{1}, Tag{5}, head, data, Token{2}).is_ok());
  pair.run(std::chrono::seconds(100));
  // Every report is damaged as well, so the sender hears nothing; the receive is its user's to give up.
  EXPECT_EQ(pair.find(1, 1), nullptr);
  ASSERT_NE(pair.find(0, 2), nullptr);
  EXPECT_EQ(pair.find(0, 2)->status.code(), Code::kTransport);
  EXPECT_NE(pair.find(0, 2)->status.message().find("peer 1 has not confirmed"), std::string::npos);
}

TEST(CheckedEndpoint, AfterTheLastAttemptBothSidesSayCorrupted) {
  std::uint64_t both = 0;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    SimOptions sim;
    sim.damage_chance = 0.4;
    sim.damage_head_bytes = 0;
    CheckedPair pair(seed, sim, 2);
    const Bytes data = pattern(1 << 16, 1);
    Bytes head(80), in(data.size());
    ASSERT_TRUE(pair.end(1).post_receive(Tag{5}, head, in, Token{1}).is_ok());
    ASSERT_TRUE(pair.end(0).post_send(PeerId{1}, Tag{5}, head, data, Token{2}).is_ok());
    pair.run(std::chrono::seconds(100));
    const Completion* received = pair.find(1, 1);
    const Completion* sent = pair.find(0, 2);
    ASSERT_TRUE(received != nullptr && sent != nullptr) << "seed " << seed;
    EXPECT_EQ(received->status.is_ok(), in == data) << "seed " << seed;
    EXPECT_EQ(received->status.is_ok(), sent->status.is_ok()) << "seed " << seed << ": " << sent->status.to_string();
    if (received->status.is_ok()) continue;
    EXPECT_EQ(received->status.code(), Code::kCorrupted);
    EXPECT_NE(received->status.message().find("from peer 0"), std::string::npos) << received->status.message();
    EXPECT_EQ(sent->status.code(), Code::kCorrupted) << sent->status.to_string();
    ++both;
    ASSERT_FALSE(pair.texts().empty());
    EXPECT_NE(pair.texts().front().find("from peer"), std::string::npos);
  }
  EXPECT_GT(both, 1u);
}

/// A dead receiver says nothing; the sender's memory comes back when the peer is removed, or after a while.
TEST(CheckedEndpoint, SendsToWhoIsGoneEnd) {
  CheckedPair pair(1, {});
  const Bytes data = pattern(1000, 1);
  Bytes head(80), in(data.size());
  ASSERT_TRUE(pair.end(1).post_receive(Tag{5}, head, in, Token{1}).is_ok());
  pair.network().kill(1);
  ASSERT_TRUE(pair.end(0).post_send(PeerId{1}, Tag{5}, head, data, Token{2}).is_ok());
  pair.run(std::chrono::seconds(1));
  EXPECT_EQ(pair.find(0, 2), nullptr) << "nobody has confirmed it";
  pair.end(0).remove_peer(PeerId{1});
  pair.run(std::chrono::seconds(1));
  ASSERT_NE(pair.find(0, 2), nullptr);
  EXPECT_EQ(pair.find(0, 2)->status.code(), Code::kPeerLost);
}

TEST(CheckedFrame, SurvivesTheWireAndRefusesWhatIsNone) {
  Frame frame;
  frame.job_id = 0x0123456789ABCDEF;
  frame.sender = 7;
  frame.bytes = 1000;
  frame.number = 12;
  frame.oldest = 5;
  frame.below = 9;
  frame.seen = 0x8000000000000001;
  frame.data_crc32c = 0xDEADBEEF;
  auto bytes = encode(frame);
  // docs/wire.md: the layout is part of the format.
  EXPECT_EQ(bytes[0], std::byte{'H'});
  EXPECT_EQ(bytes[3], std::byte{'C'});
  EXPECT_EQ(bytes[16], std::byte{7});
  EXPECT_EQ(bytes[24], std::byte{12});
  EXPECT_EQ(bytes[56], std::byte{0xEF});
  const auto read = decode_frame(bytes);
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(read->job_id, frame.job_id);
  EXPECT_EQ(read->seen, frame.seen);
  EXPECT_EQ(read->oldest, frame.oldest);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    auto damaged = bytes;
    damaged[i] ^= std::byte{4};
    EXPECT_FALSE(decode_frame(damaged).has_value()) << "byte " << i;
  }
  EXPECT_FALSE(decode_frame(std::span<const std::byte>(bytes).first(63)).has_value());
}

TEST(CheckedFrame, ReportsAreReadBackAndNonsenseIsRefused) {
  Report report;
  report.asks = true;
  for (std::uint64_t i = 0; i < kMaxReportEntries; ++i) report.arrived.push_back({i * 10, i * 10 + 3});
  report.damaged = {{5, 6, 7}, {8, 0, 1}};
  std::vector<std::byte> bytes = encode(report);
  const auto read = decode_report(bytes);
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(*read, report);
  EXPECT_LE(bytes.size(), kMaxReportBytes);
  EXPECT_FALSE(decode_report(std::span<const std::byte>(bytes).first(bytes.size() - 1)).has_value());
  bytes[2] = std::byte{33};
  EXPECT_FALSE(decode_report(bytes).has_value());
}

}  // namespace
}  // namespace herring::runtime

namespace herring::transport {
INSTANTIATE_TEST_SUITE_P(Checked, TransportContract,
                         ::testing::Values(runtime::factory("plain", {}),
                                           runtime::factory("refusing", runtime::refusing())),
                         [](const auto& param) { return param.param.name; });
}  // namespace herring::transport
