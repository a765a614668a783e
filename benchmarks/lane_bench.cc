// What a server lane's own work for a chunk costs (matching, granting, results), by the number of contributors. Nothing
// is sent and nothing is summed: this is the engine alone.
//
//   cmake -S . -B build -G Ninja -DHERRING_BENCHMARKS=ON && ninja -C build bench_lane && build/bench_lane
//   [CONTRIBUTORS...]
//
// ns = median over turns of the time in the engine's calls, for each chunk and contributor; a constant means that the
// cost of a chunk grows with its contributors and not with their square. The pushes of a chunk come in a random order.
// "at once": so many operations have been announced before the first push. --failover: as where server processes can
// replace each other, with a receipt of each contributor for each operation.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <memory>
#include <random>
#include <span>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "server/engine.h"

namespace {

using namespace herring;

constexpr std::uint64_t kJob = 7;
constexpr std::uint32_t kChunkBytes = 64;
constexpr std::uint32_t kWindow = 4;
constexpr std::uint32_t kChunks = 32;
constexpr int kTurns = 9;

struct Cost {
  double announce_ns = 0;  // For each contributor.
  double chunk_ns = 0;     // For each chunk and contributor.
};

class Lane final {
 public:
  Lane(std::uint32_t workers, bool failover)
      : workers_(workers), failover_(failover), slots_(std::size_t{workers} * kWindow * kChunkBytes), next_(workers) {
    server::EngineConfig config;
    config.self = PeerId{workers};
    config.job_id = kJob;
    config.workers = workers;
    config.max_chunk_bytes = kChunkBytes;
    config.window = kWindow;
    config.max_eager_bytes = 0;
    config.failover = failover;
    engine_ = std::make_unique<server::Engine>(config, slots_);
  }

  Cost run(std::uint32_t operations) {
    Cost cost;
    cost.announce_ns = timed([&] {
                         for (std::uint32_t i = 0; i < operations; ++i) announce_all();
                       }) /
                       operations / workers_;
    double chunks = 0;
    while (!events_.empty() || collect(chunks)) {
      std::vector<Event> now;
      now.swap(events_);
      std::ranges::shuffle(now, random_);
      std::ranges::move(std::exchange(receipts_, {}), std::back_inserter(events_));
      chunks += timed([&] { tell(now); });
      collect(chunks);
    }
    if (!engine_->is_idle()) {
      std::fprintf(stderr, "bench_lane: the operations did not end\n");
      std::exit(1);
    }
    cost.chunk_ns = chunks / operations / kChunks / workers_;
    return cost;
  }

 private:
  /// What happens next to the engine.
  struct Event {
    enum class Kind : std::uint8_t { kPushed, kReduced, kSent, kControl } kind;
    Token token;
    wire::Header header;
    std::vector<std::byte> body = {};
  };

  template <class Call>
  static double timed(Call&& call) {
    const auto begin = std::chrono::steady_clock::now();
    call();
    return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - begin).count();
  }

  static wire::Header header(std::uint64_t op, std::uint32_t sender, wire::MessageType type) {
    wire::Header header;
    header.type = type;
    header.job_id = kJob;
    header.sender = sender;
    header.op = op;
    return header;
  }

  void announce_all() {
    ++op_;
    for (std::uint32_t sender = 0; sender < workers_; ++sender) {
      wire::Announce announce;
      announce.descriptor.dims = 1;
      announce.descriptor.shape[0] = kChunks * kChunkBytes / 4;
      announce.descriptor.op_bytes = announce.descriptor.part_bytes = announce.shard_bytes = kChunks * kChunkBytes;
      announce.contributor = announce.first_rank = sender;
      announce.contributor_count = workers_;
      announce.rank_count = 1;
      announce.chunk_bytes = kChunkBytes;
      announce.owned_count = kChunks;
      announce.timeout_ms = 600'000;
      auto body = wire::encode(announce);
      wire::Header head = header(op_, sender, wire::MessageType::kAnnounce);
      head.tag = next_tag_ += kChunks;
      head.offset = next_[sender]++;
      head.count = 1;
      head.payload_bytes = static_cast<std::uint32_t>(body.size());
      engine_->on_control({}, head, body, Token{sender});
    }
  }

