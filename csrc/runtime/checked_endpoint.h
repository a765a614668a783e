#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "core/types.h"
#include "transport/transport.h"

namespace herring::runtime {

/// Of several endpoints together. Any thread.
struct DamageCounters {
  std::atomic<std::uint64_t> damaged{0};
  std::atomic<std::uint64_t> resent{0};
};

struct CheckedOptions {
  PeerId self;  ///< What peers know this endpoint as.
  std::uint64_t job_id = 0;
  std::size_t max_head_bytes = 4096;  ///< Largest `first` of a send, and of a receive that has a `second`.
  /// Tags whose receives are a pool that is always refilled: a message there may be sent again at any time.
  std::function<bool(Tag)> is_pooled;
  Duration ack_delay = std::chrono::milliseconds(5);       ///< What nothing else can carry back waits so long.
  std::uint32_t ack_every = 32;                            ///< So many arrivals are confirmed at once.
  Duration resend_after = std::chrono::milliseconds(200);  ///< Without an answer; then twice as long, up to
  Duration max_resend_after = std::chrono::seconds(3);     ///< this.
  Duration give_up_after = std::chrono::seconds(30);       ///< A send that nobody confirms fails.
  std::uint32_t max_damaged = 8;                           ///< Arrivals of one message; then its receive fails.
  std::function<Instant()> now;                            ///< Empty: the monotonic clock.
  std::function<std::string(PeerId)> name_of;              ///< For texts: "rank 3". Empty: "peer 3".
  std::function<void(const std::string&)> on_damage;       ///< With a text for people, in poll(). May be empty.
  std::shared_ptr<DamageCounters> counters;                ///< Counted in as well. May be null.
};

struct CheckedStats {
  std::uint64_t damaged = 0;  ///< Messages that arrived with a wrong checksum, or as none of ours.
  std::uint64_t resent = 0;   ///< Messages sent again.
  std::uint64_t copies = 0;   ///< Messages that had arrived already, dropped.
  std::uint64_t reports = 0;  ///< Sent.
};

/// An endpoint whose messages arrive as they were sent, once, or not at all: each goes in a frame with CRC32C sums and
/// a number (docs/wire.md, "Checksums"); what arrives damaged is sent again from where it is, for a send with a
/// `second` completes when the receiver has confirmed it; of others a copy is kept so long. A receive that was damaged
/// max_damaged times completes with kCorrupted, and so does its send. Both ends have to be such endpoints.
class CheckedEndpoint final : public transport::Endpoint {
 public:
  static constexpr std::size_t kPostBytes = 320;          ///< Taken for each receive that is posted.
  static constexpr std::size_t kMaxReportReceives = 256;  ///< Kept posted: two for each peer, and at most these.

  CheckedEndpoint(std::unique_ptr<transport::Endpoint> inner, CheckedOptions options);
  ~CheckedEndpoint() override;

  const transport::Address& address() const override;
  std::string description() const override;
  void add_peer(PeerId peer, std::span<const std::byte> address) override;
  void remove_peer(PeerId peer) override;
  memory::Domain* memory() const override;
  Status post_send(PeerId to, Tag tag, std::span<const std::byte> first, std::span<const std::byte> second,
                   Token token) override;
  bool takes_sends() const override;
  Status post_receive(Tag tag, std::span<std::byte> first, std::span<std::byte> second, Token token) override;
  void cancel_receive(Token token) override;
  std::size_t poll(std::span<transport::Completion> completions) override;
  void wait(Instant deadline, std::span<const int> also) override;
  bool prepare_wait(std::vector<int>& descriptors, Instant& deadline) override;
  void wake() override;
  void shut_down() override;

  /// When poll() has something to do that the transport does not know of; Instant::max() where never.
  Instant next_deadline() const;
  const CheckedStats& stats() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

/// Where an endpoint with checksums is reported to: every other tag is its user's.
inline constexpr Tag kReportTag{0x8000'0000'0000'0002ull};

}  // namespace herring::runtime
