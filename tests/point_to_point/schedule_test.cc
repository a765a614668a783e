// Thousands of seeded schedules: delays, reordering, refused posts, every way of matching; then the same with failures.

#include <gtest/gtest.h>

#include <chrono>
#include <iostream>
#include <random>

#include "engines/plan.h"
#include "point_to_point/message_cluster.h"

namespace herring::point_to_point::testing {
namespace {

using herring::testing::chance;
using herring::testing::pick;
using herring::testing::Random;
using herring::testing::SeedRange;
using herring::testing::seeds;

/// What the receives of one worker in one group leave open; all of them alike, so that each finds a message.
enum class Mode : std::uint8_t { kExact, kAnyTag, kAnySource, kAny };

struct Message {
  std::uint32_t group = 0;
  std::uint32_t from = 0;
  std::uint32_t to = 0;
  std::uint64_t tag = 0;
  std::vector<std::byte> data;
  std::vector<std::byte> memory;  ///< Of the receive with the same index.
  std::uint64_t send = 0;         ///< Handles.
  std::uint64_t receive = 0;
  std::uint64_t send_order = 0;  ///< Of submissions.
  std::uint64_t receive_order = 0;
  Duration send_timeout = std::chrono::seconds(60);
  Duration receive_timeout = std::chrono::seconds(60);
};

LinkConfig random_link(Random& random) {
  LinkConfig link;
  const std::uint32_t chunks[] = {16, 64, 100, 1024};
  link.chunk_bytes = chunks[pick(random, 0, 3)];
  link.window = static_cast<std::uint32_t>(pick(random, 1, 5));
  const std::uint32_t eager[] = {0, 1, 30, 300};
  link.eager_bytes = eager[pick(random, 0, 3)];
  link.eager_window = static_cast<std::uint32_t>(pick(random, 0, 3));
  link.credits = static_cast<std::uint32_t>(pick(random, 2, 6));
  return link;
}

ClusterOptions random_options(Random& random, std::uint64_t seed) {
  ClusterOptions options;
  options.seed = seed;
  options.workers = static_cast<std::uint32_t>(pick(random, 1, 6));
  options.hosts = static_cast<std::uint32_t>(pick(random, 1, options.workers));
  options.near = random_link(random);
  options.far = random_link(random);
  options.max_incoming = static_cast<std::uint32_t>(chance(random, 0.3) ? pick(random, 1, 3) : 256);
  options.max_incoming_of_peer = static_cast<std::uint32_t>(pick(random, 1, 4));
  options.sim.max_delay = std::chrono::microseconds(pick(random, 5, 300));
  if (chance(random, 0.4)) options.sim.straggler_chance = 0.1;
  if (chance(random, 0.3)) options.sim.again_chance = 0.05;
  if (options.seed / 2 % 2 == 1) options.sim.slow_cancel_chance = 0.5;
  if (chance(random, 0.2)) options.sim.max_sends = pick(random, 1, 8);
  options.sim.buffered_chance = static_cast<double>(pick(random, 0, 4)) / 4;
  options.strict = seed % 5 == 0;
  if (seed % 3 == 0) {
    // Memory does not damage what it holds: every worker on a host of its own.
    options.checksum = true;
    options.hosts = options.workers;
    options.sim.damage_chance = static_cast<double>(pick(random, 0, 8)) / 100;
  }
  return options;
}

std::uint64_t random_size(Random& random) {
  const std::uint64_t kind = pick(random, 0, 9);
  if (kind == 0) return 0;
  if (kind <= 4) return pick(random, 1, 64);
  if (kind <= 8) return pick(random, 65, 1500);
  return pick(random, 1500, 6000);
}

class Schedule {
 public:
  explicit Schedule(std::uint64_t seed) : random_(seed), cluster_(random_options(random_, seed)) {
    const std::uint32_t workers = cluster_.options().workers;
    for (std::uint32_t group = 0; group < kGroups; ++group) {
      for (std::uint32_t to = 0; to < workers; ++to) modes_[group][to] = static_cast<Mode>(pick(random_, 0, 3));
    }
    // The pattern is one of a few bursts, so that messages of one kind come in numbers.
    const std::uint64_t count = pick(random_, 1, 40);
    const std::uint32_t tags = static_cast<std::uint32_t>(pick(random_, 1, 4));
    for (std::uint64_t i = 0; i < count; ++i) {
      Message message;
      message.group = static_cast<std::uint32_t>(pick(random_, 0, kGroups - 1));
      message.from = static_cast<std::uint32_t>(pick(random_, 0, workers - 1));
      message.to = static_cast<std::uint32_t>(pick(random_, 0, workers - 1));
      message.tag = pick(random_, 0, tags - 1);
      message.data.resize(size_of(message));
      for (std::byte& b : message.data) b = static_cast<std::byte>(random_());
      message.memory.assign(message.data.size(), std::byte{0xEE});
      messages_.push_back(std::move(message));
    }
  }

