#include "point_to_point/engine.h"

#include <algorithm>
#include <limits>

#include "point_to_point/engine_impl.h"
#include "point_to_point/message.h"
#include "wire/reason.h"

namespace herring::point_to_point {

Engine::Engine(EngineConfig config) : impl_(std::make_unique<Impl>(std::move(config))) {}
Engine::~Engine() = default;

void Engine::send(Instant now, const SendOperation& operation) { impl_->send(now, operation); }
void Engine::receive(Instant now, const ReceiveOperation& operation) { impl_->receive(now, operation); }
void Engine::cancel_unmatched_receives(const Status& why) { impl_->cancel_unmatched_receives(why); }
void Engine::cancel_unmatched_receives(const Status& why, GroupId group) {
  impl_->cancel_unmatched_receives(why, group);
}
void Engine::cancel(Instant now, GroupId group, std::uint64_t tag, const Status& why) {
  impl_->cancel(now, group, tag, why);
}
void Engine::close_group(Instant now, GroupId group, const Status& why) { impl_->close_group(now, group, why); }
void Engine::on_peer_lost(Instant now, PeerId peer, const std::string& why) { impl_->on_peer_lost(now, peer, why); }
void Engine::on_peer_left(Instant now, PeerId peer, const std::string& why) { impl_->on_peer_left(now, peer, why); }
void Engine::on_member_left(Instant now, GroupId group, PeerId peer, const std::string& why) {
  impl_->on_member_left(now, group, peer, why);
}
void Engine::on_tick(Instant now) { impl_->on_tick(now); }
Instant Engine::next_deadline() const { return impl_->next_deadline(); }
void Engine::take_completions(std::vector<Completion>& out) { impl_->take_completions(out); }
Link& Engine::link(std::uint32_t index) { return impl_->link(index); }
void Engine::take_actions(Actions& out) { impl_->take_own_actions(out); }
void Engine::on_copied(Token token) { impl_->on_copied(token); }
bool Engine::has_unsent() const { return impl_->has_unsent(); }
bool Engine::is_idle() const { return impl_->is_idle(); }
const EngineStats& Engine::stats() const { return impl_->stats(); }

bool Link::on_control(Instant now, const wire::Header& header, std::span<const std::byte> body, Token token) {
  return engine_->on_control(now, index_, header, body, token);
}
void Link::on_copied(Instant /*now*/, Token token) { engine_->on_copied(token); }
void Link::on_received(Instant now, Token token, const Status& status, const wire::Header& header) {
  engine_->on_received(now, token, status, header);
}
void Link::on_sent(Instant now, Token token, const Status& status) { engine_->on_sent(now, token, status); }
void Link::on_withdrawn(Instant /*now*/, Token token) { engine_->on_withdrawn(token); }
void Link::take_actions(Actions& out) { engine_->take_actions(index_, out); }
bool Link::is_waiting() const { return engine_->is_waiting(); }
void Link::add_awaited(std::vector<PeerId>& workers) const { engine_->add_awaited(index_, workers); }

std::size_t max_body_bytes(const LinkConfig& link) {
  return std::max<std::size_t>(kEnvelopeBytes + link.eager_bytes, 1 + wire::kMaxReasonText);
}

Engine::Impl::Impl(EngineConfig config) : config_(std::move(config)), actions_(config_.links.size()) {
  const auto refuse = [](const std::string& what) { throw Error(Code::kInvalidArgument, "point to point: " + what); };
  if (config_.self.value >= config_.link_of.size()) refuse("this worker is none of the peers");
  for (const LinkConfig& link : config_.links) {
    if (link.chunk_bytes == 0 || link.window == 0 || link.credits < 2)
      refuse("a link without chunks, window or credits");
  }
  peers_.resize(config_.link_of.size());
  for (std::uint32_t i = 0; i < peers_.size(); ++i) {
    const std::uint32_t link = config_.link_of[i];
    peers_[i].id = PeerId{i};
    peers_[i].link = link;
    if (link == kNoLink) continue;
    if (link >= config_.links.size()) refuse("peer " + std::to_string(i) + " has link " + std::to_string(link));
    peers_[i].credits = config_.links[link].credits;
  }
  for (std::uint32_t i = 0; i < config_.links.size(); ++i) links_.emplace_back(*this, i);
}

Status Engine::Impl::check(const SendOperation& operation) const {
  if (operation.to.value >= peers_.size()) {
    return Status(Code::kInvalidArgument, "send to " + rank_text(operation.to) + ": the job has ranks 0 to " +
                                              std::to_string(peers_.size() - 1));
  }
  if (operation.to == config_.self) return Status::ok();
  const Peer& peer = peer_of(operation.to);
  if (peer.is_gone()) return Status(Code::kPeerLost, peer.why);
  if (peer.link == kNoLink) {
    return Status(Code::kUnavailable, rank_text(operation.to) + " cannot be reached from " + rank_text(config_.self) +
                                          ": no shared memory with it, and no network endpoint");
  }
  const std::uint64_t chunks = operation.data.size() / link_config(peer).chunk_bytes;
  if (chunks >= std::numeric_limits<std::uint32_t>::max()) {
    return Status(Code::kInvalidArgument, "send of " + std::to_string(operation.data.size()) +
                                              " bytes: too many chunks; raise HERRING_CHUNK_BYTES");
  }
  return Status::ok();
}

Status Engine::Impl::check(const ReceiveOperation& operation) const {
  if (operation.sources.empty()) return Status(Code::kInvalidArgument, "receive from nobody");
  for (const PeerId source : operation.sources) {
    if (source.value >= peers_.size()) {
      return Status(Code::kInvalidArgument, "receive from " + rank_text(source) + ": the job has ranks 0 to " +
                                                std::to_string(peers_.size() - 1));
    }
  }
  return Status::ok();
}

void Engine::Impl::send(Instant now, const SendOperation& operation) {
  const Status status = check(operation);
  if (!status.is_ok()) {
    ++stats_.failed;
    completions_.push_back({operation.handle, status, {}});
    return;
  }
  auto owned = std::make_unique<Send>();
  Send& send = *owned;
  send.id = next_id_++;
  send.operation = operation;
  sends_.emplace(send.id, std::move(owned));
  set_timer(send, now + operation.timeout);
  if (operation.to == config_.self) {
    Envelope envelope;
    envelope.source = config_.self;
    envelope.send_id = send.id;
    envelope.group = operation.group;
    envelope.tag = operation.tag;
    envelope.bytes = operation.data.size();
    envelope.dtype = operation.dtype ? static_cast<std::uint32_t>(*operation.dtype) : 0;
    arrive(std::move(envelope));
    return;
  }
  Peer& peer = peer_of(operation.to);
  const std::uint64_t chunk_bytes = link_config(peer).chunk_bytes;
  send.chunks = static_cast<std::uint32_t>((operation.data.size() + chunk_bytes - 1) / chunk_bytes);
  send.is_queued = true;
  peer.queue.push_back({{}, {}, send.id});
  add_unsent(peer);
  dispatch(peer);
}

void Engine::Impl::receive(Instant now, const ReceiveOperation& operation) {
  const Status status = check(operation);
  if (!status.is_ok()) {
    ++stats_.failed;
    completions_.push_back({operation.handle, status, {}});
    return;
  }
  auto owned = std::make_unique<Receive>();
  Receive& receive = *owned;
  receive.id = next_id_++;
  receive.operation = operation;
  receives_.emplace(receive.id, std::move(owned));
  if (const std::uint64_t arrival = find_envelope(receive); arrival != 0) {
    const Envelope envelope = take_unmatched(operation.group, arrival);
    set_timer(receive, now + operation.timeout);
    if (!meet(receive, envelope) && !envelope.data.empty()) release(envelope.source, envelope.body);
    return;
  }
  if (all_gone(operation.sources)) {
    complete(receive, gone_status(operation.sources));
    return;
  }
  set_timer(receive, now + operation.timeout);
  post(receive);
}

void Engine::Impl::set_timer(Send& send, Instant when) {
  if (send.timer != Instant::max()) timers_.erase({send.timer, Kind::kSend, send.id});
  send.timer = when;
  if (when != Instant::max()) timers_.emplace(when, Kind::kSend, send.id);
}

void Engine::Impl::set_timer(Receive& receive, Instant when) {
  if (receive.timer != Instant::max()) timers_.erase({receive.timer, Kind::kReceive, receive.id});
  receive.timer = when;
  if (when != Instant::max()) timers_.emplace(when, Kind::kReceive, receive.id);
}

/// The one place where a send ends.
void Engine::Impl::complete_if_over(Send& send) {
  if (!send.is_over || send.flying > 0) return;
  if (send.failure.is_ok()) {
    ++stats_.sent;
    stats_.bytes_sent += send.operation.data.size();
  } else {
    ++stats_.failed;
  }
  completions_.push_back({send.operation.handle, send.failure, {}});
  set_timer(send, Instant::max());
  sends_.erase(send.id);
}

/// The one place where a receive ends. It is in no box and has no posts.
void Engine::Impl::complete(Receive& receive, const Status& status) {
  if (status.is_ok()) {
    ++stats_.received;
    stats_.bytes_received += receive.met.bytes;
  } else {
    ++stats_.failed;
  }
  completions_.push_back({receive.operation.handle, status, receive.met});
  set_timer(receive, Instant::max());
  receives_.erase(receive.id);
}

void Engine::Impl::take_completions(std::vector<Completion>& out) {
  out.insert(out.end(), std::make_move_iterator(completions_.begin()), std::make_move_iterator(completions_.end()));
  completions_.clear();
}

namespace {

void move_all(Actions& from, Actions& to) {
  to.insert(to.end(), std::make_move_iterator(from.begin()), std::make_move_iterator(from.end()));
  from.clear();
}

}  // namespace

void Engine::Impl::take_actions(std::uint32_t link, Actions& out) { move_all(actions_[link], out); }
void Engine::Impl::take_own_actions(Actions& out) { move_all(own_actions_, out); }

void Engine::Impl::add_awaited(std::uint32_t link, std::vector<PeerId>& workers) const {
  const auto add = [&](PeerId worker) {
    if (peer_of(worker).link == link && !peer_of(worker).is_gone()) workers.push_back(worker);
  };
  for (const auto& [id, send] : sends_) add(send->operation.to);
  for (const auto& [id, receive] : receives_) {
    if (receive->is_matched) {
      add(receive->met.source);
    } else {
      // Any of them may be the one whose message does not get through.
      for (const PeerId source : receive->operation.sources) add(source);
    }
  }
}

bool Engine::Impl::has_unsent() const { return unsent_ > 0 || !copies_.empty(); }

bool Engine::Impl::is_idle() const {
  return sends_.empty() && receives_.empty() && boxes_.empty() && flights_.empty() && !has_unsent() &&
         completions_.empty();
}

Send* Engine::Impl::find_send(std::uint64_t id) {
  const auto found = sends_.find(id);
  return found == sends_.end() ? nullptr : found->second.get();
}

Receive* Engine::Impl::find_receive(std::uint64_t id) {
  const auto found = receives_.find(id);
  return found == receives_.end() ? nullptr : found->second.get();
}

}  // namespace herring::point_to_point
