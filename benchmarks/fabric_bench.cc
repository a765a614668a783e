/// Latency and bandwidth between two processes of this host through libfabric, beside plain TCP sockets in the same
/// run.
///
///   fabric_bench [interface] [libfabric.so]
///
/// latency: half the round trip of an 80-byte message. bandwidth: bytes / time of 256 MB one way, 16 messages
/// outstanding, each an 80-byte header and a payload; the clock stops when the receiver has said that all of it came.
/// Each row three times; the median is printed. "spin 20 us" polls that long before it blocks, "block" blocks at once.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "efa/fabric.h"

namespace {

using herring::Error;
using herring::PeerId;
using herring::Tag;
using herring::Token;
using herring::transport::Completion;
using herring::transport::CompletionKind;
using Clock = std::chrono::steady_clock;
using Bytes = std::vector<std::byte>;

constexpr std::size_t kHeaderBytes = 80;
constexpr std::size_t kOutstanding = 16;
constexpr std::size_t kVolume = std::size_t{256} << 20;
constexpr int kRoundTrips = 4000;
constexpr auto kLimit = std::chrono::seconds(60);

[[noreturn]] void give_up(const char* what) {
  std::perror(what);
  std::exit(1);
}
void check(bool good, const char* what) {
  if (!good) give_up(what);
}

/// A pair of connected processes' way to talk. One object in each process.
class Link {
 public:
  virtual ~Link() = default;
  virtual void send(std::size_t count, std::size_t payload_bytes) = 0;  ///< `count` messages, pipelined.
  virtual void receive(std::size_t count, std::size_t payload_bytes) = 0;
};

class FabricLink final : public Link {
 public:
  FabricLink(const herring::efa::FabricOptions& options, int channel, Clock::duration spin)
      : fabric_(options, memory_), endpoint_(fabric_.open_endpoint()), spin_(spin) {
    const auto own = endpoint_->address();
    check(write(channel, own.data(), own.size()) == static_cast<ssize_t>(own.size()), "exchange addresses");
    herring::transport::Address other(own.size());
    check(recv(channel, other.data(), other.size(), MSG_WAITALL) == static_cast<ssize_t>(own.size()), "exchange");
    endpoint_->add_peer(PeerId{0}, other);
    for (auto& head : heads_) head.resize(kHeaderBytes);
  }

  const std::string& provider() const { return fabric_.provider(); }

  void send(std::size_t count, std::size_t payload_bytes) override {
    prepare(payload_bytes);
    std::size_t posted = 0, done = 0;
    while (done < count) {
      while (posted < count && posted < done + kOutstanding) {
        const auto status =
            endpoint_->post_send(PeerId{0}, Tag{1 + posted % kOutstanding}, heads_[0], payload_, Token{0});
        if (status.is_again()) break;
        status.or_throw();
        ++posted;
      }
      done += progress(CompletionKind::kSend);
    }
  }

  void receive(std::size_t count, std::size_t payload_bytes) override {
    prepare(payload_bytes);
    std::size_t posted = 0, done = 0;
    while (done < count) {
      while (posted < count && posted < done + kOutstanding) {
        const std::size_t slot = posted % kOutstanding;
        endpoint_->post_receive(Tag{1 + slot}, heads_[slot], slots_[slot], Token{1}).or_throw();
        ++posted;
      }
      done += progress(CompletionKind::kReceive);
    }
  }

 private:
  void prepare(std::size_t payload_bytes) {
    if (payload_.size() == payload_bytes) return;
    payload_.assign(payload_bytes, std::byte{1});
    for (auto& slot : slots_) slot.assign(payload_bytes, std::byte{0});
  }

  std::size_t progress(CompletionKind kind) {
    std::array<Completion, 16> batch;
    const auto start = Clock::now();
    while (true) {
      const std::size_t found = endpoint_->poll(batch);
      std::size_t of_kind = 0;
      for (std::size_t i = 0; i < found; ++i) {
        batch[i].status.or_throw();
        of_kind += batch[i].kind == kind ? 1u : 0u;
      }
      if (of_kind > 0) return of_kind;
      const auto now = Clock::now();
      if (now - start > kLimit) throw Error(herring::Code::kTimeout, "the other process does not answer");
      if (now - start >= spin_) endpoint_->wait(start + kLimit);
    }
  }

