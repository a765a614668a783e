// Bytes of messages are the executor's to touch: the engine says what is copied where, and hears when that is done.

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <optional>
#include <set>

#include "point_to_point/engine.h"
#include "point_to_point/message.h"

namespace herring::point_to_point {
namespace {

using namespace std::chrono_literals;
using Bytes = std::vector<std::byte>;

constexpr std::uint64_t kJob = 7;
constexpr PeerId kOther{0};
constexpr PeerId kSelf{1};

EngineConfig config() {
  EngineConfig config;
  config.self = kSelf;
  config.job_id = kJob;
  config.link_of = {0, kNoLink};
  config.links = {LinkConfig{256, 4, 64, 2, 4}};
  config.grace = 1s;
  return config;
}

/// One worker, whose copies end when the test says so, and a peer that the test plays.
class Copying : public ::testing::Test {
 protected:
  /// A small message comes in as control message `number`. True where the engine keeps its body.
  bool come(std::uint64_t number, std::size_t bytes, std::uint64_t tag = 1) {
    const auto size = encode_envelope(bytes);
    Bytes& body = bodies_.emplace_back(size.begin(), size.end());
    body.resize(body.size() + bytes, std::byte{9});
    wire::Header header = header_of(wire::MessageType::kEnvelope, number, body.size());
    header.op = number + 1;
    header.tag = tag;
    header.flags = wire::kFlagEager;
    return hear(header, body);
  }
  bool hear(const wire::Header& header, std::span<const std::byte> body = {}) {
    const Token token{next_body_++};
    const bool is_kept = engine_.link(0).on_control(now_, header, body, token);
    if (is_kept) kept_.insert(token.value);
    look();
    return is_kept;
  }
  static wire::Header header_of(wire::MessageType type, std::uint64_t number, std::size_t bytes) {
    wire::Header header;
    header.type = type;
    header.job_id = kJob;
    header.sender = kOther.value;
    header.offset = number;
    header.payload_bytes = static_cast<std::uint32_t>(bytes);
    return header;
  }
  void receive(Bytes& memory, PeerId from = kOther, Duration timeout = 10s) {
    ReceiveOperation operation;
    operation.handle = 1;
    operation.sources = {from};
    operation.tag = 1;
    operation.memory = memory;
    operation.timeout = timeout;
    engine_.receive(now_, operation);
    look();
  }
  /// Takes the actions: releases at once, copies when finish_copy() is called.
  void look() {
    Actions actions;
    engine_.link(0).take_actions(actions);
    engine_.take_actions(actions);
    for (const Action& action : actions) {
      if (const auto* copy = std::get_if<CopyAction>(&action)) copies_.push_back(*copy);
      if (const auto* send = std::get_if<SendAction>(&action)) sent_.push_back(send->header.type);
      if (const auto* done = std::get_if<ReleaseAction>(&action)) {
        EXPECT_EQ(kept_.erase(done->token.value), 1u) << "a body that it does not have";
      }
    }
    engine_.take_completions(done_);
  }
  void finish_copy() {
    const CopyAction copy = copies_.front();
    copies_.pop_front();
    ASSERT_EQ(copy.from.size(), copy.to.size());
    std::copy(copy.from.begin(), copy.from.end(), copy.to.begin());
    if (kept_.empty()) {
      engine_.on_copied(*copy.token);
    } else {
      engine_.link(0).on_copied(now_, *copy.token);
    }
    look();
  }
  bool has_accepted() const { return std::ranges::count(sent_, wire::MessageType::kAccept) > 0; }

