// The ranks of a host reduce in their devices' memory, over FakeDevices that share it, under seeded schedules: copies
// in random pieces and order, ranks that come late, tensors of all sizes, streams that stand still, devices that fail.
#include "staging/peer_engine.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <map>
#include <optional>
#include <random>
#include <set>

#include "device/fake_device.h"
#include "seeds.h"

namespace herring::staging {
namespace {

using namespace std::chrono_literals;
using testing::FakeDevice;
using testing::FakeGpu;

constexpr std::uint64_t kSlotBytes = 512;
constexpr Instant kNow{1s};

TEST(PeerEngine, RangesCoverThePieceAndAreAligned) {
  for (const std::uint64_t bytes : {4ull, 64ull, 65ull, 1000ull, 4096ull, 16'777'216ull}) {
    for (std::uint32_t members = 2; members <= 8; ++members) {
      std::uint64_t next = 0;
      for (std::uint32_t member = 0; member < members; ++member) {
        const PieceRange range = range_of(bytes, member, members);
        if (range.bytes > 0) {
          EXPECT_EQ(range.offset, next);
          EXPECT_EQ(range.offset % kRangeAlignment, 0u);
        }
        next += range.bytes;
      }
      EXPECT_EQ(next, bytes);
    }
  }
}

TEST(PeerEngine, SizesThatDoNotGoAreRefused) {
  EXPECT_THROW(PeerEngine({.members = 1, .slot_bytes = 512}), Error);
  EXPECT_THROW(PeerEngine({.members = 2, .slot_bytes = 100}), Error);
  PeerEngine engine({.members = 2, .slot_bytes = 512});
  PeerActions actions;
  EXPECT_EQ(engine.submit({1}, 0, Instant::max(), actions).code(), Code::kInvalidArgument);
  EXPECT_TRUE(engine.submit({1}, 8, Instant::max(), actions).is_ok());
  EXPECT_EQ(engine.submit({1}, 8, Instant::max(), actions).code(), Code::kInvalidArgument);
}

TEST(PeerEngine, ATensorThatIsNotReadyInTimeClosesTheGroup) {
  PeerEngine engine({.members = 2, .slot_bytes = 512});
  PeerActions actions;
  ASSERT_TRUE(engine.submit({1}, 8, kNow + 1s, actions).is_ok());
  engine.advance(kNow, actions);
  ASSERT_EQ(actions.size(), 1u);
  engine.advance(kNow + 2s, actions);
  ASSERT_EQ(actions.size(), 3u);
  EXPECT_EQ(std::get<Close>(actions[1]).why.code(), Code::kTimeout);
  EXPECT_EQ(std::get<PeerComplete>(actions[2]).status.code(), Code::kTimeout);
  // The copy still reads it.
  engine.on_copied_in(0, Status::ok(), actions);
  ASSERT_EQ(actions.size(), 4u);
  EXPECT_EQ(std::get<PeerRelease>(actions[3]).operation.value, 1u);
  EXPECT_EQ(engine.submit({2}, 8, Instant::max(), actions).code(), Code::kTimeout);
  EXPECT_TRUE(engine.is_idle());
}

TEST(PeerEngine, ARefusedResultIsTheOperationsEnd) {
  PeerEngine engine({.members = 2, .slot_bytes = 512});
  PeerActions actions;
  ASSERT_TRUE(engine.submit({1}, 8, Instant::max(), actions).is_ok());
  engine.on_copied_in(0, Status::ok(), actions);
  engine.on_met(0, Status::ok(), actions);
  ASSERT_TRUE(std::holds_alternative<SumAll>(actions.back()));
  actions.clear();
  engine.on_result_submitted(0, {Code::kTransport, "refused"}, actions);
  ASSERT_EQ(actions.size(), 3u);
  EXPECT_EQ(std::get<PeerComplete>(actions[1]).status.code(), Code::kTransport);
  EXPECT_TRUE(std::holds_alternative<PeerRelease>(actions[2]));
}

struct Plan {
  std::uint32_t ranks = 2;
  std::uint64_t together_bytes = 0;
  std::vector<std::uint64_t> sizes;  ///< Of float32 tensors, in bytes.
  bool has_faults = false;
  bool has_network = false;  ///< Another host has the same numbers.
};

/// What comes to all ranks when the last one has come, each later by the seed, and in any order: Meet and Share.
class Point {
 public:
  explicit Point(std::size_t ranks) : came_(ranks), told_(ranks) {}
  void come(std::uint32_t rank, std::uint64_t piece) {
    if (!came_[rank].empty()) {
      EXPECT_GT(piece, came_[rank].back()) << "rank " << rank << " comes out of order";
    }
    came_[rank].push_back(piece);
  }
  /// One of the pieces that all have come to and this rank has not been told of.
  std::optional<std::uint64_t> next(std::uint32_t rank, std::mt19937_64& random) {
    std::size_t complete = came_[rank].size();
    for (const auto& each : came_) complete = std::min(complete, each.size());
    std::vector<std::size_t> untold;
    for (std::size_t index = 0; index < complete; ++index) {
      if (!told_[rank].contains(index)) untold.push_back(index);
    }
    if (untold.empty()) return std::nullopt;
    const std::size_t index = untold[random() % untold.size()];
    for (const auto& each : came_) EXPECT_EQ(each[index], came_[0][index]) << "ranks meet for different pieces";
    told_[rank].insert(index);
    return came_[rank][index];
  }

