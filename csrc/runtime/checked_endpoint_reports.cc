/// What has arrived, what has to come again, and when: the part of CheckedEndpoint that talks about messages.

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>

#include "runtime/checked_endpoint_impl.h"

namespace herring::runtime {
namespace {

/// How far ahead of the oldest missing message one may arrive; more is not reordering.
constexpr std::uint64_t kMaxAhead = 65536;
constexpr std::uint64_t kSeenBits = 64;
constexpr std::size_t kMaxDamagedPooled = 1024;

}  // namespace

std::string CheckedEndpoint::Impl::name_of(PeerId peer) const {
  return options_.name_of ? options_.name_of(peer) : "peer " + std::to_string(peer.value);
}

void CheckedEndpoint::Impl::retry_posts() {
  for (std::size_t waiting = unposted_.size(); waiting > 0; --waiting) {
    const std::size_t index = unposted_.front();
    unposted_.pop_front();
    repost(index);
    if (!damaged_.contains(index) || !posts_[index].in_transport) continue;
    for (auto& [id, peer] : peers_) {
      if (peer.is_heard_of()) owe_report(peer, now_);
    }
  }
}

void CheckedEndpoint::Impl::service() {
  next_due_ = Instant::max();
  retry_posts();
  for (auto& [id, peer] : peers_) service_peer(id, peer);
}

void CheckedEndpoint::Impl::service_peer(PeerId id, Peer& peer) {
  if (now_ >= peer.resend_due) resend_overdue(id, peer);
  if (now_ >= peer.report_due && !peer.report_in_transport) send_report(id, peer);
  note_due(peer.resend_due);
  if (!peer.report_in_transport) note_due(peer.report_due);
}

/// Messages to a pool may come twice, so silence is enough to repeat them. Others find no receive the second time: they
/// are repeated where the receiver says that they came damaged, and else it is asked.
void CheckedEndpoint::Impl::resend_overdue(PeerId id, Peer& peer) {
  peer.resend_due = Instant::max();
  std::vector<std::pair<std::uint64_t, Status>> lost;
  for (const auto& [number, index] : peer.unconfirmed) {
    Post& post = posts_[index];
    if (post.in_transport) continue;
    if (post.due <= now_) {
      const bool may_repeat = options_.is_pooled && options_.is_pooled(post.tag);
      if (now_ - post.started > options_.give_up_after) {
        lost.emplace_back(number,
                          Status(Code::kTransport, name_of(id) + " has not confirmed a message of " +
                                                       std::to_string(post.head_bytes + post.second.size()) +
                                                       " bytes, sent " + std::to_string(post.copies) + " times"));
        continue;
      }
      Status status = Status::ok();
      if (post.is_wanted_again || may_repeat) {
        status = send_copy(index);
      } else {
        peer.asks = true;
        owe_report(peer, now_);
      }
      if (!status.is_ok() && !status.is_again()) {
        lost.emplace_back(number, status);
        continue;
      }
      post.due = now_ + (status.is_again() ? options_.ack_delay : post.patience);
      if (!status.is_again()) post.patience = std::min(2 * post.patience, options_.max_resend_after);
    }
    if (!post.in_transport) peer.resend_due = std::min(peer.resend_due, post.due);
  }
  for (const auto& [number, status] : lost) {
    const std::size_t index = peer.unconfirmed.at(number);
    peer.unconfirmed.erase(number);
    complete_send(index, status);
  }
}

/// False for what has arrived before.
bool CheckedEndpoint::Impl::take_number(Peer& peer, const Frame& frame) {
  ++peer.owed;
  owe_report(peer, peer.owed >= options_.ack_every ? now_ : now_ + options_.ack_delay);
  const std::uint64_t number = frame.number;
  if (number < peer.below || number - peer.below > kMaxAhead) return false;
  if (!peer.ahead.insert(number).second) return false;
  peer.damaged_pooled.erase(number);
  while (!peer.ahead.empty() && *peer.ahead.begin() == peer.below) {
    peer.ahead.erase(peer.ahead.begin());
    ++peer.below;
  }
  return true;
}

void CheckedEndpoint::Impl::take_confirmations(Peer& peer, const Frame& frame) {
  // What the sender has given up will not come any more.
  if (frame.oldest > peer.below && (frame.number == 0 || frame.oldest <= frame.number)) {
    peer.below = frame.oldest;
    peer.ahead.erase(peer.ahead.begin(), peer.ahead.lower_bound(peer.below));
    while (!peer.ahead.empty() && *peer.ahead.begin() == peer.below) {
      peer.ahead.erase(peer.ahead.begin());
      ++peer.below;
    }
    peer.damaged_pooled.erase(peer.damaged_pooled.begin(), peer.damaged_pooled.lower_bound(peer.below));
  }
  if (frame.below > peer.next_number) return;
  while (!peer.unconfirmed.empty() && peer.unconfirmed.begin()->first < frame.below) {
    confirm(peer, peer.unconfirmed.begin()->first);
  }
  for (std::uint64_t i = 0; frame.seen != 0 && i < kSeenBits; ++i) {
    if ((frame.seen >> i & 1) != 0) confirm(peer, frame.below + 1 + i);
  }
}

void CheckedEndpoint::Impl::confirm(Peer& peer, std::uint64_t number) {
  const auto found = peer.unconfirmed.find(number);
  if (found == peer.unconfirmed.end()) return;
  const std::size_t index = found->second;
  peer.unconfirmed.erase(found);
  complete_send(index, {});
}

void CheckedEndpoint::Impl::note_damaged(std::size_t index, const std::optional<Frame>& frame, std::size_t bytes) {
  Post& post = posts_[index];
  ++stats_.damaged;
  if (options_.counters) ++options_.counters->damaged;
  // Of another job, or of nobody that this endpoint knows: its sender would not understand.
  if (frame && (frame->job_id != options_.job_id || !peers_.contains(PeerId{frame->sender}))) return repost(index);
  const PeerId from{frame ? frame->sender : 0};
  if (options_.on_damage) {
    options_.on_damage(
        "a message of " + std::to_string(bytes) + " bytes from " +
        (frame ? name_of(from) : std::string("an unknown sender (its head is damaged)")) +
        " arrived damaged (CRC32C); it is sent again. Damaged here so far: " + std::to_string(stats_.damaged));
  }
  const bool is_pooled = options_.is_pooled && options_.is_pooled(post.tag);
  if (is_pooled) {
    if (frame) {
      Peer& peer = peers_.at(from);
      if (peer.damaged_pooled.size() < kMaxDamagedPooled && frame->number >= peer.below &&
          !peer.ahead.contains(frame->number)) {
        DamagedMessage& damaged = peer.damaged_pooled[frame->number];
        damaged = {post.tag.value, frame->number, damaged.count + 1};
      }
      owe_report(peer, now_);
    } else {
      for (auto& [id, peer] : peers_) {
        if (!peer.is_heard_of()) continue;
        peer.nameless_tag = post.tag.value;
        owe_report(peer, now_);
      }
    }
    return repost(index);
  }
  ++post.damaged;
  if (frame) {
    post.peer = from;
    post.number = frame->number;
  }
  damaged_.insert(index);
  if (post.damaged >= options_.max_damaged) {
    const std::string who = post.number != 0 ? name_of(post.peer) : std::string("an unknown sender");
    // Its sender is to hear that nobody waits for it any more.
    if (post.number != 0) {
      peers_.at(post.peer).damaged_pooled[post.number] = {post.tag.value, post.number, post.damaged};
      owe_report(peers_.at(post.peer), now_);
    }
    return complete_receive(index, transport::CompletionKind::kReceive, 0,
                            Status(Code::kCorrupted, "a message of " + std::to_string(bytes) + " bytes from " + who +
                                                         " arrived damaged " + std::to_string(options_.max_damaged) +
                                                         " times (CRC32C); look at memory, network cards and cables "
                                                         "of both machines"));
  }
  repost(index);
  for (auto& [id, peer] : peers_) {
    if (post.number == 0 ? peer.is_heard_of() : id == post.peer) owe_report(peer, now_);
  }
}

void CheckedEndpoint::Impl::owe_report(Peer& peer, Instant when) {
  peer.report_due = std::min(peer.report_due, when);
  if (!peer.report_in_transport) note_due(peer.report_due);
}

/// Every message brings back what has arrived, so that reports are for where nothing goes the other way.
void CheckedEndpoint::Impl::set_confirmations(Frame& frame, PeerId to) {
  Peer& peer = peers_.at(to);
  frame.oldest = peer.unconfirmed.empty() ? peer.next_number : peer.unconfirmed.begin()->first;
  frame.below = peer.below;
  for (const std::uint64_t number : peer.ahead) {
    const std::uint64_t bit = number - peer.below - 1;
    if (bit >= kSeenBits) break;
    frame.seen |= std::uint64_t{1} << bit;
  }
}

bool CheckedEndpoint::Impl::has_damage_of(PeerId from, const Peer& peer) const {
  return !peer.damaged_pooled.empty() || std::any_of(damaged_.begin(), damaged_.end(), [&](std::size_t index) {
    return posts_[index].number == 0 || posts_[index].peer == from;
  });
}

Report CheckedEndpoint::Impl::make_report(PeerId to, const Peer& peer) const {
  Report report;
  report.asks = peer.asks;
  for (const std::uint64_t number : peer.ahead) {
    if (!report.arrived.empty() && report.arrived.back().last + 1 == number) {
      report.arrived.back().last = number;
    } else if (report.arrived.size() == kMaxReportEntries) {
      break;
    } else {
      report.arrived.push_back({number, number});
    }
  }
  // Only what can be received again by now.
  for (const std::size_t index : damaged_) {
    const Post& post = posts_[index];
    if (!post.in_transport || (post.number != 0 && post.peer != to)) continue;
    report.damaged.push_back({post.tag.value, post.number, post.damaged});
  }
  for (const auto& [number, damaged] : peer.damaged_pooled) report.damaged.push_back(damaged);
  if (peer.nameless_tag != 0) report.damaged.insert(report.damaged.begin(), {peer.nameless_tag, 0, 1});
  report.damaged.resize(std::min(report.damaged.size(), kMaxReportEntries));
  return report;
}

void CheckedEndpoint::Impl::send_report(PeerId to, Peer& peer) {
  const std::vector<std::byte> body = encode(make_report(to, peer));
  const std::optional<std::size_t> added = add_post(Kind::kReportSend, body.size());
  if (!added) {
    peer.report_due = now_ + options_.ack_delay;
    return;
  }
  const std::size_t index = *added;
  Post& post = posts_[index];
  post.peer = to;
  std::memcpy(post.buffer.data() + kFrameBytes, body.data(), body.size());
  Frame frame;
  frame.kind = FrameKind::kReport;
  frame.job_id = options_.job_id;
  frame.sender = options_.self.value;
  frame.bytes = static_cast<std::uint32_t>(body.size());
  frame.data_crc32c = crc_of(body, {});
  set_confirmations(frame, to);
  const auto head = encode(frame);
  std::memcpy(post.buffer.data(), head.data(), head.size());
  const Status status =
      inner_->post_send(to, kReportTag, post.buffer.first(kFrameBytes + body.size()), {}, Token{index});
  if (!status.is_ok()) {
    free_post(index);
    peer.report_due = now_ + (status.is_again() ? options_.ack_delay / 4 : options_.resend_after);
    return;
  }
  ++stats_.reports;
  post.in_transport = true;
  peer.report_in_transport = true;
  peer.owed = 0;
  peer.asks = false;
  peer.nameless_tag = 0;
  // Until it has come whole: the report, or what it asks for, may be damaged too.
  peer.report_due = has_damage_of(to, peer) ? now_ + options_.resend_after : Instant::max();
}

void CheckedEndpoint::Impl::on_report(const Frame& frame, std::span<const std::byte> bytes) {
  const PeerId from{frame.sender};
  const auto found = peers_.find(from);
  const std::optional<Report> report = decode_report(bytes);
  if (found == peers_.end() || !report) return;
  Peer& peer = found->second;
  take_confirmations(peer, frame);
  for (const ArrivedRange& range : report->arrived) {
    auto next = peer.unconfirmed.lower_bound(range.first);
    while (next != peer.unconfirmed.end() && next->first <= range.last) {
      const std::uint64_t number = next->first;
      ++next;
      confirm(peer, number);
    }
  }
  for (const DamagedMessage& damaged : report->damaged) take_damaged(from, peer, damaged);
  if (report->asks) owe_report(peer, now_);
}

void CheckedEndpoint::Impl::take_damaged(PeerId from, Peer& peer, const DamagedMessage& damaged) {
  if (damaged.number == 0 && options_.is_pooled && options_.is_pooled(Tag{damaged.tag})) {
    // One of these, or another's: copies do no harm.
    for (const auto& [number, index] : peer.unconfirmed) {
      if (posts_[index].tag.value == damaged.tag && !posts_[index].in_transport) want_again(peer, index);
    }
    return;
  }
  auto found = peer.unconfirmed.find(damaged.number);
  if (damaged.number == 0) {
    found = std::find_if(peer.unconfirmed.begin(), peer.unconfirmed.end(),
                         [&](const auto& entry) { return posts_[entry.second].tag.value == damaged.tag; });
  }
  if (found == peer.unconfirmed.end() || posts_[found->second].tag.value != damaged.tag) return;
  const std::size_t index = found->second;
  Post& post = posts_[index];
  // The other side fails a receive then; what is for a pool is tried for as long as anything is.
  const bool is_pooled = options_.is_pooled && options_.is_pooled(post.tag);
  if (!is_pooled && damaged.count >= options_.max_damaged) {
    peer.unconfirmed.erase(found);
    complete_send(index,
                  Status(Code::kCorrupted, "a message of " + std::to_string(post.head_bytes + post.second.size()) +
                                               " bytes to " + name_of(from) + " arrived there damaged " +
                                               std::to_string(damaged.count) + " times (CRC32C)"));
    return;
  }
  if (post.copies > damaged.count) return;  // The next copy is on its way.
  want_again(peer, index);
}

void CheckedEndpoint::Impl::want_again(Peer& peer, std::size_t index) {
  posts_[index].is_wanted_again = true;
  if (posts_[index].in_transport) return;  // As soon as the transport is done with it.
  posts_[index].due = now_;
  peer.resend_due = now_;
  note_due(now_);
}

}  // namespace herring::runtime
