#include "intra_node/neighborhood.h"

#include <dirent.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <functional>
#include <new>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "intra_node/meeting.h"
#include "intra_node/processes.h"

namespace herring::intra_node {
namespace {

using testing::random_token;
using testing::require;
using testing::run_processes;

constexpr std::uint64_t kArenaBytes = std::uint64_t{12} << 30;

Instant in(double seconds) {
  return std::chrono::steady_clock::now() +
         std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds));
}

NeighborhoodOptions options(std::uint32_t rank, std::uint32_t size, std::uint64_t token) {
  return {rank, size, token, kArenaBytes, 1 << 16};
}

std::set<std::string> names_in(const char* path) {
  std::set<std::string> names;
  DIR* directory = opendir(path);
  if (directory == nullptr) return names;
  while (const dirent* entry = readdir(directory)) names.insert(entry->d_name);
  closedir(directory);
  return names;
}

/// The next message; sleeps while there is none.
Neighborhood::Message next_message(Neighborhood& neighborhood, double limit_s = 30) {
  const Instant deadline = in(limit_s);
  Neighborhood::Message message;
  while (!neighborhood.receive(message)) {
    require(std::chrono::steady_clock::now() < deadline, "no message came in time");
    if (!neighborhood.prepare_sleep()) continue;
    pollfd fd{neighborhood.doorbell_fd(), POLLIN, 0};
    // Long: a lost wake-up must fail the test, not be papered over by the next poll.
    const int ready = poll(&fd, 1, static_cast<int>(limit_s * 1000));
    neighborhood.end_sleep();
    require(ready == 1, "slept through a message");
  }
  return message;
}

void expect_all_zero(const std::vector<int>& codes) {
  for (std::size_t rank = 0; rank < codes.size(); ++rank) EXPECT_EQ(codes[rank], 0) << "rank " << rank;
}

TEST(Neighborhood, SharesArenasWhateverTheOrderOfArrival) {
  for (std::uint32_t size = 1; size <= 4; ++size) {
    const std::uint64_t token = random_token();
    expect_all_zero(run_processes(size, [&](std::uint32_t index) {
      // The last process to be started is the first that the others want.
      const std::uint32_t rank = size - 1 - index;
      Neighborhood neighborhood(options(rank, size, token), in(20));
      const auto mine = neighborhood.allocate(4 << 20);
      require(mine.size() == 4 << 20, "allocate");
      require(reinterpret_cast<std::uintptr_t>(mine.data()) % 4096 == 0, "alignment");
      require(neighborhood.contains(mine) && !neighborhood.contains(std::as_bytes(std::span(&size, 1))), "contains");
      for (std::size_t i = 0; i < mine.size(); ++i) mine[i] = static_cast<std::byte>(rank + i);
      const std::uint64_t offset = neighborhood.offset_of(mine);
      const auto bytes = std::as_bytes(std::span(&offset, 1));
      for (std::uint32_t to = 0; to < size; ++to) {
        if (to != rank) require(neighborhood.send(to, bytes).is_ok(), "send");
      }
      neighborhood.flush();
      for (std::uint32_t i = 1; i < size; ++i) {
        const auto message = next_message(neighborhood);
        std::uint64_t theirs = 0;
        std::memcpy(&theirs, message.bytes.data(), sizeof(theirs));
        const auto seen = neighborhood.arena(message.from).subspan(theirs, 4 << 20);
        std::size_t same = 0;
        for (std::size_t b = 0; b < seen.size(); ++b) same += seen[b] == static_cast<std::byte>(message.from + b);
        require(same == seen.size(), "content of another rank's arena");
      }
    }));
  }
}

/// Runs `body` in every rank of neighborhoods of 2 to 4, whose small rings fill up all the time.
void with_small_rings(const std::function<void(Neighborhood&, std::uint32_t rank, std::uint32_t size)>& body) {
  for (std::uint32_t size = 2; size <= 4; ++size) {
    const std::uint64_t token = random_token();
    expect_all_zero(run_processes(size, [&](std::uint32_t rank) {
      NeighborhoodOptions small = options(rank, size, token);
      small.ring_bytes = 4096;
      Neighborhood neighborhood(small, in(20));
      body(neighborhood, rank, size);
    }));
  }
}

