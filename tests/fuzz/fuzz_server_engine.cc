#include <sanitizer/allocator_interface.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <variant>
#include <vector>

#include "engine_program.h"
#include "mutate.h"
#include "require.h"
#include "server/engine.h"
#include "withdrawn.h"

/// Workers that send anything, and a transport that does anything it may. Whatever they do: no crash, no memory of the
/// lane handed out twice, bounded memory, and a lane that is idle once all workers are gone.
namespace herring::fuzz {
namespace {

constexpr std::uint32_t kChunkBytes = 128;
constexpr std::uint32_t kWindow = 4;
constexpr std::uint32_t kMaxEager = 256;
// Far above what the limits below add up to, far below what a leak reaches.
constexpr std::size_t kHeapLimit = 256 << 10;

constexpr std::uint64_t kBackupBytes = 6000;
/// Of records: reached by floods.
constexpr std::uint64_t kRecordBytes = 20'000;

server::EngineConfig engine_config(std::uint32_t workers, std::uint8_t setup) {
  server::EngineConfig config;
  config.self = PeerId{workers};
  config.job_id = 77;
  config.epoch = Epoch{1};
  config.workers = workers;
  config.max_chunk_bytes = kChunkBytes;
  config.window = kWindow;
  config.max_run = 2;
  config.run_time = Duration::max();
  config.max_ops_per_worker = 16;
  config.max_eager_bytes = kMaxEager;
  config.announce_credits = 4;
  config.eager_window = 4;
  config.max_tombstones = 16;
  config.record_bytes = kRecordBytes;
  config.failover = (setup & kSetupFailover) != 0;
  config.backup_workers = !config.failover && (setup & kSetupBackup) != 0 ? 1 : 0;
  config.backup_bytes = kBackupBytes;
  if ((setup & kSetupGrace) != 0) config.backup_grace = std::chrono::milliseconds(150);
  if ((setup & kSetupNear) != 0) {
    config.near_worker = PeerId{0};
    config.min_loan_bytes = ~0u;  // Nobody here lends.
  }
  return config;
}

struct Message {
  wire::Header header;
  std::vector<std::byte> body;
};

struct Grant {
  OpKey key;
  PeerId worker;
  std::uint32_t chunk = 0;
  std::uint64_t offset = 0;
  std::uint32_t shard = 0;
};

class Harness {
 public:
  explicit Harness(std::span<const std::uint8_t> input)
      : program_(input),
        setup_(program_.next()),
        workers_((setup_ & 3u) + 1),
        slots_(std::size_t{workers_} * kWindow * kChunkBytes),
        heap_before_(__sanitizer_get_current_allocated_bytes()),
        engine_(engine_config(workers_, setup_), slots_),
        next_sequence_(workers_, 0),
        last_announce_(workers_) {}

  void run() {
    while (!program_.at_end()) {
      finish_sums();
      step(static_cast<Step>(program_.next() % static_cast<std::uint8_t>(Step::kCount)));
      carry_out();
    }
    end();
  }

 private:
  std::uint32_t worker() { return program_.next() % workers_; }

  void step(Step what) {
    switch (what) {
      case Step::kAnnounce:
        return announce();
      case Step::kControl:
        return control();
      case Step::kPush:
        return push(program_.next(), true);
      case Step::kNoise:
        return noise();
      case Step::kSent:
        return sent(program_.next(), Status::ok());
      case Step::kNotSent:
        return sent(program_.next(), Status(Code::kTransport, "no route"));
      case Step::kLost:
        return engine_.on_peer_lost(now_, PeerId{worker()}, "it was stopped");
      case Step::kTick:
        now_ += std::chrono::milliseconds(100 * program_.next());
        return engine_.on_tick(now_);
      case Step::kCancel:
        return cancel();
      case Step::kFlood:
        return flood();
      case Step::kSettle:
        return settle();
      case Step::kReceipt:
        return receipt();
      case Step::kReady:
        return ready();
      case Step::kMoved:
        return moved();
      case Step::kGiveBack:
        return give_back(program_.next());
      case Step::kCount:
        return;
    }
  }

