#include "transport/sim.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <list>
#include <queue>
#include <random>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace herring::transport {
namespace {

struct Receive {
  std::span<std::byte> first;
  std::span<std::byte> second;
  Token token;
};

struct Node {
  bool open = true;
  bool alive = true;
  double slowness = 1;
  Instant uplink_free{};
  Instant downlink_free{};
  std::unordered_set<std::uint64_t> sends;  // Messages whose send has not completed.
  std::size_t receives = 0;
  std::uint64_t unexpected = 0;
  std::unordered_map<std::uint64_t, std::deque<Receive>> posted;         // By tag.
  std::unordered_map<std::uint64_t, std::uint64_t> tag_of;               // Receive token -> tag.
  std::unordered_map<std::uint64_t, std::deque<std::uint64_t>> waiting;  // Tag -> messages that found no receive.
  std::deque<Completion> completions;
};

struct Message {
  std::uint64_t id = 0;
  std::size_t from = 0;
  std::size_t to = 0;
  Tag tag;
  std::span<const std::byte> first;  // Borrowed until the send completes.
  std::span<const std::byte> second;
  std::vector<std::byte> copy;  // Taken when the send completes early.
  Token token;
  bool sent = false;  // The send has completed: `copy` holds the bytes.
  bool delivered = false;
  std::size_t bytes = 0;
  Instant uplink_done{};
};

enum class EventKind : std::uint8_t { kBuffer, kArrive, kDeliver, kSent, kTakeBack };

struct Event {
  Instant when;
  std::uint64_t order = 0;
  EventKind kind = EventKind::kArrive;
  std::uint64_t message = 0;
  bool operator>(const Event& other) const { return std::tie(when, order) > std::tie(other.when, other.order); }
};

bool overlap(std::span<const std::byte> a, std::span<const std::byte> b) {
  const std::less<> before;
  return !a.empty() && !b.empty() && before(a.data(), b.data() + b.size()) && before(b.data(), a.data() + a.size());
}

Duration transfer_time(std::size_t bytes, double bytes_per_second) {
  if (bytes_per_second <= 0) return Duration::zero();
  return Duration(static_cast<Duration::rep>(static_cast<double>(bytes) / bytes_per_second * 1e9));
}

}  // namespace

class SimNetwork::State {
 public:
  State(std::uint64_t seed, const SimOptions& options) : options_(options), random_(seed) {}

  std::size_t open() {
    nodes_.emplace_back();
    return nodes_.size() - 1;
  }

  void close(std::size_t index) {
    Node& node = nodes_[index];
    node.open = false;
    node.posted.clear();
    node.tag_of.clear();
    node.completions.clear();
    busy_.erase(index);
    // What it was sending is borrowed memory that goes away with its owner.
    for (const std::uint64_t id : std::exchange(node.sends, {})) messages_.erase(id);
  }

  bool takes_sends(std::size_t index) const {
    return nodes_[index].sends.size() < options_.max_sends && !is_full(nodes_[index]);
  }

  Status send(std::size_t from, std::size_t to, Tag tag, std::span<const std::byte> first,
              std::span<const std::byte> second, Token token) {
    Node& node = nodes_[from];
    if (!takes_sends(from) || chance(options_.again_chance)) {
      ++stats_.refused;
      return Status::again();
    }
    const std::uint64_t id = next_message_++;
    node.sends.insert(id);
    Message message;
    message.id = id;
    message.from = from;
    message.to = to;
    message.tag = tag;
    message.first = first;
    message.second = second;
    message.token = token;
    message.bytes = first.size() + second.size();
    const Instant start = std::max(now_, node.uplink_free);
    message.uplink_done = start + transfer_time(message.bytes, options_.uplink_bytes_per_second);
    node.uplink_free = message.uplink_done;
    const Instant arrives = start + delay(from, to);
    if (chance(options_.buffered_chance)) schedule(message.uplink_done, EventKind::kBuffer, id);
    messages_.emplace(id, std::move(message));
    schedule(arrives, EventKind::kArrive, id);
    return Status::ok();
  }

  Status receive(std::size_t index, Tag tag, std::span<std::byte> first, std::span<std::byte> second, Token token) {
    Node& node = nodes_[index];
    if (is_full(node) || chance(options_.again_chance)) {
      ++stats_.refused;
      return Status::again();
    }
    ++node.receives;
    node.posted[tag.value].push_back({first, second, token});
    node.tag_of[token.value] = tag.value;
    const auto held = node.waiting.find(tag.value);
    if (held != node.waiting.end()) {
      const std::uint64_t id = held->second.front();
      held->second.pop_front();
      if (held->second.empty()) node.waiting.erase(held);
      schedule(now_, EventKind::kDeliver, id);
    }
    return Status::ok();
  }

