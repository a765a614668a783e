#include "tcp/tcp.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <iostream>
#include <numeric>
#include <random>

#include "raw_peer.h"
#include "tcp/receiver.h"
#include "transport/limits.h"

namespace herring::tcp {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;

TEST_F(TcpTest, SaysWhereItIs) {
  open(1);
  EXPECT_EQ(parties_[0].endpoint->description(), "tcp (builtin, lo)");
  EXPECT_EQ(parties_[0].endpoint->memory(), nullptr);
}

std::string refusal(transport::Endpoint& endpoint, std::span<const std::byte> address) {
  try {
    endpoint.add_peer(PeerId{5}, address);
  } catch (const Error& error) {
    EXPECT_EQ(error.status().code(), Code::kInvalidArgument);
    return error.what();
  }
  return {};
}

TEST_F(TcpTest, AddressesOfAnotherKindAreRefusedWithAHint) {
  open(1);
  Endpoint& endpoint = *parties_[0].endpoint;
  const transport::Address address = endpoint.address();
  EXPECT_NE(refusal(endpoint, {}).find("peer 5"), std::string::npos);
  EXPECT_NE(refusal(endpoint, std::span(address).first(9)), "");
  EXPECT_NE(refusal(endpoint, Bytes(5000, std::byte{1})), "");
  transport::Address other = address;
  other[4] = std::byte{7};
  EXPECT_NE(refusal(endpoint, other), "");
  transport::Address fabric(30);
  std::memcpy(fabric.data(), "HFA\1", 4);
  EXPECT_NE(refusal(endpoint, fabric).find("HERRING_PROVIDER"), std::string::npos);
  transport::Address elsewhere = address;
  elsewhere[7] = std::byte{10};  // 127.0.0.1 becomes 10.0.0.1.
  EXPECT_NE(refusal(endpoint, elsewhere).find("HERRING_INTERFACE"), std::string::npos);
  EXPECT_EQ(refusal(endpoint, address), "");
}

TEST_F(TcpTest, MessagesOfAllSizesArriveWhole) {
  open(2);
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{4095}, std::size_t{65'536},
                                  std::size_t{1} << 20, std::size_t{100} << 20}) {
    const Bytes data = pattern(bytes, static_cast<std::uint32_t>(bytes));
    Bytes in(bytes);
    parties_[0].done.clear();
    parties_[1].done.clear();
    ASSERT_TRUE(receive(1, 3, in, 3).is_ok());
    ASSERT_TRUE(send(0, 1, 3, data, 3).is_ok());
    ASSERT_TRUE(until([&] { return parties_[1].is_done(3) && parties_[0].is_done(3); })) << bytes;
    EXPECT_EQ(parties_[1].done.at(3).bytes, bytes);
    EXPECT_TRUE(in == data) << bytes << " bytes";
  }
}

/// Receives before and after their messages, cancels in between, sizes and splits of all kinds, three parties.
TEST_F(TcpTest, SeededExchangesInAnyOrderArriveWhole) {
  for (std::uint64_t seed = 1; seed <= 8; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    open(3);
    std::mt19937_64 random(seed);
    constexpr std::uint64_t kCount = 300;
    std::vector<Bytes> out(kCount), in(kCount);
    std::vector<std::uint32_t> from(kCount), to(kCount);
    std::vector<std::pair<std::uint64_t, bool>> acts;  // Message, and whether it is sent or received.
    for (std::uint64_t i = 0; i < kCount; ++i) {
      const std::uint64_t bytes = random() % (std::uint64_t{1} << (random() % 19));
      out[i] = pattern(bytes, static_cast<std::uint32_t>(seed * 1000 + i));
      in[i].resize(bytes);
      from[i] = static_cast<std::uint32_t>(random() % 3);
      to[i] = static_cast<std::uint32_t>(random() % 3);
      acts.emplace_back(i, true);
      acts.emplace_back(i, false);
    }
    std::shuffle(acts.begin(), acts.end(), random);
    for (const auto& [i, is_send] : acts) {
      if (is_send) {
        const std::size_t split = out[i].empty() ? 0 : random() % out[i].size();
        ASSERT_TRUE(parties_[from[i]]
                        .endpoint
                        ->post_send(PeerId{to[i]}, Tag{i}, std::span(out[i]).first(split),
                                    std::span(out[i]).subspan(split), Token{kCount + i})
                        .is_ok());
      } else {
        const std::size_t split = in[i].empty() ? 0 : random() % in[i].size();
        ASSERT_TRUE(parties_[to[i]]
                        .endpoint
                        ->post_receive(Tag{i}, std::span(in[i]).first(split), std::span(in[i]).subspan(split), Token{i})
                        .is_ok());
      }
      if (random() % 4 == 0) poll_all();
    }
    ASSERT_TRUE(until([&] {
      return std::accumulate(parties_.begin(), parties_.end(), std::size_t{0},
                             [](std::size_t sum, const Party& party) { return sum + party.done.size(); }) == 2 * kCount;
    }));
    for (std::uint64_t i = 0; i < kCount; ++i) EXPECT_TRUE(in[i] == out[i]) << "message " << i;
  }
}

