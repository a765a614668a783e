// What the control plane costs worker 0 and the rendezvous: thousands of real sockets over loopback. One process has
// the hub (or the rendezvous), others have the members, many in each; every member is what a worker or server runs.
//
//   cmake -S . -B build -G Ninja -DHERRING_BENCHMARKS=ON && ninja -C build control_plane
//   build/control_plane hub --workers 2048 --servers 256 --hosts 256
//   build/control_plane rendezvous --workers 2048
//
// Names, host identities and addresses have the size of real ones; no endpoint is opened, and no gradient moves.

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "control/hub.h"
#include "core/hmac.h"
#include "core/status.h"
#include "elastic/rendezvous_client.h"
#include "elastic/rendezvous_server.h"
#include "elastic/reports.h"
#include "runtime/introduction.h"
#include "tcp/address.h"

namespace {

using namespace herring;
using namespace herring::control;
using runtime::introduce;
using runtime::OthersAddresses;
using runtime::OwnAddresses;
using runtime::settings_that_must_agree;
using Clock = std::chrono::steady_clock;

struct Options {
  bool is_rendezvous = false;
  std::uint32_t workers = 2048;
  std::uint32_t servers = 0;
  std::uint32_t hosts = 256;
  std::uint32_t lanes = 1;
  std::uint32_t processes = 2;
  double seconds = 10;  // Of heartbeats, or of reports.
  double heartbeat_s = 1;
  double dead_after_s = 5;
  std::uint32_t rate = 20;  // Operations that each worker completes a second.
  bool is_alone = false;    // Each is reported by itself, as soon as it is complete.
};

/// What a process with members says to the one with the hub.
struct Report {
  std::uint32_t failed = 0;
  std::uint32_t alarms = 0;
  char first[240] = {};
};

constexpr char kLeave = 'L';
const char* const kSecret = "a secret of thirty-two characters";

double since(Instant begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }
Duration seconds(double value) { return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(value)); }

double cpu_seconds() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto of = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return of(usage.ru_utime) + of(usage.ru_stime);
}

[[noreturn]] void die(const std::string& why) {
  std::fprintf(stderr, "control_plane: %s\n", why.c_str());
  std::exit(1);
}

template <class Value>
void write_all(int fd, const Value& value) {
  if (::write(fd, &value, sizeof(value)) != static_cast<ssize_t>(sizeof(value))) die("a pipe broke");
}

template <class Value>
Value read_all(int fd) {
  Value value{};
  std::size_t have = 0;
  while (have < sizeof(value)) {
    const ssize_t got = ::read(fd, reinterpret_cast<char*>(&value) + have, sizeof(value) - have);
    if (got <= 0) die("the other process has ended");
    have += static_cast<std::size_t>(got);
  }
  return value;
}

/// In a job the hub's machine has no thousands of members beside it, so here it comes before them, where that is
/// allowed.
void come_first() {
  const sched_param priority{1};
  if (::sched_setscheduler(0, SCHED_RR, &priority) == 0) return;
  std::fprintf(stderr, "control_plane: no real-time priority, so members may keep the hub from running\n");
}

void raise_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  (void)::setrlimit(RLIMIT_NOFILE, &limit);
}

/// As the builtin tcp has them.
transport::Address address_of(std::uint32_t host, std::uint16_t port, std::uint32_t member, std::uint32_t number) {
  tcp::EndpointAddress address;
  sockaddr_in in{};
  in.sin_family = AF_INET;
  in.sin_port = htons(port);
  in.sin_addr.s_addr = htonl(0x0A000000u + host);
  std::memcpy(&address.socket.storage, &in, sizeof(in));
  address.instance.fill(std::byte{0x5A});
  std::memcpy(&address.instance[8], &member, sizeof(member));
  std::memcpy(&address.instance[12], &number, sizeof(number));
  return tcp::encode_address(address);
}

