#include "runtime/deadlock.h"

#include <algorithm>
#include <cstring>
#include <map>

namespace herring::runtime {
namespace {

constexpr std::size_t kMostRanksInText = 8;
constexpr std::size_t kMostCallsInText = 4;

template <std::size_t kSize>
void put(std::array<char, kSize>& to, const std::string& text) {
  to.fill(0);
  std::memcpy(to.data(), text.data(), std::min(text.size(), kSize - 1));
}

/// What came from another process may lack its end.
template <std::size_t kSize>
std::string get(const std::array<char, kSize>& from) {
  return {from.data(), std::find(from.begin(), from.end() - 1, '\0')};
}

std::string ranks_text(const std::vector<std::uint32_t>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < std::min(ranks.size(), kMostRanksInText); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  if (ranks.size() > kMostRanksInText) text += " and " + std::to_string(ranks.size() - kMostRanksInText) + " more";
  return text;
}

}  // namespace

void AwaitedCall::set_text(const std::string& full) {
  // The end of a name tells more than its middle.
  constexpr std::size_t kEnd = kText / 2;
  const bool fits = full.size() < kText;
  put(text, fits ? full : full.substr(0, kText - kEnd - 4) + "..." + full.substr(full.size() - kEnd));
}

bool DeadlockJudge::take(std::uint32_t rank, const WaitingReport& report, Instant now) {
  if (rank >= entries_.size() || report.count == 0 || report.count > WaitingReport::kMostCalls) return false;
  entries_[rank] = {true, now, report};
  return true;
}

void DeadlockJudge::look(Instant now, Duration silence) {
  if (!stuck_.empty()) return;
  bool all_are_listed = true;
  for (Entry& entry : entries_) {
    if (entry.is_heard && now - entry.last_heard > silence) entry = {};
    all_are_listed = all_are_listed && (!entry.is_heard || is_listed(entry.report));
  }
  if (all_are_listed) {
    find();
  } else {
    ask();
  }
}

bool DeadlockJudge::is_listed(const WaitingReport& report) const {
  return std::all_of(report.calls.begin(), report.calls.begin() + report.count,
                     [this](const AwaitedCall& call) { return place(call).has_value(); });
}

/// A list of what those wait for that are heard.
void DeadlockJudge::ask() {
  ++list_.list;
  list_.count = 0;
  for (const Entry& entry : entries_) {
    for (std::uint32_t i = 0; entry.is_heard && i < entry.report.count; ++i) {
      if (list_.count < DeadlockList::kMostCalls && !place(entry.report.calls[i])) {
        list_.calls[list_.count++] = entry.report.calls[i];
      }
    }
  }
}

std::optional<std::size_t> DeadlockJudge::place(const AwaitedCall& call) const {
  for (std::size_t i = 0; i < list_.count; ++i) {
    if (list_.calls[i] == call) return i;
  }
  return std::nullopt;
}

void DeadlockJudge::find() {
  std::vector<std::uint32_t> stuck;
  for (std::uint32_t rank = 0; rank < entries_.size(); ++rank) {
    if (entries_[rank].is_heard && entries_[rank].report.list == list_.list) stuck.push_back(rank);
  }
  // Who waits for something that nobody of them has left out may go on: without it, until nothing changes.
  while (true) {
    std::uint64_t left_out = 0;
    for (const std::uint32_t rank : stuck) left_out |= entries_[rank].report.not_called;
    const auto may_go_on = [&](std::uint32_t rank) {
      const WaitingReport& report = entries_[rank].report;
      return std::any_of(report.calls.begin(), report.calls.begin() + report.count, [&](const AwaitedCall& call) {
        const auto at = place(call);
        return !at || (left_out >> *at & 1) == 0;
      });
    };
    if (std::erase_if(stuck, may_go_on) == 0) break;
  }
  if (stuck.empty()) return;
  stuck_ = std::move(stuck);
  say();
}

void DeadlockJudge::say() {
  std::string text(kDeadlockText);
  std::size_t said = 0;
  std::size_t more = 0;
  for (std::size_t i = 0; i < list_.count; ++i) {
    std::map<std::string, std::vector<std::uint32_t>> waiting;  // By what each calls it: a round has several names.
    std::vector<std::uint32_t> missing;
    for (const std::uint32_t rank : stuck_) {
      const WaitingReport& report = entries_[rank].report;
      const auto end = report.calls.begin() + report.count;
      const auto call = std::find(report.calls.begin(), end, list_.calls[i]);
      if (call != end) waiting[get(call->text)].push_back(rank);
      if ((report.not_called >> i & 1) != 0) missing.push_back(rank);
    }
    if (missing.empty()) continue;
    for (const auto& [name, ranks] : waiting) {
      if (said == kMostCallsInText) {
        ++more;
        continue;
      }
      text += (said++ == 0 ? "" : "; ") + name + " is waited for on " + ranks_text(ranks) +
              " and was never called on " + ranks_text(missing);
    }
  }
  if (more > 0) text += "; and " + std::to_string(more) + " more";
  if (stuck_.size() < entries_.size()) text += ". Ranks that are not named have not waited for as long";
  text += ". Every rank has to call the same operations under the same names";
  text_ = std::move(text);
}

}  // namespace herring::runtime
