// What a lane does to find out what it may grant.
#include <algorithm>
#include <random>
#include <vector>

#include "server/engine_bench.h"

namespace herring::server {
namespace {

/// Three operations of all workers, whose pushes come in a random order.
struct Traffic {
  explicit Traffic(std::uint32_t workers) : bench(workers, 4, 0) {
    for (bench.op = 1; bench.op <= kOperations; ++bench.op) {
      for (std::uint32_t sender = 0; sender < workers; ++sender) {
        bench.send(sender, bench.announce(sender, kChunks));
        collect();
      }
    }
  }

  /// Until nothing is under way any more.
  void run() {
    while (!pushes.empty() || !sent.empty()) {
      for (const Token token : std::exchange(sent, {})) {
        bench.engine->on_sent(bench.now, token, Status::ok());
        bench.collect();
        collect();
      }
      std::ranges::shuffle(pushes, random);
      for (const Push& push : std::exchange(pushes, {})) {
        bench.op = push.op;
        bench.push(push.sender, push.tag, push.chunk);
        collect();
      }
    }
  }

  void collect() {
    for (const SendAction& action : bench.all<SendAction>()) {
      sent.push_back(action.token);
      if (action.header.type != wire::MessageType::kGrant) continue;
      for (std::uint32_t i = 0; i < action.header.count; ++i) {
        pushes.push_back({action.header.op, action.to.value, action.header.tag + i, action.header.chunk + i});
      }
    }
  }

  struct Push {
    std::uint64_t op;
    std::uint32_t sender;
    std::uint64_t tag;
    std::uint32_t chunk;
  };
  static constexpr std::uint32_t kChunks = 24;
  static constexpr std::uint32_t kOperations = 3;
  Bench bench;
  std::vector<Push> pushes;
  std::vector<Token> sent;
  std::mt19937 random{1};
};

// Each push of each contributor is an occasion to grant. A look at all contributors each time made a chunk of 2,048
// contributors cost 112 ms.
TEST(ServerGrants, AChunkCostsAsItsContributorsAndNotAsTheirSquare) {
  for (const std::uint32_t workers : {8u, 64u, 256u}) {
    Traffic traffic(workers);
    traffic.run();
    ASSERT_TRUE(traffic.bench.engine->is_idle());
    const EngineStats& stats = traffic.bench.engine->stats();
    EXPECT_EQ(stats.ops_completed, Traffic::kOperations);
    const std::uint64_t chunks = std::uint64_t{Traffic::kOperations} * Traffic::kChunks * workers;
    EXPECT_GE(stats.looks, chunks);
    EXPECT_LE(stats.looks, 12 * chunks) << workers << " workers";
  }
}

}  // namespace
}  // namespace herring::server
