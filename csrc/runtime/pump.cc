#include "runtime/pump.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <deque>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/copy.h"
#include "point_to_point/engine.h"
#include "runtime/buffer_pool.h"
#include "server/engine.h"
#include "worker/engine.h"

namespace herring::runtime {
namespace {

/// Header and an Announce; every send but an error text fits.
constexpr std::size_t kSmallBytes = 256;
constexpr std::size_t kSmallPerSlab = 64;
constexpr std::size_t kPollBatch = 64;
static_assert(wire::kHeaderBytes + wire::kAnnounceBytes <= kSmallBytes);

}  // namespace

template <class Engine>
class Pump<Engine>::Impl {
 public:
  Impl(Engine& engine, transport::Endpoint& endpoint, PumpOptions options, ReduceFunction reduce,
       CompleteFunction complete)
      : engine_(engine),
        endpoint_(endpoint),
        options_(options),
        reduce_(std::move(reduce)),
        complete_(std::move(complete)),
        small_(endpoint, kSmallBytes, kSmallPerSlab),
        large_(endpoint, wire::kHeaderBytes + std::max(options.max_body_bytes, kSmallBytes),
               std::clamp<std::size_t>(options.control_receives, 1, 64)) {
    for (std::size_t i = 0; i < options_.control_receives; ++i) unposted_.push_back(add_control());
    post_controls();
  }

  ~Impl() { close(); }

  bool step(Instant now) {
    bool busy = flush();
    std::array<transport::Completion, kPollBatch> batch;
    const std::size_t count = endpoint_.poll(batch);
    for (std::size_t i = 0; i < count; ++i) deliver(now, batch[i]);
    if (count > 0) {
      busy = true;
      flush();
    }
    return busy;
  }

  /// True where an action was carried out.
  bool flush() {
    engine_.take_actions(fresh_);
    for (Action& action : fresh_) backlog_.push_back(std::move(action));
    fresh_.clear();
    post_controls();
    bool any = false;
    while (!backlog_.empty()) {
      // A receive that was withdrawn is not over until the transport says so.
      if (cancels_pending_ > 0 && !std::holds_alternative<CancelReceiveAction>(backlog_.front())) break;
      if (!std::visit([this](auto& action) { return this->carry_out(action); }, backlog_.front())) break;
      backlog_.pop_front();
      any = true;
    }
    return any;
  }

  bool has_backlog() const { return !backlog_.empty() || !unposted_.empty(); }
  const PumpStats& stats() const { return stats_; }
  PumpTraffic traffic(PeerId peer) const {
    const auto found = traffic_.find(peer);
    return found == traffic_.end() ? PumpTraffic{} : found->second;
  }

 private:
  enum class Kind : std::uint8_t { kFree, kSend, kReceive, kControl };

  /// One post and the buffer that its header lives in until the transport is done with it.
  struct Post {
    Kind kind = Kind::kFree;
    bool is_large = false;
    bool is_withdrawn = false;
    std::span<std::byte> buffer;
    Token token;  // The engine's.
    PeerId to;    // Of a send.
  };

  std::size_t add_post(Kind kind, bool is_large) {
    std::size_t index = posts_.size();
    if (free_posts_.empty()) {
      posts_.emplace_back();
    } else {
      index = free_posts_.back();
      free_posts_.pop_back();
    }
    Post& post = posts_[index];
    post.kind = kind;
    post.is_large = is_large;
    post.is_withdrawn = false;
    post.buffer = is_large ? large_.take() : small_.take();
    return index;
  }

  void free_post(std::size_t index) {
    Post& post = posts_[index];
    (post.is_large ? large_ : small_).give_back(post.buffer);
    post.kind = Kind::kFree;
    free_posts_.push_back(index);
  }

  std::size_t add_control() { return add_post(Kind::kControl, true); }

  void post_controls() {
    while (!unposted_.empty()) {
      const std::size_t index = unposted_.back();
      const Status status = endpoint_.post_receive(kControlTag, posts_[index].buffer, {}, Token{index});
      if (!status.is_ok()) return;  // Again with the next step; a broken endpoint shows in the engine's deadlines.
      unposted_.pop_back();
      ++posted_controls_;
    }
  }

