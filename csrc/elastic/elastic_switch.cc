// Planned switches: servers come in while training goes on. A second generation is connected beside the present one,
// and the present one drains (docs/adr/0006-elastic.md, 8).

#include <algorithm>
#include <system_error>
#include <utility>

#include "core/status.h"
#include "core/text.h"
#include "elastic/elastic_impl.h"

namespace herring::elastic {
namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

void ElasticRuntime::Impl::build_beside(const Message& go) {
  drop_beside();  // One that was offered before.
  try {
    beside =
        build(home, go, Clock::now() + join_timeout, [this, &go] { return rendezvous->has_broken(go.generation); });
  } catch (const std::exception& error) {
    {
      const std::scoped_lock lock(mutex);
      static_cast<void>(life.advance(Event::kFailToConnect));
      changed.notify_all();
    }
    return send(MessageKind::kBroken, go.generation, error.what());
  }
  {
    const std::scoped_lock lock(mutex);
    if (!life.advance(Event::kConnect)) return;
  }
  send(MessageKind::kBuilt, go.generation);
}

void ElasticRuntime::Impl::drop_beside() {
  if (beside) {
    beside->runtime->give_up(Status(Code::kCancelled, "the new servers could not join"));
    beside->runtime->shutdown();
    beside.reset();
  }
  const std::scoped_lock lock(mutex);
  changed.notify_all();  // Messages may go again.
}

/// All are connected in the generation beside: what nobody has submitted yet goes through it.
void ElasticRuntime::Impl::go_over() {
  std::vector<Summary> all;
  try {
    Summary submitted;
    {
      const std::scoped_lock lock(mutex);
      for (const auto& [id, group] : journal.groups()) submitted.groups.push_back(group);
    }
    wait_for_retired();
    all = exchange(*beside->runtime, "herring.elastic.switch", submitted);
  } catch (const std::exception& error) {
    return fail_to_switch(error.what());
  }
  const std::scoped_lock lock(mutex);
  if (life.has_ended()) return;
  cutoff = Cutoff(all, [this](std::uint32_t group) { return groups.contains(GroupId{group}); });
  old_unfinished = 0;
  for (const auto& [id, operation] : operations) {
    if (operation.run == present.number && !operation.work->is_done()) ++old_unfinished;
  }
  old = present;
  adopt(std::move(*beside), true);
  beside.reset();
  static_cast<void>(life.advance(Event::kSwitchOver));
  restart_operations();
  if (present.runtime->rank() == 0) {
    logger.log(LogLevel::kWarning,
               "the job goes on with " + counted(present.hub->server_count(), "server process", "server processes"));
  }
  changed.notify_all();
}

void ElasticRuntime::Impl::fail_to_switch(const std::string& why) {
  Lifecycle::Command command = Lifecycle::Command::kNothing;
  {
    const std::scoped_lock lock(mutex);
    command = life.fail_to_switch();
  }
  if (command == Lifecycle::Command::kLeave) return switch_over(why);
  if (command == Lifecycle::Command::kEnd) give_up(Status(Code::kPeerLost, "while new servers joined: " + why));
}

void ElasticRuntime::Impl::retire_if_drained() {
  std::uint64_t number = 0;
  {
    const std::scoped_lock lock(mutex);
    if (!life.is_draining() || old_unfinished > 0 || !cutoff.is_passed(journal.groups())) return;
    life.have_drained();
    retired = std::exchange(old, {}).runtime;
    number = present.number;
  }
  try {
    retiring = std::async(std::launch::async, [this, runtime = retired, number] { retire(runtime, number); });
  } catch (const std::system_error&) {
    retire(retired, number);  // No thread can be started: then here, while nothing else is listened to.
  }
}

/// The rendezvous keeps its hub until all have said so.
void ElasticRuntime::Impl::retire(std::shared_ptr<runtime::Runtime> runtime, std::uint64_t next) {
  runtime->shutdown();
  {
    const std::scoped_lock lock(mutex);
    count_in(runtime);
    retired.reset();
    life.have_retired();
  }
  send(MessageKind::kSwitched, next);
}

/// It is over; the caller holds the mutex.
void ElasticRuntime::Impl::count_in(const std::shared_ptr<runtime::Runtime>& runtime) {
  if (runtime) past += runtime->stats();
}

void ElasticRuntime::Impl::wait_for_retired() {
  if (retiring.valid()) retiring.get();
}

}  // namespace herring::elastic
