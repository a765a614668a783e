#include "runtime/pump.h"

#include <gtest/gtest.h>

#include <cstring>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "memory/domain.h"
#include "memory/fake_nic.h"
#include "server/engine.h"
#include "worker/engine.h"

namespace herring::runtime {
namespace {

using transport::Completion;
using transport::CompletionKind;

/// An endpoint that does what the test says and nothing else.
class ScriptedEndpoint final : public transport::Endpoint {
 public:
  struct Sent {
    PeerId to;
    Tag tag;
    std::vector<std::byte> first;
    std::span<const std::byte> second;
    Token token;
  };
  struct Posted {
    Tag tag;
    std::span<std::byte> first;
    std::span<std::byte> second;
  };

  const transport::Address& address() const override { return address_; }
  std::string description() const override { return "scripted"; }
  void add_peer(PeerId, std::span<const std::byte>) override {}
  void remove_peer(PeerId peer) override {
    for (const Sent& message : sent) {
      if (message.to == peer && !finished[message.token.value])
        finish(message.token, Status(Code::kPeerLost, "removed"));
    }
  }
  memory::Domain* memory() const override { return domain.get(); }
  /// From now on memory has to be registered; so many slabs of it can be.
  void wants_memory_registered() {
    nic->on_register = [this](auto, auto) {
      if (slabs == 0) throw Error(Code::kTransport, "fi_mr_reg: Cannot allocate memory");
      --slabs;
    };
    domain = std::make_unique<memory::Domain>();
    domain->add_nic(nic);
  }
  Status post_send(PeerId to, Tag tag, std::span<const std::byte> first, std::span<const std::byte> second,
                   Token token) override {
    ++tries;
    if (!takes_sends() || to == full) return Status::again();
    if (!send_error.is_ok()) return send_error;
    sent.push_back({to, tag, {first.begin(), first.end()}, second, token});
    finished[token.value] = false;
    return Status::ok();
  }
  bool takes_sends() const override { return !refuse && unfinished() < room; }
  Status post_receive(Tag tag, std::span<std::byte> first, std::span<std::byte> second, Token token) override {
    if (refuse) return Status::again();
    receives[token.value] = {tag, first, second};
    return Status::ok();
  }
  void cancel_receive(Token token) override { cancelled.push_back(token); }
  std::size_t poll(std::span<Completion> out) override {
    std::size_t count = 0;
    for (; count < out.size() && !completions.empty(); completions.pop_front()) out[count++] = completions.front();
    return count;
  }
  void wait(Instant, std::span<const int>) override { give_back_cancelled(); }
  bool prepare_wait(std::vector<int>&, Instant&) override { return completions.empty(); }
  void wake() override {}
  void shut_down() override { is_shut = true; }

  void finish(Token token, const Status& status = {}) {
    finished[token.value] = true;
    completions.push_back({token, CompletionKind::kSend, 0, status});
  }
  void give_back_cancelled() {
    for (const Token token : cancelled) {
      if (receives.erase(token.value) > 0) completions.push_back({token, CompletionKind::kCancelled, 0, {}});
    }
    cancelled.clear();
  }
  /// A message for any receive with this tag.
  void arrive(Tag tag, std::span<const std::byte> bytes) {
    for (auto it = receives.begin(); it != receives.end(); ++it) {
      if (it->second.tag != tag) continue;
      const std::size_t head = std::min(bytes.size(), it->second.first.size());
      std::memcpy(it->second.first.data(), bytes.data(), head);
      if (bytes.size() > head) std::memcpy(it->second.second.data(), bytes.data() + head, bytes.size() - head);
      completions.push_back({Token{it->first}, CompletionKind::kReceive, bytes.size(), {}});
      receives.erase(it);
      return;
    }
    FAIL() << "no receive for tag " << tag.value;
  }
  std::size_t unfinished() const {
    return static_cast<std::size_t>(std::ranges::count(finished, false, &std::pair<const std::uint64_t, bool>::second));
  }
  std::size_t posted_controls() const {
    std::size_t count = 0;
    for (const auto& [token, receive] : receives) count += receive.tag == kControlTag ? 1 : 0;
    return count;
  }

