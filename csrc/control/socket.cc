#include "control/socket.h"
#include "core/thread.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <functional>
#include <memory>
#include <system_error>
#include <utility>

namespace herring::control {
namespace {

struct FreeAddresses {
  void operator()(addrinfo* list) const { freeaddrinfo(list); }
};
using Addresses = std::unique_ptr<addrinfo, FreeAddresses>;

/// Null where the name means nothing; `why` says so.
Addresses resolve(const std::string& host, std::uint16_t port, int flags, std::string& why) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* list = nullptr;
  const int error = getaddrinfo(host.empty() ? nullptr : host.c_str(), std::to_string(port).c_str(), &hints, &list);
  if (error != 0) {
    why = "cannot resolve the host name: " + std::string(error == EAI_SYSTEM ? errno_text(errno) : gai_strerror(error));
    return nullptr;
  }
  return Addresses(list);
}

void set_option(int fd, int level, int option, int value) {
  // Options here only improve things; where one is refused the connection still works.
  (void)::setsockopt(fd, level, option, &value, sizeof(value));
}

/// Bound and listening, or nothing and the errno.
UniqueFd try_listen(const sockaddr* address, socklen_t bytes, int& error) {
  UniqueFd fd(::socket(address->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) {
    error = errno;
    return {};
  }
  set_option(fd.get(), SOL_SOCKET, SO_REUSEADDR, 1);
  if (address->sa_family == AF_INET6) set_option(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, 0);
  // Two that bind at once with SO_REUSEADDR are told apart by listen().
  if (::bind(fd.get(), address, bytes) != 0 || ::listen(fd.get(), 4096) != 0) {
    error = errno;
    return {};
  }
  return fd;
}

std::uint16_t local_port(int fd) {
  sockaddr_storage address{};
  socklen_t bytes = sizeof(address);
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &bytes) != 0) return 0;
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6*>(&address)->sin6_port
                                             : reinterpret_cast<const sockaddr_in*>(&address)->sin_port);
}

UniqueFd listen_all(std::uint16_t port, int& error) {
  sockaddr_in6 any6{};
  any6.sin6_family = AF_INET6;
  any6.sin6_addr = in6addr_any;
  any6.sin6_port = htons(port);
  UniqueFd fd = try_listen(reinterpret_cast<const sockaddr*>(&any6), sizeof(any6), error);
  if (fd || error == EADDRINUSE) return fd;
  sockaddr_in any4{};
  any4.sin_family = AF_INET;
  any4.sin_addr.s_addr = htonl(INADDR_ANY);
  any4.sin_port = htons(port);
  return try_listen(reinterpret_cast<const sockaddr*>(&any4), sizeof(any4), error);
}

/// A connect to a free port of the own host may pick that very port as its source and so meet itself.
bool met_itself(int fd) {
  sockaddr_storage self{};
  sockaddr_storage peer{};
  socklen_t self_bytes = sizeof(self);
  socklen_t peer_bytes = sizeof(peer);
  return ::getsockname(fd, reinterpret_cast<sockaddr*>(&self), &self_bytes) == 0 &&
         ::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &peer_bytes) == 0 && self_bytes == peer_bytes &&
         std::memcmp(&self, &peer, self_bytes) == 0;
}

UniqueFd connect_address(const addrinfo& address, Instant deadline, std::string& why) {
  UniqueFd fd(::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) {
    why = errno_text(errno);
    return {};
  }
  int error = 0;
  if (::connect(fd.get(), address.ai_addr, address.ai_addrlen) != 0) {
    error = errno;
    if (error == EINPROGRESS || error == EINTR) {
      if (!wait_for(fd.get(), POLLOUT, deadline)) {
        why = "no answer to the connection request";
        return {};
      }
      socklen_t bytes = sizeof(error);
      if (::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &bytes) != 0) error = errno;
    }
  }
  if (error != 0) {
    why = errno_text(error);
    return {};
  }
  if (met_itself(fd.get())) {
    // Reset rather than close: TIME_WAIT would keep the hub from binding this port.
    const linger reset{1, 0};
    (void)::setsockopt(fd.get(), SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
    why = errno_text(ECONNREFUSED);
    return {};
  }
  return fd;
}

}  // namespace

