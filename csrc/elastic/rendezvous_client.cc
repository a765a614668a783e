#include "elastic/rendezvous_client.h"

#include <poll.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "control/protocol.h"
#include "control/socket.h"
#include "core/hmac.h"
#include "core/status.h"

namespace herring::elastic {
namespace {

using namespace control;
using Clock = std::chrono::steady_clock;

constexpr Duration kTryPause = std::chrono::milliseconds(50);
constexpr Duration kAnswerPatience = std::chrono::seconds(5);
constexpr Duration kLastWords = std::chrono::milliseconds(500);

}  // namespace

class RendezvousClient::Impl final {
 public:
  Impl(const RendezvousClientOptions& given, Instant deadline) : options(given) {
    std::string why = "nothing answered";
    while (!socket) {
      connect(deadline, why);
      if (socket) break;
      if (Clock::now() + kTryPause >= deadline) {
        throw Error(Code::kTimeout, "no rendezvous at " + place() + ": " + why +
                                        ". Check that the launcher runs, and HERRING_RENDEZVOUS");
      }
      std::this_thread::sleep_for(kTryPause);
    }
    socket->send(FrameType::kRendezvous, make_body(encode(options.enter)));
    heard = Clock::now();
    thread = start_thread("herring-elastic", [this] { run(); });
  }

  ~Impl() { close(); }

  void close() {
    if (!thread.joinable()) return;
    {
      const std::lock_guard lock(mutex);
      stopping = true;
    }
    doorbell.raise();
    thread.join();
  }

  std::string place() const { return options.host + ":" + std::to_string(options.port); }

  void connect(Instant deadline, std::string& why) {
    const Instant until = std::min(deadline, Clock::now() + kAnswerPatience);
    UniqueFd fd = connect_to(options.host, options.port, until, why);
    if (!fd) return;
    FrameSocket fresh(std::move(fd));
    Hello hello;
    random_bytes(hello.nonce);
    fresh.send(FrameType::kHello, make_body(encode(hello)));
    Frame frame;
    if (!await(fresh, frame, until)) {
      why = "something answered, but not as a rendezvous does";
      return;
    }
    if (frame.type == FrameType::kRefuse) {
      const auto refuse = decode_refuse(frame.body);
      throw Error(Code::kMismatch, place() + ": " + (refuse ? refuse->text : "refused"));
    }
    const auto challenge = frame.type == FrameType::kChallenge ? decode_challenge(frame.body) : std::nullopt;
    if (!challenge) {
      why = "another program answered";
      return;
    }
    const Digest said = transcript(hello, *challenge);
    if (!equal_constant_time(hub_proof(options.secret, said), challenge->proof)) {
      throw Error(Code::kInvalidArgument,
                  "the secret differs: the rendezvous at " + place() +
                      " has another one. Set HERRING_SECRET to the same value in all processes");
    }
    const SessionKeys keys = session_keys(options.secret, said);
    fresh.seal_with(keys.to_hub, keys.to_member);
    fresh.trust();
    fresh.set_user_timeout(options.dead_after);
    socket.emplace(std::move(fresh));
  }

  static bool await(FrameSocket& from, Frame& frame, Instant until) {
    bool open = from.flush();
    for (;;) {
      const FrameReader::Result result = from.next(frame);
      if (result == FrameReader::Result::kFrame) return true;
      if (result == FrameReader::Result::kBad || !open || !wait_for(from.fd(), POLLIN, until)) return false;
      open = from.receive();
    }
  }

  void run() {
    try {
      while (step()) {
      }
    } catch (const std::exception& error) {
      finish(error.what());
    }
    socket.reset();
  }

