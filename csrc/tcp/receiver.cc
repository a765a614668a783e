#include "tcp/receiver.h"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "tcp/text.h"

namespace herring::tcp {

using transport::Completion;
using transport::CompletionKind;

struct StoredMessage {
  Frame frame;
  std::unique_ptr<std::byte[]> data;
  Inflow* from = nullptr;  // Where more of it comes from; null: it is whole.

  TwoSpans<std::byte> memory() { return {{data.get(), frame.bytes}, {}}; }
};

namespace {

constexpr std::size_t kStagingBytes = 64 << 10;
constexpr std::size_t kAheadOfSmall = 16 << 10;  // What is asked for where small messages come ...
constexpr std::size_t kAheadOfLarge = 4 << 10;  // ... and where a large one does, all but this of which lands straight.
constexpr std::size_t kLargeBytes = 64 << 10;   // No larger message is set aside at once.
constexpr std::size_t kTurnBytes = 1 << 20;     // Read from one connection before others have their turn.
constexpr std::size_t kMostWithdrawn = 4096;
// A receive is posted in a moment where its sender was quick; copying it twice costs more than this wait.
constexpr Duration kPausePatience = std::chrono::milliseconds(2);
// The rest of a message that is landing mostly comes at once. After this it is dropped.
constexpr Duration kCancelPatience = std::chrono::milliseconds(100);

bool is_pooled(Tag tag) { return (tag.value >> 63) != 0; }

/// With what keeps it.
std::size_t stored_size(const Frame& frame) { return frame.bytes + 256; }

}  // namespace

Receiver::Receiver(std::deque<Completion>& ready, Stats& stats)
    : ready_(ready), stats_(stats), staging_(kStagingBytes) {}
Receiver::~Receiver() = default;

void Receiver::post(Tag tag, const TwoSpans<std::byte>& memory, Token token) {
  Receive* const receive = table_.add(tag, memory, token);
  if (!withdrawn_.empty()) withdrawn_.erase(tag.value);
  if (const auto kept = stored_.find(tag.value); kept != stored_.end()) {
    const std::unique_ptr<StoredMessage> stored = std::move(kept->second);
    stored_.erase(kept);
    hand_over(*stored, *receive);
    return;
  }
  if (const auto waiting = paused_.find(tag.value); waiting != paused_.end()) {
    Inflow& in = *waiting->second;
    table_.unlink_tag(receive);
    receive->from = &in;
    in.into = receive;
    resume(in);
  }
}

/// What was set aside of a message goes to its receive, and what is still to come.
void Receiver::hand_over(StoredMessage& stored, Receive& receive) {
  table_.unlink_tag(&receive);
  stats_.stored_bytes -= stored_size(stored.frame);
  if (!paused_.empty()) next_tick_ = Instant::min();
  Inflow* const in = stored.from;
  const std::size_t landed = in == nullptr ? stored.frame.bytes : in->landed;
  copy_in(receive.memory, 0, {stored.data.get(), landed});
  if (in == nullptr) {
    Inflow whole;
    whole.frame = stored.frame;
    complete(&receive, whole);
    return;
  }
  receive.from = in;
  in->into = &receive;
  in->stored = nullptr;
}

void Receiver::cancel(Token token, Instant now) {
  Receive* const receive = table_.find(token);
  if (receive == nullptr || receive->is_cancelled) return;
  if (receive->from != nullptr) {
    receive->is_cancelled = true;
    receive->cancel_due = now + kCancelPatience;
    cancelling_.push_back(receive);
    next_tick_ = std::min(next_tick_, receive->cancel_due);
    return;
  }
  table_.unlink_tag(receive);
  remember_withdrawn(receive->tag);
  table_.remove(receive);
  ready_.push_back({token, CompletionKind::kCancelled, 0, {}});
}

void Receiver::remember_withdrawn(Tag tag) {
  if (is_pooled(tag)) return;
  withdrawn_[tag.value] = ++withdrawals_;
  withdrawn_line_.emplace_back(tag.value, withdrawals_);
  if (withdrawn_line_.size() <= kMostWithdrawn) return;
  const auto [oldest, number] = withdrawn_line_.front();
  withdrawn_line_.pop_front();
  const auto found = withdrawn_.find(oldest);
  if (found != withdrawn_.end() && found->second == number) withdrawn_.erase(found);
}

Receiver::Outcome Receiver::read(Inflow& in, std::string& why) {
  constexpr std::string_view kNoFrame = "it sent bytes that are not a Herring message";
  if (in.is_paused) return Outcome::kPaused;
  if (in.is_in_body && in.landed == in.frame.bytes) finish(in);  // An empty one that has found its receive.
  if (!in.held.empty()) {
    const std::vector<std::byte> held = std::exchange(in.held, {});
    if (!feed(in, held)) {
      why = kNoFrame;
      return Outcome::kClosed;
    }
  }
  for (std::size_t taken = 0; taken < kTurnBytes;) {
    if (in.is_paused) return Outcome::kPaused;
    // What has come whole is better summed while it is in the caches than kept waiting for more.
    if (taken >= kLargeBytes && !ready_.empty()) return Outcome::kMore;
    std::array<iovec, 3> parts{};
    std::size_t count = 0;
    if (in.is_in_body && in.into != nullptr) {
      count = in.into->memory.slice(in.landed, in.frame.bytes - in.landed, parts, 0);
    } else if (in.is_in_body && in.stored != nullptr) {
      count = in.stored->memory().slice(in.landed, in.frame.bytes - in.landed, parts, 0);
    }
    std::size_t direct = 0;
    for (std::size_t i = 0; i < count; ++i) direct += parts[i].iov_len;
    const std::size_t ahead = direct > 0      ? kAheadOfLarge
                              : in.is_in_body ? staging_.size()
                              : in.ahead > 0  ? in.ahead
                                              : kAheadOfSmall;
    parts[count++] = {staging_.data(), ahead};
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = count;
    const ssize_t result = recvmsg(in.socket, &message, MSG_DONTWAIT);
    ++stats_.receive_calls;
    if (result < 0 && errno == EINTR) continue;
    if (result < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return Outcome::kDrained;
    if (result <= 0) {
      why = result == 0 ? "closed by the other end" : error_text(errno);
      return Outcome::kClosed;
    }
    const auto got = static_cast<std::size_t>(result);
    const std::size_t landed = std::min(got, direct);
    in.landed += landed;
    if (in.is_in_body && in.landed == in.frame.bytes) finish(in);
    if (!feed(in, std::span(staging_).first(got - landed))) {
      why = kNoFrame;
      return Outcome::kClosed;
    }
    stats_.bytes_received += got;
    taken += got;
    if (got < direct + ahead && !in.is_ending) return in.is_paused ? Outcome::kPaused : Outcome::kDrained;
  }
  return in.is_paused ? Outcome::kPaused : Outcome::kMore;
}

/// Takes bytes of the stream that were read already. False where they are no frame.
bool Receiver::feed(Inflow& in, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    if (in.is_paused) {
      in.held.assign(bytes.begin(), bytes.end());
      return true;
    }
    if (!in.is_in_body) {
      if (!take_head(in, bytes)) return false;
    } else {
      const std::size_t count = std::min<std::size_t>(bytes.size(), in.frame.bytes - in.landed);
      if (in.into != nullptr) copy_in(in.into->memory, in.landed, bytes.first(count));
      if (in.stored != nullptr) copy_in(in.stored->memory(), in.landed, bytes.first(count));
      in.landed += count;
      bytes = bytes.subspan(count);
    }
    if (in.is_in_body && !in.is_paused && in.landed == in.frame.bytes) finish(in);
  }
  return true;
}

bool Receiver::take_head(Inflow& in, std::span<const std::byte>& bytes) {
  const std::size_t count = std::min(bytes.size(), kFrameBytes - in.head_bytes);
  std::memcpy(&in.head[in.head_bytes], bytes.data(), count);
  in.head_bytes += count;
  bytes = bytes.subspan(count);
  if (in.head_bytes < kFrameBytes) return true;
  const std::optional<Frame> frame = decode_frame(in.head);
  if (!frame) return false;
  in.frame = *frame;
  in.head_bytes = 0;
  begin(in);
  return true;
}

void Receiver::begin(Inflow& in) {
  in.is_in_body = true;
  in.landed = 0;
  in.into = table_.take(in.frame.tag);
  if (in.into != nullptr) {
    in.into->from = &in;
  } else if (in.frame.bytes <= kLargeBytes && make_room(stored_size(in.frame))) {
    store(in);
  } else {
    pause(in);
  }
}

void Receiver::finish(Inflow& in) {
  ++stats_.messages_received;
  in.is_in_body = false;
  in.ahead = in.frame.bytes > kLargeBytes ? kAheadOfLarge : kAheadOfSmall;
  if (in.stored != nullptr) std::exchange(in.stored, nullptr)->from = nullptr;
  if (in.into != nullptr) complete(std::exchange(in.into, nullptr), in);
}

/// The whole message is there.
void Receiver::complete(Receive* receive, const Inflow& in) {
  if (receive->is_cancelled) std::erase(cancelling_, receive);
  Completion completion{receive->token, CompletionKind::kReceive, in.frame.bytes, {}};
  if (in.frame.bytes > receive->memory.size()) {
    completion.bytes = 0;
    completion.status =
        Status(Code::kProtocol, "receive of " + std::to_string(receive->memory.size()) + " bytes, tag " +
                                    hex(receive->tag.value) + ": the message is longer (" +
                                    std::to_string(in.frame.bytes) + " bytes)");
  }
  table_.remove(receive);
  ready_.push_back(std::move(completion));
}

/// False where what is set aside leaves no room for so much more, even without what nobody may ever ask for.
bool Receiver::make_room(std::size_t bytes) {
  const auto fits = [&] { return stats_.stored_bytes + bytes <= kMostStored; };
  for (auto kept = stored_.begin(); !fits() && kept != stored_.end();) {
    if (kept->second->from != nullptr || !withdrawn_.contains(kept->first)) {
      ++kept;
      continue;
    }
    stats_.stored_bytes -= stored_size(kept->second->frame);
    kept = stored_.erase(kept);
  }
  return fits();
}

void Receiver::store(Inflow& in) {
  auto stored = std::make_unique<StoredMessage>();
  stored->frame = in.frame;
  stored->data = std::make_unique_for_overwrite<std::byte[]>(in.frame.bytes);
  stored->from = &in;
  in.stored = stored.get();
  ++stats_.stored;
  stats_.stored_bytes += stored_size(in.frame);
  stored_.emplace(in.frame.tag.value, std::move(stored));
}

void Receiver::pause(Inflow& in) {
  ++stats_.paused;
  in.is_paused = true;
  in.paused_since = std::chrono::steady_clock::now();
  paused_.emplace(in.frame.tag.value, &in);
  next_tick_ = std::min(next_tick_, in.paused_since + kPausePatience);
}

void Receiver::resume(Inflow& in) {
  const auto [begin, end] = paused_.equal_range(in.frame.tag.value);
  const auto found = std::find_if(begin, end, [&in](const auto& entry) { return entry.second == &in; });
  if (found != end) paused_.erase(found);
  in.is_paused = false;
  resumed_.push_back(in.owner);
}

void Receiver::release(StoredMessage* stored) {
  const auto [begin, end] = stored_.equal_range(stored->frame.tag.value);
  const auto found = std::find_if(begin, end, [stored](const auto& entry) { return entry.second.get() == stored; });
  stats_.stored_bytes -= stored_size(stored->frame);
  if (found != end) stored_.erase(found);
}

void Receiver::drop(Inflow& in, const std::string& why) {
  if (in.is_paused) resume(in);
  std::erase(resumed_, in.owner);
  if (in.stored != nullptr) release(std::exchange(in.stored, nullptr));
  Receive* const receive = std::exchange(in.into, nullptr);
  in.is_in_body = false;
  if (receive == nullptr) return;
  if (receive->is_cancelled) {
    std::erase(cancelling_, receive);
    ready_.push_back({receive->token, CompletionKind::kCancelled, 0, {}});
  } else {
    ready_.push_back(
        {receive->token, CompletionKind::kReceive, 0,
         Status(Code::kPeerLost, "receive of " + std::to_string(receive->memory.size()) + " bytes, tag " +
                                     hex(receive->tag.value) +
                                     ": the sender's connection broke while the message arrived: " + why)});
  }
  table_.remove(receive);
}

/// True where a paused connection goes on, for its message is set aside after all, or given up.
bool Receiver::may_resume(Inflow& in, Instant now) {
  if (now - in.paused_since < kPausePatience) {
    next_tick_ = std::min(next_tick_, in.paused_since + kPausePatience);
    return false;
  }
  if (make_room(stored_size(in.frame))) {
    store(in);
    return true;
  }
  // There was a receive for it, which was taken back. (Else there will be one: it waits.)
  return withdrawn_.contains(in.frame.tag.value);
}

void Receiver::tick(Instant now) {
  next_tick_ = Instant::max();
  for (auto waiting = paused_.begin(); waiting != paused_.end();) {
    Inflow& in = *waiting->second;
    if (!may_resume(in, now)) {
      ++waiting;
      continue;
    }
    waiting = paused_.erase(waiting);
    in.is_paused = false;
    resumed_.push_back(in.owner);
  }
  std::erase_if(cancelling_, [&](Receive* receive) {
    if (now < receive->cancel_due) {
      next_tick_ = std::min(next_tick_, receive->cancel_due);
      return false;
    }
    receive->from->into = nullptr;  // The rest is dropped.
    ready_.push_back({receive->token, CompletionKind::kCancelled, 0, {}});
    table_.remove(receive);
    return true;
  });
}

}  // namespace herring::tcp