std::string errno_text(int error) {
  if (error == EMFILE) return "too many open files; raise the limit (ulimit -n)";
  std::string text = std::generic_category().message(error);
  if (!text.empty()) text[0] = static_cast<char>(std::tolower(static_cast<unsigned char>(text[0])));
  return text;
}

UniqueFd& UniqueFd::operator=(UniqueFd&& other) noexcept {
  if (this != &other) {
    reset();
    fd_ = other.release();
  }
  return *this;
}

int UniqueFd::release() { return std::exchange(fd_, -1); }

void UniqueFd::reset() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

Signal::Signal() : fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!fd_) throw Error(Code::kTransport, "eventfd failed: " + errno_text(errno));
}

void Signal::raise() const {
  const std::uint64_t one = 1;
  // Fails only where it is raised already.
  if (::write(fd_.get(), &one, sizeof(one)) < 0) return;
}

void Signal::clear() const {
  std::uint64_t count = 0;
  if (::read(fd_.get(), &count, sizeof(count)) < 0) return;
}

FrameSocket::FrameSocket(UniqueFd fd) : fd_(std::move(fd)) { set_option(fd_.get(), IPPROTO_TCP, TCP_NODELAY, 1); }

void FrameSocket::seal_with(const Digest& send_key, const Digest& receive_key) {
  sealer_.emplace(send_key);
  opener_.emplace(receive_key);
}

std::string FrameSocket::peer_name() const {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  std::array<char, NI_MAXHOST> host{};
  std::array<char, NI_MAXSERV> port{};
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  if (::getpeername(fd(), any, &size) != 0 || ::getnameinfo(any, size, host.data(), host.size(), port.data(),
                                                            port.size(), NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    return "unknown";
  }
  return std::string(host.data()) + ":" + port.data();
}

void FrameSocket::set_user_timeout(Duration timeout) {
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(timeout).count();
  set_option(fd_.get(), IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(std::clamp<std::int64_t>(ms, 1, 1 << 30)));
}

void FrameSocket::send(FrameType type, const SharedBody& body) {
  Output output;
  const FrameHead head = frame_head(type, body->bytes().size());
  const Mac mac = sealer_ ? sealer_->seal(head, body->digest()) : Mac{};
  std::copy(head.begin(), head.end(), output.header.begin());
  std::copy(mac.begin(), mac.end(), output.header.begin() + kFrameHeadBytes);
  output.body = body;
  output_.push_back(std::move(output));
}

bool FrameSocket::flush() {
  while (!output_.empty()) {
    std::array<iovec, 64> parts{};
    std::size_t used = 0;
    std::size_t skip = sent_;
    const auto add = [&](std::span<const std::byte> bytes) {
      const std::size_t skipped = std::min(skip, bytes.size());
      skip -= skipped;
      if (skipped == bytes.size()) return;
      parts[used++] = {const_cast<std::byte*>(bytes.data() + skipped), bytes.size() - skipped};
    };
    for (std::size_t i = 0; i < output_.size() && used + 2 <= parts.size(); ++i) {
      add(output_[i].header);
      add(output_[i].body->bytes());
    }
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = used;
    const ssize_t sent = ::sendmsg(fd_.get(), &message, MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno == EAGAIN || errno == EWOULDBLOCK) return true;
      if (errno == EINTR) continue;
      ending_ = errno_text(errno);
      return false;
    }
    consume(static_cast<std::size_t>(sent));
  }
  return true;
}

void FrameSocket::consume(std::size_t bytes) {
  sent_ += bytes;
  written_ += bytes;
  while (!output_.empty()) {
    const std::size_t frame = kFrameHeaderBytes + output_.front().body->bytes().size();
    if (sent_ < frame) return;
    sent_ -= frame;
    output_.pop_front();
  }
}

