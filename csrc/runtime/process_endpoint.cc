#include "runtime/process_endpoint.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <optional>
#include <utility>

#include "core/copy.h"
#include "core/relax.h"
#include "core/status.h"
#include "runtime/poll.h"

namespace herring::runtime {
namespace {

/// Copies as much of the two spans `from`, read as one, as fits the two spans `to`.
void copy_across(std::array<std::span<const std::byte>, 2> from, std::array<std::span<std::byte>, 2> to) {
  for (std::size_t source = 0, target = 0; source < from.size() && target < to.size();) {
    const std::size_t bytes = std::min(from[source].size(), to[target].size());
    copy_bytes(from[source].first(bytes), to[target].first(bytes));
    from[source] = from[source].subspan(bytes);
    to[target] = to[target].subspan(bytes);
    if (from[source].empty()) ++source;
    if (target < to.size() && to[target].empty()) ++target;
  }
}

}  // namespace

/// A send whose memory the receiver reads. Whoever moves it out of kOffered has it: the receiver to copy, or the
/// sender to take it back. Where it is lent, the receiver moves it back and forth.
struct ProcessEndpoint::Offer {
  enum class State : std::uint8_t { kOffered, kCopying, kOver };

  std::atomic<State> state{State::kOffered};
  PeerId to;
  Token token;
  std::span<const std::byte> first;
  std::span<const std::byte> second;
  std::shared_ptr<Inbox> sender;

  bool claim(State next) {
    State expected = State::kOffered;
    return state.compare_exchange_strong(expected, next);
  }
};

/// What comes to an endpoint: a message, or the end of one of its own sends.
struct ProcessEndpoint::Message {
  Tag tag;
  std::vector<std::byte> inside;  // All of a small one.
  std::shared_ptr<Offer> offer;   // Of a large one: where it lies.
  std::shared_ptr<Offer> sent;    // Instead: this send is over ...
  Status status;                  // ... like this.

  std::size_t bytes() const { return offer ? offer->first.size() + offer->second.size() : inside.size(); }
};

class ProcessEndpoint::Inbox {
 public:
  Inbox() : wake_fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (wake_fd_ < 0) throw Error(Code::kTransport, std::string("eventfd: ") + std::strerror(errno));
  }
  ~Inbox() { close(wake_fd_); }
  Inbox(const Inbox&) = delete;
  Inbox& operator=(const Inbox&) = delete;

  /// Any thread. False where its endpoint is gone: nothing was taken.
  bool put(Message&& message) {
    {
      const std::scoped_lock lock(mutex_);
      if (is_closed_) return false;
      messages_.push_back(std::move(message));
      has_messages_.store(true);
    }
    if (is_asleep_.exchange(false)) ring();
    return true;
  }

  void take(std::vector<Message>& out) {
    if (!has_messages_.load()) return;
    const std::scoped_lock lock(mutex_);
    out.swap(messages_);
    has_messages_.store(false);
  }

  std::vector<Message> end() {
    const std::scoped_lock lock(mutex_);
    is_closed_ = true;
    return std::exchange(messages_, {});
  }

  void ring() const {
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(wake_fd_, &one, sizeof(one));
  }

  /// Says so before it looks: whoever puts something in afterwards rings.
  bool fall_asleep() {
    is_asleep_.store(true);
    if (!has_messages_.load()) return true;
    is_asleep_.store(false);
    return false;
  }

  bool may_be_asleep() const { return is_asleep_.load(std::memory_order_relaxed) || was_watched_; }
  void watch() { was_watched_ = true; }
  void end_sleep() {
    is_asleep_.store(false);
    was_watched_ = false;
    std::uint64_t count = 0;
    [[maybe_unused]] const ssize_t drained = read(wake_fd_, &count, sizeof(count));
  }

  int descriptor() const { return wake_fd_; }

 private:
  const int wake_fd_;
  std::atomic<bool> has_messages_{false};
  std::atomic<bool> is_asleep_{false};
  bool was_watched_ = false;  // Only the endpoint's own thread: its descriptor may have been rung since.
  std::mutex mutex_;
  std::vector<Message> messages_;  // guarded by mutex_
  bool is_closed_ = false;         // guarded by mutex_
};

/// An offer that the receiver keeps: what follows its first span.
class ProcessEndpoint::OfferLoan final : public Loan {
 public:
  explicit OfferLoan(std::shared_ptr<Offer> offer) : offer_(std::move(offer)) {}
  ~OfferLoan() override {
    if (!offer_->claim(Offer::State::kOver)) return;  // It was taken back.
    Message answer;
    answer.sent = offer_;
    offer_->sender->put(std::move(answer));
  }

