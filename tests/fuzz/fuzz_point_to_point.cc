#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <variant>
#include <vector>

#include "message_program.h"
#include "mutate.h"
#include "point_to_point/engine.h"
#include "point_to_point/message.h"
#include "require.h"
#include "wire/reason.h"
#include "withdrawn.h"

/// Workers that send anything, and a transport that does anything it may. Whatever they do: no crash, no touch of an
/// operation's memory after its end, every operation ends once, bounded memory, and nothing left once all are gone.
namespace herring::fuzz {
namespace {

using namespace point_to_point;

constexpr std::uint32_t kPeers = 3;  // The last one is the engine under test.
constexpr std::uint64_t kJob = 77;
constexpr LinkConfig kLink = {64, 2, 32, 2, 4};

EngineConfig engine_config() {
  EngineConfig config;
  config.self = PeerId{kPeers - 1};
  config.job_id = kJob;
  config.link_of = {0, 0, kNoLink};
  config.links = {kLink};
  config.max_unmatched = 8;
  config.max_incoming = 3;
  config.max_incoming_of_peer = 2;
  config.grace = std::chrono::seconds(1);
  return config;
}

class Harness {
 public:
  explicit Harness(std::span<const std::uint8_t> input) : program_(input), engine_(engine_config()) {}

  void run() {
    while (!program_.at_end()) {
      step(static_cast<MessageStep>(program_.next() % static_cast<std::uint8_t>(MessageStep::kCount)));
      carry_out();
      const std::uint64_t bound =
          (kPeers - 1) * (kLink.eager_window * kLink.eager_bytes + kLink.credits * max_body_bytes(kLink));
      HERRING_REQUIRE(engine_.stats().held_bytes_peak <= bound);
      HERRING_REQUIRE(engine_.stats().incoming_peak <= 3);
      HERRING_REQUIRE(engine_.stats().unmatched <= 8u * kPeers + memory_.size());
    }
    end();
  }

 private:
  void step(MessageStep what) {
    switch (what) {
      case MessageStep::kControl:
        return control();
      case MessageStep::kSend:
        return send();
      case MessageStep::kReceive:
        return receive();
      case MessageStep::kData:
        return data();
      case MessageStep::kNoise:
        return noise();
      case MessageStep::kSent:
        return sent(program_.next(), Status::ok());
      case MessageStep::kNotSent:
        return sent(program_.next(), Status(Code::kPeerLost, "no route"));
      case MessageStep::kLost:
        return engine_.on_peer_lost(now_, PeerId{program_.next() % kPeers}, "it was stopped");
      case MessageStep::kLeft:
        return engine_.on_peer_left(now_, PeerId{program_.next() % kPeers}, "it has left");
      case MessageStep::kTick:
        now_ += std::chrono::milliseconds(100 * program_.next());
        return engine_.on_tick(now_);
      case MessageStep::kCloseGroup:
        return engine_.close_group(now_, GroupId{program_.next() & 1u}, Status(Code::kCancelled, "closed"));
      case MessageStep::kCancel:
        return engine_.cancel_unmatched_receives(Status(Code::kShutdown, "over"));
      case MessageStep::kGiveBack:
        return give_back(program_.next());
      case MessageStep::kCopy:
        return copy(program_.next());
      case MessageStep::kCount:
        return;
    }
  }

  wire::Header header_of(std::uint32_t sender, wire::MessageType type) const {
    wire::Header header;
    header.type = type;
    header.job_id = kJob;
    header.sender = sender;
    return header;
  }

