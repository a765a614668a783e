#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "control/frame.h"
#include "control/protocol.h"
#include "core/status.h"
#include "core/types.h"

/// The sockets under the control plane. Every descriptor is close-on-exec and non-blocking; writes raise no SIGPIPE.
namespace herring::control {

/// Owns a file descriptor.
class UniqueFd final {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(other.release()) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept;
  UniqueFd(const UniqueFd&) = delete;
  UniqueFd& operator=(const UniqueFd&) = delete;
  ~UniqueFd() { reset(); }
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int release();
  void reset();

 private:
  int fd_ = -1;
};

/// An eventfd: one side raises it, the other waits until it is readable.
class Signal final {
 public:
  Signal();  ///< Throws Error(kTransport).
  int fd() const { return fd_.get(); }
  void raise() const;
  void clear() const;
  void close() { fd_.reset(); }

 private:
  UniqueFd fd_;
};

/// A stream of frames over a connected socket. Used by one thread.
class FrameSocket final {
 public:
  explicit FrameSocket(UniqueFd fd);
  int fd() const { return fd_.get(); }
  /// From now on frames are sealed.
  void seal_with(const Digest& send_key, const Digest& receive_key);
  /// The peer has authenticated: larger frames are let in.
  void trust() { reader_.set_max_body(kMaxBody); }
  /// "10.0.0.7:53211", for people; "unknown" where the connection has ended.
  std::string peer_name() const;
  /// Unacknowledged data for longer than this breaks the connection.
  void set_user_timeout(Duration timeout);

  /// Queues a frame.
  void send(FrameType type, const SharedBody& body);
  /// Writes what the socket takes. False: the connection is broken, ending() says how.
  bool flush();
  bool has_output() const { return !output_.empty(); }
  /// Bytes written so far.
  std::uint64_t written() const { return written_; }
  /// Reads once what is there. False: the connection has ended; frames that came before are still to be had.
  bool receive();
  /// The next whole frame whose mac is right. kBad: not our protocol, or altered; ending() says so.
  FrameReader::Result next(Frame& frame);
  /// Says to the peer that nothing more will come.
  void half_close();
  const std::string& ending() const { return ending_; }

 private:
  struct Output {
    std::array<std::byte, kFrameHeaderBytes> header;
    SharedBody body;
  };
  void consume(std::size_t bytes);

  UniqueFd fd_;
  FrameReader reader_{kMaxHandshakeBody};
  std::optional<FrameSeal> sealer_;
  std::optional<FrameSeal> opener_;
  std::deque<Output> output_;
  std::size_t sent_ = 0;  // Of the first frame in output_, with its header.
  std::uint64_t written_ = 0;
  std::string ending_;
};

/// Binds the first free port of `ports` (none or 0: any) and listens. Empty host: all addresses, IPv6 too where there
/// is IPv6. Throws Error(kTransport) that names what was tried, or kInvalidArgument for a host that is none.
UniqueFd listen_on(const std::string& host, const std::vector<std::uint16_t>& ports, std::uint16_t& port);

/// The same for one port; nothing where it cannot be had, and `why`.
UniqueFd try_listen_on(const std::string& host, std::uint16_t port, std::string& why);
/// What listen_on() throws where nothing is free; `tried`: "4000 (address already in use), 4001 (...)".
Error no_port(const std::string& host, const std::string& tried);

/// Connects to the first address of the host that answers. Nothing on failure: `why` says what happened ("connection
/// refused"). Resolving a name may take as long as the system's resolver takes.
UniqueFd connect_to(const std::string& host, std::uint16_t port, Instant deadline, std::string& why);

/// Waits for one descriptor (POLLIN, POLLOUT); false at the deadline.
bool wait_for(int fd, short events, Instant deadline);

/// For poll and epoll_wait: rounded up, at most a minute.
int wait_ms(Instant deadline, Instant now);

/// "connection refused"
std::string errno_text(int error);

/// Starts a thread that signals of the process do not interrupt.
std::thread start_thread(const char* name, std::function<void()> body);

}  // namespace herring::control
