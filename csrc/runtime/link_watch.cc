#include "runtime/link_watch.h"

#include <algorithm>
#include <utility>

namespace herring::runtime {
namespace {

// Looks in one patience. A look costs a pass over what is awaited.
constexpr int kLooks = 8;
// Questions of one look: what is left is asked with the next.
constexpr std::size_t kMaxQuestions = 1024;

}  // namespace

LinkWatch::LinkWatch(const Options& options, std::vector<PeerId> peers)
    : options_(options), period_(std::max(options.patience / kLooks, Duration{1})), peers_(std::move(peers)) {
  std::sort(peers_.begin(), peers_.end());
}

void LinkWatch::asked(Instant now, PeerId peer) {
  const auto found = watched_.find(peer);
  if (found == watched_.end()) return;
  found->second.asked_again = now;
  if (!is_open(found->second)) found->second.asked = now;
}

Unreachable LinkWatch::take_unreachable() { return std::exchange(unreachable_, {}); }

void LinkWatch::forget(PeerId peer) {
  std::erase(peers_, peer);
  watched_.erase(peer);
}

/// Nobody looked for a while: this process may not have run, so that silence says nothing.
void LinkWatch::catch_up(Instant now) {
  if (last_look_ != Instant{} && now - last_look_ > 2 * period_) {
    const Duration missed = now - last_look_ - period_;
    for (auto& [peer, watched] : watched_) {
      watched.since += missed;
      watched.asked_again += missed;
      if (is_open(watched)) watched.asked += missed;
    }
  }
  last_look_ = now;
  next_look_ = now + period_;
}

void LinkWatch::take_answers(const Heard& heard) {
  for (auto& [peer, watched] : watched_) {
    const Instant last = heard(peer);
    if (is_open(watched) && last >= watched.asked) watched.asked = Instant{};
    watched.since = std::max(watched.since, last);
  }
}

void LinkWatch::watch_awaited(Instant now, std::span<const PeerId> awaited, const Heard& heard) {
  std::vector<PeerId> wanted;
  for (const PeerId peer : awaited) {
    if (std::binary_search(peers_.begin(), peers_.end(), peer)) wanted.push_back(peer);
  }
  const auto is_doubtful = [&](const auto& entry) {
    return is_open(entry.second) && now - entry.second.asked >= options_.patience / 2;
  };
  const bool asks_others = options_.asks_others && std::any_of(watched_.begin(), watched_.end(), is_doubtful);
  if (asks_others && !wanted.empty()) wanted = peers_;
  std::sort(wanted.begin(), wanted.end());
  std::erase_if(watched_,
                [&](const auto& entry) { return !std::binary_search(wanted.begin(), wanted.end(), entry.first); });
  for (const PeerId peer : wanted) {
    // Who is asked for the others' sake is asked at once.
    const Instant since = asks_others ? std::max(heard(peer), now - options_.patience / 2) : now;
    watched_.try_emplace(peer, Watched{since});
  }
}

void LinkWatch::find_unreachable(Instant now) {
  Duration longest{};
  for (const auto& [peer, watched] : watched_) {
    if (is_open(watched)) longest = std::max(longest, now - watched.asked);
  }
  if (longest < options_.patience) return;
  Instant first = now;
  for (auto& [peer, watched] : watched_) {
    ++unreachable_.of;
    if (!is_open(watched)) ++unreachable_.answering;
    if (!is_open(watched) || now - watched.asked < options_.patience) continue;
    unreachable_.peers.push_back(peer);
    first = std::min(first, watched.since);
    watched.asked = now;
  }
  unreachable_.silent = now - first;
}

std::vector<PeerId> LinkWatch::look(Instant now, std::span<const PeerId> awaited, const Heard& heard) {
  catch_up(now);
  unreachable_ = {};
  take_answers(heard);
  watch_awaited(now, awaited, heard);
  find_unreachable(now);
  std::vector<PeerId> questions;
  for (const auto& [peer, watched] : watched_) {
    if (questions.size() == kMaxQuestions) break;
    const Instant due =
        is_open(watched) ? watched.asked_again + options_.patience / 4 : watched.since + options_.patience / 2;
    if (now >= due) questions.push_back(peer);
  }
  return questions;
}

}  // namespace herring::runtime
