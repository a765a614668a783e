// What one host allows for ranks whose tensors lie in ordinary memory, which no other process maps: loops that do
// nothing but the copies and sums that an all-reduce needs, without messages, errors or other sizes.
//
//   private_memory_bench [--ranks 2] [--mb 25] [--chunk-kb 256] [--window 3] [--rounds 30]
//
// Rows, in milliseconds, the slowest rank's best and median round:
//   staged    each rank copies what others sum into shared memory, sums its range, and copies the other results out;
//             the shared memory of --window chunks is used again and again
//   streamed  the same, with what others read written past the caches (better where cores share none)
//   read      nothing is staged: each rank reads the others' memory with process_vm_readv(2), sums in its own,
//             and reads the other results from where they were summed
// once with 4 KB pages, once with huge pages (madvise), which the kernel pins faster and numpy asks for from 4 MB on.
// Data is written anew before each round. The last result of each way is checked.

#include <sched.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "core/copy.h"
#include "server/reduce.h"

namespace herring {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::uint32_t kMaxRanks = 16;
constexpr std::size_t kHugePage = 2 << 20;

struct Settings {
  std::uint32_t ranks = 2;
  std::size_t bytes = 25 << 20;
  std::size_t chunk = 256 << 10;
  std::size_t window = 3;
  std::size_t rounds = 30;
};

/// One line a rank: what the others may read by now, counted in chunks since the beginning.
struct alignas(64) Progress {
  std::atomic<std::uint64_t> staged;
  std::atomic<std::uint64_t> summed;
  std::atomic<std::uint64_t> taken;
  std::atomic<std::uint64_t> finished;  // Rounds.
};

enum class Way { kStaged, kStreamed, kRead };

const char* name(Way way) { return way == Way::kStaged ? "staged" : way == Way::kStreamed ? "streamed" : "read"; }

struct Board {
  Progress ranks[kMaxRanks];
  pid_t pids[kMaxRanks];
  std::byte* memory[kMaxRanks];  // In that rank's own address space.
  double milliseconds[kMaxRanks];
};

[[noreturn]] void stop(const std::string& what) {
  std::fprintf(stderr, "private_memory_bench: %s: %s\n", what.c_str(), std::strerror(errno));
  std::_Exit(1);
}

std::span<std::byte> map(std::size_t bytes, int flags) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) stop("mmap");
  return {static_cast<std::byte*>(memory), bytes};
}

void wait_for(const std::atomic<std::uint64_t>& counter, std::uint64_t value) {
  for (int i = 0; counter.load(std::memory_order_acquire) < value; ++i) {
    if (i > 200) sched_yield();
  }
}

