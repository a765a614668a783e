#pragma once

#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "transport/limits.h"
#include "transport/transport.h"

/// What every endpoint on real sockets does beyond the contract: blocking, peers that are not there, do not read or
/// die. Include in exactly one file of a test binary and name the implementation, as with transport/contract.h.
namespace herring::transport {

using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;

/// Where endpoints come from.
struct NetworkOptions {
  double connect_timeout_s = 20;
};
class Network {
 public:
  virtual ~Network() = default;
  virtual std::unique_ptr<Endpoint> open_endpoint() = 0;
};
struct NetworkFactory {
  std::string name;
  /// Null with a reason where the implementation cannot run here.
  std::function<std::unique_ptr<Network>(const NetworkOptions& options, std::string& reason)> make;
  friend std::ostream& operator<<(std::ostream& out, const NetworkFactory& factory) { return out << factory.name; }
};

using Bytes = std::vector<std::byte>;

inline Bytes pattern(std::size_t bytes, std::uint32_t seed) {
  Bytes data(bytes);
  std::uint32_t state = seed * 2654435761u + 1;
  for (std::byte& b : data) {
    state = state * 1664525u + 1013904223u;
    b = static_cast<std::byte>(state >> 24);
  }
  return data;
}

/// An endpoint and everything that it completed, by token.
struct Party {
  std::unique_ptr<Endpoint> endpoint;
  std::map<std::uint64_t, Completion> done;

  std::size_t poll() {
    std::vector<Completion> batch(16);
    const std::size_t count = endpoint->poll(batch);
    for (std::size_t i = 0; i < count; ++i) {
      EXPECT_TRUE(done.try_emplace(batch[i].token.value, batch[i]).second)
          << "token " << batch[i].token.value << " completed twice";
    }
    return count;
  }
};

/// Tests that play all parties from one thread, or one party per thread.
class NetworkEndpoint : public ::testing::TestWithParam<NetworkFactory> {
 protected:
  /// False, with the reason printed, where the implementation cannot run here.
  bool open(std::size_t count, const NetworkOptions& options = {}) {
    std::string reason;
    parties_.clear();
    network_ = GetParam().make(options, reason);
    if (network_ == nullptr) {
      std::cout << "skipped: " << reason << '\n';
      return false;
    }
    parties_.resize(count);
    for (Party& party : parties_) party.endpoint = network_->open_endpoint();
    for (Party& party : parties_) {
      for (std::uint32_t i = 0; i < count; ++i) party.endpoint->add_peer(PeerId{i}, parties_[i].endpoint->address());
    }
    return true;
  }
  /// Polls all parties until the condition holds or 30 s have passed.
  bool until(const std::function<bool()>& condition) {
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (!condition()) {
      std::size_t count = 0;
      for (Party& party : parties_) count += party.endpoint != nullptr ? party.poll() : 0;
      const auto now = std::chrono::steady_clock::now();
      if (now > limit) return false;
      if (count > 0) continue;
      for (Party& party : parties_) {
        if (party.endpoint != nullptr) party.endpoint->wait(now + std::chrono::microseconds(200));
      }
    }
    return true;
  }

