#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "memory/domain.h"
#include "transport/forwarding_endpoint.h"

namespace herring::transport {

/// Holds the memory of every post of an endpoint that wants that, until the post is over: for suites that are the same
/// for those that do not.
class HoldingEndpoint final : public ForwardingEndpoint {
 public:
  explicit HoldingEndpoint(std::unique_ptr<Endpoint> inner) : ForwardingEndpoint(std::move(inner)) {}
  ~HoldingEndpoint() override { inner_.reset(); }  // Nothing uses the memory any more.

  Status post_send(PeerId to, Tag tag, std::span<const std::byte> first, std::span<const std::byte> second,
                   Token token) override {
    Holds holds = hold(first, second);
    Status status = inner_->post_send(to, tag, first, second, token);
    if (status.is_ok()) sends_.emplace(token.value, std::move(holds));
    return status;
  }
  Status post_receive(Tag tag, std::span<std::byte> first, std::span<std::byte> second, Token token) override {
    Holds holds = hold(first, second);
    Status status = inner_->post_receive(tag, first, second, token);
    if (status.is_ok()) receives_.emplace(token.value, std::move(holds));
    return status;
  }
  std::size_t poll(std::span<Completion> completions) override {
    const std::size_t count = inner_->poll(completions);
    for (std::size_t i = 0; i < count; ++i) {
      auto& posts = completions[i].kind == CompletionKind::kSend ? sends_ : receives_;
      const auto found = posts.find(completions[i].token.value);
      if (found != posts.end()) posts.erase(found);
    }
    return count;
  }
  void shut_down() override {
    inner_->shut_down();
    sends_.clear();
    receives_.clear();
  }

 private:
  using Holds = std::pair<memory::Hold, memory::Hold>;

  Holds hold(std::span<const std::byte> first, std::span<const std::byte> second) {
    const auto one = [this](std::span<const std::byte> memory) {
      return inner_->memory()->hold({const_cast<std::byte*>(memory.data()), memory.size()});
    };
    return {one(first), one(second)};
  }

  std::multimap<std::uint64_t, Holds> sends_;  // By token.
  std::multimap<std::uint64_t, Holds> receives_;
};

}  // namespace herring::transport