 private:
  std::vector<std::vector<std::uint64_t>> came_;
  std::vector<std::set<std::size_t>> told_;
};

class Rank;
struct World {
  std::vector<std::unique_ptr<Rank>> ranks;
  std::unique_ptr<Point> meet, share;
  Status closed;
};

class Rank {
 public:
  Rank(World& world, const Plan& plan, std::uint32_t index, std::uint64_t seed)
      : world_(world),
        plan_(plan),
        index_(index),
        gpu_({.seed = seed, .largest_piece = 200}),
        device_(gpu_),
        engine_({.members = plan.ranks,
                 .slot_bytes = kSlotBytes,
                 .together_bytes = plan.together_bytes,
                 .has_network = plan.has_network}) {
    in_ = device_.create_stream();
    back_ = device_.create_stream();
    theirs_ = gpu_.create_stream();
    EXPECT_TRUE(device_.allocate_shared(kSlots * kSlotBytes, own_, descriptor_).is_ok());
  }
  ~Rank() { close(descriptor_); }

  void import() {
    for (const auto& other : world_.ranks) {
      DeviceSpan memory = own_;
      if (other.get() != this) {
        EXPECT_TRUE(device_.import_shared(other->descriptor_, own_.bytes, memory).is_ok());
      }
      slots_.push_back(memory);
    }
  }

  static float value(std::uint32_t rank, std::size_t operation, std::size_t at) {
    return static_cast<float>(rank + 1) * 0.37f + static_cast<float>(operation * 31 + at % 97) * 0.011f;
  }

  void submit_next() {
    const std::uint32_t id = next_++;
    const std::uint64_t bytes = plan_.sizes[id];
    Tensor& tensor = tensors_[id];
    if (!device_.allocate(bytes, tensor.memory).is_ok()) return on_complete(id, device_.health());
    const std::uint64_t written = gpu_.create_event();
    gpu_.launch(theirs_, [this, id, bytes, address = tensor.memory.address] {
      auto* const there = reinterpret_cast<float*>(gpu_.alias(address, bytes));
      if (there == nullptr) return;  // Given up, and freed before its own kernel ran.
      for (std::size_t i = 0; i < bytes / 4; ++i) there[i] = value(index_, id, i);
    });
    gpu_.record(written, theirs_);
    EXPECT_TRUE(device_.wait_event(in_, {written}).is_ok() || gpu_.is_broken());
    PeerActions actions;
    const Status status = engine_.submit({id}, bytes, Instant::max(), actions);
    if (!status.is_ok()) on_complete(id, status);
    act(actions);
  }
  bool has_to_submit() const { return next_ < plan_.sizes.size(); }

  void look() {
    TicketDone done[4];
    const std::size_t count = device_.poll(done);
    PeerActions actions;
    for (std::size_t i = 0; i < count; ++i) {
      const auto [piece, kind] = tickets_.at(done[i].ticket.value);
      tickets_.erase(done[i].ticket.value);
      answer(kind, piece, done[i].status, actions);
    }
    if (!device_.health().is_ok()) engine_.lose_device(device_.health(), actions);
    act(actions);
  }