  std::unique_ptr<Network> network_;
  std::vector<Party> parties_;
};

#define HERRING_NETWORK_OPEN(...) \
  if (!open(__VA_ARGS__)) GTEST_SKIP() << GetParam().name << " is not available here"

/// The address of a socket that nobody listens on: that of an endpoint which is closed again.
inline Address vacant_address(Network& network) { return network.open_endpoint()->address(); }

inline Duration thread_cpu_time() {
  rusage usage{};
  getrusage(RUSAGE_THREAD, &usage);
  return seconds(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
         std::chrono::microseconds(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

// One thread per party, each sleeping in wait() whenever it has nothing to do: a lost wakeup shows as a wait that lasts
// to its deadline.
class BlockingParty {
 public:
  BlockingParty(Party& party, std::uint32_t peer) : party_(party), peer_(peer) {}

  void exchange(std::size_t rounds, std::size_t bytes, std::size_t window) {
    const Bytes out = pattern(bytes, 1 + peer_);
    std::vector<Bytes> in(window, Bytes(bytes));
    std::size_t posted = 0, sent = 0, received = 0, completed = 0;
    while (received < rounds || completed < rounds) {
      while (posted < rounds && posted < received + window) {
        const Status status =
            party_.endpoint->post_receive(Tag{posted}, std::span(in[posted % window]).first(bytes / 3),
                                          std::span(in[posted % window]).subspan(bytes / 3), Token{2 * posted});
        if (!status.is_ok()) break;
        ++posted;
      }
      while (sent < rounds && sent < completed + window && sent < posted) {
        if (!party_.endpoint->post_send(PeerId{peer_}, Tag{sent}, out, {}, Token{2 * sent + 1}).is_ok()) break;
        ++sent;
      }
      std::array<Completion, 16> batch;
      const std::size_t count = party_.endpoint->poll(batch);
      for (std::size_t i = 0; i < count; ++i) {
        if (!batch[i].status.is_ok()) ++errors;
        if (batch[i].kind == CompletionKind::kSend) ++completed;
        if (batch[i].kind == CompletionKind::kReceive) {
          ++received;
          if (batch[i].bytes != bytes) ++errors;
        }
      }
      if (count > 0) continue;
      const auto start = steady_clock::now();
      party_.endpoint->wait(start + seconds(10));
      if (steady_clock::now() - start > seconds(9)) {
        ++lost_wakeups;
        return;
      }
    }
    const Bytes expected = pattern(bytes, 1 + (1 - peer_));
    for (const Bytes& buffer : in) errors += buffer != expected ? 1 : 0;
  }

  std::size_t lost_wakeups = 0;
  std::size_t errors = 0;

 private:
  Party& party_;
  std::uint32_t peer_;
};

TEST_P(NetworkEndpoint, BlockingWaitsLoseNoWakeupWithTrafficBothWays) {
  constexpr std::array<std::array<std::size_t, 3>, 5> kCases{{{3000, 64, 1},
                                                              {1500, 8999, 8},
                                                              {400, 128 * 1024, 16},
                                                              {12, std::size_t{4} << 20, 3},
                                                              {2, std::size_t{64} << 20, 1}}};
  for (const auto& one : kCases) {
    HERRING_NETWORK_OPEN(2);
    const auto [rounds, bytes, window] = one;
    BlockingParty a(parties_[0], 1), b(parties_[1], 0);
    std::thread other([&, count = rounds, size = bytes, depth = window] { b.exchange(count, size, depth); });
    a.exchange(rounds, bytes, window);
    other.join();
    EXPECT_EQ(a.lost_wakeups + b.lost_wakeups, 0u) << bytes << " bytes";
    EXPECT_EQ(a.errors + b.errors, 0u) << bytes << " bytes";
  }
}

TEST_P(NetworkEndpoint, WakeFromAnotherThreadEndsABlockedWait) {
  HERRING_NETWORK_OPEN(1);
  auto& endpoint = *parties_[0].endpoint;
  for (int round = 0; round < 20; ++round) {
    std::thread waker([&] { endpoint.wake(); });
    const auto start = steady_clock::now();
    endpoint.wait(start + seconds(20));
    EXPECT_LT(steady_clock::now() - start, seconds(10));
    waker.join();
  }
}

TEST_P(NetworkEndpoint, ADescriptorOfTheCallersEndsAWaitAndStaysReadable) {
  HERRING_NETWORK_OPEN(1);
  const int descriptor = eventfd(1, EFD_CLOEXEC);
  ASSERT_GE(descriptor, 0);
  const auto start = steady_clock::now();
  parties_[0].endpoint->wait(start + seconds(20), std::span(&descriptor, 1));
  EXPECT_LT(steady_clock::now() - start, seconds(10));
  eventfd_t value = 0;
  EXPECT_EQ(eventfd_read(descriptor, &value), 0);
  close(descriptor);
}

TEST_P(NetworkEndpoint, AnIdleWaitSleepsAfterTraffic) {
  HERRING_NETWORK_OPEN(2);
  auto& endpoint = *parties_[0].endpoint;
  const Bytes data = pattern(100, 1);
  Bytes in(100);
  ASSERT_TRUE(endpoint.post_receive(Tag{1}, in, {}, Token{1}).is_ok());
  ASSERT_TRUE(parties_[1].endpoint->post_send(PeerId{0}, Tag{1}, data, {}, Token{1}).is_ok());
  ASSERT_TRUE(until([&] { return parties_[0].done.contains(1) && parties_[1].done.contains(1); }));
  const Duration before = thread_cpu_time();
  const auto end = steady_clock::now() + milliseconds(300);
  std::size_t rounds = 0;
  while (steady_clock::now() < end) {
    parties_[0].poll();
    endpoint.wait(end);
    ++rounds;
  }
  EXPECT_LT(rounds, 50u);
  EXPECT_LT(thread_cpu_time() - before, milliseconds(100));
}

TEST_P(NetworkEndpoint, SendsToAnAddressWhereNobodyListensFailByNameAndHoldUpNobody) {
  NetworkOptions options;
  options.connect_timeout_s = 0.3;
  HERRING_NETWORK_OPEN(2, options);
  auto& endpoint = *parties_[0].endpoint;
  endpoint.add_peer(PeerId{9}, vacant_address(*network_));
  const Bytes data = pattern(5000, 1);
  Bytes in(5000);
  const auto start = steady_clock::now();
  for (std::uint64_t i = 0; i < 100; ++i)
    ASSERT_TRUE(endpoint.post_send(PeerId{9}, Tag{1}, data, {}, Token{i}).is_ok());
  EXPECT_LT(steady_clock::now() - start, milliseconds(250)) << "connecting blocked";

  // Another peer is served meanwhile.
  ASSERT_TRUE(parties_[1].endpoint->post_receive(Tag{2}, in, {}, Token{1}).is_ok());
  ASSERT_TRUE(endpoint.post_send(PeerId{1}, Tag{2}, data, {}, Token{1000}).is_ok());
  ASSERT_TRUE(until([&] { return parties_[1].done.contains(1); }));
  EXPECT_EQ(in, data);

  ASSERT_TRUE(until([&] { return parties_[0].done.size() == 101; }));
  for (std::uint64_t i = 0; i < 100; ++i) {
    const Status& status = parties_[0].done.at(i).status;
    EXPECT_EQ(status.code(), Code::kPeerLost) << status.to_string();
    EXPECT_NE(status.message().find("peer 9"), std::string::npos) << status.to_string();
  }
}

TEST_P(NetworkEndpoint, WaitingForAPeerThatIsNotThereDoesNotSpin) {
  HERRING_NETWORK_OPEN(1);
  parties_[0].endpoint->add_peer(PeerId{9}, vacant_address(*network_));
  const Bytes data = pattern(100, 1);
  ASSERT_TRUE(parties_[0].endpoint->post_send(PeerId{9}, Tag{1}, data, {}, Token{1}).is_ok());
  const Duration before = thread_cpu_time();
  const auto end = steady_clock::now() + milliseconds(300);
  std::size_t rounds = 0;
  for (; steady_clock::now() < end; ++rounds) {
    parties_[0].poll();
    parties_[0].endpoint->wait(end);
  }
  EXPECT_LT(rounds, 300u);
  EXPECT_LT(thread_cpu_time() - before, milliseconds(100));
}

TEST_P(NetworkEndpoint, RemovingAPeerFailsWhatWaitsForItAtOnce) {
  HERRING_NETWORK_OPEN(1);
  auto& endpoint = *parties_[0].endpoint;
  endpoint.add_peer(PeerId{9}, vacant_address(*network_));
  const Bytes data = pattern(100, 1);
  for (std::uint64_t i = 0; i < 3; ++i) ASSERT_TRUE(endpoint.post_send(PeerId{9}, Tag{1}, data, {}, Token{i}).is_ok());
  endpoint.remove_peer(PeerId{9});
  parties_[0].poll();
  ASSERT_EQ(parties_[0].done.size(), 3u);
  EXPECT_EQ(parties_[0].done.at(0).status.code(), Code::kPeerLost);
  EXPECT_NE(parties_[0].done.at(0).status.message().find("removed"), std::string::npos);
}

TEST_P(NetworkEndpoint, OneUnreachablePeerCannotUseUpAllSends) {
  HERRING_NETWORK_OPEN(2);
  auto& endpoint = *parties_[0].endpoint;
  endpoint.add_peer(PeerId{9}, vacant_address(*network_));
  const Bytes data = pattern(8, 1);
  std::uint64_t accepted = 0;
  while (accepted < 100'000 && endpoint.post_send(PeerId{9}, Tag{1}, data, {}, Token{accepted}).is_ok()) ++accepted;
  EXPECT_LT(accepted, 100'000u);
  EXPECT_TRUE(endpoint.post_send(PeerId{9}, Tag{1}, data, {}, Token{accepted}).is_again());
  EXPECT_TRUE(endpoint.takes_sends()) << "of others";
  EXPECT_TRUE(endpoint.post_send(PeerId{1}, Tag{1}, data, {}, Token{accepted}).is_ok());
}

/// Who has sends for thousands of peers tries none of them then.
TEST_P(NetworkEndpoint, AnEndpointThatIsFullForEverybodySaysSo) {
  HERRING_NETWORK_OPEN(1);
  auto& endpoint = *parties_[0].endpoint;
  const Bytes data = pattern(8, 1);
  const transport::Address vacant = vacant_address(*network_);
  std::uint64_t token = 0;
  for (std::uint32_t peer = 10; endpoint.takes_sends(); ++peer) {
    ASSERT_LT(peer, 2000u);
    endpoint.add_peer(PeerId{peer}, vacant);
    ASSERT_TRUE(endpoint.post_send(PeerId{peer}, Tag{1}, data, {}, Token{token}).is_ok()) << "it had room";
    while (endpoint.post_send(PeerId{peer}, Tag{1}, data, {}, Token{++token}).is_ok()) continue;
  }
  endpoint.add_peer(PeerId{9}, vacant);
  EXPECT_TRUE(endpoint.post_send(PeerId{9}, Tag{1}, data, {}, Token{token}).is_again());
  endpoint.remove_peer(PeerId{10});
  ASSERT_TRUE(until([&] { return endpoint.takes_sends(); }));
  EXPECT_TRUE(endpoint.post_send(PeerId{9}, Tag{1}, data, {}, Token{token}).is_ok());
}

/// A process that is stopped, or busy with something else, for a while.
TEST_P(NetworkEndpoint, PeersThatDoNotReadCannotUseUpAllSends) {
  HERRING_NETWORK_OPEN(5);
  auto& endpoint = *parties_[0].endpoint;
  const Bytes data = pattern(4000, 1);
  Bytes in(4000);
  std::uint64_t token = 0;
  // Until the connections stand: peers take what is meant for them.
  for (std::uint32_t peer = 1; peer < 5; ++peer) {
    ASSERT_TRUE(parties_[peer].endpoint->post_receive(Tag{1}, in, {}, Token{1}).is_ok());
    ASSERT_TRUE(endpoint.post_send(PeerId{peer}, Tag{1}, data, {}, Token{token++}).is_ok());
    ASSERT_TRUE(until([&] { return parties_[peer].done.contains(1); }));
  }
  std::uint64_t refused = 0;
  for (std::uint32_t peer = 1; peer < 4; ++peer) {
    for (int i = 0; i < 5000; ++i) {
      const Status status = endpoint.post_send(PeerId{peer}, Tag{2}, data, {}, Token{token});
      ASSERT_TRUE(status.is_ok() || status.is_again()) << status.to_string();
      refused += status.is_again() ? 1 : 0;
      token += status.is_ok() ? 1 : 0;
    }
  }
  EXPECT_GT(refused, 0u) << "all was taken: nothing is tested";
  ASSERT_TRUE(parties_[4].endpoint->post_receive(Tag{3}, in, {}, Token{3}).is_ok());
  EXPECT_TRUE(endpoint.post_send(PeerId{4}, Tag{3}, data, {}, Token{token}).is_ok());
  for (Party& party : parties_) party.endpoint.reset();  // Before the memory that they use.
}

TEST_P(NetworkEndpoint, APeerMayGetANewAddress) {
  HERRING_NETWORK_OPEN(3);
  auto& endpoint = *parties_[0].endpoint;
  endpoint.add_peer(PeerId{1}, parties_[2].endpoint->address());
  const Bytes data = pattern(3000, 7);
  Bytes in(3000);
  ASSERT_TRUE(parties_[2].endpoint->post_receive(Tag{4}, in, {}, Token{1}).is_ok());
  ASSERT_TRUE(endpoint.post_send(PeerId{1}, Tag{4}, data, {}, Token{2}).is_ok());
  ASSERT_TRUE(until([&] { return parties_[2].done.contains(1); }));
  EXPECT_EQ(in, data);
}

TEST_P(NetworkEndpoint, ThousandsOfReceivesArePostedAndCancelledOnceEach) {
  HERRING_NETWORK_OPEN(1);
  constexpr std::uint64_t kCount = 4000;
  Bytes in(64);
  for (std::uint64_t i = 0; i < kCount; ++i) {
    ASSERT_TRUE(parties_[0].endpoint->post_receive(Tag{i}, in, {}, Token{i}).is_ok()) << i;
  }
  for (std::uint64_t i = 0; i < kCount; ++i) parties_[0].endpoint->cancel_receive(Token{(i * 7) % kCount});
  for (std::uint64_t i = 0; i < kCount; ++i) parties_[0].endpoint->cancel_receive(Token{i});
  ASSERT_TRUE(until([&] { return parties_[0].done.size() == kCount; }));
  for (const auto& [token, completion] : parties_[0].done) EXPECT_EQ(completion.kind, CompletionKind::kCancelled);
}

/// What a large job's lane keeps posted (runtime/budget.h). A provider that takes fewer leaves its chunks without one.
TEST_P(NetworkEndpoint, AnEndpointTakesAllReceivesThatAJobMayCountOn) {
  HERRING_NETWORK_OPEN(1);
  constexpr std::uint64_t kControls = 28'000;
  constexpr std::uint64_t kAll = kMaxOperations;
  Bytes in(64);
  for (std::uint64_t i = 0; i < kAll; ++i) {
    const Tag tag = i < kControls ? kControlTag : Tag{i};
    ASSERT_TRUE(parties_[0].endpoint->post_receive(tag, in, {}, Token{i}).is_ok()) << i;
  }
  EXPECT_TRUE(parties_[0].endpoint->post_receive(Tag{kAll}, in, {}, Token{kAll}).is_again());
}

TEST_P(NetworkEndpoint, ACancelThatRacesWithTheMessageCompletesTheReceiveOnce) {
  HERRING_NETWORK_OPEN(2);
  constexpr std::uint64_t kCount = 200;
  const Bytes data = pattern(20'000, 3);
  std::vector<Bytes> in(kCount, Bytes(20'000));
  std::size_t arrived = 0;
  for (std::uint64_t i = 0; i < kCount; ++i) {
    ASSERT_TRUE(parties_[1].endpoint->post_receive(Tag{i}, in[i], {}, Token{i}).is_ok());
    ASSERT_TRUE(parties_[0].endpoint->post_send(PeerId{1}, Tag{i}, data, {}, Token{i}).is_ok());
    if (i % 3 == 0) parties_[1].poll();
    parties_[1].endpoint->cancel_receive(Token{i});
    ASSERT_TRUE(until([&] { return parties_[1].done.contains(i); }));
    const Completion& completion = parties_[1].done.at(i);
    if (completion.kind == CompletionKind::kReceive) {
      ++arrived;
      EXPECT_EQ(in[i], data);
    } else {
      // The message is still to come: take it, so that it is not in the way of the others.
      ASSERT_EQ(completion.kind, CompletionKind::kCancelled);
      ASSERT_TRUE(parties_[1].endpoint->post_receive(Tag{i}, in[i], {}, Token{kCount + i}).is_ok());
      ASSERT_TRUE(until([&] { return parties_[1].done.contains(kCount + i); }));
      EXPECT_EQ(in[i], data);
    }
  }
  std::cout << arrived << " of " << kCount << " messages came before their cancellation\n";
}

TEST_P(NetworkEndpoint, WhatWasSentArrivesThoughTheSenderClosedAtOnce) {
  HERRING_NETWORK_OPEN(2);
  constexpr std::uint64_t kCount = 6000;
  constexpr std::size_t kBytes = 4000;
  const Bytes data = pattern(kBytes, 5);
  Bytes in(kCount * kBytes);
  for (std::uint64_t i = 0; i < kCount; ++i) {
    ASSERT_TRUE(
        parties_[1].endpoint->post_receive(Tag{i}, std::span(in).subspan(i * kBytes, kBytes), {}, Token{i}).is_ok());
  }
  ASSERT_TRUE(parties_[0].endpoint->post_send(PeerId{1}, Tag{0}, data, {}, Token{0}).is_ok());
  ASSERT_TRUE(until([&] { return parties_[1].done.contains(0); }));
  // The receiver does not read while the sender goes on: the socket fills, and then whatever the provider keeps aside.
  std::uint64_t sent = 1;
  for (int idle = 0; sent < kCount && idle < 20;) {
    if (sent - parties_[0].done.size() < 8) {
      ASSERT_TRUE(parties_[0].endpoint->post_send(PeerId{1}, Tag{sent}, data, {}, Token{sent}).is_ok());
      ++sent;
    }
    idle = parties_[0].poll() > 0 ? 0 : idle + 1;
  }
  const std::size_t completed = parties_[0].done.size();
  EXPECT_LT(completed, sent) << "the socket never filled: nothing was tested";
  parties_[0].endpoint.reset();
  ASSERT_TRUE(until([&] { return parties_[1].done.size() >= completed; }))
      << parties_[1].done.size() << " of " << completed;
  for (std::uint64_t i = 0; i < completed; ++i) {
    ASSERT_TRUE(parties_[1].done.at(i).status.is_ok()) << i << ": " << parties_[1].done.at(i).status.to_string();
    ASSERT_EQ(std::memcmp(&in[i * kBytes], data.data(), kBytes), 0) << i;
  }
}

TEST_P(NetworkEndpoint, ClosingWithSendsThatWaitForAPeerIsSafe) {
  HERRING_NETWORK_OPEN(1);
  parties_[0].endpoint->add_peer(PeerId{9}, vacant_address(*network_));
  auto data = std::make_unique<Bytes>(pattern(100'000, 1));
  ASSERT_TRUE(parties_[0].endpoint->post_send(PeerId{9}, Tag{1}, *data, {}, Token{1}).is_ok());
  parties_[0].endpoint.reset();
  data.reset();
  SUCCEED();
}

/// A process of its own with an endpoint, killed by SIGKILL: no farewell.
class Victim {
 public:
  Victim(const NetworkFactory& factory, const NetworkOptions& options, std::span<const std::byte> parent) {
    std::array<int, 2> channel{};
    EXPECT_EQ(pipe(channel.data()), 0);
    process_ = fork();
    if (process_ == 0) {
      close(channel[0]);
      live(factory, options, parent, channel[1]);
    }
    close(channel[1]);
    address_.resize(1024);
    const auto bytes = read(channel[0], address_.data(), address_.size());
    address_.resize(bytes > 0 ? static_cast<std::size_t>(bytes) : 0);
    close(channel[0]);
  }
  ~Victim() { kill_now(); }
  const Address& address() const { return address_; }
  void kill_now() {
    if (process_ <= 0) return;
    kill(process_, SIGKILL);
    waitpid(process_, nullptr, 0);
    process_ = -1;
  }

 private:
  /// Answers tag 1 with tag 2 for ever; then is killed. Ends by itself after a while, should the parent not do it.
  [[noreturn]] static void live(const NetworkFactory& factory, const NetworkOptions& options,
                                std::span<const std::byte> parent, int channel) {
    std::string reason;
    const auto network = factory.make(options, reason);
    if (network == nullptr) _exit(1);
    const auto endpoint = network->open_endpoint();
    endpoint->add_peer(PeerId{0}, parent);
    Bytes in(8);
    const Address own = endpoint->address();
    bool alive = endpoint->post_receive(Tag{1}, in, {}, Token{1}).is_ok() &&
                 write(channel, own.data(), own.size()) == static_cast<ssize_t>(own.size());
    const auto end = steady_clock::now() + seconds(60);
    while (alive && steady_clock::now() < end) {
      std::array<Completion, 4> batch;
      const std::size_t count = endpoint->poll(batch);
      for (std::size_t i = 0; i < count; ++i) {
        if (batch[i].kind != CompletionKind::kReceive) continue;
        alive = endpoint->post_send(PeerId{0}, Tag{2}, in, {}, Token{2}).is_ok();
      }
      if (count == 0) endpoint->wait(end);
    }
    _exit(0);
  }

  pid_t process_ = -1;
  Address address_;
};

TEST_P(NetworkEndpoint, AKilledPeerFailsItsSendsAndNothingElse) {
  NetworkOptions options;
  options.connect_timeout_s = 0.5;
  HERRING_NETWORK_OPEN(2, options);
  auto& endpoint = *parties_[0].endpoint;
  Victim victim(GetParam(), options, endpoint.address());
  ASSERT_FALSE(victim.address().empty());
  endpoint.add_peer(PeerId{7}, victim.address());
  const Bytes data = pattern(std::size_t{8} << 20, 1);
  Bytes in(8);
  ASSERT_TRUE(endpoint.post_receive(Tag{2}, in, {}, Token{1}).is_ok());
  ASSERT_TRUE(endpoint.post_send(PeerId{7}, Tag{1}, std::span(data).first(8), {}, Token{2}).is_ok());
  ASSERT_TRUE(until([&] { return parties_[0].done.contains(1); })) << "the other process does not answer";

  // Far more than the sockets hold, and nobody receives it.
  for (std::uint64_t i = 0; i < 100; ++i) {
    ASSERT_TRUE(endpoint.post_send(PeerId{7}, Tag{100 + i}, data, {}, Token{100 + i}).is_ok());
  }
  parties_[0].poll();
  victim.kill_now();
  ASSERT_TRUE(until([&] { return parties_[0].done.size() >= 102; }));
  std::size_t lost = 0;
  for (std::uint64_t i = 0; i < 100; ++i) {
    const Status& status = parties_[0].done.at(100 + i).status;
    if (status.is_ok()) continue;
    ++lost;
    EXPECT_EQ(status.code(), Code::kPeerLost) << status.to_string();
    EXPECT_NE(status.message().find("peer 7"), std::string::npos) << status.to_string();
  }
  EXPECT_GT(lost, 0u);
  // Later sends fail as well, and the living are still served.
  ASSERT_TRUE(endpoint.post_send(PeerId{7}, Tag{1}, data, {}, Token{300}).is_ok());
  ASSERT_TRUE(until([&] { return parties_[0].done.contains(300); }));
  EXPECT_EQ(parties_[0].done.at(300).status.code(), Code::kPeerLost);
  Bytes other(1000);
  ASSERT_TRUE(parties_[1].endpoint->post_receive(Tag{5}, other, {}, Token{5}).is_ok());
  ASSERT_TRUE(endpoint.post_send(PeerId{1}, Tag{5}, std::span(data).first(1000), {}, Token{301}).is_ok());
  ASSERT_TRUE(until([&] { return parties_[1].done.contains(5); }));
  EXPECT_EQ(std::memcmp(other.data(), data.data(), 1000), 0);
}

}  // namespace herring::transport
