#include "intra_node/meeting.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <deque>
#include <optional>

#include "core/hmac.h"
#include "core/status.h"

namespace herring::intra_node {
namespace {

constexpr std::uint32_t kMeetingMagic = 0x4E524548;  // "HERN"
constexpr std::uint16_t kMeetingVersion = 1;
constexpr std::size_t kDescriptors = 3;
constexpr int kBacklog = 128;
constexpr std::size_t kMaxStrangers = 16;
constexpr int kFirstRetryMs = 1;
constexpr int kLastRetryMs = 20;

enum class Speaker : std::uint16_t { kCaller = 1, kListener = 2 };

struct Hello {
  std::uint32_t magic = kMeetingMagic;
  std::uint16_t version = kMeetingVersion;
  std::uint16_t speaker = 0;
  std::uint32_t from = 0;
  std::uint32_t to = 0;
  std::uint32_t local_size = 0;
  std::uint32_t ring_bytes = 0;
  std::uint64_t arena_bytes = 0;
  Digest mac{};  // HMAC under the token of all above.
};
static_assert(sizeof(Hello) == 64 && offsetof(Hello, mac) == 32);

std::array<std::byte, 8> key_of(std::uint64_t token) {
  std::array<std::byte, 8> key;
  std::memcpy(key.data(), &token, sizeof(token));
  return key;
}

Digest mac_of(const Hello& hello, std::uint64_t token) {
  return hmac_sha256(key_of(token), std::as_bytes(std::span(&hello, 1)).first(offsetof(Hello, mac)));
}

[[noreturn]] void fail(const std::string& call) {
  const int error = errno;
  throw Error(Code::kTransport, "meeting the other ranks of this host: " + call + " failed: " + std::strerror(error));
}

socklen_t fill_address(sockaddr_un& address, const std::string& name) {
  address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

FileDescriptor make_socket() {
  FileDescriptor fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.is_open()) fail("socket(AF_UNIX)");
  return fd;
}

bool is_our_user(const FileDescriptor& socket) {
  ucred credentials{};
  socklen_t size = sizeof(credentials);
  return getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &size) == 0 && credentials.uid == geteuid();
}

bool send_hello(const FileDescriptor& socket, const Hello& hello, const SharedDescriptors& own, std::size_t count) {
  const int fds[kDescriptors] = {own.arena.get(), own.control.get(), own.doorbell.get()};
  Hello copy = hello;
  iovec part{&copy, sizeof(copy)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(fds))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = CMSG_SPACE(count * sizeof(int));
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(count * sizeof(int));
  std::memcpy(CMSG_DATA(header), fds, count * sizeof(int));
  return sendmsg(socket.get(), &message, MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof(copy));
}

enum class Heard : std::uint8_t { kHello, kNothingYet, kNonsense };

/// Takes every descriptor that came into ownership first, so that none leaks whatever else is wrong.
Heard receive_hello(const FileDescriptor& socket, Hello& hello, SharedDescriptors& theirs, std::size_t count) {
  iovec part{&hello, sizeof(hello)};
  alignas(cmsghdr) char control[CMSG_SPACE(kDescriptors * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  const ssize_t bytes = recvmsg(socket.get(), &message, MSG_CMSG_CLOEXEC);
  if (bytes < 0) return errno == EAGAIN || errno == EINTR ? Heard::kNothingYet : Heard::kNonsense;
  std::vector<FileDescriptor> fds;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    for (std::size_t i = 0; i < (header->cmsg_len - CMSG_LEN(0)) / sizeof(int); ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
      fds.emplace_back(fd);
    }
  }
  if (bytes != sizeof(hello) || (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0 || fds.size() != count) {
    return Heard::kNonsense;
  }
  fds.resize(kDescriptors);
  theirs = {std::move(fds[0]), std::move(fds[1]), std::move(fds[2])};
  return Heard::kHello;
}

class Meeting final {
 public:
  Meeting(const MeetingOptions& options, const SharedDescriptors& own)
      : options_(options),
        own_(own),
        count_(options.has_arena_alone ? 1 : kDescriptors),
        theirs_(options.local_size),
        met_(options.local_size, false),
        calls_(options.local_rank) {
    met_[options.local_rank] = true;
    missing_ = options.local_size - 1;
    if (options.local_rank + 1 < options.local_size) listen_for_later_ranks();
  }

  std::vector<SharedDescriptors> run(Instant deadline) {
    int retry_ms = kFirstRetryMs;
    while (missing_ > 0) {
      const std::uint32_t before = missing_;
      accept_callers();
      hear_callers();
      for (std::uint32_t rank = 0; rank < options_.local_rank; ++rank) {
        if (!met_[rank]) call(rank);
      }
      if (missing_ == 0) break;
      const Instant now = std::chrono::steady_clock::now();
      if (now >= deadline) throw Error(Code::kTimeout, missing_text());
      if (options_.while_waiting) options_.while_waiting();
      retry_ms = missing_ < before ? kFirstRetryMs : std::min(retry_ms * 2, kLastRetryMs);
      wait(std::min(deadline, now + std::chrono::milliseconds(retry_ms)), now);
    }
    return std::move(theirs_);
  }

 private:
  void listen_for_later_ranks() {
    listener_ = make_socket();
    sockaddr_un address;
    const socklen_t size = fill_address(address, meeting_name(options_.token, options_.local_rank));
    if (bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), size) != 0) {
      fail("bind for local rank " + std::to_string(options_.local_rank) +
           " (is another process using this rank and token?)");
    }
    if (listen(listener_.get(), kBacklog) != 0) fail("listen");
  }

  Hello hello_to(std::uint32_t rank, Speaker speaker) const {
    Hello hello;
    hello.speaker = static_cast<std::uint16_t>(speaker);
    hello.from = options_.local_rank;
    hello.to = rank;
    hello.local_size = options_.local_size;
    hello.ring_bytes = options_.ring_bytes;
    hello.arena_bytes = options_.arena_bytes;
    hello.mac = mac_of(hello, options_.token);
    return hello;
  }

  bool is_genuine(const Hello& hello) const {
    return hello.magic == kMeetingMagic && equal_constant_time(hello.mac, mac_of(hello, options_.token));
  }

  /// True where it is the rank we wait for: `from`, or any. Throws where a genuine rank disagrees about the sizes.
  bool check(const Hello& hello, Speaker speaker, std::optional<std::uint32_t> from) const {
    if (!is_genuine(hello)) return false;
    if (hello.version != kMeetingVersion || hello.local_size != options_.local_size ||
        hello.ring_bytes != options_.ring_bytes || hello.arena_bytes != options_.arena_bytes) {
      throw Error(Code::kMismatch, "ranks of one host disagree: local rank " + describe(hello) + ", but local rank " +
                                       describe(hello_to(hello.from, speaker)));
    }
    return hello.speaker == static_cast<std::uint16_t>(speaker) && hello.to == options_.local_rank &&
           hello.from < options_.local_size && (!from || hello.from == *from) && !met_[hello.from];
  }

  static std::string describe(const Hello& hello) {
    return std::to_string(hello.from) + " has version " + std::to_string(hello.version) + ", " +
           std::to_string(hello.local_size) + " local ranks, arenas of " + std::to_string(hello.arena_bytes) +
           " bytes and rings of " + std::to_string(hello.ring_bytes) + " bytes";
  }

  void accept_callers() {
    while (listener_.is_open()) {
      FileDescriptor caller(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!caller.is_open()) {
        if (errno == EAGAIN) return;
        if (errno == EINTR || errno == ECONNABORTED) continue;
        fail("accept4");
      }
      if (!is_our_user(caller)) continue;
      // Callers speak at once; who holds the line in silence loses it to the next.
      if (callers_.size() >= options_.local_size + kMaxStrangers) callers_.pop_front();
      callers_.push_back(std::move(caller));
    }
  }

  void hear_callers() {
    for (auto caller = callers_.begin(); caller != callers_.end();) {
      Hello hello;
      SharedDescriptors theirs;
      const Heard heard = receive_hello(*caller, hello, theirs, count_);
      if (heard == Heard::kNothingYet) {
        ++caller;
        continue;
      }
      // Answered before it is checked: where sizes differ, both sides say so.
      if (heard == Heard::kHello && is_genuine(hello) &&
          send_hello(*caller, hello_to(hello.from, Speaker::kListener), own_, count_) &&
          check(hello, Speaker::kCaller, std::nullopt)) {
        note(hello.from, std::move(theirs));
      }
      caller = callers_.erase(caller);
    }
  }

  void call(std::uint32_t rank) {
    FileDescriptor& line = calls_[rank];
    if (!line.is_open()) {
      line = make_socket();
      sockaddr_un address;
      const socklen_t size = fill_address(address, meeting_name(options_.token, rank));
      if (connect(line.get(), reinterpret_cast<const sockaddr*>(&address), size) != 0 || !is_our_user(line) ||
          !send_hello(line, hello_to(rank, Speaker::kCaller), own_, count_)) {
        line.reset();  // Not there yet, busy, or not one of us: try again.
        return;
      }
    }
    Hello hello;
    SharedDescriptors theirs;
    const Heard heard = receive_hello(line, hello, theirs, count_);
    if (heard == Heard::kNothingYet) return;
    if (heard == Heard::kHello && check(hello, Speaker::kListener, rank)) note(rank, std::move(theirs));
    line.reset();
  }

  void note(std::uint32_t rank, SharedDescriptors theirs) {
    theirs_[rank] = std::move(theirs);
    met_[rank] = true;
    --missing_;
  }

  void wait(Instant until, Instant now) {
    std::vector<pollfd> fds;
    if (listener_.is_open()) fds.push_back({listener_.get(), POLLIN, 0});
    for (const FileDescriptor& caller : callers_) fds.push_back({caller.get(), POLLIN, 0});
    for (const FileDescriptor& line : calls_) {
      if (line.is_open()) fds.push_back({line.get(), POLLIN, 0});
    }
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - now);
    if (poll(fds.data(), fds.size(), static_cast<int>(left.count())) < 0 && errno != EINTR) fail("poll");
  }

