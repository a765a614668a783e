#pragma once

#include <array>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "runtime/buffer_pool.h"
#include "runtime/checked_endpoint.h"
#include "runtime/checked_frame.h"

/// The inside of CheckedEndpoint, shared by the files that implement it. Nobody else includes this.
namespace herring::runtime {

class CheckedEndpoint::Impl {
 public:
  Impl(std::unique_ptr<transport::Endpoint> inner, CheckedOptions options);
  ~Impl();

  // checked_endpoint.cc
  void add_peer(PeerId peer, std::span<const std::byte> address);
  void remove_peer(PeerId peer);
  Status post_send(PeerId to, Tag tag, std::span<const std::byte> first, std::span<const std::byte> second,
                   Token token);
  Status post_receive(Tag tag, std::span<std::byte> first, std::span<std::byte> second, Token token);
  void cancel_receive(Token token);
  void shut_down();
  std::size_t poll(std::span<transport::Completion> completions);
  bool has_ready() const { return !ready_.empty(); }
  Instant next_deadline() const { return next_due_; }
  const CheckedStats& stats() const { return stats_; }
  transport::Endpoint& inner() { return *inner_; }

 private:
  static constexpr std::size_t kPollBatch = 64;
  enum class Kind : std::uint8_t { kFree, kSend, kReceive, kReportSend, kReportReceive };

  /// One post of the user's, or one of our own reports; its index is its token at the transport.
  struct Post {
    Kind kind = Kind::kFree;
    bool is_large = false;
    bool in_transport = false;
    bool is_over = false;  // Nobody waits for it any more but the transport.
    bool is_told = false;  // The user knows that its memory is free: all of it lies here.
    std::span<std::byte> buffer;
    Token token;  // The user's.
    Tag tag;
    PeerId peer;  // Of a send; of a damaged receive, who sent it, where that is known.
    Status status;

    // A send.
    std::size_t head_bytes = 0;  // Of the user's first span, which lies behind the frame.
    std::span<const std::byte> second;
    std::uint32_t crc32c = 0;  // Of all that is behind the frame, when it was posted.
    std::uint64_t number = 0;  // Also of a damaged receive: of what has to come again; 0: not known.
    std::uint32_t copies = 0;  // Sent so far.
    bool is_wanted_again = false;
    Instant started;
    Instant due = Instant::max();
    Duration patience{};

    // A receive.
    std::span<std::byte> first_out;
    std::span<std::byte> second_out;
    std::uint32_t damaged = 0;
  };

  struct Peer {
    /// Something went either way: it may be who sent what nobody can tell.
    bool is_heard_of() const { return next_number > 1 || below > 1 || !ahead.empty(); }

    // Towards it.
    std::uint64_t next_number = 1;
    std::map<std::uint64_t, std::size_t> unconfirmed;  // Number -> post.
    Instant resend_due = Instant::max();
    bool asks = false;  // A report of its own is wanted.
    bool report_in_transport = false;
    Instant report_due = Instant::max();

    // From it.
    std::uint64_t below = 1;                                 // All below have arrived ...
    std::set<std::uint64_t> ahead;                           // ... and these.
    std::uint32_t owed = 0;                                  // Arrivals since we last told what has arrived.
    std::map<std::uint64_t, DamagedMessage> damaged_pooled;  // Without a receive that waits for them.
    std::uint64_t nameless_tag = 0;  // Of a pool where something came that this peer may have sent; 0: none.
  };

  // checked_endpoint.cc
  /// Nothing where a send has to wait for a buffer. Throws Error where there is none for a receive.
  std::optional<std::size_t> add_post(Kind kind, std::size_t head_bytes);
  void free_post(std::size_t index);
  Status send_copy(std::size_t index);
  void complete_send(std::size_t index, Status status);
  void release_send(std::size_t index);
  void tell_sent(std::size_t index);
  void linger();
  void complete_receive(std::size_t index, transport::CompletionKind kind, std::size_t bytes, Status status);
  Status post_to_inner(std::size_t index);
  void repost(std::size_t index);
  void on_inner(const transport::Completion& completion);
  void on_sent(std::size_t index, const Status& status);
  void on_received(std::size_t index, const transport::Completion& completion);
  std::uint32_t crc_of(std::span<const std::byte> head, std::span<const std::byte> second);

  // checked_endpoint_reports.cc
  void retry_posts();
  void service();
  void service_peer(PeerId id, Peer& peer);
  void resend_overdue(PeerId id, Peer& peer);
  void note_due(Instant when) { next_due_ = std::min(next_due_, when); }
  bool take_number(Peer& peer, const Frame& frame);
  void take_confirmations(Peer& peer, const Frame& frame);
  void confirm(Peer& peer, std::uint64_t number);
  void note_damaged(std::size_t index, const std::optional<Frame>& frame, std::size_t bytes);
  void owe_report(Peer& peer, Instant when);
  void set_confirmations(Frame& frame, PeerId to);
  bool has_damage_of(PeerId from, const Peer& peer) const;
  Report make_report(PeerId to, const Peer& peer) const;
  void send_report(PeerId to, Peer& peer);
  void on_report(const Frame& frame, std::span<const std::byte> bytes);
  void take_damaged(PeerId from, Peer& peer, const DamagedMessage& damaged);
  void want_again(Peer& peer, std::size_t index);
  std::string name_of(PeerId peer) const;

  std::unique_ptr<transport::Endpoint> inner_;
  const CheckedOptions options_;
  PostBuffers buffers_;
  BufferPool reports_;  // That are sent.
  std::deque<Post> posts_;
  std::vector<std::size_t> free_posts_;
  std::unordered_map<std::uint64_t, std::size_t> receives_;  // The user's token -> post.
  std::unordered_map<PeerId, Peer> peers_;
  std::set<std::size_t> damaged_;                        // Receives that had a damaged message.
  std::deque<std::size_t> unposted_;                     // Receives that wait for room in the transport.
  std::array<transport::Completion, kPollBatch> batch_;  // Kept: most polls find nothing.
  std::deque<transport::Completion> ready_;
  Instant now_{};
  bool is_shut_ = false;
  Instant next_due_ = Instant::max();
  // One result goes to many: its sum is taken once. Valid until something may have come in.
  std::span<const std::byte> summed_;
  std::uint32_t summed_crc_ = 0;
  std::uint32_t shift_ = 0;  // crc32c_shift(summed_.size()), kept because chunks are mostly of one size.
  std::size_t shift_bytes_ = 0;
  CheckedStats stats_;
};

}  // namespace herring::runtime