  void cancel(std::size_t index, Token token) {
    if (!chance(options_.slow_cancel_chance)) return take_back(index, token);
    const double share = std::uniform_real_distribution<double>(0, 1)(random_);
    const double nanoseconds = share * static_cast<double>(options_.slow_cancel_delay.count());
    late_cancels_.emplace(next_message_, std::pair{index, token});
    schedule(now_ + Duration(static_cast<Duration::rep>(nanoseconds)), EventKind::kTakeBack, next_message_++);
  }

  /// `is_late`: until now some of a message may have been landing there, and nobody may use the memory for anything
  /// else.
  void take_back(std::size_t index, Token token, bool is_late = false) {
    Node& node = nodes_[index];
    const auto known = node.tag_of.find(token.value);
    if (known == node.tag_of.end()) return;
    const auto queue = node.posted.find(known->second);
    auto& receives = queue->second;
    // Pools are withdrawn in the order opposite to that in which they were posted.
    const auto receive = std::prev(std::find_if(receives.rbegin(), receives.rend(), [token](const Receive& one) {
                                     return one.token == token;
                                   }).base());
    if (is_late) std::fill(receive->second.begin(), receive->second.end(), std::byte{0xC3});
    receives.erase(receive);
    if (receives.empty()) node.posted.erase(queue);
    node.tag_of.erase(known);
    --node.receives;
    complete(index, {token, CompletionKind::kCancelled, 0, {}});
  }

  /// Sends from `index` to `peer` that have not completed complete now.
  void forget(std::size_t index, std::size_t peer, const std::string& why) {
    std::vector<std::uint64_t> ids;
    for (const std::uint64_t id : nodes_[index].sends) {
      if (messages_.at(id).to == peer) ids.push_back(id);
    }
    std::sort(ids.begin(), ids.end());
    for (const std::uint64_t id : ids) {
      finish_send(messages_.at(id), Status(Code::kPeerLost, why));
      drop(id);
    }
  }

  std::size_t poll(std::size_t index, std::span<Completion> out) {
    auto& queue = nodes_[index].completions;
    const std::size_t count = std::min(out.size(), queue.size());
    std::move(queue.begin(), queue.begin() + static_cast<std::ptrdiff_t>(count), out.begin());
    queue.erase(queue.begin(), queue.begin() + static_cast<std::ptrdiff_t>(count));
    if (queue.empty()) busy_.erase(index);
    return count;
  }

  Instant now() const { return now_; }
  Instant next_event() const { return events_.empty() ? Instant::max() : events_.top().when; }

  bool advance() {
    if (events_.empty()) return false;
    now_ = std::max(now_, events_.top().when);
    while (!events_.empty() && events_.top().when <= now_) {
      const Event event = events_.top();
      events_.pop();
      run(event);
    }
    return true;
  }

  void advance_to(Instant when) {
    while (next_event() <= when) advance();
    now_ = std::max(now_, when);
  }

  bool has_completions(std::size_t index) const { return busy_.contains(index); }
  const std::set<std::size_t>& busy() const { return busy_; }

  bool is_borrowed(std::size_t index, std::span<const std::byte> memory) const {
    for (const std::uint64_t id : nodes_[index].sends) {
      const Message& message = messages_.at(id);
      if (overlap(message.first, memory) || overlap(message.second, memory)) return true;
    }
    for (const auto& [tag, receives] : nodes_[index].posted) {
      for (const Receive& receive : receives) {
        if (overlap(receive.first, memory) || overlap(receive.second, memory)) return true;
      }
    }
    return false;
  }

  std::uint64_t unexpected(std::size_t index) const { return nodes_[index].unexpected; }
  std::size_t unmatched(std::size_t index) const {
    std::size_t count = 0;
    for (const auto& [tag, messages] : nodes_[index].waiting) count += messages.size();
    return count;
  }

  std::vector<Posted> posted(std::size_t index) const {
    std::vector<Posted> found;
    for (const auto& [tag, receives] : nodes_[index].posted) {
      for (const Receive& receive : receives) found.push_back({Tag{tag}, receive.first.size() + receive.second.size()});
    }
    std::sort(found.begin(), found.end(), [](const Posted& a, const Posted& b) { return a.tag.value < b.tag.value; });
    return found;
  }

  void set_slowness(std::size_t index, double factor) { nodes_[index].slowness = factor; }
  void kill(std::size_t index) { nodes_[index].alive = false; }

