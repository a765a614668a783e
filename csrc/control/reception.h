#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "control/doorway.h"
#include "control/lobby.h"
#include "control/protocol.h"
#include "control/socket.h"
#include "core/log.h"

namespace herring::control {

/// What lies behind a Reception: a hub, a rendezvous. Called in Reception::wait() and flush() alone; may call send()
/// and close().
class House {
 public:
  enum class Entry : std::uint8_t {
    kIn,        ///< It has a place: its frames are received from now on.
    kRefused,   ///< Said so to it, and closed.
    kStranger,  ///< Its first frame is none of ours.
  };
  virtual ~House() = default;
  /// Told to who wants to come in: all members of the job are here.
  virtual bool has_started() const = 0;
  /// So many may still come that belong to the job.
  virtual std::size_t missing() const = 0;
  /// The first frame of who has authenticated.
  virtual Entry enter(ConnectionId connection, const Frame& frame, Instant now) = 0;
  /// False: no correct peer sends this; it is dropped, and ended() is not called.
  virtual bool receive(ConnectionId connection, const Frame& frame, Instant now) = 0;
  /// A sign of life of who is in: bytes came, or a full connection took some.
  virtual void alive(ConnectionId connection, Instant now) = 0;
  /// It was in, and its connection is gone: "connection closed: the process died".
  virtual void ended(ConnectionId connection, const std::string& reason, Instant now) = 0;
  /// Somebody ended the handshake: most likely it has another secret.
  virtual void failed_handshake() = 0;
};

/// The one listener, and the connections of all who came through it, in the thread of who calls it: strangers (few, and
/// not for long), the handshake, frames of those who are in, and goodbyes in which nothing sent is lost.
class Reception final {
 public:
  struct Options {
    std::string name;    ///< "hub", in logs; "the hub" in what is said to others.
    std::string secret;  ///< HMAC key; may be empty.
    std::uint16_t master_port = 0;
    Duration patience{};                        ///< Unacknowledged data of who is in for longer breaks its connection.
    Duration linger = std::chrono::seconds(1);  ///< What is closed may take so long for the rest.
    std::shared_ptr<Logger> logger;             ///< Told of strangers, at a bounded rate. May be empty.
  };
  struct Counters {
    std::uint64_t accepted = 0;
    std::uint64_t bad_strangers = 0;      ///< Dropped for bytes that are not the handshake.
    std::uint64_t slow_strangers = 0;     ///< Dropped because the handshake took too long, or to make room.
    std::uint64_t failed_handshakes = 0;  ///< Ended after the challenge.
    std::uint64_t refused = 0;            ///< Another version, other features.
    std::uint64_t protocol_errors = 0;    ///< Who was in, dropped for what it sent.
    std::uint64_t bytes_sent = 0;
  };

  /// `house` is borrowed. Throws Error(kTransport) where the system gives no descriptors.
  Reception(const Options& options, UniqueFd listener, House& house);

  /// Waits until something comes, `until`, or wake(); reads what is there. False where there may be more: nobody may be
  /// called silent then.
  bool wait(Instant until);
  /// Any thread.
  void wake() const { doorbell_.raise(); }
  /// To who is gone: nothing.
  void send(ConnectionId connection, FrameType type, const SharedBody& body);
  /// What was sent goes out, then the connection ends; nothing more is heard of it.
  void close(ConnectionId connection, Instant now);
  /// Writes what the connections take.
  void flush(Instant now);
  /// The port is free for another.
  void close_door();
  /// Connections that are closed but not done.
  std::size_t lingering() const { return lingering_.size(); }
  const Counters& counters() const { return counters_; }
  /// The door and all connections close as they are.
  void close_all();
  /// In a forked child: only its copies of the descriptors are closed.
  void abandon();

 private:
  enum class Phase : std::uint8_t {
    kHello,      // Nothing has come.
    kProof,      // Has the challenge: its first sealed frame shows that it has the secret.
    kIn,         // Has a place in the house.
    kLingering,  // Sends what is left, then waits for the peer to close, so that nothing sent is lost in a reset.
  };
  struct Connection {
    explicit Connection(UniqueFd fd) : socket(std::move(fd)) {}
    FrameSocket socket;
    Phase phase = Phase::kHello;
    bool waits_for_room = false;  // EPOLLOUT is on.
    bool is_dirty = false;        // In dirty_.
    bool half_closed = false;
  };

  void watch(int fd, std::uint64_t id, int operation, std::uint32_t events) const;
  void watch_door();
  void accept_some(Instant now);
  void expire(Instant now);
  void readable(ConnectionId id, Instant now);
  bool take(ConnectionId id, Connection& connection, const Frame& frame, Instant now);
  bool greet(ConnectionId id, Connection& connection, const Frame& frame, Instant now);
  void broken(ConnectionId id, Connection& connection, Instant now);
  void write(ConnectionId id, Connection& connection, Instant now);
  void bad_stranger(const Connection& connection, const std::string& what);
  void mark(ConnectionId id, Connection& connection);
  void forget(ConnectionId id);
  void log_stranger(const Connection& connection, const std::string& what);

  const Options options_;
  const std::string the_name_;
  House& house_;
  UniqueFd epoll_;
  Signal doorbell_;
  Doorway door_;
  bool watches_door_ = false;
  Lobby lingering_;
  std::unordered_map<ConnectionId, Connection> connections_;
  std::vector<ConnectionId> dirty_;  // Have output to be written.
  ConnectionId next_id_;
  int full_batches_ = 0;
  Counters counters_;
};

}  // namespace herring::control