  herring::memory::Domain memory_;
  herring::efa::Fabric fabric_;
  std::unique_ptr<herring::transport::Endpoint> endpoint_;
  Clock::duration spin_;
  std::array<Bytes, kOutstanding> heads_;
  std::array<Bytes, kOutstanding> slots_;
  Bytes payload_;
};

class SocketLink final : public Link {
 public:
  explicit SocketLink(int descriptor) : descriptor_(descriptor), head_(kHeaderBytes) {
    const int on = 1;
    setsockopt(descriptor_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    timeval limit{60, 0};
    setsockopt(descriptor_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    setsockopt(descriptor_, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
  }
  ~SocketLink() override { close(descriptor_); }

  void send(std::size_t count, std::size_t payload_bytes) override {
    payload_.resize(payload_bytes);
    for (std::size_t i = 0; i < count; ++i) {
      std::array<iovec, 2> spans{iovec{head_.data(), head_.size()}, iovec{payload_.data(), payload_.size()}};
      const auto sent = writev(descriptor_, spans.data(), 2);
      check(sent > 0, "writev");
      for (auto left = head_.size() + payload_bytes - static_cast<std::size_t>(sent); left > 0;) {
        const auto more = ::send(descriptor_, payload_.data() + payload_bytes - left, left, MSG_NOSIGNAL);
        check(more > 0, "send");
        left -= static_cast<std::size_t>(more);
      }
    }
  }
  void receive(std::size_t count, std::size_t payload_bytes) override {
    payload_.resize(payload_bytes);
    for (std::size_t i = 0; i < count; ++i) {
      std::array<iovec, 2> spans{iovec{head_.data(), head_.size()}, iovec{payload_.data(), payload_.size()}};
      msghdr message{};
      message.msg_iov = spans.data();
      message.msg_iovlen = 2;
      const auto got = recvmsg(descriptor_, &message, MSG_WAITALL);
      check(got == static_cast<ssize_t>(head_.size() + payload_bytes), "recvmsg");
    }
  }

 private:
  int descriptor_;
  Bytes head_;
  Bytes payload_;
};

/// Processor time of this process, in seconds.
double processor_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
         static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-6;
}

struct Measured {
  double seconds = 0;
  double processor_seconds = 0;  ///< Of both processes.
};

Measured timed(const std::function<void()>& work) {
  const double before = processor_seconds();
  const auto start = Clock::now();
  work();
  return {std::chrono::duration<double>(Clock::now() - start).count(), processor_seconds() - before};
}

/// Runs `body` in two processes that have a UNIX socket between them. Returns the first one's time, and both ones'
/// processor time.
Measured in_two_processes(const std::function<Measured(int channel, bool first)>& body) {
  std::array<int, 2> ends{};
  check(socketpair(AF_UNIX, SOCK_STREAM, 0, ends.data()) == 0, "socketpair");
  std::fflush(stdout);
  const pid_t child = fork();
  check(child >= 0, "fork");
  try {
    if (child == 0) {
      close(ends[0]);
      const double used = body(ends[1], false).processor_seconds;
      _exit(write(ends[1], &used, sizeof(used)) == sizeof(used) ? 0 : 1);
    }
    close(ends[1]);
    Measured measured = body(ends[0], true);
    double used = 0;
    check(recv(ends[0], &used, sizeof(used), MSG_WAITALL) == sizeof(used), "the other process ended early");
    measured.processor_seconds += used;
    close(ends[0]);
    check(waitpid(child, nullptr, 0) == child, "waitpid");
    return measured;
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    _exit(1);
  }
}

Measured latency(Link& link, bool first) {
  // The header alone: the smallest message of the protocol.
  const auto round_trip = [&] {
    if (first) link.send(1, 0);
    link.receive(1, 0);
    if (!first) link.send(1, 0);
  };
  for (int i = 0; i < 100; ++i) round_trip();
  return timed([&] {
    for (int i = 0; i < kRoundTrips; ++i) round_trip();
  });
}

Measured transfer(Link& link, bool first, std::size_t message_bytes) {
  const std::size_t count = kVolume / message_bytes;
  const auto run = [&](std::size_t messages) {
    if (first) {
      link.send(messages, message_bytes);
      link.receive(1, message_bytes);  // "All of it came."
    } else {
      link.receive(messages, message_bytes);
      link.send(1, message_bytes);
    }
  };
  run(kOutstanding);
  return timed([&] { run(count); });
}

/// A TCP connection on loopback between the two processes of `channel`.
int connect_on_loopback(int channel, bool first) {
  sockaddr_in address{};
  socklen_t length = sizeof(address);
  if (!first) {
    check(recv(channel, &address, sizeof(address), MSG_WAITALL) == sizeof(address), "exchange");
    const int descriptor = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    check(connect(descriptor, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0, "connect");
    return descriptor;
  }
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  check(bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0, "bind");
  check(listen(listener, 1) == 0, "listen");
  getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length);
  check(write(channel, &address, sizeof(address)) == sizeof(address), "exchange");
  const int descriptor = accept(listener, nullptr, nullptr);
  check(descriptor >= 0, "accept");
  close(listener);
  return descriptor;
}

Measured median(const std::function<Measured()>& measure) {
  std::array<Measured, 3> values{measure(), measure(), measure()};
  std::sort(values.begin(), values.end(), [](const Measured& a, const Measured& b) { return a.seconds < b.seconds; });
  return values[1];
}

using Open = std::function<std::unique_ptr<Link>(int channel, bool first)>;

void row(const char* name, const Open& open) {
  const Measured trips = median(
      [&] { return in_two_processes([&](int channel, bool first) { return latency(*open(channel, first), first); }); });
  std::printf("%-24s %8.1f %8.1f", name, trips.seconds / kRoundTrips / 2 * 1e6,
              trips.processor_seconds / kRoundTrips / 2 * 1e6);
  for (const std::size_t bytes : {std::size_t{128} << 10, std::size_t{1} << 20}) {
    const Measured bulk = median([&] {
      return in_two_processes([&](int channel, bool first) { return transfer(*open(channel, first), first, bytes); });
    });
    std::printf(" %9.2f %9.2f", static_cast<double>(kVolume) / bulk.seconds / 1e9,
                bulk.processor_seconds / static_cast<double>(kVolume) * 1e9);
  }
  std::printf("\n");
}

}  // namespace

int main(int argc, char** argv) {
  herring::efa::FabricOptions options;
  options.interface = argc > 1 ? argv[1] : "lo";
  if (argc > 2) options.library = argv[2];
  const auto report = herring::efa::probe(options);
  if (report.chosen < 0) {
    std::fprintf(stderr, "no usable libfabric provider on %s\n", options.interface.c_str());
    return 1;
  }
  const auto& chosen = report.providers[static_cast<std::size_t>(report.chosen)];
  std::printf("libfabric %s, %s\n%s, %s\n\n", report.version.c_str(), report.path.c_str(), chosen.name.c_str(),
              chosen.domain.c_str());
  std::printf("%-24s %17s %19s %19s\n", "", "80 bytes one way", "128 KiB x 16", "1 MiB x 16");
  std::printf("%-24s %8s %8s %9s %9s %9s %9s\n", "", "us", "cpu us", "GB/s", "cpu s/GB", "GB/s", "cpu s/GB");
  const auto fabric = [&](Clock::duration spin) {
    return [&options, spin](int channel, bool) { return std::make_unique<FabricLink>(options, channel, spin); };
  };
  row("libfabric, block", fabric(Clock::duration(0)));
  row("libfabric, spin 20 us", fabric(std::chrono::microseconds(20)));
  row("TCP sockets, blocking",
      [](int channel, bool first) { return std::make_unique<SocketLink>(connect_on_loopback(channel, first)); });
  return 0;
}