  void partition(std::size_t a, std::size_t b) { cut_.insert(std::minmax(a, b)); }
  void heal(std::size_t a, std::size_t b) {
    if (cut_.erase(std::minmax(a, b)) == 0) return;
    for (const std::uint64_t id : std::exchange(held_, {})) schedule(now_, EventKind::kArrive, id);
  }
  void block(std::size_t from, std::size_t to) { blocked_.emplace(from, to); }
  std::size_t size() const { return nodes_.size(); }
  const SimStats& stats() const { return stats_; }

 private:
  bool is_full(const Node& node) const { return node.sends.size() + node.receives >= options_.max_operations; }

  bool chance(double probability) {
    return probability > 0 && std::uniform_real_distribution<double>(0, 1)(random_) < probability;
  }

  Duration delay(std::size_t from, std::size_t to) {
    const double low = static_cast<double>(options_.min_delay.count());
    const double high = static_cast<double>(std::max(options_.min_delay, options_.max_delay).count());
    double nanoseconds = low + (high - low) * std::uniform_real_distribution<double>(0, 1)(random_);
    nanoseconds *= nodes_[from].slowness * nodes_[to].slowness;
    if (chance(options_.straggler_chance)) nanoseconds *= options_.straggler_factor;
    return Duration(static_cast<Duration::rep>(nanoseconds));
  }

  void schedule(Instant when, EventKind kind, std::uint64_t message) {
    events_.push({when, next_event_++, kind, message});
  }

  void run(const Event& event) {
    if (event.kind == EventKind::kTakeBack) {
      const auto [index, token] = late_cancels_.extract(event.message).mapped();
      if (nodes_[index].open && nodes_[index].alive) take_back(index, token, true);
      return;
    }
    const auto found = messages_.find(event.message);
    if (found == messages_.end()) return;
    Message& message = found->second;
    switch (event.kind) {
      case EventKind::kBuffer:
        if (!message.sent) buffer(message);
        break;
      case EventKind::kArrive:
        arrive(event.message, message);
        break;
      case EventKind::kDeliver:
        deliver(event.message, message);
        break;
      case EventKind::kSent:
        if (!message.sent) finish_send(message, Status::ok());
        drop(event.message);
        break;
      case EventKind::kTakeBack:
        break;
    }
  }

  void buffer(Message& message) {
    if (!nodes_[message.from].alive) return;
    message.copy.resize(message.bytes);
    copy_out(message, message.copy);
    finish_send(message, Status::ok());
  }

  /// The first byte reaches the receiver's link; the last one comes when both links have carried the message.
  void arrive(std::uint64_t id, Message& message) {
    if (blocked_.contains({message.from, message.to})) {
      if (message.sent) drop(id);  // Else it stays, as in a socket that is never acknowledged.
      return;
    }
    if (cut_.contains(std::minmax(message.from, message.to))) {
      held_.push_back(id);
      return;
    }
    Node& node = nodes_[message.to];
    const Instant link_done =
        std::max(now_, node.downlink_free) + transfer_time(message.bytes, options_.downlink_bytes_per_second);
    node.downlink_free = link_done;
    const Instant done = std::max(link_done, message.uplink_done);
    if (done <= now_) {
      deliver(id, message);
    } else {
      schedule(done, EventKind::kDeliver, id);
    }
  }

  void deliver(std::uint64_t id, Message& message) {
    Node& node = nodes_[message.to];
    // A process that is gone sends nothing more; a message to one never completes, until the peer is removed.
    if (!node.alive || !node.open || !nodes_[message.from].alive) return;
    const auto queue = node.posted.find(message.tag.value);
    if (queue == node.posted.end()) {
      if (message.tag != options_.surplus_tag) {
        ++stats_.unexpected;
        ++node.unexpected;
      }
      node.waiting[message.tag.value].push_back(id);
      return;
    }
    const Receive receive = queue->second.front();
    queue->second.pop_front();
    if (queue->second.empty()) node.posted.erase(queue);
    node.tag_of.erase(receive.token.value);
    --node.receives;
    Completion completion{receive.token, CompletionKind::kReceive, message.bytes, {}};
    if (message.bytes > receive.first.size() + receive.second.size()) {
      ++stats_.truncated;
      scatter(message, receive);
      completion.bytes = 0;
      completion.status = Status(Code::kProtocol, "sim: a message of " + std::to_string(message.bytes) +
                                                      " bytes does not fit the posted receive of " +
                                                      std::to_string(receive.first.size() + receive.second.size()));
    } else {
      scatter(message, receive);
      if (message.bytes > 0 && chance(options_.damage_chance)) damage(message.bytes, receive);
      ++stats_.messages;
      stats_.bytes += message.bytes;
    }
    complete(message.to, std::move(completion));
    message.delivered = true;
    if (message.tag == kControlTag && chance(options_.duplicate_chance)) duplicate(message);
    if (message.sent) {
      drop(id);
    } else {
      schedule(now_ + delay(message.to, message.from), EventKind::kSent, id);
    }
  }

