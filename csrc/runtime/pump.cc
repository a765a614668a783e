#include "runtime/pump.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <functional>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/copy.h"
#include "point_to_point/engine.h"
#include "runtime/apart.h"
#include "runtime/control_receives.h"
#include "runtime/link_questions.h"
#include "runtime/post_table.h"
#include "runtime/pump_backlog.h"
#include "runtime/pump_engines.h"
#include "server/engine.h"
#include "worker/engine.h"

namespace herring::runtime {
namespace {

constexpr std::size_t kPollBatch = 64;
constexpr std::size_t kSmallBytes = PostTable::kSmallBytes;
static_assert(wire::kHeaderBytes + wire::kAnnounceBytes <= kSmallBytes);

}  // namespace

template <class Engine>
class Pump<Engine>::Impl {
 public:
  Impl(Engine& engine, transport::Endpoint& endpoint, PumpOptions options, ReduceFunction reduce,
       CompleteFunction complete)
      : engine_(engine),
        endpoint_(endpoint),
        options_(std::move(options)),
        reduce_(std::move(reduce)),
        complete_(std::move(complete)),
        posts_(endpoint, options_),
        controls_(endpoint, posts_, options_),
        links_(endpoint, posts_, peers_, options_.links) {}

  ~Impl() { close(); }

  bool step(Instant now) {
    bool busy = flush(now);
    const std::size_t count = endpoint_.poll(batch_);
    for (std::size_t i = 0; i < count; ++i) deliver(now, std::exchange(batch_[i], {}));
    if (count > 0) {
      busy = true;
      flush(now);
    }
    if (count < kPollBatch && is_waiting() && links_.is_due(now)) look(now);
    return busy;
  }

  Instant next_deadline() const { return is_waiting() ? links_.next_look() : Instant::max(); }

  void forget_peer(PeerId peer) { links_.forget(peer); }

  /// True where an action was carried out.
  bool flush(Instant now) {
    last_now_ = now;
    links_.answer();
    backlog_.take_from(engine_);
    controls_.post();
    const auto carry_out_one = [this](Action& action) { return carry_out_any(action); };
    const bool any = backlog_.retry_lines(
        options_.near, [this] { return endpoint_.takes_sends(); }, carry_out_one);
    return backlog_.carry_out_all(carry_out_one) || any;
  }

  bool uses(std::span<const std::byte> memory) const {
    const std::less<> before;
    return std::any_of(posts_.begin(), posts_.end(), [&](const Post& post) {
      return post.kind != Kind::kFree && !memory.empty() && !post.payload.empty() &&
             before(post.payload.data(), memory.data() + memory.size()) &&
             before(memory.data(), post.payload.data() + post.payload.size());
    });
  }
  bool has_backlog() const { return !backlog_.is_empty() || controls_.has_waiting() || links_.owes_answers(); }
  bool has_unsent() const { return sends_ > 0 || !backlog_.is_empty() || links_.owes_answers(); }
  const PumpStats& stats() const { return stats_; }
  PumpTraffic traffic(PeerId peer) const {
    const auto found = peers_.find(peer);
    return found == peers_.end() ? PumpTraffic{} : found->second.traffic;
  }

 private:
  using Kind = PostKind;
  using Peer = PumpPeer;

  bool carry_out_any(Action& action) {
    return std::visit([this](auto& one) { return carry_out(one); }, action);
  }

  bool carry_out(SendAction& action) {
    if (action.is_apart) return send_apart(action);
    const std::size_t head = wire::kHeaderBytes + action.body.size();
    const bool is_copied = posts_.fits(head, action.payload) && !is_near(action.to);
    const bool is_large = head > kSmallBytes || is_copied;
    if (head > wire::kHeaderBytes + std::max(options_.max_body_bytes, kSmallBytes)) {
      engine_.on_sent(last_now_, action.token,
                      Status(Code::kInternal, "a message body of " + std::to_string(action.body.size()) +
                                                  " bytes; the limit is " + std::to_string(options_.max_body_bytes)));
      return take_fresh();
    }
    const std::optional<std::size_t> added = posts_.add(Kind::kSend, is_large);
    if (!added) return false;
    const std::size_t index = *added;
    Post& post = posts_[index];
    post.token = action.token;
    post.to = action.to;
    post.payload = is_copied ? std::span<const std::byte>{} : action.payload;
    const std::span<const std::byte> payload = fill(post, action, is_copied);
    Status status = action.is_unregistered ? posts_.register_payload(index) : Status::ok();
    if (status.is_ok()) {
      status = endpoint_.post_send(action.to, action.tag, post.buffer.first(head), payload, Token{index});
    }
    if (status.is_ok()) {
      note_sent(post, action.to);
      ++stats_.messages_sent;
      ++post.peer->traffic.messages;
      post.peer->traffic.bytes_sent += action.payload.size();
      return true;
    }
    posts_.free(index);
    if (status.is_again()) return false;
    engine_.on_sent(last_now_, action.token, status);
    return take_fresh();
  }

