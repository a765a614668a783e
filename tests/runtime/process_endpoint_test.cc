// A process's own worker and lanes: what is special about two threads, and about two endpoints that are one. That these
// are transports like all others: local_endpoint_test.cc.
#include "runtime/process_endpoint.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "runtime/routed_endpoint.h"

namespace herring::runtime {
namespace {

using transport::Completion;
using transport::CompletionKind;
using Bytes = std::vector<std::byte>;

struct Pair {
  Pair() { ProcessEndpoint::introduce(*one, PeerId{0}, *other, PeerId{1}); }
  std::unique_ptr<ProcessEndpoint> one = std::make_unique<ProcessEndpoint>();
  std::unique_ptr<ProcessEndpoint> other = std::make_unique<ProcessEndpoint>();
};

std::vector<Completion> poll(transport::Endpoint& endpoint) {
  std::vector<Completion> batch(16);
  batch.resize(endpoint.poll(batch));
  return batch;
}

Bytes filled(std::size_t bytes, int value) { return Bytes(bytes, static_cast<std::byte>(value)); }

TEST(ProcessEndpoint, TwoThreadsSendToEachOtherAndNothingIsLostTornOrSlept) {
  // A lost wake-up would be a job that stands still until something else comes: here, until the wait's minute is over.
  constexpr std::uint64_t kMessages = 20'000;
  Pair pair;
  const auto run = [](ProcessEndpoint& endpoint, PeerId peer, std::uint32_t seed) {
    std::mt19937 dice(seed);
    std::uint64_t sent = 0, over = 0, received = 0;
    Bytes out[8], in(64 << 10);
    bool is_free[8] = {true, true, true, true, true, true, true, true};
    bool is_posted = false;
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (over < kMessages || received < kMessages) {
      if (!is_posted && received < kMessages) {
        static_cast<void>(endpoint.post_receive(Tag{received}, in, {}, Token{1000}));
        is_posted = true;
      }
      for (std::uint64_t i = 0; i < 8 && sent < kMessages; ++i) {
        if (!is_free[i]) continue;
        const std::size_t bytes = dice() % 4 == 0 ? 4096 + dice() % 60'000 : 1 + dice() % 200;
        out[i] = filled(bytes, static_cast<int>(sent % 251));
        const std::span<const std::byte> all(out[i]);
        const std::size_t cut = dice() % (bytes + 1);
        if (!endpoint.post_send(peer, Tag{sent}, all.first(cut), all.subspan(cut), Token{i}).is_ok()) break;
        is_free[i] = false;
        ++sent;
      }
      const std::vector<Completion> done = poll(endpoint);
      for (const Completion& completion : done) {
        ASSERT_TRUE(completion.status.is_ok()) << completion.status.to_string();
        if (completion.kind == CompletionKind::kSend) {
          std::fill(out[completion.token.value].begin(), out[completion.token.value].end(), std::byte{0xFF});
          is_free[completion.token.value] = true;
          ++over;
          continue;
        }
        const Bytes expected = filled(completion.bytes, static_cast<int>(received % 251));
        ASSERT_EQ(std::memcmp(in.data(), expected.data(), completion.bytes), 0) << "message " << received;
        ++received;
        is_posted = false;
      }
      if (done.empty()) endpoint.wait(std::chrono::steady_clock::now() + std::chrono::minutes(1), {});
      ASSERT_LT(std::chrono::steady_clock::now(), limit) << sent << " sent, " << received << " received";
    }
  };
  std::thread other([&] { run(*pair.other, PeerId{0}, 2); });
  run(*pair.one, PeerId{1}, 1);
  other.join();
}

TEST(ProcessEndpoint, ASenderThatGoesTakesItsMemoryBackBeforeItIsGone) {
  for (int round = 0; round < 200; ++round) {
    Pair pair;
    Bytes in(1 << 20);
    auto out = std::make_unique<Bytes>(filled(1 << 20, 7));
    static_cast<void>(pair.other->post_receive(Tag{1}, in, {}, Token{1}));
    static_cast<void>(pair.one->post_send(PeerId{1}, Tag{1}, *out, {}, Token{2}));
    std::atomic<bool> stop{false};
    std::thread receiver([&] {
      while (!stop.load()) {
        for (const Completion& completion : poll(*pair.other)) {
          EXPECT_TRUE(completion.status.is_ok());
          EXPECT_EQ(in, filled(1 << 20, 7)) << "whole, or not at all";
        }
      }
    });
    if (round % 3 == 0) std::this_thread::yield();
    pair.one.reset();
    out.reset();  // Sanitizers watch who reads it now.
    stop.store(true);
    receiver.join();
  }
}

TEST(ProcessEndpoint, WhoSendsToOneThatIsGoneHearsIt) {
  Pair pair;
  const Bytes large = filled(100'000, 1), small = filled(10, 2);
  ASSERT_TRUE(pair.one->post_send(PeerId{1}, Tag{1}, large, {}, Token{1}).is_ok());
  pair.other.reset();
  ASSERT_TRUE(pair.one->post_send(PeerId{1}, Tag{2}, small, {}, Token{2}).is_ok());
  std::vector<Completion> done = poll(*pair.one);
  ASSERT_EQ(done.size(), 2u);
  for (const Completion& completion : done) EXPECT_EQ(completion.status.code(), Code::kPeerLost);
}

TEST(ProcessEndpoint, AMessageThatWasTakenBackMeetsNoReceive) {
  Pair pair;
  const Bytes large = filled(100'000, 1);
  Bytes in(100'000);
  static_cast<void>(pair.one->post_send(PeerId{1}, Tag{1}, large, {}, Token{1}));
  EXPECT_TRUE(poll(*pair.other).empty());  // It came before its receive.
  pair.one->remove_peer(PeerId{1});
  static_cast<void>(pair.other->post_receive(Tag{1}, in, {}, Token{2}));
  EXPECT_TRUE(poll(*pair.other).empty());
  EXPECT_EQ(in, Bytes(100'000));
}

/// A message of a header and so many bytes that `other` takes as a loan.
struct LoanPair : Pair {
  explicit LoanPair(std::size_t bytes) : payload(filled(bytes, 7)) {
    EXPECT_TRUE(other->post_loan_receive(PeerId{0}, Tag{1}, head_in, Token{1}).is_ok());
    EXPECT_TRUE(one->post_send(PeerId{1}, Tag{1}, head, payload, Token{2}).is_ok());
  }
  Bytes head = filled(64, 3), head_in = Bytes(64);
  Bytes payload;
};

TEST(ProcessEndpoint, WhatIsLentStaysWhereItIsUntilItIsGivenBack) {
  LoanPair pair(100'000);
  std::vector<Completion> done = poll(*pair.other);
  ASSERT_EQ(done.size(), 1u);
  EXPECT_TRUE(done[0].status.is_ok());
  EXPECT_EQ(done[0].bytes, 100'064u);
  EXPECT_EQ(pair.head_in, pair.head);
  std::shared_ptr<Loan> loan = std::move(done[0].loan);
  ASSERT_NE(loan, nullptr);
  EXPECT_EQ(loan->memory().data(), pair.payload.data());
  EXPECT_EQ(loan->memory().size(), pair.payload.size());
  EXPECT_TRUE(loan->begin());
  loan->memory()[5] = std::byte{9};
  loan->end();
  EXPECT_TRUE(poll(*pair.one).empty()) << "the send is not over";
  loan.reset();
  done = poll(*pair.one);
  ASSERT_EQ(done.size(), 1u);
  EXPECT_EQ(done[0].token, Token{2});
  EXPECT_TRUE(done[0].status.is_ok());
  EXPECT_EQ(pair.payload[5], std::byte{9});
}

TEST(ProcessEndpoint, WhatIsLentMayBeTakenBackAndThenIsNotTouched) {
  LoanPair pair(100'000);
  std::vector<Completion> done = poll(*pair.other);
  ASSERT_EQ(done.size(), 1u);
  std::shared_ptr<Loan> loan = std::move(done[0].loan);
  pair.one->remove_peer(PeerId{1});
  EXPECT_FALSE(loan->begin());
  ASSERT_EQ(poll(*pair.one).size(), 1u);
  // The token is free: another send that has it is not over because the loan ends.
  ProcessEndpoint::introduce(*pair.one, PeerId{0}, *pair.other, PeerId{1});
  ASSERT_TRUE(pair.one->post_send(PeerId{1}, Tag{2}, pair.head, pair.payload, Token{2}).is_ok());
  loan.reset();
  EXPECT_TRUE(poll(*pair.one).empty());
}

TEST(ProcessEndpoint, ALenderThatGoesWaitsForWhoIsAtIt) {
  for (int round = 0; round < 200; ++round) {
    LoanPair pair(1 << 20);
    std::vector<Completion> done = poll(*pair.other);
    ASSERT_EQ(done.size(), 1u);
    std::shared_ptr<Loan> loan = std::move(done[0].loan);
    done.clear();
    std::thread receiver([&loan] {
      if (!loan->begin()) return;
      const std::span<std::byte> memory = loan->memory();
      std::fill(memory.begin(), memory.end(), std::byte{1});
      loan->end();
    });
    if (round % 3 == 0) std::this_thread::yield();
    pair.one.reset();
    Bytes().swap(pair.payload);  // Sanitizers watch who writes it now.
    receiver.join();
    loan.reset();
  }
}

TEST(ProcessEndpoint, WhatIsSmallIsNotLent) {
  LoanPair pair(100);
  const std::vector<Completion> done = poll(*pair.other);
  ASSERT_EQ(done.size(), 1u);
  EXPECT_FALSE(done[0].status.is_ok());
  EXPECT_EQ(done[0].loan, nullptr);
}

/// Rank 0 reaches 1 near and 2 far; both ways are endpoints of this process.
struct Routes {
  Routes() {
    auto near = std::make_unique<ProcessEndpoint>(), far = std::make_unique<ProcessEndpoint>();
    ProcessEndpoint::introduce(*near, PeerId{0}, *neighbour, PeerId{1});
    ProcessEndpoint::introduce(*far, PeerId{0}, *stranger, PeerId{2});
    routed = std::make_unique<RoutedEndpoint>(std::move(near), std::set{PeerId{1}}, std::move(far));
  }
  std::unique_ptr<ProcessEndpoint> neighbour = std::make_unique<ProcessEndpoint>();
  std::unique_ptr<ProcessEndpoint> stranger = std::make_unique<ProcessEndpoint>();
  std::unique_ptr<RoutedEndpoint> routed;
};

TEST(RoutedEndpoint, EachPeerIsReachedOnItsOwnWayAndSoIsWhatItSends) {
  Routes routes;
  const Bytes from_near = filled(5000, 1), from_far = filled(5000, 2), to_all = filled(5000, 3);
  Bytes near_in(5000), far_in(5000), neighbour_in(5000), stranger_in(5000);
  // One tag: who may send it is what tells them apart.
  ASSERT_TRUE(routes.routed->post_receive_from(PeerId{1}, Tag{7}, near_in, {}, Token{1}).is_ok());
  ASSERT_TRUE(routes.routed->post_receive_from(PeerId{2}, Tag{7}, far_in, {}, Token{2}).is_ok());
  static_cast<void>(routes.neighbour->post_receive(Tag{8}, neighbour_in, {}, Token{1}));
  static_cast<void>(routes.stranger->post_receive(Tag{8}, stranger_in, {}, Token{1}));
  static_cast<void>(routes.stranger->post_send(PeerId{0}, Tag{7}, from_far, {}, Token{2}));
  static_cast<void>(routes.neighbour->post_send(PeerId{0}, Tag{7}, from_near, {}, Token{2}));
  static_cast<void>(routes.routed->post_send(PeerId{1}, Tag{8}, to_all, {}, Token{3}));
  static_cast<void>(routes.routed->post_send(PeerId{2}, Tag{8}, to_all, {}, Token{4}));
  std::set<std::uint64_t> done;
  for (int i = 0; i < 4; ++i) {
    for (const Completion& completion : poll(*routes.routed)) done.insert(completion.token.value);
    poll(*routes.neighbour);
    poll(*routes.stranger);
  }
  EXPECT_EQ(done, (std::set<std::uint64_t>{1, 2, 3, 4}));
  EXPECT_EQ(near_in, from_near);
  EXPECT_EQ(far_in, from_far);
  EXPECT_EQ(neighbour_in, to_all);
  EXPECT_EQ(stranger_in, to_all);
}

TEST(RoutedEndpoint, WithdrawsAReceiveWhereItWasPosted) {
  Routes routes;
  Bytes in(100);
  static_cast<void>(routes.routed->post_receive_from(PeerId{1}, Tag{1}, in, {}, Token{1}));
  static_cast<void>(routes.routed->post_receive(Tag{2}, in, {}, Token{2}));
  routes.routed->cancel_receive(Token{1});
  routes.routed->cancel_receive(Token{2});
  const std::vector<Completion> done = poll(*routes.routed);
  ASSERT_EQ(done.size(), 2u);
  for (const Completion& completion : done) EXPECT_EQ(completion.kind, CompletionKind::kCancelled);
}

TEST(RoutedEndpoint, SleepsForBothSidesAtOnce) {
  for (const bool is_near : {true, false}) {
    Routes routes;
    Bytes in(10);
    static_cast<void>(routes.routed->post_receive_from(PeerId{is_near ? 1u : 2u}, Tag{1}, in, {}, Token{1}));
    EXPECT_TRUE(poll(*routes.routed).empty());
    std::thread sender([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      const Bytes data = filled(10, 1);
      ProcessEndpoint& from = is_near ? *routes.neighbour : *routes.stranger;
      static_cast<void>(from.post_send(PeerId{0}, Tag{1}, data, {}, Token{1}));
    });
    const auto start = std::chrono::steady_clock::now();
    while (poll(*routes.routed).empty()) routes.routed->wait(start + std::chrono::minutes(1), {});
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
    sender.join();
  }
}

}  // namespace
}  // namespace herring::runtime