  bool step() {
    bool last = false;
    {
      const std::lock_guard lock(mutex);
      for (Message& message : outgoing) {
        socket->send(FrameType::kRendezvous, make_body(encode(message)));
      }
      outgoing.clear();
      last = stopping;
    }
    socket->flush();
    if (last) {
      const Instant until = Clock::now() + kLastWords;
      while (socket->has_output() && wait_for(socket->fd(), POLLOUT, until) && socket->flush()) {
      }
      return false;
    }
    const short wanted = socket->has_output() ? POLLIN | POLLOUT : POLLIN;
    std::array<pollfd, 2> items = {pollfd{socket->fd(), wanted, 0}, pollfd{doorbell.fd(), POLLIN, 0}};
    if (::poll(items.data(), items.size(), wait_ms(heard + options.dead_after, Clock::now())) < 0 && errno != EINTR) {
      throw Error(Code::kTransport, "poll failed: " + errno_text(errno));
    }
    if (items[1].revents != 0) doorbell.clear();
    const bool readable = (items[0].revents & (POLLIN | POLLHUP | POLLERR)) != 0;
    const bool open = !readable || socket->receive();
    if (readable) heard = Clock::now();
    Frame frame;
    FrameReader::Result result = FrameReader::Result::kNeedMore;
    while ((result = socket->next(frame)) == FrameReader::Result::kFrame) {
      if (!take(frame)) return finish("the rendezvous broke the protocol");
    }
    if (result == FrameReader::Result::kBad || !open) {
      return finish("the rendezvous is lost: " + socket->ending() + "; the launcher holds an elastic job together");
    }
    if (Clock::now() - heard >= options.dead_after && !wait_for(socket->fd(), POLLIN, Clock::now())) {
      return finish("the rendezvous is lost: it was silent for " + seconds_text(options.dead_after));
    }
    return true;
  }

  bool take(const Frame& frame) {
    if (frame.type == FrameType::kPing) {
      const auto serial = decode_serial(frame.body);
      if (serial) socket->send(FrameType::kPong, make_body(encode_serial(*serial)));
      return serial.has_value();
    }
    auto message = frame.type == FrameType::kRendezvous ? decode_message(frame.body) : std::nullopt;
    if (!message) return false;
    const std::lock_guard lock(mutex);
    incoming.push_back(std::move(*message));
    changed.notify_all();
    return true;
  }

  /// False: there is nothing to go on with.
  bool finish(const std::string& reason) {
    Message message;
    message.kind = MessageKind::kEnd;
    message.text = reason;
    const std::lock_guard lock(mutex);
    incoming.push_back(std::move(message));
    changed.notify_all();
    return false;
  }

  const RendezvousClientOptions options;
  Signal doorbell;
  std::optional<FrameSocket> socket;  // The thread's own, as
  Instant heard{};

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Message> incoming;  // Guarded by mutex, as all below.
  std::deque<Message> outgoing;
  bool woken = false;
  bool stopping = false;

  std::thread thread;
};

RendezvousClient::RendezvousClient(const RendezvousClientOptions& options, Instant deadline)
    : impl_(std::make_unique<Impl>(options, deadline)) {}
RendezvousClient::~RendezvousClient() = default;

void RendezvousClient::send(Message message) {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->outgoing.push_back(std::move(message));
  }
  impl_->doorbell.raise();
}

bool RendezvousClient::next(Message& message, Instant deadline) {
  std::unique_lock lock(impl_->mutex);
  const auto ready = [this] { return !impl_->incoming.empty() || impl_->woken; };
  if (deadline == Instant::max()) {
    impl_->changed.wait(lock, ready);
  } else {
    impl_->changed.wait_until(lock, deadline, ready);
  }
  impl_->woken = false;
  if (impl_->incoming.empty()) return false;
  message = std::move(impl_->incoming.front());
  impl_->incoming.pop_front();
  return true;
}

bool RendezvousClient::has_broken(std::uint64_t generation) const {
  const std::lock_guard lock(impl_->mutex);
  return std::any_of(impl_->incoming.begin(), impl_->incoming.end(), [generation](const Message& message) {
    return message.kind == MessageKind::kEnd ||
           (message.kind == MessageKind::kBreak && message.generation == generation);
  });
}

void RendezvousClient::close() { impl_->close(); }

void RendezvousClient::wake() {
  const std::lock_guard lock(impl_->mutex);
  impl_->woken = true;
  impl_->changed.notify_all();
}

}  // namespace herring::elastic