  /// The transport has it.
  void note_sent(Post& post, PeerId to) {
    Peer& peer = peers_[to];
    post.peer = &peer;
    if (peer.sends++ == 0) peer.moved = last_now_;
    ++sends_;
  }

  /// Carries on where the transport had no room the last time.
  [[gnu::cold, gnu::noinline]] bool send_apart(SendAction& action) {
    Halves& halves = apart_[action.token.value];
    while (halves.begun < 2 && halves.status.is_ok()) {
      const std::size_t half = halves.begun;
      const std::optional<std::size_t> added = posts_.add(Kind::kSend, false);
      if (!added) return false;
      Post& post = posts_[*added];
      post.token = action.token;
      post.to = action.to;
      std::span<const std::byte> bytes = action.payload;
      if (half == Halves::kPayload) {
        post.payload = action.payload;
      } else {
        fill(post, action, false);
        bytes = post.buffer.first(wire::kHeaderBytes + action.body.size());
      }
      const Status status = endpoint_.post_send(action.to, tag_of_half(action.tag, half), bytes, {}, Token{*added});
      if (!status.is_ok()) posts_.free(*added);
      if (status.is_again()) return false;
      if (status.is_ok()) {
        note_sent(post, action.to);
        halves.posts[half] = *added;
        ++halves.begun;
      } else {
        halves.status = status;
      }
    }
    halves.is_complete = true;
    if (halves.status.is_ok()) {
      ++stats_.messages_sent;
      PumpTraffic& traffic = peers_[action.to].traffic;
      ++traffic.messages;
      traffic.bytes_sent += action.payload.size();
    }
    if (!halves.is_over()) return true;
    const Status status = std::exchange(halves.status, {});
    apart_.erase(action.token.value);
    engine_.on_sent(last_now_, action.token, status);
    return take_fresh();
  }

  /// Header and body, and a payload that is copied. Returns where the payload is sent from.
  static std::span<const std::byte> fill(Post& post, const SendAction& action, bool is_copied) {
    const wire::HeaderBytes header = wire::encode(action.header);
    std::memcpy(post.buffer.data(), header.data(), header.size());
    if (!action.body.empty()) {
      std::memcpy(post.buffer.data() + header.size(), action.body.data(), action.body.size());
    }
    if (!is_copied) return action.payload;
    const auto copy = post.buffer.subspan(header.size() + action.body.size(), action.payload.size());
    copy_bytes(action.payload, copy);
    return copy;
  }

  /// Needs no registered memory, and takes what is sent where it lies.
  bool is_near(PeerId peer) const {
    return !options_.near.empty() && std::ranges::find(options_.near, peer, &NearPeer::peer) != options_.near.end();
  }

  bool carry_out(PostReceiveAction& action) {
    if (action.is_apart) return receive_apart(action);
    const bool is_copied = posts_.fits(wire::kHeaderBytes, action.payload);
    const std::span<std::byte> landing = is_copied ? std::span<std::byte>{} : action.payload;
    const std::size_t index = posts_.add(Kind::kReceive, is_copied).value();
    Post& post = posts_[index];
    post.token = action.token;
    post.payload = landing;
    post.copy_to = is_copied ? action.payload : std::span<std::byte>{};
    const std::size_t head = wire::kHeaderBytes + post.copy_to.size();
    const std::span<std::byte> first = post.buffer.first(head);
    const Status status = action.is_loan
                              ? endpoint_.post_loan_receive(action.from, action.tag, first, Token{index})
                              : endpoint_.post_receive_from(action.from, action.tag, first, landing, Token{index});
    if (status.is_ok()) {
      by_token_.emplace(action.token.value, index);
      return true;
    }
    posts_.free(index);
    if (status.is_again()) return false;
    engine_.on_received(last_now_, action.token, status, {});
    return take_fresh();
  }

