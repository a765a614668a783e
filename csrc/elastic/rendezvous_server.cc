#include "elastic/rendezvous_server.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <future>
#include <map>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "control/hub.h"
#include "control/meet.h"
#include "control/protocol.h"
#include "control/reception.h"
#include "control/socket.h"
#include "core/hmac.h"
#include "core/status.h"
#include "core/text.h"

namespace herring::elastic {
namespace {

using namespace control;
using Clock = std::chrono::steady_clock;
using Action = Rendezvous::Action;

constexpr Duration kLinger = std::chrono::seconds(2);

/// Empty where it does not answer as one of ours does.
std::string what_is_at(const std::string& host, std::uint16_t port, const std::string& secret) {
  const Instant until = Clock::now() + kLinger;
  std::string why;
  UniqueFd fd = connect_to(host, port, until, why);
  if (!fd) return {};
  FrameSocket socket(std::move(fd));
  switch (meet(socket, secret, until).verdict) {
    case Guest::Verdict::kProven:
      return "another job's rendezvous is there, with the same secret";
    case Guest::Verdict::kOtherSecret:
      return "another job's rendezvous is there, with another secret";
    case Guest::Verdict::kRefused:
    case Guest::Verdict::kNoHost:
      break;
  }
  return {};
}

std::uint64_t random_job_id() {
  std::array<std::byte, 8> bytes{};
  random_bytes(bytes);
  std::uint64_t id = 0;
  for (const std::byte byte : bytes) id = id << 8 | std::to_integer<std::uint64_t>(byte);
  return (id >> 1) + 1;
}

}  // namespace

class RendezvousServer::Impl final : private House {
 public:
  explicit Impl(const RendezvousServerOptions& given)
      : options(given),
        rendezvous(given.job),
        descriptors(control::door_descriptors("the rendezvous", std::uint64_t{given.job.workers} + given.job.servers)) {
    Reception::Options door;
    door.name = "rendezvous";
    door.secret = options.secret;
    door.patience = options.job.dead_after;
    door.linger = kLinger;
    door.logger = options.logger;
    reception.emplace(door, listen_alone(), static_cast<House&>(*this));
    thread = start_thread("herring-rendez", [this] { run(); });
  }

  ~Impl() override {
    {
      const std::lock_guard lock(mutex);
      stop = true;
    }
    reception->wake();
    thread.join();
    hubs.clear();
  }

  /// What has the place is named: a rendezvous cannot go to another port, because all know it by this one.
  UniqueFd listen_alone() {
    try {
      return listen_on(options.listen_host, {options.port}, port);
    } catch (const Error& error) {
      if (error.status().code() == Code::kInvalidArgument) throw;
    }
    const std::string host = options.listen_host.empty() ? "127.0.0.1" : options.listen_host;
    const std::string found = what_is_at(host, options.port, options.secret);
    throw Error(found.empty() ? Code::kTransport : Code::kMismatch,
                "no rendezvous can be opened at " + host + ":" + std::to_string(options.port) + ": " +
                    (found.empty() ? "another program has the port" : found) +
                    ". Give each job a HERRING_RENDEZVOUS of its own");
  }

  void run() {
    try {
      while (!is_over()) step();
    } catch (const std::exception& error) {
      log(LogLevel::kError, std::string("the rendezvous stopped: ") + error.what());
    }
    reception->close_all();
    publish(true);
  }

  bool is_over() {
    if (!stopping && !rendezvous.has_ended()) return false;
    const Instant now = Clock::now();
    if (over_by == Instant::max()) over_by = now + kLinger;
    return reception->lingering() == 0 || now >= over_by;
  }

  void step() {
    const bool all_read = reception->wait(std::min(rendezvous.next_wakeup(), over_by));
    const Instant now = Clock::now();
    hear_stop();
    if (all_read) rendezvous.tick(now);
    perform(now);
    reception->flush(now);
    publish(false);
  }

  void hear_stop() {
    const std::lock_guard lock(mutex);
    if (!stop || stopping) return;
    stopping = true;
    rendezvous.close("the rendezvous was stopped");
  }

  bool has_started() const override { return rendezvous.generation() > 0; }

  std::size_t missing() const override {
    const std::size_t all = std::size_t{options.job.workers} + options.job.servers;
    return all - std::min(all, rendezvous.connected());
  }

  Entry enter(ConnectionId id, const Frame& frame, Instant now) override {
    const auto message = frame.type == FrameType::kRendezvous ? decode_message(frame.body) : std::nullopt;
    if (!message || message->kind != MessageKind::kEnter) return Entry::kStranger;
    rendezvous.receive(id, *message, now);
    perform(now);
    return Entry::kIn;
  }

  bool receive(ConnectionId id, const Frame& frame, Instant now) override {
    if (frame.type == FrameType::kPong) return true;  // It is heard already.
    const auto message = frame.type == FrameType::kRendezvous ? decode_message(frame.body) : std::nullopt;
    if (!message) return false;
    messages.fetch_add(1, std::memory_order_relaxed);
    rendezvous.receive(id, *message, now);
    perform(now);
    return true;
  }

  void alive(ConnectionId id, Instant now) override { rendezvous.heard(id, now); }

  void ended(ConnectionId id, const std::string& reason, Instant now) override {
    rendezvous.disconnected(id, reason, now);
    perform(now);
  }

  void failed_handshake() override {}