/// Of the ranks of neighborhoods of 2 to 4, seen by all of them.
class SharedFlags final {
 public:
  SharedFlags() {
    void* const page = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) throw std::bad_alloc();
    flags_ = static_cast<std::atomic<bool>*>(page);  // Zeros: false.
  }
  ~SharedFlags() { munmap(flags_, kBytes); }
  SharedFlags(const SharedFlags&) = delete;
  SharedFlags& operator=(const SharedFlags&) = delete;

  std::atomic<bool>* of_size(std::uint32_t size) const { return flags_ + std::size_t{8} * size; }

 private:
  static constexpr std::size_t kBytes = 4096;
  std::atomic<bool>* flags_;
};

TEST(Neighborhood, LosesNoMessageAndNoWakeUp) {
  // Every rank sleeps whenever it has nothing to read. That this happens is no matter of chance: rank 0 sends half of
  // its messages when all others have slept.
  const SharedFlags flags;
  with_small_rings([&flags](Neighborhood& neighborhood, std::uint32_t rank, std::uint32_t size) {
    constexpr std::uint32_t kRounds = 3000;
    std::atomic<bool>* const has_slept = flags.of_size(size);
    const auto is_held = [&] {
      return rank == 0 && !std::all_of(has_slept + 1, has_slept + size, [](const auto& flag) { return flag.load(); });
    };
    std::mt19937 random(rank);
    std::vector<std::uint32_t> sent(size, 0);
    std::vector<std::uint32_t> received(size, 0);
    sent[rank] = received[rank] = kRounds;
    const auto done = [&](const std::vector<std::uint32_t>& counts) {
      return std::ranges::all_of(counts, [&](std::uint32_t n) { return n == kRounds; });
    };
    Neighborhood::Message message;
    while (!done(sent) || !done(received)) {
      bool progress = false;
      const bool held = is_held();
      const std::uint32_t most = held ? kRounds / 2 : kRounds;
      for (std::uint32_t to = 0; to < size; ++to) {
        for (std::uint32_t burst = 1 + random() % 8; burst > 0 && sent[to] < most; --burst) {
          std::vector<std::byte> bytes(4 + (sent[to] * 37 + rank) % 900, static_cast<std::byte>(sent[to]));
          std::memcpy(bytes.data(), &sent[to], sizeof(sent[to]));
          if (neighborhood.send(to, bytes).is_again()) break;
          ++sent[to];
          progress = true;
        }
      }
      neighborhood.flush();
      while (neighborhood.receive(message)) {
        std::uint32_t number = 0;
        std::memcpy(&number, message.bytes.data(), sizeof(number));
        require(number == received[message.from], "order");
        require(message.bytes.size() == 4 + (number * 37 + message.from) % 900, "size");
        ++received[message.from];
        progress = true;
      }
      if (progress) continue;
      if (held) {
        sched_yield();  // Nobody rings when the others sleep.
        continue;
      }
      if (!neighborhood.prepare_sleep()) continue;
      has_slept[rank] = true;
      pollfd fd{neighborhood.doorbell_fd(), POLLIN, 0};
      const int ready = poll(&fd, 1, 20000);
      neighborhood.end_sleep();
      require(ready == 1, "slept through a message or through room in a ring");
    }
    require(rank == 0 || neighborhood.stats().times_asleep > 0, "this test is about sleeping");
  });
}

TEST(Neighborhood, SendsToAllAtOnceAndWakesThem) {
  // Every rank sleeps whenever it has nothing to read; where there is no room, it tries again.
  with_small_rings([](Neighborhood& neighborhood, std::uint32_t rank, std::uint32_t size) {
    constexpr std::uint32_t kRounds = 3000;
    std::mt19937 random(rank);
    std::uint32_t sent = 0;
    std::uint32_t refused = 0;
    std::vector<std::uint32_t> received(size, 0);
    received[rank] = kRounds;
    Neighborhood::Message message;
    const auto read = [&] {
      bool any = false;
      while (neighborhood.receive(message)) {
        std::uint32_t number = 0;
        std::memcpy(&number, message.bytes.data(), sizeof(number));
        require(number == received[message.from], "order");
        require(message.bytes.size() == 4 + (number * 37 + message.from) % 900, "size");
        const auto fill = static_cast<std::byte>(number);
        require(message.bytes.size() == 4 || message.bytes.back() == fill, "content");
        ++received[message.from];
        any = true;
      }
      return any;
    };
    while (sent < kRounds || std::ranges::any_of(received, [](std::uint32_t n) { return n < kRounds; })) {
      bool progress = false;
      for (std::uint32_t burst = 1 + random() % 8; burst > 0 && sent < kRounds; --burst) {
        std::vector<std::byte> bytes(4 + (sent * 37 + rank) % 900, static_cast<std::byte>(sent));
        std::memcpy(bytes.data(), &sent, sizeof(sent));
        if (!neighborhood.send_to_all(bytes)) {
          ++refused;
          break;
        }
        ++sent;
        progress = true;
      }
      progress |= read();
      if (progress) continue;
      if (sent < kRounds) {
        sched_yield();  // Nobody rings for room in this ring.
        continue;
      }
      if (!neighborhood.prepare_sleep()) continue;
      pollfd fd{neighborhood.doorbell_fd(), POLLIN, 0};
      const int ready = poll(&fd, 1, 20000);
      neighborhood.end_sleep();
      require(ready == 1, "slept through a message");
    }
    require(refused > 0, "this test is about full rings, too");
    require(neighborhood.stats().messages_sent == std::uint64_t{kRounds} * (size - 1), "counted");
  });
}