  transport::Address address_;
  bool refuse = false;
  Status send_error;
  PeerId full{0xFFFF};           // Sends to it are refused.
  std::size_t room = 1'000'000;  // Sends that are not finished, at most.
  std::size_t tries = 0;         // Sends that were asked for, refused or not.
  bool is_shut = false;
  std::size_t slabs = 1000;  // That can be registered, where memory has to be.
  std::shared_ptr<memory::FakeNic> nic = std::make_shared<memory::FakeNic>();
  std::unique_ptr<memory::Domain> domain;
  std::deque<Sent> sent;
  std::map<std::uint64_t, bool> finished;
  std::map<std::uint64_t, Posted> receives;
  std::vector<Token> cancelled;
  std::deque<Completion> completions;
};

/// A worker with one lane over a scripted endpoint.
struct Bench {
  Bench()
      : engine(config()), pump(engine, endpoint, {4, 1100}, no_reduction, [this](const auto& action) {
          completed.push_back(action.status);
        }) {}
  static worker::EngineConfig config() {
    worker::EngineConfig config;
    config.lanes = {PeerId{1}};
    config.lane_weights = {1.0};
    config.chunk_bytes = 64;
    config.lane_grace = std::chrono::seconds(1);
    return config;
  }
  /// Data that another worker pushes: its receive is posted with the announce.
  static worker::Operation operation(std::span<std::byte> memory) {
    worker::Operation operation;
    operation.descriptor.collective = Collective::kBroadcast;
    operation.descriptor.root = 1;
    operation.contributor_count = 2;
    operation.descriptor.dtype = DataType::kUInt8;
    operation.descriptor.op_bytes = operation.descriptor.part_bytes = memory.size();
    operation.memory = memory;
    operation.timeout = std::chrono::seconds(1);
    return operation;
  }
  void submit() {
    engine.submit(now, operation(memory));
    pump.flush(now);
  }
  std::vector<std::byte> message(wire::MessageType type, std::size_t payload_bytes, std::uint64_t tag) const {
    wire::Header header;
    header.type = type;
    header.sender = 1;
    header.tag = tag;
    header.payload_bytes = static_cast<std::uint32_t>(payload_bytes);
    const auto head = wire::encode(header);
    std::vector<std::byte> bytes(head.begin(), head.end());
    bytes.resize(bytes.size() + payload_bytes, std::byte{7});
    return bytes;
  }