  void duplicate(const Message& message) {
    ++stats_.duplicated;
    Message again;
    again.id = next_message_++;
    again.from = message.from;
    again.to = message.to;
    again.tag = message.tag;
    again.bytes = message.bytes;
    again.copy = message.copy;
    if (!message.sent) {
      again.copy.resize(message.bytes);
      copy_out(message, again.copy);
    }
    again.sent = true;
    const std::uint64_t id = again.id;
    messages_.emplace(id, std::move(again));
    schedule(now_ + delay(message.from, message.to), EventKind::kArrive, id);
  }

  static void copy_out(const Message& message, std::span<std::byte> out) {
    if (!message.first.empty()) std::memcpy(out.data(), message.first.data(), message.first.size());
    if (!message.second.empty()) {
      std::memcpy(out.data() + message.first.size(), message.second.data(), message.second.size());
    }
  }

  /// What does not fit is left out.
  static void scatter(const Message& message, const Receive& receive) {
    std::span<const std::byte> pieces[2] = {message.first, message.second};
    if (message.sent) {
      pieces[0] = message.copy;
      pieces[1] = {};
    }
    std::size_t position = 0;
    for (std::span<const std::byte> piece : pieces) {
      while (!piece.empty() && position < receive.first.size() + receive.second.size()) {
        const bool in_first = position < receive.first.size();
        const std::span<std::byte> target =
            in_first ? receive.first.subspan(position) : receive.second.subspan(position - receive.first.size());
        const std::size_t count = std::min(piece.size(), target.size());
        std::memcpy(target.data(), piece.data(), count);
        piece = piece.subspan(count);
        position += count;
      }
    }
  }

  void damage(std::size_t bytes, const Receive& receive) {
    ++stats_.damaged;
    const std::size_t head = std::min(bytes, options_.damage_head_bytes);
    const std::size_t range = head > 0 && chance(0.5) ? head : bytes;
    for (std::uint64_t bits = 1 + random_() % 3; bits > 0; --bits) {
      const std::size_t at = random_() % range;
      const bool in_first = at < receive.first.size();
      std::byte& hit = in_first ? receive.first[at] : receive.second[at - receive.first.size()];
      hit ^= static_cast<std::byte>(1u << (random_() % 8));
    }
  }

  void finish_send(Message& message, Status status) {
    message.sent = true;
    message.first = message.second = {};
    Node& node = nodes_[message.from];
    node.sends.erase(message.id);
    if (node.open) complete(message.from, {message.token, CompletionKind::kSend, message.bytes, std::move(status)});
  }

  void complete(std::size_t index, Completion completion) {
    nodes_[index].completions.push_back(std::move(completion));
    busy_.insert(index);
  }

  void drop(std::uint64_t id) {
    const auto found = messages_.find(id);
    if (found == messages_.end()) return;
    Node& node = nodes_[found->second.to];
    const auto waiting = node.waiting.find(found->second.tag.value);
    if (waiting != node.waiting.end()) {
      std::erase(waiting->second, id);
      if (waiting->second.empty()) node.waiting.erase(waiting);
    }
    messages_.erase(found);
  }

  SimOptions options_;
  std::mt19937_64 random_;
  Instant now_{};
  std::uint64_t next_event_ = 0;
  std::uint64_t next_message_ = 0;
  std::deque<Node> nodes_;
  std::set<std::size_t> busy_;  // Those with completions.
  std::unordered_map<std::uint64_t, Message> messages_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::set<std::pair<std::size_t, std::size_t>> cut_;
  std::set<std::pair<std::size_t, std::size_t>> blocked_;  // From, to.
  std::vector<std::uint64_t> held_;
  std::unordered_map<std::uint64_t, std::pair<std::size_t, Token>> late_cancels_;  // By event.
  SimStats stats_;
};

namespace {

class SimEndpoint final : public Endpoint {
 public:
  explicit SimEndpoint(std::shared_ptr<SimNetwork::State> state) : state_(std::move(state)), index_(state_->open()) {
    const std::uint64_t number = index_;
    address_.resize(sizeof number);
    std::memcpy(address_.data(), &number, sizeof number);
  }
  ~SimEndpoint() override { state_->close(index_); }