  wire::Header header_of(std::uint32_t sender, wire::MessageType type, std::uint8_t key) const {
    wire::Header header;
    header.type = type;
    header.job_id = 77;
    header.epoch = 1;
    header.sender = sender;
    header.op = key & 3u;
    header.group = key >> 7;
    return header;
  }

  void mutate_and_send(Message message) {
    const auto header = mutate(program_, message.header, message.body, 7);
    if (header) deliver(*header, message.body);
  }

  void deliver(const wire::Header& header, const std::vector<std::byte>& bytes) {
    const Token token{next_body_++};
    const bool is_announce = header.type == wire::MessageType::kAnnounce;
    if (is_announce && (header.flags & wire::kFlagApart) != 0) apart_.insert(header.sender);
    std::vector<std::byte>& body = bodies_[token.value];
    body = bytes;
    if (!engine_.on_control(now_, header, body, token)) bodies_.erase(token.value);
  }

  void announce() {
    const std::uint32_t sender = worker();
    const std::uint8_t key = program_.next();
    const std::uint8_t kind = program_.next();
    const std::uint8_t share = program_.next();
    wire::Announce body = announce_body(sender, kind);
    if (share != 0) {
      body.owned_first = std::min(body.owned_first + (share & 3u), body.owned_count);
      body.owned_count -= std::min(body.owned_count, body.owned_first + (share >> 2 & 3u));
    }
    Message message{header_of(sender, wire::MessageType::kAnnounce, key), {}};
    message.header.tag = next_tag_;
    next_tag_ += 64;
    message.header.offset = next_sequence_[sender]++;
    message.header.count = is_shared(sender) ? 2 : 1;
    const bool may_lack_some = has_backup() && share >> 4 != 0;
    if (may_lack_some) set_backup(message.header, body, kind);
    const auto bytes = wire::encode(body);
    message.body.assign(bytes.begin(), bytes.end());
    if (may_lack_some && message.header.shard != 0) {
      const std::uint64_t roster = share >> 4;
      const auto words = wire::encode_list(std::span(&roster, 1));
      message.body.insert(message.body.end(), words.begin(), words.end());
    }
    if ((kind & kKindEager) != 0) {
      message.header.flags |= wire::kFlagEager;
      message.body.resize(message.body.size() + body.shard_bytes, std::byte{sender == 0});
    }
    if ((setup_ & kSetupFailover) != 0) add_failover(message, body, share);
    if ((setup_ & kSetupNear) != 0 && (key & 8u) != 0) message.header.flags |= wire::kFlagOneHop;
    if ((kind & kKindApart) != 0) message.header.flags |= wire::kFlagApart;
    message.header.payload_bytes = static_cast<std::uint32_t>(message.body.size());
    announces_[message.header.tag] = {sender, body};
    last_announce_[sender] = message;
    mutate_and_send(std::move(message));
  }

  bool has_backup() const { return (setup_ & (kSetupFailover | kSetupBackup)) == kSetupBackup; }

  static void set_backup(wire::Header& header, wire::Announce& body, std::uint8_t kind) {
    const bool is_join = (kind & kKindNoShare) != 0;
    header.flags = is_join ? wire::kFlagJoin : wire::kFlagRoster;
    header.shard = is_join ? 0 : wire::kRosterShard;
    if (is_join) {
      body.descriptor.part_bytes = body.shard_bytes = 0;
      body.owned_first = body.owned_count = 0;
    } else {
      body.owned_count += std::exchange(body.owned_first, 0);
    }
  }

  static void add_failover(Message& message, const wire::Announce& body, std::uint8_t share) {
    if ((message.header.flags & wire::kFlagEager) != 0) {
      message.header.flags |= wire::kFlagReady;
    } else if ((share & 0xF0u) != 0) {
      message.header.flags = wire::kFlagHeld;
      message.header.chunk = 1;
      message.header.shard = 1u << 16;
      const std::size_t bits = std::max<std::size_t>(body.owned_count, 1);
      message.body.resize(message.body.size() + (bits + 7) / 8, static_cast<std::byte>(share >> 5));
    }
  }

