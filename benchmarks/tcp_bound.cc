/// What two hosts can do over plain TCP sockets: the bound for an all-reduce between them. Each sends and receives the
/// whole size at the same time, half of it in a first message and half in a second (what it gives to the other's lane,
/// and what its own lane gives back), on one connection, with one thread and poll(2); nothing is summed.
///
///   benchmarks/emulate_cluster.py --workers 2 --rate none -- build/tcp_bound [iterations]
///
/// For each size and each size of a call (256 KB to 1 MB at most in one writev and one readv): the median time, bytes
/// a second each way, and the processor seconds of both processes for each GB that one of them has.
#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

[[noreturn]] void give_up(const char* what) {
  std::perror(what);
  std::exit(1);
}

std::string variable(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : value;
}

sockaddr_in address_of(const std::string& host, const std::string& port) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_family = AF_INET;
  hints.ai_socktype = SOCK_STREAM;
  if (getaddrinfo(host.c_str(), port.c_str(), &hints, &found) != 0 || found == nullptr) give_up("getaddrinfo");
  sockaddr_in address{};
  std::memcpy(&address, found->ai_addr, sizeof(address));
  freeaddrinfo(found);
  return address;
}

int connect_both(bool is_first, sockaddr_in address) {
  const int on = 1;
  if (is_first) {
    const int listener = socket(AF_INET, SOCK_STREAM, 0);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    address.sin_addr.s_addr = htonl(INADDR_ANY);
    if (bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0 || listen(listener, 1) != 0) {
      give_up("listen");
    }
    const int link = accept(listener, nullptr, nullptr);
    if (link < 0) give_up("accept");
    close(listener);
    setsockopt(link, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    return link;
  }
  for (int i = 0; i < 1000; ++i) {
    const int link = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(link, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0) {
      setsockopt(link, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
      return link;
    }
    close(link);
    usleep(10'000);
  }
  give_up("connect");
}

double processor_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
         static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6;
}

/// Sends all of `out` and receives all of `in`.
void exchange(int link, std::vector<char>& out, std::vector<char>& in, std::size_t call_bytes) {
  std::size_t sent = 0, received = 0;
  while (sent < out.size() || received < in.size()) {
    bool moved = false;
    if (sent < out.size()) {
      const ssize_t count = send(link, &out[sent], std::min(call_bytes, out.size() - sent), MSG_DONTWAIT);
      if (count > 0) {
        sent += static_cast<std::size_t>(count);
        moved = true;
      }
    }
    if (received < in.size()) {
      const ssize_t count = recv(link, &in[received], std::min(call_bytes, in.size() - received), MSG_DONTWAIT);
      if (count == 0) give_up("closed");
      if (count > 0) {
        received += static_cast<std::size_t>(count);
        moved = true;
      }
    }
    if (moved) continue;
    pollfd wanted{link, 0, 0};
    if (received < in.size()) wanted.events |= POLLIN;
    if (sent < out.size()) wanted.events |= POLLOUT;
    poll(&wanted, 1, 1000);
  }
}

}  // namespace

int main(int count, char** arguments) {
  const int iterations = count > 1 ? std::atoi(arguments[1]) : 12;
  const bool is_first = variable("RANK", "0") == "0";
  const int link =
      connect_both(is_first, address_of(variable("MASTER_ADDR", "127.0.0.1"), variable("MASTER_PORT", "29500")));
  if (is_first)
    std::printf("%10s %10s %12s %12s %10s %12s\n", "size", "call", "median us", "min us", "GB/s", "cpu s/GB");
  for (const std::size_t kilobytes : {64, 1024, 4096, 25'600, 102'400}) {
    const std::size_t bytes = kilobytes * 1024;
    std::vector<char> out(bytes, 'x'), in(bytes);
    for (const std::size_t call_bytes : {std::size_t{256} << 10, std::size_t{512} << 10, std::size_t{1} << 20}) {
      std::vector<double> times;
      double before = 0;
      for (int i = -2; i < iterations; ++i) {
        if (i == 0) before = processor_seconds();
        const auto start = Clock::now();
        exchange(link, out, in, call_bytes);
        if (i >= 0) times.push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count());
      }
      double own = processor_seconds() - before;
      double other = 0;
      if (write(link, &own, sizeof(own)) != sizeof(own) || recv(link, &other, sizeof(other), MSG_WAITALL) < 0) {
        give_up("exchange of times");
      }
      std::sort(times.begin(), times.end());
      const double median = times[times.size() / 2];
      const double gigabytes = static_cast<double>(bytes) * iterations / 1e9;
      if (is_first) {
        std::printf("%8zuKB %8zuKB %12.1f %12.1f %10.2f %12.2f\n", kilobytes, call_bytes >> 10, median, times[0],
                    static_cast<double>(bytes) / median / 1e3, (own + other) / gigabytes);
      }
    }
  }
  close(link);
  return 0;
}