  /// What is lent is the sender's to change, and it says who else may.
  std::span<std::byte> memory() const override {
    return {const_cast<std::byte*>(offer_->second.data()), offer_->second.size()};
  }
  bool begin() override { return offer_->claim(Offer::State::kCopying); }
  void end() override { offer_->state.store(Offer::State::kOffered); }

 private:
  const std::shared_ptr<Offer> offer_;
};

ProcessEndpoint::ProcessEndpoint() : inbox_(std::make_shared<Inbox>()), address_(1) {}

ProcessEndpoint::~ProcessEndpoint() { shut_down(); }

void ProcessEndpoint::shut_down() {
  // Nobody reads the memory of our sends any more; who sent to us hears that it was in vain.
  for (auto& [token, offer] : offers_) withdraw(*offer);
  offers_.clear();
  peers_.clear();
  std::vector<Message> left = inbox_->end();
  for (auto& [tag, messages] : unexpected_) std::move(messages.begin(), messages.end(), std::back_inserter(left));
  for (Message& message : left) {
    if (!message.offer || !message.offer->claim(Offer::State::kOver)) continue;
    Message answer;
    answer.sent = message.offer;
    answer.status = Status(Code::kPeerLost, "the peer in this process has closed its endpoint");
    message.offer->sender->put(std::move(answer));
  }
  unexpected_.clear();
  posted_.clear();
  tag_of_.clear();
  ready_.clear();
  is_shut_ = true;
}

void ProcessEndpoint::introduce(ProcessEndpoint& one, PeerId one_id, ProcessEndpoint& other, PeerId other_id) {
  one.peers_[other_id] = other.inbox_;
  other.peers_[one_id] = one.inbox_;
}

void ProcessEndpoint::add_peer(PeerId peer, std::span<const std::byte>) {
  throw Error(Code::kInvalidArgument, "peer " + std::to_string(peer.value) + " is not in this process");
}

void ProcessEndpoint::withdraw(Offer& offer) {
  if (offer.claim(Offer::State::kOver)) return;
  while (offer.state.load() == Offer::State::kCopying) relax();  // As long as a copy takes.
}

void ProcessEndpoint::remove_peer(PeerId peer) {
  if (peers_.erase(peer) == 0) return;
  for (auto it = offers_.begin(); it != offers_.end();) {
    if (it->second->to != peer) {
      ++it;
      continue;
    }
    withdraw(*it->second);
    ready_.push_back({it->second->token, transport::CompletionKind::kSend, 0,
                      Status(Code::kPeerLost, "peer " + std::to_string(peer.value) + " was removed")});
    it = offers_.erase(it);
  }
}

Status ProcessEndpoint::post_send(PeerId to, Tag tag, std::span<const std::byte> first,
                                  std::span<const std::byte> second, Token token) {
  if (is_shut_) return Status(Code::kShutdown, "post_send: the endpoint was shut down");
  const auto found = peers_.find(to);
  if (found == peers_.end()) {
    return Status(Code::kInvalidArgument, "post_send: peer " + std::to_string(to.value) + " is not in this process");
  }
  if (offers_.size() >= kMaxSends) return Status::again();
  Message message;
  message.tag = tag;
  const bool is_small = first.size() + second.size() <= kMaxInlineBytes;
  if (is_small) {
    message.inside.reserve(first.size() + second.size());
    message.inside.assign(first.begin(), first.end());
    message.inside.insert(message.inside.end(), second.begin(), second.end());
  } else {
    message.offer = std::make_shared<Offer>();
    message.offer->to = to;
    message.offer->token = token;
    message.offer->first = first;
    message.offer->second = second;
    message.offer->sender = inbox_;
    offers_.emplace(token.value, message.offer);
  }
  if (found->second->put(std::move(message))) {
    if (is_small) ready_.push_back({token, transport::CompletionKind::kSend, 0, {}});
    return Status::ok();
  }
  offers_.erase(token.value);
  ready_.push_back({token, transport::CompletionKind::kSend, 0,
                    Status(Code::kPeerLost, "the peer in this process has closed its endpoint")});
  return Status::ok();
}

Status ProcessEndpoint::post_receive(Tag tag, std::span<std::byte> first, std::span<std::byte> second, Token token) {
  return post(tag, {first, second, token});
}

Status ProcessEndpoint::post_loan_receive(PeerId, Tag tag, std::span<std::byte> first, Token token) {
  return post(tag, {first, {}, token, true});
}

