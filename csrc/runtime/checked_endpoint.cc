#include "runtime/checked_endpoint.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>
#include <utility>

#include "runtime/checked_endpoint_impl.h"
#include "wire/header.h"

namespace herring::runtime {
namespace {

constexpr std::size_t kSmallBytes = CheckedEndpoint::kPostBytes;
constexpr std::size_t kPerSlab = 32;
constexpr Duration kLinger = std::chrono::milliseconds(50);

}  // namespace

CheckedEndpoint::Impl::Impl(std::unique_ptr<transport::Endpoint> inner, CheckedOptions options)
    : inner_(std::move(inner)),
      options_(std::move(options)),
      buffers_(inner_->memory(), kSmallBytes, kPerSlab,
               kFrameBytes + std::max(options_.max_head_bytes, kMaxReportBytes), kPerSlab / 4),
      reports_(inner_->memory(), kFrameBytes + kMaxReportBytes, kPerSlab / 4),
      now_(options_.now ? options_.now() : std::chrono::steady_clock::now()) {}

CheckedEndpoint::Impl::~Impl() {
  if (is_shut_) return;
  linger();
  // Its user has taken its own posts back; reports are ours.
  for (std::size_t i = 0; i < posts_.size(); ++i) {
    if (posts_[i].in_transport && (posts_[i].kind == Kind::kReceive || posts_[i].kind == Kind::kReportReceive)) {
      inner_->cancel_receive(Token{i});
    }
  }
  for (const auto& [id, peer] : peers_) inner_->remove_peer(id);
  const auto in_transport = [this] {
    return std::any_of(posts_.begin(), posts_.end(), [](const Post& post) { return post.in_transport; });
  };
  std::array<transport::Completion, kPollBatch> batch;
  for (int round = 0; round < 100 && in_transport(); ++round) {
    const std::size_t count = inner_->poll(batch);
    for (std::size_t i = 0; i < count; ++i) posts_[batch[i].token.value].in_transport = false;
    if (count == 0) inner_->wait(std::chrono::steady_clock::now() + std::chrono::milliseconds(2), {});
  }
  if (in_transport()) inner_->shut_down();
}

void CheckedEndpoint::Impl::shut_down() {
  is_shut_ = true;
  inner_->shut_down();
  ready_.clear();
  next_due_ = Instant::max();
}

/// What was sent last may have to be sent again.
void CheckedEndpoint::Impl::linger() {
  const Instant end = std::chrono::steady_clock::now() + kLinger;
  const auto waits = [](const auto& entry) { return !entry.second.unconfirmed.empty() || entry.second.owed > 0; };
  while (!options_.now && std::any_of(peers_.begin(), peers_.end(), waits) && std::chrono::steady_clock::now() < end) {
    std::array<transport::Completion, kPollBatch> batch;
    if (poll(batch) == 0) inner_->wait(std::min(end, next_due_), {});
  }
}

void CheckedEndpoint::Impl::add_peer(PeerId peer, std::span<const std::byte> address) {
  inner_->add_peer(peer, address);
  if (!peers_.try_emplace(peer).second) return;
  // One report of each peer is on its way at a time, and one may wait behind it.
  std::size_t posted = 0;
  for (const Post& post : posts_) posted += post.kind == Kind::kReportReceive ? 1 : 0;
  for (int i = 0; i < 2 && posted < kMaxReportReceives; ++i, ++posted) {
    const std::size_t index = add_post(Kind::kReportReceive, kMaxReportBytes).value();
    posts_[index].tag = kReportTag;
    repost(index);
  }
}

void CheckedEndpoint::Impl::remove_peer(PeerId id) {
  if (is_shut_) return;
  inner_->remove_peer(id);
  const auto found = peers_.find(id);
  if (found == peers_.end()) return;
  const std::map<std::uint64_t, std::size_t> unconfirmed = std::move(found->second.unconfirmed);
  peers_.erase(found);
  for (const auto& [number, index] : unconfirmed) {
    complete_send(index, Status(Code::kPeerLost, name_of(id) + " was removed before it confirmed a message"));
  }
}

std::optional<std::size_t> CheckedEndpoint::Impl::add_post(Kind kind, std::size_t head_bytes) {
  const bool is_large = kFrameBytes + head_bytes > kSmallBytes;
  const std::span<std::byte> buffer =
      kind == Kind::kReportSend ? reports_.take_in_turn() : buffers_.take(kind == Kind::kSend, is_large);
  if (buffer.empty()) return std::nullopt;
  std::size_t index = posts_.size();
  if (free_posts_.empty()) {
    posts_.emplace_back();
  } else {
    index = free_posts_.back();
    free_posts_.pop_back();
    posts_[index] = Post{};
  }
  Post& post = posts_[index];
  post.kind = kind;
  post.is_large = is_large;
  post.buffer = buffer;
  return index;
}

void CheckedEndpoint::Impl::free_post(std::size_t index) {
  Post& post = posts_[index];
  if (post.kind == Kind::kReportSend) {
    reports_.give_back(post.buffer);
  } else {
    buffers_.give_back(post.kind == Kind::kSend, post.is_large, post.buffer);
  }
  damaged_.erase(index);
  post.kind = Kind::kFree;
  post.status = {};
  free_posts_.push_back(index);
}

std::uint32_t CheckedEndpoint::Impl::crc_of(std::span<const std::byte> head, std::span<const std::byte> second) {
  if (second.empty()) return wire::crc32c(head);
  if (summed_.data() != second.data() || summed_.size() != second.size()) {
    summed_ = second;
    summed_crc_ = wire::crc32c(second);
  }
  if (shift_bytes_ != second.size()) {
    shift_bytes_ = second.size();
    shift_ = wire::crc32c_shift(shift_bytes_);
  }
  return wire::crc32c_combine(wire::crc32c(head), summed_crc_, shift_);
}

Status CheckedEndpoint::Impl::post_send(PeerId to, Tag tag, std::span<const std::byte> first,
                                        std::span<const std::byte> second, Token token) {
  const auto found = peers_.find(to);
  if (found == peers_.end() || first.size() > options_.max_head_bytes) {
    return Status(Code::kInvalidArgument, found == peers_.end() ? name_of(to) + " is not known; add_peer() first"
                                                                : "a head of " + std::to_string(first.size()) +
                                                                      " bytes; the limit with checksums is " +
                                                                      std::to_string(options_.max_head_bytes));
  }
  Peer& peer = found->second;
  const std::optional<std::size_t> added = add_post(Kind::kSend, first.size());
  if (!added) return Status::again();
  const std::size_t index = *added;
  Post& post = posts_[index];
  post.token = token;
  post.tag = tag;
  post.peer = to;
  post.head_bytes = first.size();
  post.second = second;
  post.number = peer.next_number;
  post.started = now_;
  post.patience = options_.resend_after;
  if (!first.empty()) std::memcpy(post.buffer.data() + kFrameBytes, first.data(), first.size());
  post.crc32c = crc_of(first, second);
  // Known before it is sent, so that the frame says the right thing about what is oldest.
  peer.unconfirmed.emplace(post.number, index);
  const Status status = send_copy(index);
  if (!status.is_ok()) {
    peer.unconfirmed.erase(post.number);
    free_post(index);
    summed_ = {};  // The memory is its owner's again.
    return status;
  }
  ++peer.next_number;
  return status;
}

/// Always with the sum of what was posted: where the memory has changed since, the receiver finds it.
Status CheckedEndpoint::Impl::send_copy(std::size_t index) {
  Post& post = posts_[index];
  Frame frame;
  frame.job_id = options_.job_id;
  frame.sender = options_.self.value;
  frame.bytes = static_cast<std::uint32_t>(post.head_bytes + post.second.size());
  frame.number = post.number;
  set_confirmations(frame, post.peer);
  const std::span<std::byte> head = post.buffer.first(kFrameBytes + post.head_bytes);
  frame.data_crc32c = post.crc32c;
  const auto bytes = encode(frame);
  std::memcpy(head.data(), bytes.data(), bytes.size());
  const Status status = inner_->post_send(post.peer, post.tag, head, post.second, Token{index});
  if (!status.is_ok()) return status;
  post.in_transport = true;
  post.is_wanted_again = false;
  if (++post.copies > 1) {
    ++stats_.resent;
    if (options_.counters) ++options_.counters->resent;
  }
  Peer& peer = peers_.at(post.peer);
  // It tells all that a report would, where nothing is missing.
  if (peer.ahead.empty() && !peer.asks && !has_damage_of(post.peer, peer)) {
    peer.owed = 0;
    peer.report_due = Instant::max();
  }
  return status;
}

/// The first thing that ends it counts; the user hears of it when the transport is done with its memory too.
void CheckedEndpoint::Impl::complete_send(std::size_t index, Status status) {
  Post& post = posts_[index];
  post.is_over = true;
  post.status = std::move(status);
  if (!post.in_transport) release_send(index);
}

void CheckedEndpoint::Impl::release_send(std::size_t index) {
  tell_sent(index);
  free_post(index);
}

void CheckedEndpoint::Impl::tell_sent(std::size_t index) {
  Post& post = posts_[index];
  if (std::exchange(post.is_told, true)) return;
  ready_.push_back(
      {post.token, transport::CompletionKind::kSend, post.head_bytes + post.second.size(), std::move(post.status)});
}

Status CheckedEndpoint::Impl::post_receive(Tag tag, std::span<std::byte> first, std::span<std::byte> second,
                                           Token token) {
  if (!second.empty() && first.size() > options_.max_head_bytes) {
    return Status(Code::kInvalidArgument, "a head of " + std::to_string(first.size()) +
                                              " bytes; the limit with checksums is " +
                                              std::to_string(options_.max_head_bytes));
  }
  const std::size_t index = add_post(Kind::kReceive, second.empty() ? 0 : first.size()).value();
  Post& post = posts_[index];
  post.token = token;
  post.tag = tag;
  post.first_out = first;
  post.second_out = second;
  const Status status = post_to_inner(index);
  if (status.is_ok()) {
    receives_[token.value] = index;
  } else {
    free_post(index);
  }
  return status;
}

/// Two spans are all that a transport takes: with a second one the first is received behind the frame and copied.
Status CheckedEndpoint::Impl::post_to_inner(std::size_t index) {
  Post& post = posts_[index];
  std::span<std::byte> head = post.buffer.first(kFrameBytes);
  std::span<std::byte> rest = post.first_out;
  if (post.kind == Kind::kReportReceive) {
    head = post.buffer.first(kFrameBytes + kMaxReportBytes);
  } else if (!post.second_out.empty()) {
    head = post.buffer.first(kFrameBytes + post.first_out.size());
    rest = post.second_out;
  }
  const Status status = inner_->post_receive(post.tag, head, rest, Token{index});
  post.in_transport = status.is_ok();
  return status;
}

void CheckedEndpoint::Impl::repost(std::size_t index) {
  const Status status = post_to_inner(index);
  if (status.is_ok()) return;
  if (status.is_again() || posts_[index].kind == Kind::kReportReceive) {
    unposted_.push_back(index);
    note_due(now_ + options_.ack_delay);
  } else {
    complete_receive(index, transport::CompletionKind::kReceive, 0, status);
  }
}

void CheckedEndpoint::Impl::cancel_receive(Token token) {
  if (is_shut_) return;
  // The user is about to close, or gives something up: what is owed goes while there is time.
  for (auto& [id, peer] : peers_) {
    if (peer.owed > 0) owe_report(peer, now_);
  }
  const auto found = receives_.find(token.value);
  if (found == receives_.end()) return;
  const std::size_t index = found->second;
  posts_[index].is_over = true;
  if (posts_[index].in_transport) {
    inner_->cancel_receive(Token{index});
    return;
  }
  std::erase(unposted_, index);
  complete_receive(index, transport::CompletionKind::kCancelled, 0, {});
}

void CheckedEndpoint::Impl::complete_receive(std::size_t index, transport::CompletionKind kind, std::size_t bytes,
                                             Status status) {
  const Token token = posts_[index].token;
  receives_.erase(token.value);
  free_post(index);
  ready_.push_back({token, kind, bytes, std::move(status)});
}

std::size_t CheckedEndpoint::Impl::poll(std::span<transport::Completion> completions) {
  if (is_shut_) return 0;
  now_ = options_.now ? options_.now() : std::chrono::steady_clock::now();
  summed_ = {};
  if (ready_.size() < completions.size()) {
    const std::size_t count = inner_->poll(std::span(batch_).first(std::min(completions.size(), batch_.size())));
    for (std::size_t i = 0; i < count; ++i) on_inner(std::exchange(batch_[i], {}));
  }
  if (now_ >= next_due_) service();
  const std::size_t count = std::min(completions.size(), ready_.size());
  std::move(ready_.begin(), ready_.begin() + static_cast<std::ptrdiff_t>(count), completions.begin());
  ready_.erase(ready_.begin(), ready_.begin() + static_cast<std::ptrdiff_t>(count));
  return count;
}

void CheckedEndpoint::Impl::on_inner(const transport::Completion& completion) {
  const auto index = static_cast<std::size_t>(completion.token.value);
  Post& post = posts_[index];
  post.in_transport = false;
  switch (post.kind) {
    case Kind::kSend:
      on_sent(index, completion.status);
      break;
    case Kind::kReceive:
    case Kind::kReportReceive:
      on_received(index, completion);
      break;
    case Kind::kReportSend:
      if (const auto peer = peers_.find(post.peer); peer != peers_.end()) {
        peer->second.report_in_transport = false;
        note_due(peer->second.report_due);
      }
      free_post(index);
      break;
    case Kind::kFree:
      break;
  }
}

void CheckedEndpoint::Impl::on_sent(std::size_t index, const Status& status) {
  Post& post = posts_[index];
  if (!status.is_ok() && !post.is_over) {
    post.is_over = true;
    post.status = status;
    if (const auto peer = peers_.find(post.peer); peer != peers_.end()) peer->second.unconfirmed.erase(post.number);
  }
  if (post.is_over) return release_send(index);
  // A copy of all of it is here: nobody needs to wait until it is confirmed.
  if (post.second.empty()) tell_sent(index);
  Peer& peer = peers_.at(post.peer);
  if (post.copies == 1) post.started = now_;
  post.due = post.is_wanted_again ? now_ : now_ + post.patience;
  peer.resend_due = std::min(peer.resend_due, post.due);
  note_due(peer.resend_due);
}

void CheckedEndpoint::Impl::on_received(std::size_t index, const transport::Completion& completion) {
  Post& post = posts_[index];
  const bool is_report = post.kind == Kind::kReportReceive;
  if (completion.kind == transport::CompletionKind::kCancelled || !completion.status.is_ok()) {
    if (is_report) return repost(index);
    return complete_receive(index, completion.kind, 0, completion.status);
  }
  const std::size_t bytes = completion.bytes < kFrameBytes ? 0 : completion.bytes - kFrameBytes;
  const std::optional<Frame> frame =
      decode_frame(std::span<const std::byte>(post.buffer).first(std::min(completion.bytes, kFrameBytes)));
  // Where the bytes behind the frame lie: two pieces of the whole.
  const bool is_split = !is_report && !post.second_out.empty();
  const std::span<std::byte> head = is_report ? post.buffer.subspan(kFrameBytes, bytes)
                                    : is_split
                                        ? post.buffer.subspan(kFrameBytes, std::min(bytes, post.first_out.size()))
                                        : post.first_out.first(bytes);
  const std::span<std::byte> rest = is_split ? post.second_out.first(bytes - head.size()) : std::span<std::byte>{};
  const bool is_whole = frame && frame->bytes == bytes && frame->data_crc32c == wire::crc32c(rest, wire::crc32c(head));
  const bool is_ours = is_whole && frame->job_id == options_.job_id && (frame->kind == FrameKind::kReport) == is_report;
  if (is_report) {
    if (is_ours) on_report(*frame, head);
    return repost(index);
  }
  if (!is_ours && !post.is_over) return note_damaged(index, frame, bytes);
  const auto peer = is_ours ? peers_.find(PeerId{frame->sender}) : peers_.end();
  if (peer != peers_.end()) {
    take_confirmations(peer->second, *frame);
    // Nobody wants it where its receive is withdrawn, so its sender need not send it again.
    const bool is_new = take_number(peer->second, *frame);
    if (!is_new) ++stats_.copies;
    if (!is_new && !post.is_over) return repost(index);
  }
  if (post.is_over) return complete_receive(index, transport::CompletionKind::kCancelled, 0, {});
  if (is_split && !head.empty()) std::memcpy(post.first_out.data(), head.data(), head.size());
  complete_receive(index, transport::CompletionKind::kReceive, bytes, {});
}

CheckedEndpoint::CheckedEndpoint(std::unique_ptr<transport::Endpoint> inner, CheckedOptions options)
    : impl_(std::make_unique<Impl>(std::move(inner), std::move(options))) {}
CheckedEndpoint::~CheckedEndpoint() = default;
const transport::Address& CheckedEndpoint::address() const { return impl_->inner().address(); }
std::string CheckedEndpoint::description() const { return impl_->inner().description() + " with checksums"; }
void CheckedEndpoint::add_peer(PeerId peer, std::span<const std::byte> address) { impl_->add_peer(peer, address); }
void CheckedEndpoint::remove_peer(PeerId peer) { impl_->remove_peer(peer); }
memory::Domain* CheckedEndpoint::memory() const { return impl_->inner().memory(); }
Status CheckedEndpoint::post_send(PeerId to, Tag tag, std::span<const std::byte> first,
                                  std::span<const std::byte> second, Token token) {
  return impl_->post_send(to, tag, first, second, token);
}
bool CheckedEndpoint::takes_sends() const { return impl_->inner().takes_sends(); }

Status CheckedEndpoint::post_receive(Tag tag, std::span<std::byte> first, std::span<std::byte> second, Token token) {
  return impl_->post_receive(tag, first, second, token);
}
void CheckedEndpoint::cancel_receive(Token token) { impl_->cancel_receive(token); }
std::size_t CheckedEndpoint::poll(std::span<transport::Completion> completions) { return impl_->poll(completions); }
void CheckedEndpoint::wait(Instant deadline, std::span<const int> also) {
  if (!impl_->has_ready()) impl_->inner().wait(std::min(deadline, impl_->next_deadline()), also);
}
bool CheckedEndpoint::prepare_wait(std::vector<int>& descriptors, Instant& deadline) {
  if (impl_->has_ready()) return false;
  deadline = std::min(deadline, impl_->next_deadline());
  return impl_->inner().prepare_wait(descriptors, deadline);
}
void CheckedEndpoint::wake() { impl_->inner().wake(); }
void CheckedEndpoint::shut_down() { impl_->shut_down(); }
Instant CheckedEndpoint::next_deadline() const { return impl_->has_ready() ? Instant{} : impl_->next_deadline(); }
const CheckedStats& CheckedEndpoint::stats() const { return impl_->stats(); }

}  // namespace herring::runtime
