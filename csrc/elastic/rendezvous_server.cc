#include "elastic/rendezvous_server.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <condition_variable>
#include <future>
#include <map>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "control/doorway.h"
#include "control/hub.h"
#include "control/membership.h"
#include "control/protocol.h"
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

struct Connection {
  explicit Connection(UniqueFd fd) : socket(std::move(fd)) {}
  FrameSocket socket;
  bool has_challenge = false;  // Its key is settled; the first sealed frame shows that it has the secret.
  bool is_member = false;
  bool is_closing = false;
  bool half_closed = false;
  Instant close_by = Instant::max();
};

/// Empty where it does not answer as one of ours does.
std::string what_is_at(const std::string& host, std::uint16_t port, const std::string& secret) {
  const Instant until = Clock::now() + kLinger;
  std::string why;
  UniqueFd fd = connect_to(host, port, until, why);
  if (!fd) return {};
  FrameSocket socket(std::move(fd));
  Hello hello;
  random_bytes(hello.nonce);
  socket.send(FrameType::kHello, make_body(encode(hello)));
  Frame frame;
  bool open = socket.flush();
  while (socket.next(frame) == FrameReader::Result::kNeedMore) {
    if (!open || !wait_for(socket.fd(), POLLIN, until)) return {};
    open = socket.receive();
  }
  const auto challenge = frame.type == FrameType::kChallenge ? decode_challenge(frame.body) : std::nullopt;
  if (!challenge) return {};
  const bool is_same = equal_constant_time(hub_proof(secret, transcript(hello, *challenge)), challenge->proof);
  return std::string("another job's rendezvous is there, with ") + (is_same ? "the same secret" : "another secret");
}

std::uint64_t random_job_id() {
  std::array<std::byte, 8> bytes{};
  random_bytes(bytes);
  std::uint64_t id = 0;
  for (const std::byte byte : bytes) id = id << 8 | std::to_integer<std::uint64_t>(byte);
  return (id >> 1) | 1;
}

}  // namespace

class RendezvousServer::Impl final {
 public:
  explicit Impl(const RendezvousServerOptions& given) : options(given), rendezvous(given.job) {
    raise_file_limit(std::size_t{options.job.workers} + options.job.servers);
    door.emplace(listen_alone());
    thread = start_thread("herring-rendez", [this] { run(); });
  }

  ~Impl() {
    stop.raise();
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
    connections.clear();
    door->close();
    publish(true);
  }

  bool is_over() {
    if (!stopping && !rendezvous.has_ended()) return false;
    const Instant now = Clock::now();
    if (over_by == Instant::max()) over_by = now + kLinger;
    return connections.empty() || now >= over_by;
  }

