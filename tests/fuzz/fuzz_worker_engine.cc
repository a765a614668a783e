#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <variant>
#include <vector>

#include "mutate.h"
#include "require.h"
#include "wire/reason.h"
#include "withdrawn.h"
#include "worker/engine.h"
#include "worker_program.h"

/// Servers that send anything, and a transport that does anything it may. Whatever they do: no crash, no touch of an
/// operation's memory after its end, every operation ends once, and nothing left once all servers are gone.
namespace herring::fuzz {
namespace {

using namespace worker;

constexpr std::uint64_t kJob = 77;
constexpr std::uint32_t kWorkers = 3;  // The last one is the engine under test.
constexpr std::uint32_t kChunkBytes = 128;

struct Setup {
  explicit Setup(std::uint8_t byte)
      : lanes(1 + std::min<std::uint32_t>(byte & 3u, 2)),
        failover((byte & kSetupFailover) != 0),
        retain((byte & kSetupRetain) != 0) {}
  std::uint32_t lanes;
  bool failover;
  bool retain;
};

EngineConfig engine_config(const Setup& setup) {
  EngineConfig config;
  config.self = PeerId{kWorkers - 1};
  config.job_id = kJob;
  for (std::uint32_t lane = 0; lane < setup.lanes; ++lane) config.lanes.push_back(PeerId{kWorkers + lane});
  config.lane_weights.assign(setup.lanes, 1.0);
  config.chunk_bytes = kChunkBytes;
  config.max_eager_bytes = 64;
  config.eager_window = 2;
  config.announce_credits = 4;
  config.min_shard_bytes = 64;
  config.lane_grace = std::chrono::seconds(1);
  config.failover = setup.failover;
  if (setup.failover) config.lane_slots.assign(setup.lanes, 2);
  config.retain_part_bytes = setup.retain ? 512 : 0;
  config.retain_bytes = 2048;
  return config;
}

class Harness {
 public:
  explicit Harness(std::span<const std::uint8_t> input)
      : program_(input),
        setup_(program_.next()),
        config_(engine_config(setup_)),
        bounce_(bounce_bytes(config_)),
        engine_(with_bounce()) {}

  void run() {
    while (!program_.at_end()) {
      step(static_cast<WorkerStep>(program_.next() % static_cast<std::uint8_t>(WorkerStep::kCount)));
      carry_out();
    }
    end();
  }

 private:
  EngineConfig with_bounce() {
    EngineConfig config = config_;
    config.bounce = bounce_;
    return config;
  }

  void step(WorkerStep what) {
    switch (what) {
      case WorkerStep::kSubmit:
        return submit();
      case WorkerStep::kAbort:
        return abort();
      case WorkerStep::kControl:
        return control();
      case WorkerStep::kResult:
        return result();
      case WorkerStep::kNoise:
        return noise();
      case WorkerStep::kSent:
        return sent(program_.next(), Status::ok());
      case WorkerStep::kNotSent:
        return sent(program_.next(), Status(Code::kTransport, "no route"));
      case WorkerStep::kLost:
        return lose(PeerId{(kWorkers + program_.next()) % (kWorkers + setup_.lanes)});
      case WorkerStep::kTick:
        now_ += std::chrono::milliseconds(100 * program_.next());
        return engine_.on_tick(now_);
      case WorkerStep::kGiveBack:
        return give_back(program_.next());
      case WorkerStep::kCount:
        return;
    }
  }

  static OpKey key_of(std::uint32_t byte) { return {GroupId{byte >> 7}, byte & 7u, byte >> 5 & 1u}; }

  void submit() {
    constexpr std::uint64_t kSizes[] = {0, 4, 64, 68, 128, 132, 512, 1000};
    OpKey key = key_of(program_.next());
    const std::uint8_t kind = program_.next();
    const std::uint64_t bytes = kSizes[program_.next() & 7u];
    // With failover keys are used once.
    if (setup_.failover) key.op += 16 * ++uses_[key];
    if (memory_.contains(key)) return;
    Operation operation;
    operation.key = key;
    operation.descriptor.collective = static_cast<Collective>(1 + (kind & 3u));
    operation.descriptor.dtype = DataType::kUInt8;
    const bool is_barrier = operation.descriptor.collective == Collective::kBarrier;
    const std::uint64_t size = is_barrier ? 0 : bytes;
    operation.descriptor.dims = is_barrier ? 0 : 1;
    operation.descriptor.shape[0] = size;
    operation.descriptor.op_bytes = operation.descriptor.part_bytes = size;
    operation.descriptor.root = (kind >> 2 & 3u) % kWorkers;
    if (operation.descriptor.collective == Collective::kAllReduce) operation.descriptor.root = 0;
    operation.contributor = kWorkers - 1;
    operation.contributor_count = kWorkers;
    operation.first_rank = kWorkers - 1;
    if ((kind & 16u) != 0) operation.owner_count = 2;
    operation.owner = operation.owner_count > 1 ? kind >> 5 & 1u : 0;
    operation.timeout = std::chrono::seconds(5);
    auto& memory = memory_[key] = std::make_unique<std::vector<std::byte>>(size, std::byte{2});
    operation.memory = *memory;
    if ((kind & kKindApart) != 0) {
      operation.is_on_device = true;
      auto& results = results_[key] = std::make_unique<std::vector<std::byte>>(setup_.failover ? size : 0);
      operation.results = *results;
    }
    operations_[key] = operation;
    engine_.submit(now_, operation);
  }

