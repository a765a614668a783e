#include "intra_node/engine.h"

#include <gtest/gtest.h>

#include <array>
#include <limits>
#include <numeric>
#include <set>

#include "intra_node/local_cluster.h"
#include "intra_node/local_message.h"

namespace herring::intra_node {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::LocalCluster;

constexpr std::uint32_t kInlineBytes = 64;

class EngineTest : public ::testing::Test {
 protected:
  explicit EngineTest(bool check_finite = false) : cluster_(3, 1 << 20, kInlineBytes, check_finite) {}

  LocalOperation operation(std::uint32_t rank, std::span<float> values, std::uint64_t op = 1) {
    LocalOperation operation;
    operation.key = {{0}, op, 0};
    operation.descriptor.dims = 1;
    operation.descriptor.shape[0] = values.size();
    operation.descriptor.op_bytes = operation.descriptor.part_bytes = values.size_bytes();
    operation.members.resize(cluster_.size());
    std::iota(operation.members.begin(), operation.members.end(), 0u);
    for (const std::uint32_t member : operation.members) operation.world_ranks.push_back(10 + member);
    operation.owned.resize(cluster_.size());
    operation.owned[0].push_back({0, values.size_bytes()});
    operation.memory = std::as_writable_bytes(values);
    operation.timeout = seconds(5);
    memory_of_[rank] = operation.memory;
    return operation;
  }
  const std::vector<Status>& completed(std::uint32_t rank, std::uint64_t op = 1) {
    return cluster_.rank(rank).completed[{{0}, op, 0}];
  }
  /// The one status of an operation; a rank that has none or several fails the test.
  Status status(std::uint32_t rank, std::uint64_t op = 1) {
    EXPECT_EQ(completed(rank, op).size(), 1u) << "rank " << rank;
    return completed(rank, op).empty() ? Status(Code::kInternal, "never completed") : completed(rank, op).front();
  }
  void expect_idle() {
    for (std::uint32_t r = 0; r < cluster_.size(); ++r) {
      EXPECT_TRUE(cluster_.rank(r).engine->is_idle()) << r;
      EXPECT_EQ(cluster_.rank(r).engine->stats().staging_bytes, 0u) << r;
    }
  }

