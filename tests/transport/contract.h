#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "transport/transport.h"

/// The suite that every implementation of transport::Endpoint must pass. Include in exactly one file of a test binary
/// and name the implementation:
///
///   INSTANTIATE_TEST_SUITE_P(Sim, TransportContract, ::testing::Values(ContractFactory{"sim", make_sim_world}));
namespace herring::transport {

/// Some endpoints that know each other: endpoint i is PeerId{i} to all of them.
class ContractWorld {
 public:
  virtual ~ContractWorld() = default;
  virtual Endpoint& endpoint(std::size_t index) = 0;
  /// Lets a little time pass: a simulated network goes to its next event, a real one may block for a millisecond.
  virtual void drive() = 0;
  /// Posts of each kind that fit one endpoint before kAgain, where that is known; 0 where it is not.
  virtual std::size_t send_limit() const { return 0; }
  /// True where wait() blocks in real time.
  virtual bool blocks() const { return true; }
};

struct ContractFactory {
  std::string name;
  /// Null with a reason where the implementation cannot run here: the tests are skipped and print it.
  std::function<std::unique_ptr<ContractWorld>(std::size_t endpoints, std::string& reason)> make;
  friend std::ostream& operator<<(std::ostream& out, const ContractFactory& factory) { return out << factory.name; }
};

class TransportContract : public ::testing::TestWithParam<ContractFactory> {
 protected:
  using Bytes = std::vector<std::byte>;

  /// False (and the test is skipped) where the implementation is not available.
  bool open(std::size_t endpoints) {
    std::string reason;
    world_ = GetParam().make(endpoints, reason);
    if (!world_) {
      std::cout << "skipped: " << reason << '\n';
      return false;
    }
    done_.assign(endpoints, {});
    return true;
  }

  Endpoint& endpoint(std::size_t index) { return world_->endpoint(index); }

  static Bytes pattern(std::size_t bytes, std::uint32_t seed) {
    Bytes data(bytes);
    std::uint32_t state = seed * 2654435761u + 1;
    for (std::byte& b : data) {
      state = state * 1664525u + 1013904223u;
      b = static_cast<std::byte>(state >> 24);
    }
    return data;
  }

  /// Polls everybody once.
  std::size_t poll() {
    std::size_t total = 0;
    std::vector<Completion> batch(7);  // Small and odd: completions must survive being handed out piecemeal.
    for (std::size_t i = 0; i < done_.size(); ++i) {
      const std::size_t count = endpoint(i).poll(batch);
      EXPECT_LE(count, batch.size());
      for (std::size_t k = 0; k < count; ++k) {
        const auto [where, fresh] = done_[i].try_emplace(batch[k].token.value, batch[k]);
        EXPECT_TRUE(fresh) << "endpoint " << i << " completed token " << where->first << " twice";
      }
      total += count;
    }
    return total;
  }

  /// Drives the world until `condition` or 30 s of real time.
  bool until(const std::function<bool()>& condition) {
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (!condition()) {
      if (poll() == 0) world_->drive();
      if (std::chrono::steady_clock::now() > limit) return false;
    }
    return true;
  }

  bool is_done(std::size_t index, std::uint64_t token) const { return done_[index].contains(token); }
  const Completion& completion(std::size_t index, std::uint64_t token) { return done_[index].at(token); }

  /// Posts until the transport takes it.
  void send(std::size_t from, std::size_t to, std::uint64_t tag, std::span<const std::byte> first,
            std::span<const std::byte> second, std::uint64_t token) {
    Status status = Status::again();
    ASSERT_TRUE(until([&] {
      status = endpoint(from).post_send(PeerId{static_cast<std::uint32_t>(to)}, Tag{tag}, first, second, Token{token});
      return !status.is_again();
    }));
    ASSERT_TRUE(status.is_ok()) << status.to_string();
  }
  void receive(std::size_t at, std::uint64_t tag, std::span<std::byte> first, std::span<std::byte> second,
               std::uint64_t token) {
    Status status = Status::again();
    ASSERT_TRUE(until([&] {
      status = endpoint(at).post_receive(Tag{tag}, first, second, Token{token});
      return !status.is_again();
    }));
    ASSERT_TRUE(status.is_ok()) << status.to_string();
  }

  /// What the endpoint wants held for as long as it is posted.
  memory::Hold hold(std::size_t index, std::span<std::byte> memory) {
    memory::Domain* const domain = endpoint(index).memory();
    return domain == nullptr ? memory::Hold() : domain->hold(memory);
  }