  void receipt() {
    const std::uint32_t sender = worker();
    const std::uint8_t back = program_.next();
    const std::uint8_t count = program_.next() % 8;
    std::vector<std::uint64_t> tags;
    for (const auto& [tag, announced] : announces_) {
      if (announced.first == sender) tags.push_back(tag);
    }
    tags.resize(tags.size() - std::min<std::size_t>(back, tags.size()));
    if (tags.size() > count) tags.erase(tags.begin(), tags.end() - count);
    Message message{header_of(sender, wire::MessageType::kReceipt, 0), wire::encode_list(tags)};
    message.header.payload_bytes = static_cast<std::uint32_t>(message.body.size());
    mutate_and_send(std::move(message));
  }

  void ready() {
    const std::uint32_t sender = worker();
    const std::uint8_t which = program_.next();
    if (pulls_.empty()) return;
    Message message{pulls_[which % pulls_.size()], {}};
    message.header.type = wire::MessageType::kReady;
    message.header.flags = 0;
    message.header.payload_bytes = 0;
    if ((which & 0x80u) != 0) message.header.sender = sender;
    mutate_and_send(std::move(message));
  }

  void moved() {
    const std::uint32_t sender = worker();
    Message message{header_of(sender, wire::MessageType::kMoved, 0), {}};
    message.header.chunk = program_.next();
    message.header.offset = next_sequence_[sender] + program_.next() % 4;
    mutate_and_send(std::move(message));
  }

  bool is_shared(std::uint32_t sender) const { return (setup_ & kSetupShared) != 0 && workers_ > 1 && sender < 2; }

  wire::Announce announce_body(std::uint32_t sender, std::uint8_t kind) const {
    constexpr std::array<std::uint32_t, 8> kSizes = {256, 64, 4, 0, 1000, 384, 128, 2048};
    const std::uint32_t shared = (setup_ & kSetupShared) != 0 && workers_ > 1 ? 1 : 0;
    wire::Announce body;
    body.descriptor.collective = static_cast<Collective>((kind & 3u) + 1);
    const bool barrier = body.descriptor.collective == Collective::kBarrier;
    const std::uint32_t bytes = barrier ? 0 : kSizes[kind >> 4 & 7u];
    body.descriptor.op_bytes = body.descriptor.part_bytes = bytes;
    body.descriptor.dims = 1;
    body.descriptor.shape[0] = bytes / 4;
    body.contributor = sender < shared ? 0 : sender - shared;
    body.contributor_count = workers_ - shared;
    body.first_rank = sender;
    body.rank_count = 1;
    body.shard_bytes = (kind & kKindNoShare) != 0 ? 0 : bytes;
    body.chunk_bytes = kChunkBytes;
    body.owned_count = shared != 0 && sender == 0 ? 0 : (static_cast<std::uint32_t>(body.shard_bytes) + 127) / 128;
    body.timeout_ms = 5000;
    return body;
  }

  void control() {
    const std::uint32_t sender = worker();
    const std::uint8_t type = program_.next();
    Message message{header_of(sender, static_cast<wire::MessageType>(type % 21 + 1), type), {}};
    message.body.resize(program_.next());
    message.header.payload_bytes = static_cast<std::uint32_t>(message.body.size());
    mutate_and_send(std::move(message));
  }

  void cancel() {
    const std::uint32_t sender = worker();
    const std::size_t back = program_.next();
    Message message{header_of(sender, wire::MessageType::kCancel, program_.next()), std::vector<std::byte>(12)};
    if (const auto& last = last_announce_[sender]; last && back > 0) {
      message.header = last->header;
      message.header.type = wire::MessageType::kCancel;
      message.header.flags = 0;
      message.header.offset -= std::min<std::uint64_t>(back - 1, message.header.offset);
    } else {
      message.header.chunk = sender;
      message.header.offset = workers_;
    }
    message.header.count = program_.next() & 3;
    message.header.payload_bytes = static_cast<std::uint32_t>(message.body.size());
    mutate_and_send(std::move(message));
  }