  Engine engine_{config()};
  Instant now_{100s};
  std::deque<Bytes> bodies_;
  std::uint64_t next_body_ = 1;
  std::set<std::uint64_t> kept_;
  std::deque<CopyAction> copies_;
  std::vector<wire::MessageType> sent_;
  std::vector<Completion> done_;
};

TEST_F(Copying, ASmallMessageIsReceivedWhenItIsCopied) {
  Bytes memory(16);
  receive(memory);
  EXPECT_TRUE(come(0, 16));
  ASSERT_EQ(copies_.size(), 1u);
  EXPECT_EQ(memory.front(), std::byte{0}) << "the engine touched the bytes";
  EXPECT_TRUE(done_.empty()) << "who has waited would find nothing";
  EXPECT_FALSE(has_accepted()) << "the sender may be told only then";
  EXPECT_TRUE(engine_.has_unsent()) << "the sender waits for it";
  finish_copy();
  ASSERT_EQ(done_.size(), 1u);
  EXPECT_TRUE(done_[0].status.is_ok());
  EXPECT_EQ(memory.back(), std::byte{9});
  EXPECT_TRUE(has_accepted());
  EXPECT_TRUE(kept_.empty());
}

TEST_F(Copying, WhatWaitsForItsReceiveStaysWhereItCame) {
  EXPECT_TRUE(come(0, 16));
  EXPECT_EQ(engine_.stats().held_bytes, 16u);
  Bytes memory(16);
  receive(memory);
  ASSERT_EQ(copies_.size(), 1u);
  EXPECT_EQ(copies_[0].from.data(), bodies_[0].data() + kEnvelopeBytes) << "copied once more than needed";
  finish_copy();
  EXPECT_EQ(memory.front(), std::byte{9});
  EXPECT_TRUE(kept_.empty());
  EXPECT_EQ(engine_.stats().held_bytes, 0u);
}

TEST_F(Copying, AMessageWithoutBytesEndsAtOnce) {
  Bytes memory;
  receive(memory);
  EXPECT_FALSE(come(0, 0));
  ASSERT_EQ(done_.size(), 1u);
  EXPECT_TRUE(done_[0].status.is_ok());
  EXPECT_TRUE(has_accepted());
}

TEST_F(Copying, AnotherSizeIsNotCopied) {
  EXPECT_TRUE(come(0, 16));
  Bytes memory(8);
  receive(memory);
  EXPECT_TRUE(copies_.empty());
  EXPECT_TRUE(kept_.empty()) << "the body is never given back";
  ASSERT_EQ(done_.size(), 1u);
  EXPECT_EQ(done_[0].status.code(), Code::kMismatch);
}

// The memory is in use until the copy is done, whatever becomes of the peer, the group or the time meanwhile.
TEST_F(Copying, WhatIsBeingCopiedEndsWell) {
  Bytes memory(16);
  receive(memory, kOther, 1s);
  EXPECT_TRUE(come(0, 16));
  engine_.on_peer_left(now_, kOther, "it has left");
  engine_.close_group(now_, GroupId{0}, Status(Code::kCancelled, "closed"));
  engine_.cancel_unmatched_receives(Status(Code::kShutdown, "over"));
  engine_.cancel(now_, GroupId{0}, 1, Status(Code::kCancelled, "cancelled"));
  now_ += 1h;
  engine_.on_tick(now_);
  engine_.on_peer_lost(now_, kOther, "it was stopped");
  look();
  EXPECT_TRUE(done_.empty()) << done_[0].status.to_string();
  finish_copy();
  ASSERT_EQ(done_.size(), 1u);
  EXPECT_TRUE(done_[0].status.is_ok()) << done_[0].status.to_string();
  EXPECT_TRUE(kept_.empty());
  EXPECT_TRUE(engine_.is_idle());
}

TEST_F(Copying, ASenderThatGivesUpMeanwhileIsToldThatItArrived) {
  Bytes memory(16);
  receive(memory);
  EXPECT_TRUE(come(0, 16));
  wire::Header withdraw = header_of(wire::MessageType::kWithdraw, 1, 0);
  withdraw.op = 1;
  hear(withdraw);
  EXPECT_EQ(std::ranges::count(sent_, wire::MessageType::kClose), 0);
  finish_copy();
  EXPECT_TRUE(has_accepted());
}

TEST_F(Copying, BodiesThatNobodyReceivesAreGivenBack) {
  EXPECT_TRUE(come(0, 16));
  EXPECT_TRUE(come(2, 16, 2)) << "before its turn";
  EXPECT_EQ(kept_.size(), 2u);
  wire::Header withdraw = header_of(wire::MessageType::kWithdraw, 1, 0);
  withdraw.op = 1;
  EXPECT_FALSE(hear(withdraw));
  EXPECT_EQ(kept_.size(), 1u) << "its sender has given it up";
  engine_.close_group(now_, GroupId{0}, Status(Code::kCancelled, "closed"));
  look();
  EXPECT_TRUE(kept_.empty());
  EXPECT_TRUE(come(3, 16));
  EXPECT_TRUE(come(5, 16));
  engine_.on_peer_lost(now_, kOther, "it was stopped");
  look();
  EXPECT_TRUE(kept_.empty());
  EXPECT_EQ(engine_.stats().held_bytes, 0u);
}

TEST_F(Copying, AMessageToItselfIsACopyToo) {
  const Bytes data(1000, std::byte{5});
  Bytes memory(1000);
  engine_.send(now_, {2, GroupId{0}, kSelf, 1, data, 10s});
  receive(memory, kSelf, 1s);
  ASSERT_EQ(copies_.size(), 1u);
  EXPECT_EQ(memory.front(), std::byte{0});
  now_ += 1h;
  engine_.on_tick(now_);
  engine_.close_group(now_, GroupId{0}, Status(Code::kCancelled, "closed"));
  look();
  EXPECT_TRUE(done_.empty());
  finish_copy();
  ASSERT_EQ(done_.size(), 2u);
  EXPECT_TRUE(done_[0].status.is_ok() && done_[1].status.is_ok());
  EXPECT_EQ(memory, data);
  EXPECT_TRUE(engine_.is_idle());
}

}  // namespace
}  // namespace herring::point_to_point