  Cluster& cluster() { return cluster_; }
  std::vector<Message>& messages() { return messages_; }
  Random& random() { return random_; }

  /// Everybody submits in an order of its own; `event` happens before each submission.
  template <class Event>
  void submit_all(Event event) {
    struct Submission {
      Instant when;
      std::size_t message;
      bool is_send;
    };
    std::vector<Submission> order;
    const std::uint64_t spread = chance(random_, 0.3) ? 100 : 400'000;
    for (std::size_t i = 0; i < messages_.size(); ++i) {
      order.push_back({cluster_.now() + std::chrono::nanoseconds(pick(random_, 0, spread)), i, true});
      order.push_back({cluster_.now() + std::chrono::nanoseconds(pick(random_, 0, spread)), i, false});
    }
    std::sort(order.begin(), order.end(), [](const auto& a, const auto& b) { return a.when < b.when; });
    std::uint64_t number = 0;
    for (const Submission& next : order) {
      cluster_.run_until(next.when);
      event();
      Message& message = messages_[next.message];
      const std::uint32_t rank = next.is_send ? message.from : message.to;
      if (cluster_.is_dead(rank)) continue;
      (next.is_send ? message.send_order : message.receive_order) = ++number;
      if (next.is_send) {
        message.send = cluster_.send(
            rank, {0, GroupId{message.group}, PeerId{message.to}, message.tag, message.data, message.send_timeout});
      } else {
        message.receive = cluster_.receive(rank, receive_of(message));
      }
    }
  }

  ReceiveOperation receive_of(Message& message) const {
    const Mode mode = modes_.at(message.group).at(message.to);
    ReceiveOperation operation;
    operation.group = GroupId{message.group};
    operation.memory = message.memory;
    operation.timeout = message.receive_timeout;
    if (mode == Mode::kExact || mode == Mode::kAnyTag) {
      operation.sources = {PeerId{message.from}};
    } else {
      for (std::uint32_t rank = 0; rank < cluster_.options().workers; ++rank) operation.sources.push_back(PeerId{rank});
    }
    if (mode == Mode::kExact || mode == Mode::kAnySource) operation.tag = message.tag;
    return operation;
  }

  /// Receives that ended well, by what they got, hold the messages in the order in which they were sent.
  void check_contents() {
    std::map<std::tuple<std::uint32_t, std::uint32_t, std::uint32_t, std::uint64_t>, std::vector<const Message*>> sent;
    std::map<std::tuple<std::uint32_t, std::uint32_t, std::uint32_t, std::uint64_t>, std::vector<const Message*>> got;
    for (const Message& message : messages_) {
      const Completion* const send = cluster_.find(message.send);
      const bool delivered = send != nullptr && send->status.is_ok();
      if (delivered) sent[{message.group, message.to, message.from, message.tag}].push_back(&message);
      const Completion* const receive = cluster_.find(message.receive);
      if (receive == nullptr || !receive->status.is_ok()) continue;
      EXPECT_EQ(receive->received.bytes, message.memory.size());
      got[{message.group, message.to, receive->received.source.value, receive->received.tag}].push_back(&message);
    }
    for (auto& [key, list] : sent) {
      std::sort(list.begin(), list.end(), [](auto* a, auto* b) { return a->send_order < b->send_order; });
      auto& receives = got[key];
      std::sort(receives.begin(), receives.end(), [](auto* a, auto* b) { return a->receive_order < b->receive_order; });
      if (receives.size() != list.size()) continue;  // Without failures: the counts are checked apart.
      for (std::size_t i = 0; i < list.size(); ++i) {
        EXPECT_EQ(receives[i]->memory, list[i]->data)
            << "group " << list[i]->group << ", " << list[i]->from << " -> " << list[i]->to << ", tag " << list[i]->tag;
      }
    }
  }