  LocalCluster cluster_;
  std::map<std::uint32_t, std::span<std::byte>> memory_of_;
  std::mt19937 random_{1};
  std::vector<float> a_ = std::vector<float>(100, 1.0f);
  std::vector<float> b_ = std::vector<float>(100, 2.0f);
  std::vector<float> c_ = std::vector<float>(100, 3.0f);
};

class FiniteTest : public EngineTest {
 protected:
  FiniteTest() : EngineTest(true) {}
};

TEST(InlineLimit, FallsWithTheNumberOfMembersOfWhomEachSumsAll) {
  constexpr std::uint64_t kMost = 64 << 10;
  EXPECT_EQ(inline_limit(kMost, 2), kMost);
  EXPECT_EQ(inline_limit(kMost, 4), kMost);
  EXPECT_EQ(inline_limit(kMost, 8), 32u << 10);
  EXPECT_EQ(inline_limit(kMost, 96), 8u << 10) << "a few bytes are never worth a second round";
  EXPECT_EQ(inline_limit(100, 2), 100u);
}

/// Also of the parts that are summed by others: small ones by everybody, large ones by one rank for all.
TEST_F(FiniteTest, NamesTheRankAndTheElementOnEveryRank) {
  for (const std::size_t elements : {8u, 100u}) {
    const std::uint64_t op = elements;
    std::vector<float> a(elements, 1.0f), b(elements, 2.0f), c(elements, 3.0f);
    b[5] = std::numeric_limits<float>::quiet_NaN();
    c[7] = -std::numeric_limits<float>::infinity();
    cluster_.submit(0, operation(0, a, op));
    cluster_.submit(1, operation(1, b, op));
    cluster_.submit(2, operation(2, c, op));
    cluster_.run(random_);
    for (std::uint32_t rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(status(rank, op).code(), Code::kNotFinite) << "rank " << rank;
      const std::string text = status(rank, op).message();
      EXPECT_NE(text.find("rank 11 (first seen at element 5), rank 12 (first seen at element 7)"), std::string::npos)
          << text;
    }
    // The next one is as if nothing had been.
    std::fill(b.begin(), b.end(), 2.0f);
    std::fill(c.begin(), c.end(), 3.0f);
    std::fill(a.begin(), a.end(), 1.0f);
    cluster_.submit(0, operation(0, a, op + 1000));
    cluster_.submit(1, operation(1, b, op + 1000));
    cluster_.submit(2, operation(2, c, op + 1000));
    cluster_.run(random_);
    for (std::uint32_t rank = 0; rank < 3; ++rank) EXPECT_TRUE(status(rank, op + 1000).is_ok());
    EXPECT_EQ(a, std::vector<float>(elements, 6.0f));
  }
  expect_idle();
}

// A job that names its operations gives each use of a name a key of its own: nothing is remembered of those that are
// over, which once took gigabytes a day.
TEST_F(EngineTest, KeysOfNamesAreLikeAnyOther) {
  constexpr std::uint64_t kNamed = std::uint64_t{1} << 63;
  std::array<std::vector<float>, 3> values;
  for (std::uint64_t use = 0; use < 100; ++use) {
    for (std::uint32_t rank = 0; rank < 3; ++rank) {
      values[rank].assign(use % 2 == 0 ? 8 : 100, static_cast<float>(rank + 1));
      LocalOperation once = operation(rank, values[rank], kNamed | use);
      cluster_.submit(rank, once);
    }
    cluster_.run(random_);
    for (std::uint32_t rank = 0; rank < 3; ++rank) {
      EXPECT_TRUE(status(rank, kNamed | use).is_ok());
      EXPECT_EQ(values[rank].back(), 6.0f);
    }
  }
  // One is given up while it waits, and the others hear of it: as with any other key.
  LocalOperation left = operation(0, values[0], kNamed | 1000);
  cluster_.submit(0, left);
  cluster_.rank(0).engine->abort(cluster_.now(), left.key, Status(Code::kCancelled, "given up"));
  cluster_.take(0);
  LocalOperation late = operation(1, values[1], kNamed | 1000);
  cluster_.run(random_);
  cluster_.submit(1, late);
  cluster_.run(random_);
  EXPECT_EQ(status(0, kNamed | 1000).code(), Code::kCancelled);
  EXPECT_FALSE(status(1, kNamed | 1000).is_ok());
}

TEST_F(EngineTest, TellsEveryRankWhoSaidWhat) {
  cluster_.submit(0, operation(0, a_));
  cluster_.submit(1, operation(1, b_));
  LocalOperation other = operation(2, std::span(c_).first(50));
  other.owned[0] = {{0, 200}};
  cluster_.submit(2, other);
  cluster_.run(random_);
  for (std::uint32_t r = 0; r < 3; ++r) {
    EXPECT_EQ(status(r).code(), Code::kMismatch);
    EXPECT_EQ(status(r).message(),
              "ranks disagree about operation 1: rank 10: all_reduce(float32[100], sum); rank 11: "
              "all_reduce(float32[100], sum); rank 12: all_reduce(float32[50], sum)");
  }
  EXPECT_EQ(a_, std::vector<float>(100, 1.0f)) << "nobody's values change";
  expect_idle();
}

TEST_F(EngineTest, WaitsTwoSecondsForTheRestOfAMismatch) {
  cluster_.submit(0, operation(0, a_));
  LocalOperation other = operation(1, b_);
  other.descriptor.reduce = ReduceOp::kMax;
  cluster_.submit(1, other);
  cluster_.run(random_);
  EXPECT_TRUE(completed(0).empty());
  EXPECT_EQ(cluster_.rank(0).engine->next_deadline() - cluster_.now(), seconds(2));
  cluster_.run_out(random_);
  for (std::uint32_t r = 0; r < 2; ++r) {
    EXPECT_EQ(status(r).code(), Code::kMismatch);
    EXPECT_NE(status(r).message().find("rank 12: has not called it yet"), std::string::npos) << status(r).message();
  }
  // The late one learns the same, and who said what before it.
  cluster_.submit(2, operation(2, c_));
  cluster_.run(random_);
  EXPECT_EQ(status(2).code(), Code::kMismatch);
  EXPECT_NE(status(2).message().find("rank 11: all_reduce(float32[100], max)"), std::string::npos);
  expect_idle();
}

TEST_F(EngineTest, NamesLayoutsThatDiffer) {
  cluster_.submit(0, operation(0, a_));
  cluster_.submit(1, operation(1, b_));
  LocalOperation other = operation(2, c_);
  other.owned[0].clear();
  other.owned[1] = {{0, 400}};
  cluster_.submit(2, other);
  cluster_.run(random_);
  EXPECT_EQ(status(0).code(), Code::kMismatch);
  EXPECT_NE(status(0).message().find("HERRING_* settings"), std::string::npos) << status(0).message();
}

TEST_F(EngineTest, WarnsOnceOnOneRankOfWhoDoesNotCome) {
  const auto submit = [&](std::uint32_t rank, std::span<float> values, std::uint64_t op = 1) {
    LocalOperation patient = operation(rank, values, op);
    patient.timeout = seconds(60);
    cluster_.submit(rank, patient);
  };
  submit(1, b_);
  submit(2, c_);
  cluster_.run(random_);
  std::vector<float> more(100, 1.0f);
  cluster_.advance_time(milliseconds(1));
  submit(1, more, 2);
  cluster_.run(random_);
  const auto tick_all = [&](Duration later) {
    cluster_.advance_time(later);
    for (std::uint32_t rank = 0; rank < 3; ++rank) cluster_.tick(rank);
    cluster_.run(random_);
  };
  tick_all(milliseconds(2998));
  EXPECT_TRUE(cluster_.rank(1).warnings.empty());
  tick_all(milliseconds(2));
  tick_all(milliseconds(1000));
  ASSERT_EQ(cluster_.rank(1).warnings.size(), 1u) << "and not yet one of the operation behind it";
  EXPECT_EQ(cluster_.rank(1).warnings[0],
            "all_reduce(float32[100], sum) has waited for rank 10 for 3 s (operation 1). Look at what the missing ones "
            "are doing");
  EXPECT_TRUE(cluster_.rank(0).warnings.empty());
  EXPECT_TRUE(cluster_.rank(2).warnings.empty()) << "rank 11 has said it";
  tick_all(milliseconds(2000));
  ASSERT_EQ(cluster_.rank(1).warnings.size(), 2u);
  EXPECT_EQ(cluster_.rank(1).warnings[1],
            "all_reduce(float32[100], sum) has waited for ranks 10, 12 for 6 s (operation 2). Look at what the missing "
            "ones are doing");
  tick_all(milliseconds(9000));
  EXPECT_EQ(cluster_.rank(1).warnings.size(), 2u) << "each has been told of";
  submit(0, a_);
  cluster_.run(random_);
  for (std::uint32_t rank = 0; rank < 3; ++rank) EXPECT_TRUE(status(rank).is_ok()) << status(rank).to_string();
}

TEST_F(EngineTest, WhoLetsOthersComeWhenTheyLikeDoesNotWarnForWhoDoesNot) {
  LocalOperation listening = operation(0, a_), waiting = operation(1, b_);
  listening.timeout = kNoHaste;
  waiting.timeout = seconds(60);
  cluster_.submit(0, listening);
  cluster_.submit(1, waiting);
  cluster_.run(random_);
  cluster_.advance_time(milliseconds(3000));
  for (std::uint32_t rank = 0; rank < 3; ++rank) cluster_.tick(rank);
  cluster_.run(random_);
  EXPECT_TRUE(cluster_.rank(0).warnings.empty());
  ASSERT_EQ(cluster_.rank(1).warnings.size(), 1u);
  EXPECT_NE(cluster_.rank(1).warnings[0].find("has waited for rank 12 for 3 s"), std::string::npos);
}

TEST_F(EngineTest, WaitsALittleLongerForWhoKnowsMoreAndNamesTheTimeOutThatWasGiven) {
  LocalOperation one = operation(1, b_);
  one.grace = milliseconds(200);
  cluster_.submit(1, one);
  cluster_.run(random_);
  cluster_.advance_time(milliseconds(5100));
  cluster_.tick(1);
  EXPECT_TRUE(completed(1).empty());
  cluster_.run_out(random_);
  EXPECT_NE(status(1).message().find("timed out after 5 s: "), std::string::npos) << status(1).message();
}

TEST_F(EngineTest, NamesTheRanksThatDoNotCome) {
  cluster_.submit(1, operation(1, b_));
  cluster_.run_out(random_);
  EXPECT_EQ(status(1).code(), Code::kTimeout);
  EXPECT_EQ(status(1).message(),
            "all_reduce(float32[100], sum) timed out after 5 s: rank 11 waits for ranks 10, 12 to call it");
  // Whoever comes later is told at once.
  cluster_.submit(0, operation(0, a_));
  cluster_.run(random_);
  EXPECT_EQ(status(0).to_string(), status(1).to_string());
  expect_idle();
}

TEST_F(EngineTest, FailsWhatNeedsALostRank) {
  cluster_.submit(0, operation(0, a_));
  cluster_.submit(1, operation(1, b_));
  cluster_.run(random_);
  cluster_.rank(2).alive = false;
  cluster_.lose(0, 2);
  cluster_.lose(1, 2);
  cluster_.run(random_);
  for (std::uint32_t r = 0; r < 2; ++r) {
    EXPECT_EQ(status(r).code(), Code::kPeerLost);
    EXPECT_NE(status(r).message().find("rank 2 died"), std::string::npos);
  }
  cluster_.submit(0, operation(0, a_, 2));
  cluster_.run(random_);
  EXPECT_EQ(status(0, 2).code(), Code::kPeerLost) << "and what is called afterwards";
}

TEST_F(EngineTest, PassesANetworkErrorToTheOtherMembers) {
  for (std::uint32_t r = 0; r < 3; ++r) {
    LocalOperation op = operation(r, r == 0 ? a_ : r == 1 ? b_ : c_);
    op.network = true;
    cluster_.submit(r, op);
  }
  cluster_.run(random_);
  cluster_.finish_network(0, 0, Status(Code::kPeerLost, "server 7 is gone"));
  cluster_.run(random_);
  EXPECT_TRUE(completed(1).empty()) << "its own part of the network still has the memory";
  const OpKey key = operation(0, a_).key;
  EXPECT_FALSE(cluster_.rank(0).abandoned.contains(key)) << "its part is over";
  for (std::uint32_t r = 1; r < 3; ++r) {
    ASSERT_TRUE(cluster_.rank(r).abandoned.contains(key)) << "nobody else would end it";
    EXPECT_NE(cluster_.rank(r).abandoned.at(key).message().find("server 7 is gone"), std::string::npos);
  }
  for (std::uint32_t r = 1; r < 3; ++r) cluster_.finish_network(r, 0, Status(Code::kCancelled, "told to stop"));
  cluster_.run(random_);
  EXPECT_EQ(status(0).message(), "server 7 is gone");
  EXPECT_EQ(status(1).message(), "server 7 is gone");
  EXPECT_EQ(status(2).code(), Code::kPeerLost);
  expect_idle();
}

TEST_F(EngineTest, NamesAMemberThatDoesNotLetGo) {
  const auto memory = cluster_.allocate(0, 400);
  LocalOperation in_place = operation(0, a_);
  in_place.memory = memory;
  cluster_.submit(0, in_place);
  LocalOperation staged = operation(1, b_);
  cluster_.submit(1, staged);
  cluster_.run(random_);
  // Rank 2 hangs: it answers nobody.
  cluster_.rank(2).alive = false;
  cluster_.rank(0).engine->abort(cluster_.now(), in_place.key, Status(Code::kCancelled, "enough"));
  cluster_.take(0);
  cluster_.run(random_);
  EXPECT_TRUE(completed(0).empty());
  cluster_.run_out(random_);
  EXPECT_EQ(status(0).message(),
            "enough (rank 12 did not confirm to have stopped, and may still write to this operation's shared memory)");
  EXPECT_EQ(status(1).code(), Code::kCancelled);
  EXPECT_TRUE(cluster_.rank(1).engine->is_idle());
  EXPECT_EQ(cluster_.rank(1).engine->stats().staging_bytes, 400u) << "staging memory stays out of use";
  cluster_.rank(2).alive = true;
  cluster_.run(random_);
  EXPECT_EQ(cluster_.rank(1).engine->stats().staging_bytes, 0u) << "until the member answers";
}

TEST_F(EngineTest, WhatOthersWaitForGoesOutBeforeTheCallerHears) {
  // The root's memory is read in place, so it waits for each reader; a reader that is told first may leave first.
  const auto memory = cluster_.allocate(0, 400);
  for (std::uint32_t rank = 0; rank < 3; ++rank) {
    LocalOperation broadcast = operation(rank, rank == 0 ? a_ : rank == 1 ? b_ : c_);
    broadcast.descriptor.collective = Collective::kBroadcast;
    if (rank == 0) broadcast.memory = memory;
    cluster_.submit(rank, broadcast);
    while (cluster_.act(rank)) {
    }
  }
  EXPECT_TRUE(cluster_.deliver(2, 1));
  EXPECT_TRUE(cluster_.deliver(0, 1));
  const LocalActions& actions = cluster_.rank(1).actions;
  ASSERT_EQ(actions.size(), 3u);
  EXPECT_TRUE(std::holds_alternative<CopyAction>(actions[0]));
  ASSERT_TRUE(std::holds_alternative<SendLocal>(actions[1]));
  EXPECT_EQ(std::get<SendLocal>(actions[1]).to, 0u);
  EXPECT_TRUE(std::holds_alternative<CompleteLocal>(actions[2]));
  cluster_.run(random_);
  for (std::uint32_t rank = 0; rank < 3; ++rank) EXPECT_TRUE(status(rank).is_ok());
  expect_idle();
}

TEST_F(EngineTest, SaysWhatRanksOnOtherCoresReadNext) {
  // Rank 0 sums all: for itself, into the memory of rank 2, where rank 0 sees it, and for rank 1, which fetches it.
  cluster_.submit(1, operation(1, b_));
  const LocalActions& staging = cluster_.rank(1).actions;
  ASSERT_TRUE(std::holds_alternative<CopyAction>(staging.front()));
  EXPECT_TRUE(std::get<CopyAction>(staging.front()).for_others);
  LocalOperation in_place = operation(2, c_);
  in_place.memory = cluster_.allocate(2, c_.size() * sizeof(float));
  cluster_.submit(2, in_place);
  cluster_.submit(0, operation(0, a_));
  for (std::uint32_t rank = 0; rank < 3; ++rank) {
    while (cluster_.act(rank)) {
    }
  }
  EXPECT_TRUE(cluster_.deliver(1, 0));
  EXPECT_TRUE(cluster_.deliver(2, 0));
  ASSERT_FALSE(cluster_.rank(0).actions.empty());
  ASSERT_TRUE(std::holds_alternative<ReduceLocal>(cluster_.rank(0).actions.front()));
  const auto& sum = std::get<ReduceLocal>(cluster_.rank(0).actions.front());
  ASSERT_EQ(sum.outputs.size(), 3u);
  EXPECT_TRUE(sum.last_for_others);
  EXPECT_EQ(sum.outputs[0].data(), std::as_writable_bytes(std::span(a_)).data());
  cluster_.run(random_);
  for (std::uint32_t rank = 0; rank < 3; ++rank) EXPECT_TRUE(status(rank).is_ok());
  expect_idle();
}

TEST_F(EngineTest, SaysWhatToRaiseWhereTheArenaIsFull) {
  const auto all = cluster_.allocate(1, 1 << 20);
  ASSERT_FALSE(all.empty());
  cluster_.submit(0, operation(0, a_));
  cluster_.submit(1, operation(1, b_));
  cluster_.submit(2, operation(2, c_));
  cluster_.run(random_);
  EXPECT_EQ(status(1).code(), Code::kUnavailable);
  EXPECT_NE(status(1).message().find("HERRING_ARENA_BYTES"), std::string::npos);
  EXPECT_EQ(status(0).code(), Code::kUnavailable);
  EXPECT_EQ(status(2).code(), Code::kUnavailable);
  expect_idle();
}

TEST_F(EngineTest, RefusesBadOperations) {
  std::uint64_t op = 1;
  const auto refused = [&](auto&& spoil) {
    LocalOperation bad = operation(0, a_, ++op);
    spoil(bad);
    cluster_.submit(0, bad);
    cluster_.run(random_);
    return status(0, op).code() == Code::kInvalidArgument;
  };
  EXPECT_TRUE(refused([](LocalOperation& o) { o.members = {1, 2}; }));
  EXPECT_TRUE(refused([](LocalOperation& o) { o.members = {0, 0, 1}; }));
  EXPECT_TRUE(refused([](LocalOperation& o) { o.members = {0, 1, 9}; }));
  EXPECT_TRUE(refused([](LocalOperation& o) { o.owned[0] = {{0, 396}}; }));
  EXPECT_TRUE(refused([](LocalOperation& o) { o.owned[1] = {{0, 4}}; }));
  EXPECT_TRUE(refused([](LocalOperation& o) { o.owned[0] = {{4, UINT64_MAX}}; }));
  EXPECT_TRUE(refused([](LocalOperation& o) { o.memory = o.memory.first(396); }));
  EXPECT_TRUE(refused([](LocalOperation& o) { o.average_over = 0; }));
  EXPECT_TRUE(refused([](LocalOperation& o) {
    o.descriptor.collective = Collective::kBroadcast;
    o.root = 3;
  }));
  cluster_.submit(0, operation(0, a_, ++op));
  cluster_.run(random_);
  EXPECT_TRUE(completed(0, op).empty()) << "without a flaw it starts";
}

TEST_F(EngineTest, RefusesAKeyInUse) {
  cluster_.submit(0, operation(0, a_));
  cluster_.submit(0, operation(0, a_));
  cluster_.run(random_);
  EXPECT_EQ(status(0).code(), Code::kInvalidArgument);
}

TEST_F(EngineTest, DropsWhateverIsNotAMessage) {
  // Genuine messages, spoilt: nothing may crash, and nothing of ours be read outside the arena (the sanitizers watch).
  std::vector<std::vector<std::byte>> genuine;
  for (const MessageKind kind : {MessageKind::kReady, MessageKind::kReduced, MessageKind::kDone, MessageKind::kError,
                                 MessageKind::kReadyToAll}) {
    LocalMessage message;
    message.kind = kind;
    message.key = {{0}, 1, 0};
    message.descriptor = operation(0, a_).descriptor;
    message.location = Location::kInPlace;
    message.keys = {message.key};
    message.code = Code::kTimeout;
    message.text = "late";
    genuine.push_back(encode(message));
    ASSERT_TRUE(decode(genuine.back()).has_value());
  }
  for (std::uint32_t round = 0; round < 20000; ++round) {
    if (round % 100 == 0) {
      for (std::uint32_t r = 0; r < 2; ++r) cluster_.submit(r, operation(r, r == 0 ? a_ : b_, 1 + round / 100));
    }
    auto bytes = genuine[random_() % genuine.size()];
    const std::uint64_t op = 1 + round / 100;
    const bool to_all = bytes.size() == genuine.back().size();
    std::memcpy(bytes.data() + (to_all ? sizeof(ReadyToAll::head) : 0) + 8, &op, sizeof(op));
    for (std::uint32_t flips = random_() % 4; flips > 0; --flips) {
      bytes[random_() % bytes.size()] = static_cast<std::byte>(random_());
    }
    if (random_() % 4 == 0) bytes.resize(random_() % (bytes.size() + 50));
    cluster_.rank(0).engine->on_message(cluster_.now(), random_() % 4, bytes);
    if (cluster_.is_free(0)) cluster_.take(0);
    cluster_.run(random_);
  }
  EXPECT_GT(cluster_.rank(0).engine->stats().messages_rejected, 100u);
  cluster_.run_out(random_);
}

TEST_F(EngineTest, SaysToAllWhatNothingFollows) {
  const auto sent_to = [&](const LocalOperation& operation) {
    cluster_.submit(0, operation);
    std::set<std::uint32_t> to;
    for (const LocalAction& action : cluster_.rank(0).actions) {
      if (const auto* send = std::get_if<SendLocal>(&action)) to.insert(send->to);
    }
    return to;
  };
  LocalOperation barrier = operation(0, a_, 1);
  barrier.memory = {};
  barrier.descriptor.collective = Collective::kBarrier;
  barrier.descriptor.part_bytes = 0;
  EXPECT_EQ(sent_to(barrier), std::set<std::uint32_t>{kEverybody});
  // Its ranges follow, and are rejected where they come before it.
  EXPECT_EQ(sent_to(operation(0, a_, 2)), (std::set<std::uint32_t>{1, 2}));
}

TEST_F(EngineTest, BoundsWhatItRemembersOfOthers) {
  LocalMessage message;
  message.kind = MessageKind::kReady;
  message.descriptor.part_bytes = 0;
  message.descriptor.collective = Collective::kBarrier;
  for (std::uint32_t op = 0; op < 70000; ++op) {
    message.key.op = op;
    cluster_.rank(0).engine->on_message(cluster_.now(), 1, encode(message));
  }
  cluster_.take(0);
  EXPECT_EQ(cluster_.rank(0).engine->stats().messages_rejected, 70000u - 65536u);
  EXPECT_EQ(cluster_.rank(0).actions.size(), 70000u - 65536u) << "each is answered with an error";
}

}  // namespace
}  // namespace herring::intra_node
