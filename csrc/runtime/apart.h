#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "core/status.h"
#include "core/types.h"
#include "wire/header.h"

namespace herring::runtime {

/// A message of an engine that is two of the transport (SendAction::is_apart): first the payload, then header and body.
struct Halves {
  static constexpr std::size_t kPayload = 0;
  static constexpr std::size_t kHeader = 1;
  static constexpr std::size_t kNone = ~std::size_t{0};

  std::array<std::size_t, 2> posts{kNone, kNone};  ///< By half, while it is in the transport.
  std::size_t begun = 0;                           ///< Halves that the transport has had.
  bool is_complete = false;                        ///< It will have no more.
  Status status;                                   ///< Of the first that failed.
  bool is_withdrawn = false;
  // Of a receive: what came.
  std::optional<wire::Header> header;
  std::size_t payload_bytes = 0;

  bool is_over() const { return is_complete && posts[kPayload] == kNone && posts[kHeader] == kNone; }
  /// The post is over; which one of a receive's it was.
  std::size_t end(std::size_t post) {
    const std::size_t half = posts[kPayload] == post ? kPayload : kHeader;
    posts[half] = kNone;
    return half;
  }
};

constexpr Tag tag_of_half(Tag tag, std::size_t half) {
  return half == Halves::kPayload ? Tag{tag.value | wire::kApartTag} : tag;
}

}  // namespace herring::runtime
