#pragma once

#include <memory>
#include <set>
#include <string>
#include <unordered_set>
#include <vector>

#include "transport/transport.h"

namespace herring::runtime {

/// Two endpoints as one: near peers are reached through the first, all others through the second, whose address and
/// memory these are. What a near peer sends is received by post_receive_from() alone.
class RoutedEndpoint final : public transport::Endpoint {
 public:
  /// `near` knows its peers already.
  RoutedEndpoint(std::unique_ptr<transport::Endpoint> near, std::set<PeerId> near_peers,
                 std::unique_ptr<transport::Endpoint> far);

  const transport::Address& address() const override { return far_->address(); }
  std::string description() const override { return far_->description(); }
  /// Near ones are known: nothing happens.
  void add_peer(PeerId peer, std::span<const std::byte> address) override;
  void remove_peer(PeerId peer) override;
  memory::Domain* memory() const override { return far_->memory(); }
  Status post_send(PeerId to, Tag tag, std::span<const std::byte> first, std::span<const std::byte> second,
                   Token token) override;
  bool takes_sends() const override { return far_->takes_sends(); }
  Status post_receive(Tag tag, std::span<std::byte> first, std::span<std::byte> second, Token token) override;
  Status post_receive_from(PeerId from, Tag tag, std::span<std::byte> first, std::span<std::byte> second,
                           Token token) override;
  Status post_loan_receive(PeerId from, Tag tag, std::span<std::byte> first, Token token) override;
  void cancel_receive(Token token) override;
  std::size_t poll(std::span<transport::Completion> completions) override;
  void wait(Instant deadline, std::span<const int> also) override;
  bool prepare_wait(std::vector<int>& descriptors, Instant& deadline) override;
  void wake() override { far_->wake(); }
  void shut_down() override;

 private:
  bool is_near(PeerId peer) const { return near_peers_.contains(peer); }

  std::unique_ptr<transport::Endpoint> near_;
  std::unique_ptr<transport::Endpoint> far_;
  const std::set<PeerId> near_peers_;
  std::unordered_set<std::uint64_t> near_receives_;  // Tokens.
};

}  // namespace herring::runtime
