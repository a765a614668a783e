#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <vector>

#include "elastic/message.h"
#include "elastic/plan.h"
#include "elastic/rendezvous.h"
#include "engine_program.h"
#include "require.h"

/// Processes that say anything to the rendezvous: its decoders, what it decides, and the plan made of journals that are
/// not true. No crash, no answer to who is not there, and who is let in has a place of its own.
namespace herring::fuzz {
namespace {

using namespace elastic;
using Action = Rendezvous::Action;

/// What decodes is read back from what it encodes to.
void check_bodies(std::span<const std::byte> body) {
  if (const auto message = decode_message(body)) {
    HERRING_REQUIRE(decode_message(encode(*message)) == message);
    HERRING_REQUIRE(message->operations.size() <= kMaxOperations);
    HERRING_REQUIRE(message->counts.empty() || message->counts.size() == message->operations.size());
  }
  if (const auto summary = decode_summary(body)) {
    HERRING_REQUIRE(decode_summary(encode(*summary)) == summary);
    const std::vector<Summary> summaries(3, *summary);
    const std::vector<std::uint64_t> workers{1, 2, 3};
    const Plan plan = make_plan(summaries, workers);
    HERRING_REQUIRE(plan.steps == make_plan(summaries, workers).steps);
    for (const elastic::Step& step : plan.steps) HERRING_REQUIRE(step.from < 3 && step.to.size() <= 3);
  }
}

class Harness {
 public:
  explicit Harness(std::span<const std::uint8_t> input) : program_(input), rendezvous_(options(program_.next())) {}

  void run() {
    while (!program_.at_end() && !rendezvous_.has_ended()) {
      step();
      carry_out();
    }
    rendezvous_.close("over");
    carry_out();
    HERRING_REQUIRE(rendezvous_.connected() == 0);
  }

 private:
  static Rendezvous::Options options(std::uint8_t setup) {
    Rendezvous::Options options;
    options.workers = 1 + (setup & 3u);
    options.servers = setup >> 2 & 3u;
    options.min_workers = 1 + (setup >> 4 & 1u);
    return options;
  }

  /// An opcode below 24 is a message of that kind, from a connection, about a generation near the present one.
  void step() {
    const std::uint8_t what = program_.next();
    const ConnectionId from = 1 + (program_.next() & 7u);
    if (what < 24) {
      Message message;
      message.kind = static_cast<MessageKind>(what);
      const std::uint8_t detail = program_.next();
      message.generation = rendezvous_.generation() + (detail & 3u) - 1;
      message.role = (detail & 4u) != 0 ? control::Role::kServer : control::Role::kWorker;
      message.is_elastic = (detail & 8u) != 0;
      message.at_boundary = (detail & 16u) != 0;
      message.is_planned = (detail & 32u) != 0;
      message.rank = program_.next();
      for (std::uint8_t i = detail >> 6; i > 0; --i) {
        message.operations.push_back({program_.next() & 1u, program_.next()});
        message.counts.push_back(program_.next() & 3u);
      }
      if ((message.rank & 128u) != 0) message.counts.resize(message.counts.size() / 2);
      // As the server does: what does not decode never gets here.
      const auto heard = decode_message(encode(message));
      if (!heard || (!in_.contains(from) && heard->kind != MessageKind::kEnter)) return;
      in_.insert(from);
      return rendezvous_.receive(from, *heard, now_);
    }
    if (what < 32) {
      rendezvous_.disconnected(from, "closed", now_);
      in_.erase(from);
      return;
    }
    if (what < 40) return rendezvous_.heard(from, now_);
    now_ += std::chrono::milliseconds(100 * (what - 39));
    rendezvous_.tick(now_);
  }

  void carry_out() {
    for (std::vector<Action> actions; !(actions = rendezvous_.take_actions()).empty();) {
      for (const Action& action : actions) perform(action);
    }
    HERRING_REQUIRE(rendezvous_.connected() <= 8);
    HERRING_REQUIRE(rendezvous_.next_wakeup() > Instant{} || rendezvous_.connected() == 0);
  }

  void perform(const Action& action) {
    switch (action.kind) {
      case Action::Kind::kOpenHub:
        HERRING_REQUIRE(action.workers > 0 && action.generation > opened_);
        opened_ = action.generation;
        return rendezvous_.hub_opened(action.generation, 4000, now_);
      case Action::Kind::kSend:
        HERRING_REQUIRE(in_.contains(action.connection));
        HERRING_REQUIRE(decode_message(encode(action.message)).has_value());
        if (action.message.kind == MessageKind::kGo) {
          const auto& go = action.message;
          HERRING_REQUIRE(go.members.size() == go.workers);
          const bool has_place = places_[go.generation].emplace(action.connection).second;
          HERRING_REQUIRE(has_place);
        }
        return;
      case Action::Kind::kClose:
        in_.erase(action.connection);
        return;
      default:
        return;
    }
  }

  Program program_;
  Rendezvous rendezvous_;
  Instant now_{std::chrono::hours(1)};
  std::uint64_t opened_ = 0;
  std::set<ConnectionId> in_;
  std::map<std::uint64_t, std::set<ConnectionId>> places_;  // By generation: who was sent there.
};

}  // namespace
}  // namespace herring::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  using namespace herring::fuzz;
  check_bodies(std::as_bytes(std::span(bytes, size)));
  Harness({bytes, size}).run();
  return 0;
}
