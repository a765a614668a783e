#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "efa/fabric_under_test.h"

namespace herring::efa {

using Bytes = std::vector<std::byte>;

inline Bytes pattern(std::size_t bytes, std::uint32_t seed) {
  Bytes data(bytes);
  std::uint32_t state = seed * 2654435761u + 1;
  for (std::byte& b : data) {
    state = state * 1664525u + 1013904223u;
    b = static_cast<std::byte>(state >> 24);
  }
  return data;
}

/// An endpoint and everything that it completed, by token.
struct Party {
  std::unique_ptr<transport::Endpoint> endpoint;
  std::map<std::uint64_t, transport::Completion> done;

  std::size_t poll() {
    std::vector<transport::Completion> batch(16);
    const std::size_t count = endpoint->poll(batch);
    for (std::size_t i = 0; i < count; ++i) {
      EXPECT_TRUE(done.try_emplace(batch[i].token.value, batch[i]).second)
          << "token " << batch[i].token.value << " completed twice";
    }
    return count;
  }
};

/// Tests that play all parties from one thread, or one party per thread.
class FabricTest : public ::testing::Test {
 protected:
  /// False, with the reason printed, where there is no libfabric.
  bool open(std::size_t count, const FabricOptions& options = options_under_test()) {
    std::string reason;
    fabric_ = fabric_under_test(reason, options);
    if (fabric_ == nullptr) {
      std::cout << "skipped: " << reason << '\n';
      return false;
    }
    parties_.resize(count);
    for (Party& party : parties_) party.endpoint = fabric_->open_endpoint();
    for (Party& party : parties_) {
      for (std::uint32_t i = 0; i < count; ++i) party.endpoint->add_peer(PeerId{i}, parties_[i].endpoint->address());
    }
    return true;
  }
  /// Polls all parties until the condition holds or 30 s have passed.
  bool until(const std::function<bool()>& condition) {
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (!condition()) {
      std::size_t count = 0;
      for (Party& party : parties_) count += party.endpoint != nullptr ? party.poll() : 0;
      const auto now = std::chrono::steady_clock::now();
      if (now > limit) return false;
      if (count > 0) continue;
      for (Party& party : parties_) {
        if (party.endpoint != nullptr) party.endpoint->wait(now + std::chrono::microseconds(200));
      }
    }
    return true;
  }

  std::unique_ptr<Fabric> fabric_;
  std::vector<Party> parties_;
};

#define HERRING_FABRIC_OPEN(...) \
  if (!open(__VA_ARGS__)) GTEST_SKIP() << "no libfabric here"

}  // namespace herring::efa
