#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/types.h"
#include "intra_node/neighborhood.h"
#include "transport/transport.h"

namespace herring::runtime {

/// First byte of every message of a LocalEndpoint in a ring: tells it from those of the reductions, whose first byte is
/// their version.
inline constexpr std::byte kLocalEndpointChannel{0x50};

struct LocalEndpointStats {
  std::uint64_t copies_in = 0;  ///< Messages that were staged: copied into this rank's arena first.
  std::uint64_t in_place = 0;   ///< Messages whose data lay in the arena.
  std::uint64_t dropped = 0;    ///< Messages that no correct neighbour sends.
};

/// Messages between the ranks of one host, as a transport. What is small travels in the rings. What is large is read by
/// the receiver out of the sender's arena: where it lies there, straight; else from a copy, of which at most
/// kMaxStagedBytes (or one message) exist at once.
///
/// The rings are shared with the reductions, so their owner hands in what came (deliver()) and calls
/// Neighborhood::flush() after poll(). One thread, but for wake().
class LocalEndpoint final : public transport::Endpoint {
 public:
  static constexpr std::size_t kMaxInlineBytes = 32 << 10;  ///< Fewer where the rings are small.
  static constexpr std::size_t kMaxStagedBytes = 8 << 20;
  static constexpr std::size_t kMaxWaitingPerPeer = 1024;      ///< Sends that wait for room; more are kAgain.
  static constexpr std::size_t kMaxUnexpectedBytes = 4 << 20;  ///< Of small messages without a receive, from one peer.

  /// The neighborhood must outlive it.
  explicit LocalEndpoint(intra_node::Neighborhood& neighborhood, std::uint32_t local_rank);
  ~LocalEndpoint() override;

  void add_neighbour(PeerId peer, std::uint32_t local_rank);
  /// A message from a ring whose first byte is kLocalEndpointChannel. Never trusted.
  void deliver(std::uint32_t from, std::span<const std::byte> bytes);
  /// Senders wait for answers for which there was no room yet; poll() goes on with them.
  bool owes_answers() const;
  /// It waits for no answers any more.
  void peer_left(PeerId peer);
  const LocalEndpointStats& stats() const { return stats_; }

  const transport::Address& address() const override { return address_; }
  std::string description() const override { return "shared memory"; }
  void add_peer(PeerId peer, std::span<const std::byte> address) override;
  void remove_peer(PeerId peer) override;
  Status post_send(PeerId to, Tag tag, std::span<const std::byte> first, std::span<const std::byte> second,
                   Token token) override;
  Status post_receive(Tag tag, std::span<std::byte> first, std::span<std::byte> second, Token token) override;
  void cancel_receive(Token token) override;
  std::size_t poll(std::span<transport::Completion> completions) override;
  void wait(Instant deadline, std::span<const int> also) override;
  bool prepare_wait(std::vector<int>& descriptors, Instant& deadline) override;
  void wake() override { neighborhood_.wake(); }
  void shut_down() override;

 private:
  struct Head;
  struct Send {
    Tag tag;
    std::span<const std::byte> first;
    std::span<const std::byte> second;
    Token token;
  };
  struct Peer {
    std::uint32_t local_rank = 0;
    std::deque<Send> waiting;           // For room in the ring or for staging memory.
    std::deque<std::uint64_t> answers;  // Ids to answer, which wait for room.
    std::size_t unexpected_bytes = 0;
    bool has_left = false;
  };
  /// A message that the receiver has not read yet.
  struct Lent {
    std::uint32_t to = 0;          // Local rank.
    std::optional<Token> token;    // Of a send that completes when it has been read.
    std::span<std::byte> staging;  // A copy, which goes then.
  };
  struct Receive {
    std::span<std::byte> first;
    std::span<std::byte> second;
    Token token;
  };
  /// A message that came before its receive: what was inside, and what lies in the sender's arena.
  struct Unexpected {
    PeerId from;
    std::vector<std::byte> inside;
    std::span<const std::byte> lent;
    std::uint64_t id = 0;  // To be answered; 0: nothing was lent.
  };

  bool try_send(Peer& peer, const Send& send);
  bool send_inline(Peer& peer, const Send& send);
  bool send_lent(Peer& peer, const Send& send);
  bool push(const Peer& peer, const Head& head, std::span<const std::byte> first, std::span<const std::byte> second,
            Status& status);
  void send_to_self(const Send& send);
  void flush_waiting();
  void answer(Peer& peer, std::uint64_t id);
  void take_answer(std::uint32_t from, std::uint64_t id);
  void take_message(PeerId from, const Head& head, std::span<const std::byte> inside);
  void keep(PeerId from, std::uint64_t tag, Unexpected message);
  std::optional<Receive> take_receive(std::uint64_t tag);
  void fill(const Receive& receive, std::span<const std::byte> inside, std::span<const std::byte> lent);
  void complete_send(Token token, Status status = {});

  intra_node::Neighborhood& neighborhood_;
  const std::uint32_t local_rank_;
  const std::size_t max_inline_;
  transport::Address address_;
  std::map<PeerId, Peer> peers_;
  std::map<std::uint32_t, PeerId> peer_at_;                               // By local rank.
  std::unordered_map<std::uint64_t, std::deque<Receive>> posted_;         // By tag.
  std::unordered_map<std::uint64_t, std::uint64_t> tag_of_;               // Receive token -> tag.
  std::unordered_map<std::uint64_t, std::deque<Unexpected>> unexpected_;  // By tag.
  std::map<std::uint64_t, Lent> lent_;                                    // By id.
  std::deque<transport::Completion> ready_;
  std::size_t staged_bytes_ = 0;
  std::size_t waiting_ = 0;  // Sends and answers, of all peers.
  bool is_shut_ = false;
  bool is_asleep_ = false;  // prepare_wait() said yes.
  std::uint64_t next_id_ = 1;
  std::vector<std::byte> scratch_;
  LocalEndpointStats stats_;
};

}  // namespace herring::runtime
