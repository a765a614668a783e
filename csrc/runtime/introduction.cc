#include "runtime/introduction.h"

#include <algorithm>
#include <span>
#include <sstream>
#include <utility>

#include "core/config_value.h"
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

std::span<const std::byte> take(std::span<const std::byte>& in, const HubClient& hub, std::size_t member) {
  std::uint32_t size = 0;
  if (in.size() >= 4) {
    for (int i = 0; i < 4; ++i) size |= std::to_integer<std::uint32_t>(in[i]) << (8 * i);
  }
  if (in.size() < 4 || in.size() - 4 < size) {
    throw Error(Code::kProtocol, to_string(hub.member(member)) + " sent a truncated address list");
  }
  const std::span<const std::byte> item = in.subspan(4, size);
  in = in.subspan(4 + size);
  return item;
}

const char* switch_text(Switch value) { return value == Switch::kOn ? "on" : value == Switch::kOff ? "off" : "auto"; }

const char* switch_text(Toggle value) { return value == Toggle::kOn ? "on" : "off"; }

/// Of settings behind each other, those that the others do not have.
std::string settings_beyond(const std::string& settings, const std::string& others) {
  std::string beyond;
  std::istringstream each(settings);
  for (std::string setting; each >> setting;) {
    if ((" " + others + " ").find(" " + setting + " ") == std::string::npos) beyond += " " + setting;
  }
  return beyond;
}

[[noreturn]] void name_difference(HubClient& hub, const std::string& settings, Instant deadline) {
  const auto all = hub.exchange("settings", std::as_bytes(std::span(settings)), deadline);
  for (std::size_t i = 0; i < all.size(); ++i) {
    const std::string theirs(reinterpret_cast<const char*>(all[i].data()), all[i].size());
    if (theirs == settings) continue;
    throw Error(Code::kMismatch, "the settings differ: " + to_string(hub.member(i)) + " has" +
                                     settings_beyond(printable(theirs), settings) + ", this process has" +
                                     settings_beyond(settings, theirs) +
                                     "; set them to the same values in every process");
  }
  throw Error(Code::kProtocol, "the settings differ, but all say the same: a process broke the protocol");
}

/// Of what each has said, behind its fingerprint.
OthersAddresses addresses_of(const control::Blobs& blobs, const HubClient& hub, bool has_network) {
  OthersAddresses others;
  others.lanes_of.resize(blobs.size());
  for (std::size_t i = 0; i < blobs.size(); ++i) {
    std::span<const std::byte> rest = blobs[i].subspan(kFingerprintBytes);
    if (i < hub.worker_count() && has_network) {
      const auto peer = take(rest, hub, i);
      if (i == 0) others.peers.reserve(hub.worker_count(), hub.worker_count() * peer.size());
      others.peers.add(peer);
    }
    while (!rest.empty()) {
      const auto lane = take(rest, hub, i);
      others.lanes_of[i].emplace_back(lane.begin(), lane.end());
    }
  }
  return others;
}

}  // namespace

std::string settings_that_must_agree(const Config& config) {
  return "HERRING_LANES=" + std::to_string(config.lanes) + " HERRING_PART_BYTES=" + bytes_text(config.part_bytes) +
         " HERRING_CHUNK_BYTES=" + bytes_text(config.chunk_bytes) + " HERRING_WINDOW=" + std::to_string(config.window) +
         " HERRING_EAGER_BYTES=" +
         (config.eager_bytes == config.embedded_eager_bytes ? bytes_text(config.eager_bytes) : "default") +
         " HERRING_ONE_HOP_HOSTS=" + std::to_string(config.one_hop_hosts) +
         " HERRING_ONE_HOP_BYTES=" + bytes_text(config.one_hop_bytes) +
         " HERRING_LOCAL_PART_BYTES=" + bytes_text(config.local_part_bytes) +
         " HERRING_INTRA_NODE=" + switch_text(config.intra_node) + " HERRING_FAILOVER=" + switch_text(config.failover) +
         " HERRING_CHECKSUM=" + switch_text(config.checksum) +
         " HERRING_CHECK_FINITE=" + switch_text(config.check_finite) +
         " HERRING_BACKUP_WORKERS=" + std::to_string(config.backup_workers) +
         " HERRING_BACKUP_GRACE_S=" + seconds_text(config.backup_grace_s) +
         " HERRING_BACKUP_BYTES=" + bytes_text(config.backup_bytes);
}

OthersAddresses introduce(HubClient& hub, const std::string& settings, const OwnAddresses& own, Instant deadline) {
  const Digest digest = sha256(std::as_bytes(std::span(settings)));
  const auto fingerprint = std::span(digest).first(kFingerprintBytes);
  std::vector<std::byte> blob(fingerprint.begin(), fingerprint.end());
  const bool has_network = !own.worker.empty() || !own.lanes.empty();
  if (!own.worker.empty()) append(blob, own.worker.at(1));
  for (const auto& address : own.lanes) append(blob, address);
  control::Blobs blobs = hub.gather("connect", blob, deadline);
  for (std::size_t i = 0; i < blobs.size(); ++i) {
    const bool is_like_ours =
        blobs[i].size() >= kFingerprintBytes && std::ranges::equal(blobs[i].first(kFingerprintBytes), fingerprint);
    // All see the same blobs, so all come here, or none.
    if (!is_like_ours) name_difference(hub, settings, deadline);
  }
  OthersAddresses others = addresses_of(std::exchange(blobs, {}), hub, has_network);
  if (!has_network) return others;
  // Where a lane reaches a worker is for lanes alone.
  std::vector<std::byte> mine;
  if (!own.worker.empty()) append(mine, own.worker.front());
  const bool has_lanes = !own.lanes.empty();
  const auto theirs = hub.gather("workers", mine, deadline, has_lanes ? Wants::kBlobs : Wants::kNothing);
  for (std::size_t i = 0; has_lanes && i < hub.worker_count(); ++i) {
    std::span<const std::byte> rest = theirs[i];
    const auto address = take(rest, hub, i);
    others.workers.emplace_back(address.begin(), address.end());
  }
  return others;
}

}  // namespace herring::runtime