  void abort() {
    if (operations_.empty()) return;
    const auto at = static_cast<std::ptrdiff_t>(program_.next() % operations_.size());
    const Operation operation = std::next(operations_.begin(), at)->second;
    engine_.abort(now_, operation, Status(Code::kCancelled, "no longer wanted"));
  }

  /// Grants, errors, credits, settlements: about something that was announced, and then mutated.
  void control() {
    const std::uint8_t which = program_.next();
    const std::uint8_t type = program_.next();
    const std::uint8_t chunk = program_.next();
    const std::uint8_t count = program_.next();
    if (announced_.empty()) return;
    const auto& [lane, announce] = announced_[which % announced_.size()];
    wire::Header header = announce;
    constexpr wire::MessageType kTypes[] = {wire::MessageType::kGrant, wire::MessageType::kError,
                                            wire::MessageType::kCredit, wire::MessageType::kSettled};
    header.type = kTypes[type & 3u];
    header.flags = 0;
    header.sender = lane.value;
    header.chunk = chunk & 15u;
    header.count = count & 15u;
    std::vector<std::byte> body;
    if (header.type == wire::MessageType::kGrant) {
      header.offset = announce.tag;
      header.tag = 100'000 + 64 * ++grants_;
      std::vector<std::uint64_t> said;
      if (setup_.failover) {
        // In its turn, or ahead of it.
        said.push_back(next_grant_[lane] + (type >> 4));
        if ((type >> 4) == 0) ++next_grant_[lane];
      }
      if ((count >> 4) != 0) said.push_back(count >> 4);  // So many chunks in one message.
      body = wire::encode_list(said);
    } else if (header.type == wire::MessageType::kError) {
      body = wire::encode_reason(Status(Code::kMismatch, "they disagree"));
    } else if (header.type == wire::MessageType::kSettled) {
      header.chunk = 0;
      std::vector<std::uint64_t> tags;
      for (std::uint32_t i = 0; i < 1 + (count & 3u); ++i) tags.push_back(announce.tag + i * (chunk & 3u));
      body = wire::encode_list(tags);
    }
    header.payload_bytes = static_cast<std::uint32_t>(body.size());
    const auto sealed = mutate(program_, header, body, 3);
    if (sealed) engine_.on_control(now_, *sealed, body);
  }

  void result() {
    if (receives_.empty()) return;
    const auto posted = std::next(receives_.begin(), static_cast<std::ptrdiff_t>(program_.next() % receives_.size()));
    const PostReceiveAction action = posted->second;
    receives_.erase(posted);
    std::fill(action.payload.begin(), action.payload.end(), std::byte{3});
    wire::Header header;
    for (const auto& [lane, announce] : announced_) {
      if (action.tag.value < announce.tag || action.tag.value - announce.tag >= 64) continue;
      header = announce;
      header.sender = lane.value;
    }
    header.type = wire::MessageType::kResult;
    header.flags = action.payload.empty() ? wire::kFlagNoPayload : std::uint16_t{0};
    header.chunk = static_cast<std::uint32_t>(action.tag.value - header.tag);
    header.offset = std::uint64_t{header.chunk} * kChunkBytes;
    header.tag = action.tag.value;
    header.payload_bytes = static_cast<std::uint32_t>(action.payload.size());
    std::vector<std::byte> none;
    const auto sealed = mutate(program_, header, none, 3);
    if (sealed) {
      engine_.on_received(now_, action.token, Status::ok(), *sealed);
    } else {
      engine_.on_received(now_, action.token, Status(Code::kProtocol, "no message"), {});
    }
  }

  void noise() {
    if (receives_.empty()) return;
    const auto posted = std::next(receives_.begin(), static_cast<std::ptrdiff_t>(program_.next() % receives_.size()));
    const Token token = posted->second.token;
    receives_.erase(posted);
    engine_.on_received(now_, token, Status(Code::kPeerLost, "the connection broke"), {});
  }

  void give_back(std::size_t which) {
    if (const auto token = withdrawn_.give_back(which, receives_)) engine_.on_withdrawn(now_, *token);
  }

  void sent(std::size_t which, const Status& status) {
    if (sends_.empty()) return;
    const auto at = sends_.begin() + static_cast<std::ptrdiff_t>(which % sends_.size());
    const SendAction action = std::move(*at);
    sends_.erase(at);
    // What goes to a lost lane is nobody's any more.
    if (!lost_.contains(action.to)) touch(action.payload);
    engine_.on_sent(now_, action.token, status);
  }