/// A rank's part in the loops. Rank r sums the r-th share of the bytes.
class Rank {
 public:
  Rank(const Settings& settings, Board& board, std::span<std::byte> staging, std::uint32_t rank, bool huge)
      : settings_(settings),
        board_(board),
        staging_(staging),
        rank_(rank),
        share_(settings.bytes / settings.ranks / 64 * 64),
        room_(map(settings.bytes + kHugePage, MAP_PRIVATE)),
        scratch_(map(settings.chunk * settings.ranks, MAP_PRIVATE)) {
    const auto start = reinterpret_cast<std::uintptr_t>(room_.data());
    memory_ = {room_.data() + (kHugePage - start % kHugePage) % kHugePage, settings.bytes};
    madvise(memory_.data(), memory_.size(), huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    for (std::size_t i = 0; i < values().size(); ++i) input_.push_back(value(i, rank));
    fill();
    board_.memory[rank] = memory_.data();
    board_.pids[rank] = getpid();
    spec_.dtype = DataType::kFloat32;
    spec_.op = ReduceOp::kSum;
    finish_round();
  }

  void run(Way way) {
    std::vector<double> times;
    for (std::size_t round = 0; round < settings_.rounds; ++round) {
      fill();
      finish_round();
      const auto start = Clock::now();
      all_reduce(way);
      finish_round();
      times.push_back(std::chrono::duration<double, std::milli>(Clock::now() - start).count());
    }
    check();
    std::sort(times.begin(), times.end());
    report(way, times.front(), times[times.size() / 2]);
  }

 private:
  std::size_t begin_of(std::uint32_t rank) const { return rank * share_; }
  std::size_t bytes_of(std::uint32_t rank) const {
    return rank + 1 == settings_.ranks ? settings_.bytes - begin_of(rank) : share_;
  }
  /// Chunk c of a rank's share; empty past its end.
  std::span<std::byte> chunk_of(std::span<std::byte> memory, std::uint32_t rank, std::size_t c) const {
    const std::size_t at = std::min(c * settings_.chunk, bytes_of(rank));
    return memory.subspan(begin_of(rank) + at, std::min(settings_.chunk, bytes_of(rank) - at));
  }
  /// Where rank `from` keeps chunk c of the share of rank `of`.
  std::span<std::byte> staged(std::uint32_t from, std::uint32_t of, std::size_t c) const {
    const std::size_t slot = (from * settings_.window + c % settings_.window) * settings_.ranks + of;
    return staging_.subspan(slot * settings_.chunk, chunk_of(memory_, of, c).size());
  }
  /// Nobody needs any more what is in the slot that chunk c goes to.
  void wait_for_room(std::atomic<std::uint64_t> Progress::*counter, std::size_t c) {
    if (done_ + c < settings_.window) return;
    for (std::uint32_t other = 0; other < settings_.ranks; ++other) {
      if (other != rank_) wait_for(board_.ranks[other].*counter, done_ + c + 1 - settings_.window);
    }
  }

  void all_reduce(Way way) {
    const std::size_t chunks = (bytes_of(settings_.ranks - 1) + settings_.chunk - 1) / settings_.chunk;
    if (way == Way::kRead) {
      read_and_sum(chunks);
    } else {
      stage_and_sum(chunks, way);
    }
    done_ += chunks;
  }

  void stage_and_sum(std::size_t chunks, Way way) {
    Progress& mine = board_.ranks[rank_];
    for (std::size_t step = 0; step < chunks + 2; ++step) {
      if (step < chunks) {
        stage(step, way);
        mine.staged.store(done_ + step + 1, std::memory_order_release);
      }
      if (step >= 1 && step < chunks + 1) {
        sum(step - 1, way);
        mine.summed.store(done_ + step, std::memory_order_release);
      }
      if (step >= 2) {
        take_results(step - 2);
        mine.taken.store(done_ + step - 1, std::memory_order_release);
      }
    }
  }

  /// The barriers around a round say that the others' data is there, and keep it until all have read.
  void read_and_sum(std::size_t chunks) {
    Progress& mine = board_.ranks[rank_];
    for (std::size_t step = 0; step < chunks + 1; ++step) {
      if (step < chunks) {
        const std::span<std::byte> own = chunk_of(memory_, rank_, step);
        std::vector<std::span<const std::byte>> inputs;
        for (std::uint32_t other = 0; other < settings_.ranks; ++other) {
          const std::span<std::byte> copy = scratch_.subspan(other * settings_.chunk, own.size());
          if (other != rank_) read(other, own, copy);
          inputs.emplace_back(other == rank_ ? own : copy);
        }
        const std::span<std::byte> outputs[] = {own};
        if (!own.empty()) server::reduce(spec_, inputs, outputs);
        mine.summed.store(done_ + step + 1, std::memory_order_release);
      }
      for (std::uint32_t other = 0; step >= 1 && other < settings_.ranks; ++other) {
        if (other == rank_) continue;
        // Whoever summed it has read what lies in its place here.
        wait_for(board_.ranks[other].summed, done_ + step);
        const std::span<std::byte> result = chunk_of(memory_, other, step - 1);
        read(other, result, result);
      }
    }
    mine.staged.store(done_ + chunks, std::memory_order_release);
    mine.taken.store(done_ + chunks, std::memory_order_release);
  }

  void stage(std::size_t c, Way way) {
    wait_for_room(&Progress::summed, c);
    for (std::uint32_t other = 0; other < settings_.ranks; ++other) {
      if (other != rank_) copy_bytes(chunk_of(memory_, other, c), staged(rank_, other, c), way == Way::kStreamed);
    }
  }

  void sum(std::size_t c, Way way) {
    const std::span<std::byte> own = chunk_of(memory_, rank_, c);
    std::vector<std::span<const std::byte>> inputs;
    for (std::uint32_t other = 0; other < settings_.ranks; ++other) {
      if (other == rank_) {
        inputs.emplace_back(own);
        continue;
      }
      wait_for(board_.ranks[other].staged, done_ + c + 1);
      inputs.emplace_back(staged(other, rank_, c));
    }
    wait_for_room(&Progress::taken, c);
    if (own.empty()) return;
    std::vector<std::span<std::byte>> outputs = {own};
    if (way != Way::kStreamed) outputs.push_back(staged(rank_, rank_, c));
    server::reduce(spec_, inputs, outputs);
    if (way == Way::kStreamed) copy_bytes(own, staged(rank_, rank_, c), true);
  }

  /// to[:] = what rank `other` has where this one has `here`.
  void read(std::uint32_t other, std::span<const std::byte> here, std::span<std::byte> to) {
    if (to.empty()) return;
    const iovec local{to.data(), to.size()};
    const iovec remote{board_.memory[other] + (here.data() - memory_.data()), to.size()};
    if (process_vm_readv(board_.pids[other], &local, 1, &remote, 1, 0) != static_cast<ssize_t>(to.size())) {
      stop("process_vm_readv");
    }
  }

  void take_results(std::size_t c) {
    for (std::uint32_t other = 0; other < settings_.ranks; ++other) {
      if (other == rank_) continue;
      wait_for(board_.ranks[other].summed, done_ + c + 1);
      copy_bytes(staged(other, other, c), chunk_of(memory_, other, c));
    }
  }

  void finish_round() {
    board_.ranks[rank_].finished.store(++rounds_, std::memory_order_release);
    for (std::uint32_t other = 0; other < settings_.ranks; ++other) wait_for(board_.ranks[other].finished, rounds_);
  }

  std::span<float> values() const { return {reinterpret_cast<float*>(memory_.data()), memory_.size() / sizeof(float)}; }
  static float value(std::size_t element, std::uint32_t rank) { return static_cast<float>((element + rank) % 1000); }
  void fill() { std::memcpy(memory_.data(), input_.data(), memory_.size()); }
  void check() const {
    for (std::size_t i = 0; i < values().size(); ++i) {
      float expected = 0;
      for (std::uint32_t rank = 0; rank < settings_.ranks; ++rank) expected += value(i, rank);
      if (values()[i] == expected) continue;
      std::fprintf(stderr, "private_memory_bench: element %zu is %g, not %g\n", i, values()[i], expected);
      std::_Exit(1);
    }
  }

  void report(Way way, double best, double median) {
    board_.milliseconds[rank_] = best;
    finish_round();
    const double slowest_best = *std::max_element(board_.milliseconds, board_.milliseconds + settings_.ranks);
    finish_round();
    board_.milliseconds[rank_] = median;
    finish_round();
    const double slowest = *std::max_element(board_.milliseconds, board_.milliseconds + settings_.ranks);
    if (rank_ == 0) std::printf("%-8s best %8.3f ms  median %8.3f ms\n", name(way), slowest_best, slowest);
    finish_round();
  }

  const Settings& settings_;
  Board& board_;
  std::span<std::byte> staging_;  // Of all ranks, shared.
  std::uint32_t rank_;
  std::size_t share_;
  std::span<std::byte> room_;
  std::span<std::byte> scratch_;
  std::span<std::byte> memory_;
  std::vector<float> input_;
  ReduceSpec spec_;
  std::uint64_t rounds_ = 0;
  std::uint64_t done_ = 0;
};

int run(const Settings& settings, bool huge) {
  auto& board = *reinterpret_cast<Board*>(map(sizeof(Board), MAP_SHARED).data());
  const std::span<std::byte> staging =
      map(settings.ranks * settings.window * settings.ranks * settings.chunk, MAP_SHARED | MAP_POPULATE);
  std::printf("%u ranks, %.1f MB, chunks of %zu KB, %s pages\n", settings.ranks,
              static_cast<double>(settings.bytes) / (1 << 20), settings.chunk >> 10, huge ? "huge" : "4 KB");
  std::fflush(stdout);
  for (std::uint32_t rank = 0; rank < settings.ranks; ++rank) {
    const pid_t pid = fork();
    if (pid < 0) stop("fork");
    if (pid > 0) continue;
    Rank loop(settings, board, staging, rank, huge);
    for (const Way way : {Way::kStaged, Way::kStreamed, Way::kRead}) loop.run(way);
    std::fflush(stdout);
    std::_Exit(0);
  }
  int failed = 0;
  for (std::uint32_t rank = 0; rank < settings.ranks; ++rank) {
    int status = 0;
    wait(&status);
    if (status != 0) failed = 1;
  }
  return failed;
}

int main(int argc, char** argv) {
  Settings settings;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    const double value = std::atof(argv[i + 1]);
    if (name == "--ranks" && value >= 2 && value <= kMaxRanks) {
      settings.ranks = static_cast<std::uint32_t>(value);
    } else if (name == "--mb" && value > 0) {
      settings.bytes = static_cast<std::size_t>(value * (1 << 20)) / 64 * 64;
    } else if (name == "--chunk-kb" && value >= 4) {
      settings.chunk = static_cast<std::size_t>(value) << 10;
    } else if (name == "--window" && value >= 3) {
      settings.window = static_cast<std::size_t>(value);
    } else if (name == "--rounds" && value >= 1) {
      settings.rounds = static_cast<std::size_t>(value);
    } else {
      std::fprintf(stderr, "private_memory_bench: %s %s is not understood; see the top of its source\n", argv[i],
                   argv[i + 1]);
      return 2;
    }
  }
  const int failed = run(settings, false);
  return std::max(failed, run(settings, true));
}

}  // namespace
}  // namespace herring

int main(int argc, char** argv) { return herring::main(argc, argv); }
