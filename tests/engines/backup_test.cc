#include <gtest/gtest.h>

#include <chrono>
#include <deque>
#include <iostream>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "core/roster.h"
#include "engines/random_job.h"

/// Backup workers: jobs in which some are late, in seeded schedules of the real engines.
namespace herring::testing {
namespace {

using namespace std::chrono_literals;

/// One operation as the runtime runs it: it joins, then goes part by part.
struct BackupOp {
  std::vector<std::uint32_t> ranks;
  GroupId group;
  std::uint64_t number = 0;
  OpDescriptor descriptor;
  std::uint64_t part_bytes = 0;
  bool has_backup = true;
  std::vector<std::vector<std::byte>> inputs;  ///< By contributor.
  std::vector<std::vector<std::byte>> memory;
  std::optional<Roster> roster;                  ///< What the first one to learn it learnt.
  std::vector<std::vector<std::byte>> expected;  ///< By part; once the roster is known.

  std::uint32_t parts() const {
    return static_cast<std::uint32_t>(std::max<std::uint64_t>((descriptor.op_bytes + part_bytes - 1) / part_bytes, 1));
  }
  ByteRange range(std::uint32_t part) const {
    const std::uint64_t offset = part * part_bytes;
    return {offset, std::min(part_bytes, descriptor.op_bytes - offset)};
  }
};

/// Where a worker is in an operation.
struct Progress {
  std::size_t op = 0;
  std::size_t index = 0;
  bool has_joined = false;
  Roster roster;
  std::uint32_t next_part = 0;
  std::uint32_t done = 0;
  std::set<std::uint32_t> in_flight;  ///< Parts.
  bool has_failed = false;
};

struct Totals {
  std::uint64_t operations = 0;
  std::uint64_t without_some = 0;
  std::uint64_t dropped = 0;
  std::uint64_t kept_much = 0;  ///< Lanes that kept more than half of what they may.
  std::uint64_t waited = 0;     ///< Operations with everybody in a job that can do without: a bound, or all in time.
  std::uint64_t messages = 0;
  std::uint64_t failed = 0;    ///< Operations of a worker that ended with an error.
  std::uint64_t in_spite = 0;  ///< That ended well although a worker is lost.
};

/// A job whose workers go through the same operations at their own pace, some much slower than others.
class Job {
 public:
  /// `has_loss`: one worker is lost at some time, and everybody is told.
  Job(std::uint64_t seed, Totals& totals, bool has_loss = false)
      : random_(seed), totals_(totals), cluster_(options(random_, seed)) {
    for (std::uint32_t peer = 0; peer < cluster_.options().workers + cluster_.options().lanes; ++peer) {
      if (chance(random_, 0.1)) cluster_.network().set_slowness(peer, static_cast<double>(pick(random_, 2, 20)));
    }
    make_ops();
    for (std::uint32_t rank = 0; rank < cluster_.options().workers; ++rank) {
      next_.push_back(0);
      depth_.push_back(pick(random_, 1, 4));
      due_.push_back(cluster_.now() + wait(rank));
    }
    cluster_.on_complete([this](std::uint32_t rank, const CompleteAction& action) {
      ended_.push_back({rank, action});
    });
    cluster_.after_step([this] { return take_ended(); });
    if (!has_loss) return;
    lost_ = static_cast<std::uint32_t>(pick(random_, 0, cluster_.options().workers - 1));
    loss_ = cluster_.now() + std::chrono::microseconds(pick(random_, 0, 3000));
  }

  void run() {
    while (true) {
      const auto next = std::min_element(due_.begin(), due_.end());
      if (loss_ && *loss_ <= std::min(*next, cluster_.now() + 200us)) {
        lose();
        continue;
      }
      if (*next != Instant::max()) {
        cluster_.run_until(*next);
        start(static_cast<std::uint32_t>(next - due_.begin()));
        continue;
      }
      if (is_over()) break;
      // Nobody has anything to start until something ends.
      const Instant before = cluster_.now();
      cluster_.run_until(before + (lost_ && !loss_ ? 50ms : 200us));
      // Who misses a lost one in a group that lanes do not know learns it at the operation's time-out.
      ASSERT_LT(cluster_.now() - start_, lost_ ? 300s : 60s * longer()) << "deadlock: " << describe();
    }
    ASSERT_TRUE(cluster_.run_until_idle(300s)) << "something is left: " << describe();
    check_end();
  }