Member member_of(const Options& options, std::uint32_t index) {
  const bool is_worker = index < options.workers;
  const std::uint32_t rank = is_worker ? index : index - options.workers;
  // Ranks are dealt out host by host.
  const std::uint32_t per_host = (options.workers + options.hosts - 1) / options.hosts;
  const std::uint32_t host = is_worker ? rank / per_host : rank % options.hosts;
  char boot[64];
  std::snprintf(boot, sizeof(boot), "%08x-1111-4222-8333-%012x", host * 2654435761u, host * 40503u);
  const std::string name = "node-" + std::to_string(1000 + host);
  Member member{is_worker ? Role::kWorker : Role::kServer, rank, 20000 + index * 7 % 30000, "", name};
  member.host_identity = std::string(boot) + "/net:[4026531840]/ipc:[4026531839]/uid:1000/" + name;
  return member;
}

OwnAddresses addresses_of(const Options& options, std::uint32_t index) {
  OwnAddresses own;
  const bool is_worker = index < options.workers;
  const std::uint32_t rank = is_worker ? index : index - options.workers;
  const std::uint32_t per_host = (options.workers + options.hosts - 1) / options.hosts;
  const std::uint32_t host = is_worker ? rank / per_host : rank % options.hosts;
  const auto port = static_cast<std::uint16_t>(32768 + index * 13 % 28000);
  if (is_worker)
    own.worker = {address_of(host, port, index, 1), address_of(host, static_cast<std::uint16_t>(port + 1), index, 2)};
  const bool has_lanes = !is_worker || (options.servers == 0 && rank % per_host == 0);
  for (std::uint32_t lane = 0; has_lanes && lane < options.lanes; ++lane) {
    own.lanes.push_back(address_of(host, static_cast<std::uint16_t>(port + 2 + lane), index, 3 + lane));
  }
  return own;
}

/// The members of one process.
class Members {
 public:
  Members(const Options& options, std::uint32_t first, std::uint32_t last) : options_(options) {
    clients_.resize(last - first);
    for (std::uint32_t i = first; i < last; ++i) indices_.push_back(i);
  }

  Report join(std::uint16_t port) {
    each([&](std::size_t i) { join_one(i, port); });
    return report();
  }

  /// Orderly, as Runtime::shutdown() does where workers have lanes.
  Report leave() {
    for (auto& client : clients_) note_alarms(client.get());
    each([&](std::size_t i) {
      clients_[i]->exchange("goodbye", {}, Clock::now() + std::chrono::seconds(60), Wants::kNothing);
      clients_[i]->leave();
      clients_[i].reset();
    });
    return report();
  }

 private:
  void join_one(std::size_t i, std::uint16_t port) {
    const std::uint32_t index = indices_[i];
    HubClientOptions client;
    client.host = "127.0.0.1";
    client.ports = {port};
    client.secret = kSecret;
    client.self = member_of(options_, index);
    client.workers = options_.workers;
    client.servers = options_.servers;
    const Instant deadline = Clock::now() + std::chrono::seconds(120);
    clients_[i] = std::make_unique<HubClient>(client, deadline);
    const OwnAddresses own = addresses_of(options_, index);
    const OthersAddresses others = introduce(*clients_[i], settings_that_must_agree(Config{}), own, deadline);
    clients_[i]->exchange("connected", {}, deadline, Wants::kNothing);
    if (!own.worker.empty() && others.peers.size() != options_.workers)
      throw Error(Code::kInternal, "peers are missing");
  }

  template <class Body>
  void each(Body&& body) {
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < clients_.size(); ++i) {
      threads.emplace_back([&, i] {
        try {
          body(i);
        } catch (const std::exception& error) {
          note(error.what(), true);
        }
      });
    }
    for (auto& thread : threads) thread.join();
  }

  void note_alarms(HubClient* client) {
    HubEvent event;
    while (client != nullptr && client->next_event(event)) note(to_string(event), false);
  }

  void note(const std::string& what, bool is_failure) {
    const std::lock_guard lock(mutex_);
    if (report_.failed + report_.alarms == 0) std::snprintf(report_.first, sizeof(report_.first), "%s", what.c_str());
    ++(is_failure ? report_.failed : report_.alarms);
  }

  Report report() {
    const std::lock_guard lock(mutex_);
    return report_;
  }

  const Options options_;
  std::vector<std::uint32_t> indices_;
  std::vector<std::unique_ptr<HubClient>> clients_;
  std::mutex mutex_;
  Report report_;
};

/// A process with members, and the pipes to it.
struct Child {
  pid_t pid = 0;
  int commands = -1;
  int reports = -1;
};