  void tell(std::span<Event> events) {
    for (Event& event : events) {
      switch (event.kind) {
        case Event::Kind::kPushed:
          engine_->on_received({}, event.token, Status::ok(), event.header);
          break;
        case Event::Kind::kReduced:
          engine_->on_reduced({}, event.token, {});
          break;
        case Event::Kind::kSent:
          engine_->on_sent({}, event.token, Status::ok());
          break;
        case Event::Kind::kControl:
          engine_->on_control({}, event.header, event.body, Token{0});
          break;
      }
    }
  }

  /// Takes what the engine asks for, and makes events of it. True where there are some.
  bool collect(double& ns) {
    actions_.clear();
    ns += timed([this] { engine_->take_actions(actions_); });
    for (const Action& action : actions_) {
      if (const auto* post = std::get_if<PostReceiveAction>(&action)) posted_[post->tag.value] = post->token;
    }
    for (const Action& action : actions_) {
      if (const auto* reduce = std::get_if<ReduceAction>(&action)) {
        events_.push_back({Event::Kind::kReduced, reduce->token, {}});
      }
      const auto* send = std::get_if<SendAction>(&action);
      if (send == nullptr) continue;
      events_.push_back({Event::Kind::kSent, send->token, {}});
      if (send->header.type == wire::MessageType::kGrant) answer(*send);
      if (send->header.type == wire::MessageType::kResult && failover_) confirm(*send);
    }
    return !events_.empty();
  }

  /// The worker pushes all that it may.
  void answer(const SendAction& grant) {
    for (std::uint32_t i = 0; i < grant.header.count; ++i) {
      wire::Header head = header(grant.header.op, grant.to.value, wire::MessageType::kPush);
      head.tag = grant.header.tag + i;
      head.chunk = grant.header.chunk + i;
      head.offset = std::uint64_t{head.chunk} * kChunkBytes;
      head.payload_bytes = kChunkBytes;
      const auto found = posted_.find(head.tag);
      if (found == posted_.end()) continue;
      events_.push_back({Event::Kind::kPushed, found->second, head});
      posted_.erase(found);
    }
  }

  /// The worker has all of an operation's results.
  void confirm(const SendAction& result) {
    const std::uint64_t announced = result.header.tag - result.header.chunk;
    if (++results_[announced] < kChunks) return;
    results_.erase(announced);
    Event event{Event::Kind::kControl, {}, header(0, result.to.value, wire::MessageType::kReceipt)};
    event.body = wire::encode_list(std::vector{announced});
    event.header.payload_bytes = static_cast<std::uint32_t>(event.body.size());
    receipts_.push_back(std::move(event));
  }

  const std::uint32_t workers_;
  const bool failover_;
  std::vector<std::byte> slots_;
  std::unique_ptr<server::Engine> engine_;
  std::vector<std::uint64_t> next_;
  std::uint64_t op_ = 0;
  std::uint64_t next_tag_ = 1000;
  Actions actions_;
  std::unordered_map<std::uint64_t, Token> posted_;
  std::unordered_map<std::uint64_t, std::uint32_t> results_;  // By announce: how many its worker has.
  std::vector<Event> receipts_;                               // For the next turn: all results are sent by then.
  std::vector<Event> events_;
  std::mt19937 random_{1};
};

double median(std::vector<double> values) {
  std::ranges::nth_element(values, values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2));
  return values[values.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::uint32_t> counts;
  bool failover = false;
  for (int i = 1; i < argc; ++i) {
    if (std::string_view(argv[i]) == "--failover") {
      failover = true;
      continue;
    }
    counts.push_back(static_cast<std::uint32_t>(std::max(1, std::atoi(argv[i]))));
  }
  if (counts.empty()) counts = {8, 64, 512, 2048};
  std::printf("contributors  at once  ns/announce  ns/(chunk x contributor)  us/chunk\n");
  for (const std::uint32_t count : counts) {
    for (const std::uint32_t operations : {1u, 4u}) {
      Lane lane(count, failover);
      std::vector<double> announces;
      std::vector<double> chunks;
      lane.run(operations);
      for (int i = 0; i < kTurns; ++i) {
        const Cost cost = lane.run(operations);
        announces.push_back(cost.announce_ns);
        chunks.push_back(cost.chunk_ns);
      }
      const double each = median(chunks);
      std::printf("%12u  %7u  %11.0f  %24.0f  %8.1f\n", count, operations, median(announces), each,
                  each * count / 1000);
    }
  }
  return 0;
}
