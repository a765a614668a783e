#include "control/doorway.h"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "core/hmac.h"
#include "core/text.h"

namespace herring::control {
namespace {

constexpr Duration kAcceptPause = std::chrono::milliseconds(100);
constexpr int kMaxAtOnce = 64;  // So that a flood of connections does not hold up the members.

bool is_out_of_descriptors(int error) { return error == EMFILE || error == ENFILE; }

std::uint64_t random_seed() {
  std::array<std::byte, sizeof(std::uint64_t)> bytes{};
  random_bytes(bytes);
  std::uint64_t seed = 0;
  std::memcpy(&seed, bytes.data(), sizeof(seed));
  return seed;
}

}  // namespace

DescriptorClaim door_descriptors(const std::string& who, std::uint64_t members) {
  return {who + ", which " + counted(members, "process", "processes") + " connect to,", members,
          door_descriptors(members)};
}

Doorway::Doorway(UniqueFd listener)
    : listener_(std::move(listener)), lobby_(kMaxStrangers, kHandshakePatience, random_seed()) {}

void Doorway::accept_some(Instant now, const std::function<ConnectionId(UniqueFd)>& take,
                          const std::function<void(ConnectionId)>& evict) {
  for (int i = 0; i < kMaxAtOnce && listener_; ++i) {
    UniqueFd fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (fd) {
      if (const auto evicted = lobby_.make_room()) evict(*evicted);
      lobby_.enter(take(std::move(fd)), now);
      continue;
    }
    const int error = errno;
    if (error == EINTR || error == ECONNABORTED) continue;
    if (is_out_of_descriptors(error)) {
      if (const auto evicted = lobby_.evict()) {
        evict(*evicted);
        continue;
      }
    }
    // The listener stays readable: looking again at once would spin.
    if (is_out_of_descriptors(error) || error == ENOBUFS || error == ENOMEM) pause_until_ = now + kAcceptPause;
    return;
  }
}

std::vector<ConnectionId> Doorway::overdue(Instant now) {
  if (pause_until_ && now >= *pause_until_) pause_until_.reset();
  return lobby_.overdue(now);
}

Instant Doorway::next_wakeup() const { return std::min(lobby_.next_wakeup(), pause_until_.value_or(Instant::max())); }

void Doorway::close() {
  listener_.reset();
  pause_until_.reset();
}

}  // namespace herring::control
