#include "runtime/introduction.h"

#include <cstring>
#include <span>
#include <utility>

#include "core/status.h"

namespace herring::runtime {
namespace {

void append(std::vector<std::byte>& out, std::span<const std::byte> bytes) {
  const auto size = static_cast<std::uint32_t>(bytes.size());
  for (int shift = 0; shift < 32; shift += 8) out.push_back(static_cast<std::byte>(size >> shift));
  out.insert(out.end(), bytes.begin(), bytes.end());
}

std::vector<std::byte> take(std::span<const std::byte>& in, const std::string& who) {
  std::uint32_t size = 0;
  if (in.size() >= 4) {
    for (int i = 0; i < 4; ++i) size |= std::to_integer<std::uint32_t>(in[i]) << (8 * i);
  }
  if (in.size() < 4 || in.size() - 4 < size) throw Error(Code::kProtocol, who + " sent a truncated address list");
  std::vector<std::byte> item(in.begin() + 4, in.begin() + 4 + size);
  in = in.subspan(4 + size);
  return item;
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
  std::vector<std::byte> blob;
  append(blob, std::as_bytes(std::span(settings)));
  const bool has_network = !own.worker.empty() || !own.lanes.empty();
  for (const auto& address : own.worker) append(blob, address);
  for (const auto& address : own.lanes) append(blob, address);
  const std::vector<std::vector<std::byte>> blobs = hub.exchange("connect", blob, deadline);
  OthersAddresses others;
  others.lanes_of.resize(blobs.size());
  const std::size_t workers = hub.workers().size();
  for (std::size_t i = 0; i < blobs.size(); ++i) {
    const bool is_worker = i < workers;
    const std::string who = to_string(is_worker ? hub.workers()[i] : hub.servers()[i - workers]);
    std::span<const std::byte> rest = blobs[i];
    const std::vector<std::byte> theirs = take(rest, who);
    if (theirs.size() != settings.size() || std::memcmp(theirs.data(), settings.data(), settings.size()) != 0) {
      throw Error(Code::kMismatch, "the settings differ: " + who + " has " +
                                       std::string(reinterpret_cast<const char*>(theirs.data()), theirs.size()) +
                                       ", this process has " + settings + "; set them alike for every process");
    }
    if (is_worker && has_network) {
      others.workers.push_back(take(rest, who));
      others.peers.push_back(take(rest, who));
    }
    while (!rest.empty()) others.lanes_of[i].push_back(take(rest, who));
  }
  return others;
}

}  // namespace herring::runtime