  [[gnu::cold, gnu::noinline]] bool receive_apart(const PostReceiveAction& action) {
    Halves& halves = apart_[action.token.value];
    while (halves.begun < 2 && halves.status.is_ok()) {
      const std::size_t half = halves.begun;
      const std::size_t index = posts_.add(Kind::kReceive, false).value();
      Post& post = posts_[index];
      post.token = action.token;
      if (half == Halves::kPayload) post.payload = action.payload;
      const std::span<std::byte> bytes =
          half == Halves::kPayload ? action.payload : post.buffer.first(wire::kHeaderBytes);
      const Status status =
          endpoint_.post_receive_from(action.from, tag_of_half(action.tag, half), bytes, {}, Token{index});
      if (!status.is_ok()) posts_.free(index);
      if (status.is_again()) return false;
      if (status.is_ok()) {
        halves.posts[half] = index;
        ++halves.begun;
      } else {
        fail_halves(halves, status);
      }
    }
    halves.is_complete = true;
    return halves.is_over() ? end_receive(last_now_, action.token) : true;
  }

  /// What has not come of it need not come any more.
  void fail_halves(Halves& halves, const Status& status) {
    if (halves.status.is_ok()) halves.status = status;
    withdraw(halves);
  }

  void withdraw(const Halves& halves) {
    for (const std::size_t post : halves.posts) {
      if (post == Halves::kNone || std::exchange(posts_[post].is_withdrawn, true)) continue;
      endpoint_.cancel_receive(Token{post});
    }
  }

  /// One of the two that a receive is made of; false: it is none.
  [[gnu::cold, gnu::noinline]] bool take_half(Instant now, std::size_t index, const transport::Completion& completion) {
    const auto found = apart_.find(posts_[index].token.value);
    if (found == apart_.end()) return false;
    Halves& halves = found->second;
    const Post post = posts_[index];
    Status status = completion.status;
    if (halves.end(index) == Halves::kPayload) {
      halves.payload_bytes = completion.bytes;
    } else if (status.is_ok() && !post.is_withdrawn) {
      if (completion.bytes == wire::kHeaderBytes) halves.header = decode(post);
      if (!halves.header) status = malformed(completion.bytes);
    }
    posts_.free(index);
    if (!status.is_ok()) fail_halves(halves, status);
    if (halves.is_over()) end_receive(now, post.token);
    return true;
  }

  [[gnu::cold, gnu::noinline]] bool end_receive(Instant now, Token token) {
    const auto found = apart_.find(token.value);
    const Halves halves = std::move(found->second);
    apart_.erase(found);
    if (halves.is_withdrawn) {
      engine_.on_withdrawn(now, token);
    } else if (halves.status.is_ok() && halves.header->payload_bytes == halves.payload_bytes) {
      take_message(now, token, *halves.header, {});
    } else {
      engine_.on_received(now, token, halves.status.is_ok() ? malformed(halves.payload_bytes) : halves.status, {});
    }
    return take_fresh();
  }

  [[gnu::cold, gnu::noinline]] Status malformed(std::size_t bytes) {
    ++stats_.malformed;
    return Status(Code::kProtocol, std::to_string(bytes) + " bytes arrived that are not a Herring message");
  }

  void take_message(Instant now, Token token, const wire::Header& header, const std::shared_ptr<Loan>& loan) {
    ++stats_.messages_received;
    Peer& peer = peers_[PeerId{header.sender}];
    links_.hear(now, peer, header);
    ++peer.traffic.messages;
    peer.traffic.bytes_received += header.payload_bytes;
    if constexpr (Sums<Engine>) {
      engine_.on_received(now, token, Status::ok(), header, loan);
    } else {
      engine_.on_received(now, token, Status::ok(), header);
    }
  }

  bool carry_out(CancelReceiveAction& action) {
    if (const auto halves = apart_.find(action.token.value); halves != apart_.end()) {
      halves->second.is_withdrawn = true;
      withdraw(halves->second);
      return true;
    }
    const auto found = by_token_.find(action.token.value);
    if (found == by_token_.end()) {
      backlog_.drop_receive(action.token);  // Else it came in the meantime.
      engine_.on_withdrawn(last_now_, action.token);
      return take_fresh();
    }
    if (std::exchange(posts_[found->second].is_withdrawn, true)) return true;
    endpoint_.cancel_receive(Token{found->second});
    return true;
  }

  bool carry_out(ReduceAction& action) {
    const std::vector<NotFiniteInput> found = reduce_(action);
    action.loan.reset();  // Not later: what follows may tell its owner that the sum is there.
    if constexpr (Sums<Engine>) engine_.on_reduced(last_now_, action.token, found);
    return take_fresh();
  }

  bool carry_out(CopyAction& action) {
    copy_bytes(action.from, action.to);
    if constexpr (Copies<Engine>) {
      if (action.token) {
        engine_.on_copied(last_now_, *action.token);
        return take_fresh();
      }
    }
    return true;
  }

