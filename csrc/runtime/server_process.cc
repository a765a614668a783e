#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <set>
#include <thread>
#include <utility>

#include "core/status.h"
#include "core/thread.h"
#include "runtime/connect.h"
#include "runtime/control.h"
#include "runtime/lane_thread.h"
#include "runtime/placement.h"
#include "runtime/runtime.h"

namespace herring::runtime {

class ServerProcess::Impl {
 public:
  Impl(Options given, Instant deadline)
      : options(std::move(given)),
        placement(make_placement(options.config, options.hub->workers(), options.hub->servers())),
        stop_fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (stop_fd < 0) throw Error(Code::kTransport, std::string("eventfd: ") + std::strerror(errno));
    connections = connect(options.config, placement, *options.hub, Role::kServer, options.rank, options.fabric_search,
                          deadline, domain, options.wrap_endpoint);
    lane_threads = start_lane_threads(options.config, connections.lanes);
    // Where workers have lanes too, or some may be late, they part together (Runtime::shutdown); the hub waits for
    // every member's word.
    const bool mixed = std::any_of(placement.lanes.begin(), placement.lanes.end(),
                                   [](const LanePlace& lane) { return lane.embedded; });
    if (mixed || placement.backup_workers > 0) {
      goodbye = start_thread("herring-goodbye", [this] { say_goodbye(); });
    }
  }

  ~Impl() {
    options.hub->leave();  // Ends the thread's exchange.
    if (goodbye.joinable()) goodbye.join();
    lane_threads.clear();
    connections.lanes.clear();
    close(stop_fd);
  }

  void say_goodbye() {
    try {
      options.hub->exchange("goodbye", {}, Instant::max(), Wants::kNothing);
    } catch (const Error&) {
      // The job is over some other way; run() learns of it from the hub's events.
    }
  }

  Status run() {
    while (!stop.load()) {
      pollfd polled[2] = {{options.hub->event_fd(), POLLIN, 0}, {stop_fd, POLLIN, 0}};
      if (poll(polled, 2, 1000) < 0 && errno != EINTR) {
        return Status(Code::kTransport, std::string("poll: ") + std::strerror(errno));
      }
      HubEvent event;
      while (options.hub->next_event(event)) {
        if (!take(event)) continue;
        lane_threads.clear();  // A lane's counters are complete when its thread has ended.
        return outcome;
      }
    }
    // Who stops it may have heard earlier than this one why the job is over.
    HubEvent event;
    while (outcome.is_ok() && options.hub->next_event(event)) static_cast<void>(take(event));
    return outcome.is_ok() ? Status(Code::kCancelled, "the server was stopped") : outcome;
  }

  /// True where there is nobody left to serve.
  bool take(const HubEvent& event) {
    const bool is_of_group = event.kind == HubEvent::Kind::kGroupAborted || event.kind == HubEvent::Kind::kGroupLeft;
    if (is_of_group) return false;  // Its workers tell the lanes.
    const std::string who = to_string(event.member);
    if (event.kind == HubEvent::Kind::kHubLost) {
      if (!gone.contains(0)) note(Status(Code::kPeerLost, to_string(event)));
      return true;
    }
    if (event.kind == HubEvent::Kind::kFinished) {
      for (const auto& lane : connections.lanes) lane->peer_left(PeerId{event.member.rank}, to_string(event));
      return false;
    }
    // Workers go on with the other servers, this one among them.
    if (event.member.role == Role::kServer && placement.failover) return false;
    if (event.kind == HubEvent::Kind::kFailed) note(Status(Code::kPeerLost, who + " failed: " + event.reason));
    if (event.kind == HubEvent::Kind::kLost) note(Status(Code::kPeerLost, who + " is lost: " + event.reason));
    if (event.member.role != Role::kWorker) return false;
    gone.insert(event.member.rank);
    if (event.kind == HubEvent::Kind::kLeft) {
      for (const auto& lane : connections.lanes) lane->peer_left(PeerId{event.member.rank}, to_string(event));
    }
    if (event.kind == HubEvent::Kind::kLost) {
      for (const auto& lane : connections.lanes) {
        lane->peer_lost(PeerId{event.member.rank}, who + " is lost: " + event.reason);
      }
    }
    return gone.size() == placement.workers;
  }

  void note(Status status) {
    if (outcome.is_ok()) outcome = std::move(status);
  }

  Options options;
  Placement placement;
  memory::Domain domain;  // Before the endpoints: goes after them.
  Connections connections;
  std::vector<std::unique_ptr<LaneThread>> lane_threads;
  int stop_fd = -1;
  std::atomic<bool> stop{false};
  std::thread goodbye;
  std::set<std::uint32_t> gone;  ///< Workers that left, failed or were lost.
  Status outcome;
};

ServerProcess::ServerProcess(Options options, Instant deadline)
    : impl_(std::make_unique<Impl>(std::move(options), deadline)) {}

ServerProcess::~ServerProcess() = default;

Status ServerProcess::run() { return impl_->run(); }

void ServerProcess::stop() {
  impl_->stop.store(true);
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(impl_->stop_fd, &one, sizeof(one));
}

ServerCounters ServerProcess::counters() const {
  ServerCounters counters;
  counters.server = impl_->options.rank;
  counters.place = impl_->placement.server_places[impl_->options.rank];
  counters.ops = 0;
  for (const auto& lane : impl_->connections.lanes) {
    const server::EngineStats stats = lane->stats();
    counters.bytes_received += stats.bytes_received;
    counters.bytes_sent += stats.bytes_sent;
    *counters.ops += stats.ops_completed;
    counters.memory_bound_bytes += lane->memory_bound();
    counters.record_bound_bytes += lane->record_bound();
  }
  return counters;
}

}  // namespace herring::runtime
