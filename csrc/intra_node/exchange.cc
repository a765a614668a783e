#include "intra_node/exchange.h"

#include <algorithm>
#include <chrono>
#include <cstdio>

#include "core/finite.h"
#include "core/seconds_text.h"
#include "core/stall_text.h"

namespace herring::intra_node {
namespace {

constexpr std::uint64_t kLargeBytes = 8 << 20;

template <class T>
std::span<T> part(std::span<T> whole, ByteSpan range) {
  return whole.subspan(range.offset, range.bytes);
}

Status refuse(const LocalOperation& operation, const std::string& what) {
  return Status(Code::kInvalidArgument, to_string(operation.descriptor) + " inside the host: " + what);
}

/// Every byte exactly once, in whole elements.
bool covers(const LocalOperation& operation) {
  const std::size_t element = std::max<std::size_t>(element_bytes(operation.descriptor.dtype), 1);
  std::vector<ByteSpan> all;
  for (const auto& ranges : operation.owned) {
    for (const ByteSpan& range : ranges) {
      if (range.bytes > 0) all.push_back(range);
    }
  }
  std::ranges::sort(all, {}, &ByteSpan::offset);
  std::uint64_t next = 0;
  for (const ByteSpan& range : all) {
    if (range.offset != next || range.bytes > operation.memory.size() - next || range.bytes % element != 0)
      return false;
    next += range.bytes;
  }
  return next == operation.memory.size();
}

/// Its beginning is out of the caches before its end is in.
bool is_large(const LocalOperation& operation) { return operation.descriptor.op_bytes >= kLargeBytes; }

/// FNV-1a over words.
class LayoutHash final {
 public:
  LayoutHash(std::span<const std::uint32_t> members, std::uint32_t average_over, std::uint32_t root, Way way,
             bool network) {
    mix(static_cast<std::uint64_t>(way));
    mix(network ? 1 : 0);
    mix(average_over);
    mix(root);
    mix(members.size());
    for (const std::uint32_t member : members) mix(member);
  }
  void mix(std::uint64_t value) { value_ = (value_ ^ value) * 0x100000001b3ull; }
  std::uint64_t value() const { return value_; }

