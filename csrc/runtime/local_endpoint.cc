#include "runtime/local_endpoint.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <ctime>

#include "core/copy.h"
#include "core/status.h"
#include "runtime/poll.h"

namespace herring::runtime {
namespace {

enum class Kind : std::uint8_t { kMessage = 1, kAnswer = 2 };

}  // namespace

/// In front of every message in a ring, in native byte order: one machine. Then the bytes that are inside.
struct LocalEndpoint::Head {
  std::uint8_t channel = std::to_integer<std::uint8_t>(kLocalEndpointChannel);
  std::uint8_t kind = 0;
  std::uint16_t zero = 0;
  std::uint32_t inside = 0;  // Bytes of the message that follow here; they come first.
  std::uint64_t tag = 0;
  std::uint64_t id = 0;      // Message: to be answered, or 0: nothing is lent. Answer: the message's.
  std::uint64_t offset = 0;  // The other bytes of the message, in the sender's arena.
  std::uint64_t lent = 0;    // So many.
};

LocalEndpoint::LocalEndpoint(intra_node::Neighborhood& neighborhood, std::uint32_t local_rank)
    : neighborhood_(neighborhood),
      local_rank_(local_rank),
      max_inline_(std::min(kMaxInlineBytes, neighborhood.max_message_bytes() - sizeof(Head))) {
  for (int shift = 0; shift < 32; shift += 8) address_.push_back(static_cast<std::byte>(local_rank >> shift));
}

LocalEndpoint::~LocalEndpoint() {
  // Whoever still reads a copy keeps the mapping; it may read what is put there next, which concerns nobody any more.
  for (const auto& [id, lent] : lent_) {
    if (!lent.staging.empty()) neighborhood_.deallocate(lent.staging);
  }
}

void LocalEndpoint::shut_down() {
  is_shut_ = true;
  posted_.clear();
  tag_of_.clear();
  for (auto& [id, peer] : peers_) {
    peer.waiting.clear();
    peer.answers.clear();
  }
  waiting_ = 0;
  ready_.clear();
}

void LocalEndpoint::add_peer(PeerId peer, std::span<const std::byte> address) {
  if (address.size() != address_.size()) {
    throw Error(Code::kInvalidArgument, "shared memory: peer " + std::to_string(peer.value) + " has an address of " +
                                            std::to_string(address.size()) + " bytes");
  }
  std::uint32_t local_rank = 0;
  for (std::size_t i = 0; i < address.size(); ++i) local_rank |= std::to_integer<std::uint32_t>(address[i]) << (8 * i);
  add_neighbour(peer, local_rank);
}

void LocalEndpoint::add_neighbour(PeerId peer, std::uint32_t local_rank) {
  peers_[peer].local_rank = local_rank;
  peer_at_[local_rank] = peer;
}

void LocalEndpoint::remove_peer(PeerId id) {
  const auto found = peers_.find(id);
  if (found == peers_.end()) return;
  const std::uint32_t local_rank = found->second.local_rank;
  const Status why(Code::kPeerLost, "peer " + std::to_string(id.value) + " was removed");
  for (const Send& send : found->second.waiting) complete_send(send.token, why);
  waiting_ -= found->second.waiting.size() + found->second.answers.size();
  peers_.erase(found);
  peer_at_.erase(local_rank);
  // It may still read what was lent to it: copies stay where they are until it answers.
  for (auto& [number, lent] : lent_) {
    if (lent.to == local_rank && lent.token) complete_send(*std::exchange(lent.token, std::nullopt), why);
  }
}

bool LocalEndpoint::owes_answers() const {
  return waiting_ > 0 && std::ranges::any_of(peers_, [](const auto& entry) { return !entry.second.answers.empty(); });
}

void LocalEndpoint::peer_left(PeerId id) {
  const auto found = peers_.find(id);
  if (found == peers_.end()) return;
  found->second.has_left = true;
  waiting_ -= found->second.answers.size();
  found->second.answers.clear();
}

void LocalEndpoint::complete_send(Token token, Status status) {
  ready_.push_back({token, transport::CompletionKind::kSend, 0, std::move(status)});
}

Status LocalEndpoint::post_send(PeerId to, Tag tag, std::span<const std::byte> first, std::span<const std::byte> second,
                                Token token) {
  if (is_shut_) return Status(Code::kTransport, "shared memory: the endpoint is shut down");
  const auto found = peers_.find(to);
  if (found == peers_.end()) {
    return Status(Code::kInvalidArgument,
                  "post_send: peer " + std::to_string(to.value) + " is not known; add_peer() first");
  }
  Peer& peer = found->second;
  const Send send{tag, first, second, token};
  if (peer.local_rank == local_rank_) {
    send_to_self(send);
    return Status::ok();
  }
  if (peer.waiting.empty() && try_send(peer, send)) return Status::ok();
  if (peer.waiting.size() >= kMaxWaitingPerPeer) return Status::again();
  peer.waiting.push_back(send);
  ++waiting_;
  return Status::ok();
}

/// False where there is no room; else the send is on its way or has failed.
bool LocalEndpoint::try_send(Peer& peer, const Send& send) {
  return send.first.size() + send.second.size() <= max_inline_ ? send_inline(peer, send) : send_lent(peer, send);
}

/// False where the ring is full.
bool LocalEndpoint::push(const Peer& peer, const Head& head, std::span<const std::byte> first,
                         std::span<const std::byte> second, Status& status) {
  scratch_.resize(sizeof(Head) + first.size());
  std::memcpy(scratch_.data(), &head, sizeof(Head));
  if (!first.empty()) std::memcpy(scratch_.data() + sizeof(Head), first.data(), first.size());
  status = neighborhood_.send(peer.local_rank, scratch_, second);
  return !status.is_again();
}

bool LocalEndpoint::send_inline(Peer& peer, const Send& send) {
  Head head;
  head.kind = static_cast<std::uint8_t>(Kind::kMessage);
  head.inside = static_cast<std::uint32_t>(send.first.size() + send.second.size());
  head.tag = send.tag.value;
  Status status;
  if (!push(peer, head, send.first, send.second, status)) return false;
  complete_send(send.token, status);
  return true;
}

bool LocalEndpoint::send_lent(Peer& peer, const Send& send) {
  const bool first_inside = send.first.size() <= max_inline_;
  const std::span<const std::byte> inside = first_inside ? send.first : std::span<const std::byte>{};
  const bool in_place = first_inside && neighborhood_.contains(send.second);
  const std::size_t copied = send.second.size() + (first_inside ? 0 : send.first.size());
  Head head;
  head.kind = static_cast<std::uint8_t>(Kind::kMessage);
  head.inside = static_cast<std::uint32_t>(inside.size());
  head.tag = send.tag.value;
  head.id = next_id_;
  head.lent = copied;
  Lent lent{peer.local_rank, send.token, {}};
  if (in_place) {
    head.offset = neighborhood_.offset_of(send.second);
  } else {
    if (staged_bytes_ > 0 && staged_bytes_ + copied > kMaxStagedBytes) return false;
    lent.staging = neighborhood_.allocate(copied);
    if (lent.staging.empty()) {
      if (staged_bytes_ > 0) return false;
      complete_send(send.token, Status(Code::kUnavailable, "no " + std::to_string(copied) +
                                                               " bytes of shared memory are free to send from; raise "
                                                               "HERRING_ARENA_BYTES"));
      return true;
    }
    const std::size_t before = first_inside ? 0 : send.first.size();
    if (before > 0) copy_bytes(send.first, lent.staging.first(before));
    if (!send.second.empty()) copy_bytes(send.second, lent.staging.subspan(before));
    head.offset = neighborhood_.offset_of(lent.staging);
  }
  Status status;
  if (!push(peer, head, inside, {}, status) || !status.is_ok()) {
    if (!lent.staging.empty()) neighborhood_.deallocate(lent.staging);
    if (status.is_again()) return false;
    complete_send(send.token, status);
    return true;
  }
  ++next_id_;
  staged_bytes_ += lent.staging.size();
  ++(in_place ? stats_.in_place : stats_.copies_in);
  if (!in_place) complete_send(*std::exchange(lent.token, std::nullopt));
  lent_.emplace(head.id, lent);
  neighborhood_.flush();  // The other side copies this one while we copy the next.
  return true;
}

void LocalEndpoint::send_to_self(const Send& send) {
  if (const std::optional<Receive> receive = take_receive(send.tag.value)) {
    fill(*receive, send.first, send.second);
  } else {
    const auto self = peer_at_.at(local_rank_);
    Unexpected message{self, {send.first.begin(), send.first.end()}, {}, 0};
    message.inside.insert(message.inside.end(), send.second.begin(), send.second.end());
    keep(self, send.tag.value, std::move(message));
  }
  complete_send(send.token);
}

Status LocalEndpoint::post_receive(Tag tag, std::span<std::byte> first, std::span<std::byte> second, Token token) {
  if (is_shut_) return Status(Code::kTransport, "shared memory: the endpoint is shut down");
  const Receive receive{first, second, token};
  const auto found = unexpected_.find(tag.value);
  if (found == unexpected_.end()) {
    posted_[tag.value].push_back(receive);
    tag_of_.emplace(token.value, tag.value);
    return Status::ok();
  }
  const Unexpected message = std::move(found->second.front());
  found->second.pop_front();
  if (found->second.empty()) unexpected_.erase(found);
  fill(receive, message.inside, message.lent);
  const auto peer = peers_.find(message.from);
  if (peer != peers_.end()) {
    peer->second.unexpected_bytes -= message.inside.size() + sizeof(Unexpected);
    if (message.id != 0) answer(peer->second, message.id);
  }
  return Status::ok();
}

void LocalEndpoint::cancel_receive(Token token) {
  const auto found = tag_of_.find(token.value);
  if (found == tag_of_.end()) return;
  const auto posted = posted_.find(found->second);
  std::erase_if(posted->second, [token](const Receive& receive) { return receive.token == token; });
  if (posted->second.empty()) posted_.erase(posted);
  tag_of_.erase(found);
  ready_.push_back({token, transport::CompletionKind::kCancelled, 0, {}});
}

std::optional<LocalEndpoint::Receive> LocalEndpoint::take_receive(std::uint64_t tag) {
  const auto found = posted_.find(tag);
  if (found == posted_.end()) return std::nullopt;
  const Receive receive = found->second.front();
  found->second.pop_front();
  if (found->second.empty()) posted_.erase(found);
  tag_of_.erase(receive.token.value);
  return receive;
}

/// inside + lent -> first + second, at any split.
void LocalEndpoint::fill(const Receive& receive, std::span<const std::byte> inside, std::span<const std::byte> lent) {
  const std::size_t bytes = inside.size() + lent.size();
  const std::size_t room = receive.first.size() + receive.second.size();
  Status status;
  if (bytes > room) {
    status = Status(Code::kProtocol, "receive of " + std::to_string(room) + " bytes: the message is longer (" +
                                         std::to_string(bytes) + " bytes)");
  } else {
    std::array<std::span<std::byte>, 2> targets = {receive.first, receive.second};
    std::size_t at = 0;
    for (std::span<const std::byte> source : {inside, lent}) {
      while (!source.empty()) {
        if (targets[at].empty()) ++at;
        const std::size_t count = std::min(source.size(), targets[at].size());
        copy_bytes(source.first(count), targets[at].first(count));
        source = source.subspan(count);
        targets[at] = targets[at].subspan(count);
      }
    }
  }
  ready_.push_back({receive.token, transport::CompletionKind::kReceive, bytes, std::move(status)});
}

void LocalEndpoint::deliver(std::uint32_t from, std::span<const std::byte> bytes) {
  Head head;
  const bool is_whole = bytes.size() >= sizeof(Head);
  if (is_whole) std::memcpy(&head, bytes.data(), sizeof(Head));
  const std::span<const std::byte> inside = is_whole ? bytes.subspan(sizeof(Head)) : bytes;
  if (is_whole && head.kind == static_cast<std::uint8_t>(Kind::kAnswer)) return take_answer(from, head.id);
  const auto peer = peer_at_.find(from);
  const bool is_message = is_whole && head.kind == static_cast<std::uint8_t>(Kind::kMessage) &&
                          head.inside == inside.size() && peer != peer_at_.end();
  const std::size_t arena = is_message && head.id != 0 ? neighborhood_.arena(from).size() : 0;
  const bool fits = head.id == 0 ? head.lent == 0 : head.lent <= arena && head.offset <= arena - head.lent;
  if (!is_message || !fits) {
    ++stats_.dropped;
    return;
  }
  take_message(peer->second, head, inside);
}

void LocalEndpoint::take_message(PeerId from, const Head& head, std::span<const std::byte> inside) {
  Peer& peer = peers_.at(from);
  std::span<const std::byte> lent;
  if (head.id != 0) lent = neighborhood_.arena(peer.local_rank).subspan(head.offset, head.lent);
  if (const std::optional<Receive> receive = take_receive(head.tag)) {
    fill(*receive, inside, lent);
    if (head.id != 0) answer(peer, head.id);
    return;
  }
  if (peer.unexpected_bytes > kMaxUnexpectedBytes) {
    ++stats_.dropped;
    if (head.id != 0) answer(peer, head.id);
    return;
  }
  keep(from, head.tag, {from, {inside.begin(), inside.end()}, lent, head.id});
}

void LocalEndpoint::keep(PeerId from, std::uint64_t tag, Unexpected message) {
  peers_.at(from).unexpected_bytes += message.inside.size() + sizeof(Unexpected);
  unexpected_[tag].push_back(std::move(message));
}

/// The sender may use that memory again.
void LocalEndpoint::answer(Peer& peer, std::uint64_t id) {
  if (peer.has_left) return;
  Head head;
  head.kind = static_cast<std::uint8_t>(Kind::kAnswer);
  head.id = id;
  Status status;
  if (peer.answers.empty() && push(peer, head, {}, {}, status)) {
    neighborhood_.flush();
    return;
  }
  peer.answers.push_back(id);
  ++waiting_;
}

void LocalEndpoint::take_answer(std::uint32_t from, std::uint64_t id) {
  const auto found = lent_.find(id);
  if (found == lent_.end() || found->second.to != from) {
    ++stats_.dropped;
    return;
  }
  const Lent lent = found->second;
  lent_.erase(found);
  if (lent.token) complete_send(*lent.token);
  if (lent.staging.empty()) return;
  staged_bytes_ -= lent.staging.size();
  neighborhood_.deallocate(lent.staging);
}

void LocalEndpoint::flush_waiting() {
  for (auto& [id, peer] : peers_) {
    while (!peer.answers.empty()) {
      const std::uint64_t next = peer.answers.front();
      Head head;
      head.kind = static_cast<std::uint8_t>(Kind::kAnswer);
      head.id = next;
      Status status;
      if (!push(peer, head, {}, {}, status)) break;
      peer.answers.pop_front();
      --waiting_;
    }
    while (!peer.waiting.empty() && try_send(peer, peer.waiting.front())) {
      peer.waiting.pop_front();
      --waiting_;
    }
  }
}

std::size_t LocalEndpoint::poll(std::span<transport::Completion> completions) {
  if (std::exchange(is_asleep_, false)) neighborhood_.end_sleep();
  if (is_shut_) return 0;
  if (waiting_ > 0) flush_waiting();
  std::size_t count = 0;
  for (; count < completions.size() && !ready_.empty(); ++count) {
    completions[count] = std::move(ready_.front());
    ready_.pop_front();
  }
  return count;
}

bool LocalEndpoint::prepare_wait(std::vector<int>& descriptors, Instant&) {
  if (!ready_.empty() || !neighborhood_.prepare_sleep()) return false;
  is_asleep_ = true;
  descriptors.push_back(neighborhood_.doorbell_fd());
  return true;
}

void LocalEndpoint::wait(Instant deadline, std::span<const int> also) {
  std::vector<int> descriptors(also.begin(), also.end());
  if (!prepare_wait(descriptors, deadline)) return;
  poll_until(deadline, descriptors);
  is_asleep_ = false;
  neighborhood_.end_sleep();
}

}  // namespace herring::runtime
