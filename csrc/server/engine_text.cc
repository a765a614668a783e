#include <algorithm>
#include <cstdio>
#include <map>
#include <string>

#include "core/seconds_text.h"
#include "core/stall_text.h"
#include "server/engine_impl.h"

namespace herring::server {
namespace {

/// What a rank said, beyond the call itself: only where the calls look the same.
std::string details(const wire::Announce& announce) {
  std::string text = " with " + std::to_string(announce.descriptor.op_bytes) + " bytes (" +
                     std::to_string(announce.descriptor.part_bytes) + " in this part), " +
                     std::to_string(announce.contributor_count) + " contributors, averaged over " +
                     std::to_string(announce.average_over) + ", root " + std::to_string(announce.descriptor.root) +
                     ", pusher " + std::to_string(announce.pusher) + ", server share " +
                     std::to_string(announce.shard_bytes) + " bytes at " + std::to_string(announce.shard_offset) +
                     " in chunks of " + std::to_string(announce.chunk_bytes);
  return text;
}

/// With backup workers the call is another one.
std::string call_text(const wire::Announce& announce, bool is_join) {
  return to_string(announce.descriptor) + (is_join ? " with backup workers" : "");
}

std::string bounded(std::string text) {
  if (text.size() > wire::kMaxReasonText) {
    text.resize(wire::kMaxReasonText - 4);
    text += " ...";
  }
  return text;
}

}  // namespace

std::string rank_list(std::vector<std::uint32_t> ranks) {
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size();) {
    std::size_t end = i + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
    if (i > 0) text += ", ";
    text += std::to_string(ranks[i]);
    if (end - i > 1) text += (end - i > 2 ? "-" : ", ") + std::to_string(ranks[end - 1]);
    i = end;
  }
  return text;
}

/// The ranks that an announce speaks for: those of its contributor, or the process alone where several share one.
std::vector<std::uint32_t> Engine::Impl::ranks_of(const Participant& participant) const {
  if (participant.silent || participant.announcers > 1) return {participant.peer.value};
  return wire::ranks_of(participant.announce.ranks());
}

/// Who stands behind each contributor of the operation; null where nobody knows yet.
const GroupMembers* Engine::Impl::members(const Op& op) const {
  const auto fits = [&](const GroupMembers& known) { return known.size() == op.shape.contributor_count; };
  const GroupId group = callers_group(op.key.op.group);
  if (group == GroupId{0} && fits(config_.hosts)) return &config_.hosts;
  auto found = groups_.find(op.key.op.group);
  if (found == groups_.end()) found = groups_.find(group);
  return found == groups_.end() || !fits(found->second) ? nullptr : &found->second;
}

std::string Engine::Impl::mismatch_text(const Op& op) const {
  std::map<std::string, std::vector<std::uint32_t>> calls;
  std::map<std::string, std::vector<std::uint32_t>> detailed;
  for (const Participant& participant : op.participants) {
    if (participant.silent) continue;
    const std::string call = call_text(participant.announce, participant.is_join);
    for (const std::uint32_t rank : ranks_of(participant)) {
      calls[call].push_back(rank);
      detailed[call + details(participant.announce)].push_back(rank);
    }
  }
  // The calls alone where they tell the difference; sizes and settings where they look the same.
  const auto& sayings = calls.size() > 1 ? calls : detailed;
  std::vector<std::pair<std::uint32_t, std::string>> lines;
  for (const auto& [saying, ranks] : sayings) {
    lines.emplace_back(*std::min_element(ranks.begin(), ranks.end()), rank_list(ranks) + " said " + saying);
  }
  std::sort(lines.begin(), lines.end());
  std::string text;
  for (const auto& [rank, line] : lines) text += (text.empty() ? "" : "; ") + line;
  std::string tail = " (" + to_string(op.key.op) + "; every rank must make the same calls)";
  if (text.size() + tail.size() > wire::kMaxReasonText) {
    text.resize(wire::kMaxReasonText - tail.size() - 4);
    text += " ...";
  }
  return text + tail;
}

/// To one who came when the others had gone on.
std::string Engine::Impl::late_mismatch_text(const Op& op, const wire::Header& header,
                                             const wire::Announce& announce) const {
  std::string its = call_text(announce, (header.flags & wire::kFlagJoin) != 0);
  std::string theirs = call_text(op.shape, op.is_join());
  if (its == theirs) {
    its += details(announce);
    theirs += details(op.shape);
  }
  return bounded("rank " + std::to_string(header.sender) + " said " + its +
                 "; the others, who did not wait for it, had said " + theirs + " (" + to_string(op.key.op) +
                 "; every rank must make the same calls)");
}

