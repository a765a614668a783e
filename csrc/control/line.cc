#include "control/line.h"

#include <poll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <deque>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "control/protocol.h"
#include "core/process.h"
#include "core/status.h"

namespace herring::control {
namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

class Line::Impl final {
 public:
  Impl(FrameSocket socket, const Options& options, Ear& ear)
      : options_(options), ear_(ear), socket_(std::move(socket)), heard_(Clock::now()) {
    socket_->set_user_timeout(options.dead_after);
    thread_ = start_thread(options.thread_name, [this] { run(); });
  }

  ~Impl() {
    hang_up(Duration::zero());
    join();
  }

  void join() {
    if (thread_.joinable()) thread_.join();
  }

  void post(FrameType type, std::vector<std::byte> body) {
    {
      const std::lock_guard lock(mutex_);
      if (hang_up_by_) return;
      outgoing_.emplace_back(type, make_body(std::move(body)));
    }
    doorbell_.raise();
  }

  void hang_up(Duration patience) {
    {
      const std::lock_guard lock(mutex_);
      hang_up_by_ = std::min(hang_up_by_.value_or(Instant::max()), Clock::now() + patience);
    }
    doorbell_.raise();
  }

  bool in_forked_child() const { return !guard_.in_owner(); }

  /// In a forked child.
  void abandon() {
    socket_.reset();
    doorbell_.close();
    if (thread_.joinable()) thread_.detach();
  }

 private:
  void run() {
    std::optional<LineEnd> end;
    try {
      end = hear();
      while (!end) end = step();
    } catch (const std::exception& error) {
      end = LineEnd{LineEnd::Kind::kFailed, error.what(), {}};
    }
    socket_.reset();
    ear_.ended(*end);
  }

  std::optional<LineEnd> step() {
    std::deque<std::pair<FrameType, SharedBody>> outgoing;
    std::optional<Instant> hang_up_by;
    {
      const std::lock_guard lock(mutex_);
      outgoing.swap(outgoing_);
      hang_up_by = hang_up_by_;
    }
    for (const auto& [type, body] : outgoing) socket_->send(type, body);
    // A broken connection may still hold what the peer said last: reading finds the end.
    const bool writable = socket_->flush();
    if (hang_up_by && !half_closed_ && !socket_->has_output()) {
      half_closed_ = true;
      socket_->half_close();
    }
    if (hang_up_by && Clock::now() >= *hang_up_by) return LineEnd{LineEnd::Kind::kGoodbye, "", {}};
    const short wanted = writable && socket_->has_output() ? POLLIN | POLLOUT : POLLIN;
    std::array<pollfd, 2> items = {pollfd{socket_->fd(), wanted, 0}, pollfd{doorbell_.fd(), POLLIN, 0}};
    const Instant until = std::min(hang_up_by.value_or(Instant::max()), heard_ + options_.dead_after);
    if (::poll(items.data(), items.size(), wait_ms(until, Clock::now())) < 0 && errno != EINTR) {
      throw Error(Code::kTransport, "poll failed: " + errno_text(errno));
    }
    if (items[1].revents != 0) doorbell_.clear();
    const bool readable = (items[0].revents & (POLLIN | POLLHUP | POLLERR)) != 0;
    const bool open = !readable || socket_->receive();
    const Duration silent = Clock::now() - heard_;
    if (readable && open) heard_ = Clock::now();
    if (auto end = hear()) return end;
    if (!open && hang_up_by) return LineEnd{LineEnd::Kind::kGoodbye, "", {}};
    if (!open) return LineEnd{LineEnd::Kind::kClosed, socket_->ending(), silent};
    return silence();
  }

  std::optional<LineEnd> hear() {
    Frame frame;
    for (;;) {
      const FrameReader::Result result = socket_->next(frame);
      if (result == FrameReader::Result::kNeedMore) return std::nullopt;
      if (result == FrameReader::Result::kBad) return LineEnd{LineEnd::Kind::kProtocol, socket_->ending(), {}};
      if (!take(frame)) return LineEnd{LineEnd::Kind::kProtocol, "a frame that does not belong there", {}};
    }
  }

  bool take(const Frame& frame) {
    if (frame.type != FrameType::kPing) return ear_.hear(frame);
    const auto serial = decode_serial(frame.body);
    if (serial) socket_->send(FrameType::kPong, make_body(encode_serial(*serial)));
    return serial.has_value();
  }

  std::optional<LineEnd> silence() const {
    const Duration silent = Clock::now() - heard_;
    // This thread may be the one that did not run: what came meanwhile counts.
    if (silent < options_.dead_after || wait_for(socket_->fd(), POLLIN, Clock::now())) return std::nullopt;
    return LineEnd{LineEnd::Kind::kSilent, "", silent};
  }

  const Options options_;
  const ForkGuard guard_;
  Ear& ear_;
  Signal doorbell_;

  // The thread's own.
  std::optional<FrameSocket> socket_;
  Instant heard_;
  bool half_closed_ = false;

  std::mutex mutex_;
  std::deque<std::pair<FrameType, SharedBody>> outgoing_;  // Guarded by mutex_, as
  std::optional<Instant> hang_up_by_;                      // The goodbye.

  std::thread thread_;
};

Line::Line(FrameSocket socket, const Options& options, Ear& ear)
    : impl_(std::make_unique<Impl>(std::move(socket), options, ear)) {}

Line::~Line() {
  if (!impl_->in_forked_child()) return;
  impl_->abandon();
  (void)impl_.release();  // Its thread's state cannot be taken down from here.
}

void Line::post(FrameType type, std::vector<std::byte> body) { impl_->post(type, std::move(body)); }
void Line::hang_up(Duration patience) { impl_->hang_up(patience); }
void Line::join() { impl_->join(); }

}  // namespace herring::control
