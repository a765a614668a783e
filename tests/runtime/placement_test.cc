// Who runs where decides every byte's way: a plan that differs between processes would hang a job or corrupt its sums.
#include "runtime/placement.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "core/status.h"
#include "fusion_buffer/shard_plan.h"
#include "runtime/lane.h"
#include "runtime/server_exchange.h"
#include "wire/header.h"

namespace herring::runtime {
namespace {

std::vector<Member> members(Role role, const std::vector<std::string>& hosts) {
  std::vector<Member> result;
  for (const std::string& host : hosts) {
    const auto rank = static_cast<std::uint32_t>(result.size());
    result.push_back({role, rank, 100 + rank, "id-" + host, host});
  }
  return result;
}

Placement place(const Config& config, const std::vector<std::string>& workers,
                const std::vector<std::string>& servers = {}) {
  return make_placement(config, members(Role::kWorker, workers), members(Role::kServer, servers));
}

std::vector<std::uint32_t> everybody(const Placement& placement) {
  std::vector<std::uint32_t> ranks(placement.workers);
  std::iota(ranks.begin(), ranks.end(), 0u);
  return ranks;
}

TEST(Placement, OneHostWithoutServersUsesSharedMemoryAlone) {
  const Config config;
  const Placement placement = place(config, {"a", "a", "a"});
  EXPECT_TRUE(placement.lanes.empty());
  EXPECT_EQ(placement.servers, 0u);
  EXPECT_EQ(make_route(placement, config, 1, everybody(placement)).path, GroupRoute::Path::kLocal);
}

TEST(Placement, TwoHostsSendSmallDataToEachOther) {
  Config config;
  const Placement two = place(config, {"a", "b"});
  EXPECT_EQ(two.one_hop_bytes, config.one_hop_bytes);
  EXPECT_EQ(make_route(two, config, 0, everybody(two)).one_hop_bytes, config.one_hop_bytes);
  EXPECT_EQ(make_route(two, config, 0, std::vector<std::uint32_t>{1, 0}).one_hop_bytes, config.one_hop_bytes);
  const Placement four = place(config, {"a", "a", "b", "b"});
  EXPECT_EQ(four.rails, 2u);
  EXPECT_EQ(make_route(four, config, 3, everybody(four)).one_hop_bytes, config.one_hop_bytes);
  // The host's share of a lane belongs to the process that the lane is in, whatever the order of the group.
  EXPECT_EQ(make_route(four, config, 3, std::vector<std::uint32_t>{1, 0, 2, 3}).one_hop_bytes, 0u);
  EXPECT_EQ(make_route(four, config, 3, std::vector<std::uint32_t>{1, 3}).one_hop_bytes, 0u);
  const Placement odd = place(config, {"a", "a", "b"});
  EXPECT_EQ(odd.rails, 1u);
  EXPECT_EQ(make_route(odd, config, 0, everybody(odd)).one_hop_bytes, config.eager_bytes)
      << "rank 1 has no lane in its process";
  EXPECT_EQ(make_route(odd, config, 0, std::vector<std::uint32_t>{0, 2}).one_hop_bytes, config.one_hop_bytes);
  EXPECT_EQ(make_route(odd, config, 1, std::vector<std::uint32_t>{1, 2}).one_hop_bytes, 0u);
  EXPECT_EQ(make_route(odd, config, 0, std::vector<std::uint32_t>{0, 1}).one_hop_bytes, 0u) << "of one host";
}

TEST(Placement, MoreGoesWithTheAnnounceWhereThreeHostsHaveAllServersInTheirWorkers) {
  const auto eager = [](std::uint32_t servers, std::vector<std::string> hosts,
                        std::vector<std::pair<std::string, std::string>> environment = {}) {
    Config config = read_config(environment).config;
    config.servers = servers;
    return place(config, std::move(hosts), std::vector<std::string>(servers, "s")).budget.eager_bytes;
  };
  EXPECT_EQ(eager(0, {"a", "b", "c"}), 128u << 10);
  EXPECT_EQ(eager(0, {"a", "a", "b", "b", "c"}), 128u << 10);
  EXPECT_EQ(eager(0, {"a", "b"}), 64u << 10);
  EXPECT_EQ(eager(3, {"a", "b", "c"}), 64u << 10) << "all apart";
  EXPECT_EQ(eager(1, {"a", "b", "c"}), 64u << 10) << "one apart";
  EXPECT_EQ(eager(0, {"a", "b", "c"}, {{"HERRING_EAGER_BYTES", "64KB"}}), 64u << 10) << "what was set holds";
  EXPECT_EQ(eager(0, {"a", "b", "c"}, {{"HERRING_EAGER_BYTES", "0"}}), 0u);
}

TEST(Placement, OneHopTakesAServerInEachHostAndNothingThatOutlivesAResult) {
  Config config;
  EXPECT_EQ(place(config, {"a", "b", "c"}).one_hop_bytes, 0u) << "more hosts than HERRING_ONE_HOP_HOSTS";
  EXPECT_EQ(place(config, {"a", "a"}).one_hop_bytes, 0u);
  config.servers = 1;
  EXPECT_EQ(place(config, {"a", "b"}, {"c"}).one_hop_bytes, 0u);
  config.servers = 0;
  config.one_hop_hosts = 4;
  EXPECT_EQ(place(config, {"a", "b", "c"}).one_hop_bytes, 6'144u) << "twice the data but a third, at most 4 KB more";
  EXPECT_EQ(place(config, {"a", "b", "c", "d"}).one_hop_bytes, 2'730u);
  config.backup_workers = 1;
  EXPECT_EQ(place(config, {"a", "b", "c"}).one_hop_bytes, 0u);
  config.backup_workers = 0;
  config.lanes = 2;
  EXPECT_EQ(place(config, {"a", "b"}).one_hop_bytes, 0u);
  config.lanes = 1;
  config.intra_node = Switch::kOff;
  EXPECT_EQ(place(config, {"a", "b"}).one_hop_bytes, 0u) << "the worker reaches its own server over the network";
  config.intra_node = Switch::kAuto;
  config.one_hop_hosts = 0;
  EXPECT_EQ(place(config, {"a", "b"}).one_hop_bytes, 0u);
}

TEST(Placement, FailoverTakesAServerProcessAndAnotherServer) {
  Config config;
  EXPECT_FALSE(place(config, {"a", "b"}).failover) << "embedded lanes die with their workers";
  config.servers = 1;
  EXPECT_FALSE(place(config, {"a", "a"}, {"a"}).failover) << "nobody is left";
  EXPECT_TRUE(place(config, {"a", "b", "c"}, {"d"}).failover) << "the embedded ones are left";
  config.failover = Switch::kOn;
  EXPECT_THROW(static_cast<void>(place(config, {"a", "a"}, {"a"})), Error);
  config.servers = 2;
  EXPECT_TRUE(place(config, {"a", "a"}, {"a", "a"}).failover);
  config.failover = Switch::kAuto;
  EXPECT_TRUE(place(config, {"a", "a"}, {"a", "a"}).failover);
  config.failover = Switch::kOff;
  EXPECT_FALSE(place(config, {"a", "a"}, {"a", "a"}).failover);
}

TEST(Placement, BackupWorkersTakeAServerAndTurnFailoverOff) {
  Config config;
  config.backup_workers = 2;
  const Placement alone = place(config, {"a", "a", "a"});
  ASSERT_EQ(alone.lanes.size(), 1u) << "shared memory alone would wait for everybody";
  EXPECT_TRUE(alone.lanes[0].embedded);
  EXPECT_EQ(alone.backup_workers, 2u);
  EXPECT_EQ(make_route(alone, config, 1, everybody(alone)).path, GroupRoute::Path::kNetwork);
  EXPECT_THROW(static_cast<void>(place(config, {"a", "a"})), Error) << "nobody would contribute";
  EXPECT_THROW(static_cast<void>(place(config, {"a"})), Error);
  config.servers = 2;
  EXPECT_FALSE(place(config, {"a", "a", "b"}, {"c", "d"}).failover);
}

TEST(Placement, SeveralHostsGetOneEmbeddedServerWhereTheirWorkersHaveNoCommonDivisor) {
  Config config;
  config.lanes = 2;
  const Placement placement = place(config, {"a", "a", "b", "b", "c"});
  EXPECT_EQ(placement.servers, 3u) << "what divides 2, 2 and 1";
  ASSERT_EQ(placement.lanes.size(), 6u);
  EXPECT_EQ(placement.lanes[0].owner, 0u);
  EXPECT_EQ(placement.lanes[2].owner, 2u);
  EXPECT_EQ(placement.lanes[5].owner, 4u);
  for (std::size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(placement.lanes[i].peer, PeerId{5 + static_cast<std::uint32_t>(i)});
    EXPECT_EQ(placement.lanes[i].weight, placement.lanes[0].weight);
  }
  const GroupRoute route = make_route(placement, config, 3, everybody(placement));
  EXPECT_EQ(route.path, GroupRoute::Path::kHostFirst);
  EXPECT_EQ(route.host_index, 1u);
  EXPECT_EQ(route.host_count, 3u);
  EXPECT_EQ(route.local_index, 1u);
  EXPECT_EQ(route.local_world, (std::vector<std::uint32_t>{2, 3}));
}

TEST(Placement, EachWorkerOfEvenHostsHasAServer) {
  const Config config;
  const Placement placement = place(config, {"a", "a", "a", "b", "b", "b"});
  EXPECT_EQ(placement.servers, 6u);
  EXPECT_EQ(placement.rails, 3u);
  ASSERT_EQ(placement.lanes.size(), 6u);
  const std::vector<std::uint32_t> owners = {0, 3, 1, 4, 2, 5};
  for (std::size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(placement.lanes[i].owner, owners[i]) << "neighbours in the plan are on different hosts";
    EXPECT_EQ(placement.lanes[i].rail, i / 2);
  }
  const auto rails = [&](std::uint32_t rank, const std::vector<std::uint32_t>& ranks) {
    return make_route(placement, config, rank, ranks).rails;
  };
  EXPECT_EQ(rails(0, everybody(placement)), worker::kEveryRail);
  EXPECT_EQ(rails(4, {4, 1}), 0b010u) << "one on each host";
  EXPECT_EQ(rails(4, {5, 4, 1, 2}), 0b110u);
  EXPECT_EQ(rails(4, {4, 1, 5}), 0b010u) << "no server of a host has workers that are not in the group";
  EXPECT_EQ(rails(4, {4, 0}), worker::kEveryRail) << "no rail is theirs";
}

TEST(Placement, AWorkerLendsToTheServerInsideItAndToNoOther) {
  Config config;
  const Placement placement = place(config, {"a", "a", "b", "b"});
  for (std::uint32_t rank = 0; rank < 4; ++rank) {
    const std::vector<PeerId> near = worker_engine_config(config, placement, rank, 0).near_lanes;
    ASSERT_EQ(near.size(), 1u);
    const auto lane = std::ranges::find(placement.lanes, near[0], &LanePlace::peer);
    EXPECT_EQ(lane->owner, rank);
    EXPECT_EQ(lane_options(config, placement, *lane).near_worker, rank);
    Config apart = config;
    apart.intra_node = Switch::kOff;
    EXPECT_TRUE(worker_engine_config(apart, placement, rank, 0).near_lanes.empty());
  }
}

TEST(Placement, NoMoreLanesThanAWorkerShouldBeConnectedToAndAllWorkersHaveTheSame) {
  const auto servers = [](std::uint32_t hosts, std::uint32_t each, std::uint32_t lanes) {
    std::vector<std::string> workers;
    for (std::uint32_t i = 0; i < each * hosts; ++i) workers.push_back("w" + std::to_string(i / each));
    Config config;
    config.lanes = lanes;
    return place(config, workers).servers / hosts;
  };
  EXPECT_EQ(servers(2, 16, 1), 16u);
  EXPECT_EQ(servers(16, 16, 1), 8u);
  EXPECT_EQ(servers(22, 8, 1), 4u) << "128 lanes have room for 5 on each host, which do not divide 8";
  EXPECT_EQ(servers(33, 8, 1), 2u);
  EXPECT_EQ(servers(16, 8, 4), 2u);
  EXPECT_EQ(servers(200, 8, 1), 1u);
  EXPECT_EQ(place({}, {"a", "a", "a", "a", "b", "b"}).servers, 4u) << "2 on each";
  Config config;
  config.intra_node = Switch::kOff;
  EXPECT_EQ(place(config, {"a", "a", "b", "b"}).servers, 2u) << "each worker contributes by itself";
  config.intra_node = Switch::kAuto;
  config.backup_workers = 1;
  EXPECT_EQ(place(config, {"a", "a", "b", "b"}).servers, 2u);
}

TEST(Placement, ServersOnTheOnlyHostDoTheSumming) {
  Config config;
  config.servers = 2;
  const Placement placement = place(config, {"a", "a"}, {"a", "a"});
  EXPECT_EQ(placement.lanes.size(), 2u);
  EXPECT_FALSE(placement.lanes[0].embedded);
  EXPECT_EQ(placement.lanes[0].weight, placement.lanes[1].weight);
  EXPECT_EQ(make_route(placement, config, 0, everybody(placement)).path, GroupRoute::Path::kNetwork);
  config.intra_node = Switch::kOn;
  const Placement asked = place(config, {"a", "a"}, {"a", "a"});
  EXPECT_EQ(make_route(asked, config, 0, everybody(asked)).path, GroupRoute::Path::kHostFirst);
}

TEST(Placement, FewDedicatedServersShareTheLoadWithEveryHost) {
  Config config;
  config.servers = 2;
  const Placement placement = place(config, {"a", "b", "c", "d"}, {"x", "y"});
  EXPECT_EQ(placement.servers, 6u);
  const PlacementWeights weights = placement_weights(4, 2);
  for (const LanePlace& lane : placement.lanes) {
    EXPECT_DOUBLE_EQ(lane.weight, lane.embedded ? weights.own_host : weights.dedicated);
  }
}

TEST(Placement, AsManyDedicatedServersAsHostsTakeEverything) {
  Config config;
  config.servers = 2;
  const Placement placement = place(config, {"a", "b"}, {"x", "y"});
  EXPECT_EQ(placement.servers, 2u);
  for (const LanePlace& lane : placement.lanes) EXPECT_FALSE(lane.embedded);
}

TEST(Placement, LanesShareWhatAWorkerHasInFlightByWeight) {
  for (const std::uint32_t hosts : {2u, 4u, 8u, 64u}) {
    for (const std::uint32_t servers : {0u, 1u, 2u, 8u, 64u}) {
      Config config;
      config.servers = servers;
      std::vector<std::string> workers;
      std::vector<std::string> dedicated;
      for (std::uint32_t i = 0; i < hosts; ++i) workers.push_back("w" + std::to_string(i));
      for (std::uint32_t i = 0; i < servers; ++i) dedicated.push_back("s" + std::to_string(i));
      const Placement placement = place(config, workers, dedicated);
      const std::string where = std::to_string(hosts) + " + " + std::to_string(servers);
      EXPECT_EQ(placement.are_lanes_apart, std::ranges::none_of(placement.lanes, &LanePlace::embedded)) << where;
      EXPECT_EQ(placement.chunk_bytes % 64, 0u) << where;
      EXPECT_GE(placement.chunk_bytes, 32u << 10) << where;
      EXPECT_LE(placement.chunk_bytes, config.chunk_bytes) << where;
      double total = 0;
      for (const LanePlace& lane : placement.lanes) total += lane.weight;
      for (const LanePlace& lane : placement.lanes) {
        const double share = lane.weight / total * config.chunk_bytes * config.window / placement.chunk_bytes;
        EXPECT_GE(lane.window, 1u) << where;
        EXPECT_LE(lane.window, config.window) << where;
        const int most = placement.lanes.size() > 2 ? 12 : 6;
        EXPECT_EQ(lane.max_window, std::max<long>(3 * lane.window, std::lround(most * share))) << where;
        if (share >= 1 && share <= config.window) {
          EXPECT_NEAR(lane.window, share, 0.5 + 1e-9) << where;
        }
      }
    }
  }
}

/// Larger messages EFA's receiver reads by itself, smaller ones are copied.
TEST(Placement, OnEfaWithEightServersAMessageMayHaveOneMebibyte) {
  const std::vector<std::pair<std::string, std::string>> environment = {{"HERRING_PROVIDER", "efa"}};
  const Placement placement = place(read_config(environment).config, {"a", "b", "c", "d", "e", "f", "g", "h"});
  ASSERT_EQ(placement.lanes.size(), 8u);
  EXPECT_GE(placement.chunk_bytes * wire::kMaxRun, 1u << 20);
}

TEST(Placement, SmallerSettingsBoundChunksAndWindows) {
  Config config;
  config.chunk_bytes = 4096;
  config.eager_bytes = config.embedded_eager_bytes = 64;
  config.window = 1;
  const Placement placement = place(config, {"a", "b", "c", "d", "e"});
  EXPECT_EQ(placement.chunk_bytes, 4096u);
  for (const LanePlace& lane : placement.lanes) EXPECT_EQ(lane.window, 1u);
  config.chunk_bytes = 1 << 20;
  config.eager_bytes = config.embedded_eager_bytes = 1 << 20;  // An eager shard may have several chunks.
  EXPECT_EQ(place(config, {"a", "b", "c", "d", "e"}).chunk_bytes % 64, 0u);
  EXPECT_LT(place(config, {"a", "b", "c", "d", "e"}).chunk_bytes, config.eager_bytes);
}

TEST(Placement, AGroupInsideOneOfSeveralHostsStaysThere) {
  const Config config;
  const Placement placement = place(config, {"a", "a", "b", "b"});
  const std::vector<std::uint32_t> ranks{3, 2};
  const GroupRoute route = make_route(placement, config, 2, ranks);
  EXPECT_EQ(route.path, GroupRoute::Path::kLocal);
  EXPECT_EQ(route.index, 1u);
  EXPECT_EQ(route.local_members, (std::vector<std::uint32_t>{1, 0})) << "group order, not rank order";
}

TEST(Placement, BadGroupsAreRefusedByName) {
  const Config config;
  const Placement placement = place(config, {"a", "a"});
  const auto refused = [&](std::vector<std::uint32_t> ranks) {
    try {
      make_route(placement, config, 0, ranks);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  EXPECT_NE(refused({0, 7}).find("rank 7"), std::string::npos);
  EXPECT_NE(refused({0, 1, 1}).find("rank 1 twice"), std::string::npos);
  EXPECT_NE(refused({1}).find("rank 0 is not in the group"), std::string::npos);
}

TEST(Placement, LanesAreCountedFromZero) {
  EXPECT_EQ(peer_name(2, PeerId{1}), "rank 1");
  EXPECT_EQ(peer_name(2, PeerId{2}), "server lane 0");
}

TEST(Placement, AWrongNumberOfServersIsRefused) {
  Config config;
  config.servers = 3;
  EXPECT_THROW(place(config, {"a"}, {"a"}), Error);
}

}  // namespace
}  // namespace herring::runtime