  void hear(bool of_meeting, std::mt19937_64& random) {
    Point& point = of_meeting ? *world_.meet : *world_.share;
    PeerActions actions;
    if (!world_.closed.is_ok()) {
      // Whoever waits hears it.
      engine_.close(world_.closed, actions);
    } else if (const auto piece = point.next(index_, random)) {
      of_meeting ? engine_.on_met(*piece, Status::ok(), actions) : engine_.on_shared(*piece, Status::ok(), actions);
    }
    act(actions);
  }

  /// The network is done with one of them, in any order.
  void exchange(std::mt19937_64& random) {
    if (exchanges_.empty() || gpu_.is_broken()) return;
    const auto place = exchanges_.begin() + static_cast<std::ptrdiff_t>(random() % exchanges_.size());
    const Piece piece = *place;
    exchanges_.erase(place);
    const PieceRange range = range_of(piece.bytes, index_, plan_.ranks);
    if (range.bytes > 0) {
      auto* const there =
          reinterpret_cast<float*>(gpu_.alias(own_.address + piece.slot_offset + range.offset, range.bytes));
      for (std::size_t i = 0; i < range.bytes / 4; ++i) there[i] *= 2;
    }
    PeerActions actions;
    engine_.on_exchanged(piece.number, Status::ok(), actions);
    act(actions);
  }

  bool is_over() const { return !has_to_submit() && engine_.is_idle() && ends_.size() == plan_.sizes.size(); }
  bool has_all_ends() const { return ends_.size() == plan_.sizes.size(); }
  FakeGpu& gpu() { return gpu_; }
  StreamHandle theirs() const { return {theirs_}; }

  void check() {
    for (const auto& [id, tensor] : tensors_) {
      if (!ends_.at(id).is_ok()) continue;
      if (gpu_.is_broken() && tensor.result.empty()) continue;  // Nobody could look any more.
      ASSERT_EQ(tensor.result.size(), plan_.sizes[id] / 4) << "operation " << id;
      for (std::size_t i = 0; i < tensor.result.size(); ++i) {
        ASSERT_EQ(tensor.result[i], expected(id, i)) << "rank " << index_ << " operation " << id << " element " << i;
      }
    }
    EXPECT_TRUE(gpu_.faults().empty()) << gpu_.faults().front();
  }
  const std::map<std::uint32_t, Status>& ends() const { return ends_; }

 private:
  enum class Kind { kIn, kSummed, kResult };
  struct Tensor {
    DeviceSpan memory;
    std::vector<float> result;
  };

  float tree(std::size_t id, std::size_t at, std::uint32_t low, std::uint32_t high) const {
    if (high - low == 1) return value(low, id, at);
    std::uint32_t half = 1;
    while (half * 2 < high - low) half *= 2;
    return tree(id, at, low, low + half) + tree(id, at, low + half, high);
  }
  float expected(std::size_t id, std::size_t at) const {
    return tree(id, at, 0, plan_.ranks) * (plan_.has_network ? 2.0f : 1.0f);
  }

  void answer(Kind kind, std::uint64_t piece, const Status& status, PeerActions& actions) {
    switch (kind) {
      case Kind::kIn:
        return engine_.on_copied_in(piece, status, actions);
      case Kind::kSummed:
        return engine_.on_summed(piece, status, actions);
      case Kind::kResult:
        return engine_.on_result(piece, status, actions);
    }
  }

  void watch(StreamHandle stream, Kind kind, std::uint64_t piece, PeerActions& actions) {
    Ticket ticket;
    const Status status = device_.record(stream, ticket);
    if (!status.is_ok()) return answer(kind, piece, status, actions);
    tickets_[ticket.value] = {piece, kind};
  }

  Status sum(const Piece& piece, PieceRange range, std::uint64_t target) {
    cuda::SumParameters parameters;
    for (std::uint32_t i = 0; i < plan_.ranks; ++i) {
      parameters.sources[i] = slots_[i].address + piece.slot_offset + range.offset;
    }
    parameters.target = target;
    parameters.elements = range.bytes / 4;
    parameters.source_count = plan_.ranks;
    return device_.launch(back_, KernelId::kSum, std::as_bytes(std::span(&parameters, 1)), 1);
  }

