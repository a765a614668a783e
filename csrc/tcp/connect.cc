#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "core/clock.h"
#include "core/descriptors.h"
#include "tcp/endpoint.h"
#include "tcp/text.h"

namespace herring::tcp {
namespace {

constexpr int kBacklog = 4096;
constexpr int kMostAccepts = 64;  // At once, so that a flood of connections does not hold up the job.
constexpr Duration kAcceptPause = std::chrono::milliseconds(100);
constexpr Duration kFirstPause = std::chrono::microseconds(100);
constexpr Duration kLongestPause = std::chrono::milliseconds(20);
constexpr int kMostDrains = 64;

bool is_out_of_room(int error) { return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM; }

Instant now() { return std::chrono::steady_clock::now(); }

void set_option(int socket, int level, int option) {
  const int on = 1;
  static_cast<void>(setsockopt(socket, level, option, &on, sizeof(on)));
}

int open_socket(int family) { return socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, IPPROTO_TCP); }

[[noreturn]] void fail(const char* call, const std::string& where) {
  const int error = errno;
  throw Error(Code::kTransport, std::string(call) + " at " + where + ": " + error_text(error) + descriptor_hint());
}

std::size_t greeting_size(Stage stage) {
  if (stage == Stage::kAwaitingHello) return kHelloBytes;
  return stage == Stage::kAwaitingAnswer ? kAnswerBytes : kProofBytes;
}

}  // namespace

void TcpEndpoint::open_listener() {
  listener_ = open_socket(own_.socket.family());
  if (listener_ < 0) fail("socket", to_string(own_.socket));
  socklen_t length = own_.socket.length();
  if (own_.socket.family() == AF_INET6) set_option(listener_, IPPROTO_IPV6, IPV6_V6ONLY);
  if (bind(listener_, own_.socket.get(), length) != 0 || listen(listener_, kBacklog) != 0 ||
      getsockname(listener_, own_.socket.get(), &length) != 0 || !events_.add(listener_, kListener)) {
    const int error = errno;
    close(std::exchange(listener_, -1));
    errno = error;
    fail("listening", to_string(own_.socket));
  }
}

void TcpEndpoint::add_peer(PeerId id, std::span<const std::byte> bytes) {
  const EndpointAddress address = decode_peer_address(id, bytes, own_);
  if (const auto found = peers_.find(id.value); found != peers_.end()) {
    if (found->second->address.instance == address.instance) return;
    remove_peer(id);
  }
  auto peer = std::make_unique<Peer>();
  peer->id = id;
  peer->address = address;
  peer->text = to_string(address.socket);
  peers_.emplace(id.value, std::move(peer));
}

void TcpEndpoint::remove_peer(PeerId id) {
  if (is_shut_) return;
  const auto found = peers_.find(id.value);
  if (found == peers_.end()) return;
  const std::unique_ptr<Peer> peer = std::move(found->second);
  peers_.erase(found);
  fail_sends(*peer, Code::kPeerLost, "the peer was removed");
  leave_waiting(*peer);
  std::erase(dirty_, peer.get());
  // Half a message may have left. And what comes from there is of no use any more.
  if (peer->connection != nullptr) close_connection(*peer->connection, "the peer was removed");
  const bool is_known = std::ranges::any_of(
      peers_, [&](const auto& other) { return other.second->address.instance == peer->address.instance; });
  for (std::size_t i = 0; !is_known && i < connections_.size(); ++i) {
    Connection* const connection = connections_[i].get();
    if (connection == nullptr || connection->stage != Stage::kOpen || connection->peer != nullptr) continue;
    if (connection->other == peer->address.instance) close_connection(*connection, "the peer was removed");
  }
}