 private:
  /// How many times the usual delays a job may have: 70 workers with long ones, some of them slow, take minutes.
  std::int64_t longer() const { return std::max<std::int64_t>(1, cluster_.options().sim.max_delay / 200us); }

  static ClusterOptions options(Random& random, std::uint64_t seed) {
    ClusterOptions options = random_options(random, seed);
    options.workers = static_cast<std::uint32_t>(pick(random, 2, 8));
    if (seed % 50 == 0) options.workers = 70;  // More than one word of a roster.
    options.slots = options.workers * static_cast<std::uint32_t>(chance(random, 0.5) ? 1 : pick(random, 1, 4));
    options.backup_workers = static_cast<std::uint32_t>(pick(random, 1, options.workers - 1));
    if (chance(random, 0.5)) options.backup_workers = 1;
    options.backup_grace = chance(random, 0.5) ? Duration{} : std::chrono::microseconds(pick(random, 1, 300));
    const std::uint64_t bounds[] = {0, 3000, 40'000, 400'000, 1u << 30};
    options.backup_bytes = bounds[pick(random, 0, 4)];
    options.strict = seed % 5 == 0;
    if (chance(random, 0.2)) {
      options.checksum = true;
      options.max_damaged = 1000;
      options.sim.damage_head_bytes = 144;
      options.sim.damage_chance = static_cast<double>(pick(random, 0, 5)) / 100;
    }
    return options;
  }

  void make_ops() {
    const std::uint32_t workers = cluster_.options().workers;
    const auto group = random_group(random_, workers, 1);
    const std::uint64_t count = pick(random_, 1, workers > 8 ? 3 : 10);
    for (std::uint64_t i = 0; i < count; ++i) {
      BackupOp op;
      op.group = GroupId{chance(random_, 0.7) ? 0u : 1u};
      op.ranks = op.group == GroupId{0} ? random_group(random_, workers, 0) : group;
      op.number = i;
      op.has_backup = chance(random_, 0.8);
      const DataType dtype = chance(random_, 0.8) ? DataType::kFloat32 : DataType::kUInt8;
      set_size(op.descriptor, dtype, random_elements_count(random_, cluster_.options()));
      if (dtype == DataType::kFloat32 && chance(random_, 0.5)) op.descriptor.reduce = ReduceOp::kAverage;
      op.part_bytes = 64 * pick(random_, 1, 1 + op.descriptor.op_bytes / 64);
      if (op.parts() > 6) op.part_bytes = (op.descriptor.op_bytes / 6 / 64 + 1) * 64;
      for (std::size_t c = 0; c < op.ranks.size(); ++c) {
        op.inputs.push_back(random_elements(random_, dtype, op.descriptor.shape[0]));
      }
      op.memory = op.inputs;
      ops_.push_back(std::move(op));
    }
    for (std::uint32_t rank = 0; rank < workers; ++rank) {
      const std::uint64_t kind = pick(random_, 0, 9);
      pace_.push_back(kind < 6 ? 20 : kind < 9 ? 200 : 5000);
    }
  }

  Duration wait(std::uint32_t rank) { return std::chrono::microseconds(pick(random_, 0, pace_[rank])); }

  /// The next operation of this worker, unless it has as many under way as it starts at once.
  void start(std::uint32_t rank) {
    while (next_[rank] < ops_.size() && index_in(ops_[next_[rank]], rank) == ops_[next_[rank]].ranks.size()) {
      ++next_[rank];
    }
    due_[rank] = Instant::max();
    if (next_[rank] == ops_.size() || running_[rank].size() >= depth_[rank]) return;
    const std::size_t number = next_[rank]++;
    BackupOp& op = ops_[number];
    Progress& progress = running_[rank][op.number];
    progress.op = number;
    progress.index = index_in(op, rank);
    if (op.has_backup) {
      worker::Operation join = operation(op, progress, 0);
      join.is_join = true;
      join.memory = {};
      join.descriptor.part_bytes = 0;
      cluster_.submit(rank, join);
    } else {
      progress.has_joined = true;
      if (!op.roster) learn(op, {});
      start_parts(rank, progress);
    }
    due_[rank] = cluster_.now() + wait(rank);
  }