  void control() {
    const std::uint32_t sender = program_.next() % (kPeers - 1);
    wire::Header header = header_of(sender, static_cast<wire::MessageType>(8 + program_.next() % 7));
    const std::uint8_t detail = program_.next();
    // The number of one of our sends, where the peer answers; one of its own else.
    header.op = (detail & 15u) + (header.type == wire::MessageType::kEnvelope ? 1000u : 0u);
    header.group = detail >> 7;
    header.tag = 1u + (detail >> 4 & 3u);
    header.chunk = program_.next();
    header.count = program_.next() & 7u;
    header.part = program_.next() & 3u;
    std::vector<std::byte> body;
    if (header.type == wire::MessageType::kEnvelope) {
      constexpr std::uint32_t kSizes[] = {0, 1, 32, 33, 64, 65, 200, 1000};
      const std::uint32_t bytes = kSizes[header.chunk & 7u];
      const auto size = encode_envelope(bytes);
      body.assign(size.begin(), size.end());
      if ((header.chunk & 8u) != 0 || bytes == 0) {
        header.flags = wire::kFlagEager;
        body.resize(body.size() + bytes, std::byte{1});
      }
    } else if (header.type == wire::MessageType::kClose || header.type == wire::MessageType::kWithdraw) {
      body = wire::encode_reason(Status(Code::kTimeout, "late"));
      if ((detail & 64u) != 0) header.flags = wire::kFlagAnswer;
    }
    header.payload_bytes = static_cast<std::uint32_t>(body.size());
    // In its turn, or a little ahead.
    const std::uint64_t ahead = header.count == 7 ? 1 : 0;
    if (header.type != wire::MessageType::kReturn) header.offset = next_number_[sender] + ahead;
    const auto sealed = mutate(program_, header, body, 3);
    if (!sealed) return;
    if (header.type != wire::MessageType::kReturn && ahead == 0) ++next_number_[sender];
    // The body goes where the engine does not keep it: the sanitizer finds whoever touches it later.
    auto& kept = bodies_[++body_] = std::make_unique<std::vector<std::byte>>(std::move(body));
    if (!engine_.link(0).on_control(now_, *sealed, *kept, Token{body_})) HERRING_REQUIRE(bodies_.erase(body_) == 1);
  }

  std::vector<std::byte>& lend(std::uint8_t kind) {
    constexpr std::size_t kSizes[] = {0, 1, 32, 33, 64, 65, 200, 1000};
    return *(memory_[++handle_] = std::make_unique<std::vector<std::byte>>(kSizes[kind & 7u], std::byte{2}));
  }

  void send() {
    const std::uint8_t detail = program_.next();
    const auto& data = lend(program_.next());
    engine_.send(now_, {handle_, GroupId{detail >> 7 & 1u}, PeerId{detail % kPeers}, 1u + (detail >> 4 & 3u), data,
                        std::chrono::seconds(5)});
  }

  void receive() {
    const std::uint8_t detail = program_.next();
    auto& memory = lend(program_.next());
    ReceiveOperation operation;
    operation.handle = handle_;
    operation.group = GroupId{detail >> 7 & 1u};
    operation.sources = {PeerId{detail % kPeers}};
    if ((detail & 8u) != 0) operation.sources = {PeerId{0}, PeerId{1}, PeerId{2}};
    if ((detail & 4u) == 0) operation.tag = 1u + (detail >> 4 & 3u);
    operation.memory = memory;
    operation.timeout = std::chrono::seconds(5);
    engine_.receive(now_, operation);
  }

  /// The chunk that a posted receive waits for, or something like it. The header is that of a worker that answers well
  /// where the harness knows it.
  void data() {
    if (receives_.empty()) return;
    const std::uint8_t which = program_.next();
    const auto posted = std::next(receives_.begin(), static_cast<std::ptrdiff_t>(which % receives_.size()));
    const PostReceiveAction action = posted->second;
    receives_.erase(posted);
    std::fill(action.payload.begin(), action.payload.end(), std::byte{3});
    const wire::Header& invite = invites_[action.tag.value];
    wire::Header header = header_of(invite.sender, wire::MessageType::kData);
    header.op = invite.op;
    header.tag = action.tag.value;
    header.chunk = invite.chunk + static_cast<std::uint32_t>(action.tag.value - invite.tag);
    header.offset = std::uint64_t{header.chunk} * kLink.chunk_bytes;
    header.payload_bytes = static_cast<std::uint32_t>(action.payload.size());
    std::vector<std::byte> none;
    const auto sealed = mutate(program_, header, none, 3);
    if (sealed) engine_.link(0).on_received(now_, action.token, Status::ok(), *sealed);
    if (!sealed) engine_.link(0).on_received(now_, action.token, Status(Code::kProtocol, "no message"), {});
  }

  void noise() {
    if (receives_.empty()) return;
    const auto posted = std::next(receives_.begin(), static_cast<std::ptrdiff_t>(program_.next() % receives_.size()));
    const Token token = posted->second.token;
    receives_.erase(posted);
    engine_.link(0).on_received(now_, token, Status(Code::kPeerLost, "the connection broke"), {});
  }

  void give_back(std::size_t which) {
    if (const auto token = withdrawn_.give_back(which, receives_)) engine_.link(0).on_withdrawn(now_, *token);
  }

