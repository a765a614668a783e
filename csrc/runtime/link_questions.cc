#include "runtime/link_questions.h"

#include <cstring>
#include <optional>
#include <utility>

namespace herring::runtime {

LinkQuestions::LinkQuestions(transport::Endpoint& endpoint, PostTable& posts, PumpPeers& peers, const PumpLinks& links)
    : endpoint_(endpoint), posts_(posts), peers_(peers), links_(links), watch_(links.watch, links.peers) {
  for (const PeerId peer : links.peers) peers_[peer].is_linked = true;
}

bool LinkQuestions::take(Instant now, PumpPeer& peer, const wire::Header& header) {
  if (header.job_id != links_.job_id) return false;
  peer.heard = now;
  if (!peer.is_linked) return false;
  if (header.type == wire::MessageType::kPong) return true;
  if (header.type != wire::MessageType::kPing) return false;
  // One at a time: whoever asks faster than answers leave gets fewer.
  if (!std::exchange(peer.owes_pong, true) && !peer.is_ponged) late_.push_back(PeerId{header.sender});
  answer();
  return true;
}

void LinkQuestions::answer() {
  while (!late_.empty()) {
    PumpPeer& peer = peers_[late_.back()];
    const Status status = post(late_.back(), PostKind::kPong);
    if (status.is_again()) return;  // With the next step.
    peer.owes_pong = false;
    peer.is_ponged = status.is_ok();
    late_.pop_back();
  }
}

void LinkQuestions::completed(std::size_t index) {
  const PostKind kind = posts_[index].kind;
  const PeerId to = posts_[index].to;
  posts_.free(index);
  PumpPeer& peer = peers_[to];
  if (kind == PostKind::kPing) {
    peer.is_pinged = false;
    return;
  }
  peer.is_ponged = false;
  if (peer.owes_pong) late_.push_back(to);
}

Instant LinkQuestions::next_look() const {
  return links_.watch.patience > Duration::zero() ? watch_.next_look() : Instant::max();
}

void LinkQuestions::look(Instant now, std::span<const PeerId> awaited) {
  const std::vector<PeerId> questions = watch_.look(now, awaited, [this](PeerId peer) { return peers_[peer].heard; });
  for (const PeerId to : questions) {
    PumpPeer& peer = peers_[to];
    const Status status = peer.is_pinged ? Status::ok() : post(to, PostKind::kPing);
    peer.is_pinged = status.is_ok();  // Else the endpoint cannot reach it at all, which is an answer too.
    // Where it is this peer that lets nothing out, waiting for room tells as much as a question.
    const bool is_stuck = peer.sends > 0 && now - peer.moved >= links_.watch.patience / 2;
    if (!status.is_again() || is_stuck) watch_.asked(now, to);
  }
  const Unreachable unreachable = watch_.take_unreachable();
  if (!unreachable.peers.empty()) links_.on_unreachable(unreachable);
}

/// Past the backlog: what waits there says nothing about this peer.
Status LinkQuestions::post(PeerId to, PostKind kind) {
  const std::optional<std::size_t> added = posts_.add(kind, false);
  if (!added) return Status::again();
  const std::size_t index = *added;
  posts_[index].to = to;
  wire::Header header;
  header.type = kind == PostKind::kPing ? wire::MessageType::kPing : wire::MessageType::kPong;
  header.job_id = links_.job_id;
  header.sender = links_.self.value;
  const wire::HeaderBytes bytes = wire::encode(header);
  std::memcpy(posts_[index].buffer.data(), bytes.data(), bytes.size());
  Status status = endpoint_.post_send(to, kControlTag, posts_[index].buffer.first(bytes.size()), {}, Token{index});
  if (!status.is_ok()) posts_.free(index);
  return status;
}

}  // namespace herring::runtime