TEST_F(TcpTest, ManyPeersTalkToOneEndpointAtOnce) {
  constexpr std::uint32_t kPeers = 120;
  open(kPeers);
  std::vector<Bytes> in(kPeers, Bytes(20'000)), back(kPeers, Bytes(100));
  for (std::uint32_t i = 1; i < kPeers; ++i) {
    ASSERT_TRUE(receive(0, i, in[i], i).is_ok());
    ASSERT_TRUE(receive(i, 5, back[i], 5).is_ok());
  }
  std::vector<Bytes> out;
  for (std::uint32_t i = 0; i < kPeers; ++i) out.push_back(pattern(20'000, i));
  for (std::uint32_t i = 1; i < kPeers; ++i) ASSERT_TRUE(send(i, 0, i, out[i], 1000).is_ok());
  ASSERT_TRUE(until([&] { return parties_[0].done.size() == kPeers - 1; }));
  for (std::uint32_t i = 1; i < kPeers; ++i) ASSERT_TRUE(send(0, i, 5, std::span(out[i]).first(100), 1000 + i).is_ok());
  ASSERT_TRUE(until([&] {
    return std::all_of(parties_.begin() + 1, parties_.end(), [](const Party& party) { return party.is_done(5); });
  }));
  for (std::uint32_t i = 1; i < kPeers; ++i) EXPECT_EQ(in[i], out[i]) << i;
  EXPECT_EQ(parties_[0].endpoint->stats().connections, kPeers - 1) << "an answer takes the connection that is there";
}

/// Nobody posts receives: what is kept aside is bounded, and the sender is told to wait.
TEST_F(TcpTest, AReaderThatDoesNotReadKeepsABoundedPart) {
  open(2);
  constexpr std::uint64_t kCount = 3000;
  const Bytes data = pattern(30'000, 1);
  std::uint64_t sent = 0;
  bool is_refused = false;
  const auto end = steady_clock::now() + seconds(10);
  while (!is_refused && sent < kCount && steady_clock::now() < end) {
    const Status status = send(0, 1, sent, data, sent);
    is_refused = status.is_again();
    sent += status.is_ok() ? 1 : 0;
    poll_all();
  }
  EXPECT_TRUE(is_refused) << "all was taken: nothing is tested";
  const Stats& stats = parties_[1].endpoint->stats();
  EXPECT_LE(stats.stored_bytes, Receiver::kMostStored);
  EXPECT_GT(stats.stored, 0u);
  EXPECT_GT(stats.paused, 0u);
  // Backwards: the one that is read last is asked for first.
  std::vector<Bytes> in(sent, Bytes(data.size()));
  for (std::uint64_t i = sent; i-- > 0;) ASSERT_TRUE(receive(1, i, in[i], i).is_ok());
  ASSERT_TRUE(until([&] { return parties_[1].done.size() == sent && parties_[0].done.size() == sent; }));
  for (std::uint64_t i = 0; i < sent; ++i) ASSERT_EQ(in[i], data) << i;
  EXPECT_EQ(stats.stored_bytes, 0u);
}

/// An operation failed and took its receives back; its chunks come all the same, and are more than can be set aside.
TEST_F(TcpTest, WhatIsNotWantedAnyMoreHoldsUpNobody) {
  open(2);
  const Bytes data = pattern(std::size_t{3} << 20, 1);
  Bytes in(data.size());
  for (std::uint64_t i = 0; i < 6; ++i) {
    ASSERT_TRUE(receive(1, i, in, i).is_ok());
    parties_[1].endpoint->cancel_receive(Token{i});
  }
  for (std::uint64_t i = 0; i < 6; ++i) ASSERT_TRUE(send(0, 1, i, data, i).is_ok());
  expect_alive(100);
  EXPECT_LE(parties_[1].endpoint->stats().stored_bytes, Receiver::kMostStored);
}

TEST_F(TcpTest, MessagesThatArePostedTogetherTakeFewCalls) {
  open(2);
  expect_alive(1000);
  constexpr std::uint64_t kCount = 60;
  const Bytes small = pattern(80, 1);
  std::vector<Bytes> in(kCount, Bytes(80));
  for (std::uint64_t i = 0; i < kCount; ++i) ASSERT_TRUE(receive(1, i, in[i], i).is_ok());
  const Stats before = parties_[0].endpoint->stats(), there = parties_[1].endpoint->stats();
  for (std::uint64_t i = 0; i < kCount; ++i) ASSERT_TRUE(send(0, 1, i, small, i).is_ok());
  while (parties_[0].done.size() < kCount + 1) parties_[0].poll();
  while (parties_[1].done.size() < kCount + 1) parties_[1].poll();
  EXPECT_EQ(parties_[0].endpoint->stats().send_calls - before.send_calls, 1u);
  EXPECT_LE(parties_[1].endpoint->stats().receive_calls - there.receive_calls, 2u);

  // A large one lands straight in its memory: few calls, and nothing is set aside.
  const Bytes large = pattern(std::size_t{8} << 20, 2);
  Bytes landed(large.size());
  ASSERT_TRUE(receive(1, 500, landed, 500).is_ok());
  const Stats here = parties_[0].endpoint->stats(), at = parties_[1].endpoint->stats();
  ASSERT_TRUE(send(0, 1, 500, large, 500).is_ok());
  ASSERT_TRUE(until([&] { return parties_[1].is_done(500) && parties_[0].is_done(500); }));
  EXPECT_TRUE(landed == large);
  EXPECT_LE(parties_[0].endpoint->stats().send_calls - here.send_calls, 8u + 200u);
  EXPECT_LE(parties_[1].endpoint->stats().receive_calls - at.receive_calls, 600u);
  EXPECT_EQ(parties_[1].endpoint->stats().stored, at.stored);
}

TEST_F(TcpTest, AWaitThatFoundNothingIsNotAskedAgain) {
  open(2);
  expect_alive(1);
  Endpoint& endpoint = *parties_[0].endpoint;
  parties_[0].poll();
  const Stats before = endpoint.stats();
  std::array<transport::Completion, 4> batch;
  for (int i = 0; i < 10; ++i) {
    endpoint.wait(steady_clock::now() + milliseconds(2));
    EXPECT_EQ(endpoint.poll(batch), 0u);
  }
  EXPECT_EQ(endpoint.stats().event_calls - before.event_calls, 10u) << "one call for a wait and its poll";
  EXPECT_EQ(endpoint.stats().empty_events, before.empty_events);
}

/// Other libraries and forgotten files take them all; then they are back.
TEST_F(TcpTest, WithoutDescriptorsSendsFailByNameAndWithThemAllGoesOn) {
  Options options = test_options();
  options.connect_timeout_s = 0.2;
  open(3, options);
  expect_alive(1);
  // UBSan looks at a type that it has not met before through a pipe, and takes one that it cannot open for bad memory.
  EXPECT_EQ(Status(Code::kPeerLost, "as below").code(), Code::kPeerLost);
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  const rlimit few{64, limit.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  std::vector<int> taken;
  for (int one = ::open("/dev/null", O_RDONLY); one >= 0; one = ::open("/dev/null", O_RDONLY)) taken.push_back(one);
  const Bytes data = pattern(100, 1);
  ASSERT_TRUE(send(0, 2, 9, data, 9).is_ok());
  EXPECT_TRUE(until([&] { return parties_[0].is_done(9); }));
  const Status status = parties_[0].done[9].status;
  expect_alive(2);  // Who is connected does not notice.
  for (const int one : taken) close(one);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  EXPECT_EQ(status.code(), Code::kPeerLost);
  EXPECT_NE(status.message().find("ulimit -n"), std::string::npos) << status.to_string();
  Bytes in(100);
  ASSERT_TRUE(receive(2, 10, in, 10).is_ok());
  ASSERT_TRUE(send(0, 2, 10, data, 10).is_ok());
  ASSERT_TRUE(until([&] { return parties_[2].is_done(10); }));
  EXPECT_EQ(in, data);
}

/// A data loader is forked, and ends: the connections are its parent's.
TEST_F(TcpTest, AForkedChildLeavesTheConnectionsAlone) {
  open(2);
  expect_alive(1);
  const pid_t child = fork();
  if (child == 0) {
    parties_.clear();
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  expect_alive(2);
  // And one that lives on holds copies: its parent's close is still seen by the other end.
  std::array<int, 2> hold{};
  ASSERT_EQ(pipe(hold.data()), 0);
  const pid_t holder = fork();
  if (holder == 0) {
    close(hold[1]);
    char one = 0;
    _exit(read(hold[0], &one, 1) == 0 ? 0 : 1);
  }
  close(hold[0]);
  parties_[0].endpoint.reset();
  EXPECT_TRUE(until([&] { return parties_[1].endpoint->stats().connections == 0; }, 5));
  close(hold[1]);
  ASSERT_EQ(waitpid(holder, &status, 0), holder);
}

TEST_F(TcpTest, ClosesAtOnceWhateverIsUnderWay) {
  open(2);
  expect_alive(1);
  const Bytes data = pattern(std::size_t{32} << 20, 1);
  Bytes in(data.size());
  ASSERT_TRUE(receive(1, 5, in, 5).is_ok());
  ASSERT_TRUE(send(0, 1, 5, data, 5).is_ok());
  ASSERT_TRUE(send(1, 0, 6, data, 6).is_ok());
  for (int i = 0; i < 20; ++i) poll_all();
  const auto start = steady_clock::now();
  parties_[0].endpoint.reset();
  EXPECT_LT(steady_clock::now() - start, milliseconds(500));
  ASSERT_TRUE(until([&] { return parties_[1].is_done(6); }));
  EXPECT_EQ(parties_[1].done.at(6).status.code(), Code::kPeerLost);
  if (parties_[1].is_done(5) && parties_[1].done.at(5).status.is_ok()) {
    EXPECT_TRUE(in == data);
  }
}

}  // namespace
}  // namespace herring::tcp
