// All-reduce among the ranks of one host: what shared memory allows, and what the product's path makes of it.
//
//   intra_node_bench [--ranks 2,4] [--part-kb 512] [--window 3] [--spin-us 20] [--inline-bytes 16384] [--seconds 1]
//                    [--mb 25] [--private-only 0] [--quantile 0.5]  (0: the best round, for a machine that has other
//                    things to do)
//
// Columns, in milliseconds, the slowest rank's median:
//   limit    a loop that does nothing but a barrier and an n-ary sum of this rank's range, written to all slots
//   inplace  Neighborhood + Engine + one thread a rank, on memory of the arena, one part
//   private  the same on ordinary memory, in parts of --part-kb with --window of them in flight; ordinary stores alone
// Above each table: how long a cache line takes from the first core to the second and back, which in a virtual machine
// changes while it runs. Every result is checked. algbw = bytes / time.

#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/copy.h"
#include "intra_node/engine.h"
#include "intra_node/neighborhood.h"
#include "server/reduce.h"

namespace herring::intra_node {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::uint32_t kMaxRanks = 64;
constexpr std::uint64_t kArenaBytes = std::uint64_t{4} << 30;
constexpr std::uint32_t kRingBytes = 1 << 20;
constexpr std::size_t kFlushBefore = 32 << 10;  // Longer actions do not hold back what was said before them.

struct Settings {
  std::vector<std::uint32_t> ranks{2, 4};
  std::size_t part_bytes = 512 << 10;
  std::uint32_t window = 3;
  std::uint32_t spin_us = 20;
  std::uint32_t inline_bytes = 16 << 10;
  double seconds = 1;
  double quantile = 0.5;
  bool private_only = false;
  std::vector<std::size_t> megabytes{1, 25, 100};
};

/// What the processes of one run share beside the product's memory: results, and the barrier of the limit.
struct Board {
  std::atomic<std::uint32_t> arrived;
  std::atomic<std::uint32_t> round;
  double milliseconds[kMaxRanks];
};

void barrier(Board& board, std::uint32_t ranks) {
  const std::uint32_t round = board.round.load();
  if (board.arrived.fetch_add(1) + 1 == ranks) {
    board.arrived.store(0);
    board.round.store(round + 1);
    return;
  }
  for (int i = 0; board.round.load() == round; ++i) {
    if (i > 200) sched_yield();
  }
}

double at_quantile(std::vector<double> values, double quantile) {
  const auto at = static_cast<std::ptrdiff_t>(static_cast<double>(values.size()) * quantile);
  std::nth_element(values.begin(), values.begin() + at, values.end());
  return values[static_cast<std::size_t>(at)];
}

template <class Body>
double measure(const Settings& settings, std::size_t bytes, Body body) {
  // The number of rounds must be the same on all ranks: it follows from the size alone.
  const double guess_s = 20e-6 + static_cast<double>(bytes) / 2e9;
  const auto rounds = static_cast<std::size_t>(std::clamp(settings.seconds / guess_s, 7.0, 20000.0));
  for (std::size_t i = 0; i < 3; ++i) body();
  std::vector<double> times;
  for (std::size_t i = 0; i < rounds; ++i) {
    const auto start = Clock::now();
    body();
    times.push_back(std::chrono::duration<double, std::milli>(Clock::now() - start).count());
  }
  return at_quantile(std::move(times), settings.quantile);
}

std::vector<std::vector<ByteSpan>> even_shares(std::size_t bytes, std::uint32_t ranks) {
  std::vector<std::vector<ByteSpan>> owned(ranks);
  const std::size_t unit = 64;
  std::size_t at = 0;
  for (std::uint32_t i = 0; i < ranks; ++i) {
    const std::size_t end = i + 1 == ranks ? bytes : std::min(bytes, bytes / unit * (i + 1) / ranks * unit);
    if (end > at) owned[i].push_back({at, end - at});
    at = end;
  }
  return owned;
}

/// One rank of the product's path, on the calling thread.
class RankLoop {
 public:
  RankLoop(const Settings& settings, std::uint32_t rank, std::uint32_t ranks, std::uint64_t token)
      : settings_(settings),
        ranks_(ranks),
        neighborhood_({rank, ranks, token, kArenaBytes, kRingBytes}, Clock::now() + std::chrono::seconds(20)),
        engine_(config(settings, rank, ranks, neighborhood_)),
        backlog_(ranks),
        crowded_(ranks > std::thread::hardware_concurrency()) {
    for (std::uint32_t i = 0; i < ranks; ++i) members_.push_back(i);
  }