  const Address& address() const override { return address_; }
  std::string description() const override { return "sim (endpoint " + std::to_string(index_) + ")"; }

  void add_peer(PeerId peer, std::span<const std::byte> address) override {
    std::uint64_t number = 0;
    if (address.size() != sizeof number) {
      throw Error(Code::kInvalidArgument, "sim: an address has 8 bytes, not " + std::to_string(address.size()));
    }
    std::memcpy(&number, address.data(), sizeof number);
    if (number >= state_->size()) {
      throw Error(Code::kInvalidArgument, "sim: there is no endpoint " + std::to_string(number));
    }
    peers_[peer] = static_cast<std::size_t>(number);
  }

  void remove_peer(PeerId peer) override {
    const auto found = peers_.find(peer);
    if (found == peers_.end()) return;
    state_->forget(index_, found->second, "sim: peer " + std::to_string(peer.value) + " was removed");
    peers_.erase(found);
  }

  Status post_send(PeerId to, Tag tag, std::span<const std::byte> first, std::span<const std::byte> second,
                   Token token) override {
    if (is_shut_) return shut();
    const auto found = peers_.find(to);
    if (found == peers_.end()) {
      return Status(Code::kInvalidArgument,
                    "sim: peer " + std::to_string(to.value) + " is not known; add_peer() first");
    }
    return state_->send(index_, found->second, tag, first, second, token);
  }
  bool takes_sends() const override { return state_->takes_sends(index_); }
  Status post_receive(Tag tag, std::span<std::byte> first, std::span<std::byte> second, Token token) override {
    if (is_shut_) return shut();
    return state_->receive(index_, tag, first, second, token);
  }
  void cancel_receive(Token token) override { state_->cancel(index_, token); }
  std::size_t poll(std::span<Completion> completions) override { return state_->poll(index_, completions); }

  // Time belongs to the network: whoever drives it calls SimNetwork::advance().
  void wait(Instant, std::span<const int>) override {}
  bool prepare_wait(std::vector<int>&, Instant&) override { return !state_->has_completions(index_); }
  void wake() override {}
  void shut_down() override {
    state_->close(index_);
    is_shut_ = true;
  }

 private:
  static Status shut() { return Status(Code::kTransport, "sim: the endpoint is shut down"); }

  std::shared_ptr<SimNetwork::State> state_;
  std::size_t index_;
  Address address_;
  std::unordered_map<PeerId, std::size_t> peers_;
  bool is_shut_ = false;
};

}  // namespace

SimNetwork::SimNetwork(std::uint64_t seed, const SimOptions& options)
    : state_(std::make_shared<State>(seed, options)) {}
SimNetwork::~SimNetwork() = default;
std::unique_ptr<Endpoint> SimNetwork::open_endpoint() { return std::make_unique<SimEndpoint>(state_); }
Instant SimNetwork::now() const { return state_->now(); }
Instant SimNetwork::next_event() const { return state_->next_event(); }
bool SimNetwork::advance() { return state_->advance(); }
void SimNetwork::advance_to(Instant when) { state_->advance_to(when); }
bool SimNetwork::has_completions(std::size_t endpoint) const { return state_->has_completions(endpoint); }
const std::set<std::size_t>& SimNetwork::busy() const { return state_->busy(); }
bool SimNetwork::is_borrowed(std::size_t endpoint, std::span<const std::byte> memory) const {
  return state_->is_borrowed(endpoint, memory);
}
std::uint64_t SimNetwork::unexpected(std::size_t endpoint) const { return state_->unexpected(endpoint); }
std::size_t SimNetwork::unmatched(std::size_t endpoint) const { return state_->unmatched(endpoint); }
std::vector<SimNetwork::Posted> SimNetwork::posted(std::size_t endpoint) const { return state_->posted(endpoint); }
void SimNetwork::set_slowness(std::size_t endpoint, double factor) { state_->set_slowness(endpoint, factor); }
void SimNetwork::kill(std::size_t endpoint) { state_->kill(endpoint); }
void SimNetwork::partition(std::size_t a, std::size_t b) { state_->partition(a, b); }
void SimNetwork::heal(std::size_t a, std::size_t b) { state_->heal(a, b); }
void SimNetwork::block(std::size_t from, std::size_t to) { state_->block(from, to); }
const SimStats& SimNetwork::stats() const { return state_->stats(); }

}  // namespace herring::transport
