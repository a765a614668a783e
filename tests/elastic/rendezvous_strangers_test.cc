#include <gtest/gtest.h>
#include <sys/resource.h>

#include <ctime>

#include "control/hub_test_support.h"
#include "elastic/rendezvous_client.h"
#include "elastic/rendezvous_server.h"

/// What a user would lose: workers that cannot come in, and a core of the launcher's machine, to a port scanner.
namespace herring::elastic {
namespace {

using namespace std::chrono_literals;
using control::connect_to;
using control::UniqueFd;
using control::test::Child;
using control::test::in;
using Clock = std::chrono::steady_clock;

RendezvousServerOptions server_options(std::uint32_t workers) {
  RendezvousServerOptions options;
  options.listen_host = "127.0.0.1";
  options.secret = "secret";
  options.job.workers = workers;
  return options;
}

/// Enters as a worker, and is told to join the first generation.
void come_in(std::uint16_t port, Duration patience) {
  RendezvousClientOptions options;
  options.host = "127.0.0.1";
  options.port = port;
  options.secret = "secret";
  options.enter.kind = MessageKind::kEnter;
  options.enter.role = control::Role::kWorker;
  RendezvousClient client(options, in(patience));
  Message message;
  const Instant deadline = in(patience);
  while (client.next(message, deadline)) {
    if (message.kind == MessageKind::kGo) return;
  }
  throw Error(Code::kTimeout, "the worker was not let in");
}

std::vector<UniqueFd> idle_connections(std::uint16_t port, int count) {
  std::vector<UniqueFd> idle;
  std::string why;
  for (int i = 0; i < count; ++i) {
    if (UniqueFd fd = connect_to("127.0.0.1", port, in(5s), why)) idle.push_back(std::move(fd));
  }
  return idle;
}

TEST(RendezvousStrangers, ManyIdleConnectionsKeepNoWorkerOut) {
  RendezvousServer server(server_options(1));
  const auto idle = idle_connections(server.port(), 700);
  EXPECT_GE(idle.size(), 700u);
  const Instant begun = Clock::now();
  EXPECT_NO_THROW(come_in(server.port(), 20s));
  EXPECT_LT(Clock::now() - begun, 4s) << "before the strangers' time is up";
}

/// In a child with 60 descriptors: how much of a core the rendezvous takes while more strangers than that are there.
int out_of_descriptors(int ready, int go) {
  const rlimit few{60, 60};
  if (::setrlimit(RLIMIT_NOFILE, &few) != 0) return 10;
  RendezvousServer server(server_options(1));
  const std::uint16_t port = server.port();
  if (::write(ready, &port, sizeof(port)) != static_cast<ssize_t>(sizeof(port))) return 11;
  char byte = 0;
  if (::read(go, &byte, 1) != 1) return 12;
  const std::clock_t begun = std::clock();
  std::this_thread::sleep_for(1s);
  const double used = static_cast<double>(std::clock() - begun) / CLOCKS_PER_SEC;
  if (used > 0.3) return 1;
  return server.wait(in(20s)) ? 0 : 2;  // The worker comes, and goes: the job is over.
}

TEST(RendezvousStrangers, OutOfDescriptorsItDoesNotSpinAndLetsWorkersIn) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "UBSan opens a pipe to look at an object's type: without descriptors it ends the process";
#endif
  int ready[2];
  int go[2];
  ASSERT_EQ(::pipe(ready), 0);
  ASSERT_EQ(::pipe(go), 0);
  Child child([&] { ::_exit(out_of_descriptors(ready[1], go[0])); });
  std::uint16_t port = 0;
  ASSERT_EQ(::read(ready[0], &port, sizeof(port)), static_cast<ssize_t>(sizeof(port)));
  const auto idle = idle_connections(port, 100);
  ASSERT_EQ(::write(go[1], "1", 1), 1);
  std::this_thread::sleep_for(1200ms);
  EXPECT_NO_THROW(come_in(port, 15s));
  const int status = child.wait();
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0) << "1: it took a core; 2: the job did not end";
  for (const int fd : {ready[0], ready[1], go[0], go[1]}) ::close(fd);
}

}  // namespace
}  // namespace herring::elastic
