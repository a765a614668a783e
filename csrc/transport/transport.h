#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/loan.h"
#include "core/status.h"
#include "core/types.h"
#include "memory/domain.h"

/// The transport contract: submit and poll, no callbacks. One endpoint belongs to one thread; only wake() may be called
/// from others. Nothing here promises ordered delivery. tests/transport/contract.h runs one suite against every
/// implementation.
namespace herring::transport {

/// Opaque bytes that another process needs to reach this endpoint.
using Address = std::vector<std::byte>;

enum class CompletionKind : std::uint8_t { kSend, kReceive, kCancelled };

struct Completion {
  Token token;
  CompletionKind kind = CompletionKind::kSend;
  std::size_t bytes = 0;            ///< kReceive: bytes that arrived, over both spans.
  Status status;                    ///< Not ok: the post failed; its memory is free again either way.
  std::shared_ptr<Loan> loan = {};  ///< post_loan_receive(): where the rest of the message lies.
};

class Endpoint {
 public:
  /// Ends what shut_down() has not ended. Nobody may be in another call.
  virtual ~Endpoint() = default;

  virtual const Address& address() const = 0;
  /// "tcp (libfabric 2.5, lo)": for logs and errors.
  virtual std::string description() const = 0;

  /// Makes a peer known under an id. Set-up, so it throws Error; an id may be given a new address later.
  virtual void add_peer(PeerId peer, std::span<const std::byte> address) = 0;
  /// Forgets a peer: its pending sends complete with kPeerLost. Unknown ids are ignored.
  virtual void remove_peer(PeerId peer) = 0;

  /// Where the memory of every post has to be held until the post is over (memory::Domain::hold; EFA, verbs:
  /// FI_MR_LOCAL); a post of other memory is refused. Outlives the endpoint. Null: any memory will do.
  virtual memory::Domain* memory() const { return nullptr; }

  /// Sends first + second as one message to a receive with the same tag. Both spans are borrowed until the completion.
  /// kAgain: the queue is full, nothing happened, poll and try again. Every accepted post completes exactly once.
  virtual Status post_send(PeerId to, Tag tag, std::span<const std::byte> first, std::span<const std::byte> second,
                           Token token) = 0;
  /// False where no send is taken now, whoever it goes to: who has some for thousands of peers need not try each. Of an
  /// endpoint that reaches some peers another way this is about the others.
  virtual bool takes_sends() const { return true; }
  /// Receives one message with this tag from anyone (of several receives with one tag, any; only kControlTag has many):
  /// its first first.size() bytes into `first`, the rest into `second`. A longer message completes with a status that
  /// is not ok.
  virtual Status post_receive(Tag tag, std::span<std::byte> first, std::span<std::byte> second, Token token) = 0;
  /// The same where only `from` sends that message. Endpoints that reach their peers in more than one way need to know;
  /// these do not find a message of a near peer with post_receive().
  virtual Status post_receive_from([[maybe_unused]] PeerId from, Tag tag, std::span<std::byte> first,
                                   std::span<std::byte> second, Token token) {
    return post_receive(tag, first, second, token);
  }
  /// Receives one message of a peer in this process: its first first.size() bytes into `first`; the rest stays where
  /// the sender has it, and its send completes when Completion::loan is given back. Only small messages are not lent:
  /// they complete with a status that is not ok.
  virtual Status post_loan_receive([[maybe_unused]] PeerId from, [[maybe_unused]] Tag tag,
                                   [[maybe_unused]] std::span<std::byte> first, [[maybe_unused]] Token token) {
    return Status(Code::kInvalidArgument, description() + ": peers lend no memory here");
  }
  /// Withdraws a receive. It completes once: as kCancelled, or as kReceive where the message came first.
  virtual void cancel_receive(Token token) = 0;

  /// Drives progress and hands out finished posts, at most completions.size(). Never blocks.
  virtual std::size_t poll(std::span<Completion> completions) = 0;

  /// Blocks until there may be something to poll, wake() was called, or the deadline passed. A descriptor in
  /// `also` (eventfd, socket) becoming readable ends the wait too. Does not spin.
  virtual void wait(Instant deadline, std::span<const int> also = {}) = 0;
  /// For who waits on several endpoints at once: appends what to poll(2) on, and may bring the deadline forward. False
  /// where there may be something to poll already. Call poll() afterwards.
  virtual bool prepare_wait(std::vector<int>& descriptors, Instant& deadline) = 0;
  /// Ends a wait() in progress or the next one. Any thread.
  virtual void wake() = 0;

  /// For who cannot wait for completions: ends all posts without one. When it returns, the endpoint touches no memory
  /// any more: what was held for its posts can be let go, and memory be freed. From then on it refuses posts and has
  /// nothing to poll; every other call is allowed still, and does nothing. This is not the destructor: whoever drives
  /// the endpoint calls it, maybe twice, while others that know it may still call wake().
  virtual void shut_down() = 0;
};

}  // namespace herring::transport
