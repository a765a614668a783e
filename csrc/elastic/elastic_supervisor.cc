// The supervisor: the only thread that listens to the rendezvous, and that goes from one generation to the next.

#include <pthread.h>

#include <algorithm>
#include <utility>

#include "core/status.h"
#include "elastic/elastic_impl.h"

namespace herring::elastic {
namespace {

using Clock = std::chrono::steady_clock;

constexpr Duration kLookAgain = std::chrono::milliseconds(50);
constexpr std::size_t kReportSize = 16384;

}  // namespace

void ElasticRuntime::Impl::send(MessageKind kind, std::uint64_t generation, const std::string& text, bool at_boundary) {
  Message message;
  message.kind = kind;
  message.generation = generation;
  message.text = text;
  message.at_boundary = at_boundary;
  rendezvous->send(std::move(message));
}

void ElasticRuntime::Impl::supervise() {
  pthread_setname_np(pthread_self(), "herring-superv");
  try {
    while (take_turn()) {
    }
  } catch (const std::exception& error) {
    give_up(status_of(error));
    take_turn();
  }
  stay_out();
  // An abort, or what cannot go on: for the others this process is lost.
  const std::scoped_lock lock(mutex);
  if (life.has_ended()) rendezvous->close();
}

/// False where it has stepped down.
bool ElasticRuntime::Impl::take_turn() {
  Instant until = Instant::max();
  Lifecycle::Turn turn = Lifecycle::Turn::kListen;
  {
    const std::scoped_lock lock(mutex);
    turn = life.take_turn(is_ready_for_boundary());
    if (turn == Lifecycle::Turn::kStepDown) {
      doubts_are_over();
      changed.notify_all();
      return false;
    }
    until = next_report();
    if (!doubtful.empty()) until = std::min(until, Clock::now() + kLookAgain);
  }
  if (turn == Lifecycle::Turn::kLeave) {
    switch_over("");
    return true;
  }
  Message message;
  if (rendezvous->next(message, until)) obey(message);
  decide_doubtful();
  report_broken();
  report_what_is_due();
  retire_if_drained();
  return true;
}

/// Who leaves before all have what it has takes away what they still need to come to the boundary.
bool ElasticRuntime::Impl::is_ready_for_boundary() const {
  const std::optional<Departure> how = life.boundary();
  if (!how) return false;
  if (*how == Departure::kBoundary) return operations.empty();
  // What failed did so on all of them, whether they have called it yet or never will.
  return std::none_of(operations.begin(), operations.end(), [](const auto& entry) {
    return entry.second.work->is_done() && entry.second.work->status().is_ok();
  });
}

/// While this one ends its last generation it goes to no other: the others shall not wait for it.
void ElasticRuntime::Impl::stay_out() {
  for (;;) {
    {
      const std::scoped_lock lock(mutex);
      if (life.phase() != Phase::kFinishing) return;
    }
    Message message;
    if (!rendezvous->next(message, Instant::max())) continue;
    if (obey(message) == Lifecycle::Command::kStopListening) return;
  }
}

/// Carries out what the message asks for, but to join and to stop, which are the caller's.
Lifecycle::Command ElasticRuntime::Impl::obey(const Message& message) {
  using Command = Lifecycle::Command;
  Lifecycle::Reaction reaction;
  {
    const std::scoped_lock lock(mutex);
    reaction = life.hear(message, messages_used > 0);
    if (reaction.command == Command::kNoteNewcomers) newcomers = message.workers;
  }
  switch (reaction.command) {
    case Command::kConnect:
      build_beside(message);
      break;
    case Command::kRefuse:
      drop_beside();
      send(MessageKind::kBroken, message.generation, std::string(reaction.why));
      break;
    case Command::kDropBeside:
      drop_beside();
      break;
    case Command::kGoOver:
      go_over();
      break;
    case Command::kLeave:
      switch_over(message.text);
      break;
    case Command::kSettle:
      settle(message);
      break;
    case Command::kEnd:
      give_up(Status(Code::kPeerLost, message.text));
      break;
    case Command::kNothing:
    case Command::kNoteNewcomers:
    case Command::kJoin:
    case Command::kStopListening:
      break;
  }
  return reaction.command;
}

void ElasticRuntime::Impl::settle(const Message& message) {
  const std::scoped_lock lock(mutex);
  for (const OperationId& id : message.operations) {
    forget(id);
    straddling.erase(id);
  }
  changed.notify_all();
}

/// When the supervisor is to report; the caller holds the mutex.
Instant ElasticRuntime::Impl::next_report() const {
  if (reports.empty()) return Instant::max();
  // Somebody waits for it: for memory, or until all have what this one has. Else it is told with what comes after it.
  const bool is_urgent = is_journal_full() || life.boundary();
  const Instant due = is_urgent ? Instant{} : reports.due(static_cast<std::uint32_t>(present.members.size()));
  return life.reports() ? due : std::max(due, Clock::now() + kLookAgain);
}

void ElasticRuntime::Impl::report_what_is_due() {
  bool is_due = false;
  {
    const std::scoped_lock lock(mutex);
    is_due = Clock::now() >= next_report();
  }
  if (is_due) report_completed();
}

void ElasticRuntime::Impl::report_completed() {
  std::vector<Message> messages;
  {
    const std::scoped_lock lock(mutex);
    if (!life.reports()) return;
    for (const OperationId& id : reports.take(Clock::now())) {
      const auto group = groups.find(GroupId{id.group});
      const auto left = leaving.find(GroupId{id.group});
      if (group == groups.end() && left == leaving.end()) continue;
      const std::size_t members = group != groups.end() ? group->second.members.size() : left->second;
      if (messages.empty() || messages.back().operations.size() == kReportSize) {
        messages.emplace_back();
        messages.back().kind = MessageKind::kCompleted;
        messages.back().generation = present.number;
      }
      messages.back().operations.push_back(id);
      messages.back().counts.push_back(static_cast<std::uint32_t>(members));
    }
  }
  for (Message& report : messages) rendezvous->send(std::move(report));
}

void ElasticRuntime::Impl::report_broken() {
  std::optional<std::string> reason;
  {
    const std::scoped_lock lock(mutex);
    reason = life.take_break();
  }
  if (reason) send(MessageKind::kBroken, present.number, *reason);  // It says kBreak to all, this one too.
}

void ElasticRuntime::Impl::give_up(const Status& status) {
  const std::scoped_lock lock(mutex);
  if (!life.end(status)) return;
  doubts_are_over();
  for (auto& [id, operation] : operations) {
    if (operation.work->is_done()) continue;
    // Those that run end with their runtime, which lets go of their memory first.
    if (operation.run == 0) {
      --unfinished;
      order->leave(*operation.call);
      operation.work->complete(status);
    }
  }
  if (present.runtime) present.runtime->give_up(status);
  if (old.runtime) old.runtime->give_up(status);
  changed.notify_all();
}

}  // namespace herring::elastic