  void sent(std::size_t which, const Status& status) {
    if (sends_.empty()) return;
    const std::size_t at = which % sends_.size();
    const SendAction action = std::move(sends_[at]);
    sends_.erase(sends_.begin() + static_cast<std::ptrdiff_t>(at));
    touch(action.payload);
    engine_.link(0).on_sent(now_, action.token, status);
  }

  void copy(std::size_t which) {
    if (copies_.empty()) return;
    const auto next = copies_.begin() + static_cast<std::ptrdiff_t>(which % copies_.size());
    const auto [action, is_own] = *next;
    copies_.erase(next);
    HERRING_REQUIRE(action.from.size() == action.to.size());
    std::copy(action.from.begin(), action.from.end(), action.to.begin());
    if (is_own) return engine_.on_copied(*action.token);
    engine_.link(0).on_copied(now_, *action.token);
  }

  void carry_out() {
    Actions actions;
    engine_.take_actions(actions);
    for (const Action& action : actions) copies_.emplace_back(std::get<CopyAction>(action), true);
    actions.clear();
    engine_.link(0).take_actions(actions);
    for (Action& action : actions) {
      if (auto* send = std::get_if<SendAction>(&action)) {
        touch(send->payload);
        if (send->header.type == wire::MessageType::kInvite) {
          for (std::uint32_t i = 0; i < send->header.count; ++i) {
            invites_[send->header.tag + i] = send->header;
            invites_[send->header.tag + i].sender = send->to.value;
          }
        }
        sends_.push_back(std::move(*send));
      } else if (auto* post = std::get_if<PostReceiveAction>(&action)) {
        for (const auto& [token, other] : receives_) {
          HERRING_REQUIRE(post->payload.empty() || other.payload.empty() ||
                          post->payload.data() + post->payload.size() <= other.payload.data() ||
                          other.payload.data() + other.payload.size() <= post->payload.data());
        }
        receives_.emplace(post->token.value, *post);
      } else if (auto* begun = std::get_if<CopyAction>(&action)) {
        copies_.emplace_back(*begun, false);
      } else if (auto* release = std::get_if<ReleaseAction>(&action)) {
        HERRING_REQUIRE(bodies_.erase(release->token.value) == 1);
      } else if (auto* cancel = std::get_if<CancelReceiveAction>(&action)) {
        withdrawn_.add(cancel->token, receives_);
      }
    }
    std::vector<Completion> done;
    engine_.take_completions(done);
    // The memory goes with the operation: the sanitizer finds whoever touches it later.
    for (const Completion& completion : done) HERRING_REQUIRE(memory_.erase(completion.handle) == 1);
  }

  void end() {
    for (std::uint32_t peer = 0; peer + 1 < kPeers; ++peer) engine_.on_peer_lost(now_, PeerId{peer}, "all gone");
    carry_out();
    for (; !copies_.empty(); carry_out()) copy(0);
    while (!sends_.empty()) {
      sent(0, Status(Code::kPeerLost, "removed"));
      carry_out();
    }
    for (int round = 0; round < 2; ++round) {
      for (; !copies_.empty(); carry_out()) copy(0);
      for (; !withdrawn_.empty(); carry_out()) give_back(0);
      now_ += std::chrono::hours(1);
      engine_.on_tick(now_);
      carry_out();
    }
    for (; !withdrawn_.empty(); carry_out()) give_back(0);
    HERRING_REQUIRE(memory_.empty());
    HERRING_REQUIRE(receives_.empty());
    HERRING_REQUIRE(bodies_.empty());
    HERRING_REQUIRE(engine_.is_idle());
    HERRING_REQUIRE(engine_.stats().held_bytes == 0);
  }

  Program program_;
  Instant now_{};
  std::map<std::uint64_t, std::unique_ptr<std::vector<std::byte>>> memory_;  // By handle.
  std::map<std::uint64_t, std::unique_ptr<std::vector<std::byte>>> bodies_;  // By token: those the engine has kept.
  Engine engine_;
  std::uint64_t handle_ = 0;
  std::uint64_t body_ = 0;
  std::vector<std::pair<CopyAction, bool>> copies_;  // Of which links, or the worker's own.
  std::uint64_t next_number_[kPeers] = {};
  std::vector<SendAction> sends_;
  Withdrawn withdrawn_;
  std::map<std::uint64_t, PostReceiveAction> receives_;  // By token.
  std::map<std::uint64_t, wire::Header> invites_;        // By tag; sender: whom it invited.
};

}  // namespace
}  // namespace herring::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  herring::fuzz::Harness({bytes, size}).run();
  return 0;
}