Connection* TcpEndpoint::add_connection(int socket, Stage stage) {
  set_option(socket, IPPROTO_TCP, TCP_NODELAY);
  if (free_.empty()) {
    free_.push_back(static_cast<std::uint32_t>(connections_.size()));
    connections_.emplace_back();
    generations_.push_back(0);
  }
  const std::uint32_t index = free_.back();
  auto connection = std::make_unique<Connection>();
  connection->socket = connection->in.socket = socket;
  connection->index = connection->in.owner = index;
  connection->generation = ++generations_[index] & 0x7FFF'FFFF;
  connection->stage = stage;
  if (!events_.add(socket, connection->name())) return nullptr;
  free_.pop_back();
  connections_[index] = std::move(connection);
  return connections_[index].get();
}

Connection* TcpEndpoint::find(std::uint64_t name) {
  const auto index = static_cast<std::uint32_t>(name);
  if (index >= connections_.size() || connections_[index] == nullptr) return nullptr;
  return connections_[index]->name() == name ? connections_[index].get() : nullptr;
}

void TcpEndpoint::close_connection(Connection& connection, const std::string& why) {
  events_.remove(connection.socket);  // A fork()ed child may hold a copy, which would keep its events alive.
  if (connection.stage == Stage::kOpen) {
    --stats_.connections;
    static_cast<void>(shutdown(connection.socket, SHUT_RDWR));
  }
  close(connection.socket);
  receiver_.drop(connection.in, why);
  std::erase(strangers_, &connection);
  const std::unique_ptr<Connection> gone = std::move(connections_[connection.index]);
  free_.push_back(connection.index);
  Peer* const peer = connection.peer;
  if (peer == nullptr) return;
  peer->connection = nullptr;
  if (connection.stage == Stage::kOpen) {
    fail_sends(*peer, Code::kPeerLost, "the connection broke: " + why);
  } else {
    wait_for_connection(*peer, why);
  }
}

/// What was sent is on its way and arrives, unless the other end is told that what it sent was not read.
void TcpEndpoint::farewell(Connection& connection) {
  if (connection.stage != Stage::kOpen) return;
  static_cast<void>(shutdown(connection.socket, SHUT_WR));
  for (int i = 0; i < kMostDrains; ++i) {
    if (recv(connection.socket, nullptr, std::size_t{1} << 20, MSG_DONTWAIT | MSG_TRUNC) <= 0) return;
  }
}

// --- To a peer

void TcpEndpoint::ensure_connection(Peer& peer) {
  if (peer.is_waiting) return;
  for (const auto& connection : connections_) {
    if (connection != nullptr && connection->stage == Stage::kOpen && connection->peer == nullptr &&
        connection->other == peer.address.instance) {
      return adopt(*connection, peer);
    }
  }
  wait_for_connection(peer, "it does not answer");
  start_connection(peer);
}

/// A connection that the other end has made serves as well.
void TcpEndpoint::adopt(Connection& connection, Peer& peer) {
  connection.peer = &peer;
  peer.connection = &connection;
}

void TcpEndpoint::wait_for_connection(Peer& peer, const std::string& why) {
  if (peer.first == nullptr) return leave_waiting(peer);
  peer.last_error = why;
  const Instant time = now();
  if (!std::exchange(peer.is_waiting, true)) {
    peer.waiting_since = time;
    peer.pause = kFirstPause;
    waiting_.push_back(&peer);
  } else {
    peer.pause = std::min(2 * peer.pause, kLongestPause);
  }
  peer.next_try = time + peer.pause;
}

void TcpEndpoint::leave_waiting(Peer& peer) {
  if (std::exchange(peer.is_waiting, false)) std::erase(waiting_, &peer);
}

/// Of a peer that waits. False where it did not even begin.
bool TcpEndpoint::start_connection(Peer& peer) {
  const int socket = open_socket(peer.address.socket.family());
  if (socket < 0) {
    wait_for_connection(peer, error_text(errno) + descriptor_hint());
    return false;
  }
  // From the address that was chosen; the system takes a port once it knows where it goes.
  const auto in_network = [&peer](const Candidate& source) { return is_in_network(peer.address.socket, source); };
  const auto source = std::ranges::find_if(sources_, in_network);
  SocketAddress from = source == sources_.end() ? own_.socket : source->socket;
  reinterpret_cast<sockaddr_in*>(&from.storage)->sin_port = 0;  // Where sockaddr_in6 has it too.
  set_option(socket, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT);
  if (bind(socket, from.get(), from.length()) != 0 ||
      (connect(socket, peer.address.socket.get(), peer.address.socket.length()) != 0 && errno != EINPROGRESS)) {
    const int error = errno;
    close(socket);
    wait_for_connection(peer, error_text(error));
    return false;
  }
  Connection* const connection = add_connection(socket, Stage::kConnecting);
  if (connection == nullptr) {
    close(socket);
    wait_for_connection(peer, "no room to watch one more socket");
    return false;
  }
  connection->text = peer.text;
  adopt(*connection, peer);
  return true;
}

