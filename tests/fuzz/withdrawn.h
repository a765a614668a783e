#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <vector>

#include "core/types.h"
#include "require.h"

namespace herring::fuzz {

/// Receives that an engine has withdrawn and its transport has not given back. `receives`: what is posted, by token.
class Withdrawn final {
 public:
  template <class Receives>
  void add(Token token, const Receives& receives) {
    HERRING_REQUIRE(receives.contains(token.value));
    tokens_.push_back(token);
  }
  bool empty() const { return tokens_.empty(); }

  /// One of them: until now a message may have been landing there.
  template <class Receives>
  std::optional<Token> give_back(std::size_t which, Receives& receives) {
    if (tokens_.empty()) return std::nullopt;
    const auto at = tokens_.begin() + static_cast<std::ptrdiff_t>(which % tokens_.size());
    const Token token = *at;
    tokens_.erase(at);
    if (const auto found = receives.find(token.value); found != receives.end()) {
      std::fill(found->second.payload.begin(), found->second.payload.end(), std::byte{0x3C});
      receives.erase(found);
    }
    return token;
  }

 private:
  std::vector<Token> tokens_;
};

}  // namespace herring::fuzz