  void act(PeerActions& actions) {
    while (!actions.empty()) {
      PeerActions more;
      for (const PeerAction& action : actions) std::visit([&](const auto& each) { perform(each, more); }, action);
      actions.swap(more);
    }
  }
  DeviceSpan part(const Piece& piece) {
    return tensors_.at(piece.operation.value).memory.subspan(piece.offset, piece.bytes);
  }

  void perform(const CopyIn& action, PeerActions& more) {
    const Piece& piece = action.piece;
    const Status status = device_.copy_inside(in_, own_.subspan(piece.slot_offset, piece.bytes), part(piece));
    status.is_ok() ? watch(in_, Kind::kIn, piece.number, more) : answer(Kind::kIn, piece.number, status, more);
  }
  void perform(const Meet& action, PeerActions&) { world_.meet->come(index_, action.piece.number); }
  void perform(const Share& action, PeerActions&) { world_.share->come(index_, action.piece.number); }
  void perform(const Exchange& action, PeerActions&) { exchanges_.push_back(action.piece); }
  /// Devices whose kernels wait for the others' want them in the same order on all ranks.
  static void expect_next(std::int64_t& last, const Piece& piece, const char* what) {
    EXPECT_GT(static_cast<std::int64_t>(piece.number), last) << what << " out of order";
    last = static_cast<std::int64_t>(piece.number);
  }

  void perform(const SumOwn& action, PeerActions& more) {
    expect_next(last_sum_, action.piece, "SumOwn");
    const PieceRange range = range_of(action.piece.bytes, index_, plan_.ranks);
    const Status status = sum(action.piece, range, own_.address + action.piece.slot_offset + range.offset);
    status.is_ok() ? watch(back_, Kind::kSummed, action.piece.number, more)
                   : answer(Kind::kSummed, action.piece.number, status, more);
  }
  void perform(const SumAll& action, PeerActions& more) {
    expect_next(last_sum_, action.piece, "SumAll");
    end_result(action.piece, sum(action.piece, {0, action.piece.bytes}, part(action.piece).address), more);
  }
  void perform(const CopyResult& action, PeerActions& more) {
    expect_next(last_result_, action.piece, "CopyResult");
    Status status;
    for (std::uint32_t i = 0; i < plan_.ranks && status.is_ok(); ++i) {
      const PieceRange range = range_of(action.piece.bytes, i, plan_.ranks);
      status = device_.copy_inside(back_, part(action.piece).subspan(range.offset, range.bytes),
                                   slots_[i].subspan(action.piece.slot_offset + range.offset, range.bytes));
    }
    end_result(action.piece, status, more);
  }
  void end_result(const Piece& piece, const Status& status, PeerActions& more) {
    engine_.on_result_submitted(piece.number, status, more);
    if (status.is_ok()) watch(back_, Kind::kResult, piece.number, more);
  }
  void perform(const PeerComplete& action, PeerActions&) {
    const std::uint32_t id = action.operation.value;
    on_complete(id, action.status);
    if (!action.status.is_ok()) return;
    // Somebody who works on the back stream now sees the result.
    gpu_.launch(back_.value, [this, id] {
      Tensor& tensor = tensors_.at(id);
      const auto* const there = reinterpret_cast<const float*>(gpu_.alias(tensor.memory.address, plan_.sizes[id]));
      tensor.result.assign(there, there + plan_.sizes[id] / 4);
    });
  }
  void on_complete(std::uint32_t id, const Status& status) {
    EXPECT_TRUE(ends_.try_emplace(id, status).second) << "operation " << id << " completed twice";
  }
  void perform(const PeerRelease& action, PeerActions&) {
    const std::uint32_t id = action.operation.value;
    EXPECT_TRUE(ends_.contains(id)) << "released before its end";
    EXPECT_TRUE(released_.insert(id).second) << "released twice";
    // Freed in the order of the back stream, after whoever looks there; a copy of ours under way would be a fault.
    if (!gpu_.is_broken())
      gpu_.launch(back_.value, [this, address = tensors_.at(id).memory.address] { to_free_.push_back(address); });
  }
  void perform(const Close& action, PeerActions&) {
    if (world_.closed.is_ok()) world_.closed = action.why;
  }

