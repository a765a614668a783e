#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/types.h"
#include "tcp/frame.h"
#include "tcp/receive_table.h"
#include "tcp/tcp.h"
#include "transport/transport.h"

namespace herring::tcp {

struct StoredMessage;

/// How far the stream that comes from the other end of a connection has been read.
struct Inflow {
  int socket = -1;
  std::uint32_t owner = 0;  ///< The connection's number, for Receiver::take_resumed().

  FrameBytes head{};
  std::size_t head_bytes = 0;
  bool is_in_body = false;  ///< `frame` is known, and `landed` of its bytes have been read.
  Frame frame;
  std::size_t landed = 0;
  Receive* into = nullptr;          // Where they go; or
  StoredMessage* stored = nullptr;  // there, for want of a receive; without either they are dropped.
  bool is_paused = false;           // Not read on until there is a receive.
  Instant paused_since{};
  std::vector<std::byte> held;  // Read already, behind the frame at which it paused.
  bool is_ending = false;       // Its end is there, behind what can be read: no other event tells of it.
  std::size_t ahead = 0;        // How much to ask for where a frame is expected.
};

/// Matches what connections bring with posted receives, and reads it straight into their memory. Messages without a
/// receive are set aside as far as kMostStored bytes go; then their connections are not read on.
class Receiver final {
 public:
  enum class Outcome : std::uint8_t {
    kDrained,  ///< The socket had no more.
    kMore,     ///< It may have more; others are to have their turn.
    kPaused,   ///< It waits for a receive.
    kClosed,   ///< The stream has ended.
  };
  static constexpr std::size_t kMostStored = 4 << 20;

  /// Both are borrowed.
  Receiver(std::deque<transport::Completion>& ready, Stats& stats);
  ~Receiver();

  std::size_t posted() const { return table_.size(); }
  void post(Tag tag, const TwoSpans<std::byte>& memory, Token token);
  void cancel(Token token, Instant now);

  /// Where it returns kClosed, `why` says what for.
  Outcome read(Inflow& in, std::string& why);
  /// The connection is gone: what was landing fails.
  void drop(Inflow& in, const std::string& why);
  /// Owners of connections that may be read on.
  std::vector<std::uint32_t> take_resumed() { return std::exchange(resumed_, {}); }

  /// When tick() is to be called; Instant::max() where nothing is due.
  Instant next_tick() const { return next_tick_; }
  void tick(Instant now);

 private:
  bool feed(Inflow& in, std::span<const std::byte> bytes);
  bool take_head(Inflow& in, std::span<const std::byte>& bytes);
  void begin(Inflow& in);
  void finish(Inflow& in);
  bool make_room(std::size_t bytes);
  void store(Inflow& in);
  void pause(Inflow& in);
  void resume(Inflow& in);
  void release(StoredMessage* stored);
  void hand_over(StoredMessage& stored, Receive& receive);
  void complete(Receive* receive, const Inflow& in);
  bool may_resume(Inflow& in, Instant now);
  void remember_withdrawn(Tag tag);

  std::deque<transport::Completion>& ready_;
  Stats& stats_;
  ReceiveTable table_;
  std::unordered_multimap<std::uint64_t, std::unique_ptr<StoredMessage>> stored_;  // By tag.
  std::unordered_multimap<std::uint64_t, Inflow*> paused_;                         // By tag.
  std::vector<std::uint32_t> resumed_;
  std::vector<Receive*> cancelling_;  // A message is landing in them.
  // Tags of receives that were taken back: what comes for them may never find one. The oldest are forgotten.
  std::unordered_map<std::uint64_t, std::uint64_t> withdrawn_;  // Tag -> its number in the line.
  std::deque<std::pair<std::uint64_t, std::uint64_t>> withdrawn_line_;
  std::uint64_t withdrawals_ = 0;
  Instant next_tick_ = Instant::max();
  std::vector<std::byte> staging_;
};

}  // namespace herring::tcp
