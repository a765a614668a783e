#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "elastic/cutoff.h"
#include "elastic/journal.h"
#include "elastic/lifecycle.h"
#include "elastic/plan.h"
#include "elastic/rendezvous.h"

/// What tests/elastic/world.h plays with.
namespace herring::elastic::testing {

using WorkerId = std::uint64_t;

/// Whose contributions it has, and what came of it.
struct Value {
  std::set<WorkerId> contributors;
  std::uint64_t number = 0;
  friend bool operator==(const Value&, const Value&) = default;
};

struct Pending {
  std::uint64_t number = 0;  // What this worker contributes.
  std::uint64_t root = 0;
  std::uint64_t run = 0;
  std::optional<Value> value;
  bool has_failed = false;
};

struct Worker {
  explicit Worker(bool is_elastic) : life(is_elastic) {}

  std::uint64_t place = 0;  // Its connection.
  bool is_alive = true;
  Lifecycle life;
  std::optional<Event> in_hand;  // It ended while its supervisor was about to do this.
  WorkerId id = 0;
  Message go;                  // Of the generation it joins.
  std::vector<WorkerId> crew;  // Who is in the one that it was in last.
  std::deque<Message> inbox;
  std::deque<Message> outbox;
  Journal journal;
  std::map<OperationId, Pending> operations;
  std::map<OperationId, Pending> outcomes;
  std::map<OperationId, std::uint64_t> straddling;
  std::vector<OperationId> unreported;
  std::map<OperationId, Pending> history;  // What its user saw.
  std::uint32_t newcomers = 0;
  // A planned switch: the generation beside, and what still goes through the one before.
  std::optional<Message> beside;
  std::uint64_t old = 0;
  Cutoff cutoff;
  std::uint64_t retiring_for = 0;  // The one before has drained; what is told when it is over.
  // The user's program.
  enum class Line : std::uint8_t { kSync, kGradients, kStep, kAsked, kBoundary, kDone } line = Line::kSync;
  bool wants_anew = false;
  bool quits = false;  // Before it has done all steps.
  std::uint64_t step = 0;
  std::vector<OperationId> waits_for;
  bool has_left() const { return life.phase() == Phase::kEnded; }
};

/// What the workers of a generation have told each other.
struct Meeting {
  std::vector<WorkerId> members;
  std::map<WorkerId, Summary> summaries;
  std::map<WorkerId, std::map<OperationId, std::uint64_t>> running;  // And with which contribution.
  std::set<WorkerId> left;
  // A planned one.
  std::set<WorkerId> joined;
  std::map<WorkerId, Summary> submitted;
  bool is_cancelled = false;
};

/// A server process, as far as the rendezvous sees it: what it sums is no matter here.
struct Server {
  std::uint64_t place = 0;
  std::uint64_t serves = 0;  // The generation; 0: none.
  bool is_alive = true;
  std::deque<Message> inbox;
  std::deque<Message> outbox;
};

}  // namespace herring::elastic::testing