TEST(Neighborhood, WakesFromAnotherThread) {
  Neighborhood neighborhood(options(0, 1, random_token()), in(5));
  for (int i = 0; i < 200; ++i) {
    std::thread other([&] { neighborhood.wake(); });
    bool woken = !neighborhood.prepare_sleep();
    if (!woken) {
      pollfd fd{neighborhood.doorbell_fd(), POLLIN, 0};
      woken = poll(&fd, 1, 20000) == 1;
      neighborhood.end_sleep();
    }
    other.join();
    ASSERT_TRUE(woken) << i;
  }
}

TEST(Neighborhood, NamesTheRanksThatDidNotCome) {
  const std::uint64_t token = random_token();
  const auto codes = run_processes(2, [&](std::uint32_t index) {
    const std::uint32_t rank = index * 2;  // 0 and 2 of 4 come.
    try {
      Neighborhood neighborhood(options(rank, 4, token), in(0.5));
    } catch (const Error& error) {
      require(error.status().code() == Code::kTimeout, error.what());
      require(error.status().message().find("local ranks 1, 3 of 4") != std::string::npos, error.what());
      return;
    }
    require(false, "nobody is missing?");
  });
  expect_all_zero(codes);
}

TEST(Neighborhood, TellsRanksThatDisagreeWhoHasWhat) {
  const std::uint64_t token = random_token();
  const auto codes = run_processes(2, [&](std::uint32_t rank) {
    NeighborhoodOptions mine = options(rank, 2, token);
    mine.ring_bytes = rank == 0 ? 1 << 16 : 1 << 17;
    try {
      Neighborhood neighborhood(mine, in(20));
    } catch (const Error& error) {
      const std::string text = error.what();
      require(error.status().code() == Code::kMismatch, text);
      require(text.find("65536") != std::string::npos && text.find("131072") != std::string::npos, text);
      return;
    }
    require(false, "different rings were accepted");
  });
  expect_all_zero(codes);
}

int connect_stranger(std::uint64_t token, std::uint32_t rank) {
  const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string name = meeting_name(token, rank);
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  const Instant deadline = in(10);
  while (connect(fd, reinterpret_cast<const sockaddr*>(&address), size) != 0) {
    require(std::chrono::steady_clock::now() < deadline, "nobody listens");
    std::this_thread::yield();
  }
  return fd;
}

TEST(Neighborhood, IsNotImpressedByStrangers) {
  const std::uint64_t token = random_token();
  expect_all_zero(run_processes(3, [&](std::uint32_t rank) {
    if (rank == 2) {
      // A stranger that even knows the name: silence, garbage, and a Hello without the secret, many times.
      for (unsigned i = 0; i < 60; ++i) {
        const int fd = connect_stranger(token, 0);
        std::vector<std::byte> garbage(i % 3 == 0 ? 0 : i % 3 == 1 ? 64 : 5000, static_cast<std::byte>(i));
        if (!garbage.empty()) (void)!::send(fd, garbage.data(), garbage.size(), MSG_NOSIGNAL);
        if (i % 4 != 0) close(fd);
      }
      NeighborhoodOptions late = options(1, 2, token);
      Neighborhood neighborhood(late, in(20));
      return;
    }
    if (rank == 1) {
      // Same host, wrong token: meets nobody.
      try {
        Neighborhood neighborhood(options(1, 2, token + 1), in(0.2));
      } catch (const Error& error) {
        require(error.status().code() == Code::kTimeout, error.what());
        return;
      }
      require(false, "a wrong token was accepted");
    }
    Neighborhood neighborhood(options(0, 2, token), in(20));
  }));
}