void TcpEndpoint::on_connected(Connection& connection) {
  int error = 0;
  socklen_t length = sizeof(error);
  if (getsockopt(connection.socket, SOL_SOCKET, SO_ERROR, &error, &length) != 0) error = errno;
  if (error != 0) return close_connection(connection, error_text(error));
  connection.stage = Stage::kAwaitingAnswer;
  connection.hello = make_hello(fresh_nonce(), connection.peer->address.instance, own_.instance);
  say(connection, connection.hello);
}

void TcpEndpoint::run_connect_timers(Instant time) {
  const std::vector<Peer*> peers = waiting_;
  for (Peer* const peer : peers) {
    if (time - peer->waiting_since >= connect_timeout_) {
      const auto count = std::chrono::duration_cast<std::chrono::seconds>(time - peer->waiting_since).count();
      fail_sends(*peer, Code::kPeerLost,
                 "it took no message for " + std::to_string(count) + " s (last try: " + peer->last_error +
                     "): has its process ended, or does a firewall block the port?");
      leave_waiting(*peer);
      if (peer->connection != nullptr) close_connection(*peer->connection, "it took too long");
    } else if (peer->connection == nullptr && time >= peer->next_try) {
      start_connection(*peer);
    }
  }
  run_handshake_timers(time);
  if (time >= accept_again_) {
    accept_again_ = Instant::max();
    accept_some();
  }
}

Instant TcpEndpoint::next_connect_timer() const {
  Instant next = accept_again_;
  if (!strangers_.empty()) next = std::min(next, strangers_.front()->deadline);
  for (const Peer* peer : waiting_) {
    next = std::min(next, peer->waiting_since + connect_timeout_);
    if (peer->connection == nullptr) next = std::min(next, peer->next_try);
  }
  return next;
}

// --- From anybody