  void check_bounds() {
    for (std::uint32_t rank = 0; rank < cluster_.options().workers; ++rank) {
      const EngineStats& stats = cluster_.engine(rank).stats();
      EXPECT_LE(stats.held_bytes_peak, cluster_.memory_bound(rank)) << "rank " << rank;
      EXPECT_LE(stats.incoming_peak, cluster_.options().max_incoming) << "rank " << rank;
      if (cluster_.is_dead(rank)) continue;
      EXPECT_EQ(stats.held_bytes, 0u) << "rank " << rank;
    }
  }

 private:
  static constexpr std::uint32_t kGroups = 2;

  /// As large as all that the same receive could get.
  std::size_t size_of(const Message& message) {
    const Mode mode = modes_[message.group][message.to];
    if (mode == Mode::kExact) {
      // The k-th send meets the k-th receive, which were drawn in different orders: one size for each kind here too.
      return sizes_.try_emplace({message.group, message.to, message.from, message.tag}, random_size(random_))
          .first->second;
    }
    const std::uint64_t from = mode == Mode::kAnyTag ? message.from : ~0ull;
    const std::uint64_t tag = mode == Mode::kAnySource ? message.tag : ~0ull;
    return sizes_.try_emplace({message.group, message.to, from, tag}, random_size(random_)).first->second;
  }

  Random random_;
  Cluster cluster_;
  std::map<std::uint32_t, std::map<std::uint32_t, Mode>> modes_;  // By group and receiver.
  std::map<std::tuple<std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t>, std::size_t> sizes_;
  std::vector<Message> messages_;
};

/// What the schedules met on their way.
struct Coverage {
  std::uint64_t messages = 0;
  std::uint64_t unexpected = 0;
  std::uint64_t held = 0;  // Workers that held something.
  std::uint64_t refused = 0;
  std::uint64_t failed = 0;
  std::uint64_t lost = 0;
  std::uint64_t cuts = 0;
};

void count(Schedule& schedule, Coverage& coverage) {
  Cluster& cluster = schedule.cluster();
  coverage.messages += schedule.messages().size();
  coverage.unexpected += cluster.network().stats().unexpected;
  coverage.refused += cluster.network().stats().refused;
  for (std::uint32_t rank = 0; rank < cluster.options().workers; ++rank) {
    coverage.held += cluster.engine(rank).stats().held_bytes_peak > 0 ? 1 : 0;
    coverage.failed += cluster.engine(rank).stats().failed;
  }
}

/// Links of the network that hold everything back for a while. From numbers of their own: the rest of a seed stays.
class Cuts {
 public:
  Cuts(std::uint64_t seed, Cluster& cluster) : faults_(~seed), cluster_(cluster), is_on_(chance(faults_, 0.3)) {}
  void change() {
    if (!is_on_ || !chance(faults_, 0.2)) return;
    if (!cut_.empty() && chance(faults_, 0.5)) {
      cluster_.network().heal(cut_.front().first, cut_.front().second);
      cut_.pop_front();
      return;
    }
    const std::uint64_t last = cluster_.options().workers - 1;
    const auto end = [&] { return pick(faults_, 0, last) * Cluster::kLinks + 1; };
    cut_.emplace_back(end(), end());
    cluster_.network().partition(cut_.back().first, cut_.back().second);
    ++count_;
  }
  std::uint64_t heal_all() {
    for (const auto& [a, b] : cut_) cluster_.network().heal(a, b);
    return count_;
  }