  std::vector<std::map<std::uint64_t, Completion>> done_;
  std::unique_ptr<ContractWorld> world_;
};

#define HERRING_CONTRACT_OPEN(endpoints) \
  if (!open(endpoints)) GTEST_SKIP() << GetParam().name << " is not available here"

TEST_P(TransportContract, DeliversToTheReceiveWithTheSameTag) {
  HERRING_CONTRACT_OPEN(2);
  const Bytes one = pattern(100, 1), two = pattern(200, 2);
  Bytes in_one(100), in_two(200);
  receive(1, 7, in_one, {}, 71);
  receive(1, 8, in_two, {}, 81);
  send(0, 1, 8, two, {}, 2);
  send(0, 1, 7, one, {}, 1);
  ASSERT_TRUE(until([&] { return is_done(1, 71) && is_done(1, 81) && is_done(0, 1) && is_done(0, 2); }));
  EXPECT_EQ(in_one, one);
  EXPECT_EQ(in_two, two);
  EXPECT_EQ(completion(1, 71).kind, CompletionKind::kReceive);
  EXPECT_EQ(completion(1, 71).bytes, 100u);
  EXPECT_EQ(completion(0, 1).kind, CompletionKind::kSend);
  EXPECT_TRUE(completion(0, 1).status.is_ok());
}

TEST_P(TransportContract, GathersAndScattersTwoSpansAtAnySplit) {
  HERRING_CONTRACT_OPEN(2);
  const std::size_t splits[][2] = {{80, 80}, {1, 300}, {300, 1}, {0, 128}, {128, 0}, {333, 80}};
  std::uint64_t token = 100;
  for (const auto& split : splits) {
    const Bytes data = pattern(333, static_cast<std::uint32_t>(token));
    Bytes in_first(split[1], std::byte{0}), in_second(333 - split[1] + 5, std::byte{0});
    receive(1, token, in_first, in_second, token);
    const std::span<const std::byte> all(data);
    send(0, 1, token, all.first(split[0]), all.subspan(split[0]), token);
    ASSERT_TRUE(until([&] { return is_done(0, token) && is_done(1, token); }));
    ASSERT_TRUE(completion(1, token).status.is_ok()) << completion(1, token).status.to_string();
    EXPECT_EQ(completion(1, token).bytes, 333u);
    Bytes joined = in_first;
    joined.insert(joined.end(), in_second.begin(), in_second.end() - 5);
    EXPECT_EQ(joined, data) << "split " << split[0] << " -> " << split[1];
    EXPECT_EQ(in_second.back(), std::byte{0}) << "wrote past the message";
    ++token;
  }
}

TEST_P(TransportContract, ZeroLengthMessagesArrive) {
  HERRING_CONTRACT_OPEN(2);
  receive(1, 5, {}, {}, 50);
  send(0, 1, 5, {}, {}, 51);
  ASSERT_TRUE(until([&] { return is_done(1, 50) && is_done(0, 51); }));
  EXPECT_TRUE(completion(1, 50).status.is_ok());
  EXPECT_EQ(completion(1, 50).bytes, 0u);
}

TEST_P(TransportContract, EightMegabytesBothWaysAtOnce) {
  HERRING_CONTRACT_OPEN(2);
  constexpr std::size_t kBytes = (8u << 20) + 13;
  const Bytes out[2] = {pattern(kBytes, 3), pattern(kBytes, 4)};
  Bytes head[2] = {Bytes(80), Bytes(80)}, in[2] = {Bytes(kBytes - 80), Bytes(kBytes - 80)};
  for (std::size_t i = 0; i < 2; ++i) receive(i, 9, head[i], in[i], 90);
  for (std::size_t i = 0; i < 2; ++i) send(i, 1 - i, 9, std::span(out[i]).first(80), std::span(out[i]).subspan(80), 91);
  ASSERT_TRUE(until([&] { return is_done(0, 90) && is_done(1, 90) && is_done(0, 91) && is_done(1, 91); }));
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(completion(i, 90).bytes, kBytes);
    EXPECT_EQ(std::memcmp(head[i].data(), out[1 - i].data(), 80), 0);
    EXPECT_EQ(std::memcmp(in[i].data(), out[1 - i].data() + 80, kBytes - 80), 0);
  }
}

