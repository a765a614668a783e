#include "runtime/pump.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/copy.h"
#include "point_to_point/engine.h"
#include "runtime/post_table.h"
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
        watch_(options_.links.watch, options_.links.peers) {
    for (const PeerId peer : options_.links.peers) peers_[peer].is_linked = true;
    for (std::size_t i = 0; i < options_.control_receives; ++i) unposted_.push_back(add_control(kAnyPeer));
    for (const NearPeer& near : options_.near) {
      for (std::size_t i = 0; i < near.control_receives; ++i) unposted_.push_back(add_control(near.peer));
    }
    post_controls();
  }

  ~Impl() { close(); }

  bool step(Instant now) {
    bool busy = flush(now);
    std::array<transport::Completion, kPollBatch> batch;
    const std::size_t count = endpoint_.poll(batch);
    for (std::size_t i = 0; i < count; ++i) deliver(now, batch[i]);
    if (count > 0) {
      busy = true;
      flush(now);
    }
    if (count < kPollBatch && is_waiting() && watch_.is_due(now)) look(now);
    return busy;
  }

  Instant next_deadline() const {
    return options_.links.watch.patience > Duration::zero() && is_waiting() ? watch_.next_look() : Instant::max();
  }

  void forget_peer(PeerId peer) { watch_.forget(peer); }

  /// True where an action was carried out.
  bool flush(Instant now) {
    last_now_ = now;
    answer_late();
    engine_.take_actions(fresh_);
    for (Action& action : fresh_) backlog_.push_back(std::move(action));
    fresh_.clear();
    post_controls();
    bool any = retry_lines();
    while (!backlog_.empty()) {
      Action& next = backlog_.front();
      if (Line* line = line_of(next); line != nullptr) {
        line->push_back(std::move(next));
      } else if (!carry_out_any(next)) {
        const auto* send = std::get_if<SendAction>(&next);
        if (send == nullptr) break;
        lines_[send->to].push_back(std::move(next));
      } else {
        any = true;
      }
      backlog_.pop_front();
    }
    return any;
  }

  bool uses(std::span<const std::byte> memory) const {
    const std::less<> before;
    return std::any_of(posts_.begin(), posts_.end(), [&](const Post& post) {
      return post.kind != Kind::kFree && !memory.empty() && !post.payload.empty() &&
             before(post.payload.data(), memory.data() + memory.size()) &&
             before(memory.data(), post.payload.data() + post.payload.size());
    });
  }
  bool has_backlog() const {
    return !backlog_.empty() || !lines_.empty() || !unposted_.empty() || !late_answers_.empty();
  }
  bool has_unsent() const { return sends_ > 0 || !backlog_.empty() || !lines_.empty() || !late_answers_.empty(); }
  const PumpStats& stats() const { return stats_; }
  PumpTraffic traffic(PeerId peer) const {
    const auto found = peers_.find(peer);
    return found == peers_.end() ? PumpTraffic{} : found->second.traffic;
  }

 private:
  using Kind = PostKind;
  using Peer = PumpPeer;

  std::size_t add_control(PeerId from) {
    std::size_t index = 0;
    if (spares_.empty()) {
      index = posts_.add(Kind::kControl, true).value();
      ++controls_;
    } else {
      index = spares_.back();
      spares_.pop_back();
    }
    posts_[index].from = from;
    return index;
  }

  void post_controls() {
    while (!unposted_.empty()) {
      const std::size_t index = unposted_.back();
      const Post& post = posts_[index];
      const Status status = endpoint_.post_receive_from(post.from, kControlTag, post.buffer, {}, Token{index});
      if (!status.is_ok()) return;  // Again with the next step; a broken endpoint shows in the engine's deadlines.
      unposted_.pop_back();
      ++posted_controls_;
    }
  }

  bool carry_out_any(Action& action) {
    return std::visit([this](auto& one) { return carry_out(one); }, action);
  }

  using Line = std::deque<Action>;

  /// Where the action has to wait behind others; null where it need not.
  Line* line_of(const Action& action) {
    if (lines_.empty()) return nullptr;
    std::optional<PeerId> peer;
    if (const auto* send = std::get_if<SendAction>(&action)) peer = send->to;
    if (const auto* receive = std::get_if<PostReceiveAction>(&action)) peer = receive->behind;
    const auto found = peer ? lines_.find(*peer) : lines_.end();
    return found == lines_.end() ? nullptr : &found->second;
  }

  /// Where the endpoint is full, nobody else is tried: each message among thousands of lines would cost a try of all.
  /// Peers in this process have a way of their own.
  bool retry_lines() {
    if (lines_.empty()) return false;
    bool any = false;
    for (const NearPeer& near : options_.near) {
      if (auto line = lines_.find(near.peer); line != lines_.end()) any |= retry_line(line);
    }
    for (auto line = lines_.begin(); line != lines_.end() && endpoint_.takes_sends();) any |= retry_line(line);
    return any;
  }

  /// Goes on to the next one.
  bool retry_line(std::map<PeerId, Line>::iterator& line) {
    const std::size_t before = line->second.size();
    while (!line->second.empty() && carry_out_any(line->second.front())) line->second.pop_front();
    const bool any = line->second.size() < before;
    line = line->second.empty() ? lines_.erase(line) : std::next(line);
    return any;
  }

  /// A receive that waits in a line need not be posted any more.
  void drop_from_lines(Token token) {
    for (auto line = lines_.begin(); line != lines_.end(); ++line) {
      const std::size_t count = std::erase_if(line->second, [token](const Action& action) {
        const auto* receive = std::get_if<PostReceiveAction>(&action);
        return receive != nullptr && receive->token == token;
      });
      if (count == 0) continue;
      if (line->second.empty()) lines_.erase(line);
      return;
    }
  }

  bool carry_out(SendAction& action) {
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
    const wire::HeaderBytes header = wire::encode(action.header);
    std::memcpy(post.buffer.data(), header.data(), header.size());
    if (!action.body.empty()) {
      std::memcpy(post.buffer.data() + header.size(), action.body.data(), action.body.size());
    }
    std::span<const std::byte> payload = action.payload;
    if (is_copied) {
      copy_bytes(payload, post.buffer.subspan(head, payload.size()));
      payload = post.buffer.subspan(head, payload.size());
    }
    Status status = action.is_unregistered ? posts_.register_payload(index) : Status::ok();
    if (status.is_ok()) {
      status = endpoint_.post_send(action.to, action.tag, post.buffer.first(head), payload, Token{index});
    }
    if (status.is_ok()) {
      ++stats_.messages_sent;
      Peer& peer = peers_[action.to];
      post.peer = &peer;
      if (peer.sends++ == 0) peer.moved = last_now_;
      ++sends_;
      ++peer.traffic.messages;
      peer.traffic.bytes_sent += action.payload.size();
      return true;
    }
    posts_.free(index);
    if (status.is_again()) return false;
    engine_.on_sent(last_now_, action.token, status);
    return take_fresh();
  }

  /// Needs no registered memory, and takes what is sent where it lies.
  bool is_near(PeerId peer) const {
    return !options_.near.empty() && std::ranges::find(options_.near, peer, &NearPeer::peer) != options_.near.end();
  }

  bool carry_out(PostReceiveAction& action) {
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

  bool carry_out(CancelReceiveAction& action) {
    const auto found = by_token_.find(action.token.value);
    if (found == by_token_.end()) {
      drop_from_lines(action.token);  // Else it came in the meantime.
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
    spares_.push_back(static_cast<std::size_t>(action.token.value));
    return true;
  }

  bool carry_out(CompleteAction& action) {
    complete_(action);
    return true;
  }

  /// What the engine wants after it heard of an action's end, behind what waits already.
  bool take_fresh() {
    engine_.take_actions(fresh_);
    for (Action& action : fresh_) backlog_.push_back(std::move(action));
    fresh_.clear();
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
        engine_.on_sent(now, token, completion.status);
        break;
      }
      case Kind::kPing:
        peers_[posts_[index].to].is_pinged = false;
        posts_.free(index);
        break;
      case Kind::kPong: {
        Peer& peer = peers_[posts_[index].to];
        const PeerId to = posts_[index].to;
        posts_.free(index);
        peer.is_ponged = false;
        if (peer.owes_pong) late_answers_.push_back(to);
        break;
      }
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

  void deliver_receive(Instant now, std::size_t index, const transport::Completion& completion) {
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
      ++stats_.messages_received;
      Peer& peer = peers_[PeerId{header->sender}];
      if (header->job_id == options_.links.job_id) peer.heard = now;
      ++peer.traffic.messages;
      peer.traffic.bytes_received += header->payload_bytes;
      if constexpr (Sums<Engine>) {
        engine_.on_received(now, post.token, Status::ok(), *header, completion.loan);
      } else {
        engine_.on_received(now, post.token, Status::ok(), *header);
      }
      return;
    }
    Status status = completion.status;
    if (status.is_ok()) {
      ++stats_.malformed;
      status =
          Status(Code::kProtocol, std::to_string(completion.bytes) + " bytes arrived that are not a Herring message");
    }
    engine_.on_received(now, post.token, status, {});
  }

  void deliver_control(Instant now, std::size_t index, const transport::Completion& completion) {
    --posted_controls_;
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
        if (header->job_id == options_.links.job_id) {
          peer.heard = now;
          is_taken = take_link_message(peer, *header);
        }
      }
      if (!is_taken && give_control(now, *header, index)) index = add_control(post.from);
    } else {
      ++stats_.malformed;
    }
    unposted_.push_back(index);
    post_controls();
  }

  /// True where the engine keeps the buffer until it releases it.
  bool give_control(Instant now, const wire::Header& header, std::size_t index) {
    const std::span<std::byte> body = posts_[index].buffer.subspan(wire::kHeaderBytes, header.payload_bytes);
    if constexpr (Keeps<Engine>) return engine_.on_control(now, header, body, Token{index});
    if constexpr (!Keeps<Engine>) engine_.on_control(now, header, body);
    return false;
  }

  /// True where it was a Ping or a Pong of one who may send them.
  bool take_link_message(Peer& peer, const wire::Header& header) {
    if (!peer.is_linked) return false;
    if (header.type == wire::MessageType::kPong) return true;
    if (header.type != wire::MessageType::kPing) return false;
    // One at a time: whoever asks faster than answers leave gets fewer.
    if (!std::exchange(peer.owes_pong, true) && !peer.is_ponged) late_answers_.push_back(PeerId{header.sender});
    answer_late();
    return true;
  }

  void answer_late() {
    while (!late_answers_.empty()) {
      Peer& peer = peers_[late_answers_.back()];
      const Status status = post_link_message(late_answers_.back(), Kind::kPong);
      if (status.is_again()) return;  // With the next step.
      peer.owes_pong = false;
      peer.is_ponged = status.is_ok();
      late_answers_.pop_back();
    }
  }

  /// Past the backlog: what waits there says nothing about this peer.
  Status post_link_message(PeerId to, Kind kind) {
    const std::optional<std::size_t> added = posts_.add(kind, false);
    if (!added) return Status::again();
    const std::size_t index = *added;
    posts_[index].to = to;
    wire::Header header;
    header.type = kind == Kind::kPing ? wire::MessageType::kPing : wire::MessageType::kPong;
    header.job_id = options_.links.job_id;
    header.sender = options_.links.self.value;
    const wire::HeaderBytes bytes = wire::encode(header);
    std::memcpy(posts_[index].buffer.data(), bytes.data(), bytes.size());
    Status status = endpoint_.post_send(to, kControlTag, posts_[index].buffer.first(bytes.size()), {}, Token{index});
    if (!status.is_ok()) posts_.free(index);
    return status;
  }

  bool is_waiting() const {
    if constexpr (Waits<Engine>) return engine_.is_waiting();
    return false;
  }

  void look(Instant now) {
    std::vector<PeerId> awaited;
    if constexpr (Waits<Engine>) engine_.add_awaited(awaited);
    const std::vector<PeerId> questions = watch_.look(now, awaited, [this](PeerId peer) { return peers_[peer].heard; });
    for (const PeerId to : questions) {
      Peer& peer = peers_[to];
      const Status status = peer.is_pinged ? Status::ok() : post_link_message(to, Kind::kPing);
      peer.is_pinged = status.is_ok();  // Else the endpoint cannot reach it at all, which is an answer too.
      // Where it is this peer that lets nothing out, waiting for room tells as much as a question.
      const bool is_stuck = peer.sends > 0 && now - peer.moved >= options_.links.watch.patience / 2;
      if (!status.is_again() || is_stuck) watch_.asked(now, to);
    }
    const Unreachable unreachable = watch_.take_unreachable();
    if (!unreachable.peers.empty()) options_.links.on_unreachable(unreachable);
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
      --posted_controls_;
    } else if (posts_[index].kind != Kind::kFree) {
      posts_.free(index);
    }
  }

  std::size_t in_transport() const { return posted_controls_ + (posts_.in_use() - controls_); }

  Engine& engine_;
  transport::Endpoint& endpoint_;
  PumpOptions options_;
  ReduceFunction reduce_;
  CompleteFunction complete_;
  PostTable posts_;
  std::vector<std::size_t> unposted_;  // Control receives that wait for room.
  std::vector<std::size_t> spares_;    // That the engine has kept and released.
  std::size_t controls_ = 0;           // Of the pool, posted or not, the kept and the spare ones included.
  std::size_t posted_controls_ = 0;
  std::size_t sends_ = 0;                                    // Of the engine's, in the transport.
  std::unordered_map<std::uint64_t, std::size_t> by_token_;  // The engine's token of a posted receive -> post.
  std::deque<Action> backlog_;
  std::map<PeerId, Line> lines_;  // What waits for room at one peer, and what has to follow it. No empty ones.
  Actions fresh_;
  std::unordered_map<PeerId, Peer> peers_;
  LinkWatch watch_;
  std::vector<PeerId> late_answers_;  // To whom a Pong is owed and may go.
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
