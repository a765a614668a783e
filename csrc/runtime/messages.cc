#include "runtime/messages.h"

#include <algorithm>
#include <array>
#include <utility>

#include "core/copy.h"
#include "core/status.h"
#include "runtime/budget.h"
#include "runtime/durations.h"

namespace herring::runtime {
namespace {

// Memory for messages that have not been received grows with the number of workers; past this total each gets less.
constexpr std::uint64_t kMaxNetworkBytes = 64u << 20;
constexpr std::uint32_t kMaxCredits = 16;
constexpr std::uint32_t kMinCredits = 4;
// Pieces of this size stay in the cache between the sender's copy and the receiver's.
constexpr std::uint32_t kLocalChunkBytes = 256 << 10;
constexpr std::uint32_t kLocalWindow = 8;
constexpr std::uint32_t kMostEagerBytes = 16 << 10;
// Control messages that need no credit: two returns of credits, a Ping and a Pong.
constexpr std::uint32_t kUncredited = 4;
// Ranks that call a collective alike are seldom further apart, and those that wait for each other in vain learn soon.
constexpr std::chrono::seconds kDeclareAfter{2};

std::uint64_t pool_receives(const point_to_point::LinkConfig& link, std::uint64_t peers) {
  return peers * (link.credits + kUncredited);
}

std::uint64_t link_memory(const point_to_point::LinkConfig& link, std::uint64_t peers) {
  // The engine keeps bodies that came out of order, or before their receive; the pool has others in their place.
  const std::uint64_t kept = peers * (std::uint64_t{link.credits} + link.eager_window);
  return (pool_receives(link, peers) + kept) * (wire::kHeaderBytes + point_to_point::max_body_bytes(link));
}

/// What sends and receives have in common.
template <class Message>
PendingMessage either_way(const Message& message) {
  PendingMessage pending;
  pending.group = message.group;
  pending.tag = message.tag;
  pending.dtype = message.dtype;
  pending.collective = message.collective;
  return pending;
}

}  // namespace

point_to_point::LinkConfig local_link(const Config& config, std::size_t max_ring_message_bytes) {
  constexpr std::size_t kOverhead = 256;  // Heads of the ring, the header and the envelope.
  const std::size_t room = max_ring_message_bytes - std::min(max_ring_message_bytes, kOverhead);
  point_to_point::LinkConfig link;
  link.chunk_bytes = kLocalChunkBytes;
  link.window = kLocalWindow;
  link.eager_bytes = static_cast<std::uint32_t>(
      std::min<std::size_t>({config.eager_bytes, kMostEagerBytes, LocalEndpoint::kMaxInlineBytes - kOverhead, room}));
  link.credits = kMaxCredits;
  link.eager_window = kMaxCredits / 2;
  return link;
}

point_to_point::LinkConfig network_link(const Config& config, std::uint32_t workers) {
  const std::uint64_t share = kMaxNetworkBytes / (2 * std::max(workers, 1u));
  point_to_point::LinkConfig link;
  link.chunk_bytes = config.chunk_bytes;
  link.window = std::max(config.window, 1u);
  link.eager_bytes =
      static_cast<std::uint32_t>(std::min<std::uint64_t>({config.eager_bytes, kMostEagerBytes, share / kMinCredits}));
  const std::uint64_t unit = wire::kHeaderBytes + point_to_point::max_body_bytes(link);
  link.credits = static_cast<std::uint32_t>(
      std::clamp<std::uint64_t>(share / unit, kMinCredits, std::min(kMaxCredits, most_message_credits(workers))));
  link.eager_window = link.credits / 2;
  return link;
}

PendingMessage pending_message(const Send& message) {
  PendingMessage pending = either_way(message);
  pending.is_send = true;
  pending.data = message.data;
  return pending;
}

PendingMessage pending_message(const Receive& message) {
  PendingMessage pending = either_way(message);
  pending.memory = message.memory;
  return pending;
}

std::uint64_t message_memory_bound(const Config& config, const Placement& placement, std::uint32_t rank) {
  const bool shares = placement.host_first && config.intra_node != Switch::kOff;
  const std::uint64_t near = shares ? placement.neighbours(rank).size() : 0;
  return link_memory(network_link(config, placement.workers), placement.workers - near) +
         link_memory(local_link(config, LocalEndpoint::kMaxInlineBytes), near);
}

Messages::Messages(MessagesOptions options)
    : options_(std::move(options)), engine_([this] {
        const Placement& placement = *options_.placement;
        if (options_.neighborhood) {
          neighbours_ = placement.neighbours(options_.rank);
          local_link_ = static_cast<std::uint32_t>(links_.size());
          links_.push_back(local_link(options_.config, options_.neighborhood->max_message_bytes()));
        }
        if (options_.endpoint) {
          network_link_ = static_cast<std::uint32_t>(links_.size());
          links_.push_back(network_link(options_.config, placement.workers));
        }
        return engine_config();
      }()) {
  const auto neighbours = static_cast<std::uint32_t>(neighbours_.size());
  if (local_link_) {
    const auto self = std::find(neighbours_.begin(), neighbours_.end(), options_.rank);
    local_ =
        std::make_unique<LocalEndpoint>(*options_.neighborhood, static_cast<std::uint32_t>(self - neighbours_.begin()));
    for (std::uint32_t i = 0; i < neighbours; ++i) local_->add_neighbour(PeerId{neighbours_[i]}, i);
    add_pump(*local_link_, *local_, neighbours);
  }
  if (network_link_) add_pump(*network_link_, *options_.endpoint, options_.placement->workers - neighbours);
}

Messages::~Messages() = default;

point_to_point::EngineConfig Messages::engine_config() const {
  const Placement& placement = *options_.placement;
  point_to_point::EngineConfig config;
  config.self = PeerId{options_.rank};
  config.job_id = options_.job_id;
  config.links = links_;
  for (std::uint32_t worker = 0; worker < placement.workers; ++worker) {
    const bool near = std::find(neighbours_.begin(), neighbours_.end(), worker) != neighbours_.end();
    const std::optional<std::uint32_t> link = near ? local_link_ : network_link_;
    config.link_of.push_back(worker == options_.rank ? point_to_point::kNoLink
                                                     : link.value_or(point_to_point::kNoLink));
  }
  config.grace = dead_after(options_.config);
  return config;
}

void Messages::add_pump(std::uint32_t link, transport::Endpoint& endpoint, std::uint32_t peers) {
  PumpOptions options{pool_receives(links_[link], peers), point_to_point::max_body_bytes(links_[link])};
  if (link == network_link_) options.links = network_links();
  pumps_.push_back(
      std::make_unique<LinkPump>(engine_.link(link), endpoint, options, no_reduction, [](const CompleteAction&) {}));
}

/// Memory of this host cannot be half open.
PumpLinks Messages::network_links() const {
  PumpLinks links;
  links.self = PeerId{options_.rank};
  links.job_id = options_.job_id;
  links.watch.patience = dead_after(options_.config);
  links.on_unreachable = options_.on_unreachable;
  for (std::uint32_t worker = 0; worker < options_.placement->workers; ++worker) {
    const bool near = std::find(neighbours_.begin(), neighbours_.end(), worker) != neighbours_.end();
    if (!near && worker != options_.rank) links.peers.push_back(PeerId{worker});
  }
  return links;
}

Instant Messages::next_deadline() const {
  Instant next = std::min(engine_.next_deadline(), next_look_);
  for (const auto& pump : pumps_) next = std::min(next, pump->next_deadline());
  return next;
}

void Messages::submit(Instant now, const PendingMessage& message) {
  const std::uint64_t handle = next_handle_++;
  Waiting waiting{message.work, message.route, {}, Overdue(message.deadline), message.group, {}};
  const std::span<std::byte> memory =
      message.is_send ? std::span(const_cast<std::byte*>(message.data.data()), message.data.size()) : message.memory;
  memory::Domain* const domain = options_.endpoint ? options_.endpoint->memory() : nullptr;
  if (domain != nullptr && memory.size() > links_[*network_link_].eager_bytes) {
    try {
      waiting.hold = domain->hold(memory);
    } catch (const Error& error) {
      return refuse(now, handle, message, error.status());
    }
  }
  if (message.collective) {
    waiting.collective = message.collective->number;
    join_collective(now, message);
  }
  waiting_.emplace(handle, std::move(waiting));
  start(now, handle, message, {});
}

void Messages::start(Instant now, std::uint64_t handle, const PendingMessage& message, const Status& refusal) {
  const Duration timeout = std::max(message.deadline - now, Duration{1});
  if (message.is_send) {
    engine_.send(now, {handle, message.group, PeerId{*message.peer}, message.tag.value_or(0), message.data, timeout,
                       message.dtype, refusal});
  } else {
    point_to_point::ReceiveOperation operation{handle,  message.group, {},     message.tag, message.memory,
                                               timeout, message.dtype, refusal};
    if (message.peer) {
      operation.sources = {PeerId{*message.peer}};
    } else {
      for (const std::uint32_t rank : message.route->ranks) operation.sources.push_back(PeerId{rank});
    }
    engine_.receive(now, operation);
  }
  flush(now);
}

/// What the card does not take fails here at once, and at the other side as soon as it meets its counterpart there.
void Messages::refuse(Instant now, std::uint64_t handle, const PendingMessage& message, const Status& why) {
  const Status status(why.code(), (message.is_send ? "send of " : "receive of ") +
                                      std::to_string(message.is_send ? message.data.size() : message.memory.size()) +
                                      " bytes: rank " + std::to_string(options_.rank) +
                                      " could not register its memory with the network: " + why.message());
  message.work->complete(status);
  options_.on_complete(false);
  start(now, handle, message, status);
}

/// Messages of this worker to itself.
void Messages::copy_own() {
  Actions actions;
  engine_.take_actions(actions);
  for (const Action& action : actions) {
    const auto& copy = std::get<CopyAction>(action);
    copy_bytes(copy.from, copy.to);
    engine_.on_copied(*copy.token);
  }
}

void Messages::flush(Instant now) {
  copy_own();
  for (const auto& pump : pumps_) pump->flush(now);
  if (options_.neighborhood) options_.neighborhood->flush();
  finish_completed();
}

void Messages::deliver(std::uint32_t local_rank, std::span<const std::byte> bytes) {
  local_->deliver(local_rank, bytes);
}

bool Messages::step(Instant now) {
  bool busy = false;
  for (const auto& pump : pumps_) busy |= pump->step(now);
  // What came on one link may have something to say on another.
  if (busy && pumps_.size() > 1) {
    for (const auto& pump : pumps_) pump->flush(now);
  }
  if (busy && options_.neighborhood) options_.neighborhood->flush();
  return finish_completed() || busy;
}

bool Messages::finish_completed() {
  std::vector<point_to_point::Completion> completions;
  engine_.take_completions(completions);
  if (!completions.empty()) options_.before_complete();
  for (const point_to_point::Completion& completion : completions) {
    const auto found = waiting_.find(completion.handle);
    if (found == waiting_.end()) continue;
    Waiting waiting = std::move(found->second);
    waiting_.erase(found);
    waiting.hold.reset();  // The memory is the caller's again at once.
    const auto& ranks = waiting.route->ranks;
    const auto source = std::find(ranks.begin(), ranks.end(), completion.received.source.value);
    waiting.work->complete(completion.status, {static_cast<std::uint32_t>(source - ranks.begin()),
                                               completion.received.tag, completion.received.bytes});
    options_.on_complete(completion.status.is_ok());
    if (waiting.collective) leave_collective({waiting.group, *waiting.collective, 0});
  }
  return !completions.empty();
}

void Messages::join_collective(Instant now, const PendingMessage& message) {
  const Instant declare_at = now + kDeclareAfter;
  const auto [place, is_new] = collectives_.try_emplace(OpKey{message.group, message.collective->number, 0});
  if (!is_new) return;
  place->second = {message.collective,           message.owner,    message.tag.value_or(0),
                   message.collective->messages, message.deadline, declare_at};
  next_look_ = std::min(next_look_, declare_at);
}

void Messages::leave_collective(const OpKey& key) {
  const auto found = collectives_.find(key);
  if (found == collectives_.end() || --found->second.left > 0) return;
  collectives_.erase(found);
  options_.on_collective_end(key);
}

void Messages::look_for_long_waits(Instant now) {
  if (now < next_look_) return;
  next_look_ = Instant::max();
  std::vector<OpKey> idle;
  for (auto& [key, waiting] : collectives_) {
    if (waiting.declare_at > now) {
      next_look_ = std::min(next_look_, waiting.declare_at);
      continue;
    }
    if (waiting.declare_at == Instant::min()) continue;
    waiting.declare_at = Instant::min();
    // One whose other messages were refused may have ended with those that were not.
    const bool waits = std::ranges::any_of(waiting_, [&key](const auto& entry) {
      return entry.second.group == key.group && entry.second.collective == key.op;
    });
    if (waits) {
      options_.on_long_wait(waiting);
    } else {
      idle.push_back(key);
    }
  }
  for (const OpKey& key : idle) collectives_.erase(key);
}

void Messages::end_collective(Instant now, const OpKey& key, const Status& why) {
  const auto found = collectives_.find(key);
  if (found == collectives_.end()) return;
  engine_.cancel(now, key.group, found->second.tag, why);
  flush(now);
}

void Messages::end_collectives_from(Instant now, GroupId group, std::uint64_t number, const Status& why) {
  std::vector<OpKey> keys;
  for (const auto& [key, waiting] : collectives_) {
    if (key.group == group && key.op >= number) keys.push_back(key);
  }
  for (const OpKey& key : keys) end_collective(now, key, why);
}

void Messages::tick(Instant now) {
  look_for_long_waits(now);
  if (now < engine_.next_deadline()) return;  // The pumps look after theirs.
  engine_.on_tick(now);
  flush(now);
}

bool Messages::prepare_wait(std::vector<int>& descriptors, Instant& deadline) {
  return !options_.endpoint || options_.endpoint->prepare_wait(descriptors, deadline);
}

void Messages::worker_left(Instant now, std::uint32_t rank, const std::string& why, bool is_gone) {
  engine_.on_peer_left(now, PeerId{rank}, why);
  if (is_gone && local_) local_->peer_left(PeerId{rank});
  flush(now);
}

void Messages::member_left(Instant now, GroupId group, std::uint32_t rank, const std::string& why) {
  engine_.on_member_left(now, group, PeerId{rank}, why);
  flush(now);
}

void Messages::close_group(Instant now, GroupId group, const Status& why) {
  engine_.close_group(now, group, why);
  flush(now);
}

bool Messages::has_pending(GroupId group) const {
  return std::any_of(waiting_.begin(), waiting_.end(),
                     [group](const auto& entry) { return entry.second.group == group; });
}

void Messages::cancel_unmatched_receives(Instant now, const Status& why) {
  engine_.cancel_unmatched_receives(why);
  flush(now);
}

void Messages::cancel_unmatched_receives(Instant now, const Status& why, GroupId group) {
  engine_.cancel_unmatched_receives(why, group);
  flush(now);
}

bool Messages::is_stuck(Instant now, Duration patience) {
  bool any = false;
  for (auto& [handle, waiting] : waiting_) any |= waiting.overdue.look(now, patience);
  return any;
}

std::size_t Messages::fail_all(const Status& why) {
  // Nothing may touch the callers' memory once their operations have failed. Pumps poll as they go: registrations
  // follow.
  pumps_.clear();
  local_.reset();
  if (options_.endpoint) options_.endpoint->shut_down();
  options_.endpoint.reset();
  for (auto& [handle, waiting] : waiting_) waiting.hold.reset();
  for (auto& [handle, waiting] : waiting_) waiting.work->complete(why);
  return std::exchange(waiting_, {}).size();
}

}  // namespace herring::runtime
