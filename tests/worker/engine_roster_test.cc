#include <gtest/gtest.h>

#include <map>
#include <vector>

#include "core/roster.h"
#include "worker/engine.h"

/// Backup workers on the worker's side: it joins, then pushes or only takes the result.
namespace herring::worker {
namespace {

using namespace std::chrono_literals;

constexpr std::uint32_t kChunk = 128;

struct Bench {
  explicit Bench(std::uint32_t workers_count, std::uint32_t rank) : workers(workers_count) {
    config.self = PeerId{rank};
    config.job_id = 7;
    config.lanes = {PeerId{workers}, PeerId{workers + 1}};
    config.lane_weights = {1.0, 1.0};
    config.chunk_bytes = kChunk;
    config.max_eager_bytes = 2 * kChunk;
    config.eager_window = 8;
    config.lane_grace = 5s;
    engine = std::make_unique<Engine>(config);
  }

  Operation operation(std::span<std::byte> memory) const {
    Operation operation;
    operation.key = {GroupId{0}, 1, 0};
    operation.descriptor.dtype = DataType::kUInt8;
    operation.descriptor.dims = 1;
    operation.descriptor.shape[0] = operation.descriptor.op_bytes = operation.descriptor.part_bytes = memory.size();
    operation.memory = memory;
    operation.contributor = operation.first_rank = config.self.value;
    operation.contributor_count = workers;
    operation.timeout = 10s;
    return operation;
  }
  Operation join(std::uint64_t bytes) const {
    Operation joining = operation({});
    joining.is_join = true;
    joining.descriptor.op_bytes = joining.descriptor.shape[0] = bytes;
    return joining;
  }
  void submit(const Operation& submitted) {
    engine->submit(now, submitted);
    collect();
  }
  void collect() {
    actions.clear();
    for (std::size_t seen = 0;; ++seen) {
      engine->take_actions(actions);
      if (seen == actions.size()) return;
      const Action& action = actions[seen];
      if (const auto* post = std::get_if<PostReceiveAction>(&action)) posted[post->tag.value] = *post;
      if (const auto* cancelled = std::get_if<CancelReceiveAction>(&action))
        engine->on_withdrawn(now, cancelled->token);
      if (const auto* send = std::get_if<SendAction>(&action)) {
        if (send->header.type == wire::MessageType::kAnnounce) announces.push_back(*send);
        unsent.push_back(send->token);
      }
      if (const auto* done = std::get_if<CompleteAction>(&action)) completed.push_back(*done);
    }
  }
  void sent_all() {
    for (const Token token : std::exchange(unsent, {})) engine->on_sent(now, token, Status::ok());
    collect();
  }
  void roster(const SendAction& announce, std::uint32_t word, std::uint64_t bits) {
    wire::Header header;
    header.type = wire::MessageType::kRoster;
    header.job_id = 7;
    header.sender = announce.to.value;
    header.op = 1;
    header.tag = announce.header.tag + word;
    header.chunk = word;
    header.offset = bits;
    const PostReceiveAction receive = posted.at(header.tag);
    posted.erase(header.tag);
    engine->on_received(now, receive.token, Status::ok(), header);
    collect();
  }

  std::uint32_t workers;
  EngineConfig config;
  std::unique_ptr<Engine> engine;
  Instant now{};
  Actions actions;
  std::map<std::uint64_t, PostReceiveAction> posted;
  std::vector<SendAction> announces;
  std::vector<Token> unsent;
  std::vector<CompleteAction> completed;
};

TEST(WorkerRoster, AJoinGoesToOneLaneWithoutDataAndBringsWhoIsIn) {
  Bench bench(70, 3);
  bench.submit(bench.join(100'000));
  ASSERT_EQ(bench.announces.size(), 1u) << "one lane decides";
  const SendAction join = bench.announces[0];
  EXPECT_EQ(join.header.flags, wire::kFlagJoin);
  EXPECT_TRUE(join.payload.empty());
  ASSERT_EQ(bench.posted.size(), 2u) << "64 contributors a message";
  bench.sent_all();
  bench.roster(join, 1, 0b111111);
  EXPECT_TRUE(bench.completed.empty());
  bench.roster(join, 0, ~std::uint64_t{0} << 1);
  ASSERT_EQ(bench.completed.size(), 1u);
  EXPECT_TRUE(bench.completed[0].status.is_ok());
  EXPECT_EQ(bench.completed[0].roster, (Roster{~std::uint64_t{0} << 1, 0b111111}));
  EXPECT_TRUE(bench.engine->is_idle());
}

TEST(WorkerRoster, ARosterOfThoseWhoAreNotThereFailsTheOperation) {
  Bench bench(3, 0);
  bench.submit(bench.join(100));
  bench.sent_all();
  bench.roster(bench.announces[0], 0, 0b1001);
  ASSERT_EQ(bench.completed.size(), 1u);
  EXPECT_EQ(bench.completed[0].status.code(), Code::kProtocol);
  EXPECT_TRUE(bench.completed[0].roster.empty());
}

TEST(WorkerRoster, WhoIsInSendsItsDataAndWhoIsNotOnlyReceives) {
  for (const std::size_t bytes : {std::size_t{200}, std::size_t{2000}}) {
    for (const bool is_in_it : {true, false}) {
      Bench bench(3, 1);
      std::vector<std::byte> memory(bytes);
      Operation part = bench.operation(memory);
      part.roster = {is_in_it ? 0b011u : 0b101u};
      bench.submit(part);
      std::size_t expected = 0;
      for (const SendAction& announce : bench.announces) {
        const auto body = wire::decode_announce(announce.body);
        ASSERT_TRUE(body);
        EXPECT_EQ(announce.header.shard, wire::kRosterShard);
        const auto words = wire::decode_list(std::span(announce.body).subspan(wire::kAnnounceBytes), 1);
        ASSERT_TRUE(words);
        EXPECT_EQ((*words)[0], part.roster[0]);
        const bool is_eager = (announce.header.flags & wire::kFlagEager) != 0;
        EXPECT_EQ(is_eager, is_in_it && body->shard_bytes > 0 && body->shard_bytes <= 2 * kChunk);
        EXPECT_EQ(announce.payload.empty(), !is_eager);
        // What lands on the data that is sent waits until that is over.
        if (!is_in_it || is_eager || body->owned_count == 0) expected += std::max(body->owned_count, 1u);
      }
      bench.sent_all();
      EXPECT_EQ(bench.posted.size(), expected) << "receives for all that comes without a grant";
    }
  }
}

TEST(WorkerRoster, AGrantToOneWhoIsNotInIsRefused) {
  Bench bench(3, 1);
  std::vector<std::byte> memory(2000);
  Operation part = bench.operation(memory);
  part.roster = {0b101};
  bench.submit(part);
  wire::Header grant;
  grant.type = wire::MessageType::kGrant;
  grant.job_id = 7;
  grant.sender = bench.announces[0].to.value;
  grant.op = 1;
  grant.offset = bench.announces[0].header.tag;
  grant.tag = 900;
  grant.count = 1;
  bench.engine->on_control(bench.now, grant, {});
  bench.collect();
  EXPECT_TRUE(bench.actions.empty());
  EXPECT_EQ(bench.engine->stats().messages_rejected, 1u);
}

}  // namespace
}  // namespace herring::worker
