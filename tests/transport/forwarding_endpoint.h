#pragma once

#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "transport/transport.h"

namespace herring::transport {

/// All that another endpoint does; for those that change some of it.
class ForwardingEndpoint : public Endpoint {
 public:
  const Address& address() const override { return inner_->address(); }
  std::string description() const override { return inner_->description(); }
  void add_peer(PeerId peer, std::span<const std::byte> address) override { inner_->add_peer(peer, address); }
  void remove_peer(PeerId peer) override { inner_->remove_peer(peer); }
  memory::Domain* memory() const override { return inner_->memory(); }
  Status post_send(PeerId to, Tag tag, std::span<const std::byte> first, std::span<const std::byte> second,
                   Token token) override {
    return inner_->post_send(to, tag, first, second, token);
  }
  bool takes_sends() const override { return inner_->takes_sends(); }
  Status post_receive(Tag tag, std::span<std::byte> first, std::span<std::byte> second, Token token) override {
    return inner_->post_receive(tag, first, second, token);
  }
  void cancel_receive(Token token) override { inner_->cancel_receive(token); }
  std::size_t poll(std::span<Completion> completions) override { return inner_->poll(completions); }
  void wait(Instant deadline, std::span<const int> also) override { inner_->wait(deadline, also); }
  bool prepare_wait(std::vector<int>& descriptors, Instant& deadline) override {
    return inner_->prepare_wait(descriptors, deadline);
  }
  void wake() override { inner_->wake(); }
  void shut_down() override { inner_->shut_down(); }

 protected:
  explicit ForwardingEndpoint(std::unique_ptr<Endpoint> inner) : inner_(std::move(inner)) {}

  std::unique_ptr<Endpoint> inner_;
};

}  // namespace herring::transport