 public:
  void free_released() {
    for (const std::uint64_t address : to_free_) gpu_.release(address);
    to_free_.clear();
  }

 private:
  std::int64_t last_sum_ = -1;
  std::int64_t last_result_ = -1;
  World& world_;
  const Plan& plan_;
  const std::uint32_t index_;
  FakeGpu gpu_;
  FakeDevice device_;
  PeerEngine engine_;
  StreamHandle in_, back_;
  std::uint64_t theirs_ = 0;
  DeviceSpan own_;
  int descriptor_ = -1;
  std::vector<DeviceSpan> slots_;
  std::uint32_t next_ = 0;
  std::map<std::uint32_t, Tensor> tensors_;
  std::map<std::uint64_t, std::pair<std::uint64_t, Kind>> tickets_;
  std::map<std::uint32_t, Status> ends_;
  std::set<std::uint32_t> released_;
  std::vector<Piece> exchanges_;
  std::vector<std::uint64_t> to_free_;
};

void run(std::uint64_t seed, bool has_faults) {
  SCOPED_TRACE("HERRING_TEST_SEED=" + std::to_string(seed));
  std::mt19937_64 random(seed);
  const auto draw = [&](std::uint64_t low, std::uint64_t high) {
    return std::uniform_int_distribution<std::uint64_t>(low, high)(random);
  };
  Plan plan;
  plan.ranks = static_cast<std::uint32_t>(draw(2, 5));
  plan.together_bytes = draw(0, 2) * 200;
  plan.has_faults = has_faults;
  plan.has_network = draw(0, 2) == 0;
  const std::uint64_t count = draw(1, 6);
  for (std::uint64_t i = 0; i < count; ++i) plan.sizes.push_back(4 * draw(1, draw(0, 1) == 0 ? 20 : 900));
  World world;
  world.meet = std::make_unique<Point>(plan.ranks);
  world.share = std::make_unique<Point>(plan.ranks);
  for (std::uint32_t i = 0; i < plan.ranks; ++i) {
    world.ranks.push_back(std::make_unique<Rank>(world, plan, i, seed * 13 + i));
  }
  for (auto& rank : world.ranks) rank->import();
  const std::uint64_t fault_at = has_faults ? draw(0, 300) : ~0ull;
  const auto is_over = [&](const auto& rank) {
    return rank->gpu().is_broken() ? rank->has_all_ends() : rank->is_over();
  };
  std::uint64_t step = 0;
  for (; step < 2'000'000 && !std::ranges::all_of(world.ranks, is_over); ++step) {
    Rank& rank = *world.ranks[draw(0, plan.ranks - 1)];
    if (step == fault_at) rank.gpu().fail();
    switch (draw(0, 5)) {
      case 0:
        if (rank.has_to_submit()) rank.submit_next();
        break;
      case 1:
        rank.hear(true, random);
        break;
      case 2:
        rank.hear(false, random);
        break;
      case 3:
        rank.exchange(random);
        break;
      default:
        rank.look();
        rank.free_released();
    }
  }
  ASSERT_TRUE(std::ranges::all_of(world.ranks, is_over)) << "no end after " << step << " steps";
  for (auto& rank : world.ranks) {
    if (!rank->gpu().is_broken()) rank->gpu().run_all();
    rank->free_released();
    rank->check();
    if (!has_faults) {
      for (const auto& [id, status] : rank->ends()) EXPECT_TRUE(status.is_ok()) << status.to_string();
    }
  }
}

TEST(PeerSchedules, EveryRankHasTheSumWhateverTheOrder) {
  const testing::SeedRange range = testing::seeds(2000);
  for (std::uint64_t seed = range.first; seed < range.first + range.count && !HasFailure(); ++seed) run(seed, false);
}

TEST(PeerSchedules, ADeviceThatFailsEndsItForAll) {
  const testing::SeedRange range = testing::seeds(2000);
  for (std::uint64_t seed = range.first; seed < range.first + range.count && !HasFailure(); ++seed) run(seed, true);
}

}  // namespace
}  // namespace herring::staging
