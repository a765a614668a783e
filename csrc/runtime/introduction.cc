#include "runtime/introduction.h"

#include <algorithm>
#include <span>
#include <utility>

#include "core/hmac.h"
#include "core/status.h"
#include "core/text.h"

namespace herring::runtime {
namespace {

/// Of SHA-256 over the settings.
constexpr std::size_t kFingerprintBytes = 16;

void append(std::vector<std::byte>& out, std::span<const std::byte> bytes) {
  const auto size = static_cast<std::uint32_t>(bytes.size());
  for (int shift = 0; shift < 32; shift += 8) out.push_back(static_cast<std::byte>(size >> shift));
  out.insert(out.end(), bytes.begin(), bytes.end());
}

std::string name_of(const HubClient& hub, std::size_t member) {
  const std::size_t workers = hub.workers().size();
  return to_string(member < workers ? hub.workers()[member] : hub.servers()[member - workers]);
}

std::vector<std::byte> take(std::span<const std::byte>& in, const HubClient& hub, std::size_t member) {
  std::uint32_t size = 0;
  if (in.size() >= 4) {
    for (int i = 0; i < 4; ++i) size |= std::to_integer<std::uint32_t>(in[i]) << (8 * i);
  }
  if (in.size() < 4 || in.size() - 4 < size) {
    throw Error(Code::kProtocol, name_of(hub, member) + " sent a truncated address list");
  }
  std::vector<std::byte> item(in.begin() + 4, in.begin() + 4 + size);
  in = in.subspan(4 + size);
  return item;
}

[[noreturn]] void name_difference(HubClient& hub, const std::string& settings, Instant deadline) {
  const auto all = hub.exchange("settings", std::as_bytes(std::span(settings)), deadline);
  for (std::size_t i = 0; i < all.size(); ++i) {
    const std::string theirs(reinterpret_cast<const char*>(all[i].data()), all[i].size());
    if (theirs == settings) continue;
    throw Error(Code::kMismatch, "the settings differ: " + name_of(hub, i) + " has " + printable(theirs) +
                                     ", this process has " + settings +
                                     "; set them to the same values in every process");
  }
  throw Error(Code::kProtocol, "the settings differ, but all say the same: a process broke the protocol");
}

}  // namespace

std::string settings_that_must_agree(const Config& config) {
  return "HERRING_LANES=" + std::to_string(config.lanes) +
         " HERRING_BUCKET_BYTES=" + std::to_string(config.bucket_bytes) +
         " HERRING_CHUNK_BYTES=" + std::to_string(config.chunk_bytes) +
         " HERRING_WINDOW=" + std::to_string(config.window) +
         " HERRING_EAGER_BYTES=" + std::to_string(config.eager_bytes) +
         " HERRING_LOCAL_PART_BYTES=" + std::to_string(config.local_part_bytes) +
         " HERRING_INTRA_NODE=" + std::to_string(static_cast<int>(config.intra_node)) +
         " HERRING_FAILOVER=" + std::to_string(static_cast<int>(config.failover)) +
         " HERRING_CHECKSUM=" + std::to_string(static_cast<int>(config.checksum)) +
         " HERRING_CHECK_FINITE=" + std::to_string(static_cast<int>(config.check_finite)) +
         " HERRING_BACKUP_WORKERS=" + std::to_string(config.backup_workers) +
         " HERRING_BACKUP_GRACE_S=" + std::to_string(config.backup_grace_s) +
         " HERRING_BACKUP_BYTES=" + std::to_string(config.backup_bytes);
}

OthersAddresses introduce(HubClient& hub, const std::string& settings, const OwnAddresses& own, Instant deadline) {
  const Digest digest = sha256(std::as_bytes(std::span(settings)));
  const auto fingerprint = std::span(digest).first(kFingerprintBytes);
  std::vector<std::byte> blob(fingerprint.begin(), fingerprint.end());
  const bool has_network = !own.worker.empty() || !own.lanes.empty();
  if (!own.worker.empty()) append(blob, own.worker.at(1));
  for (const auto& address : own.lanes) append(blob, address);
  const std::vector<std::vector<std::byte>> blobs = hub.exchange("connect", blob, deadline);
  const auto is_like_ours = [&](const std::vector<std::byte>& theirs) {
    return theirs.size() >= kFingerprintBytes &&
           std::ranges::equal(std::span(theirs).first(kFingerprintBytes), fingerprint);
  };
  // All see the same blobs, so all come here, or none.
  if (!std::ranges::all_of(blobs, is_like_ours)) name_difference(hub, settings, deadline);
  OthersAddresses others;
  others.lanes_of.resize(blobs.size());
  for (std::size_t i = 0; i < blobs.size(); ++i) {
    std::span<const std::byte> rest = std::span(blobs[i]).subspan(kFingerprintBytes);
    if (i < hub.workers().size() && has_network) others.peers.push_back(take(rest, hub, i));
    while (!rest.empty()) others.lanes_of[i].push_back(take(rest, hub, i));
  }
  if (!has_network) return others;
  // Where a lane reaches a worker is for lanes alone.
  std::vector<std::byte> mine;
  if (!own.worker.empty()) append(mine, own.worker.front());
  const bool has_lanes = !own.lanes.empty();
  const auto theirs = hub.exchange("workers", mine, deadline, has_lanes ? Wants::kBlobs : Wants::kNothing);
  for (std::size_t i = 0; has_lanes && i < hub.workers().size(); ++i) {
    std::span<const std::byte> rest = theirs[i];
    others.workers.push_back(take(rest, hub, i));
  }
  return others;
}

}  // namespace herring::runtime