  Neighborhood& neighborhood() { return neighborhood_; }

  void all_reduce(std::span<std::byte> memory, std::size_t part_bytes) {
    const std::uint64_t op = next_op_++;
    const auto parts = static_cast<std::uint32_t>((memory.size() + part_bytes - 1) / part_bytes);
    std::uint32_t submitted = 0;
    done_ = 0;
    while (done_ < parts) {
      bool moved = false;
      while (submitted < parts && submitted - done_ < settings_.window) {
        const std::size_t at = submitted * part_bytes;
        const auto part = memory.subspan(at, std::min(part_bytes, memory.size() - at));
        submit(op, submitted++, part, memory.size());
        act();
        moved = true;
      }
      if (!moved && !step()) wait();
    }
  }

  void finish() {
    const auto deadline = Clock::now() + std::chrono::seconds(10);
    while (!engine_.is_idle() && Clock::now() < deadline) {
      if (!step()) wait();
    }
  }

 private:
  static EngineConfig config(const Settings& settings, std::uint32_t rank, std::uint32_t ranks, Neighborhood& n) {
    EngineConfig config;
    config.local_rank = rank;
    config.local_size = ranks;
    config.inline_bytes = settings.inline_bytes;
    for (std::uint32_t i = 0; i < ranks; ++i) config.arenas.push_back(n.arena(i));
    config.allocate = [&n](std::size_t bytes) { return n.allocate(bytes); };
    config.deallocate = [&n](std::span<std::byte> memory) { n.deallocate(memory); };
    return config;
  }

  void submit(std::uint64_t op, std::uint32_t part, std::span<std::byte> memory, std::size_t op_bytes) {
    LocalOperation operation;
    operation.key = {{0}, op, part};
    operation.descriptor.op_bytes = op_bytes;
    operation.descriptor.part_bytes = memory.size();
    operation.members = members_;
    operation.world_ranks = members_;
    operation.owned = even_shares(memory.size(), ranks_);
    operation.memory = memory;
    operation.timeout = std::chrono::seconds(30);
    engine_.submit(Clock::now(), operation);
  }

  bool step() {
    const Instant now = Clock::now();
    bool moved = false;
    Neighborhood::Message message;
    for (int i = 0; i < 64 && neighborhood_.receive(message); ++i) {
      engine_.on_message(now, message.from, message.bytes);
      moved = true;
    }
    if (now >= engine_.next_deadline()) engine_.on_tick(now);
    return act() || moved;
  }

  bool act() {
    bool moved = false;
    for (std::uint32_t to = 0; to < ranks_; ++to) {
      while (!backlog_[to].empty() && neighborhood_.send(to, backlog_[to].front()).is_ok()) backlog_[to].pop_front();
    }
    for (;;) {
      actions_.clear();
      engine_.take_actions(actions_);
      if (actions_.empty()) break;
      moved = true;
      for (LocalAction& action : actions_) execute(action);
    }
    neighborhood_.flush();
    return moved;
  }

  void execute(LocalAction& action) {
    if (auto* send = std::get_if<SendLocal>(&action)) {
      if (!backlog_[send->to].empty() || !neighborhood_.send(send->to, send->bytes).is_ok()) {
        backlog_[send->to].push_back(std::move(send->bytes));
      }
    } else if (const auto* copy = std::get_if<CopyAction>(&action)) {
      if (copy->from.size() >= kFlushBefore) neighborhood_.flush();
      copy_bytes(copy->from, copy->to, copy->bypass_cache);
    } else if (const auto* reduce = std::get_if<ReduceLocal>(&action)) {
      if (reduce->inputs.front().size() >= kFlushBefore) neighborhood_.flush();
      server::reduce(reduce->spec, reduce->inputs, reduce->outputs);
    } else if (const auto* complete = std::get_if<CompleteLocal>(&action)) {
      complete->status.or_throw();
      ++done_;
    }
  }

  /// Looks for a message for a while, then sleeps. With more ranks than cores, looking means letting others run.
  void wait() {
    const auto until = Clock::now() + std::chrono::microseconds(settings_.spin_us);
    do {
      if (step()) return;
      if (crowded_) sched_yield();
    } while (Clock::now() < until);
    if (!neighborhood_.prepare_sleep()) return;
    pollfd fd{neighborhood_.doorbell_fd(), POLLIN, 0};
    (void)poll(&fd, 1, 1000);
    neighborhood_.end_sleep();
  }

