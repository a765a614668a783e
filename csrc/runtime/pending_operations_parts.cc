// An operation is cut into parts, and each part goes through shared memory, servers, or both.

#include <algorithm>
#include <span>
#include <utility>
#include <variant>

#include "core/copy.h"
#include "core/status.h"
#include "fusion_buffer/fusion_buffer.h"
#include "runtime/part_size.h"
#include "runtime/pending_operations_part.h"

namespace herring::runtime {
namespace {

// Parts of one operation in flight. Network parts overlap push, sum and pull (about four buckets in flight is the knee
// that Herring's first version found). Staged parts stay in the core's own cache between the two copies: their memory
// is used again and again.
constexpr std::uint32_t kHostWindow = 4;
constexpr std::uint32_t kStagedWindow = 3;
constexpr std::uint32_t kNetworkWindow = 4;

// What is registered of an operation at once. Pinning takes about as long as the network does: the rest of a huge
// tensor is pinned while its beginning is under way.
constexpr std::uint64_t kRegisterBytes = 128 << 20;

std::vector<std::vector<intra_node::ByteSpan>> even_shares(std::uint64_t bytes, std::size_t members) {
  std::vector<std::vector<intra_node::ByteSpan>> shares(members);
  const auto units = static_cast<std::uint32_t>((bytes + kPartAlignment - 1) / kPartAlignment);
  for (std::uint32_t i = 0; i < members; ++i) {
    const IndexRange range = split_evenly(units, static_cast<std::uint32_t>(members), i);
    const std::uint64_t first = std::min(range.first * kPartAlignment, bytes);
    const std::uint64_t last = std::min((std::uint64_t{range.first} + range.count) * kPartAlignment, bytes);
    if (last > first) shares[i].push_back({first, last - first});
  }
  return shares;
}

std::uint32_t window_of(const PendingOperation& operation) {
  if (operation.path != GroupRoute::Path::kLocal) return kNetworkWindow;
  return operation.staged ? kStagedWindow : kHostWindow;
}

/// The bytes of so many parts from that block's first one. Blocks of an all-gather follow each other without a gap.
std::span<std::byte> registered_block(const PendingOperation& operation, std::uint32_t block) {
  const auto start_of = [&](std::uint64_t part) {
    const std::uint64_t of_block = part % operation.parts_per_block * operation.part_bytes;
    return std::min(part / operation.parts_per_block * operation.block_bytes + of_block,
                    std::uint64_t{operation.output.size()});
  };
  const std::uint64_t first = start_of(std::uint64_t{block} * operation.register_parts);
  const std::uint64_t last =
      start_of(std::min((std::uint64_t{block} + 1) * operation.register_parts, std::uint64_t{operation.parts}));
  return operation.output.subspan(first, last - first);
}

/// Of the next part.
bool is_there(const PendingOperation& operation) {
  if (operation.late == nullptr) return true;
  const std::uint64_t end = (std::uint64_t{operation.next_part} + 1) * operation.part_bytes;
  return std::min(end, std::uint64_t{operation.output.size()}) <= operation.late->bytes_there();
}

/// Servers know the parts of an operation alone. What another part failed with, here or on another rank, has been
/// located there: news of it may come before those of that part itself.
Status locate(const PendingOperation& operation, std::uint32_t part, const Status& status) {
  constexpr std::string_view kLocated = "; elements are counted within part ";
  if (status.message().find(kLocated) != std::string::npos) return status;
  std::string text = operation.name.empty() ? "" : "'" + operation.name + "': ";
  text += status.message();
  if (operation.parts > 1) {
    const std::uint64_t first = part * operation.part_bytes / element_bytes(operation.descriptor.dtype);
    text += std::string(kLocated) + std::to_string(part) + ", which begins at element " + std::to_string(first) +
            " of the operation";
  }
  return Status(status.code(), std::move(text));
}

}  // namespace

std::uint64_t PendingOperations::part_bytes(GroupRoute::Path path) const {
  const std::size_t lanes = servers_ == nullptr ? 0 : servers_->config().lanes.size();
  const std::uint32_t chunk_bytes = servers_ == nullptr ? 0 : servers_->config().chunk_bytes;
  const std::uint64_t bytes = path == GroupRoute::Path::kLocal
                                  ? options_.config.local_part_bytes
                                  : balanced_part_bytes(options_.config.part_bytes, lanes, chunk_bytes);
  return std::max(bytes / kPartAlignment, std::uint64_t{1}) * kPartAlignment;
}

void PendingOperations::plan_parts(PendingOperation& operation) const {
  const GroupRoute& route = operation.group->route;
  operation.path = route.path;
  const bool is_reduced = reduces(operation.descriptor.collective);
  if (operation.path == GroupRoute::Path::kHostFirst && !is_reduced) operation.path = GroupRoute::Path::kNetwork;
  // A host's own reduction would wait for its slowest rank.
  if (operation.has_backup) operation.path = GroupRoute::Path::kNetwork;
  const bool gathers = operation.descriptor.collective == Collective::kAllGather;
  const std::uint64_t blocks = gathers ? route.ranks.size() : 1;
  operation.block_bytes = operation.output.size() / blocks;
  operation.part_bytes = part_bytes(operation.path);
  const std::uint64_t parts = (operation.block_bytes + operation.part_bytes - 1) / operation.part_bytes;
  operation.parts_per_block = static_cast<std::uint32_t>(std::max<std::uint64_t>(parts, 1));
  operation.parts = operation.parts_per_block * static_cast<std::uint32_t>(blocks);
  operation.register_parts =
      static_cast<std::uint32_t>(std::max(kRegisterBytes / operation.part_bytes, std::uint64_t{1}));
}

/// Asks who is in, before any data goes (docs/adr/0007-backup-workers.md).
void PendingOperations::start_join(Instant now, const Operation& operation) {
  auto part = std::make_unique<Part>();
  part->operation = operation;
  part->key = {operation->group->id, operation->op, 0};
  part->descriptor = operation->descriptor;
  part->descriptor.part_bytes = 0;
  part->is_join = true;
  ++operation->in_flight;
  Part& join = *part;
  add_part(std::move(part));
  submit_network(now, join, {});
}

void PendingOperations::take_roster(PendingOperation& operation, const Roster& roster) {
  const std::vector<std::uint32_t>& ranks = operation.group->route.ranks;
  operation.roster = roster;
  operation.work->set_contributors(members_of(roster));
  for (std::uint32_t member = 0; member < ranks.size(); ++member) {
    if (is_in(roster, member)) continue;
    options_.counters->dropped_contributions.resize(options_.placement->workers);
    ++options_.counters->dropped_contributions[ranks[member]];
  }
}

void PendingOperations::start_parts(Instant now, const Operation& operation) {
  while (operation->failure.is_ok() && operation->next_part < operation->parts &&
         operation->in_flight < window_of(*operation) && is_there(*operation)) {
    start_part(now, operation, operation->next_part++);
  }
}

void PendingOperations::start_late_parts(Instant now) {
  const std::vector<Operation> operations = operations_;
  for (const auto& operation : operations) {
    if (operation->late == nullptr || !operation->failure.is_ok()) continue;
    const Status status = operation->late->status();
    if (status.is_ok()) {
      start_parts(now, operation);
    } else {
      give_up(now, operation, status, status);
    }
  }
  run_host(now);
}

void PendingOperations::start_part(Instant now, const Operation& operation, std::uint32_t number) {
  PendingOperation& whole = *operation;
  const std::uint32_t block = number / whole.parts_per_block;
  const std::uint64_t offset = std::uint64_t{number % whole.parts_per_block} * whole.part_bytes;
  const std::uint64_t bytes = std::min(whole.part_bytes, whole.block_bytes - offset);
  auto owned = std::make_unique<Part>();
  Part& part = *owned;
  part.operation = operation;
  part.key = {whole.group->id, whole.op, number};
  part.descriptor = whole.descriptor;
  part.descriptor.part_bytes = bytes;
  part.memory = whole.output.subspan(block * whole.block_bytes + offset, bytes);
  if (whole.descriptor.collective == Collective::kAllGather) part.descriptor.root = block;
  const bool has_root =
      whole.descriptor.collective == Collective::kAllGather || whole.descriptor.collective == Collective::kBroadcast;
  if (whole.device_memory != nullptr) {
    // Not written to; the engine has one kind of memory for both.
    auto* const input = const_cast<std::byte*>(whole.input.data());
    if (input != whole.output.data()) part.results = std::exchange(part.memory, {input + offset, bytes});
  } else if (!has_root || part.descriptor.root == whole.group->route.index) {
    if (bytes > 0) copy_bytes(whole.input.subspan(offset, bytes), part.memory);
  }
  ++whole.in_flight;
  add_part(std::move(owned));
  const bool host_first = whole.path == GroupRoute::Path::kHostFirst && whole.group->route.local_members.size() > 1;
  if (whole.path == GroupRoute::Path::kLocal || host_first) {
    submit_local(now, part);
  } else {
    submit_network(now, part, part.memory);
  }
}

/// Two of one key would take each other's messages, and one would be freed while it is in use.
void PendingOperations::add_part(std::unique_ptr<Part> part) {
  const OpKey key = part->key;
  if (!parts_.try_emplace(key, std::move(part)).second) {
    throw Error(Code::kInternal, to_string(key) + " is under way already: this is a bug in Herring, please report it");
  }
}

PendingOperations::Part* PendingOperations::find(const OpKey& key) const {
  const auto found = parts_.find(key);
  return found == parts_.end() ? nullptr : found->second.get();
}

void PendingOperations::submit_local(Instant now, Part& part) {
  const PendingOperation& whole = *part.operation;
  const GroupRoute& route = whole.group->route;
  intra_node::LocalOperation operation;
  operation.key = part.key;
  operation.descriptor = part.descriptor;
  operation.members = route.local_members;
  operation.world_ranks = route.local_world;
  operation.memory = part.memory;
  operation.root = part.descriptor.root;  // The path is local for these collectives: group order is member order.
  operation.network = whole.path == GroupRoute::Path::kHostFirst;
  if (operation.network) {
    for (const std::vector<ByteRange>& ranges :
         worker::owned_ranges(servers_->config(), network_operation(now, part, {}))) {
      auto& share = operation.owned.emplace_back();
      for (const ByteRange& range : ranges) share.push_back({range.offset, range.bytes});
    }
  } else {
    operation.owned = even_shares(part.descriptor.part_bytes, route.local_members.size());
    if (part.descriptor.reduce == ReduceOp::kAverage) {
      operation.average_over = static_cast<std::uint32_t>(route.ranks.size());
    }
  }
  operation.announced = whole.announced;
  operation.timeout = std::max(whole.deadline - now, Duration{1});
  // The servers know who has not come, this host does not: their word has to be here before this host gives up.
  if (operation.network) operation.grace = std::min<Duration>(operation.timeout / 10, std::chrono::milliseconds(200));
  part.operation->staged |= !host_->contains(part.memory);
  part.local = true;
  host_->submit(now, operation);
}

worker::Operation PendingOperations::network_operation(Instant now, const Part& part,
                                                       std::span<std::byte> memory) const {
  const PendingOperation& whole = *part.operation;
  const GroupRoute& route = whole.group->route;
  worker::Operation operation;
  operation.key = part.key;
  operation.descriptor = part.descriptor;
  operation.memory = memory;
  operation.is_on_device = whole.device_memory != nullptr;
  if (!memory.empty()) operation.results = part.results;
  if (whole.path == GroupRoute::Path::kHostFirst) {
    operation.contributor = route.host_index;
    operation.contributor_count = route.host_count;
    operation.first_rank = route.local_span.first;
    operation.rank_count = route.local_span.count;
    operation.rank_stride = route.local_span.stride;
    operation.rank_mask = route.local_span.mask;
    operation.owner = route.local_index;
    operation.owner_count = static_cast<std::uint32_t>(route.local_members.size());
  } else {
    operation.contributor = route.index;
    operation.contributor_count = static_cast<std::uint32_t>(route.ranks.size());
    operation.first_rank = options_.rank;
  }
  if (reduces(part.descriptor.collective) && part.descriptor.reduce == ReduceOp::kAverage) {
    const auto all = static_cast<std::uint32_t>(route.ranks.size());
    operation.average_over = whole.roster.empty() ? all : count_of(whole.roster);
  }
  operation.rails = route.rails;
  if (whole.path == route.path) operation.one_hop_bytes = route.one_hop_bytes;
  operation.is_join = part.is_join;
  operation.roster = whole.roster;
  operation.timeout = std::max(whole.deadline - now, Duration{1});
  return operation;
}

/// The cards are to know the memory for as long as the operation lasts. It is the caller's, of which all parts need
/// some, or the arena's, whose own registrations stay for the next part there.
void PendingOperations::hold(Part& part, std::span<std::byte> memory) {
  PendingOperation& whole = *part.operation;
  if (memory.data() != part.memory.data()) {
    part.hold = servers_->hold_shared(memory);
    part.held = memory;
    return;
  }
  if (whole.device_memory != nullptr) {
    if (!whole.holds.empty()) return;
    auto* const input = const_cast<std::byte*>(whole.input.data());
    whole.holds.push_back(servers_->hold({input, whole.input.size()}, MemoryKind::kDevice));
    if (input != whole.output.data()) whole.holds.push_back(servers_->hold(whole.output, MemoryKind::kDevice));
    return;
  }
  const std::uint32_t block = part.key.part / whole.register_parts;
  if (whole.holds.size() <= block) whole.holds.resize(block + 1);
  if (whole.holds[block]) return;
  whole.holds[block] = servers_->hold(registered_block(whole, block));
}

void PendingOperations::submit_network(Instant now, Part& part, std::span<std::byte> memory) {
  if (servers_->wants_holds() && !memory.empty()) {
    try {
      hold(part, memory);
    } catch (const Error& error) {
      return refuse_network(now, part, memory, error.status());
    }
  }
  part.network = Part::Network::kUnderWay;
  servers_->submit(now, network_operation(now, part, memory));
}

/// What the card does not take: this operation fails, here and for all who wait for this rank, and no other.
void PendingOperations::refuse_network(Instant now, const Part& part, std::span<std::byte> memory, const Status& why) {
  const bool is_callers = memory.data() == part.memory.data();
  const std::size_t bytes =
      is_callers ? registered_block(*part.operation, part.key.part / part.operation->register_parts).size()
                 : memory.size();
  const Status status(why.code(), to_string(part.descriptor) + ": rank " + std::to_string(options_.rank) +
                                      " could not register " + std::to_string(bytes) +
                                      " bytes with the network: " + why.message());
  servers_->refuse(now, network_operation(now, part, memory), status);
}

void PendingOperations::on_host_action(Instant now, const intra_node::LocalAction& action) {
  if (const auto* network = std::get_if<intra_node::NetworkAction>(&action)) {
    if (Part* const part = find(network->key)) submit_network(now, *part, network->part);
  } else if (const auto* abandoned = std::get_if<intra_node::AbandonNetwork>(&action)) {
    const Part* const part = find(abandoned->key);
    if (part == nullptr || part->network != Part::Network::kUnderWay) return;
    servers_->abort(now, network_operation(now, *part, {}), abandoned->why);
    servers_->flush(now);
  } else if (const auto* done = std::get_if<intra_node::CompleteLocal>(&action)) {
    part_done(now, done->key, done->status);
  }
}

void PendingOperations::network_done(Instant now, const CompleteAction& action) {
  Part* const part = find(action.key);
  if (part == nullptr) return;
  servers_->release(part->held, std::move(part->hold));
  part->network = Part::Network::kOver;
  if (part->is_join && action.status.is_ok()) take_roster(*part->operation, action.roster);
  if (!part->local) return part_done(now, action.key, action.status);
  host_->network_done(now, action.key, action.status);
  run_host(now);
}

void PendingOperations::part_done(Instant now, const OpKey& key, const Status& status) {
  const auto found = parts_.find(key);
  if (found == parts_.end()) return;
  const std::unique_ptr<Part> part = std::move(found->second);
  parts_.erase(found);
  const Operation operation = part->operation;
  --operation->in_flight;
  if (!status.is_ok() && operation->failure.is_ok()) {
    operation->failure = status;
    if (status.code() == Code::kNotFinite) operation->failure = locate(*operation, key.part, status);
    const Status& why = operation->parts > 1 ? operation->failure : status;
    // Other hosts may wait for this one's part; and parts that nobody else starts would wait for their time-out. What
    // has begun, the network's engine ends itself.
    if (servers_ != nullptr && operation->path == GroupRoute::Path::kHostFirst && !part->aborted &&
        part->network == Part::Network::kNotBegun) {
      servers_->abort(now, network_operation(now, *part, {}), why);
    }
    abort_parts(now, *operation, why);
  }
  if (operation->late != nullptr && status.is_ok()) {
    operation->late->on_result(key.part * operation->part_bytes, part->descriptor.part_bytes);
  }
  start_parts(now, operation);
  if (operation->in_flight > 0) return;
  if (operation->failure.is_ok() && operation->next_part < operation->parts) return;  // The rest is late.
  std::erase(operations_, operation);
  release_holds(*operation);
  if (!operation->is_declared) ++(operation->staged ? options_.counters->staged_ops : options_.counters->zero_copy_ops);
  end(operation, operation->failure);
}

void PendingOperations::release_holds(PendingOperation& operation) {
  std::vector<memory::Hold> holds = std::exchange(operation.holds, {});
  for (std::size_t i = 0; i < holds.size(); ++i) {
    // In a device the first is the input's.
    const bool is_input = operation.device_memory != nullptr && i == 0;
    servers_->release(is_input ? operation.input : std::span<const std::byte>(operation.output), std::move(holds[i]),
                      operation.device_memory);
  }
}

void PendingOperations::abort_parts(Instant now, const PendingOperation& operation, const Status& why) {
  // Not by looking at all parts: a thousand operations that end together would take a million looks. Number 0 is also a
  // join's, before the first part.
  for (std::uint32_t number = 0; number < std::max(operation.next_part, 1u); ++number) {
    const OpKey key{operation.group->id, operation.op, number};
    Part* const part = find(key);
    if (part == nullptr || part->operation.get() != &operation || part->aborted) continue;
    part->aborted = true;
    if (part->network == Part::Network::kUnderWay || !part->local) {
      servers_->abort(now, network_operation(now, *part, part->memory), why);
      servers_->flush(now);
    } else {
      host_->abort(now, key, why);
    }
  }
}

}  // namespace herring::runtime