  bool carry_out(ReleaseAction& action) {
    controls_.release(static_cast<std::size_t>(action.token.value));
    return true;
  }

  bool carry_out(CompleteAction& action) {
    complete_(action);
    return true;
  }

  /// What the engine wants after it heard of an action's end, behind what waits already.
  bool take_fresh() {
    backlog_.take_from(engine_);
    return true;
  }

  void deliver(Instant now, const transport::Completion& completion) {
    last_now_ = now;
    const auto index = static_cast<std::size_t>(completion.token.value);
    switch (posts_[index].kind) {
      case Kind::kSend: {
        const Token token = posts_[index].token;
        --posts_[index].peer->sends;
        --sends_;
        posts_[index].peer->moved = now;
        posts_.free(index);
        if (apart_.empty()) {
          engine_.on_sent(now, token, completion.status);
        } else if (Status status = completion.status; is_last_half(token, index, status)) {
          engine_.on_sent(now, token, status);
        }
        break;
      }
      case Kind::kPing:
      case Kind::kPong:
        links_.completed(index);
        break;
      case Kind::kReceive:
        deliver_receive(now, index, completion);
        break;
      case Kind::kControl:
        deliver_control(now, index, completion);
        break;
      case Kind::kFree:
        break;
    }
  }

  /// False where this is one half of a message, and the other is under way or waits; else `status` is of both.
  [[gnu::cold, gnu::noinline]] bool is_last_half(Token token, std::size_t post, Status& status) {
    const auto found = apart_.find(token.value);
    if (found == apart_.end()) return true;
    Halves& halves = found->second;
    halves.end(post);
    if (halves.status.is_ok()) halves.status = status;
    if (!halves.is_over()) return false;
    status = halves.status;
    apart_.erase(found);
    return true;
  }

  void deliver_receive(Instant now, std::size_t index, const transport::Completion& completion) {
    if (!apart_.empty() && take_half(now, index, completion)) return;
    const Post post = posts_[index];
    by_token_.erase(post.token.value);
    const std::optional<wire::Header> header =
        completion.status.is_ok() && completion.bytes >= wire::kHeaderBytes ? decode(post) : std::nullopt;
    if (!post.is_withdrawn && header && !post.copy_to.empty()) {
      const std::size_t bytes = completion.bytes - wire::kHeaderBytes;
      copy_bytes(post.buffer.subspan(wire::kHeaderBytes, bytes), post.copy_to.first(bytes));
    }
    posts_.free(index);
    if (post.is_withdrawn) return engine_.on_withdrawn(now, post.token);
    if (header && completion.bytes == wire::kHeaderBytes + header->payload_bytes) {
      return take_message(now, post.token, *header, completion.loan);
    }
    const Status status = completion.status.is_ok() ? malformed(completion.bytes) : completion.status;
    engine_.on_received(now, post.token, status, {});
  }

  void deliver_control(Instant now, std::size_t index, const transport::Completion& completion) {
    controls_.completed();
    if (is_closing_ || completion.kind == transport::CompletionKind::kCancelled) return;
    const Post post = posts_[index];
    const std::optional<wire::Header> header =
        completion.status.is_ok() && completion.bytes >= wire::kHeaderBytes ? decode(post) : std::nullopt;
    if (header && completion.bytes == wire::kHeaderBytes + header->payload_bytes) {
      ++stats_.messages_received;
      // Peers that are none of ours must not grow the table: anybody can reach this tag.
      bool is_taken = false;
      if (const auto known = peers_.find(PeerId{header->sender}); known != peers_.end()) {
        Peer& peer = known->second;
        ++peer.traffic.messages;
        if (header->type == wire::MessageType::kAnnounce && header->payload_bytes > wire::kAnnounceBytes) {
          peer.traffic.bytes_received += header->payload_bytes - wire::kAnnounceBytes;
        }
        is_taken = links_.take(now, peer, *header);
      }
      if (!is_taken && give_control(now, *header, index)) return controls_.replace(index);
    } else {
      ++stats_.malformed;
    }
    controls_.repost(index);
  }

  /// True where the engine keeps the buffer until it releases it.
  bool give_control(Instant now, const wire::Header& header, std::size_t index) {
    const std::span<std::byte> body = posts_[index].buffer.subspan(wire::kHeaderBytes, header.payload_bytes);
    if constexpr (Keeps<Engine>) return engine_.on_control(now, header, body, Token{index});
    if constexpr (!Keeps<Engine>) engine_.on_control(now, header, body);
    return false;
  }