  void lose() {
    cluster_.run_until(*std::exchange(loss_, std::nullopt));
    due_[*lost_] = Instant::max();
    next_[*lost_] = ops_.size();
    running_.erase(*lost_);
    cluster_.lose_worker(*lost_, "it was stopped");
  }

  /// What is still under way of an operation that failed is given up, as the runtime does.
  void give_up(std::uint32_t rank, Progress& progress, const Status& why) {
    if (std::exchange(progress.has_failed, true)) return;
    ++totals_.failed;
    for (const std::uint32_t part : std::set<std::uint32_t>(progress.in_flight)) {
      cluster_.abort(rank, part_of(progress, part), why);
    }
  }

  worker::Operation part_of(const Progress& progress, std::uint32_t number) {
    BackupOp& op = ops_[progress.op];
    worker::Operation part = operation(op, progress, number);
    part.roster = progress.roster;
    const std::size_t in = part.roster.empty() ? op.ranks.size() : members_of(part.roster).size();
    if (op.descriptor.reduce == ReduceOp::kAverage) part.average_over = static_cast<std::uint32_t>(in);
    return part;
  }

  void start_parts(std::uint32_t rank, Progress& progress) {
    BackupOp& op = ops_[progress.op];
    while (progress.in_flight.size() < 3 && progress.next_part < op.parts()) {
      const std::uint32_t part = progress.next_part++;
      progress.in_flight.insert(part);
      cluster_.submit(rank, part_of(progress, part));
    }
  }

  worker::Operation operation(BackupOp& op, const Progress& progress, std::uint32_t part) const {
    worker::Operation operation;
    operation.key = {op.group, op.number, part};
    operation.descriptor = op.descriptor;
    const ByteRange range = op.range(part);
    operation.descriptor.part_bytes = range.bytes;
    operation.memory = std::span(op.memory[progress.index]).subspan(range.offset, range.bytes);
    operation.contributor = static_cast<std::uint32_t>(progress.index);
    operation.contributor_count = static_cast<std::uint32_t>(op.ranks.size());
    operation.first_rank = op.ranks[progress.index];
    operation.timeout = lost_ ? 5s : 100s;
    return operation;
  }

  static std::size_t index_in(const BackupOp& op, std::uint32_t rank) {
    return static_cast<std::size_t>(std::find(op.ranks.begin(), op.ranks.end(), rank) - op.ranks.begin());
  }

  /// Computed here from the inputs of those who are in, and nowhere else.
  void learn(BackupOp& op, const Roster& roster) {
    op.roster = roster;
    std::vector<std::vector<std::byte>> inputs;
    for (std::uint32_t c = 0; c < op.inputs.size(); ++c) {
      if (roster.empty() || is_in(roster, c)) inputs.push_back(op.inputs[c]);
    }
    const auto in = static_cast<std::uint32_t>(inputs.size());
    std::vector<std::byte> whole;
    if (op.descriptor.dtype == DataType::kFloat32) {
      const std::uint32_t over = op.descriptor.reduce == ReduceOp::kAverage ? in : 1;
      whole = reduce_reference<float>(
          inputs, [](float a, float b) { return a + b; }, over);
    } else {
      const auto add = [](std::uint8_t a, std::uint8_t b) { return static_cast<std::uint8_t>(a + b); };
      whole = reduce_reference<std::uint8_t>(inputs, add, 1);
    }
    for (std::uint32_t part = 0; part < op.parts(); ++part) {
      const ByteRange range = op.range(part);
      op.expected.emplace_back(whole.begin() + static_cast<std::ptrdiff_t>(range.offset),
                               whole.begin() + static_cast<std::ptrdiff_t>(range.offset + range.bytes));
    }
  }