  /// A worker that never stops announcing: every copy is a new announce by its number, of the same key.
  void flood() {
    const std::uint32_t sender = worker();
    const int times = program_.next() * 8;
    if (!last_announce_[sender] || flooded_ > 1) return;
    ++flooded_;
    for (int i = 0; i < times; ++i) {
      Message& message = *last_announce_[sender];
      message.header.offset = next_sequence_[sender]++;
      message.header.tag = next_tag_;
      next_tag_ += 64;
      deliver(message.header, message.body);
      carry_out();
      while (!sends_.empty()) sent(0, Status::ok());
      carry_out();
    }
  }

  /// What the transport hands over for a posted receive: the push that was granted, perhaps mutated.
  void push(std::size_t which, bool may_mutate) {
    if (receives_.empty()) return;
    const auto found = std::next(receives_.begin(), static_cast<std::ptrdiff_t>(which % receives_.size()));
    const PostReceiveAction receive = found->second;
    receives_.erase(found);
    const auto granted = grants_.find(receive.tag.value);
    HERRING_REQUIRE(granted != grants_.end());  // Posted for a push that nobody was asked for.
    wire::Header header = header_of(granted->second.worker.value, wire::MessageType::kPush, 0);
    header.op = granted->second.key.op;
    header.group = granted->second.key.group.value;
    header.part = granted->second.key.part;
    header.shard = granted->second.shard;
    header.tag = receive.tag.value;
    header.chunk = granted->second.chunk;
    header.offset = granted->second.offset;
    header.payload_bytes = static_cast<std::uint32_t>(receive.payload.size());
    if (may_mutate) {
      wire::HeaderBytes bytes = wire::encode(header);
      for (int count = program_.next() & 3; count > 0; --count) {
        const std::size_t at = program_.next() % 76;
        bytes[at] ^= static_cast<std::byte>(program_.next());
      }
      const std::uint32_t crc = wire::crc32c(std::span(bytes).first(76));
      for (std::size_t i = 0; i < 4; ++i) bytes[76 + i] = static_cast<std::byte>(crc >> (8 * i));
      const auto mutated = wire::decode(bytes);
      std::memset(receive.payload.data(), 0xA5, receive.payload.size());
      if (!mutated) {
        engine_.on_received(now_, receive.token, Status(Code::kProtocol, "no message"), {});
        return;
      }
      header = *mutated;
    } else {
      std::memset(receive.payload.data(), 0x11, receive.payload.size());
    }
    engine_.on_received(now_, receive.token, Status::ok(), header);
  }

  void noise() {
    const std::size_t which = program_.next();
    if (receives_.empty()) return;
    const auto found = std::next(receives_.begin(), static_cast<std::ptrdiff_t>(which % receives_.size()));
    const Token token = found->second.token;
    std::memset(found->second.payload.data(), 0x5A, found->second.payload.size());
    receives_.erase(found);
    engine_.on_received(now_, token, Status(Code::kTransport, "truncated"), {});
  }

  void give_back(std::size_t which) {
    if (const auto token = withdrawn_.give_back(which, receives_)) engine_.on_withdrawn(now_, *token);
  }

  void sent(std::size_t which, const Status& status) {
    if (sends_.empty()) return;
    const auto found = sends_.begin() + static_cast<std::ptrdiff_t>(which % sends_.size());
    touch(found->second);
    const Token token = found->first;
    sends_.erase(found);
    engine_.on_sent(now_, token, status);
  }

  void settle() {
    for (int round = 0; round < 1000 && (!sends_.empty() || !receives_.empty()); ++round) {
      while (!sends_.empty()) sent(0, Status::ok());
      carry_out();
      push(0, false);
      carry_out();
    }
  }

