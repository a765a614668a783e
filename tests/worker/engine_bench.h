#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "wire/reason.h"
#include "worker/engine.h"

namespace herring::worker::testing {

using namespace std::chrono_literals;

inline constexpr std::uint64_t kJob = 7;
inline constexpr std::uint32_t kChunk = 128;
inline constexpr std::uint32_t kWorkers = 4;

/// One worker and the messages of its lanes, by hand.
struct Bench {
  explicit Bench(std::uint32_t lanes, std::uint32_t rank = 0) {
    config.self = PeerId{rank};
    config.job_id = kJob;
    for (std::uint32_t i = 0; i < lanes; ++i) config.lanes.push_back(PeerId{kWorkers + i});
    config.lane_weights.assign(lanes, 1.0);
    config.chunk_bytes = kChunk;
    config.announce_credits = 8;
    config.eager_window = 2;
    config.lane_grace = 5s;
    build();
  }
  void build() { engine = std::make_unique<Engine>(config); }

  Operation operation(std::uint64_t op, std::span<std::byte> memory) const {
    Operation operation;
    operation.key = {GroupId{0}, op, 0};
    operation.descriptor.dims = 1;
    operation.descriptor.dtype = DataType::kUInt8;
    operation.descriptor.shape[0] = operation.descriptor.op_bytes = operation.descriptor.part_bytes = memory.size();
    operation.memory = memory;
    operation.contributor = config.self.value;
    operation.contributor_count = kWorkers;
    operation.first_rank = config.self.value;
    operation.timeout = 10s;
    return operation;
  }
  void submit(const Operation& operation) {
    engine->submit(now, operation);
    collect();
  }
  void collect() {
    actions.clear();
    for (std::size_t seen = 0;; ++seen) {
      engine->take_actions(actions);
      if (seen == actions.size()) return;
      if (const auto* post = std::get_if<PostReceiveAction>(&actions[seen])) posted[post->tag.value] = *post;
      if (const auto* done = std::get_if<CompleteAction>(&actions[seen])) completed.push_back(*done);
      if (const auto* copy = std::get_if<CopyAction>(&actions[seen]); copy != nullptr && copies) {
        std::memcpy(copy->to.data(), copy->from.data(), copy->from.size());
      }
      const auto* cancelled = std::get_if<CancelReceiveAction>(&actions[seen]);
      if (cancelled != nullptr && gives_back) engine->on_withdrawn(now, cancelled->token);
    }
  }
  std::vector<SendAction> sends(wire::MessageType type) const {
    std::vector<SendAction> found;
    for (const Action& action : actions) {
      const auto* send = std::get_if<SendAction>(&action);
      if (send != nullptr && send->header.type == type) found.push_back(*send);
    }
    return found;
  }
  template <class Kind>
  std::size_t count() const {
    return static_cast<std::size_t>(std::count_if(
        actions.begin(), actions.end(), [](const Action& action) { return std::holds_alternative<Kind>(action); }));
  }
  wire::Header from(PeerId lane, const wire::Header& announce, wire::MessageType type) const {
    wire::Header header;
    header.type = type;
    header.job_id = kJob;
    header.sender = lane.value;
    header.op = announce.op;
    header.part = announce.part;
    return header;
  }
  void control(wire::Header header, std::span<const std::byte> body = {}) {
    header.payload_bytes = static_cast<std::uint32_t>(body.size());
    engine->on_control(now, header, body);
    collect();
  }
  void grant(const SendAction& announce, std::uint32_t chunk, std::uint32_t chunks, std::uint64_t tag,
             std::uint64_t run = 1) {
    wire::Header header = from(announce.to, announce.header, wire::MessageType::kGrant);
    header.chunk = chunk;
    header.count = chunks;
    header.tag = tag;
    header.offset = announce.header.tag;
    control(header, run == 1 ? std::vector<std::byte>{} : wire::encode_list(std::array{run}));
  }
  /// The lane grants the first chunks, where the worker has any, and takes what comes.
  void take_push(const SendAction& announce, std::uint32_t chunks) {
    if (wire::decode_announce(announce.body)->owned_count == 0) return;
    grant(announce, 0, chunks, 900);
    sent(sends(wire::MessageType::kPush));
  }
  void error(const SendAction& announce, Code code, const std::string& text, std::uint32_t results) {
    wire::Header header = from(announce.to, announce.header, wire::MessageType::kError);
    header.tag = announce.header.tag;
    header.count = results;
    std::vector<std::byte> body(1 + text.size(), static_cast<std::byte>(code));
    std::memcpy(body.data() + 1, text.data(), text.size());
    control(header, body);
  }
  /// The lane's Result of one chunk; false where nothing waits for it.
  bool result(const SendAction& announce, std::uint32_t chunk, bool right = true, std::uint16_t flags = 0) {
    const auto body = wire::decode_announce(announce.body);
    const auto found = posted.find(announce.header.tag + chunk);
    if (found == posted.end()) return false;
    const PostReceiveAction receive = found->second;
    posted.erase(found);
    wire::Header header = from(announce.to, announce.header, wire::MessageType::kResult);
    header.tag = announce.header.tag + chunk;
    header.chunk = chunk;
    if (body->owned_count > 0) header.offset = body->shard_offset + std::uint64_t{chunk} * kChunk;
    header.flags = flags;
    header.payload_bytes = flags == 0 ? static_cast<std::uint32_t>(receive.payload.size()) : 0;
    if (!right) header.chunk += 1;
    engine->on_received(now, receive.token, Status::ok(), header);
    collect();
    return true;
  }
  void sent(const std::vector<SendAction>& sent_actions) {
    for (const SendAction& action : sent_actions) engine->on_sent(now, action.token, Status::ok());
    collect();
  }

  EngineConfig config;
  std::unique_ptr<Engine> engine;
  Instant now{};
  Actions actions;
  bool gives_back = true;  // Withdrawn receives, at once.
  bool copies = false;     // Carries CopyActions out: what they name is real memory.
  std::map<std::uint64_t, PostReceiveAction> posted;
  std::vector<CompleteAction> completed;
};

}  // namespace herring::worker::testing