  void check_roster(const BackupOp& op, const Roster& roster) {
    const auto n = static_cast<std::uint32_t>(op.ranks.size());
    ASSERT_TRUE(is_sane(roster, n));
    const std::uint32_t b = cluster_.options().backup_workers;
    const auto in = static_cast<std::uint32_t>(members_of(roster).size());
    EXPECT_GE(in, n > b ? n - b : 1u) << "fewer than promised";
    ++totals_.operations;
    totals_.without_some += in < n ? 1 : 0;
    totals_.waited += in == n ? 1 : 0;
    dropped_ += n - in;
  }

  bool take_ended() {
    const bool any = !ended_.empty();
    while (!ended_.empty()) {
      const auto [rank, action] = std::move(ended_.front());
      ended_.pop_front();
      const auto found = running_[rank].find(action.key.op);
      if (found == running_[rank].end()) continue;
      Progress& progress = found->second;
      if (!action.status.is_ok()) {
        EXPECT_TRUE(lost_ && !loss_) << "rank " << rank << ": " << action.status.to_string();
        progress.in_flight.erase(action.key.part);
        give_up(rank, progress, action.status);
      } else {
        take(rank, progress, action);
      }
      const bool is_over = progress.has_failed || progress.done == ops_[progress.op].parts();
      if (!is_over || !progress.in_flight.empty()) continue;
      totals_.in_spite += lost_ && !loss_ && !progress.has_failed ? 1 : 0;
      running_[rank].erase(found);
      if (due_[rank] == Instant::max() && next_[rank] < ops_.size()) due_[rank] = cluster_.now() + wait(rank);
    }
    return any;
  }

  void take(std::uint32_t rank, Progress& progress, const CompleteAction& action) {
    BackupOp& op = ops_[progress.op];
    if (!progress.has_joined) {
      progress.has_joined = true;
      progress.roster = action.roster;
      if (!op.roster) {
        check_roster(op, action.roster);
        learn(op, action.roster);
      }
      EXPECT_EQ(*op.roster, action.roster) << "rank " << rank << " was told something else";
    } else {
      const ByteRange range = op.range(action.key.part);
      const auto part = std::span(op.memory[progress.index]).subspan(range.offset, range.bytes);
      EXPECT_TRUE(std::equal(part.begin(), part.end(), op.expected[action.key.part].begin()))
          << "rank " << rank << " op " << op.number << " part " << action.key.part;
      std::fill(part.begin(), part.end(), std::byte{0xBD});
      progress.in_flight.erase(action.key.part);
      ++progress.done;
    }
    if (!progress.has_failed) start_parts(rank, progress);
  }

  bool is_over() const {
    for (std::uint32_t rank = 0; rank < next_.size(); ++rank) {
      const auto running = running_.find(rank);
      if (running != running_.end() && !running->second.empty()) return false;
      for (std::size_t op = next_[rank]; op < ops_.size(); ++op) {
        if (index_in(ops_[op], rank) < ops_[op].ranks.size()) return false;
      }
    }
    return true;
  }

  std::string describe() const {
    std::string text;
    for (const auto& [rank, running] : running_) {
      for (const auto& [number, progress] : running) {
        text += "; rank " + std::to_string(rank) + " op " + std::to_string(number) +
                (progress.has_joined ? " part " + std::to_string(progress.done) : " joins");
      }
    }
    return text;
  }