  void carry_out() {
    Actions actions;
    for (engine_.take_actions(actions); !actions.empty(); engine_.take_actions(actions)) {
      for (const Action& action : std::exchange(actions, {})) {
        std::visit([this](const auto& what) { carry_out(what); }, action);
      }
    }
    const server::EngineStats& stats = engine_.stats();
    HERRING_REQUIRE(stats.slots_in_use <= slots_.size() / kChunkBytes && stats.slots_in_use <= stats.slots_peak);
    HERRING_REQUIRE(receives_.size() <= stats.slots_in_use);
    HERRING_REQUIRE(stats.kept_bytes <= kBackupBytes);
    HERRING_REQUIRE(stats.record_bytes <= stats.record_peak && stats.record_peak <= server::record_bound(kRecordBytes));
    actions = Actions();
    const std::size_t heap = __sanitizer_get_current_allocated_bytes();
    HERRING_REQUIRE(heap < heap_before_ + kHeapLimit);
  }

  void carry_out(const SendAction& send) {
    HERRING_REQUIRE(send.to.value < workers_);
    HERRING_REQUIRE(send.header.payload_bytes == send.body.size() + send.payload.size());
    HERRING_REQUIRE(send.header.job_id == 77 && send.header.sender == workers_);
    check_apart(send.is_apart, send.to.value, send.header.tag, send.payload);
    touch(send.payload);
    for (const auto& [token, receive] : receives_) HERRING_REQUIRE(!overlap(receive.payload, send.payload));
    if (send.header.type == wire::MessageType::kGrant) remember(send);
    if ((send.header.flags & wire::kFlagPull) != 0 && pulls_.size() < 64) {
      pulls_.push_back(send.header);
      pulls_.back().sender = send.to.value;
    }
    sends_.emplace_back(send.token, send.payload);
  }

  void remember(const SendAction& send) {
    const auto announced = announces_.find(send.header.offset);
    for (std::uint32_t i = 0; i < send.header.count; ++i) {
      Grant grant{send.header.key(), send.to, send.header.chunk + i, 0, send.header.shard};
      if (announced != announces_.end()) {
        const wire::Announce& body = announced->second.second;
        grant.offset = body.shard_offset + std::uint64_t{grant.chunk} * body.chunk_bytes;
      }
      grants_[send.header.tag + i] = grant;
    }
  }

  /// In two messages goes data alone, of workers that have asked for it, by tags that have room for the second one.
  void check_apart(bool is_apart, std::uint32_t worker, std::uint64_t tag, std::span<const std::byte> payload) const {
    if (!is_apart) return;
    HERRING_REQUIRE(apart_.contains(worker) && !payload.empty() && tag < wire::kApartTag);
  }

  void carry_out(const PostReceiveAction& receive) {
    check_apart(receive.is_apart, receive.from.value, receive.tag.value, receive.payload);
    HERRING_REQUIRE(receive.tag.value >> 63 == 0 && receive.tag.value != 0);
    HERRING_REQUIRE(receive.payload.data() >= slots_.data());
    HERRING_REQUIRE(receive.payload.data() + receive.payload.size() <= slots_.data() + slots_.size());
    for (const auto& [token, other] : receives_) {
      HERRING_REQUIRE(!overlap(other.payload, receive.payload) && other.tag != receive.tag);
    }
    for (const auto& [token, payload] : sends_) HERRING_REQUIRE(!overlap(payload, receive.payload));
    HERRING_REQUIRE(receives_.emplace(receive.token.value, receive).second);
  }

  void carry_out(const CancelReceiveAction& cancelled) { withdrawn_.add(cancelled.token, receives_); }

  void carry_out(const ReduceAction& reduce) {
    HERRING_REQUIRE(!reduce.inputs.empty() && reduce.outputs.size() == 1);
    for (const auto input : reduce.inputs) {
      HERRING_REQUIRE(input.size() == reduce.outputs.front().size());
      HERRING_REQUIRE(input.size() % element_bytes(reduce.spec.dtype) == 0);
      touch(input);
    }
    sums_.push_back(reduce);
    // Half of them end later.
    if (reduce.token.value % 2 == 0) finish_sum();
  }