  const Settings& settings_;
  const std::uint32_t ranks_;
  Neighborhood neighborhood_;
  Engine engine_;
  std::vector<std::deque<std::vector<std::byte>>> backlog_;
  const bool crowded_;
  std::vector<std::uint32_t> members_;
  LocalActions actions_;
  std::uint64_t next_op_ = 0;
  std::uint32_t done_ = 0;
};

void fill(std::span<float> values, std::uint32_t rank) {
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>((i + rank) % 1000);
}

void verify(std::span<const float> values, std::uint32_t ranks) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    float sum = 0;
    for (std::uint32_t rank = 0; rank < ranks; ++rank) sum += static_cast<float>((i + rank) % 1000);
    if (values[i] != sum) throw Error(Code::kInternal, "wrong sum at element " + std::to_string(i));
  }
}

/// Runs body(rank) in a process for each rank; returns the slowest rank's figure.
template <class Body>
double run_ranks(Board& board, std::uint32_t ranks, Body body) {
  std::vector<pid_t> pids;
  for (std::uint32_t rank = 0; rank < ranks; ++rank) {
    const pid_t pid = fork();
    if (pid == 0) {
      alarm(300);
      try {
        board.milliseconds[rank] = body(rank);
        _exit(0);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %u: %s\n", rank, error.what());
        _exit(1);
      }
    }
    pids.push_back(pid);
  }
  bool good = true;
  for (const pid_t pid : pids) {
    int status = 0;
    good &= waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0;
  }
  if (!good) throw Error(Code::kInternal, "a rank failed");
  return *std::max_element(board.milliseconds, board.milliseconds + ranks);
}

template <class T>
std::span<T> shared_memory(std::size_t count) {
  void* memory = mmap(nullptr, count * sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw Error(Code::kTransport, "mmap failed");
  return {static_cast<T*>(memory), count};
}

double limit(const Settings& settings, Board& board, std::uint32_t ranks, std::size_t bytes) {
  const auto slots = shared_memory<std::byte>(bytes * ranks);
  const double result = run_ranks(board, ranks, [&](std::uint32_t rank) {
    const auto slot = [&](std::uint32_t i) { return slots.subspan(i * bytes, bytes); };
    std::memset(slot(rank).data(), 0, bytes);
    const ByteSpan mine = even_shares(bytes, ranks)[rank].at(0);
    std::vector<std::span<const std::byte>> inputs;
    std::vector<std::span<std::byte>> outputs;
    for (std::uint32_t i = 0; i < ranks; ++i) {
      inputs.emplace_back(slot(i).subspan(mine.offset, mine.bytes));
      outputs.emplace_back(slot(i).subspan(mine.offset, mine.bytes));
    }
    return measure(settings, bytes, [&] {
      barrier(board, ranks);
      server::reduce({}, inputs, outputs);
      barrier(board, ranks);
    });
  });
  munmap(slots.data(), slots.size());
  return result;
}

double product(const Settings& settings, Board& board, std::uint32_t ranks, std::size_t bytes, bool in_place) {
  std::random_device device;
  const std::uint64_t token = std::uint64_t{device()} << 32 | device();
  return run_ranks(board, ranks, [&](std::uint32_t rank) {
    RankLoop loop(settings, rank, ranks, token);
    std::vector<std::byte> own(in_place ? 0 : bytes);
    const std::span<std::byte> memory = in_place ? loop.neighborhood().allocate(bytes) : std::span(own);
    const std::span<float> values(reinterpret_cast<float*>(memory.data()), bytes / sizeof(float));
    const std::size_t part = in_place ? bytes : settings.part_bytes;
    fill(values, rank);
    loop.all_reduce(memory, part);
    verify(values, ranks);
    std::ranges::fill(values, 0.0f);  // Sums of sums would run into infinity, whose speed is not the question.
    const double result = measure(settings, bytes, [&] { loop.all_reduce(memory, part); });
    loop.finish();
    const NeighborhoodStats& stats = loop.neighborhood().stats();
    if (std::getenv("BENCH_STATS") != nullptr) {
      std::fprintf(stderr, "  rank %u: sent %lu, doorbells %lu, asleep %lu\n", rank, stats.messages_sent,
                   stats.doorbells_rung, stats.times_asleep);
    }
    return result;
  });
}

/// Binds the calling thread to the which-th of the cores it may use; false where there are fewer.
bool bind(std::size_t which) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  sched_getaffinity(0, sizeof(allowed), &allowed);
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (!CPU_ISSET(core, &allowed) || which-- > 0) continue;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(core, &one);
    return sched_setaffinity(0, sizeof(one), &one) == 0;
  }
  return false;
}