  void check_end() {
    if (lost_) return check_end_after_loss();
    const ClusterOptions& options = cluster_.options();
    cluster_.expect_receives_for_all();
    EXPECT_EQ(cluster_.network().stats().truncated, 0u);
    std::uint64_t dropped = 0;
    for (std::uint32_t lane = 0; lane < options.lanes; ++lane) {
      const server::EngineStats& stats = cluster_.lane(lane).stats();
      EXPECT_TRUE(cluster_.lane(lane).is_idle()) << "lane " << lane;
      EXPECT_EQ(stats.slots_in_use, 0u);
      EXPECT_LE(stats.slots_peak, cluster_.slots());
      EXPECT_LE(stats.kept_peak, options.backup_bytes);
      EXPECT_EQ(stats.kept_bytes, 0u);
      EXPECT_EQ(stats.messages_rejected, 0u) << "lane " << lane;
      EXPECT_EQ(stats.ops_failed, 0u);
      totals_.kept_much += stats.kept_peak > options.backup_bytes / 2 ? 1 : 0;
      dropped += stats.dropped;
    }
    EXPECT_EQ(dropped, dropped_);
    totals_.dropped += dropped_;
    totals_.messages += cluster_.network().stats().messages;
    for (std::uint32_t rank = 0; rank < options.workers; ++rank) {
      EXPECT_TRUE(cluster_.worker(rank).is_idle()) << "rank " << rank;
      EXPECT_EQ(cluster_.worker(rank).stats().messages_rejected, 0u) << "rank " << rank;
    }
  }

  void check_end_after_loss() {
    const ClusterOptions& options = cluster_.options();
    EXPECT_EQ(cluster_.network().stats().truncated, 0u);
    for (std::uint32_t lane = 0; lane < options.lanes; ++lane) {
      const server::EngineStats& stats = cluster_.lane(lane).stats();
      EXPECT_EQ(stats.slots_in_use, 0u);
      EXPECT_EQ(stats.kept_bytes, 0u);
      EXPECT_LE(stats.kept_peak, options.backup_bytes);
    }
  }

  Random random_;
  Totals& totals_;
  std::vector<BackupOp> ops_;  // Its memory outlives the cluster.
  Cluster cluster_;
  Instant start_ = cluster_.now();
  std::vector<std::uint64_t> pace_;  // Microseconds between two operations, at most.
  std::vector<std::size_t> next_;    // By rank: the operation that it starts next ...
  std::vector<Instant> due_;         // ... and when; max: when one of its own has ended.
  std::vector<std::size_t> depth_;   // Operations that it has under way at once.
  std::map<std::uint32_t, std::map<std::uint64_t, Progress>> running_;
  std::deque<std::pair<std::uint32_t, CompleteAction>> ended_;
  std::uint64_t dropped_ = 0;
  std::optional<std::uint32_t> lost_;
  std::optional<Instant> loss_;  // When; none: it has happened, or never will.
};

TEST(BackupSchedules, AllAgreeOnWhoIsInAndOnTheSumOfThoseInThreeThousandSchedules) {
  const SeedRange range = seeds(3'000);
  Totals totals;
  for (std::uint64_t seed = range.first; seed < range.first + range.count; ++seed) {
    Job(seed, totals).run();
    if (HasFailure()) FAIL() << "seed " << seed << " fails; HERRING_TEST_SEED=" << seed << " replays it";
  }
  std::cout << range.count << " schedules: " << totals.operations << " operations with backup workers, "
            << totals.without_some << " without somebody, " << totals.dropped << " contributions dropped, "
            << totals.kept_much << " lanes that kept more than half of what they may, " << totals.messages
            << " messages\n";
  if (range.count < 1000) return;
  EXPECT_GT(totals.without_some, range.count / 2);
  EXPECT_GT(totals.waited, range.count / 2);
  EXPECT_GT(totals.kept_much, range.count / 4);
}

TEST(BackupSchedules, WhenAWorkerIsLostAllEndsAndWhatEndsWellIsRight) {
  const SeedRange range = seeds(1'500);
  Totals totals;
  for (std::uint64_t seed = range.first; seed < range.first + range.count; ++seed) {
    Job(seed, totals, true).run();
    if (HasFailure()) FAIL() << "seed " << seed << " fails; HERRING_TEST_SEED=" << seed << " replays it";
  }
  std::cout << range.count << " schedules: " << totals.failed << " operations failed, " << totals.in_spite
            << " ended well after the loss\n";
  if (range.count < 1000) return;
  EXPECT_GT(totals.failed, range.count);
  EXPECT_GT(totals.in_spite, range.count / 10);
}

}  // namespace
}  // namespace herring::testing
