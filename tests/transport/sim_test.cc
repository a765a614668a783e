#include "transport/sim.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <iostream>

#include "transport/contract.h"
#include "transport/holding_endpoint.h"
#include "transport/strict_endpoint.h"

namespace herring::transport {
namespace {

class SimWorld final : public ContractWorld {
 public:
  SimWorld(std::size_t endpoints, const SimOptions& options, bool strict)
      : options_(options), network_(20201, options) {
    for (std::size_t i = 0; i < endpoints; ++i) {
      endpoints_.push_back(network_.open_endpoint());
      if (!strict) continue;
      domains_.push_back(std::make_unique<memory::Domain>());
      auto on_card = std::make_unique<StrictEndpoint>(std::move(endpoints_.back()), *domains_.back());
      endpoints_.back() = std::make_unique<HoldingEndpoint>(std::move(on_card));
    }
    for (auto& from : endpoints_) {
      for (std::size_t to = 0; to < endpoints; ++to) {
        from->add_peer(PeerId{static_cast<std::uint32_t>(to)}, endpoints_[to]->address());
      }
    }
  }
  Endpoint& endpoint(std::size_t index) override { return *endpoints_[index]; }
  void drive() override { network_.advance(); }
  std::size_t send_limit() const override { return options_.max_sends; }
  bool blocks() const override { return false; }