/// Nanoseconds for a cache line from the first core to the second and back; 0 on one core.
double round_trip_ns() {
  constexpr int kRounds = 100'000;
  std::atomic<int> turn{0};
  bool has_two = true;
  double nanoseconds = 0;
  std::thread second([&] {
    has_two = bind(1);
    turn = 1;
    for (int i = 0; has_two && i < kRounds; ++i) {
      while (turn.load() != 2) {
      }
      turn = 1;
    }
  });
  std::thread first([&] {
    bind(0);
    while (turn.load() != 1) sched_yield();
    if (!has_two) return;
    const auto start = Clock::now();
    for (int i = 0; i < kRounds; ++i) {
      turn = 2;
      while (turn.load() != 1) {
      }
    }
    nanoseconds = std::chrono::duration<double, std::nano>(Clock::now() - start).count() / kRounds;
  });
  first.join();
  second.join();
  return nanoseconds;
}

void table(const Settings& settings, Board& board, std::uint32_t ranks) {
  std::printf("\n%u ranks, float32 sum, part %zu KB, window %u, spin %u us; a cache line there and back: %.0f ns\n",
              ranks, settings.part_bytes >> 10, settings.window, settings.spin_us, round_trip_ns());
  std::printf("%10s %10s %10s %8s %10s %12s\n", "bytes", "limit ms", "inplace ms", "/limit", "private ms",
              "algbw GB/s");
  for (const std::size_t megabytes : settings.megabytes) {
    const std::size_t bytes = megabytes * 1000 * 1000;
    const double lower = settings.private_only ? 0 : limit(settings, board, ranks, bytes);
    const double in_place = settings.private_only ? 0 : product(settings, board, ranks, bytes, true);
    const double staged = product(settings, board, ranks, bytes, false);
    std::printf("%8zuMB %10.3f %10.3f %8.2f %10.3f %12.2f\n", megabytes, lower, in_place, in_place / lower, staged,
                static_cast<double>(bytes) / staged / 1e6);
    std::fflush(stdout);
  }
  if (settings.megabytes.size() == 1) return;
  for (const std::size_t bytes : {8, 1024, 4096, 16384, 65536}) {
    const double in_place = product(settings, board, ranks, bytes, true);
    const double staged = product(settings, board, ranks, bytes, false);
    std::printf("%9zuB %10s %10.4f %8s %10.4f\n", bytes, "", in_place, "", staged);
    std::fflush(stdout);
  }
}

Settings parse(int count, char** arguments) {
  Settings settings;
  for (int i = 1; i + 1 < count; i += 2) {
    const std::string name = arguments[i];
    const double value = std::atof(arguments[i + 1]);
    if (name == "--ranks") {
      settings.ranks.clear();
      for (const char* at = arguments[i + 1]; *at != 0; at += *at == ',' ? 1 : 0) {
        char* end = nullptr;
        settings.ranks.push_back(static_cast<std::uint32_t>(std::strtoul(at, &end, 10)));
        if (end == at || settings.ranks.back() < 2 || settings.ranks.back() > kMaxRanks) std::exit(2);
        at = end;
      }
    } else if (name == "--part-kb") {
      settings.part_bytes = static_cast<std::size_t>(value) << 10;
    } else if (name == "--private-only") {
      settings.private_only = value != 0;
    } else if (name == "--mb") {
      settings.megabytes = {static_cast<std::size_t>(value)};
    } else if (name == "--window") {
      settings.window = static_cast<std::uint32_t>(value);
    } else if (name == "--spin-us") {
      settings.spin_us = static_cast<std::uint32_t>(value);
    } else if (name == "--inline-bytes") {
      settings.inline_bytes = static_cast<std::uint32_t>(value);
    } else if (name == "--quantile" && value >= 0 && value < 1) {
      settings.quantile = value;
    } else if (name == "--seconds") {
      settings.seconds = value;
    } else {
      std::fprintf(stderr, "unknown option %s\n", name.c_str());
      std::exit(2);
    }
  }
  return settings;
}

}  // namespace
}  // namespace herring::intra_node

int main(int count, char** arguments) {
  using namespace herring::intra_node;
  const Settings settings = parse(count, arguments);
  try {
    auto& board = shared_memory<Board>(1).front();
    for (const std::uint32_t ranks : settings.ranks) table(settings, board, ranks);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "intra_node_bench: %s\n", error.what());
    return 1;
  }
  return 0;
}