template <class Body>
std::vector<Child> fork_children(const Options& options, std::uint32_t members, Body&& body) {
  std::vector<Child> children;
  for (std::uint32_t p = 0; p < options.processes; ++p) {
    int commands[2];
    int reports[2];
    if (::pipe(commands) != 0 || ::pipe(reports) != 0) die("no pipe");
    const pid_t pid = ::fork();
    if (pid < 0) die("no process");
    if (pid == 0) {
      ::close(commands[1]);
      ::close(reports[0]);
      const auto share = [&](std::uint32_t i) {
        return static_cast<std::uint32_t>(std::uint64_t{members} * i / options.processes);
      };
      body(share(p), share(p + 1), commands[0], reports[1]);
      std::_Exit(0);
    }
    ::close(commands[0]);
    ::close(reports[1]);
    children.push_back({pid, commands[1], reports[0]});
  }
  return children;
}

Report gather(const std::vector<Child>& children) {
  Report total;
  for (const Child& child : children) {
    const Report one = read_all<Report>(child.reports);
    if (one.failed + one.alarms > 0) std::fprintf(stderr, "  process %d: %s\n", static_cast<int>(child.pid), one.first);
    if (total.failed + total.alarms == 0) std::memcpy(total.first, one.first, sizeof(total.first));
    total.failed += one.failed;
    total.alarms += one.alarms;
  }
  return total;
}

void say_trouble(const Report& report, const char* when) {
  if (report.failed + report.alarms == 0) return;
  std::printf("  %s: %u failed, %u alarms; the first: %s\n", when, report.failed, report.alarms, report.first);
}

int run_hub(const Options& options) {
  const std::uint32_t all = options.workers + options.servers;
  const auto children = fork_children(options, all, [&](std::uint32_t first, std::uint32_t last, int in, int out) {
    Members members(options, first, last);
    write_all(out, members.join(read_all<std::uint16_t>(in)));
    if (read_all<char>(in) == kLeave) write_all(out, members.leave());
  });
  come_first();
  HubOptions hub_options;
  hub_options.listen_host = "127.0.0.1";
  hub_options.workers = options.workers;
  hub_options.servers = options.servers;
  hub_options.secret = kSecret;
  hub_options.heartbeat = seconds(options.heartbeat_s);
  hub_options.dead_after = seconds(options.dead_after_s);
  random_bytes(std::as_writable_bytes(std::span(&hub_options.job_id, 1)));
  std::optional<Hub> hub(std::in_place, hub_options);
  const Instant begin = Clock::now();
  double cpu = cpu_seconds();
  for (const Child& child : children) write_all(child.commands, hub->port());
  const Report joined = gather(children);
  std::printf("%u workers, %u servers, %u hosts\n", options.workers, options.servers, options.hosts);
  std::printf("  until all have what they need  %8.2f s, hub %.2f cpu s, %.1f MB sent (%.1f KB a member)\n",
              since(begin), cpu_seconds() - cpu, 1e-6 * static_cast<double>(hub->counters().bytes_sent),
              1e-3 * static_cast<double>(hub->counters().bytes_sent) / all);
  say_trouble(joined, "joining");
  std::fflush(stdout);
  if (joined.failed > 0) return 1;
  const Instant beating = Clock::now();
  cpu = cpu_seconds();
  std::this_thread::sleep_for(seconds(options.seconds));
  std::printf("  heartbeats each %.1f s           hub %.1f %% of a core over %.0f s\n", options.heartbeat_s,
              100 * (cpu_seconds() - cpu) / since(beating), since(beating));
  std::fflush(stdout);
  const Instant leaving = Clock::now();
  cpu = cpu_seconds();
  const std::uint64_t sent = hub->counters().bytes_sent;
  for (const Child& child : children) write_all(child.commands, kLeave);
  const Report left = gather(children);
  std::printf("  until all have left            %8.2f s, hub %.2f cpu s, %.1f MB sent, lost %llu, false alarms %u\n",
              since(leaving), cpu_seconds() - cpu, 1e-6 * static_cast<double>(hub->counters().bytes_sent - sent),
              static_cast<unsigned long long>(hub->counters().lost), left.alarms);
  say_trouble(left, "leaving");
  hub.reset();
  for (const Child& child : children) ::waitpid(child.pid, nullptr, 0);
  return left.failed + left.alarms == 0 ? 0 : 1;
}

