#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "control/blobs.h"
#include "control/frame.h"
#include "control/hub.h"
#include "core/hmac.h"
#include "core/numa.h"
#include "core/types.h"

/// Bodies and handshake of the control plane: docs/wire-control.md. Everything here is pure. Decoders return nothing
/// for a body that no correct peer sends: short, long, or with a value out of range.
namespace herring::control {

inline constexpr std::uint32_t kProtocolVersion = 3;
/// Bit 0: frames carry macs. Bit 1: the data plane knows items and failover (docs/wire.md). Bit 2: a hub says whose it
/// is, and refuses who is of another job. Bit 3: the data plane answers whether a link works, and the hub judges links.
/// Bit 4: a group can be aborted alone, and who waits to say goodbye is announced. Bit 5: who joins says what launched
/// it. Bit 6: who leaves a group says so. Bit 7: a Grant says how many chunks go in one message.
/// Bit 8: reduce and reduce_scatter are not announced as all_reduce. Bit 9: rosters and gathered blobs say what
/// differs, and who exchanges says whether it wants the blobs.
inline constexpr std::uint64_t kProtocolFeatures = 1023;
inline constexpr std::size_t kMaxIdentity = 512;
inline constexpr std::size_t kMaxText = 4096;
inline constexpr std::size_t kMaxName = 255;
inline constexpr std::size_t kMaxBlob = 1 << 20;
inline constexpr std::size_t kNonceBytes = 32;
using Nonce = std::array<std::byte, kNonceBytes>;

struct Hello {
  std::uint32_t version = kProtocolVersion;
  std::uint64_t features = kProtocolFeatures;  ///< 0 where the version is not ours: the rest is not looked at.
  Nonce nonce{};
};
std::vector<std::byte> encode(const Hello& hello);
std::optional<Hello> decode_hello(std::span<const std::byte> body);

struct Challenge {
  std::uint32_t version = kProtocolVersion;
  std::uint64_t features = kProtocolFeatures;
  Nonce nonce{};
  std::uint16_t master_port = 0;  ///< What the hub's ports were derived from; 0: from nothing.
  bool started = false;           ///< All members of its job have joined.
  Digest proof{};
};
std::vector<std::byte> encode(const Challenge& challenge);
std::optional<Challenge> decode_challenge(std::span<const std::byte> body);

/// What both sides believe was said; equal only where it was.
Digest transcript(const Hello& hello, const Challenge& challenge);
/// Shows that the hub knows the secret.
Digest hub_proof(std::string_view secret, const Digest& transcript);
struct SessionKeys {
  Digest to_hub;
  Digest to_member;
};
SessionKeys session_keys(std::string_view secret, const Digest& transcript);

/// Numbers are part of the wire format and are never reused.
enum class RefuseCode : std::uint8_t {
  kVersion = 1,
  kFeatures = 2,
  kSizes = 3,
  kRankTaken = 4,
  kRankRange = 5,
  kStarted = 6,
  kClosing = 7,
  kLost = 8,
  kOtherJob = 9,
};
struct Refuse {
  RefuseCode code = RefuseCode::kVersion;
  std::string text;
};
std::vector<std::byte> encode(const Refuse& refuse);
std::optional<Refuse> decode_refuse(std::span<const std::byte> body);

struct Join {
  Member member;
  std::uint32_t workers = 0;
  std::uint32_t servers = 0;
};
std::vector<std::byte> encode(const Join& join);
std::optional<Join> decode_join(std::span<const std::byte> body);

struct Welcome {
  Duration heartbeat{};
  Duration dead_after{};
};
std::vector<std::byte> encode(const Welcome& welcome);
std::optional<Welcome> decode_welcome(std::span<const std::byte> body);

/// One frame's part of the roster, or all of it. Roles and ranks follow from the index.
struct Roster {
  struct Host {
    std::string identity;
    std::string name;
    NumaNodes nodes = 0;  ///< Of these members there; others of the host have a host of their own.
  };
  struct Place {
    std::uint32_t pid = 0;
    std::uint32_t host = 0;  ///< Which of `hosts`.
  };
  std::uint64_t job_id = 0;
  std::uint32_t total = 0;
  std::uint32_t first = 0;
  std::vector<Host> hosts;
  std::vector<Place> members;
  /// The next part.
  void add(Roster more);
};
/// A host's identity as rosters have it, where it is only compared: long ones shortened to a digest.
std::string shortened_identity(const std::string& identity);
/// Cuts the roster (by index) into frames.
std::vector<std::vector<std::byte>> encode_roster(std::uint64_t job_id, std::span<const Member> members);
std::optional<Roster> decode_roster(std::span<const std::byte> body);

struct Event {
  HubEvent::Kind kind = HubEvent::Kind::kLost;  ///< Never kHubLost.
  std::uint32_t index = 0;
  std::string reason;
  UsedGroup group = {};     ///< kGroupAborted and kGroupLeft alone.
  std::uint64_t calls = 0;  ///< kGroupLeft alone.
};
std::vector<std::byte> encode(const Event& event);
std::optional<Event> decode_event(std::span<const std::byte> body);

struct Exchange {
  std::string name;
  std::span<const std::byte> blob;  ///< A view into the body that was decoded.
  Wants wants = Wants::kBlobs;
};
std::vector<std::byte> encode(const Exchange& exchange);
std::optional<Exchange> decode_exchange(std::span<const std::byte> body);

/// Without blobs: the round is complete, for a member that wants no more.
struct Gathered {
  std::string name;
  std::uint32_t first = 0;
  Blobs blobs;
};
std::vector<std::byte> encode_completed(const std::string& name);
/// Cuts the blobs (by index) into frames.
std::vector<std::vector<std::byte>> encode_gathered(const std::string& name,
                                                    std::span<const std::vector<std::byte>> blobs);
std::optional<Gathered> decode_gathered(std::span<const std::byte> body);

struct ExchangeFailed {
  std::string name;
  std::uint32_t index = 0;
  std::string text;
};
std::vector<std::byte> encode(const ExchangeFailed& failed);
std::optional<ExchangeFailed> decode_exchange_failed(std::span<const std::byte> body);

/// Member to hub: these did not answer on the data plane.
struct Unreachable {
  Duration silent{};
  std::uint32_t of = 0;         ///< So many it looked at,
  std::uint32_t answering = 0;  ///< and so many of them it hears.
  std::vector<std::uint32_t> indices;
};
std::vector<std::byte> encode(const Unreachable& unreachable);
std::optional<Unreachable> decode_unreachable(std::span<const std::byte> body);

/// Member to hub: it has given this group up.
struct AbortGroup {
  UsedGroup group;
  std::string reason;
};
std::vector<std::byte> encode(const AbortGroup& abort);
std::optional<AbortGroup> decode_abort_group(std::span<const std::byte> body);

/// Member to hub: it calls nothing more in this group, after so many calls without a name.
struct LeaveGroup {
  UsedGroup group;
  std::uint64_t calls = 0;
};
std::vector<std::byte> encode(const LeaveGroup& leave);
std::optional<LeaveGroup> decode_leave_group(std::span<const std::byte> body);

/// Missing{name, text}.
std::vector<std::byte> encode_missing(std::string_view name, std::string_view text);
std::optional<std::pair<std::string, std::string>> decode_missing(std::span<const std::byte> body);

/// Ping, Pong.
std::vector<std::byte> encode_serial(std::uint64_t serial);
std::optional<std::uint64_t> decode_serial(std::span<const std::byte> body);
/// Query (a name), Fail, Closing (a text).
std::vector<std::byte> encode_text(std::string_view text);
std::optional<std::string> decode_text(std::span<const std::byte> body);

/// "silent for 5.0 s" and other durations for people.
std::string seconds_text(Duration duration);

}  // namespace herring::control
