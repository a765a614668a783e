#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "intra_node/engine.h"
#include "intra_node/local_message.h"

/// One operation part as the engine keeps it, and who reads and writes which bytes of it. Nothing here knows messages'
/// order, deadlines or failures: that is the engine's.
namespace herring::intra_node {

/// How the bytes travel; follows from the operation and the settings, the same on every member.
enum class Way : std::uint8_t {
  kNothing,   ///< No bytes: a barrier.
  kInline,    ///< In the Ready messages; everybody sums for itself.
  kSlots,     ///< Every member has a slot in its arena; member i reduces range i.
  kFromRoot,  ///< The root has a slot; the others copy from it.
};

enum class Stage : std::uint8_t {
  kEarly,        ///< Others have called it, we have not.
  kGathering,    ///< Waiting for the others' Ready.
  kNetwork,      ///< Our range is with the network.
  kSharing,      ///< Waiting for the others' ranges (or, as a root, for the others to have copied).
  kReleasing,    ///< Complete; others still read our staging memory.
  kFailing,      ///< Failed; before the caller hears of it, the others let go of our memory.
  kQuarantined,  ///< Failed and reported; a member that never let go may still touch our staging memory.
};

/// What another rank has said about an operation.
struct Said {
  bool ready = false;
  bool reduced = false;
  bool released = false;  ///< Touches our memory no more.
  bool is_patient = false;
  OpDescriptor descriptor;
  std::uint64_t layout = 0;
  Location location = Location::kNone;
  std::uint64_t offset = 0;
  std::vector<std::byte> data;
};

struct Exchange {
  OpKey key;
  LocalOperation operation;
  std::vector<Said> said;  ///< By local rank.
  Stage stage = Stage::kEarly;
  Way way = Way::kNothing;
  std::uint32_t me = 0;  ///< Index into members.
  Location location = Location::kNone;
  std::uint64_t layout = 0;
  std::span<std::byte> staging;
  bool network_pending = false;
  Instant begun{};
  Instant deadline = Instant::max();  ///< Of the operation; while failing, of the others' letting go.
  Instant mismatch_deadline = Instant::max();
  Instant stalls_at = Instant::max();  ///< Then it is worth a warning.
  Status failure;

  std::uint32_t size() const { return static_cast<std::uint32_t>(operation.members.size()); }
  /// The first of its three times.
  Instant due() const { return std::min({deadline, mismatch_deadline, stalls_at}); }
  std::uint32_t rank_of(std::uint32_t member) const { return operation.members[member]; }
  const Said& of(std::uint32_t member) const { return said[operation.members[member]]; }
  bool is_root() const { return me == operation.root; }
  bool is_rooted() const;
  bool owns_bytes(std::uint32_t member) const;
  /// Submitted, and the caller has not been told the end of it.
  bool is_active() const;
  bool everybody_is_ready() const;
  bool everybody_let_go() const;
  /// Nothing that `member` could still say is needed to finish.
  bool can_do_without(std::uint32_t member) const;
};

/// Ok, or kInvalidArgument saying what is wrong with the operation.
Status check(const LocalOperation& operation, const EngineConfig& config);
Way choose_way(const LocalOperation& operation, const EngineConfig& config);
std::uint64_t layout_hash(const LocalOperation& operation, Way way);
/// The same where the members' ranges do not matter: all ways but kSlots, inside the host alone.
std::uint64_t layout_hash(std::span<const std::uint32_t> members, std::uint32_t average_over, std::uint32_t root,
                          Way way);
/// Where member `member` must keep its bytes for this way; false where what it said does not fit.
bool location_fits(const Exchange& exchange, std::uint32_t member, const EngineConfig& config);

/// The bytes of a member where all ranks see them (kSlots, kFromRoot).
std::span<std::byte> slot_of(const Exchange& exchange, std::uint32_t member, const EngineConfig& config);

/// The actions of each phase, appended to `out`.
void copy_in(const Exchange& exchange, LocalActions& out);
/// What this member is about to read: kNotFinite naming whose input has NaN or infinity.
Status check_finite(const Exchange& exchange, const EngineConfig& config);
void reduce_inline(const Exchange& exchange, LocalActions& out);
void reduce_own(const Exchange& exchange, const EngineConfig& config, LocalActions& out);
/// After the network: our range to everybody who does not come for it.
void spread_own(const Exchange& exchange, const EngineConfig& config, LocalActions& out);
/// A staged member fetches the range of `member`.
void copy_out(const Exchange& exchange, std::uint32_t member, const EngineConfig& config, LocalActions& out);
void copy_from_root(const Exchange& exchange, const EngineConfig& config, LocalActions& out);
/// After the end, whether we read the staging memory of `member`, or it reads ours.
bool reads_staging_of(const Exchange& exchange, std::uint32_t member);
bool is_read_by(const Exchange& exchange, std::uint32_t member);

/// For people.
std::string mismatch_text(const Exchange& exchange);
std::string timeout_text(const Exchange& exchange);
/// Of an operation that some have not called for so long. Empty: another rank of this host says it, which is not one
/// that lets others come when they like.
std::string stall_text(const Exchange& exchange, Duration least, Duration waited);
/// "rank 3", "ranks 3, 5": world ranks of the members for which `is_meant` is true.
template <class Predicate>
std::string name_ranks(const Exchange& exchange, Predicate is_meant) {
  std::string list;
  std::uint32_t count = 0;
  for (std::uint32_t i = 0; i < exchange.size(); ++i) {
    if (!is_meant(i)) continue;
    list += (count++ == 0 ? "" : ", ") + std::to_string(exchange.operation.world_ranks[i]);
  }
  return (count == 1 ? "rank " : "ranks ") + list;
}

}  // namespace herring::intra_node
