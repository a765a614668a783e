#include "control/delta.h"

#include <algorithm>
#include <limits>

namespace herring::control {
namespace {

/// Fewer equal bytes than this are cheaper among those that differ.
constexpr std::size_t kLeastCopy = 3;

std::size_t equal_bytes(std::span<const std::byte> one, std::span<const std::byte> other) {
  return static_cast<std::size_t>(std::ranges::mismatch(one, other).in1 - one.begin());
}

std::span<const std::byte> from(std::span<const std::byte> bytes, std::size_t at) {
  return bytes.subspan(std::min(at, bytes.size()));
}

/// Where the next bytes worth copying begin.
std::size_t end_of_new(std::span<const std::byte> string, std::span<const std::byte> before, std::size_t at) {
  while (at < string.size()) {
    const std::size_t same = equal_bytes(from(string, at), from(before, at));
    if (same >= kLeastCopy || at + same == string.size()) return same == 0 ? at + 1 : at;
    at += same + 1;
  }
  return std::min(at, string.size());
}

void put(BodyWriter& writer, std::span<const std::byte> string, std::span<const std::byte> before) {
  writer.count(string.size());
  for (std::size_t at = 0; at < string.size();) {
    const std::size_t same = equal_bytes(from(string, at), from(before, at));
    writer.count(same);
    at += same;
    if (at == string.size()) return;
    const std::size_t end = end_of_new(string, before, at);
    writer.count(end - at).raw(string.subspan(at, end - at));
    at = end;
  }
}

}  // namespace

std::vector<std::byte> encode_list(std::span<const std::vector<std::byte>> strings) {
  BodyWriter writer;
  std::span<const std::byte> before;
  for (const auto& string : strings) {
    put(writer, string, before);
    before = string;
  }
  return writer.take();
}

std::optional<Blobs> decode_list(BodyReader& reader, std::uint32_t count, std::size_t most_bytes) {
  Blobs blobs;
  for (std::uint32_t i = 0; i < count && reader.ok(); ++i) {
    const std::size_t size = reader.count();
    if (!reader.ok() || size > most_bytes) return std::nullopt;
    most_bytes -= size;
    // Most have the length of the first.
    if (i == 0) blobs.reserve(std::min<std::size_t>(count, reader.left()), std::min(most_bytes + size, size * count));
    BlobBuilder next(blobs, size);
    for (bool is_first = true; next.left() > 0; is_first = false) {
      const std::size_t same = reader.count();
      if (same > next.left() || (same == 0 && !is_first) || !next.copy(same)) return std::nullopt;
      if (next.left() == 0) break;
      const std::size_t fresh = reader.count();
      if (fresh == 0 || fresh > next.left()) return std::nullopt;
      next.add(reader.raw(fresh));
      if (!reader.ok()) return std::nullopt;
    }
  }
  if (!reader.ok()) return std::nullopt;
  return blobs;
}

}  // namespace herring::control