  std::string missing_text() const {
    std::string ranks;
    for (std::uint32_t rank = 0; rank < options_.local_size; ++rank) {
      if (!met_[rank]) ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
    }
    return "local rank " + std::to_string(options_.local_rank) + " waited for local rank" +
           (missing_ > 1 ? "s " : " ") + ranks + " of " + std::to_string(options_.local_size) +
           " to join the shared memory of this host; look at the output of those processes, or set "
           "HERRING_INTRA_NODE=off where they cannot share memory";
  }

  const MeetingOptions& options_;
  const SharedDescriptors& own_;
  const std::size_t count_;  // Of descriptors in a Hello.
  std::vector<SharedDescriptors> theirs_;
  std::vector<bool> met_;
  std::uint32_t missing_ = 0;
  FileDescriptor listener_;
  std::deque<FileDescriptor> callers_;
  std::vector<FileDescriptor> calls_;  // To the ranks below ours.
};

}  // namespace

std::string meeting_name(std::uint64_t token, std::uint32_t local_rank) {
  constexpr char kDigits[] = "0123456789abcdef";
  const std::string text = "herring-neighborhood-" + std::to_string(local_rank);
  const Digest digest = hmac_sha256(key_of(token), std::as_bytes(std::span(text)));
  // Names of abstract sockets are public (/proc/net/unix): this one gives nothing of the token away.
  std::string name = "herring-";
  for (std::size_t i = 0; i < 16; ++i) {
    name += kDigits[std::to_integer<unsigned>(digest[i]) >> 4];
    name += kDigits[std::to_integer<unsigned>(digest[i]) & 15];
  }
  return name;
}

std::vector<SharedDescriptors> meet(const MeetingOptions& options, const SharedDescriptors& own, Instant deadline) {
  return Meeting(options, own).run(deadline);
}

}  // namespace herring::intra_node