TEST_P(TransportContract, ManyMessagesInFlightEachCompleteOnceInAnyOrder) {
  HERRING_CONTRACT_OPEN(3);
  constexpr std::uint64_t kCount = 400;
  // Two senders, one receiver, tags posted in one order and sent in another: nothing here asserts an order of arrival.
  std::vector<Bytes> in(2 * kCount);
  std::vector<Bytes> out(2 * kCount);
  for (std::uint64_t i = 0; i < 2 * kCount; ++i) {
    const std::size_t bytes = (i * 37) % 5000;
    out[i] = pattern(bytes, static_cast<std::uint32_t>(i));
    in[i].resize(bytes);
    receive(2, 1000 + i, in[i], {}, i);
  }
  for (std::uint64_t k = 0; k < 2 * kCount; ++k) {
    const std::uint64_t i = (k * 7919) % (2 * kCount);
    send(i % 2, 2, 1000 + i, out[i], {}, i);
  }
  ASSERT_TRUE(until([&] { return done_[2].size() == 2 * kCount && done_[0].size() + done_[1].size() == 2 * kCount; }));
  for (std::uint64_t i = 0; i < 2 * kCount; ++i) {
    EXPECT_EQ(completion(2, i).bytes, out[i].size());
    EXPECT_EQ(in[i], out[i]) << "message " << i;
  }
}

TEST_P(TransportContract, OneTagTakesAsManyMessagesAsReceives) {
  HERRING_CONTRACT_OPEN(2);
  constexpr std::uint64_t kCount = 32;
  std::vector<Bytes> in(kCount, Bytes(16));
  for (std::uint64_t i = 0; i < kCount; ++i) receive(1, 77, in[i], {}, i);
  std::vector<Bytes> out;
  for (std::uint64_t i = 0; i < kCount; ++i) out.push_back(pattern(16, static_cast<std::uint32_t>(i + 500)));
  for (std::uint64_t i = 0; i < kCount; ++i) send(0, 1, 77, out[i], {}, i);
  ASSERT_TRUE(until([&] { return done_[1].size() == kCount && done_[0].size() == kCount; }));
  EXPECT_TRUE(std::is_permutation(in.begin(), in.end(), out.begin(), out.end())) << "the order is the network's";
}

TEST_P(TransportContract, AFullQueueSaysAgainAndLosesNothing) {
  HERRING_CONTRACT_OPEN(2);
  const std::size_t limit = world_->send_limit();
  const std::uint64_t count = limit == 0 ? 3000 : 2 * limit + 10;
  const Bytes data = pattern(64, 6);
  Bytes in(64 * count);
  for (std::uint64_t i = 0; i < count; ++i) receive(1, 10 + i, std::span(in).subspan(64 * i, 64), {}, i);
  std::uint64_t refused = 0;
  for (std::uint64_t i = 0; i < count;) {
    const Status status = endpoint(0).post_send(PeerId{1}, Tag{10 + i}, data, {}, Token{i});
    if (status.is_again()) {
      ++refused;
      ASSERT_LT(refused, 100'000'000u);
      if (poll() == 0) world_->drive();
      continue;
    }
    ASSERT_TRUE(status.is_ok()) << status.to_string();
    ++i;
  }
  ASSERT_TRUE(until([&] { return done_[0].size() == count && done_[1].size() == count; }));
  for (std::uint64_t i = 0; i < count; ++i) ASSERT_EQ(std::memcmp(&in[64 * i], data.data(), 64), 0) << "message " << i;
  if (limit != 0) {
    EXPECT_GT(refused, 0u);
  }
}

TEST_P(TransportContract, ACancelledReceiveCompletesOnceAndTakesNothing) {
  HERRING_CONTRACT_OPEN(2);
  Bytes in(32, std::byte{0xEE}), other(32);
  receive(1, 3, in, {}, 30);
  endpoint(1).cancel_receive(Token{30});
  ASSERT_TRUE(until([&] { return is_done(1, 30); }));
  EXPECT_EQ(completion(1, 30).kind, CompletionKind::kCancelled);
  endpoint(1).cancel_receive(Token{30});  // Already over: nothing happens.
  const Bytes data = pattern(32, 9);
  receive(1, 3, other, {}, 31);
  send(0, 1, 3, data, {}, 32);
  ASSERT_TRUE(until([&] { return is_done(1, 31) && is_done(0, 32); }));
  EXPECT_EQ(other, data);
  EXPECT_EQ(in, Bytes(32, std::byte{0xEE}));
}