TEST(Neighborhood, LeavesNothingBehind) {
  std::set<std::string> before;
  std::set<std::string> after;
  // What it left would be left each time; other programs' files come and go.
  for (int attempt = 0; attempt == 0 || (attempt < 5 && after != before); ++attempt) {
    before = names_in("/dev/shm");
    const auto descriptors = names_in("/proc/self/fd");
    {
      Neighborhood neighborhood(options(0, 1, random_token()), in(5));
      const auto memory = neighborhood.allocate(1 << 20);
      std::memset(memory.data(), 1, memory.size());
      EXPECT_EQ(names_in("/proc/self/fd").size(), descriptors.size() + 1) << "only the doorbell stays open";
    }
    EXPECT_EQ(names_in("/proc/self/fd"), descriptors);
    after = names_in("/dev/shm");
  }
  EXPECT_EQ(after, before);
}

TEST(Neighborhood, LetsAForkedChildReadButNotDisturb) {
  Neighborhood neighborhood(options(0, 1, random_token()), in(5));
  const auto memory = neighborhood.allocate(300 << 20);  // More than is kept warm: freeing it would punch a hole.
  ASSERT_FALSE(memory.empty());
  memory.front() = std::byte{42};
  const auto codes = run_processes(1, [&](std::uint32_t) {
    require(memory.front() == std::byte{42}, "a child can read");
    require(neighborhood.allocate(4096).empty(), "a child gets no memory");
    neighborhood.deallocate(memory);
    neighborhood.wake();
  });
  expect_all_zero(codes);
  EXPECT_EQ(memory.front(), std::byte{42});
  EXPECT_TRUE(neighborhood.prepare_sleep()) << "woken by a child";
  neighborhood.end_sleep();
  neighborhood.deallocate(memory);
  const auto again = neighborhood.allocate(300 << 20);
  EXPECT_EQ(again.data(), memory.data());
  EXPECT_EQ(again.front(), std::byte{0}) << "the pages of large freed memory go back to the system";
}

TEST(Neighborhood, RefusesBadOptions) {
  NeighborhoodOptions bad = options(0, 1, 1);
  bad.ring_bytes = 5000;
  EXPECT_THROW(Neighborhood(bad, in(1)), Error);
  bad = options(2, 2, 1);
  EXPECT_THROW(Neighborhood(bad, in(1)), Error);
  bad = options(0, 1, 1);
  bad.arena_bytes = 0;
  EXPECT_THROW(Neighborhood(bad, in(1)), Error);
}

TEST(Neighborhood, SurvivesAPeerThatDies) {
  const std::uint64_t token = random_token();
  const auto codes = run_processes(2, [&](std::uint32_t rank) {
    Neighborhood neighborhood(options(rank, 2, token), in(20));
    if (rank == 1) {
      (void)next_message(neighborhood);
      _exit(7);  // No destructor runs.
    }
    const std::vector<std::byte> bytes(1000);
    while (!neighborhood.send(1, bytes).is_again()) neighborhood.flush();
    Neighborhood::Message message;
    require(!neighborhood.receive(message), "a dead peer says nothing");
  });
  EXPECT_EQ(codes, (std::vector<int>{0, 7}));
}

TEST(HostIdentity, IsTheSameForAllProcessesOfAHost) {
  const std::string here = host_identity();
  EXPECT_GT(here.size(), 20u);
  expect_all_zero(run_processes(1, [&](std::uint32_t) { require(host_identity() == here, host_identity()); }));
}

// A rank that died while its host's ranks met would be waited for until the join's time-out, two minutes.
TEST(Neighborhood, WhoWaitsForRanksCanBeToldThatOneIsLost) {
  NeighborhoodOptions lonely = options(0, 2, random_token());
  int asked = 0;
  lonely.while_waiting = [&asked] {
    if (++asked == 3) throw Error(Code::kPeerLost, "rank 1 is lost");
  };
  try {
    const Neighborhood never(lonely, in(60));
    FAIL() << "nobody else came";
  } catch (const Error& error) {
    EXPECT_EQ(error.status().code(), Code::kPeerLost) << error.what();
  }
}

}  // namespace
}  // namespace herring::intra_node
