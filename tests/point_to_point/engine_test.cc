// One message at a time: what each side is told, and what a worker that misbehaves cannot do.

#include "point_to_point/engine.h"

#include <gtest/gtest.h>

#include <deque>
#include <optional>

#include "point_to_point/message.h"
#include "point_to_point/message_cluster.h"

namespace herring::point_to_point::testing {
namespace {

using Bytes = std::vector<std::byte>;
constexpr Duration kLong = std::chrono::seconds(100);

Bytes pattern(std::size_t bytes, std::size_t seed = 1) {
  Bytes data(bytes);
  for (std::size_t i = 0; i < bytes; ++i) data[i] = static_cast<std::byte>(i * 31 + seed);
  return data;
}

Duration seconds(double value) { return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(value)); }

SendOperation send_of(std::uint32_t to, std::uint64_t tag, std::span<const std::byte> data, double limit = 10) {
  return {0, GroupId{7}, PeerId{to}, tag, data, seconds(limit)};
}

ReceiveOperation receive_of(std::vector<std::uint32_t> from, std::optional<std::uint64_t> tag,
                            std::span<std::byte> memory, double limit = 10) {
  ReceiveOperation operation;
  operation.group = GroupId{7};
  for (const std::uint32_t rank : from) operation.sources.push_back(PeerId{rank});
  operation.tag = tag;
  operation.memory = memory;
  operation.timeout = seconds(limit);
  return operation;
}

void expect_has(const Status& status, Code code, std::vector<std::string> texts) {
  EXPECT_EQ(status.code(), code) << status.to_string();
  for (const std::string& text : texts) {
    EXPECT_NE(status.message().find(text), std::string::npos) << "no '" << text << "' in: " << status.to_string();
  }
}

Status status_of(const Cluster& cluster, std::uint64_t handle) {
  const Completion* const completion = cluster.find(handle);
  return completion == nullptr ? Status(Code::kInternal, "it never ended") : completion->status;
}

TEST(Messages, EverySizeArrivesWhicheverSideComesFirst) {
  for (const bool send_first : {true, false}) {
    for (const std::size_t bytes : {0, 1, 63, 64, 65, 255, 256, 257, 1024, 10'000}) {
      Cluster cluster({});
      const Bytes data = pattern(bytes);
      Bytes memory(bytes, std::byte{0xEE});
      std::uint64_t send = 0;
      if (send_first) send = cluster.send(0, send_of(1, 5, data));
      if (send_first) cluster.settle();
      const std::uint64_t receive = cluster.receive(1, receive_of({0}, 5, memory));
      if (!send_first) cluster.settle();
      if (!send_first) send = cluster.send(0, send_of(1, 5, data));
      ASSERT_TRUE(cluster.run_until_idle(kLong));
      EXPECT_TRUE(status_of(cluster, send).is_ok());
      ASSERT_TRUE(status_of(cluster, receive).is_ok());
      EXPECT_EQ(memory, data);
      const Received& received = cluster.find(receive)->received;
      EXPECT_EQ(received.source, PeerId{0});
      EXPECT_EQ(received.tag, 5u);
      EXPECT_EQ(received.bytes, bytes);
    }
  }
}

TEST(Messages, AWorkerCanSendToItself) {
  Cluster cluster({});
  const Bytes data = pattern(1000);
  Bytes memory(1000), other(3);
  const std::uint64_t send = cluster.send(0, send_of(0, 1, data));
  EXPECT_EQ(cluster.find(send), nullptr) << "done before anybody received it";
  const std::uint64_t receive = cluster.receive(0, receive_of({1, 0}, std::nullopt, memory));
  EXPECT_TRUE(status_of(cluster, send).is_ok());
  EXPECT_TRUE(status_of(cluster, receive).is_ok());
  EXPECT_EQ(memory, data);
  EXPECT_EQ(cluster.find(receive)->received.source, PeerId{0});
  const std::uint64_t wrong = cluster.receive(0, receive_of({0}, 2, other));
  const std::uint64_t long_send = cluster.send(0, send_of(0, 2, data));
  expect_has(status_of(cluster, wrong), Code::kMismatch, {"rank 0", "1000 bytes", "3 bytes", "tag 2"});
  expect_has(status_of(cluster, long_send), Code::kMismatch, {"rank 0", "1000 bytes", "3 bytes", "tag 2"});
  EXPECT_TRUE(cluster.is_idle());
}

TEST(Messages, ManyUnreceivedMessagesHoldNobodyUp) {
  // The receiver takes the last one first: the others must not stand in its way, whatever the credits are.
  Cluster cluster({});
  constexpr std::uint64_t kCount = 500;
  std::vector<Bytes> data, memory(kCount);
  std::vector<std::uint64_t> sends, receives;
  for (std::uint64_t i = 0; i < kCount; ++i) data.push_back(pattern(10 + i % 300, i));
  for (std::uint64_t i = 0; i < kCount; ++i) sends.push_back(cluster.send(0, send_of(1, i, data[i])));
  for (std::uint64_t i = kCount; i-- > 0;) {
    memory[i].resize(data[i].size());
    receives.push_back(cluster.receive(1, receive_of({0}, i, memory[i])));
    cluster.settle();
    ASSERT_TRUE(status_of(cluster, receives.back()).is_ok()) << "message " << i << " was held up";
  }
  ASSERT_TRUE(cluster.run_until_idle(kLong));
  EXPECT_EQ(memory, data);
  EXPECT_LE(cluster.engine(1).stats().held_bytes_peak, cluster.memory_bound(1));
}

TEST(Messages, AnyTagLeavesReservedTagsAlone) {
  Cluster cluster({});
  const Bytes collective = pattern(8, 1), plain = pattern(8, 2);
  Bytes any(8), named(8);
  cluster.send(0, send_of(1, kReservedTagBit | 3, collective));
  cluster.send(0, send_of(1, 4, plain));
  cluster.settle();
  const std::uint64_t receive = cluster.receive(1, receive_of({0}, std::nullopt, any));
  cluster.receive(1, receive_of({0}, kReservedTagBit | 3, named));
  ASSERT_TRUE(cluster.run_until_idle(kLong));
  EXPECT_EQ(any, plain);
  EXPECT_EQ(named, collective);
  EXPECT_EQ(cluster.find(receive)->received.tag, 4u);
}

TEST(Messages, DifferentSizesAreAnErrorOnBothSidesAndTheNextMessageArrives) {
  for (const std::size_t bytes : {10, 5000}) {
    Cluster cluster({});
    const Bytes data = pattern(bytes), next = pattern(20);
    Bytes memory(bytes + 4), good(20);
    const std::uint64_t send = cluster.send(0, send_of(1, 9, data));
    const std::uint64_t receive = cluster.receive(1, receive_of({0}, 9, memory));
    const std::uint64_t after = cluster.send(0, send_of(1, 9, next));
    const std::uint64_t receive_after = cluster.receive(1, receive_of({0}, 9, good));
    ASSERT_TRUE(cluster.run_until_idle(kLong));
    const std::vector<std::string> texts = {"rank 0", "rank 1", std::to_string(bytes) + " bytes",
                                            std::to_string(bytes + 4) + " bytes", "tag 9"};
    expect_has(status_of(cluster, send), Code::kMismatch, texts);
    expect_has(status_of(cluster, receive), Code::kMismatch, texts);
    EXPECT_TRUE(status_of(cluster, after).is_ok());
    EXPECT_TRUE(status_of(cluster, receive_after).is_ok());
    EXPECT_EQ(good, next);
  }
}

TEST(Messages, DifferentTypesAreAnErrorWhereBothSidesNameOne) {
  Cluster cluster({});
  const Bytes data = pattern(40);
  Bytes memory(40), other(40);
  SendOperation send = send_of(1, 9, data);
  send.dtype = DataType::kInt32;
  ReceiveOperation receive = receive_of({0}, 9, memory);
  receive.dtype = DataType::kFloat32;
  const std::uint64_t sent = cluster.send(0, send), received = cluster.receive(1, receive);
  const std::uint64_t unnamed = cluster.send(0, send), taken = cluster.receive(1, receive_of({0}, 9, other));
  ASSERT_TRUE(cluster.run_until_idle(kLong));
  expect_has(status_of(cluster, sent), Code::kMismatch, {"rank 0 sends int32", "rank 1", "expects float32", "tag 9"});
  expect_has(status_of(cluster, received), Code::kMismatch, {"rank 0 sends int32", "rank 1", "expects float32"});
  EXPECT_TRUE(status_of(cluster, unnamed).is_ok());
  EXPECT_TRUE(status_of(cluster, taken).is_ok());
}

TEST(Messages, TimeOutsNameWhoDidNotCome) {
  Cluster cluster({.workers = 3});
  const Bytes data = pattern(40);
  Bytes one(40), two(50);
  const std::uint64_t send = cluster.send(0, send_of(1, 6, data, 2.5));
  const std::uint64_t exact = cluster.receive(1, receive_of({0}, 7, one, 1.5));
  const std::uint64_t any = cluster.receive(1, receive_of({0, 2}, 8, two, 1.5));
  ASSERT_TRUE(cluster.run_until_idle(kLong));
  expect_has(status_of(cluster, send), Code::kTimeout, {"send of 40 bytes", "tag 6", "2.5 s", "rank 1"});
  // What is there instead helps to find the wrong tag.
  expect_has(status_of(cluster, exact), Code::kTimeout,
             {"receive of 40 bytes", "tag 7", "1.5 s", "rank 1 waits for rank 0", "40 bytes with tag 6 from rank 0"});
  expect_has(status_of(cluster, any), Code::kTimeout, {"receive of 50 bytes", "tag 8", "one of ranks 0, 2"});
}

TEST(Messages, AMessageThatWasGivenUpIsNotReceivedLater) {
  Cluster cluster({});
  const Bytes stale = pattern(40, 1), fresh = pattern(40, 2);
  Bytes memory(40);
  const std::uint64_t send = cluster.send(0, send_of(1, 6, stale, 1));
  cluster.run_until(cluster.now() + std::chrono::seconds(2));
  EXPECT_EQ(status_of(cluster, send).code(), Code::kTimeout);
  cluster.send(0, send_of(1, 6, fresh));
  cluster.receive(1, receive_of({0}, 6, memory));
  ASSERT_TRUE(cluster.run_until_idle(kLong));
  EXPECT_EQ(memory, fresh);
}

TEST(Messages, ALostWorkerFailsWhatWaitsForIt) {
  Cluster cluster({.workers = 3});
  const Bytes data = pattern(5000);
  Bytes one(10), two(10), three(10);
  const std::uint64_t send = cluster.send(0, send_of(2, 1, data));
  const std::uint64_t exact = cluster.receive(0, receive_of({2}, 1, one));
  const std::uint64_t any = cluster.receive(0, receive_of({1, 2}, 1, two));
  cluster.settle();
  cluster.lose(2, "rank 2 is lost: it was killed");
  cluster.settle();
  expect_has(status_of(cluster, send), Code::kPeerLost, {"rank 2 is lost: it was killed"});
  expect_has(status_of(cluster, exact), Code::kPeerLost, {"rank 2 is lost"});
  EXPECT_EQ(cluster.find(any), nullptr) << "rank 1 may still send it";
  const Bytes small = pattern(10);
  cluster.send(1, send_of(0, 1, small));
  const std::uint64_t late = cluster.receive(0, receive_of({2}, 1, three));
  expect_has(status_of(cluster, late), Code::kPeerLost, {"rank 2 is lost"});
  ASSERT_TRUE(cluster.run_until_idle(kLong));
  EXPECT_TRUE(status_of(cluster, any).is_ok());
}

TEST(Messages, AWorkerThatLeftFailsWhatStillNeedsItAfterTheGrace) {
  Cluster cluster({});
  Bytes memory(10), other(10);
  const Bytes data = pattern(10);
  const std::uint64_t receive = cluster.receive(0, receive_of({1}, 1, memory, 1000));
  cluster.leave(1, "rank 1 has left the job");
  const std::uint64_t late = cluster.send(0, send_of(1, 1, data));
  expect_has(status_of(cluster, late), Code::kPeerLost, {"rank 1 has left the job"});
  const std::uint64_t late_receive = cluster.receive(0, receive_of({1}, 1, other));
  expect_has(status_of(cluster, late_receive), Code::kPeerLost, {"rank 1 has left the job"});
  ASSERT_TRUE(cluster.run_until_idle(kLong));
  expect_has(status_of(cluster, receive), Code::kPeerLost, {"rank 1 has left the job"});
}

TEST(Messages, AReceiveThatAWorkerThatLeftNeverMetEndsAtOnce) {
  Cluster cluster({.workers = 3});
  Bytes memory(10), other(10);
  const std::uint64_t receive = cluster.receive(0, receive_of({1}, 1, memory, 1000));
  const std::uint64_t any = cluster.receive(0, receive_of({1, 2}, 1, other, 1000));
  cluster.leave(1, "rank 1 has left the job");
  expect_has(status_of(cluster, receive), Code::kPeerLost, {"rank 1 has left the job"});
  EXPECT_EQ(cluster.find(any), nullptr) << "rank 2 may still send it";
}

TEST(Messages, LeavingAGroupEndsItsMessagesOnBothSides) {
  Cluster cluster({});
  const Bytes small = pattern(10), large = pattern(5000);
  Bytes memory(10);
  const std::uint64_t first = cluster.send(0, send_of(1, 1, small));
  const std::uint64_t second = cluster.send(0, send_of(1, 1, large));
  const std::uint64_t receive = cluster.receive(1, receive_of({0}, 2, memory));
  cluster.settle();
  cluster.close_group(1, GroupId{7}, Status(Code::kCancelled, "rank 1 destroyed the group"));
  ASSERT_TRUE(cluster.run_until_idle(kLong));
  for (const std::uint64_t handle : {first, second, receive}) {
    expect_has(status_of(cluster, handle), Code::kCancelled, {"rank 1 destroyed the group"});
  }
}

TEST(Messages, WhatWaitsForOneWhoLeftTheGroupEndsSoonAndWhatIsOnItsWayComes) {
  Cluster cluster({.workers = 3});
  const Bytes data = pattern(5000), taken = pattern(6000);
  Bytes memory(10), in(6000), other(10);
  const std::uint64_t send = cluster.send(0, send_of(1, 1, data));
  const std::uint64_t receive = cluster.receive(0, receive_of({1}, 2, memory));
  const std::uint64_t any = cluster.receive(0, receive_of({1, 2}, 3, other));
  const std::uint64_t coming = cluster.send(0, send_of(1, 4, taken));
  const std::uint64_t its = cluster.receive(1, receive_of({0}, 4, in));
  cluster.member_left(0, GroupId{7}, 1, "worker 1 has left the group");
  const Instant begun = cluster.now();
  ASSERT_FALSE(cluster.run_until_idle(std::chrono::seconds(2))) << "the receive from anybody waits on";
  EXPECT_LE(cluster.now() - begun, std::chrono::seconds(3));
  expect_has(status_of(cluster, send), Code::kPeerLost, {"worker 1 has left the group"});
  expect_has(status_of(cluster, receive), Code::kPeerLost, {"worker 1 has left the group"});
  EXPECT_TRUE(status_of(cluster, coming).is_ok()) << status_of(cluster, coming).to_string();
  EXPECT_TRUE(status_of(cluster, its).is_ok());
  EXPECT_EQ(in, taken);
  EXPECT_EQ(cluster.find(any), nullptr);
  cluster.cancel_receives(0, Status(Code::kShutdown, "over"));
}

TEST(Messages, PendingReceivesCanBeCancelled) {
  Cluster cluster({});
  Bytes memory(10), coming(5000);
  const Bytes data = pattern(5000);
  const std::uint64_t waiting = cluster.receive(1, receive_of({0}, 2, memory));
  cluster.send(0, send_of(1, 3, data));
  cluster.settle();
  const std::uint64_t matched = cluster.receive(1, receive_of({0}, 3, coming));
  cluster.cancel_receives(1, Status(Code::kShutdown, "shut down"));
  expect_has(status_of(cluster, waiting), Code::kShutdown, {"shut down"});
  ASSERT_TRUE(cluster.run_until_idle(kLong));
  EXPECT_TRUE(status_of(cluster, matched).is_ok()) << "its message was on the way";
  EXPECT_EQ(coming, data);
}

TEST(Messages, TooManyUnreceivedMessagesAreRefusedAndNamed) {
  Cluster cluster({.max_unmatched = 3});
  const Bytes data = pattern(10);
  std::vector<std::uint64_t> sends;
  for (std::uint64_t i = 0; i < 5; ++i) sends.push_back(cluster.send(0, send_of(1, i, data)));
  cluster.settle();
  for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(cluster.find(sends[i]), nullptr);
  for (std::size_t i = 3; i < 5; ++i) {
    expect_has(status_of(cluster, sends[i]), Code::kUnavailable, {"rank 1", "rank 0", "3 of them"});
  }
  EXPECT_EQ(cluster.engine(1).stats().unmatched, 3u);
}

TEST(Messages, BadArgumentsAreRefusedAtOnce) {
  Cluster cluster({});
  Bytes memory(4);
  const std::uint64_t nobody = cluster.send(0, send_of(9, 1, memory));
  expect_has(status_of(cluster, nobody), Code::kInvalidArgument, {"rank 9", "ranks 0 to 1"});
  const std::uint64_t from_nobody = cluster.receive(0, receive_of({9}, 1, memory));
  expect_has(status_of(cluster, from_nobody), Code::kInvalidArgument, {"rank 9"});
  EngineConfig config = cluster.engine_config(0);
  config.link_of[1] = kNoLink;
  Engine engine(config);
  engine.send(cluster.now(), send_of(1, 1, memory));
  std::vector<Completion> done;
  engine.take_completions(done);
  ASSERT_EQ(done.size(), 1u);
  expect_has(done[0].status, Code::kUnavailable, {"rank 1", "rank 0"});
}

TEST(Messages, NobodyWaitsForWhatGoesToAWorkerThatLeft) {
  // Its endpoint is closed: what is on its way to it, or waits for a credit, would keep a shutdown waiting.
  Cluster cluster({.workers = 3});
  Engine engine(cluster.engine_config(1));
  for (std::uint64_t tag = 0; tag < 6; ++tag) {
    engine.send(cluster.now(), send_of(0, tag, {}));  // Four credits.
  }
  EXPECT_TRUE(engine.has_unsent());
  engine.on_peer_left(cluster.now(), PeerId{0}, "rank 0 has left");
  EXPECT_FALSE(engine.has_unsent()) << "it cannot come";
  engine.send(cluster.now(), send_of(2, 9, {}));
  EXPECT_TRUE(engine.has_unsent()) << "another one waits";
  engine.on_peer_lost(cluster.now(), PeerId{2}, "rank 2 is lost");
  EXPECT_FALSE(engine.has_unsent());
  engine.on_peer_lost(cluster.now(), PeerId{0}, "rank 0 is lost, too");
  EXPECT_FALSE(engine.has_unsent());
}

// --- A worker that misbehaves --------------------------------------------------------------------------------------

class Hostile : public ::testing::Test {
 protected:
  wire::Header header(wire::MessageType type, std::uint64_t sequence, std::size_t body_bytes) const {
    wire::Header made;
    made.type = type;
    made.job_id = Cluster::kJob;
    made.sender = 0;
    made.op = 1;
    made.offset = sequence;
    made.payload_bytes = static_cast<std::uint32_t>(body_bytes);
    return made;
  }
  void deliver(const wire::Header& made, const Bytes& body = {}, std::uint32_t link = 0) {
    const Bytes& kept = bodies_.emplace_back(body);
    static_cast<void>(engine_.link(link).on_control(cluster_.now(), made, kept, Token{bodies_.size()}));
  }
  Bytes envelope(std::uint64_t claimed, std::size_t inside) const {
    const auto size = encode_envelope(claimed);
    Bytes body(size.begin(), size.end());
    body.resize(body.size() + inside, std::byte{1});
    return body;
  }
  std::uint64_t rejected() const { return engine_.stats().messages_rejected; }

  Cluster cluster_{ClusterOptions{}};
  Engine engine_{cluster_.engine_config(1)};
  std::deque<Bytes> bodies_;
};

TEST_F(Hostile, NumbersBeyondTheWindowOrTwiceAreDropped) {
  const Bytes body = envelope(4, 0);
  deliver(header(wire::MessageType::kEnvelope, 4, body.size()), body);  // Four credits: 0 to 3 may come.
  EXPECT_EQ(rejected(), 1u);
  deliver(header(wire::MessageType::kEnvelope, 2, body.size()), body);
  deliver(header(wire::MessageType::kEnvelope, 2, body.size()), body);
  EXPECT_EQ(rejected(), 2u);
  deliver(header(wire::MessageType::kEnvelope, 0, body.size()), body);
  deliver(header(wire::MessageType::kEnvelope, 0, body.size()), body);
  EXPECT_EQ(rejected(), 3u);
}

TEST_F(Hostile, EagerDataBeyondTheWindowIsRefusedAndNotKept) {
  Bytes body = envelope(64, 64);
  for (std::uint64_t i = 0; i < 3; ++i) {
    wire::Header made = header(wire::MessageType::kEnvelope, i, body.size());
    made.op = i + 1;
    made.flags = wire::kFlagEager;
    deliver(made, body);
  }
  EXPECT_EQ(rejected(), 1u);
  EXPECT_EQ(engine_.stats().held_bytes, 128u);
  body = envelope(1u << 30, 0);  // Says that it is whole, and is not.
  wire::Header made = header(wire::MessageType::kEnvelope, 3, body.size());
  made.op = 4;
  made.flags = wire::kFlagEager;
  deliver(made, body);
  EXPECT_EQ(rejected(), 2u);
}

TEST_F(Hostile, AnswersToWhatWasNeverSentAreDropped) {
  deliver(header(wire::MessageType::kAccept, 0, 0));
  wire::Header invite = header(wire::MessageType::kInvite, 1, 0);
  invite.count = 0xFFFF'FFFF;
  invite.tag = 77;
  deliver(invite);
  EXPECT_EQ(rejected(), 2u);
  wire::Header credit = header(wire::MessageType::kReturn, 0, 0);
  credit.part = 1;
  deliver(credit);  // All credits are there already.
  EXPECT_EQ(rejected(), 3u);
}

TEST_F(Hostile, StrangersAreDropped) {
  const Bytes body = envelope(4, 0);
  wire::Header made = header(wire::MessageType::kEnvelope, 0, body.size());
  made.job_id = 1;
  deliver(made, body);
  made = header(wire::MessageType::kEnvelope, 0, body.size());
  made.sender = 1000;
  deliver(made, body);
  made = header(wire::MessageType::kEnvelope, 0, body.size());
  made.sender = 1;  // The receiver itself.
  deliver(made, body);
  made = header(wire::MessageType::kPush, 0, body.size());
  deliver(made, body);
  deliver(header(wire::MessageType::kEnvelope, 0, body.size()), body, 1);
  EXPECT_EQ(rejected(), 5u);
  EXPECT_TRUE(engine_.is_idle());
}

TEST(MessageBodies, AnEnvelopeHoldsItsSize) {
  EXPECT_FALSE(decode_envelope(Bytes(7)).has_value());
  EXPECT_EQ(decode_envelope(encode_envelope(0x0123456789ABCDEF)), 0x0123456789ABCDEFu);
}

}  // namespace
}  // namespace herring::point_to_point::testing