bool FrameSocket::receive() {
  std::array<std::byte, 64 << 10> buffer;
  for (;;) {
    const ssize_t got = ::recv(fd_.get(), buffer.data(), buffer.size(), 0);
    if (got > 0) {
      reader_.feed(std::span(buffer).first(static_cast<std::size_t>(got)));
      return true;
    }
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return true;
    ending_ = got == 0 ? "connection closed" : errno_text(errno);
    return false;
  }
}

FrameReader::Result FrameSocket::next(Frame& frame) {
  const FrameReader::Result result = reader_.next(frame);
  if (result == FrameReader::Result::kBad) ending_ = reader_.why();
  if (result != FrameReader::Result::kFrame) return result;
  if (opener_ ? opener_->open(frame) : frame.mac == Mac{}) return result;
  ending_ = "a frame whose authentication code is wrong";
  return FrameReader::Result::kBad;
}

void FrameSocket::half_close() { (void)::shutdown(fd_.get(), SHUT_WR); }

UniqueFd try_listen_on(const std::string& host, std::uint16_t port, std::string& why) {
  int error = 0;
  UniqueFd fd;
  if (host.empty()) {
    fd = listen_all(port, error);
  } else {
    const Addresses list = resolve(host, port, AI_PASSIVE, why);
    if (!list) throw Error(Code::kInvalidArgument, "the hub cannot listen on \"" + host + "\": " + why);
    for (const addrinfo* it = list.get(); it != nullptr && !fd; it = it->ai_next) {
      fd = try_listen(it->ai_addr, it->ai_addrlen, error);
    }
  }
  if (!fd) why = errno_text(error);
  return fd;
}

Error no_port(const std::string& host, const std::string& tried) {
  return Error(Code::kTransport, "the hub found no port to listen on at " + (host.empty() ? "any address" : host) +
                                     "; tried " + tried + ". Free one of them or choose another (HERRING_HUB)");
}

UniqueFd listen_on(const std::string& host, const std::vector<std::uint16_t>& ports, std::uint16_t& port) {
  const std::vector<std::uint16_t> candidates = ports.empty() ? std::vector<std::uint16_t>{0} : ports;
  std::string tried;
  for (const std::uint16_t candidate : candidates) {
    std::string why;
    if (UniqueFd fd = try_listen_on(host, candidate, why)) {
      port = local_port(fd.get());
      return fd;
    }
    tried += (tried.empty() ? "" : ", ") + std::to_string(candidate) + " (" + why + ")";
  }
  throw no_port(host, tried);
}

UniqueFd connect_to(const std::string& host, std::uint16_t port, Instant deadline, std::string& why) {
  const Addresses list = resolve(host, port, 0, why);
  for (const addrinfo* it = list.get(); it != nullptr; it = it->ai_next) {
    if (UniqueFd fd = connect_address(*it, deadline, why)) return fd;
  }
  return {};
}

bool wait_for(int fd, short events, Instant deadline) {
  for (;;) {
    pollfd item{fd, events, 0};
    const auto now = std::chrono::steady_clock::now();
    const int ready = ::poll(&item, 1, wait_ms(deadline, now));
    if (ready > 0) return true;
    if (ready == 0 && std::chrono::steady_clock::now() >= deadline) return false;
    if (ready < 0 && errno != EINTR) return false;
  }
}

int wait_ms(Instant deadline, Instant now) {
  if (deadline <= now) return 0;
  if (deadline - now >= std::chrono::minutes(1)) return 60'000;
  return static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(deadline - now).count());
}

std::thread start_thread(const char* name, std::function<void()> body) {
  // A new thread inherits the mask: ctrl-C and friends stay with the threads that the program itself has.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread;
  try {
    thread = herring::start_thread(name, std::move(body));
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return thread;
}

}  // namespace herring::control
