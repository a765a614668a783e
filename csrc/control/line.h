#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "control/frame.h"
#include "control/socket.h"
#include "core/types.h"

namespace herring::control {

/// How a Line ended.
struct LineEnd {
  enum class Kind : std::uint8_t {
    kGoodbye,   ///< This side hung up.
    kClosed,    ///< The peer's process died, or the network to it.
    kSilent,    ///< Nothing came for dead_after.
    kProtocol,  ///< It sent what is none of ours, or not now.
    kFailed,    ///< This process could not go on: out of memory, say.
  };
  Kind kind = Kind::kClosed;
  std::string text;   ///< "connection closed"; kSilent, kGoodbye: empty.
  Duration silent{};  ///< So long before it was heard last.
};

/// Who listens to a Line. Called in the Line's thread, the last time with ended().
class Ear {
 public:
  virtual ~Ear() = default;
  /// False: no correct peer sends this now.
  virtual bool hear(const Frame& frame) = 0;
  virtual void ended(const LineEnd& end) = 0;
};

/// The one end of a process's connection to its hub or rendezvous, with the thread that keeps it alive: answers pings
/// (so a busy process counts as alive, and a stopped one does not), sends what is posted, watches for silence, and says
/// goodbye so that nothing sent is lost. Calls are safe from any thread.
class Line final {
 public:
  struct Options {
    const char* thread_name = "herring-line";
    Duration dead_after = std::chrono::seconds(5);
  };
  /// `socket` has authenticated. `ear` is borrowed for the life of the Line; what came with the handshake is heard too.
  Line(FrameSocket socket, const Options& options, Ear& ear);
  /// Ends the connection as it is where hang_up() was not called. In a forked child it only closes the child's copies.
  ~Line();
  Line(const Line&) = delete;
  Line& operator=(const Line&) = delete;

  void post(FrameType type, std::vector<std::byte> body);
  /// What was posted goes out, and nothing more; the peer then closes. Ends within `patience`. Idempotent.
  void hang_up(Duration patience);
  /// Until it has ended; after hang_up(). One thread at a time.
  void join();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace herring::control
