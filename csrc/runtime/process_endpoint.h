#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "transport/transport.h"

namespace herring::runtime {

/// Messages between the threads of one process, as a transport: a worker and the lanes inside it. What is large is
/// copied once, by the thread that receives it, straight from the sender's memory into the receive's, or lent where the
/// receiver asks for that; what is small travels in the message.
///
/// Each endpoint belongs to one thread, as every endpoint does; two that know each other may belong to two.
class ProcessEndpoint final : public transport::Endpoint {
 public:
  static constexpr std::size_t kMaxInlineBytes = 2 << 10;
  static constexpr std::size_t kMaxSends = 4096;  ///< Not received yet; more are kAgain.

  ProcessEndpoint();
  ~ProcessEndpoint() override;

  /// Both know each other from now on, under these ids. Before either is in use.
  static void introduce(ProcessEndpoint& one, PeerId one_id, ProcessEndpoint& other, PeerId other_id);

  const transport::Address& address() const override { return address_; }
  std::string description() const override { return "memory of this process"; }
  /// Peers are introduced. Throws Error(kInvalidArgument).
  void add_peer(PeerId peer, std::span<const std::byte> address) override;
  void remove_peer(PeerId peer) override;
  Status post_send(PeerId to, Tag tag, std::span<const std::byte> first, std::span<const std::byte> second,
                   Token token) override;
  Status post_receive(Tag tag, std::span<std::byte> first, std::span<std::byte> second, Token token) override;
  Status post_loan_receive(PeerId from, Tag tag, std::span<std::byte> first, Token token) override;
  void cancel_receive(Token token) override;
  std::size_t poll(std::span<transport::Completion> completions) override;
  void wait(Instant deadline, std::span<const int> also) override;
  bool prepare_wait(std::vector<int>& descriptors, Instant& deadline) override;
  void wake() override;
  void shut_down() override;

 private:
  class Inbox;
  struct Offer;
  class OfferLoan;
  struct Message;
  struct Receive {
    std::span<std::byte> first;
    std::span<std::byte> second;
    Token token;
    bool is_loan = false;
  };

  void take(Message& message);
  std::optional<Message> take_unexpected(Tag tag);
  Status post(Tag tag, const Receive& receive);
  void fill(const Receive& receive, Message& message);
  void lend(const Receive& receive, Message& message);
  void withdraw(Offer& offer);
  void end_sleep();

  std::shared_ptr<Inbox> inbox_;
  transport::Address address_;
  std::map<PeerId, std::shared_ptr<Inbox>> peers_;
  std::unordered_map<std::uint64_t, std::shared_ptr<Offer>> offers_;   // By token: sends that nobody has received yet.
  std::unordered_map<std::uint64_t, std::deque<Receive>> posted_;      // By tag.
  std::unordered_map<std::uint64_t, std::uint64_t> tag_of_;            // Receive token -> tag.
  std::unordered_map<std::uint64_t, std::deque<Message>> unexpected_;  // By tag.
  std::deque<transport::Completion> ready_;
  bool is_shut_ = false;
  std::vector<Message> fresh_;  // Taken out of the inbox; kept for its memory.
};

}  // namespace herring::runtime