TEST_P(TransportContract, CancellingAReceiveThatCompletedChangesNothing) {
  HERRING_CONTRACT_OPEN(2);
  Bytes in(32);
  const Bytes data = pattern(32, 10);
  receive(1, 4, in, {}, 40);
  send(0, 1, 4, data, {}, 41);
  ASSERT_TRUE(until([&] { return is_done(1, 40) && is_done(0, 41); }));
  endpoint(1).cancel_receive(Token{40});
  for (int i = 0; i < 5; ++i) {
    poll();  // Fails where token 40 completes twice.
    world_->drive();
  }
  EXPECT_EQ(in, data);
}

TEST_P(TransportContract, AnUnknownPeerIsAnErrorNotAnException) {
  HERRING_CONTRACT_OPEN(2);
  const Bytes data = pattern(8, 1);
  const Status status = endpoint(0).post_send(PeerId{4711}, Tag{1}, data, {}, Token{1});
  EXPECT_FALSE(status.is_ok());
  EXPECT_FALSE(status.is_again()) << "retrying would never help";
  EXPECT_NE(status.message().find("4711"), std::string::npos) << status.to_string();
  EXPECT_EQ(poll(), 0u);
}

TEST_P(TransportContract, AMessageTooLongForItsReceiveIsAnError) {
  HERRING_CONTRACT_OPEN(2);
  Bytes in(16), beyond(64, std::byte{0xAB});
  receive(1, 6, in, std::span(beyond).first(8), 60);
  const Bytes data = pattern(40, 11);
  send(0, 1, 6, data, {}, 61);
  ASSERT_TRUE(until([&] { return is_done(1, 60) && is_done(0, 61); }));
  EXPECT_FALSE(completion(1, 60).status.is_ok());
  EXPECT_EQ(Bytes(beyond.begin() + 8, beyond.end()), Bytes(56, std::byte{0xAB})) << "wrote past the receive";
  // The endpoint goes on working.
  Bytes next(40);
  receive(1, 6, next, {}, 62);
  send(0, 1, 6, data, {}, 63);
  ASSERT_TRUE(until([&] { return is_done(1, 62) && is_done(0, 63); }));
  EXPECT_EQ(next, data);
}

TEST_P(TransportContract, WakeEndsTheNextWait) {
  HERRING_CONTRACT_OPEN(2);
  endpoint(0).wake();
  const auto start = std::chrono::steady_clock::now();
  endpoint(0).wait(start + std::chrono::seconds(20));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
}

TEST_P(TransportContract, WaitEndsAtItsDeadline) {
  HERRING_CONTRACT_OPEN(2);
  const auto start = std::chrono::steady_clock::now();
  endpoint(0).wait(start + std::chrono::milliseconds(20));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
  endpoint(0).wait(start);  // In the past: returns at once.
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
}

TEST_P(TransportContract, ManyCanSendToOne) {
  HERRING_CONTRACT_OPEN(5);
  std::vector<Bytes> in(4, Bytes(3000)), out;
  for (std::uint64_t i = 0; i < 4; ++i) {
    out.push_back(pattern(3000, static_cast<std::uint32_t>(i)));
    receive(4, 20 + i, in[i], {}, i);
  }
  for (std::uint64_t i = 0; i < 4; ++i) send(i, 4, 20 + i, out[i], {}, 7);
  ASSERT_TRUE(until([&] { return done_[4].size() == 4; }));
  for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(in[i], out[i]);
}

TEST_P(TransportContract, AnEndpointCanSendToItself) {
  HERRING_CONTRACT_OPEN(1);
  Bytes in(1000);
  const Bytes data = pattern(1000, 12);
  receive(0, 2, in, {}, 1);
  send(0, 0, 2, data, {}, 2);
  ASSERT_TRUE(until([&] { return is_done(0, 1) && is_done(0, 2); }));
  EXPECT_EQ(in, data);
}

TEST_P(TransportContract, RemovingAPeerCompletesItsSendsOnceAndLeavesTheOthers) {
  HERRING_CONTRACT_OPEN(3);
  const Bytes data = pattern(1 << 20, 13);
  // Nobody receives these: with most transports they are still in flight when the peer goes.
  for (std::uint64_t i = 0; i < 4; ++i) send(0, 1, 900 + i, data, {}, i);
  endpoint(0).remove_peer(PeerId{1});
  endpoint(0).remove_peer(PeerId{1});  // Unknown by now: ignored.
  ASSERT_TRUE(until([&] { return is_done(0, 0) && is_done(0, 1) && is_done(0, 2) && is_done(0, 3); }));
  for (std::uint64_t i = 0; i < 4; ++i) {
    const Status& status = completion(0, i).status;
    EXPECT_TRUE(status.is_ok() || status.code() == Code::kPeerLost) << status.to_string();
  }
  EXPECT_FALSE(endpoint(0).post_send(PeerId{1}, Tag{1}, data, {}, Token{50}).is_ok());
  Bytes in(data.size());
  receive(2, 5, in, {}, 1);
  send(0, 2, 5, data, {}, 60);
  ASSERT_TRUE(until([&] { return is_done(2, 1) && is_done(0, 60); }));
  EXPECT_EQ(in, data);
}