  bool carry_out(SendAction& action) {
    const std::size_t head = wire::kHeaderBytes + action.body.size();
    const bool is_large = head > kSmallBytes;
    if (head > wire::kHeaderBytes + std::max(options_.max_body_bytes, kSmallBytes)) {
      engine_.on_sent(last_now_, action.token,
                      Status(Code::kInternal, "a message body of " + std::to_string(action.body.size()) +
                                                  " bytes; the limit is " + std::to_string(options_.max_body_bytes)));
      return take_fresh();
    }
    const std::size_t index = add_post(Kind::kSend, is_large);
    Post& post = posts_[index];
    post.token = action.token;
    post.to = action.to;
    const wire::HeaderBytes header = wire::encode(action.header);
    std::memcpy(post.buffer.data(), header.data(), header.size());
    if (!action.body.empty()) {
      std::memcpy(post.buffer.data() + header.size(), action.body.data(), action.body.size());
    }
    const Status status =
        endpoint_.post_send(action.to, action.tag, post.buffer.first(head), action.payload, Token{index});
    if (status.is_ok()) {
      ++stats_.messages_sent;
      PumpTraffic& traffic = traffic_[action.to];
      ++traffic.messages;
      traffic.bytes_sent += action.payload.size();
      return true;
    }
    free_post(index);
    if (status.is_again()) return false;
    engine_.on_sent(last_now_, action.token, status);
    return take_fresh();
  }

  bool carry_out(PostReceiveAction& action) {
    const std::size_t index = add_post(Kind::kReceive, false);
    Post& post = posts_[index];
    post.token = action.token;
    const Status status =
        endpoint_.post_receive(action.tag, post.buffer.first(wire::kHeaderBytes), action.payload, Token{index});
    if (status.is_ok()) {
      by_token_.emplace(action.token.value, index);
      return true;
    }
    free_post(index);
    if (status.is_again()) return false;
    engine_.on_received(last_now_, action.token, status, {});
    return take_fresh();
  }

  bool carry_out(CancelReceiveAction& action) {
    const auto found = by_token_.find(action.token.value);
    if (found == by_token_.end()) return true;  // It came in the meantime.
    posts_[found->second].is_withdrawn = true;
    ++cancels_pending_;
    endpoint_.cancel_receive(Token{found->second});
    return true;
  }

  bool carry_out(ReduceAction& action) {
    reduce_(action);
    return true;
  }

  bool carry_out(CopyAction& action) {
    copy_bytes(action.from, action.to);
    return true;
  }

  bool carry_out(CompleteAction& action) {
    complete_(action);
    return true;
  }

  /// What the engine wants after it heard of a failed post, behind what waits already.
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
        free_post(index);
        engine_.on_sent(now, token, completion.status);
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
    free_post(index);
    if (post.is_withdrawn) {
      --cancels_pending_;
      return;
    }
    if (header && completion.bytes == wire::kHeaderBytes + header->payload_bytes) {
      ++stats_.messages_received;
      PumpTraffic& traffic = traffic_[PeerId{header->sender}];
      ++traffic.messages;
      traffic.bytes_received += header->payload_bytes;
      engine_.on_received(now, post.token, Status::ok(), *header);
      return;
    }
    Status status = completion.status;
    if (status.is_ok()) {
      ++stats_.malformed;
      status = Status(Code::kProtocol, std::to_string(completion.bytes) + " bytes arrived that are no Herring message");
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
      if (const auto known = traffic_.find(PeerId{header->sender}); known != traffic_.end()) {
        ++known->second.messages;
        if (header->type == wire::MessageType::kAnnounce && header->payload_bytes > wire::kAnnounceBytes) {
          known->second.bytes_received += header->payload_bytes - wire::kAnnounceBytes;
        }
      }
      engine_.on_control(now, *header,
                         std::span<const std::byte>(post.buffer).subspan(wire::kHeaderBytes, header->payload_bytes));
    } else {
      ++stats_.malformed;
    }
    unposted_.push_back(index);
    post_controls();
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
      if (post.kind == Kind::kSend) endpoint_.remove_peer(post.to);
    }
    wait_until_free();
    if (in_transport() == 0) return;
    small_.abandon();
    large_.abandon();
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
      free_post(index);
    }
  }

  std::size_t in_transport() const {
    return posted_controls_ + (posts_.size() - free_posts_.size() - options_.control_receives);
  }

  Engine& engine_;
  transport::Endpoint& endpoint_;
  PumpOptions options_;
  ReduceFunction reduce_;
  CompleteFunction complete_;
  BufferPool small_;
  BufferPool large_;
  std::deque<Post> posts_;  // A post's index is its token at the transport.
  std::vector<std::size_t> free_posts_;
  std::vector<std::size_t> unposted_;  // Control receives that wait for room.
  std::size_t posted_controls_ = 0;
  std::unordered_map<std::uint64_t, std::size_t> by_token_;  // The engine's token of a posted receive -> post.
  std::size_t cancels_pending_ = 0;
  std::deque<Action> backlog_;
  Actions fresh_;
  std::unordered_map<PeerId, PumpTraffic> traffic_;
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
void Pump<Engine>::flush() {
  static_cast<void>(impl_->flush());
}
template <class Engine>
bool Pump<Engine>::has_backlog() const {
  return impl_->has_backlog();
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
