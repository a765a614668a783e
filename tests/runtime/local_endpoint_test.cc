// Shared memory as a transport: the suite that every transport must pass, and what is special about this one.
#include "runtime/local_endpoint.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "intra_node/neighborhood.h"
#include "runtime/process_world.h"
#include "transport/contract.h"

namespace herring::runtime {
namespace {

using transport::Completion;

/// The ranks of one host, each with an endpoint, all in this process. What Progress does for an endpoint, poll() does
/// here.
class PolledEndpoint final : public transport::Endpoint {
 public:
  PolledEndpoint(std::unique_ptr<intra_node::Neighborhood> neighborhood, std::uint32_t rank)
      : neighborhood_(std::move(neighborhood)), inner_(*neighborhood_, rank) {}

  const transport::Address& address() const override { return inner_.address(); }
  std::string description() const override { return inner_.description(); }
  void add_peer(PeerId peer, std::span<const std::byte> address) override { inner_.add_peer(peer, address); }
  void remove_peer(PeerId peer) override { inner_.remove_peer(peer); }
  Status post_send(PeerId to, Tag tag, std::span<const std::byte> first, std::span<const std::byte> second,
                   Token token) override {
    return inner_.post_send(to, tag, first, second, token);
  }
  Status post_receive(Tag tag, std::span<std::byte> first, std::span<std::byte> second, Token token) override {
    return inner_.post_receive(tag, first, second, token);
  }
  void cancel_receive(Token token) override { inner_.cancel_receive(token); }
  std::size_t poll(std::span<Completion> completions) override {
    // May end a sleep first: messages are read by who is awake.
    std::size_t count = inner_.poll(completions.first(0));
    intra_node::Neighborhood::Message message;
    while (neighborhood_->receive(message)) {
      EXPECT_EQ(message.bytes.front(), kLocalEndpointChannel);
      inner_.deliver(message.from, message.bytes);
    }
    count = inner_.poll(completions);
    neighborhood_->flush();
    return count;
  }
  void wait(Instant deadline, std::span<const int> also) override { inner_.wait(deadline, also); }
  bool prepare_wait(std::vector<int>& descriptors, Instant& deadline) override {
    return inner_.prepare_wait(descriptors, deadline);
  }
  void wake() override { inner_.wake(); }
  void shut_down() override { inner_.shut_down(); }

  intra_node::Neighborhood& neighborhood() { return *neighborhood_; }
  LocalEndpoint& inner() { return inner_; }