 private:
  Random faults_;
  Cluster& cluster_;
  const bool is_on_;
  std::deque<std::pair<std::uint64_t, std::uint64_t>> cut_;
  std::uint64_t count_ = 0;
};

void run_schedule(std::uint64_t seed, Coverage& coverage) {
  Schedule schedule(seed);
  Cluster& cluster = schedule.cluster();
  Cuts cuts(seed, cluster);
  schedule.submit_all([&] { cuts.change(); });
  coverage.cuts += cuts.heal_all();
  // Thousands of chunks of 16 bytes, some of them three times, take their time.
  ASSERT_TRUE(cluster.run_until_idle(std::chrono::seconds(cluster.options().checksum ? 50 : 20))) << "deadlock";
  EXPECT_EQ(cluster.completions().size(), 2 * schedule.messages().size());
  for (const auto& [handle, completion] : cluster.completions()) {
    EXPECT_TRUE(completion.status.is_ok()) << completion.status.to_string();
  }
  schedule.check_contents();
  schedule.check_bounds();
  EXPECT_EQ(cluster.network().stats().unexpected, 0u) << "sent before a receive was posted";
  for (std::uint32_t rank = 0; rank < cluster.options().workers; ++rank) {
    EXPECT_EQ(cluster.engine(rank).stats().messages_rejected, 0u) << "rank " << rank;
  }
  count(schedule, coverage);
}

/// Time-outs that strike at any moment, messages that nobody receives, sizes that differ, a worker that dies or leaves.
void run_failing_schedule(std::uint64_t seed, Coverage& coverage) {
  Schedule schedule(seed);
  Cluster& cluster = schedule.cluster();
  Random& random = schedule.random();
  for (Message& message : schedule.messages()) {
    if (chance(random, 0.3)) message.send_timeout = std::chrono::microseconds(pick(random, 1, 600));
    if (chance(random, 0.3)) message.receive_timeout = std::chrono::microseconds(pick(random, 1, 600));
    if (chance(random, 0.1)) message.memory.resize(message.memory.size() + pick(random, 1, 100));
  }
  bool lost = !chance(random, 0.4);
  const auto victim = static_cast<std::uint32_t>(pick(random, 0, cluster.options().workers - 1));
  const auto stalled = static_cast<std::uint32_t>(pick(random, 0, cluster.options().workers - 1));
  if (chance(random, 0.2)) cluster.network().set_slowness(stalled * Cluster::kLinks, 20);  // Well below the grace.
  schedule.submit_all([&] {
    if (lost || !chance(random, 0.05)) return;
    lost = true;
    cluster.lose(victim, "rank " + std::to_string(victim) + " is lost: it was killed");
    ++coverage.lost;
  });
  ASSERT_TRUE(cluster.run_until_idle(std::chrono::seconds(200))) << "something never ended";
  for (const Message& message : schedule.messages()) {
    for (const bool is_send : {true, false}) {
      const std::uint64_t handle = is_send ? message.send : message.receive;
      if (handle == 0 || cluster.is_dead(is_send ? message.from : message.to)) continue;
      const Completion* const completion = cluster.find(handle);
      ASSERT_NE(completion, nullptr) << (is_send ? "send" : "receive") << " never ended";
      const Code code = completion->status.code();
      EXPECT_TRUE(code == Code::kOk || code == Code::kTimeout || code == Code::kMismatch || code == Code::kPeerLost)
          << completion->status.to_string();
    }
  }
  schedule.check_bounds();
  schedule.check_contents();
  // Whoever was told that a message arrived was told the truth.
  std::uint64_t sent = 0, received = 0;
  for (std::uint32_t rank = 0; rank < cluster.options().workers; ++rank) {
    sent += cluster.engine(rank).stats().sent;
    received += cluster.engine(rank).stats().received;
  }
  EXPECT_LE(sent, received);
  count(schedule, coverage);
}

template <class Run>
void run_seeds(std::uint64_t how_many, Coverage& coverage, const char* what, Run run) {
  const SeedRange range = seeds(how_many);
  const auto start = std::chrono::steady_clock::now();
  for (std::uint64_t seed = range.first; seed < range.first + range.count; ++seed) {
    run(seed, coverage);
    if (::testing::Test::HasFailure()) {
      FAIL() << "seed " << seed << " fails; HERRING_TEST_SEED=" << seed << " replays it";
    }
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  std::cout << range.count << ' ' << what << " in " << seconds << " s: " << coverage.messages << " messages, "
            << coverage.held << " workers that held some, " << coverage.refused << " posts refused, " << coverage.failed
            << " failures, " << coverage.lost << " workers lost, " << coverage.cuts << " links cut\n";
}

TEST(MessageSchedules, EveryMessageMeetsItsReceiveInOrder) {
  Coverage coverage;
  run_seeds(6'000, coverage, "schedules", run_schedule);
  if (seeds(6'000).count < 1000) return;
  EXPECT_GT(coverage.held, 1000u);
  EXPECT_GT(coverage.refused, 1000u);
  EXPECT_GT(coverage.cuts, 1000u);
}

TEST(MessageSchedules, FailuresEndEverythingOnceAndLeaveNothingBehind) {
  Coverage coverage;
  run_seeds(6'000, coverage, "failing schedules", run_failing_schedule);
  if (seeds(6'000).count < 1000) return;
  EXPECT_GT(coverage.failed, 10'000u);
  EXPECT_GT(coverage.lost, 500u);
}

}  // namespace
}  // namespace herring::point_to_point::testing