void TcpEndpoint::accept_some() {
  if (now() < accept_again_ && accept_again_ != Instant::max()) return;
  for (int i = 0; i < kMostAccepts; ++i) {
    SocketAddress from;
    socklen_t length = sizeof(from.storage);
    const int socket = accept4(listener_, from.get(), &length, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (socket < 0) {
      const int error = errno;
      if (error == EINTR || error == ECONNABORTED) continue;
      if (!is_out_of_room(error)) return;
      if (make_room_in_lobby(error_text(error) + descriptor_hint())) continue;
      accept_again_ = now() + kAcceptPause;
      return;
    }
    if (strangers_.size() >= options_.most_strangers) make_room_in_lobby("too many connections at once");
    Connection* const connection = add_connection(socket, Stage::kAwaitingHello);
    if (connection == nullptr) {
      close(socket);
      continue;
    }
    connection->text = to_string(from);
    connection->deadline = now() + duration_of(options_.handshake_limit_s);
    strangers_.push_back(connection);
  }
  accept_again_ = now();  // There may be more.
}

/// One of those who have proven nothing goes, by chance: a flood keeps no member out for long.
bool TcpEndpoint::make_room_in_lobby(const std::string& why) {
  if (strangers_.empty()) return false;
  const Nonce random = fresh_nonce();
  const std::size_t index = get<std::uint64_t>(random, 0) % strangers_.size();
  reject(*strangers_[index], &StrangerCounters::slow, "made room for others: " + why);
  return true;
}

void TcpEndpoint::reject(Connection& connection, Counter StrangerCounters::*counter, const std::string& what) {
  if (options_.strangers != nullptr) ((*options_.strangers).*counter).add();
  const std::string text = connection.text + " " + what;
  close_connection(connection, what);
  if (options_.on_stranger) options_.on_stranger(text);
}

void TcpEndpoint::run_handshake_timers(Instant time) {
  while (!strangers_.empty() && time >= strangers_.front()->deadline) {
    reject(*strangers_.front(), &StrangerCounters::slow, "did not finish the handshake in time");
  }
}

// --- Both

bool TcpEndpoint::say(Connection& connection, std::span<const std::byte> bytes) {
  // Nothing was sent before: there is room.
  const ssize_t sent = send(connection.socket, bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  ++stats_.send_calls;
  if (sent == static_cast<ssize_t>(bytes.size())) return true;
  close_connection(connection, sent < 0 ? error_text(errno) : "it takes no data");
  return false;
}

bool TcpEndpoint::greet(Connection& connection) {
  while (connection.stage != Stage::kConnecting && connection.stage != Stage::kOpen) {
    const std::size_t needed = greeting_size(connection.stage);
    const std::span<std::byte> room = std::span(connection.greeting).first(needed).subspan(connection.greeting_bytes);
    const ssize_t got = recv(connection.socket, room.data(), room.size(), MSG_DONTWAIT);
    ++stats_.receive_calls;
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return true;
    if (got <= 0) {
      if (connection.stage == Stage::kAwaitingAnswer) {
        close_connection(connection, "it ended the handshake: is its HERRING_SECRET the same?");
      } else if (connection.stage == Stage::kAwaitingProof) {
        reject(connection, &StrangerCounters::failed, "ended the handshake: does it have another HERRING_SECRET?");
      } else {
        reject(connection, &StrangerCounters::bad, "closed without a handshake");
      }
      return false;
    }
    connection.greeting_bytes += static_cast<std::size_t>(got);
    if (connection.greeting_bytes < needed) continue;
    connection.greeting_bytes = 0;
    if (!take_greeting(connection, std::span(connection.greeting).first(needed))) return false;
  }
  return true;
}

bool TcpEndpoint::take_greeting(Connection& connection, std::span<const std::byte> greeting) {
  if (connection.stage == Stage::kAwaitingHello) {
    const std::optional<Instance> who = check_hello(greeting, own_.instance);
    if (!who) {
      reject(connection, &StrangerCounters::bad, "sent no valid handshake for this endpoint");
      return false;
    }
    connection.other = *who;
    std::copy(greeting.begin(), greeting.end(), connection.hello.begin());
    connection.nonce = fresh_nonce();
    connection.stage = Stage::kAwaitingProof;
    return say(connection, make_answer(options_.key, connection.hello, connection.nonce));
  }
  if (connection.stage == Stage::kAwaitingAnswer) {
    if (!check_answer(options_.key, connection.hello, greeting)) {
      close_connection(connection, "it has another HERRING_SECRET, or is of another job");
      return false;
    }
    if (!say(connection, make_proof(options_.key, connection.hello, greeting.first(sizeof(Nonce))))) return false;
    connection.other = connection.peer->address.instance;
  } else {
    if (!check_proof(options_.key, connection.hello, connection.nonce, greeting)) {
      reject(connection, &StrangerCounters::failed, "has another HERRING_SECRET, or is of another job");
      return false;
    }
    std::erase(strangers_, &connection);
  }
  stand(connection);
  return true;
}

/// Both ends have proven who they are. Messages may follow at once.
void TcpEndpoint::stand(Connection& connection) {
  connection.stage = Stage::kOpen;
  congestion_.apply(connection.socket);
  ++stats_.connections;
  for (Peer* const peer : waiting_) {
    if (connection.peer != nullptr) break;
    if (peer->connection == nullptr && peer->address.instance == connection.other) adopt(connection, *peer);
  }
  if (connection.peer == nullptr) return;
  leave_waiting(*connection.peer);
  mark_dirty(*connection.peer);
}

}  // namespace herring::tcp