 private:
  std::unique_ptr<intra_node::Neighborhood> neighborhood_;  // Outlives the endpoint.
  LocalEndpoint inner_;
};

std::vector<std::unique_ptr<PolledEndpoint>> open_host(std::size_t ranks, std::uint64_t arena_bytes) {
  const std::uint64_t token = std::random_device{}() | std::uint64_t{std::random_device{}()} << 32;
  std::vector<std::unique_ptr<intra_node::Neighborhood>> neighborhoods(ranks);
  std::vector<std::thread> threads;
  const Instant deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  for (std::uint32_t rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      const intra_node::NeighborhoodOptions options{rank, static_cast<std::uint32_t>(ranks), token, arena_bytes,
                                                    1 << 17};
      neighborhoods[rank] = std::make_unique<intra_node::Neighborhood>(options, deadline);
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<std::unique_ptr<PolledEndpoint>> endpoints;
  for (std::uint32_t rank = 0; rank < ranks; ++rank) {
    endpoints.push_back(std::make_unique<PolledEndpoint>(std::move(neighborhoods[rank]), rank));
  }
  for (auto& endpoint : endpoints) {
    for (std::uint32_t rank = 0; rank < ranks; ++rank) endpoint->add_peer(PeerId{rank}, endpoints[rank]->address());
  }
  return endpoints;
}

class HostWorld final : public transport::ContractWorld {
 public:
  explicit HostWorld(std::size_t ranks) : endpoints_(open_host(ranks, 256u << 20)) {}
  transport::Endpoint& endpoint(std::size_t index) override { return *endpoints_.at(index); }
  void drive() override {}

 private:
  std::vector<std::unique_ptr<PolledEndpoint>> endpoints_;
};

}  // namespace
}  // namespace herring::runtime

namespace herring::transport {

INSTANTIATE_TEST_SUITE_P(SharedMemory, TransportContract,
                         ::testing::Values(ContractFactory{"shared memory",
                                                           [](std::size_t endpoints, std::string&) {
                                                             return std::make_unique<runtime::HostWorld>(endpoints);
                                                           }}),
                         [](const auto&) { return std::string("local"); });

INSTANTIATE_TEST_SUITE_P(Process, TransportContract,
                         ::testing::Values(ContractFactory{"memory of one process",
                                                           [](std::size_t endpoints, std::string&) {
                                                             return std::make_unique<runtime::ProcessWorld>(endpoints);
                                                           }}),
                         [](const auto&) { return std::string("process"); });

}  // namespace herring::transport

namespace herring::runtime {
namespace {

using Bytes = std::vector<std::byte>;

Bytes pattern(std::size_t bytes) {
  Bytes data(bytes);
  for (std::size_t i = 0; i < bytes; ++i) data[i] = static_cast<std::byte>(i * 7 + i / 256);
  return data;
}

/// Polls both until `count` completions came on the first.
std::vector<Completion> poll_until(PolledEndpoint& first, PolledEndpoint& second, std::size_t count) {
  std::vector<Completion> all, batch(16);
  for (int tries = 0; all.size() < count && tries < 100'000; ++tries) {
    const std::size_t n = first.poll(batch);
    all.insert(all.end(), batch.begin(), batch.begin() + static_cast<std::ptrdiff_t>(n));
    second.poll({});  // Reads what came; its completions stay.
  }
  return all;
}

TEST(LocalEndpoint, ArenaMemoryIsSentWithoutACopyAndBorrowedUntilItWasRead) {
  auto host = open_host(2, 64u << 20);
  const std::span<std::byte> shared = host[0]->neighborhood().allocate(1 << 20);
  const Bytes data = pattern(shared.size());
  std::memcpy(shared.data(), data.data(), data.size());
  Bytes in(shared.size());
  ASSERT_TRUE(host[0]->post_send(PeerId{1}, Tag{5}, {}, shared, Token{1}).is_ok());
  std::vector<Completion> batch(4);
  EXPECT_EQ(host[0]->poll(batch), 0u) << "nobody has read it";
  ASSERT_TRUE(host[1]->post_receive(Tag{5}, {}, in, Token{2}).is_ok());
  const auto done = poll_until(*host[1], *host[0], 1);
  ASSERT_EQ(done.size(), 1u);
  EXPECT_EQ(in, data);
  EXPECT_EQ(poll_until(*host[0], *host[1], 1).size(), 1u);
  EXPECT_EQ(host[0]->inner().stats().in_place, 1u);
  EXPECT_EQ(host[0]->inner().stats().copies_in, 0u);
}

TEST(LocalEndpoint, CopiesAreBoundedAndReused) {
  auto host = open_host(2, 64u << 20);
  constexpr std::size_t kCount = 64;
  const Bytes data = pattern(1 << 20);
  std::vector<Bytes> in(kCount, Bytes(data.size()));
  for (std::uint64_t i = 0; i < kCount; ++i) {
    ASSERT_TRUE(host[0]->post_send(PeerId{1}, Tag{i}, {}, data, Token{i}).is_ok());
  }
  // Nobody has received: what is beyond the limit waits, and nothing of it was copied.
  EXPECT_EQ(host[0]->inner().stats().copies_in, LocalEndpoint::kMaxStagedBytes / data.size());
  for (std::uint64_t i = 0; i < kCount; ++i) ASSERT_TRUE(host[1]->post_receive(Tag{i}, {}, in[i], Token{i}).is_ok());
  EXPECT_EQ(poll_until(*host[1], *host[0], kCount).size(), kCount);
  for (const Bytes& each : in) EXPECT_EQ(each, data);
}

TEST(LocalEndpoint, AFullArenaIsAnErrorThatNamesTheSetting) {
  auto host = open_host(2, 4u << 20);
  const Bytes data = pattern(8u << 20);
  ASSERT_TRUE(host[0]->post_send(PeerId{1}, Tag{1}, {}, data, Token{1}).is_ok());
  const auto done = poll_until(*host[0], *host[1], 1);
  ASSERT_EQ(done.size(), 1u);
  EXPECT_EQ(done[0].status.code(), Code::kUnavailable);
  EXPECT_NE(done[0].status.message().find("HERRING_ARENA_BYTES"), std::string::npos);
}

/// Until not even an answer finds room; neighbours drop it.
void fill_ring(PolledEndpoint& from, std::uint32_t to) {
  for (std::size_t size = 16 << 10; size > 0; size /= 2) {
    const Bytes filler(size, kLocalEndpointChannel);
    while (!from.neighborhood().send(to, filler).is_again()) {
    }
  }
  from.neighborhood().flush();
}

TEST(LocalEndpoint, AnswersThatFoundNoRoomAreOwedUntilTheyAreOutOrTheSenderHasLeft) {
  auto host = open_host(2, 64u << 20);
  const Bytes data = pattern(1 << 20);
  const std::span<std::byte> shared = host[0]->neighborhood().allocate(data.size());
  std::memcpy(shared.data(), data.data(), data.size());
  std::vector<Completion> batch(4);
  for (std::uint64_t round = 1; round <= 2; ++round) {
    fill_ring(*host[1], 0);
    Bytes in(data.size());
    ASSERT_TRUE(host[0]->post_send(PeerId{1}, Tag{round}, {}, shared, Token{round}).is_ok());
    host[0]->neighborhood().flush();
    ASSERT_TRUE(host[1]->post_receive(Tag{round}, {}, in, Token{9}).is_ok());
    ASSERT_EQ(host[1]->poll(batch), 1u);
    EXPECT_EQ(in, data);
    EXPECT_TRUE(host[1]->inner().owes_answers());
    if (round == 2) host[1]->inner().peer_left(PeerId{0});
    EXPECT_EQ(host[1]->inner().owes_answers(), round == 1);
    if (round == 2) break;
    EXPECT_EQ(host[0]->poll(batch), 0u) << "it has made room, and no answer came";
    EXPECT_EQ(poll_until(*host[0], *host[1], 1).size(), 1u);
    EXPECT_FALSE(host[1]->inner().owes_answers());
  }
}

TEST(LocalEndpoint, WhatNoNeighbourSendsIsDropped) {
  auto host = open_host(2, 4u << 20);
  std::mt19937_64 random(3);
  Bytes in(64);
  ASSERT_TRUE(host[0]->post_receive(Tag{0}, in, {}, Token{1}).is_ok());
  const auto deliver = [&](Bytes bytes) { host[0]->inner().deliver(1, bytes); };
  for (std::size_t size = 0; size < 40; ++size) deliver(Bytes(size, kLocalEndpointChannel));
  for (int round = 0; round < 20'000; ++round) {
    Bytes bytes(40 + random() % 30);
    for (std::byte& b : bytes) b = random() % 4 == 0 ? static_cast<std::byte>(random()) : std::byte{0};
    bytes[0] = kLocalEndpointChannel;
    bytes[1] = static_cast<std::byte>(random() % 4);
    bytes[8] = std::byte{9};  // A tag that nobody posted.
    deliver(std::move(bytes));
  }
  EXPECT_GT(host[0]->inner().stats().dropped, 1000u);
  const Bytes data = pattern(64);
  ASSERT_TRUE(host[1]->post_send(PeerId{0}, Tag{0}, data, {}, Token{1}).is_ok());
  host[1]->neighborhood().flush();
  ASSERT_EQ(poll_until(*host[0], *host[1], 1).size(), 1u);
  EXPECT_EQ(in, data);
}

}  // namespace
}  // namespace herring::runtime