  bool is_waiting() const {
    if constexpr (Waits<Engine>) return engine_.is_waiting();
    return false;
  }

  void look(Instant now) {
    std::vector<PeerId> awaited;
    if constexpr (Waits<Engine>) engine_.add_awaited(awaited);
    links_.look(now, awaited);
  }

  static std::optional<wire::Header> decode(const Post& post) {
    return wire::decode(std::span<const std::byte>(post.buffer).first(wire::kHeaderBytes));
  }

  /// Buffers may go only when the transport has let go of them.
  void close() {
    is_closing_ = true;
    for (std::size_t i = 0; i < posts_.size(); ++i) {
      if (posts_[i].kind == Kind::kControl || posts_[i].kind == Kind::kReceive) endpoint_.cancel_receive(Token{i});
    }
    wait_until_free();
    // A send to a peer that is gone may never complete by itself.
    for (const Post& post : posts_) {
      if (post.kind == Kind::kSend || post.kind == Kind::kPing || post.kind == Kind::kPong) {
        endpoint_.remove_peer(post.to);
      }
    }
    wait_until_free();
    if (in_transport() > 0) endpoint_.shut_down();
  }

  void wait_until_free() {
    std::array<transport::Completion, kPollBatch> batch;
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(500);
    for (int idle = 0; in_transport() > 0 && idle < 100;) {
      const std::size_t count = endpoint_.poll(batch);
      for (std::size_t i = 0; i < count; ++i) close_one(batch[i]);
      if (count > 0) continue;
      ++idle;
      const auto now = std::chrono::steady_clock::now();
      if (now > deadline) return;
      endpoint_.wait(std::min(deadline, now + std::chrono::milliseconds(5)));
    }
  }

  void close_one(const transport::Completion& completion) {
    const auto index = static_cast<std::size_t>(completion.token.value);
    if (posts_[index].kind == Kind::kControl) {
      controls_.completed();
    } else if (posts_[index].kind != Kind::kFree) {
      posts_.free(index);
    }
  }

  std::size_t in_transport() const { return controls_.posted() + (posts_.in_use() - controls_.all()); }

  Engine& engine_;
  transport::Endpoint& endpoint_;
  PumpOptions options_;
  ReduceFunction reduce_;
  CompleteFunction complete_;
  PostTable posts_;
  PumpPeers peers_;
  ControlReceives controls_;
  LinkQuestions links_;
  PumpBacklog backlog_;
  std::array<transport::Completion, kPollBatch> batch_;      // Kept: most polls find nothing.
  std::size_t sends_ = 0;                                    // Of the engine's, in the transport.
  std::unordered_map<std::uint64_t, Halves> apart_;          // By the engine's token.
  std::unordered_map<std::uint64_t, std::size_t> by_token_;  // The engine's token of a posted receive -> post.
  PumpStats stats_;
  Instant last_now_{};
  bool is_closing_ = false;
};

template <class Engine>
Pump<Engine>::Pump(Engine& engine, transport::Endpoint& endpoint, PumpOptions options, ReduceFunction reduce,
                   CompleteFunction complete)
    : impl_(std::make_unique<Impl>(engine, endpoint, options, std::move(reduce), std::move(complete))) {}
template <class Engine>
Pump<Engine>::~Pump() = default;
template <class Engine>
bool Pump<Engine>::step(Instant now) {
  return impl_->step(now);
}
template <class Engine>
void Pump<Engine>::flush(Instant now) {
  static_cast<void>(impl_->flush(now));
}
template <class Engine>
Instant Pump<Engine>::next_deadline() const {
  return impl_->next_deadline();
}
template <class Engine>
void Pump<Engine>::forget_peer(PeerId peer) {
  impl_->forget_peer(peer);
}
template <class Engine>
bool Pump<Engine>::has_backlog() const {
  return impl_->has_backlog();
}
template <class Engine>
bool Pump<Engine>::has_unsent() const {
  return impl_->has_unsent();
}
template <class Engine>
bool Pump<Engine>::uses(std::span<const std::byte> memory) const {
  return impl_->uses(memory);
}
template <class Engine>
const PumpStats& Pump<Engine>::stats() const {
  return impl_->stats();
}
template <class Engine>
PumpTraffic Pump<Engine>::traffic(PeerId peer) const {
  return impl_->traffic(peer);
}

template class Pump<worker::Engine>;
template class Pump<server::Engine>;
template class Pump<point_to_point::Link>;

}  // namespace herring::runtime
