#include <algorithm>
#include <array>
#include <cstdint>
#include <span>

#include "require.h"
#include "wire/header.h"

/// Any bytes as a message: what decodes must encode to the same bytes, and keep what docs/wire.md promises.
namespace herring::wire {
namespace {

using Wide = unsigned __int128;  // Sums that cannot wrap, so that the checks under test are not checked by themselves.

void check_announce(const Announce& announce) {
  const OpDescriptor& d = announce.descriptor;
  const std::size_t element = element_bytes(d.dtype);
  HERRING_REQUIRE(element > 0 && name(d.reduce) != "unknown" && name(d.collective) != "unknown");
  HERRING_REQUIRE(d.dims <= kMaxDims && d.part_bytes <= d.op_bytes && d.part_bytes % element == 0);
  HERRING_REQUIRE(announce.contributor < announce.contributor_count && announce.rank_count > 0);
  HERRING_REQUIRE(Wide{announce.first_rank} + announce.rank_count <= 0xFFFFFFFF);
  HERRING_REQUIRE(announce.average_over > 0 && announce.timeout_ms > 0);
  HERRING_REQUIRE(Wide{announce.shard_offset} + announce.shard_bytes <= d.part_bytes);
  HERRING_REQUIRE(announce.shard_offset % element == 0 && announce.shard_bytes % element == 0);
  HERRING_REQUIRE(announce.chunk_bytes % 64 == 0 && announce.chunk_bytes <= 64u << 20);
  HERRING_REQUIRE(announce.shard_bytes == 0 || announce.chunk_bytes > 0);
  // Every owned chunk but the last is whole and inside the shard: where a lane will read and write.
  if (announce.owned_count > 0) {
    const Wide last = Wide{announce.owned_first} + announce.owned_count - 1;
    HERRING_REQUIRE(last * announce.chunk_bytes < announce.shard_bytes);
  }
}

void check_header(std::span<const std::byte> bytes) {
  const auto header = decode(bytes);
  if (!header) return;
  const HeaderBytes again = encode(*header);
  HERRING_REQUIRE(std::equal(again.begin(), again.end(), bytes.begin()));
}

void run(std::span<const std::byte> data) {
  check_header(data);
  if (data.size() >= kHeaderBytes) {
    // The checksum would stop nearly every input; a hostile sender computes it.
    HeaderBytes sealed;
    std::copy_n(data.begin(), kHeaderBytes, sealed.begin());
    const std::uint32_t crc = crc32c(std::span(sealed).first(76));
    for (std::size_t i = 0; i < 4; ++i) sealed[76 + i] = static_cast<std::byte>(crc >> (8 * i));
    check_header(sealed);
    data = data.subspan(kHeaderBytes);
  }
  const auto announce = decode_announce(data);
  if (!announce) return;
  check_announce(*announce);
  const auto again = encode(*announce);
  HERRING_REQUIRE(std::equal(again.begin(), again.end(), data.begin()));
}

}  // namespace
}  // namespace herring::wire

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  herring::wire::run(std::as_bytes(std::span(data, size)));
  return 0;
}
