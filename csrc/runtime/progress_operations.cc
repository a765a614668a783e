// The life of an operation on the progress thread: cut into parts, each part through shared memory, servers, or both.

#include <algorithm>
#include <iterator>
#include <span>
#include <utility>

#include "control/protocol.h"
#include "core/copy.h"
#include "core/status.h"
#include "fusion_buffer/fusion_buffer.h"
#include "runtime/progress.h"
#include "runtime/progress_options.h"
#include "runtime/progress_part.h"

namespace herring::runtime {
namespace {

// Parts of one operation in flight. Network parts overlap push, sum and pull (about four buckets in flight is the knee
// that Herring's first version found). Staged parts stay in the core's own cache between the two copies: their memory
// is used again and again.
constexpr std::uint32_t kLocalWindow = 4;
constexpr std::uint32_t kStagedWindow = 3;
constexpr std::uint32_t kNetworkWindow = 4;

// What is registered of an operation at once. Pinning takes about as long as the network does: the rest of a huge
// tensor is pinned while its beginning is under way.
constexpr std::uint64_t kRegisterBytes = 128 << 20;

// A copy or sum of this size takes longer than a neighbour's wake-up: it hears first.
constexpr std::size_t kFlushBytes = 32 << 10;

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
  return operation.staged ? kStagedWindow : kLocalWindow;
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

/// Where one throws, those behind it are submitted again, and end with all the rest.
void Progress::start_all(Instant now, std::span<const std::shared_ptr<PendingOperation>> operations) {
  for (std::size_t i = 0; i < operations.size(); ++i) {
    try {
      start(now, operations[i]);
    } catch (...) {
      const auto is_known = [this](const auto& operation) {
        return operation->work->is_done() || std::ranges::find(operations_, operation) != operations_.end() ||
               std::ranges::find(held_, operation) != held_.end();
      };
      const std::scoped_lock lock(mutex_);
      std::ranges::remove_copy_if(operations.subspan(i), std::back_inserter(submitted_), is_known);
      throw;
    }
  }
}

/// The same. The one that throws is known by then.
void Progress::start_all(Instant now, std::span<const PendingMessage> messages) {
  for (std::size_t i = 0; i < messages.size(); ++i) {
    if (!messages_) {
      messages[i].work->complete(failure());
      count_ended(1);
      continue;
    }
    try {
      messages_->submit(now, messages[i]);
    } catch (...) {
      const std::scoped_lock lock(mutex_);
      std::ranges::copy(messages.subspan(i + 1), std::back_inserter(message_commands_.submitted));
      throw;
    }
  }
}

void Progress::start(Instant now, const std::shared_ptr<PendingOperation>& operation) {
  Status status;
  {
    const std::scoped_lock lock(mutex_);
    status = failure_;
  }
  if (!status.is_ok()) return end(operation, status);
  if (operation->call.waits_for > 0) {
    held_.push_back(operation);
    held_deadline_ = std::min(held_deadline_, operation->deadline);
  } else {
    begin(now, operation);
  }
}

/// Nobody that it would have to wait for is pending.
void Progress::begin(Instant now, const std::shared_ptr<PendingOperation>& operation) {
  const Status left = check_left(*operation);
  if (!left.is_ok() && !operation->announced) return end(operation, left);
  const Status status = check_departed(*operation);
  // One that is announced may be over on the rank that has left, which waited for nothing but that.
  if (!status.is_ok() && !operation->announced) return end(operation, status);
  plan_parts(*operation);
  operation->overdue = Overdue(operation->deadline);
  operations_.push_back(operation);
  if (operation->has_backup) {
    start_join(now, operation);
  } else {
    start_parts(now, operation);
  }
  if (!left.is_ok()) {  // What is announced here is taken back.
    give_up(now, operation, left, left);
    run_local_actions(now);
  }
  if (status.is_ok()) return;
  for (const auto& [rank, text] : departed_) end_local_without(now, rank, text);
}

Status Progress::check_departed(const PendingOperation& operation) const {
  for (const auto& [rank, text] : departed_) {
    const auto& ranks = operation.group->route.ranks;
    if (std::find(ranks.begin(), ranks.end(), rank) != ranks.end()) {
      return Status(Code::kPeerLost, text + " and cannot take part in " + to_string(operation.descriptor));
    }
  }
  return Status::ok();
}

std::uint64_t Progress::part_bytes(GroupRoute::Path path) const {
  const std::uint64_t bytes =
      path == GroupRoute::Path::kLocal
          ? config_.local_part_bytes
          : balanced_part_bytes(config_.part_bytes, network_config_.lanes.size(), network_config_.chunk_bytes);
  return std::max(bytes / kPartAlignment, std::uint64_t{1}) * kPartAlignment;
}

void Progress::plan_parts(PendingOperation& operation) const {
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
void Progress::start_join(Instant now, const std::shared_ptr<PendingOperation>& operation) {
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

void Progress::take_roster(PendingOperation& operation, const Roster& roster) {
  const std::vector<std::uint32_t>& ranks = operation.group->route.ranks;
  operation.roster = roster;
  operation.work->set_contributors(members_of(roster));
  for (std::uint32_t member = 0; member < ranks.size(); ++member) {
    if (is_in(roster, member)) continue;
    counters_.dropped_contributions.resize(options_.placement->workers);
    ++counters_.dropped_contributions[ranks[member]];
  }
}

void Progress::start_parts(Instant now, const std::shared_ptr<PendingOperation>& operation) {
  while (operation->failure.is_ok() && operation->next_part < operation->parts &&
         operation->in_flight < window_of(*operation) && is_there(*operation)) {
    start_part(now, operation, operation->next_part++);
  }
}

void Progress::start_late_parts(Instant now) {
  const std::vector<std::shared_ptr<PendingOperation>> operations = operations_;
  for (const auto& operation : operations) {
    if (operation->late == nullptr || !operation->failure.is_ok()) continue;
    const Status status = operation->late->status();
    if (status.is_ok()) {
      start_parts(now, operation);
    } else {
      give_up(now, operation, status, status);
    }
  }
  run_local_actions(now);
}

void Progress::start_part(Instant now, const std::shared_ptr<PendingOperation>& operation, std::uint32_t number) {
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
  if (!has_root || part.descriptor.root == whole.group->route.index) {
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

void Progress::submit_local(Instant now, Part& part) {
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
         worker::owned_ranges(network_config_, network_operation(now, part, {}))) {
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
  part.operation->staged |= !options_.neighborhood->contains(part.memory);
  part.local = true;
  local_->submit(now, operation);
}

worker::Operation Progress::network_operation(Instant now, const Part& part, std::span<std::byte> memory) const {
  const PendingOperation& whole = *part.operation;
  const GroupRoute& route = whole.group->route;
  worker::Operation operation;
  operation.key = part.key;
  operation.descriptor = part.descriptor;
  operation.memory = memory;
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
void Progress::hold(Part& part, std::span<std::byte> memory) {
  PendingOperation& whole = *part.operation;
  if (memory.data() != part.memory.data()) {
    part.hold = memory_->hold(memory, MemoryKind::kShared, memory::Reuse::kUntilInvalidated);
    part.held = memory;
    return;
  }
  const std::uint32_t block = part.key.part / whole.register_parts;
  if (whole.holds.size() <= block) whole.holds.resize(block + 1);
  if (whole.holds[block]) return;
  whole.holds[block] = memory_->hold(registered_block(whole, block));
}

void Progress::submit_network(Instant now, Part& part, std::span<std::byte> memory) {
  if (memory_ != nullptr && !memory.empty()) {
    try {
      hold(part, memory);
    } catch (const Error& error) {
      return refuse_network(now, part, memory, error.status());
    }
  }
  part.network = Part::Network::kUnderWay;
  network_->submit(now, network_operation(now, part, memory));
  pump_->flush(now);
}

/// What the card does not take: this operation fails, here and for all who wait for this rank, and no other.
void Progress::refuse_network(Instant now, const Part& part, std::span<std::byte> memory, const Status& why) {
  const bool is_callers = memory.data() == part.memory.data();
  const std::size_t bytes =
      is_callers ? registered_block(*part.operation, part.key.part / part.operation->register_parts).size()
                 : memory.size();
  const Status status(why.code(), to_string(part.descriptor) + ": rank " + std::to_string(options_.rank) +
                                      " could not register " + std::to_string(bytes) +
                                      " bytes with the network: " + why.message());
  network_->abort(now, network_operation(now, part, memory), status);
  pump_->flush(now);
  network_completions_.push_back({part.key, status});
}

/// A server that was lost may be sent to for a while yet: what is read for it stays registered so long.
void Progress::release(std::span<const std::byte> memory, memory::Hold hold) {
  if (!hold || lost_servers_.empty() || !pump_ || !pump_->uses(memory)) return;
  hold.outlive_memory();
  lingering_.emplace_back(memory, std::move(hold));
}

void Progress::release_lingering() {
  std::erase_if(lingering_, [this](const auto& entry) { return !pump_->uses(entry.first); });
}

void Progress::execute(Instant now, intra_node::LocalAction& action) {
  if (auto* send = std::get_if<intra_node::SendLocal>(&action)) {
    if (send->to == intra_node::kEverybody) {
      send_to_all(send->bytes, {}, {});
    } else {
      send_local(send->to, send->bytes, {}, {});
    }
  } else if (auto* move = std::get_if<intra_node::CopyAction>(&action)) {
    if (move->to.size() >= kFlushBytes) options_.neighborhood->flush();
    local_writes_.copy(*move);
  } else if (auto* sum = std::get_if<intra_node::ReduceLocal>(&action)) {
    if (!sum->outputs.empty() && sum->outputs.front().size() >= kFlushBytes) options_.neighborhood->flush();
    local_writes_.reduce(*sum);
  } else if (auto* network = std::get_if<intra_node::NetworkAction>(&action)) {
    const auto found = parts_.find(network->key);
    if (found != parts_.end()) submit_network(now, *found->second, network->part);
  } else if (auto* abandoned = std::get_if<intra_node::AbandonNetwork>(&action)) {
    const auto found = parts_.find(abandoned->key);
    if (found == parts_.end() || found->second->network != Part::Network::kUnderWay) return;
    network_->abort(now, network_operation(now, *found->second, {}), abandoned->why);
    pump_->flush(now);
  } else if (auto* done = std::get_if<intra_node::CompleteLocal>(&action)) {
    part_done(now, done->key, done->status);
  }
}

void Progress::network_done(Instant now, const CompleteAction& action) {
  const auto found = parts_.find(action.key);
  if (found == parts_.end()) return;
  release(found->second->held, std::move(found->second->hold));
  found->second->network = Part::Network::kOver;
  if (found->second->is_join && action.status.is_ok()) take_roster(*found->second->operation, action.roster);
  if (!found->second->local) {
    part_done(now, action.key, action.status);
    return;
  }
  local_->on_network_done(now, action.key, action.status);
  run_local_actions(now);
}

void Progress::part_done(Instant now, const OpKey& key, const Status& status) {
  const auto found = parts_.find(key);
  if (found == parts_.end()) return;
  const std::unique_ptr<Part> part = std::move(found->second);
  parts_.erase(found);
  const std::shared_ptr<PendingOperation> operation = part->operation;
  --operation->in_flight;
  if (!status.is_ok() && operation->failure.is_ok()) {
    operation->failure = status;
    if (status.code() == Code::kNotFinite) operation->failure = locate(*operation, key.part, status);
    const Status& why = operation->parts > 1 ? operation->failure : status;
    // Other hosts may wait for this one's part; and parts that nobody else starts would wait for their time-out. What
    // has begun, the network's engine ends itself.
    if (network_ && operation->path == GroupRoute::Path::kHostFirst && !part->aborted &&
        part->network == Part::Network::kNotBegun) {
      network_->abort(now, network_operation(now, *part, {}), why);
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
  for (memory::Hold& held : std::exchange(operation->holds, {})) release(operation->output, std::move(held));
  if (!operation->is_declared) ++(operation->staged ? counters_.staged_ops : counters_.zero_copy_ops);
  end(operation, operation->failure);
}

void Progress::end(const std::shared_ptr<PendingOperation>& operation, const Status& status) {
  if (operation->is_declared) return declared_end(*operation, status);
  may_begin_ |= options_.order->leave(operation->call);
  ++(status.is_ok() ? counters_.ops_completed : counters_.ops_failed);
  publish();
  watch_unsent();  // Else a drain could miss what others may still need.
  operation->work->complete(status);
  count_ended(1);
}

/// Two of one key would take each other's messages, and one would be freed while it is in use.
void Progress::add_part(std::unique_ptr<Part> part) {
  const OpKey key = part->key;
  if (!parts_.try_emplace(key, std::move(part)).second) {
    throw Error(Code::kInternal, to_string(key) + " is under way already: this is a bug in Herring, please report it");
  }
}

void Progress::abort_parts(Instant now, const PendingOperation& operation, const Status& why) {
  // Not by looking at all parts: a thousand operations that end together would take a million looks. Number 0 is also a
  // join's, before the first part.
  for (std::uint32_t number = 0; number < std::max(operation.next_part, 1u); ++number) {
    const OpKey key{operation.group->id, operation.op, number};
    const auto found = parts_.find(key);
    if (found == parts_.end() || found->second->operation.get() != &operation || found->second->aborted) continue;
    Part& part = *found->second;
    part.aborted = true;
    if (part.network == Part::Network::kUnderWay || !part.local) {
      network_->abort(now, network_operation(now, part, part.memory), why);
      pump_->flush(now);
    } else {
      local_->abort(now, key, why);
    }
  }
}

void Progress::expire_operations(Instant now) {
  if (departed_.empty()) return;  // Engines keep the ordinary deadlines.
  const std::vector<std::shared_ptr<PendingOperation>> operations = operations_;
  for (const auto& operation : operations) {
    const Status gone = check_departed(*operation);
    if (gone.is_ok() || operation->deadline > now || !operation->failure.is_ok()) continue;
    operation->failure = gone;
    abort_parts(now, *operation, gone);
  }
  run_local_actions(now);
}

/// Engines end what is past its deadline as soon as nobody uses its memory any more. A link that stays cut, with a
/// provider that cannot be talked out of a transfer, may use it for ever: closing the endpoint is all that helps.
void Progress::end_stuck(Instant now) {
  if (now < next_look_) return;
  const Duration grace = dead_after(config_);
  next_look_ = now + grace / 4;
  // An engine waits twice so long: for the verdict of a server, and then for what may be on its way.
  const Duration patience = 3 * grace;
  std::string what;
  for (const auto& operation : operations_) {
    if (operation->overdue.look(now, patience)) what = to_string(operation->descriptor);
  }
  if (messages_ && messages_->is_stuck(now, patience)) what = "a message from worker to worker";
  if (what.empty()) return;
  const std::string text = what + " did not end by its deadline, and its memory is still in use by the network " +
                           control::seconds_text(patience) +
                           " after it: a connection of this process is cut or its peer stopped";
  fail_everything(Status(Code::kTimeout, text));
  if (options_.hub != nullptr) options_.hub->report_failure(text);
}

/// A lost process's error also says what it kept from ending.
Status Progress::with_pending(const Status& status) const {
  if (status.code() != Code::kPeerLost || pending_.load() == 0) return status;
  constexpr std::size_t kNamed = 3;
  std::string text = "; " + std::to_string(pending_.load()) + " pending here";
  for (std::size_t i = 0; i < std::min(operations_.size(), kNamed); ++i) {
    const PendingOperation& operation = *operations_[i];
    text += (i == 0 ? ": " : ", ") + (operation.name.empty() ? "" : "'" + operation.name + "' ") +
            to_string(operation.descriptor);
  }
  return Status(status.code(), status.message() + text + (operations_.size() > kNamed ? ", ..." : ""));
}

void Progress::fail_everything(const Status& status) {
  const Status with_what = with_pending(status);
  {
    const std::scoped_lock lock(mutex_);
    if (failure_.is_ok()) failure_ = with_what;
    has_failed_.store(true);
  }
  publish();
  // Nothing may touch the callers' memory once their operations have failed: the endpoint goes before they complete.
  // The pump polls as it goes, so registrations follow it, when the endpoint uses no memory any more.
  pump_.reset();
  if (options_.endpoint) options_.endpoint->shut_down();
  options_.endpoint.reset();
  lingering_.clear();
  network_.reset();
  local_.reset();
  network_completions_.clear();
  for (auto& backlog : local_backlog_) backlog.clear();
  parts_.clear();
  for (const auto& operation : operations_) operation->holds.clear();
  std::vector<std::shared_ptr<PendingOperation>> operations;
  operations.swap(operations_);
  std::erase_if(operations, [](const auto& operation) { return operation->is_declared; });
  operations.insert(operations.end(), held_.begin(), held_.end());
  held_.clear();
  held_deadline_ = Instant::max();
  std::vector<PendingMessage> messages;
  std::vector<ClosingGroup> closing;
  {
    const std::scoped_lock lock(mutex_);
    for (auto& operation : submitted_) operations.push_back(std::move(operation));
    submitted_.clear();
    messages.swap(message_commands_.submitted);
    closing.swap(message_commands_.closed_groups);
  }
  closing.insert(closing.end(), closing_.begin(), closing_.end());
  closing_.clear();
  counters_.ops_failed += operations.size() + messages.size();
  publish();
  for (const auto& operation : operations) options_.order->leave(operation->call);
  for (const auto& operation : operations) operation->work->complete(failure());
  for (const PendingMessage& message : messages) message.work->complete(failure());
  std::uint64_t ended = operations.size() + messages.size() + (std::exchange(has_unsent_, false) ? 1 : 0);
  if (messages_) {
    ended += messages_->fail_all(failure());
    messages_.reset();
  }
  note_needed_later(false);
  count_ended(ended);
  for (const ClosingGroup& each : closing) each.closed->set();
}

}  // namespace herring::runtime
