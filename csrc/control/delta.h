#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "control/blobs.h"
#include "control/frame.h"

/// Lists of byte strings that are much alike, as the members' are, in few bytes: docs/wire-control.md, "Lists". Pure.
namespace herring::control {

using Strings = std::vector<std::vector<std::byte>>;

/// A list as bytes: each string as what differs from the one before, place by place.
std::vector<std::byte> encode_list(std::span<const std::vector<std::byte>> strings);
/// `count` strings. Nothing where the bytes are no such list, or the strings have more than `most_bytes` in all: a few
/// bytes can stand for many.
std::optional<Blobs> decode_list(BodyReader& reader, std::uint32_t count, std::size_t most_bytes);

}  // namespace herring::control