 private:
  std::uint64_t value_ = 0xcbf29ce484222325ull;
};

ReduceSpec spec_of(const LocalOperation& operation) {
  return {operation.descriptor.dtype, operation.descriptor.reduce, operation.average_over};
}

}  // namespace

bool Exchange::is_rooted() const { return has_one_pusher(operation.descriptor.collective); }

bool Exchange::owns_bytes(std::uint32_t member) const {
  return std::ranges::any_of(operation.owned[member], [](const ByteSpan& range) { return range.bytes > 0; });
}

bool Exchange::is_active() const {
  return stage == Stage::kGathering || stage == Stage::kNetwork || stage == Stage::kSharing || stage == Stage::kFailing;
}

bool Exchange::everybody_is_ready() const {
  for (std::uint32_t i = 0; i < size(); ++i) {
    if (i != me && !of(i).ready) return false;
  }
  return true;
}

bool Exchange::everybody_let_go() const {
  for (std::uint32_t i = 0; i < size(); ++i) {
    if (i != me && !of(i).released) return false;
  }
  return true;
}

bool Exchange::can_do_without(std::uint32_t member) const {
  if (stage == Stage::kReleasing || stage == Stage::kFailing || stage == Stage::kQuarantined) return true;
  if (!of(member).ready) return false;
  // While gathering, nobody's bytes have been read yet.
  if (way == Way::kSlots) return of(member).reduced || (stage != Stage::kGathering && !owns_bytes(member));
  return way != Way::kFromRoot || stage != Stage::kGathering || member != operation.root;
}

Status check(const LocalOperation& operation, const EngineConfig& config) {
  const OpDescriptor& descriptor = operation.descriptor;
  const std::size_t members = operation.members.size();
  if (members == 0 || operation.world_ranks.size() != members) return refuse(operation, "members without world ranks");
  std::vector<std::uint32_t> sorted = operation.members;
  std::ranges::sort(sorted);
  if (std::ranges::adjacent_find(sorted) != sorted.end() || sorted.back() >= config.local_size ||
      !std::ranges::binary_search(sorted, config.local_rank)) {
    return refuse(operation, "members must be different local ranks, this one among them");
  }
  if (operation.memory.size() != descriptor.part_bytes) {
    return refuse(operation, std::to_string(operation.memory.size()) + " bytes of memory for a part of " +
                                 std::to_string(descriptor.part_bytes));
  }
  if (has_one_pusher(descriptor.collective)) {
    if (operation.network) return refuse(operation, "only all_reduce and barrier go on over the network");
    if (operation.root >= members) return refuse(operation, "root " + std::to_string(operation.root));
    return Status::ok();
  }
  if (operation.memory.empty()) return Status::ok();
  if (!reduces(descriptor.collective)) return refuse(operation, "a barrier has no bytes");
  if (element_bytes(descriptor.dtype) == 0 || operation.memory.size() % element_bytes(descriptor.dtype) != 0) {
    return refuse(operation, std::to_string(operation.memory.size()) + " bytes are no whole number of elements");
  }
  if (operation.average_over == 0) return refuse(operation, "average over 0 ranks");
  if (operation.owned.size() != members || !covers(operation)) {
    return refuse(operation, "the members' ranges do not cover every byte once");
  }
  return Status::ok();
}

std::uint64_t inline_limit(std::uint64_t inline_bytes, std::size_t members) {
  constexpr std::uint64_t kAlways = 8 << 10;
  constexpr std::uint64_t kTogether = 256 << 10;  // What a core has close to it.
  return std::min(inline_bytes, std::max(kAlways, kTogether / std::max<std::uint64_t>(members, 1)));
}

Way choose_way(const LocalOperation& operation, const EngineConfig& config) {
  if (operation.memory.empty()) return Way::kNothing;
  const std::uint64_t limit = inline_limit(config.inline_bytes, operation.members.size());
  if (!operation.network && operation.memory.size() <= limit) return Way::kInline;
  return has_one_pusher(operation.descriptor.collective) ? Way::kFromRoot : Way::kSlots;
}

std::uint64_t layout_hash(const LocalOperation& operation, Way way) {
  LayoutHash hash(operation.members, operation.average_over, operation.root, way, operation.network);
  if (way == Way::kSlots) {
    for (const auto& ranges : operation.owned) {
      hash.mix(ranges.size());
      for (const ByteSpan& range : ranges) {
        hash.mix(range.offset);
        hash.mix(range.bytes);
      }
    }
  }
  return hash.value();
}

std::uint64_t layout_hash(std::span<const std::uint32_t> members, std::uint32_t average_over, std::uint32_t root,
                          Way way) {
  return LayoutHash(members, average_over, root, way, false).value();
}

bool location_fits(const Exchange& exchange, std::uint32_t member, const EngineConfig& config) {
  const Said& said = exchange.of(member);
  const bool has_bytes = !exchange.is_rooted() || member == exchange.operation.root;
  if (exchange.way == Way::kNothing || !has_bytes) return said.location == Location::kNone;
  if (exchange.way == Way::kInline) return said.location == Location::kInline;
  const std::uint64_t arena = config.arenas[exchange.rank_of(member)].size();
  const std::uint64_t bytes = exchange.operation.memory.size();
  return (said.location == Location::kInPlace || said.location == Location::kStaged) && bytes <= arena &&
         said.offset <= arena - bytes;
}

std::span<std::byte> slot_of(const Exchange& exchange, std::uint32_t member, const EngineConfig& config) {
  if (member == exchange.me) {
    return exchange.location == Location::kStaged ? exchange.staging : exchange.operation.memory;
  }
  return config.arenas[exchange.rank_of(member)].subspan(exchange.of(member).offset, exchange.operation.memory.size());
}

void copy_in(const Exchange& exchange, LocalActions& out) {
  const LocalOperation& operation = exchange.operation;
  if (exchange.way == Way::kFromRoot) {
    out.push_back(CopyAction{.from = operation.memory, .to = exchange.staging, .for_others = true});
    return;
  }
  // Our own range is reduced straight from private memory.
  ByteSpan run;
  const auto emit = [&] {
    if (run.bytes == 0) return;
    out.push_back(CopyAction{
        .from = part<const std::byte>(operation.memory, run), .to = part(exchange.staging, run), .for_others = true});
  };
  for (std::uint32_t i = 0; i < exchange.size(); ++i) {
    if (i == exchange.me) continue;
    for (const ByteSpan& range : operation.owned[i]) {
      if (run.bytes > 0 && run.offset + run.bytes == range.offset) {
        run.bytes += range.bytes;
        continue;
      }
      emit();
      run = range;
    }
  }
  emit();
}

Status check_finite(const Exchange& exchange, const EngineConfig& config) {
  const LocalOperation& operation = exchange.operation;
  const OpDescriptor& descriptor = operation.descriptor;
  if (!reduces(descriptor.collective) || exchange.way == Way::kNothing) return Status::ok();
  std::vector<ByteSpan> ranges = {{0, descriptor.part_bytes}};
  if (exchange.way == Way::kSlots) ranges = operation.owned[exchange.me];
  std::vector<NotFinite> found;
  for (std::uint32_t i = 0; i < exchange.size(); ++i) {
    const std::span<const std::byte> data = i == exchange.me               ? operation.memory
                                            : exchange.way == Way::kInline ? std::span(exchange.of(i).data)
                                                                           : slot_of(exchange, i, config);
    for (const ByteSpan& range : ranges) {
      const auto element = find_not_finite(descriptor.dtype, data.subspan(range.offset, range.bytes));
      if (!element) continue;
      found.push_back({"rank " + std::to_string(operation.world_ranks[i]),
                       range.offset / element_bytes(descriptor.dtype) + *element});
      break;
    }
  }
  return found.empty() ? Status::ok() : not_finite_status(descriptor, exchange.key, found);
}

void reduce_inline(const Exchange& exchange, LocalActions& out) {
  const LocalOperation& operation = exchange.operation;
  if (exchange.is_rooted()) {
    if (!exchange.is_root()) out.push_back(CopyAction{exchange.of(operation.root).data, operation.memory});
    return;
  }
  ReduceLocal reduce{spec_of(operation), {}, {operation.memory}};
  for (std::uint32_t i = 0; i < exchange.size(); ++i) {
    if (i == exchange.me) {
      reduce.inputs.emplace_back(operation.memory);
    } else {
      reduce.inputs.emplace_back(exchange.of(i).data);
    }
  }
  out.push_back(std::move(reduce));
}

void reduce_own(const Exchange& exchange, const EngineConfig& config, LocalActions& out) {
  const LocalOperation& operation = exchange.operation;
  const bool staged = exchange.location == Location::kStaged;
  for (const ByteSpan& range : operation.owned[exchange.me]) {
    if (range.bytes == 0) continue;
    ReduceLocal reduce{spec_of(operation), {}, {}};
    const std::span<std::byte> own = part(slot_of(exchange, exchange.me, config), range);
    // Over the network first: only our slot has the host's partial result.
    reduce.outputs.push_back(operation.network ? own : part(operation.memory, range));
    for (std::uint32_t i = 0; i < exchange.size(); ++i) {
      if (i == exchange.me) {
        reduce.inputs.emplace_back(part(operation.memory, range));
        continue;
      }
      const std::span<std::byte> theirs = part(slot_of(exchange, i, config), range);
      reduce.inputs.emplace_back(theirs);
      if (operation.network) continue;
      if (exchange.of(i).location == Location::kInPlace || !staged) {
        reduce.outputs.push_back(theirs);
      } else {
        reduce.last_for_others = true;
      }
    }
    if (reduce.last_for_others) reduce.outputs.push_back(own);
    out.push_back(std::move(reduce));
  }
}

void spread_own(const Exchange& exchange, const EngineConfig& config, LocalActions& out) {
  const bool staged = exchange.location == Location::kStaged;
  for (const ByteSpan& range : exchange.operation.owned[exchange.me]) {
    if (range.bytes == 0) continue;
    const std::span<std::byte> own = part(slot_of(exchange, exchange.me, config), range);
    if (staged) out.push_back(CopyAction{own, part(exchange.operation.memory, range)});
    for (std::uint32_t i = 0; i < exchange.size(); ++i) {
      if (i == exchange.me || (staged && exchange.of(i).location == Location::kStaged)) continue;
      out.push_back(CopyAction{own, part(slot_of(exchange, i, config), range)});
    }
  }
}

void copy_out(const Exchange& exchange, std::uint32_t member, const EngineConfig& config, LocalActions& out) {
  if (exchange.location != Location::kStaged) return;
  // An in-place owner keeps no copy of its result for us: it wrote it into our staging memory.
  const std::span<std::byte> from =
      exchange.of(member).location == Location::kStaged ? slot_of(exchange, member, config) : exchange.staging;
  for (const ByteSpan& range : exchange.operation.owned[member]) {
    if (range.bytes == 0) continue;
    out.push_back(CopyAction{part(from, range), part(exchange.operation.memory, range), is_large(exchange.operation)});
  }
}

void copy_from_root(const Exchange& exchange, const EngineConfig& config, LocalActions& out) {
  out.push_back(CopyAction{slot_of(exchange, exchange.operation.root, config), exchange.operation.memory,
                           is_large(exchange.operation)});
}

bool reads_staging_of(const Exchange& exchange, std::uint32_t member) {
  if (exchange.way == Way::kFromRoot) return member == exchange.operation.root;
  return exchange.way == Way::kSlots && exchange.location == Location::kStaged &&
         exchange.of(member).location == Location::kStaged && exchange.owns_bytes(member);
}

bool is_read_by(const Exchange& exchange, std::uint32_t member) {
  if (exchange.way == Way::kFromRoot) return exchange.is_root();
  return exchange.way == Way::kSlots && exchange.location == Location::kStaged &&
         exchange.of(member).location == Location::kStaged && exchange.owns_bytes(exchange.me);
}

std::string mismatch_text(const Exchange& exchange) {
  std::vector<std::string> said;
  bool texts_differ = false;
  for (std::uint32_t i = 0; i < exchange.size(); ++i) {
    const bool mine = i == exchange.me;
    if (!mine && !exchange.of(i).ready) {
      said.push_back("has not called it yet, or has given up already");
      continue;
    }
    said.push_back(to_string(mine ? exchange.operation.descriptor : exchange.of(i).descriptor));
    texts_differ |= said.back() != to_string(exchange.operation.descriptor);
  }
  std::string text = "ranks disagree about " + to_string(exchange.key) + ": ";
  for (std::uint32_t i = 0; i < exchange.size(); ++i) {
    const bool mine = i == exchange.me;
    text += (i > 0 ? "; rank " : "rank ") + std::to_string(exchange.operation.world_ranks[i]) + ": " + said[i];
    if (texts_differ || (!mine && !exchange.of(i).ready)) continue;
    const OpDescriptor& d = mine ? exchange.operation.descriptor : exchange.of(i).descriptor;
    text += " with " + std::to_string(d.part_bytes) + " of " + std::to_string(d.op_bytes) + " bytes in part " +
            std::to_string(exchange.key.part);
  }
  if (!texts_differ) text += " (are the HERRING_* settings and the groups the same on all ranks?)";
  return text;
}

std::string stall_text(const Exchange& exchange, Duration least, Duration waited) {
  for (std::uint32_t i = 0; i < exchange.me; ++i) {
    if (exchange.of(i).ready && !exchange.of(i).is_patient) return "";
  }
  const auto silent = [&](std::uint32_t i) { return i != exchange.me && !exchange.of(i).ready; };
  return herring::stall_text(exchange.operation.descriptor, exchange.key, name_ranks(exchange, silent), least, waited);
}

std::string timeout_text(const Exchange& exchange) {
  std::string text = to_string(exchange.operation.descriptor) + " timed out after " +
                     round_seconds_text(exchange.operation.timeout) + ": rank " +
                     std::to_string(exchange.operation.world_ranks[exchange.me]) + " waits for ";
  const auto silent = [&](std::uint32_t i) { return i != exchange.me && !exchange.of(i).ready; };
  const auto unfinished = [&](std::uint32_t i) {
    return i != exchange.me &&
           (exchange.way == Way::kFromRoot ? !exchange.of(i).released : !exchange.can_do_without(i));
  };
  if (exchange.stage == Stage::kNetwork) return text + "the network";
  if (!exchange.everybody_is_ready()) return text + name_ranks(exchange, silent) + " to call it";
  return text + name_ranks(exchange, unfinished) + " to finish their part of it";
}

}  // namespace herring::intra_node