/// Who has not announced: by rank where that can be known, else by position in the group.
std::string Engine::Impl::missing_text(const Op& op) const {
  const GroupMembers* known = members(op);
  const bool one_rank_each =
      callers_group(op.key.op.group) == GroupId{0} && op.shape.contributor_count == config_.workers;
  std::vector<std::uint32_t> ranks;
  std::string unknown;
  for (std::uint32_t contributor = 0; contributor < op.shape.contributor_count; ++contributor) {
    const auto& owners = op.owners[contributor];
    if (!owners.empty()) {
      const Participant& first = op.participants[owners.front()];
      if (owners.size() >= first.announcers) continue;
      bool is_named = false;
      for (const std::uint32_t rank : wire::ranks_of(first.announce.ranks())) {
        const bool came = std::any_of(owners.begin(), owners.end(),
                                      [&](std::uint32_t index) { return op.participants[index].peer.value == rank; });
        if (came) continue;
        ranks.push_back(rank);
        is_named = true;
      }
      if (is_named) continue;
      unknown += (unknown.empty() ? "member " : ", ") + std::to_string(contributor);
    } else if (one_rank_each) {
      ranks.push_back(contributor);
    } else if (known != nullptr) {
      const std::vector<std::uint32_t> all = wire::ranks_of((*known)[contributor]);
      ranks.insert(ranks.end(), all.begin(), all.end());
    } else {
      unknown += (unknown.empty() ? "member " : ", ") + std::to_string(contributor);
    }
  }
  std::string text = ranks.empty() ? "" : rank_list(std::move(ranks));
  if (!unknown.empty()) {
    text += (text.empty() ? "" : " and ") + unknown + " of the " + std::to_string(op.shape.contributor_count) +
            " of group " + std::to_string(callers_group(op.key.op.group).value);
  }
  return text;
}

std::string Engine::Impl::timeout_text(const Op& op) const {
  const std::string seconds = round_seconds_text(op.timeout);
  const std::string call = to_string(op.shape.descriptor) + ", " + to_string(op.key.op);
  std::vector<std::uint32_t> came;
  std::vector<std::uint32_t> silent;
  for (const Participant& participant : op.participants) {
    for (const std::uint32_t rank : ranks_of(participant)) {
      came.push_back(rank);
      if (participant.outstanding > 0) silent.push_back(rank);
    }
  }
  if (op.state == OpState::kGathering) {
    return bounded("after " + seconds + " " + missing_text(op) + " had not called " + call + "; " +
                   rank_list(std::move(came)) + " had. Look at what the missing ones were doing");
  }
  if (op.absentees() > 0 && silent.empty()) {
    return bounded("after " + seconds + " " + missing_text(op) + " had not come for the result of " + call +
                   ", which the others had not waited for. Look at what the missing ones were doing");
  }
  if (silent.empty()) {
    return bounded("after " + seconds + " " + call + " was not finished, though all ranks had called it; " +
                   "a longer timeout may help");
  }
  return bounded("after " + seconds + " the data of " + rank_list(std::move(silent)) + " had not arrived for " + call +
                 ", though all ranks had called it");
}

std::string Engine::Impl::stall_text(Instant now, const Op& op) const {
  const Duration waited = now - op.hasty_since;
  return bounded(herring::stall_text(op.shape.descriptor, op.key.op, missing_text(op), config_.stall_warning, waited));
}

std::string straggler_text(std::span<const Lateness> now, std::span<const Lateness> before) {
  std::size_t worst = 0;
  std::uint64_t most = 0;
  std::uint64_t operations = 0;
  for (std::size_t rank = 0; rank < now.size(); ++rank) {
    const std::uint64_t last = now[rank].last - before[rank].last;
    operations += last;  // Each has one.
    if (last <= most) continue;
    most = last;
    worst = rank;
  }
  if (operations == 0) return "";
  const std::uint64_t announces = now[worst].announces - before[worst].announces;
  const Duration late = (now[worst].total - before[worst].total) / static_cast<Duration::rep>(announces);
  if (most * now.size() <= operations || late < std::chrono::microseconds(500)) return "";
  char numbers[128];
  std::snprintf(numbers, sizeof numbers, " came last in %.0f %% of %llu operations, on average %.1f ms after the first",
                100.0 * static_cast<double>(most) / static_cast<double>(operations),
                static_cast<unsigned long long>(operations), std::chrono::duration<double, std::milli>(late).count());
  return "rank " + std::to_string(worst) + numbers;
}

}  // namespace herring::server