Status ProcessEndpoint::post(Tag tag, const Receive& receive) {
  if (is_shut_) return Status(Code::kShutdown, "post_receive: the endpoint was shut down");
  while (std::optional<Message> message = take_unexpected(tag)) {
    if (message->offer && !message->offer->claim(Offer::State::kCopying)) continue;  // Its sender has taken it back.
    fill(receive, *message);
    return Status::ok();
  }
  posted_[tag.value].push_back(receive);
  tag_of_.emplace(receive.token.value, tag.value);
  return Status::ok();
}

std::optional<ProcessEndpoint::Message> ProcessEndpoint::take_unexpected(Tag tag) {
  const auto found = unexpected_.find(tag.value);
  if (found == unexpected_.end()) return std::nullopt;
  Message message = std::move(found->second.front());
  found->second.pop_front();
  if (found->second.empty()) unexpected_.erase(found);
  return message;
}

void ProcessEndpoint::cancel_receive(Token token) {
  const auto found = tag_of_.find(token.value);
  if (found == tag_of_.end()) return;
  const auto at = posted_.find(found->second);
  std::erase_if(at->second, [token](const Receive& receive) { return receive.token == token; });
  if (at->second.empty()) posted_.erase(at);
  tag_of_.erase(found);
  ready_.push_back({token, transport::CompletionKind::kCancelled, 0, {}});
}

void ProcessEndpoint::take(Message& message) {
  if (message.sent) {
    // Not where it was taken back meanwhile: its token may be another send's by now.
    const auto sent = offers_.find(message.sent->token.value);
    if (sent == offers_.end() || sent->second != message.sent) return;
    offers_.erase(sent);
    ready_.push_back({message.sent->token, transport::CompletionKind::kSend, 0, message.status});
    return;
  }
  const auto found = posted_.find(message.tag.value);
  if (found == posted_.end()) {
    unexpected_[message.tag.value].push_back(std::move(message));
    return;
  }
  if (message.offer && !message.offer->claim(Offer::State::kCopying)) return;  // Its sender has taken it back.
  const Receive receive = found->second.front();
  found->second.pop_front();
  if (found->second.empty()) posted_.erase(found);
  tag_of_.erase(receive.token.value);
  fill(receive, message);
}

/// The offer, where there is one, is ours.
void ProcessEndpoint::fill(const Receive& receive, Message& message) {
  if (receive.is_loan && message.offer && message.offer->first.size() == receive.first.size()) {
    return lend(receive, message);
  }
  const std::size_t room = receive.first.size() + receive.second.size();
  Offer* const offer = message.offer.get();
  if (offer != nullptr) {
    copy_across({offer->first, offer->second}, {receive.first, receive.second});
  } else {
    copy_across({message.inside, {}}, {receive.first, receive.second});
  }
  Status status;
  if (message.bytes() > room) {
    status = Status(Code::kTransport, "a message of " + std::to_string(message.bytes()) + " bytes for a receive of " +
                                          std::to_string(room));
  }
  ready_.push_back({receive.token, transport::CompletionKind::kReceive, std::min(message.bytes(), room), status});
  if (offer == nullptr) return;
  offer->state.store(Offer::State::kOver);
  Message answer;
  answer.sent = message.offer;
  offer->sender->put(std::move(answer));
}

void ProcessEndpoint::lend(const Receive& receive, Message& message) {
  copy_across({message.offer->first, {}}, {receive.first, {}});
  message.offer->state.store(Offer::State::kOffered);
  ready_.push_back({receive.token,
                    transport::CompletionKind::kReceive,
                    message.bytes(),
                    {},
                    std::make_shared<OfferLoan>(message.offer)});
}

std::size_t ProcessEndpoint::poll(std::span<transport::Completion> completions) {
  end_sleep();
  fresh_.clear();
  inbox_->take(fresh_);
  for (Message& message : fresh_) take(message);
  fresh_.clear();
  const std::size_t count = std::min(ready_.size(), completions.size());
  for (std::size_t i = 0; i < count; ++i) {
    completions[i] = std::move(ready_.front());
    ready_.pop_front();
  }
  return count;
}

void ProcessEndpoint::end_sleep() {
  if (inbox_->may_be_asleep()) inbox_->end_sleep();
}

void ProcessEndpoint::wait(Instant deadline, std::span<const int> also) {
  std::vector<int> descriptors(also.begin(), also.end());
  if (!prepare_wait(descriptors, deadline)) return;
  poll_until(deadline, descriptors);
  end_sleep();
}

bool ProcessEndpoint::prepare_wait(std::vector<int>& descriptors, Instant&) {
  if (!ready_.empty() || !inbox_->fall_asleep()) return false;
  inbox_->watch();
  descriptors.push_back(inbox_->descriptor());
  return true;
}

void ProcessEndpoint::wake() { inbox_->ring(); }

}  // namespace herring::runtime
