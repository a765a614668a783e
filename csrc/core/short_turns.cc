#include "core/short_turns.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>

namespace herring {
namespace {

/// As linux/sched/types.h has it, which cannot be included beside sched.h.
struct Attributes {
  std::uint32_t size = sizeof(Attributes);
  std::uint32_t policy = 0;
  std::uint64_t flags = 0;
  std::int32_t nice = 0;
  std::uint32_t priority = 0;
  std::uint64_t runtime_ns = 0;  // Of the usual policy: how long a turn is.
  std::uint64_t deadline = 0;
  std::uint64_t period = 0;
};

bool get(Attributes& attributes) {
  return syscall(SYS_sched_getattr, 0, &attributes, sizeof(attributes), 0) == 0 && attributes.policy == SCHED_OTHER;
}

bool set_turn(std::uint64_t ns) {
  Attributes attributes;
  if (!get(attributes)) return false;
  attributes.size = sizeof(attributes);
  attributes.runtime_ns = ns;
  return syscall(SYS_sched_setattr, 0, &attributes, 0) == 0;
}

}  // namespace

ShortTurns::ShortTurns(Duration turn) {
  Attributes attributes;
  const auto ns = static_cast<std::uint64_t>(std::chrono::nanoseconds(turn).count());
  // Earlier versions say nothing about turns, and would take this for nonsense or ignore it.
  if (ns == 0 || !get(attributes) || attributes.runtime_ns <= ns) return;
  if (set_turn(ns)) before_ns_ = attributes.runtime_ns;
}

ShortTurns::~ShortTurns() {
  if (before_ns_ != 0) set_turn(before_ns_);
}

}  // namespace herring