  void step() {
    std::vector<pollfd> items{{stop.fd(), POLLIN, 0}, {door->fd(), POLLIN, 0}};
    std::vector<ConnectionId> ids;
    for (auto& [id, connection] : connections) {
      const short wanted = connection.socket.has_output() ? POLLIN | POLLOUT : POLLIN;
      items.push_back({connection.socket.fd(), wanted, 0});
      ids.push_back(id);
    }
    const Instant until = std::min({rendezvous.next_wakeup(), over_by, next_close(), door->next_wakeup()});
    if (::poll(items.data(), items.size(), wait_ms(until, Clock::now())) < 0 && errno != EINTR) {
      throw Error(Code::kTransport, "poll failed: " + errno_text(errno));
    }
    const Instant now = Clock::now();
    if (items[0].revents != 0) {
      stop.clear();
      stopping = true;
      rendezvous.close("the rendezvous was stopped");
      perform(now);
    }
    if (items[1].revents != 0) accept_some(now);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      if ((items[i + 2].revents & (POLLIN | POLLHUP | POLLERR)) != 0) readable(ids[i], now);
    }
    for (const ConnectionId id : door->overdue(now)) drop(id, "it did not finish the handshake in time", now);
    rendezvous.tick(now);
    perform(now);
    flush(now);
    publish(false);
  }

  Instant next_close() const {
    Instant next = Instant::max();
    for (const auto& [id, connection] : connections) next = std::min(next, connection.close_by);
    return next;
  }

  void accept_some(Instant now) {
    const auto take = [this](UniqueFd fd) {
      connections.try_emplace(next_id, std::move(fd));
      return next_id++;
    };
    door->accept_some(now, take, [this](ConnectionId id) { connections.erase(id); });
    if (door->fd() < 0 && options.logger) {
      options.logger->log_limited(LogLevel::kWarning, "rendezvous.descriptors",
                                  "the rendezvous cannot accept connections for now" + descriptor_hint());
    }
  }

  void readable(ConnectionId id, Instant now) {
    const auto found = connections.find(id);
    if (found == connections.end()) return;
    Connection& connection = found->second;
    const bool open = connection.socket.receive();
    Frame frame;
    FrameReader::Result result = FrameReader::Result::kNeedMore;
    while ((result = connection.socket.next(frame)) == FrameReader::Result::kFrame) {
      if (!take(id, connection, frame, now)) return drop(id, "it broke the protocol", now);
      perform(now);
    }
    if (result == FrameReader::Result::kBad) return drop(id, "it sent " + connection.socket.ending(), now);
    if (!open) drop(id, connection.socket.ending() + ": the process died", now);
  }

  bool take(ConnectionId id, Connection& connection, const Frame& frame, Instant now) {
    if (connection.is_closing) return true;
    if (!connection.has_challenge) return greet(connection, frame);
    if (connection.is_member && frame.type == FrameType::kPong) {
      rendezvous.heard(id, now);
      return true;
    }
    auto message = frame.type == FrameType::kRendezvous ? decode_message(frame.body) : std::nullopt;
    if (!message || (!connection.is_member && message->kind != MessageKind::kEnter)) return false;
    if (!connection.is_member) {
      connection.is_member = true;
      door->leave(id);
      connection.socket.trust();
      connection.socket.set_user_timeout(options.job.dead_after);
    }
    rendezvous.receive(id, *message, now);
    return true;
  }

  bool greet(Connection& connection, const Frame& frame) {
    const auto hello = frame.type == FrameType::kHello ? decode_hello(frame.body) : std::nullopt;
    if (!hello) return false;
    if (hello->version != kProtocolVersion || hello->features != kProtocolFeatures) {
      const std::string text = "the rendezvous has another version of Herring; install the same everywhere";
      connection.socket.send(FrameType::kRefuse, make_body(encode(Refuse{RefuseCode::kVersion, text})));
      connection.is_closing = true;  // The door's patience ends it.
      return true;
    }
    Challenge challenge;
    random_bytes(challenge.nonce);
    const Digest said = transcript(*hello, challenge);
    challenge.proof = hub_proof(options.secret, said);
    connection.socket.send(FrameType::kChallenge, make_body(encode(challenge)));
    const SessionKeys keys = session_keys(options.secret, said);
    connection.socket.seal_with(keys.to_member, keys.to_hub);
    connection.has_challenge = true;
    return true;
  }

  void drop(ConnectionId id, const std::string& reason, Instant now) {
    const auto found = connections.find(id);
    if (found == connections.end()) return;
    if (!found->second.is_member && options.logger) {
      options.logger->log_limited(
          LogLevel::kInfo, "rendezvous.stranger",
          "dropped a connection to the rendezvous from " + found->second.socket.peer_name() + ": " + reason);
    }
    connections.erase(found);
    door->leave(id);
    rendezvous.disconnected(id, reason, now);
    perform(now);
  }

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
      default:
        break;
    }
    const auto found = connections.find(action.connection);
    if (found == connections.end()) return;
    Connection& connection = found->second;
    if (action.kind == Action::Kind::kClose) {
      connection.is_closing = true;
      connection.close_by = now + kLinger;
    } else if (action.kind == Action::Kind::kPing) {
      connection.socket.send(FrameType::kPing, make_body(encode_serial(++pings)));
    } else {
      connection.socket.send(FrameType::kRendezvous, make_body(encode(action.message)));
    }
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
                             " of the job: " + std::to_string(action.workers) + " workers, " +
                             std::to_string(action.servers) + " server processes");
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

  void flush(Instant now) {
    std::vector<std::pair<ConnectionId, std::string>> ended;
    for (auto& [id, connection] : connections) {
      if (!connection.socket.flush()) {
        ended.emplace_back(id, connection.socket.ending());
      } else if (now >= connection.close_by) {
        ended.emplace_back(id, "it took too long");
      } else if (connection.is_closing && !connection.half_closed && !connection.socket.has_output()) {
        connection.half_closed = true;
        connection.socket.half_close();
      }
    }
    for (const auto& [id, reason] : ended) {
      readable(id, now);  // What it said last is still to be read.
      drop(id, reason, now);
    }
  }

  void publish(bool over) {
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
  Signal stop;

  // The thread's own.
  std::optional<Doorway> door;
  Rendezvous rendezvous;
  std::map<ConnectionId, Connection> connections;
  std::map<std::uint64_t, std::unique_ptr<control::Hub>> hubs;
  std::vector<std::future<void>> closing_hubs;
  ConnectionId next_id = 1;
  std::uint64_t pings = 0;
  bool stopping = false;
  Instant over_by = Instant::max();

  mutable std::mutex mutex;
  std::condition_variable changed;
  std::uint64_t published_generation = 0;  // Guarded by mutex, as all below.
  bool published_well = false;
  bool published_end = false;

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

std::uint64_t RendezvousServer::generation() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->published_generation;
}

}  // namespace herring::elastic