  void lose(PeerId peer) {
    if (peer == config_.self) return;
    lost_.insert(peer);
    engine_.on_peer_lost(now_, peer, "it was stopped");
  }

  /// A lost lane may still write to them, and nobody else.
  void end_results(const OpKey& key) {
    auto ended = results_.extract(key);
    if (ended.empty()) return;
    for (const auto& [token, receive] : receives_) {
      HERRING_REQUIRE(lost_.contains(receive.from) || !overlap(receive.payload, *ended.mapped()));
    }
    if (!lost_.empty()) abandoned_.push_back(std::move(ended.mapped()));
  }

  /// The host reads and writes nothing of a device, and what goes there or comes from there goes apart.
  bool is_on_device(std::span<const std::byte> memory) const {
    return std::ranges::any_of(operations_, [memory](const auto& entry) {
      const Operation& operation = entry.second;
      return operation.is_on_device && (overlap(memory, operation.memory) || overlap(memory, operation.results));
    });
  }

  void carry_out() {
    Actions actions;
    engine_.take_actions(actions);
    for (Action& action : actions) {
      if (auto* send = std::get_if<SendAction>(&action)) {
        if (!lost_.contains(send->to)) touch(send->payload);
        HERRING_REQUIRE(lost_.contains(send->to) || send->is_apart == is_on_device(send->payload));
        if (send->header.type == wire::MessageType::kAnnounce) announced_.emplace_back(send->to, send->header);
        sends_.push_back(std::move(*send));
      } else if (auto* post = std::get_if<PostReceiveAction>(&action)) {
        for (const auto& [token, other] : receives_) {
          const bool is_abandoned = setup_.failover && !lost_.empty();
          HERRING_REQUIRE(is_abandoned || !overlap(post->payload, other.payload));
        }
        HERRING_REQUIRE(post->is_apart == is_on_device(post->payload));
        receives_.emplace(post->token.value, *post);
      } else if (auto* cancel = std::get_if<CancelReceiveAction>(&action)) {
        withdrawn_.add(cancel->token, receives_);
      } else if (auto* copy = std::get_if<CopyAction>(&action)) {
        HERRING_REQUIRE(copy->from.size() == copy->to.size());
        HERRING_REQUIRE(!is_on_device(copy->from) && !is_on_device(copy->to));
        std::copy(copy->from.begin(), copy->from.end(), copy->to.begin());
      } else if (auto* complete = std::get_if<CompleteAction>(&action)) {
        // The memory goes with it: the sanitizer finds whoever touches it later.
        HERRING_REQUIRE(memory_.erase(complete->key) == 1);
        HERRING_REQUIRE(operations_.erase(complete->key) == 1);
        end_results(complete->key);
      } else {
        HERRING_REQUIRE(false);  // It asks for no reduction.
      }
    }
  }

  void end() {
    for (std::uint32_t lane = 0; lane < setup_.lanes; ++lane) {
      lose(PeerId{kWorkers + lane});
      carry_out();
    }
    for (int i = 0; i < 3; ++i) {
      while (!sends_.empty()) {
        sent(0, Status(Code::kPeerLost, "removed"));
        carry_out();
      }
      for (; !withdrawn_.empty(); carry_out()) give_back(0);
      now_ += std::chrono::hours(1);
      engine_.on_tick(now_);
      carry_out();
    }
    HERRING_REQUIRE(memory_.empty());
    HERRING_REQUIRE(engine_.is_idle());
    HERRING_REQUIRE(!engine_.has_operations());
    HERRING_REQUIRE(engine_.stats().bytes_retained == 0);
    HERRING_REQUIRE(setup_.failover || receives_.empty());
  }

  Program program_;
  const Setup setup_;
  const EngineConfig config_;
  std::vector<std::byte> bounce_;
  Instant now_{std::chrono::hours(1)};
  std::map<OpKey, std::unique_ptr<std::vector<std::byte>>> memory_;
  std::map<OpKey, std::unique_ptr<std::vector<std::byte>>> results_;  // Of operations on a device.
  std::vector<std::unique_ptr<std::vector<std::byte>>> abandoned_;
  std::map<OpKey, Operation> operations_;
  Engine engine_;
  std::map<OpKey, std::uint64_t> uses_;
  std::vector<SendAction> sends_;
  std::map<std::uint64_t, PostReceiveAction> receives_;  // By token.
  Withdrawn withdrawn_;
  std::vector<std::pair<PeerId, wire::Header>> announced_;
  std::map<PeerId, std::uint64_t> next_grant_;
  std::set<PeerId> lost_;
  std::uint64_t grants_ = 0;
};

}  // namespace
}  // namespace herring::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  herring::fuzz::Harness({bytes, size}).run();
  return 0;
}