  Instant now{};
  std::vector<std::byte> memory = std::vector<std::byte>(64);
  std::vector<Status> completed;
  ScriptedEndpoint endpoint;
  worker::Engine engine;
  Pump<worker::Engine> pump;
};

TEST(Pump, KeepsItsControlReceivesPosted) {
  Bench bench;
  EXPECT_EQ(bench.endpoint.posted_controls(), 4u);
  for (int i = 0; i < 10; ++i) {
    bench.endpoint.arrive(kControlTag, bench.message(wire::MessageType::kCredit, 0, 0));
    bench.pump.step(bench.now);
    EXPECT_EQ(bench.endpoint.posted_controls(), 4u);
  }
  EXPECT_EQ(bench.pump.stats().messages_received, 10u);
}

TEST(Pump, DropsAndCountsWhatIsNoMessage) {
  Bench bench;
  std::vector<std::byte> damaged = bench.message(wire::MessageType::kCredit, 0, 0);
  damaged[20] ^= std::byte{1};
  bench.endpoint.arrive(kControlTag, damaged);
  bench.endpoint.arrive(kControlTag, std::span(damaged).first(10));
  std::vector<std::byte> cut = bench.message(wire::MessageType::kError, 50, 0);
  cut.pop_back();  // One byte less than its header says.
  bench.endpoint.arrive(kControlTag, cut);
  bench.pump.step(bench.now);
  EXPECT_EQ(bench.pump.stats().malformed, 3u);
  EXPECT_EQ(bench.pump.stats().messages_received, 0u);
  EXPECT_EQ(bench.engine.stats().messages_rejected, 0u) << "the engine never saw them";
  EXPECT_EQ(bench.endpoint.posted_controls(), 4u);
}

TEST(Pump, WaitsInOrderWhileTheTransportIsFull) {
  Bench bench;
  bench.endpoint.refuse = true;
  bench.submit();
  EXPECT_TRUE(bench.pump.has_backlog());
  EXPECT_TRUE(bench.endpoint.sent.empty());
  bench.endpoint.refuse = false;
  bench.pump.step(bench.now);
  EXPECT_FALSE(bench.pump.has_backlog());
  ASSERT_EQ(bench.endpoint.sent.size(), 1u);
  EXPECT_EQ(bench.endpoint.receives.size(), 5u) << "four for control, one for the result";
}

/// An all-reduce with another worker.
worker::Operation sum_of_two(std::uint64_t number, std::span<std::byte> memory) {
  worker::Operation operation;
  operation.key.op = number;
  operation.contributor_count = 2;
  operation.descriptor.dtype = DataType::kUInt8;
  operation.descriptor.op_bytes = operation.descriptor.part_bytes = memory.size();
  operation.memory = memory;
  operation.timeout = std::chrono::seconds(1);
  return operation;
}

/// One peer that takes nothing is nobody else's matter; what goes to it stays in order.
TEST(Pump, APeerThatTakesNothingHoldsUpNobodyElse) {
  ScriptedEndpoint endpoint;
  worker::EngineConfig config = Bench::config();
  config.lanes = {PeerId{1}, PeerId{2}};
  config.lane_weights = {1.0, 1.0};
  worker::Engine engine(config);
  Pump<worker::Engine> pump(engine, endpoint, {4, 1100}, no_reduction, [](const auto&) {});
  endpoint.full = PeerId{1};
  std::vector<std::vector<std::byte>> memory(6, std::vector<std::byte>(256));
  for (std::uint64_t op = 0; op < memory.size(); ++op) {
    engine.submit({}, sum_of_two(op + 1, memory[op]));
    pump.flush({});
  }
  EXPECT_EQ(endpoint.sent.size(), 6u) << "an announce to the other server for each operation";
  for (const auto& message : endpoint.sent) EXPECT_EQ(message.to, PeerId{2});
  EXPECT_TRUE(pump.has_backlog());
  endpoint.full = PeerId{0xFFFF};
  pump.flush({});
  EXPECT_FALSE(pump.has_backlog());
  ASSERT_EQ(endpoint.sent.size(), 12u);
  std::uint64_t last = 0;
  for (std::size_t i = 6; i < 12; ++i) {
    EXPECT_EQ(endpoint.sent[i].to, PeerId{1});
    const auto header = wire::decode(endpoint.sent[i].first);
    EXPECT_EQ(header->op, ++last) << "in the order in which they were asked for";
  }
}

/// A lane of a job of thousands has thousands of peers that wait for room. A message must not cost a try of each.
TEST(Pump, AFullEndpointIsNotTriedForEachPeer) {
  constexpr std::uint32_t kPeers = 60;
  constexpr std::size_t kRoom = 5;
  ScriptedEndpoint endpoint;
  worker::EngineConfig config = Bench::config();
  config.lanes.clear();
  for (std::uint32_t peer = 1; peer <= kPeers; ++peer) config.lanes.push_back(PeerId{peer});
  config.lane_weights.assign(kPeers, 1.0);
  worker::Engine engine(config);
  Pump<worker::Engine> pump(engine, endpoint, {4, 1100}, no_reduction, [](const auto&) {});
  endpoint.room = kRoom;
  std::vector<std::vector<std::byte>> memory(3, std::vector<std::byte>(kPeers * 64));
  for (std::uint64_t op = 0; op < memory.size(); ++op) {
    engine.submit({}, sum_of_two(op + 1, memory[op]));
  }
  pump.flush({});
  for (std::size_t next = 0; next < endpoint.sent.size();) {
    const std::size_t last = endpoint.sent.size();
    for (; next < last; ++next) endpoint.finish(endpoint.sent[next].token);
    const std::size_t before = endpoint.tries;
    pump.step({});
    EXPECT_LE(endpoint.tries - before, kRoom + 2) << "after " << last << " messages";
  }
  EXPECT_EQ(endpoint.sent.size(), memory.size() * kPeers);
  EXPECT_FALSE(pump.has_backlog());
}

/// A host that lets no more memory be pinned: what there is for sends goes round.
TEST(Pump, SendsWaitForABufferWhereNoMoreMemoryCanBeRegistered) {
  ScriptedEndpoint endpoint;
  endpoint.wants_memory_registered();
  endpoint.slabs = 5;  // Two for sends, one for control, and two for headers of receives.
  worker::EngineConfig config = Bench::config();
  config.chunk_bytes = 4096;
  worker::Engine engine(config);
  std::size_t failed = 0;
  Pump<worker::Engine> pump(engine, endpoint, {4, 1100}, no_reduction, [&failed](const auto&) { ++failed; });
  constexpr std::size_t kOperations = 100;
  std::vector<std::vector<std::byte>> memory(kOperations, std::vector<std::byte>(2000));
  for (std::uint64_t op = 0; op < kOperations; ++op) {
    worker::Operation operation = Bench::operation(memory[op]);
    operation.key.op = op + 1;
    engine.submit({}, operation);
  }
  pump.flush({});
  EXPECT_LT(endpoint.sent.size(), kOperations);
  for (std::size_t i = 0; i < endpoint.sent.size(); ++i) {
    endpoint.finish(endpoint.sent[i].token);
    pump.step({});
  }
  EXPECT_EQ(endpoint.sent.size(), kOperations);
  EXPECT_EQ(endpoint.receives.size(), 4 + kOperations);
  EXPECT_FALSE(pump.has_backlog());
  EXPECT_EQ(failed, 0u);
}

TEST(Pump, AMessageThatIsNoneOfOursLeavesTheReceiveInPlace) {
  Bench bench;
  bench.submit();
  const auto header = wire::decode(bench.endpoint.sent[0].first);
  const Tag tag{header->tag};
  bench.endpoint.arrive(tag, std::vector<std::byte>(100, std::byte{9}));
  bench.pump.step(bench.now);
  EXPECT_EQ(bench.pump.stats().malformed, 1u);
  EXPECT_TRUE(bench.completed.empty());
  bench.endpoint.arrive(tag, bench.message(wire::MessageType::kResult, 64, tag.value));
  bench.pump.step(bench.now);
  ASSERT_EQ(bench.completed.size(), 1u);
  EXPECT_TRUE(bench.completed[0].is_ok());
  EXPECT_EQ(bench.memory, std::vector<std::byte>(64, std::byte{7}));
  EXPECT_EQ(bench.pump.traffic(PeerId{1}).bytes_received, 64u);
}

TEST(Pump, TellsOfTheEndOnlyWhenTheTransportHasGivenTheMemoryBack) {
  Bench bench;
  bench.submit();
  bench.engine.on_peer_lost(bench.now, PeerId{1}, "gone");
  bench.pump.flush(bench.now);
  ASSERT_EQ(bench.endpoint.cancelled.size(), 1u);
  bench.pump.step(bench.now);
  EXPECT_TRUE(bench.completed.empty()) << "a message may still be landing in the caller's memory";
  bench.endpoint.give_back_cancelled();
  bench.pump.step(bench.now);
  ASSERT_EQ(bench.completed.size(), 1u);
  EXPECT_EQ(bench.completed[0].code(), Code::kPeerLost);
}

/// The sender of what is landing may be stopped for good: that is nobody else's matter.
TEST(Pump, AWithdrawnReceiveHoldsUpNothing) {
  Bench bench;
  bench.submit();
  bench.engine.on_tick(bench.now += std::chrono::seconds(2));
  bench.pump.flush(bench.now);
  bench.engine.on_tick(bench.now += std::chrono::seconds(2));
  bench.pump.flush(bench.now);
  ASSERT_EQ(bench.endpoint.cancelled.size(), 1u);
  const std::size_t before = bench.endpoint.sent.size();
  std::vector<std::byte> other(64);
  worker::Operation operation = bench.operation(other);
  operation.key.op = 1;
  bench.engine.submit(bench.now, operation);
  bench.pump.flush(bench.now);
  EXPECT_EQ(bench.endpoint.sent.size(), before + 1) << "the announce of the next operation waits";
  EXPECT_FALSE(bench.pump.has_backlog());
  EXPECT_TRUE(bench.completed.empty());
  bench.endpoint.give_back_cancelled();
  bench.pump.step(bench.now);
  ASSERT_EQ(bench.completed.size(), 1u);
  EXPECT_EQ(bench.completed[0].code(), Code::kTimeout);
}

/// With the time of the last completion the operation's grace would be over before it began, and its receives would be
/// taken back while a lane still fills them.
TEST(Pump, AFailureAfterAnIdleHourHasTheTimeOfNow) {
  Bench bench;
  bench.now += std::chrono::hours(1);
  bench.endpoint.send_error = Status(Code::kTransport, "no route");
  bench.submit();
  EXPECT_GE(bench.engine.next_deadline(), bench.now + std::chrono::seconds(1));
}

TEST(Pump, LetsGoOfPeersWhoseSendsNeverFinish) {
  Bench bench;
  bench.submit();  // Its announce is never finished by the endpoint; the leak checker watches the buffers.
  ASSERT_EQ(bench.endpoint.finished.size(), 1u);
}

}  // namespace
}  // namespace herring::runtime
