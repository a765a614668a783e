#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "transport/transport.h"

/// What a network card that reads and writes memory by itself forgives nobody, on top of any other endpoint: memory is
/// registered while a post uses it, and registrations go before the endpoint does.
namespace herring::transport {

struct StrictOptions {
  bool refuses_unregistered = true;
  /// Empty: all work. Throws Error where a registration is to fail.
  std::function<void(std::size_t bytes)> on_register;
  /// What to do where one is not forgiven. Must be set; shared by all copies.
  std::function<void(const std::string& what)> on_fault;
};

class StrictCard : public Endpoint {
 public:
  StrictCard(std::unique_ptr<Endpoint> inner, StrictOptions options)
      : inner_(std::move(inner)), options_(std::move(options)), card_(std::make_shared<Card>()) {
    card_->on_fault = options_.on_fault;
  }
  ~StrictCard() override {
    if (!card_->regions.empty()) fault(std::to_string(card_->regions.size()) + " registrations outlive their endpoint");
    card_->is_gone = true;
  }

  const Address& address() const override { return inner_->address(); }
  std::string description() const override { return inner_->description() + ", strict"; }
  void add_peer(PeerId peer, std::span<const std::byte> address) override { inner_->add_peer(peer, address); }
  void remove_peer(PeerId peer) override { inner_->remove_peer(peer); }

  bool needs_registration() const override { return true; }
  std::unique_ptr<Registration> register_memory(std::span<std::byte> memory) override {
    if (options_.on_register) options_.on_register(memory.size());
    auto registration = std::make_unique<Region>();
    registration->inner = inner_->register_memory(memory);
    registration->card = card_;
    registration->id = card_->next++;
    card_->regions.emplace(registration->id, memory);
    return registration;
  }

  Status post_send(PeerId to, Tag tag, std::span<const std::byte> first, std::span<const std::byte> second,
                   Token token) override {
    if (Status status = check(first, second); !status.is_ok()) return status;
    const Status status = inner_->post_send(to, tag, first, second, token);
    if (status.is_ok()) card_->posts[token.value].push_back({first, second});
    return status;
  }
  Status post_receive(Tag tag, std::span<std::byte> first, std::span<std::byte> second, Token token) override {
    if (Status status = check(first, second); !status.is_ok()) return status;
    const Status status = inner_->post_receive(tag, first, second, token);
    if (status.is_ok()) card_->posts[token.value].push_back({first, second});
    return status;
  }
  void cancel_receive(Token token) override { inner_->cancel_receive(token); }

  std::size_t poll(std::span<Completion> completions) override {
    const std::size_t count = inner_->poll(completions);
    for (std::size_t i = 0; i < count; ++i) {
      const auto found = card_->posts.find(completions[i].token.value);
      if (found == card_->posts.end()) {
        fault("a post completes twice");
        continue;
      }
      found->second.pop_back();  // Users of one token for two posts at once name the same memory.
      if (found->second.empty()) card_->posts.erase(found);
    }
    return count;
  }
  void wait(Instant deadline, std::span<const int> also) override { inner_->wait(deadline, also); }
  bool prepare_wait(std::vector<int>& descriptors, Instant& deadline) override {
    return inner_->prepare_wait(descriptors, deadline);
  }
  void wake() override { inner_->wake(); }
  void shut_down() override {
    inner_->shut_down();
    card_->posts.clear();
  }

 private:
  using Memory = std::span<const std::byte>;

  void fault(const std::string& what) const { card_->fault(what); }

  /// What the card knows. Outlives the endpoint for the registrations that do.
  struct Card {
    bool covers(Memory memory) const {
      if (memory.empty()) return true;
      for (const auto& [id, region] : regions) {
        if (memory.data() >= region.data() && memory.data() + memory.size() <= region.data() + region.size()) {
          return true;
        }
      }
      return false;
    }
    std::map<std::uint64_t, Memory> regions;
    std::map<std::uint64_t, std::vector<std::pair<Memory, Memory>>> posts;  // By token.
    std::uint64_t next = 1;
    bool is_gone = false;
    std::function<void(const std::string& what)> on_fault;  // A registration may outlive what has the options.
    void fault(const std::string& what) const { on_fault("a strict endpoint: " + what); }
  };

  struct Region final : Registration {
    ~Region() override {
      card->regions.erase(id);
      for (const auto& [token, uses] : card->posts) {
        for (const auto& [first, second] : uses) {
          if (!card->covers(first) || !card->covers(second)) card->fault("memory is released while a post uses it");
        }
      }
      if (card->is_gone) card->fault("a registration is released after its endpoint");
    }
    std::unique_ptr<Registration> inner;
    std::shared_ptr<Card> card;
    std::uint64_t id = 0;
  };

  Status check(Memory first, Memory second) const {
    if (!options_.refuses_unregistered || (card_->covers(first) && card_->covers(second))) return Status::ok();
    fault("a post of " + std::to_string(first.size()) + " + " + std::to_string(second.size()) +
          " bytes that are not registered");
    return Status(Code::kTransport, "strict: memory that is not registered");
  }

  std::unique_ptr<Endpoint> inner_;
  StrictOptions options_;
  std::shared_ptr<Card> card_;
};

}  // namespace herring::transport