TEST_P(TransportContract, RegisteredMemoryWorksLikeAnyOther) {
  HERRING_CONTRACT_OPEN(2);
  Bytes out = pattern(100'000, 14), in(100'000);
  const auto hold_out = hold(0, out);
  const auto hold_in = hold(1, in);
  receive(1, 1, std::span(in).first(80), std::span(in).subspan(80), 1);
  send(0, 1, 1, std::span(out).first(99'000), std::span(out).subspan(99'000), 2);
  ASSERT_TRUE(until([&] { return is_done(1, 1) && is_done(0, 2); }));
  EXPECT_EQ(in, out);
}

TEST_P(TransportContract, AfterShutDownNothingTouchesMemoryAndRegistrationsCanGo) {
  HERRING_CONTRACT_OPEN(2);
  Bytes in(1000, std::byte{1});
  Bytes data = pattern(1 << 20, 15);
  auto into = hold(1, in);
  auto from = hold(0, data);
  receive(1, 1, in, {}, 1);
  send(0, 1, 2, data, {}, 2);
  Bytes small(10, std::byte{7});
  auto hold_small = std::pair(hold(0, small), hold(1, small));
  endpoint(0).shut_down();
  endpoint(1).shut_down();
  from.reset();
  into.reset();
  std::fill(data.begin(), data.end(), std::byte{0});
  std::vector<Completion> done(8);
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(endpoint(0).poll(done) + endpoint(1).poll(done), 0u);
    world_->drive();
  }
  EXPECT_EQ(in, Bytes(1000, std::byte{1}));
  const Status sent = endpoint(0).post_send(PeerId{1}, Tag{1}, small, {}, Token{3});
  EXPECT_FALSE(sent.is_ok() || sent.is_again());
  const Status received = endpoint(1).post_receive(Tag{1}, small, {}, Token{4});
  EXPECT_FALSE(received.is_ok() || received.is_again());
  // It is no destructor: whoever knows the endpoint may go on calling it.
  endpoint(1).cancel_receive(Token{1});
  endpoint(0).remove_peer(PeerId{1});
  endpoint(0).wake();
  EXPECT_FALSE(endpoint(0).address().empty());
  EXPECT_FALSE(endpoint(0).description().empty());
  endpoint(0).wait(std::chrono::steady_clock::now());
  std::vector<int> descriptors;
  Instant deadline = std::chrono::steady_clock::now();
  static_cast<void>(endpoint(0).prepare_wait(descriptors, deadline));
  endpoint(0).shut_down();
  EXPECT_EQ(endpoint(0).poll(done), 0u);
}

TEST_P(TransportContract, OneEndpointThatIsShutDownLeavesTheOthersOfItsMemoryAlone) {
  HERRING_CONTRACT_OPEN(3);
  Bytes data = pattern(100'000, 16), in(100'000);
  const auto held = std::pair(hold(0, data), hold(2, in));
  receive(0, 1, {}, {}, 1);
  endpoint(1).shut_down();
  receive(2, 3, in, {}, 2);
  send(0, 2, 3, data, {}, 3);
  ASSERT_TRUE(until([&] { return is_done(0, 3) && is_done(2, 2); }));
  EXPECT_EQ(in, data);
}

TEST_P(TransportContract, AnEndpointMayCloseWithPostsPending) {
  HERRING_CONTRACT_OPEN(2);
  Bytes in(1000, std::byte{1});
  const Bytes data = pattern(1 << 20, 15);
  receive(1, 1, in, {}, 1);
  send(0, 1, 2, data, {}, 2);
  EXPECT_FALSE(endpoint(0).address().empty());
  EXPECT_FALSE(endpoint(0).description().empty());
  world_.reset();  // Nothing is written to `in` or read from `data` after this (sanitizers watch).
  EXPECT_EQ(in, Bytes(1000, std::byte{1}));
}

}  // namespace herring::transport