  /// What it reads and writes is in nobody else's use until now.
  void finish_sum() {
    const ReduceAction reduce = std::move(sums_.back());
    sums_.pop_back();
    for (const auto input : reduce.inputs) {
      for (const auto& [token, receive] : receives_) HERRING_REQUIRE(!overlap(receive.payload, input));
    }
    for (const auto& [token, payload] : sends_) HERRING_REQUIRE(!overlap(payload, reduce.outputs.front()));
    std::memset(reduce.outputs.front().data(), 0x22, reduce.outputs.front().size());
    engine_.on_reduced(now_, reduce.token, {});
  }

  void finish_sums() {
    while (!sums_.empty()) {
      finish_sum();
      carry_out();
    }
  }

  void carry_out(const CopyAction& copy) {
    HERRING_REQUIRE(has_backup() && copy.keep != nullptr && copy.from.size() == copy.to.size());
    for (const auto& [token, receive] : receives_) HERRING_REQUIRE(!overlap(receive.payload, copy.from));
    for (const auto& [token, payload] : sends_) HERRING_REQUIRE(!overlap(payload, copy.to));
    std::memcpy(copy.to.data(), copy.from.data(), copy.to.size());
  }
  void carry_out(const ReleaseAction& release) {
    const auto body = bodies_.find(release.token.value);
    HERRING_REQUIRE(body != bodies_.end());
    for (const auto& [token, payload] : sends_) HERRING_REQUIRE(!overlap(payload, body->second));
    bodies_.erase(body);
  }
  void carry_out(const CompleteAction&) { HERRING_REQUIRE(false); }  // Lanes submit nothing.

  /// All workers go; the transport finishes what it has; time passes. Nothing may be left.
  void end() {
    finish_sums();
    for (std::uint32_t rank = 0; rank < workers_; ++rank) {
      engine_.on_peer_lost(now_, PeerId{rank}, "the job is over");
      carry_out();
    }
    while (!sends_.empty()) {
      sent(0, Status(Code::kPeerLost, "gone"));
      carry_out();
    }
    for (int round = 0; round < 8; ++round) {
      for (; !withdrawn_.empty(); carry_out()) give_back(0);
      now_ += std::chrono::hours(24);
      engine_.on_tick(now_);
      carry_out();
    }
    HERRING_REQUIRE(receives_.empty() && sends_.empty() && bodies_.empty());
    HERRING_REQUIRE(engine_.is_idle());
    HERRING_REQUIRE(engine_.stats().slots_in_use == 0);
    HERRING_REQUIRE(engine_.stats().kept_bytes == 0);
    HERRING_REQUIRE(engine_.stats().record_bytes == 0);
    HERRING_REQUIRE(engine_.next_deadline() == Instant::max());
  }

  Program program_;
  std::uint8_t setup_;
  std::uint32_t workers_;
  std::vector<std::byte> slots_;
  std::size_t heap_before_;
  server::Engine engine_;
  Instant now_ = Instant(std::chrono::hours(1));
  std::vector<std::uint64_t> next_sequence_;
  std::vector<std::optional<Message>> last_announce_;
  std::uint64_t next_tag_ = 1;
  int flooded_ = 0;
  std::map<std::uint64_t, std::pair<std::uint32_t, wire::Announce>> announces_;  // By tag.
  std::set<std::uint32_t> apart_;                                                // Workers that said so.
  std::map<std::uint64_t, Grant> grants_;                                        // By tag.
  std::vector<wire::Header> pulls_;                                              // Grants to answer with Ready.
  std::map<std::uint64_t, PostReceiveAction> receives_;                          // By token.
  std::vector<std::pair<Token, std::span<const std::byte>>> sends_;
  std::vector<ReduceAction> sums_;                          // Not carried out yet.
  std::map<std::uint64_t, std::vector<std::byte>> bodies_;  // That the engine has kept, by token.
  std::uint64_t next_body_ = 0;
  Withdrawn withdrawn_;
};

}  // namespace
}  // namespace herring::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  herring::fuzz::Harness(std::span(data, size)).run();
  return 0;
}
