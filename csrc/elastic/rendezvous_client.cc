#include "elastic/rendezvous_client.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "control/line.h"
#include "control/meet.h"
#include "control/protocol.h"
#include "control/socket.h"
#include "core/status.h"

namespace herring::elastic {
namespace {

using namespace control;
using Clock = std::chrono::steady_clock;

constexpr Duration kTryPause = std::chrono::milliseconds(50);
constexpr Duration kAnswerPatience = std::chrono::seconds(5);
constexpr Duration kLastWords = std::chrono::milliseconds(500);

}  // namespace

class RendezvousClient::Impl final : private Ear {
 public:
  Impl(const RendezvousClientOptions& given, Instant deadline) : options(given) {
    std::string why = "nothing answered";
    std::optional<FrameSocket> socket;
    while (!(socket = connect(deadline, why))) {
      if (Clock::now() + kTryPause >= deadline) {
        throw Error(Code::kTimeout, "no rendezvous at " + place() + ": " + why +
                                        ". Check that the launcher runs, and HERRING_RENDEZVOUS");
      }
      std::this_thread::sleep_for(kTryPause);
    }
    line.emplace(std::move(*socket), Line::Options{"herring-elastic", options.dead_after}, static_cast<Ear&>(*this));
    line->post(FrameType::kRendezvous, encode(options.enter));
  }

  ~Impl() override { close(); }

  void close() {
    if (!line) return;
    line->hang_up(kLastWords);
    line->join();
  }

  void send(const Message& message) { line->post(FrameType::kRendezvous, encode(message)); }

  std::string place() const { return options.host + ":" + std::to_string(options.port); }

  /// Nothing where it may be tried again: `why`.
  std::optional<FrameSocket> connect(Instant deadline, std::string& why) const {
    const Instant until = std::min(deadline, Clock::now() + kAnswerPatience);
    UniqueFd fd = connect_to(options.host, options.port, until, why);
    if (!fd) return std::nullopt;
    FrameSocket socket(std::move(fd));
    Meeting meeting = meet(socket, options.secret, until);
    switch (meeting.verdict) {
      case Guest::Verdict::kProven:
        return socket;
      case Guest::Verdict::kRefused:
        throw Error(Code::kMismatch, "the rendezvous at " + place() + " refused this process: " + meeting.refusal.text);
      case Guest::Verdict::kOtherSecret:
        throw Error(Code::kInvalidArgument,
                    "the secret differs: the rendezvous at " + place() +
                        " has another one. Set HERRING_SECRET to the same value in all processes");
      case Guest::Verdict::kNoHost:
        break;
    }
    why = std::move(meeting.why);
    return std::nullopt;
  }

  bool hear(const Frame& frame) override {
    auto message = frame.type == FrameType::kRendezvous ? decode_message(frame.body) : std::nullopt;
    if (!message) return false;
    const std::lock_guard lock(mutex);
    incoming.push_back(std::move(*message));
    changed.notify_all();
    return true;
  }

  void ended(const LineEnd& end) override {
    if (end.kind == LineEnd::Kind::kGoodbye) return;  // Nobody listens any more.
    Message message;
    message.kind = MessageKind::kEnd;
    message.text = words_of(end);
    const std::lock_guard lock(mutex);
    incoming.push_back(std::move(message));
    changed.notify_all();
  }

  static std::string words_of(const LineEnd& end) {
    switch (end.kind) {
      case LineEnd::Kind::kClosed:
        return "the rendezvous is lost: " + end.text +
               "; look at the output of the launcher (or of herring rendezvous)";
      case LineEnd::Kind::kSilent:
        return "the rendezvous is lost: it was silent for " + seconds_text(end.silent);
      case LineEnd::Kind::kProtocol:
        return "the rendezvous broke the protocol: it sent " + end.text;
      case LineEnd::Kind::kGoodbye:
      case LineEnd::Kind::kFailed:
        break;
    }
    return end.text;
  }

  const RendezvousClientOptions options;

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Message> incoming;  // Guarded by mutex, as
  bool woken = false;

  std::optional<Line> line;  // Last: its thread uses all of the above.
};

RendezvousClient::RendezvousClient(const RendezvousClientOptions& options, Instant deadline)
    : impl_(std::make_unique<Impl>(options, deadline)) {}
RendezvousClient::~RendezvousClient() = default;

void RendezvousClient::send(Message message) { impl_->send(message); }

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