  void perform(Instant now) {
    // Opening a hub makes new actions.
    for (std::vector<Action> actions; !(actions = rendezvous.take_actions()).empty();) {
      for (Action& action : actions) perform(action, now);
    }
  }

  void perform(Action& action, Instant now) {
    switch (action.kind) {
      case Action::Kind::kOpenHub:
        return open_hub(action, now);
      case Action::Kind::kCloseHubs:
        while (!hubs.empty() && hubs.begin()->first < action.generation) close_hub(hubs.begin()->first);
        return;
      case Action::Kind::kCloseHub:
        return close_hub(action.generation);
      case Action::Kind::kTellHub:
        if (const auto hub = hubs.find(action.generation); hub != hubs.end()) {
          hub->second->never_comes(action.message.role, action.message.rank, action.message.text);
        }
        return;
      case Action::Kind::kClose:
        return reception->close(action.connection, now);
      case Action::Kind::kPing:
        return reception->send(action.connection, FrameType::kPing, ping);
      case Action::Kind::kSend:
        return reception->send(action.connection, FrameType::kRendezvous, body_of(action.message));
    }
  }

  /// What all are told is written and hashed once.
  const SharedBody& body_of(Message& message) {
    if (!last_body || !(message == last_message)) {
      last_body = make_body(encode(message));
      last_message = std::move(message);
    }
    return last_body;
  }

  void open_hub(const Action& action, Instant now) {
    control::HubOptions hub;
    hub.listen_host = options.listen_host;
    hub.workers = action.workers;
    hub.servers = action.servers;
    hub.secret = options.secret;
    hub.job_id = random_job_id();
    hub.heartbeat = options.job.heartbeat;
    hub.dead_after = options.job.dead_after;
    hub.logger = options.logger;
    std::unique_ptr<control::Hub> opened;
    try {
      opened = std::make_unique<control::Hub>(hub);
    } catch (const std::exception& error) {
      // Out of descriptors or threads for a moment: no reason to end a job.
      log(LogLevel::kWarning,
          "no hub for generation " + std::to_string(action.generation) + " of the job: " + error.what());
      return rendezvous.hub_failed(action.generation, error.what(), now);
    }
    const std::uint16_t hub_port = opened->port();
    hubs[action.generation] = std::move(opened);
    log(LogLevel::kInfo, "generation " + std::to_string(action.generation) +
                             " of the job: " + counted(action.workers, "worker") + ", " +
                             counted(action.servers, "server process", "server processes"));
    rendezvous.hub_opened(action.generation, hub_port, now);
  }

  void close_hub(std::uint64_t generation) {
    const auto found = hubs.find(generation);
    if (found == hubs.end()) return;
    std::erase_if(closing_hubs, [](const std::future<void>& closing) {
      return closing.wait_for(Duration::zero()) == std::future_status::ready;
    });
    // It waits for its members to leave; nobody shall wait for that, unless no thread can be started.
    auto close = [hub = std::shared_ptr(std::move(found->second))]() mutable { hub.reset(); };
    try {
      closing_hubs.push_back(std::async(std::launch::async, std::move(close)));
    } catch (const std::system_error& error) {
      log(LogLevel::kWarning, std::string("a hub closes while others wait: ") + error.what());
    }
    hubs.erase(found);
  }

  /// Who waits is woken where there is news.
  void publish(bool over) {
    const bool is_news = published_generation != rendezvous.generation() || published_well != rendezvous.ended_well() ||
                         published_end != over;
    if (!is_news) return;
    const std::lock_guard lock(mutex);
    published_generation = rendezvous.generation();
    published_well = rendezvous.ended_well();
    published_end = over;
    changed.notify_all();
  }

  void log(LogLevel level, const std::string& text) const {
    if (options.logger) options.logger->log(level, text);
  }

  const RendezvousServerOptions options;
  std::uint16_t port = 0;

  // The thread's own.
  Rendezvous rendezvous;
  const DescriptorClaim descriptors;
  std::optional<Reception> reception;
  std::map<std::uint64_t, std::unique_ptr<control::Hub>> hubs;
  std::vector<std::future<void>> closing_hubs;
  const SharedBody ping = make_body(encode_serial(1));
  Message last_message;
  SharedBody last_body;
  bool stopping = false;
  Instant over_by = Instant::max();

  std::atomic<std::uint64_t> messages = 0;
  mutable std::mutex mutex;
  std::condition_variable changed;
  std::uint64_t published_generation = 0;  // Guarded by mutex, written by the thread alone, as
  bool published_well = false;
  bool published_end = false;
  bool stop = false;  // Guarded by mutex: the thread is to stop.

  std::thread thread;
};

RendezvousServer::RendezvousServer(const RendezvousServerOptions& options) : impl_(std::make_unique<Impl>(options)) {}
RendezvousServer::~RendezvousServer() = default;

std::uint16_t RendezvousServer::port() const { return impl_->port; }

bool RendezvousServer::wait(Instant deadline) {
  std::unique_lock lock(impl_->mutex);
  return impl_->changed.wait_until(lock, deadline, [this] { return impl_->published_end; });
}

bool RendezvousServer::ended_well() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->published_well;
}

std::uint64_t RendezvousServer::messages() const { return impl_->messages.load(std::memory_order_relaxed); }

std::uint64_t RendezvousServer::generation() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->published_generation;
}

}  // namespace herring::elastic
