#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "control/hub.h"
#include "control/protocol.h"
#include "control/socket.h"
#include "core/status.h"

/// A hub on loopback and members of it, for tests.
namespace herring::control::test {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

inline HubOptions hub_options(std::uint32_t workers, std::uint32_t servers = 0) {
  HubOptions options;
  options.listen_host = "127.0.0.1";
  options.workers = workers;
  options.servers = servers;
  options.secret = "correct horse";
  options.job_id = 4711;
  options.heartbeat = 100ms;
  options.dead_after = 3s;  // Machines under load stall threads; tests of death choose less.
  return options;
}

inline HubClientOptions member_options(std::uint16_t port, Role role, std::uint32_t rank, std::uint32_t workers,
                                       std::uint32_t servers = 0) {
  HubClientOptions options;
  options.host = "127.0.0.1";
  options.ports = {port};
  options.secret = "correct horse";
  options.self = {role, rank, static_cast<std::uint32_t>(::getpid()), "this-host", "node"};
  options.self.nodes = NumaNodes{1} << rank;
  options.workers = workers;
  options.servers = servers;
  return options;
}

inline Instant in(Duration time) { return Clock::now() + time; }

/// A port that was free a moment ago.
inline std::uint16_t free_port() {
  std::uint16_t port = 0;
  const auto fd = control::listen_on("127.0.0.1", {}, port);
  return port;
}

/// Runs `body` for each index in a thread of its own and waits for all; an exception fails the test.
inline void in_parallel(std::size_t count, const std::function<void(std::size_t)>& body) {
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < count; ++i) {
    threads.emplace_back([&body, i] {
      try {
        body(i);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "member " << i << ": " << error.what();
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

/// All workers and servers of a hub, joined; by index.
inline std::vector<std::unique_ptr<HubClient>> join_all(std::uint16_t port, std::uint32_t workers,
                                                        std::uint32_t servers = 0) {
  std::vector<std::unique_ptr<HubClient>> members(workers + servers);
  in_parallel(members.size(), [&](std::size_t i) {
    const bool is_worker = i < workers;
    const auto rank = static_cast<std::uint32_t>(is_worker ? i : i - workers);
    members[i] = std::make_unique<HubClient>(
        member_options(port, is_worker ? Role::kWorker : Role::kServer, rank, workers, servers), in(20s));
  });
  return members;
}

/// All workers of a hub, whose worker 0 is the process `pid`.
inline std::vector<std::unique_ptr<HubClient>> join_all_as(const HubOptions& hub, std::uint32_t pid) {
  std::vector<std::unique_ptr<HubClient>> members(hub.workers);
  in_parallel(members.size(), [&](std::size_t i) {
    auto options = member_options(hub.ports[0], Role::kWorker, static_cast<std::uint32_t>(i), hub.workers);
    options.self.pid = pid;
    members[i] = std::make_unique<HubClient>(options, in(20s));
  });
  return members;
}

/// Waits until a condition holds that another thread is about to make true.
inline bool eventually(const std::function<bool()>& condition, Duration patience = 10s) {
  const Instant deadline = in(patience);
  while (!condition()) {
    if (Clock::now() >= deadline) return false;
    std::this_thread::yield();
  }
  return true;
}

inline std::vector<std::byte> bytes_of(std::string_view text) {
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

/// The next event, waited for on event_fd().
inline HubEvent next_event(HubClient& client, Duration patience = 5s) {
  HubEvent event;
  event.reason = "(no event came)";
  const Instant deadline = in(patience);
  while (!client.next_event(event)) {
    if (!control::wait_for(client.event_fd(), 1 /* POLLIN */, deadline)) break;
  }
  return event;
}

/// What a call throws: its code and text.
inline Status thrown_by(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.status();
  }
  return {};
}

inline double seconds_until_thrown(const std::function<void()>& call) {
  const Instant begun = Clock::now();
  EXPECT_FALSE(thrown_by(call).is_ok());
  return std::chrono::duration<double>(Clock::now() - begun).count();
}

/// A forked child; killed and reaped at the end. The child runs `body` and exits.
class Child final {
 public:
  explicit Child(const std::function<void()>& body) : pid_(::fork()) {
    if (pid_ != 0) return;
    try {
      body();
    } catch (...) {
      ::_exit(1);
    }
    ::_exit(0);
  }
  ~Child() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    wait();
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  void signal(int number) const { ASSERT_EQ(::kill(pid_, number), 0); }
  int wait() {
    int status = -1;
    if (pid_ > 0) ::waitpid(pid_, &status, 0);
    pid_ = -1;
    return status;
  }
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_;
};

/// Blocks the calling (child) process until it is killed; the bound keeps it from outliving a broken test.
inline void wait_to_be_killed() {
  int pipes[2];
  if (::pipe(pipes) != 0) return;
  (void)control::wait_for(pipes[0], 1 /* POLLIN */, in(60s));
}

}  // namespace herring::control::test