/// One worker's connection to the rendezvous, and what it has heard.
struct Reporter {
  std::unique_ptr<elastic::RendezvousClient> client;
  elastic::Reports reports;
  std::uint64_t generation = 0;
  std::uint64_t settled = 0;
  std::string ending;
};

/// Hears what has come; false at the end of the job.
bool hear(Reporter& reporter, Instant deadline) {
  elastic::Message message;
  while (reporter.client->next(message, deadline)) {
    if (message.kind == elastic::MessageKind::kEnd || message.kind == elastic::MessageKind::kBreak) {
      reporter.ending = message.text;
      return false;
    }
    if (message.kind == elastic::MessageKind::kGo) reporter.generation = message.generation;
    if (message.kind == elastic::MessageKind::kSettled) reporter.settled += message.operations.size();
    if (deadline > Clock::now()) return true;
  }
  return true;
}

std::vector<Reporter> enter(const Options& options, std::uint32_t first, std::uint32_t last, std::uint16_t port) {
  std::vector<Reporter> reporters(last - first);
  std::vector<std::thread> threads;
  std::atomic<std::uint32_t> failed = 0;
  for (std::uint32_t i = first; i < last; ++i) {
    threads.emplace_back([&, i] {
      elastic::RendezvousClientOptions client{"127.0.0.1", port, kSecret, {}, seconds(options.dead_after_s)};
      const Member member = member_of(options, i);
      client.enter.kind = elastic::MessageKind::kEnter;
      client.enter.rank = i;
      client.enter.pid = member.pid;
      client.enter.host = member.host_name;
      client.enter.is_elastic = true;
      client.enter.workers = options.workers;
      Reporter& reporter = reporters[i - first];
      try {
        reporter.client = std::make_unique<elastic::RendezvousClient>(client, Clock::now() + std::chrono::seconds(60));
        const Instant deadline = Clock::now() + std::chrono::seconds(60);
        while (reporter.generation == 0 && Clock::now() < deadline && hear(reporter, deadline)) {
        }
        if (reporter.generation == 0) ++failed;
      } catch (const Error& error) {
        reporter.ending = error.what();
        ++failed;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  if (failed > 0) {
    const auto first_failed = std::ranges::find(reporters, std::uint64_t{0}, &Reporter::generation);
    const bool is_known = first_failed != reporters.end();
    die(std::to_string(failed) + " workers did not get into a generation: " + (is_known ? first_failed->ending : ""));
  }
  return reporters;
}

void report(const Options& options, Reporter& reporter, Instant now) {
  elastic::Message message;
  message.kind = elastic::MessageKind::kCompleted;
  message.generation = reporter.generation;
  message.operations = reporter.reports.take(now);
  message.counts.assign(message.operations.size(), options.workers);
  reporter.client->send(std::move(message));
}

/// An operation is complete in every worker `rate` times a second; each says so when it is due.
Report send_reports(const Options& options, std::vector<Reporter>& reporters) {
  constexpr Duration kTick = std::chrono::milliseconds(5);
  Report result;
  const auto rounds = static_cast<std::uint64_t>(options.seconds * options.rate);
  const Instant begin = Clock::now();
  std::uint64_t round = 0;
  for (Instant now = begin; round < rounds; now += kTick) {
    std::this_thread::sleep_until(now);
    const bool is_complete = since(begin) >= static_cast<double>(round) / options.rate;
    for (Reporter& reporter : reporters) {
      if (is_complete) reporter.reports.add({0, round});
      const bool is_due = Clock::now() >= reporter.reports.due(options.workers);
      if (is_due || (is_complete && options.is_alone)) report(options, reporter, Clock::now());
    }
    if (is_complete) ++round;
  }
  for (Reporter& reporter : reporters) {
    if (!reporter.reports.empty()) report(options, reporter, Clock::now());
  }
  const Instant patience = Clock::now() + std::chrono::seconds(20);
  for (Reporter& reporter : reporters) {
    bool lives = hear(reporter, {});
    while (lives && reporter.settled < rounds && Clock::now() < patience) lives = hear(reporter, patience);
    if (!lives) ++result.alarms;
    if (reporter.settled < rounds) ++result.failed;
  }
  std::snprintf(result.first, sizeof(result.first), "operations were not settled, or the job ended");
  return result;
}

int run_rendezvous(const Options& options) {
  const auto children =
      fork_children(options, options.workers, [&](std::uint32_t first, std::uint32_t last, int in, int out) {
        std::vector<Reporter> reporters = enter(options, first, last, read_all<std::uint16_t>(in));
        write_all(out, Report{});
        read_all<char>(in);
        write_all(out, send_reports(options, reporters));
        read_all<char>(in);
        for (Reporter& reporter : reporters) {
          elastic::Message goodbye;
          goodbye.kind = elastic::MessageKind::kLeave;
          goodbye.generation = reporter.generation;
          reporter.client->send(goodbye);
        }
        reporters.clear();
        write_all(out, Report{});
      });
  elastic::RendezvousServerOptions server;
  server.listen_host = "127.0.0.1";
  server.secret = kSecret;
  server.job.workers = options.workers;
  server.job.heartbeat = seconds(options.heartbeat_s);
  server.job.dead_after = seconds(options.dead_after_s);
  elastic::RendezvousServer rendezvous(server);
  const Instant begin = Clock::now();
  for (const Child& child : children) write_all(child.commands, rendezvous.port());
  gather(children);
  std::printf("rendezvous, %u workers\n  until all are in a generation  %8.2f s\n", options.workers, since(begin));
  std::fflush(stdout);
  const Instant reporting = Clock::now();
  const double cpu = cpu_seconds();
  for (const Child& child : children) write_all(child.commands, kLeave);
  const Report done = gather(children);
  std::printf("  %u operations a second, for %.0f s: %.2f s until all is settled, %.1f %% of a core, alarms %u\n",
              options.rate, options.seconds, since(reporting), 100 * (cpu_seconds() - cpu) / since(reporting),
              done.alarms);
  if (done.failed > 0) say_trouble(done, "reporting");
  for (const Child& child : children) write_all(child.commands, kLeave);
  gather(children);
  const bool well = rendezvous.wait(Clock::now() + std::chrono::seconds(30)) && rendezvous.ended_well();
  std::printf("  the job has ended%s\n", well ? " well" : ", but not well");
  for (const Child& child : children) ::waitpid(child.pid, nullptr, 0);
  return done.failed + done.alarms == 0 && well ? 0 : 1;
}

Options parse(int argc, char** argv) {
  Options options;
  const std::string_view mode = argc > 1 ? argv[1] : "";
  if ((mode != "hub" && mode != "rendezvous") || argc % 2 != 0) {
    die("usage: control_plane hub|rendezvous [--workers N] [--servers N] [--hosts N] [--lanes N] [--processes N]\n"
        "       [--seconds S] [--heartbeat S] [--dead-after S] [--rate N]\n"
        "       [--alone 1]");
  }
  options.is_rendezvous = mode == "rendezvous";
  for (int i = 2; i + 1 < argc; i += 2) {
    const std::string_view name = argv[i];
    const double value = std::atof(argv[i + 1]);
    const auto count = static_cast<std::uint32_t>(value);
    if (value <= 0 && name != "--servers") die(std::string(name) + " takes a number above 0, not " + argv[i + 1]);
    if (name == "--workers")
      options.workers = count;
    else if (name == "--servers")
      options.servers = count;
    else if (name == "--hosts")
      options.hosts = count;
    else if (name == "--lanes")
      options.lanes = count;
    else if (name == "--processes")
      options.processes = count;
    else if (name == "--seconds")
      options.seconds = value;
    else if (name == "--heartbeat")
      options.heartbeat_s = value;
    else if (name == "--dead-after")
      options.dead_after_s = value;
    else if (name == "--rate")
      options.rate = count;
    else if (name == "--alone")
      options.is_alone = count != 0;
    else
      die("there is no option " + std::string(name));
  }
  options.hosts = std::min(options.hosts, options.workers);
  return options;
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = parse(argc, argv);
  raise_limit();
  return options.is_rendezvous ? run_rendezvous(options) : run_hub(options);
}
