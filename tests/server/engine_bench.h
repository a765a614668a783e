#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/finite.h"
#include "server/engine.h"

namespace herring::server {

using namespace std::chrono_literals;

inline constexpr std::uint64_t kJob = 7;
inline constexpr std::uint32_t kChunk = 128;

/// One lane and the messages of its workers, by hand.
struct Bench {
  explicit Bench(std::uint32_t workers_count, std::uint32_t window = 4, std::uint32_t slot_count = 0)
      : workers(workers_count), memory(std::size_t{slot_count == 0 ? workers_count * window : slot_count} * kChunk) {
    config.self = PeerId{workers};
    config.job_id = kJob;
    config.workers = workers;
    config.max_chunk_bytes = kChunk;
    config.window = window;
    config.max_eager_bytes = 256;
    next_sequence.resize(workers);
    build();
  }
  void build() { engine = std::make_unique<Engine>(config, memory); }

  wire::Header header(std::uint32_t sender, wire::MessageType type) const {
    wire::Header header;
    header.type = type;
    header.job_id = kJob;
    header.sender = sender;
    header.op = op;
    header.group = group;
    return header;
  }

  /// An all-reduce of float32[chunks * 32] that this worker owns completely.
  wire::Announce announce(std::uint32_t sender, std::uint32_t chunks) const {
    wire::Announce announce;
    announce.descriptor.dims = chunks == 0 ? 0 : 1;
    announce.descriptor.shape[0] = chunks * 32;
    announce.descriptor.op_bytes = announce.descriptor.part_bytes = announce.shard_bytes = chunks * kChunk;
    announce.contributor = sender;
    announce.contributor_count = workers;
    announce.first_rank = sender;
    announce.rank_count = 1;
    announce.chunk_bytes = kChunk;
    announce.owned_count = chunks;
    announce.timeout_ms = 10'000;
    return announce;
  }

  /// Returns the announce's tag.
  std::uint64_t send(std::uint32_t sender, const wire::Announce& body, std::span<const std::byte> eager = {},
                     std::uint32_t announcers = 1) {
    wire::Header head = header(sender, wire::MessageType::kAnnounce);
    head.tag = next_tag;
    next_tag += 100;
    head.offset = next_sequence[sender]++;
    head.count = announcers;
    if (!eager.empty()) head.flags = wire::kFlagEager;
    const auto encoded = wire::encode(body);
    std::vector<std::byte> bytes(encoded.begin(), encoded.end());
    bytes.insert(bytes.end(), eager.begin(), eager.end());
    control(head, bytes);
    return head.tag;
  }
  void control(wire::Header head, std::span<const std::byte> bytes) {
    head.payload_bytes = static_cast<std::uint32_t>(bytes.size());
    const Token token{next_body++};
    std::vector<std::byte>& body = bodies[token.value];
    body.assign(bytes.begin(), bytes.end());
    if (!engine->on_control(now, head, body, token)) bodies.erase(token.value);
    collect();
  }
  void cancel(std::uint32_t sender, std::uint64_t tag, std::uint64_t sequence, std::uint32_t pushes,
              const std::string& why) {
    wire::Header head = header(sender, wire::MessageType::kCancel);
    head.tag = tag;
    head.offset = sequence;
    head.count = pushes;
    std::vector<std::byte> body(1 + why.size(), static_cast<std::byte>(Code::kCancelled));
    std::memcpy(body.data() + 1, why.data(), why.size());
    control(head, body);
  }

  void collect() {
    actions.clear();
    for (std::size_t seen = 0;; ++seen) {
      engine->take_actions(actions);
      if (seen == actions.size()) return;
      if (const auto* post = std::get_if<PostReceiveAction>(&actions[seen])) posted[post->tag.value] = *post;
      if (const auto* sum = std::get_if<ReduceAction>(&actions[seen]); sum != nullptr && reduces_at_once) {
        // By hand: the tests look at what was asked for.
        std::vector<NotFiniteInput> found;
        for (std::uint32_t k = 0; sum->check_finite && k < sum->inputs.size(); ++k) {
          if (const auto at = find_not_finite(sum->spec.dtype, sum->inputs[k])) found.push_back({k, *at});
        }
        engine->on_reduced(now, sum->token, found);
      }
      if (const auto* done = std::get_if<ReleaseAction>(&actions[seen])) {
        EXPECT_EQ(bodies.erase(done->token.value), 1u);
      }
      const auto* cancelled = std::get_if<CancelReceiveAction>(&actions[seen]);
      if (cancelled != nullptr && gives_back) engine->on_withdrawn(now, cancelled->token);
    }
  }
  template <class Kind>
  std::vector<Kind> all() const {
    std::vector<Kind> found;
    for (const Action& action : actions) {
      if (const auto* one = std::get_if<Kind>(&action)) found.push_back(*one);
    }
    return found;
  }
  std::vector<SendAction> sends(wire::MessageType type) const {
    std::vector<SendAction> found;
    for (const SendAction& send_action : all<SendAction>()) {
      if (send_action.header.type == type) found.push_back(send_action);
    }
    return found;
  }
  /// A push that answers a grant: chunk `chunk` with the given number of bytes.
  void push(std::uint32_t sender, std::uint64_t tag, std::uint32_t chunk, std::uint32_t bytes = kChunk) {
    wire::Header head = header(sender, wire::MessageType::kPush);
    head.tag = tag;
    head.chunk = chunk;
    head.offset = std::uint64_t{chunk} * kChunk;
    head.payload_bytes = bytes;
    const PostReceiveAction receive = posted.at(tag);
    posted.erase(tag);
    engine->on_received(now, receive.token, Status::ok(), head);
    collect();
  }
  void sent_all() {
    for (const SendAction& action : all<SendAction>()) engine->on_sent(now, action.token, Status::ok());
    collect();
  }
  static std::string text(const SendAction& action) {
    return {reinterpret_cast<const char*>(action.body.data()) + 1, action.body.size() - 1};
  }

  std::uint32_t workers;
  EngineConfig config;
  std::vector<std::byte> memory;
  std::unique_ptr<Engine> engine;
  Instant now{};
  std::uint64_t op = 1;
  std::uint32_t group = 0;
  std::uint64_t next_tag = 1000;
  std::vector<std::uint64_t> next_sequence;
  Actions actions;
  std::uint64_t next_body = 0;
  std::map<std::uint64_t, std::vector<std::byte>> bodies;  // That the engine has kept.
  bool gives_back = true;                                  // Withdrawn receives, at once.
  bool reduces_at_once = true;
  std::map<std::uint64_t, PostReceiveAction> posted;
};

}  // namespace herring::server