 private:
  SimOptions options_;
  SimNetwork network_;
  std::vector<std::unique_ptr<memory::Domain>> domains_;
  std::vector<std::unique_ptr<Endpoint>> endpoints_;
};

ContractFactory factory(const std::string& name, const SimOptions& options, bool strict = false) {
  return {name, [options, strict](std::size_t endpoints, std::string&) -> std::unique_ptr<ContractWorld> {
            return std::make_unique<SimWorld>(endpoints, options, strict);
          }};
}

SimOptions refusing() {
  SimOptions options;
  options.again_chance = 0.3;
  options.max_sends = 5;
  options.straggler_chance = 0.1;
  return options;
}

SimOptions narrow() {
  SimOptions options;
  options.uplink_bytes_per_second = 1e8;
  options.downlink_bytes_per_second = 1e8;
  return options;
}

INSTANTIATE_TEST_SUITE_P(Sim, TransportContract,
                         ::testing::Values(factory("plain", {}), factory("refusing", refusing()),
                                           factory("narrow", narrow()), factory("strict", {}, true)),
                         [](const auto& param) { return param.param.name; });

/// Two endpoints and what their completions said.
struct Pair {
  explicit Pair(const SimOptions& options, std::uint64_t seed = 1) : network(seed, options) {
    for (auto& endpoint : endpoints) endpoint = network.open_endpoint();
    endpoints[0]->add_peer(PeerId{1}, endpoints[1]->address());
    endpoints[1]->add_peer(PeerId{0}, endpoints[0]->address());
  }
  std::vector<Completion> drain(std::size_t index) {
    std::vector<Completion> out(64);
    out.resize(endpoints[index]->poll(out));
    return out;
  }
  SimNetwork network;
  std::unique_ptr<Endpoint> endpoints[2];
};

std::vector<std::uint64_t> arrival_order(std::uint64_t seed) {
  Pair pair({}, seed);
  std::vector<std::byte> in(16), out(1);
  for (std::uint64_t i = 0; i < 16; ++i) {
    EXPECT_TRUE(pair.endpoints[1]->post_receive(Tag{i}, std::span(in).subspan(i, 1), {}, Token{i}).is_ok());
  }
  for (std::uint64_t i = 0; i < 16; ++i) {
    EXPECT_TRUE(pair.endpoints[0]->post_send(PeerId{1}, Tag{i}, out, {}, Token{i}).is_ok());
  }
  while (pair.network.advance()) {
  }
  std::vector<std::uint64_t> order;
  for (const Completion& done : pair.drain(1)) order.push_back(done.token.value);
  return order;
}

TEST(SimNetwork, ReordersWithinAPeerAndReplaysForASeed) {
  const auto first = arrival_order(5);
  ASSERT_EQ(first.size(), 16u);
  EXPECT_EQ(first, arrival_order(5));
  EXPECT_NE(first, arrival_order(6));
  EXPECT_FALSE(std::is_sorted(first.begin(), first.end()));
}

/// As a provider does: a pool of receives that takes them all leaves no room for a send.
TEST(SimNetwork, SendsAndReceivesTogetherAreLimited) {
  SimOptions options;
  options.max_operations = 3;
  Pair pair(options);
  std::vector<std::byte> bytes(8);
  EXPECT_EQ(SimOptions{}.max_operations, kMaxOperations);
  ASSERT_TRUE(pair.endpoints[0]->post_receive(Tag{1}, bytes, {}, Token{1}).is_ok());
  ASSERT_TRUE(pair.endpoints[0]->post_receive(Tag{2}, bytes, {}, Token{2}).is_ok());
  ASSERT_TRUE(pair.endpoints[0]->post_send(PeerId{1}, Tag{1}, bytes, {}, Token{3}).is_ok());
  EXPECT_TRUE(pair.endpoints[0]->post_send(PeerId{1}, Tag{2}, bytes, {}, Token{4}).is_again());
  EXPECT_TRUE(pair.endpoints[0]->post_receive(Tag{3}, bytes, {}, Token{5}).is_again());
  pair.endpoints[0]->cancel_receive(Token{2});
  EXPECT_TRUE(pair.endpoints[0]->post_send(PeerId{1}, Tag{2}, bytes, {}, Token{4}).is_ok());
}

TEST(SimNetwork, CountsAMessageThatNoReceiveWaitedFor) {
  Pair pair({});
  std::vector<std::byte> data(10), in(10);
  ASSERT_TRUE(pair.endpoints[0]->post_send(PeerId{1}, Tag{1}, data, {}, Token{1}).is_ok());
  while (pair.network.advance()) {
  }
  EXPECT_EQ(pair.network.stats().unexpected, 1u);
  ASSERT_TRUE(pair.endpoints[1]->post_receive(Tag{1}, in, {}, Token{2}).is_ok());
  while (pair.network.advance()) {
  }
  EXPECT_EQ(pair.drain(1).size(), 1u);
}

TEST(SimNetwork, BandwidthSetsTheTimeOfAStream) {
  SimOptions options = narrow();
  options.min_delay = options.max_delay = std::chrono::microseconds(10);
  Pair pair(options);
  std::vector<std::byte> data(1'000'000), in(10'000'000);
  for (std::uint64_t i = 0; i < 10; ++i) {
    ASSERT_TRUE(
        pair.endpoints[1]->post_receive(Tag{i}, std::span(in).subspan(i * 1'000'000, 1'000'000), {}, Token{i}).is_ok());
    ASSERT_TRUE(pair.endpoints[0]->post_send(PeerId{1}, Tag{i}, data, {}, Token{i}).is_ok());
  }
  const Instant start = pair.network.now();
  while (pair.drain(1).empty() || pair.network.stats().messages < 10) ASSERT_TRUE(pair.network.advance());
  // 10 MB over 100 MB/s, cut through: the second link adds its delay, not its time.
  const double seconds = std::chrono::duration<double>(pair.network.now() - start).count();
  EXPECT_NEAR(seconds, 0.1, 0.001);
}

TEST(SimNetwork, ADeadPeerAnswersNothingAndRemovingItFreesTheSends) {
  SimOptions options;
  options.buffered_chance = 0;
  Pair pair(options);
  std::vector<std::byte> data(10), in(10);
  ASSERT_TRUE(pair.endpoints[1]->post_receive(Tag{1}, in, {}, Token{2}).is_ok());
  ASSERT_TRUE(pair.endpoints[0]->post_send(PeerId{1}, Tag{1}, data, {}, Token{1}).is_ok());
  pair.network.kill(1);
  while (pair.network.advance()) {
  }
  EXPECT_TRUE(pair.drain(0).empty());
  EXPECT_TRUE(pair.drain(1).empty());
  pair.endpoints[0]->remove_peer(PeerId{1});
  const auto done = pair.drain(0);
  ASSERT_EQ(done.size(), 1u);
  EXPECT_EQ(done[0].status.code(), Code::kPeerLost);
}

TEST(SimNetwork, APartitionHoldsMessagesUntilItHeals) {
  Pair pair({});
  std::vector<std::byte> data(10), in(10);
  ASSERT_TRUE(pair.endpoints[1]->post_receive(Tag{1}, in, {}, Token{2}).is_ok());
  pair.network.partition(0, 1);
  ASSERT_TRUE(pair.endpoints[0]->post_send(PeerId{1}, Tag{1}, data, {}, Token{1}).is_ok());
  while (pair.network.advance()) {
  }
  EXPECT_TRUE(pair.drain(1).empty());
  pair.network.heal(0, 1);
  while (pair.network.advance()) {
  }
  EXPECT_EQ(pair.drain(1).size(), 1u);
}

}  // namespace
}  // namespace herring::transport
