#include "runtime/connect.h"

#include <algorithm>
#include <set>
#include <utility>

#include "core/log.h"
#include "core/status.h"
#include "core/text.h"
#include "runtime/checked_endpoint.h"
#include "runtime/durations.h"
#include "runtime/introduction.h"
#include "runtime/network.h"
#include "runtime/process_endpoint.h"
#include "runtime/routed_endpoint.h"
#include "wire/action.h"

namespace herring::runtime {
namespace {

bool is_own(const LanePlace& lane, Role role, std::uint32_t rank) {
  return lane.embedded == (role == Role::kWorker) && lane.owner == rank;
}

std::uint32_t own_lanes(const Placement& placement, Role role, std::uint32_t rank) {
  return static_cast<std::uint32_t>(
      std::ranges::count_if(placement.lanes, [&](const LanePlace& lane) { return is_own(lane, role, rank); }));
}

/// Bytes of the largest message that stands in front of other memory: an announce, an error's text.
constexpr std::size_t kMaxHeadBytes = wire::kHeaderBytes + 2048;

/// What every endpoint of the process is opened with.
struct Opener {
  Network& network;
  memory::Domain& domain;
  const EndpointWrapper& wrap;
};

/// Who shares this host's network cards: its workers do, and so do its servers; hosts with one server begin with
/// different cards.
efa::CardShare card_share(const Placement& placement, const HubClient& hub, Role role, std::uint32_t rank) {
  efa::CardShare share;
  const auto add = [&](const Member& member) {
    if (member.rank == rank) share.self = static_cast<std::uint32_t>(share.users.size());
    share.users.push_back({member.nodes, std::max(own_lanes(placement, role, member.rank), 1u)});
  };
  if (role == Role::kWorker) {
    for (const std::uint32_t worker : placement.neighbours(rank)) add(hub.member(worker));
    return share;
  }
  const std::vector<Member> servers = hub.servers();
  std::vector<std::string> hosts;
  for (const Member& server : servers) {
    if (server.host_identity == servers[rank].host_identity) add(server);
    if (std::ranges::find(hosts, server.host_identity) == hosts.end()) hosts.push_back(server.host_identity);
  }
  const auto own = std::ranges::find(hosts, servers[rank].host_identity);
  share.first = static_cast<std::uint32_t>(own - hosts.begin());
  return share;
}

/// With checksums where they are set. `number`: Network::open_endpoint().
std::unique_ptr<transport::Endpoint> open_endpoint(const Config& config, std::uint32_t workers, const HubClient& hub,
                                                   PeerId self, std::uint32_t number,
                                                   const std::shared_ptr<DamageCounters>& counters,
                                                   const Opener& opener) {
  std::unique_ptr<transport::Endpoint> endpoint = opener.network.open_endpoint(number);
  if (opener.wrap) endpoint = opener.wrap(std::move(endpoint), opener.domain);
  if (config.checksum == Toggle::kOff) return endpoint;
  CheckedOptions options;
  options.self = self;
  options.job_id = hub.job_id();
  options.max_head_bytes = kMaxHeadBytes;
  options.is_pooled = [](Tag tag) { return tag == kControlTag; };
  options.give_up_after = std::max<Duration>(4 * dead_after(config), std::chrono::seconds(10));
  options.name_of = [workers](PeerId peer) { return peer_name(workers, peer); };
  options.counters = counters;
  options.on_damage = [logger = std::make_shared<Logger>(logger_options(config, peer_name(workers, self)))](
                          const std::string& text) { logger->log_limited(LogLevel::kWarning, "damaged", text); };
  return std::make_unique<CheckedEndpoint>(std::move(endpoint), std::move(options));
}

/// `near`: the process's own way between its worker and this lane, or null.
std::unique_ptr<Lane> open_lane(const Config& config, const Placement& placement, const LanePlace& lane,
                                std::uint32_t number, HubClient& hub, const std::shared_ptr<DamageCounters>& counters,
                                const Opener& opener, std::unique_ptr<transport::Endpoint> near) {
  LaneOptions options = lane_options(config, placement, lane);
  options.job_id = hub.job_id();
  options.hosts = host_spans(config, placement);
  options.on_failure = [&hub](const std::string& problem) { hub.report_failure(problem); };
  auto endpoint = open_endpoint(config, placement.workers, hub, lane.peer, number, counters, opener);
  if (near != nullptr) {
    endpoint = std::make_unique<RoutedEndpoint>(std::move(near), std::set{PeerId{lane.owner}}, std::move(endpoint));
  }
  options.memory = &opener.domain;
  return std::make_unique<Lane>(options, std::move(endpoint));
}

/// This process's lanes, and its worker's own way to them.
void open_lanes(const Config& config, const Placement& placement, HubClient& hub, Role role, std::uint32_t rank,
                const Opener& opener, Connections& result) {
  auto near = std::make_unique<ProcessEndpoint>();
  std::set<PeerId> near_lanes;
  std::uint32_t number = 0;  // One lane after the other on the next card.
  for (const LanePlace& lane : placement.lanes) {
    if (!is_own(lane, role, rank)) continue;
    std::unique_ptr<ProcessEndpoint> lanes_end;
    if (role == Role::kWorker && near_worker(config, lane) == rank) {
      lanes_end = std::make_unique<ProcessEndpoint>();
      ProcessEndpoint::introduce(*near, PeerId{rank}, *lanes_end, lane.peer);
      near_lanes.insert(lane.peer);
    }
    result.lanes.push_back(
        open_lane(config, placement, lane, number++, hub, result.damage, opener, std::move(lanes_end)));
  }
  if (near_lanes.empty()) return;
  result.endpoint = std::make_unique<RoutedEndpoint>(std::move(near), near_lanes, std::move(result.endpoint));
}

/// With tcp each connection is a descriptor. Those of small operations and of messages may never be needed.
DescriptorClaim claim_descriptors(const Placement& placement, Role role, std::uint32_t rank) {
  const std::uint64_t own = own_lanes(placement, role, rank);
  const Budget& budget = placement.budget;
  const bool is_worker = role == Role::kWorker;
  const bool each_pushes = !placement.host_first || placement.hosts == placement.workers;
  std::uint64_t least = own * ((each_pushes ? placement.workers : placement.hosts) - (is_worker ? 1 : 0));
  if (is_worker && each_pushes) least += placement.lanes.size() - own;
  const std::uint64_t most = (is_worker ? budget.worker_descriptors : 0) + (own > 0 ? budget.server_descriptors : 0);
  const std::string name = (is_worker ? "worker " : "server ") + std::to_string(rank);
  return {name + " of this job (" + counted(placement.workers, "worker") + ", " +
              counted(placement.lanes.size(), "server lane") + ")",
          least, most};
}

/// With room for all that the budget counts on.
std::unique_ptr<Network> open_network(const Config& config, const Placement& placement, const HubClient& hub, Role role,
                                      std::uint32_t rank, std::span<const std::string> search,
                                      std::shared_ptr<tcp::StrangerCounters> strangers, memory::Domain& domain) {
  const Budget& budget = placement.budget;
  NetworkOptions options;
  options.receives = std::max({budget.lane.receives(), budget.worker.receives(), budget.messages.receives()});
  options.fabric_search.assign(search.begin(), search.end());
  options.job_id = hub.job_id();
  options.member = role == Role::kWorker ? rank : placement.workers + rank;
  options.cards = card_share(placement, hub, role, rank);
  options.strangers = std::move(strangers);
  const std::string who = (role == Role::kWorker ? "rank " : "server ") + std::to_string(rank);
  options.takes_devices = role == Role::kWorker && config.gpudirect != Switch::kOff && config.cuda != Switch::kOff;
  // Where ranks send GPU memory each message is two.
  if (config.gpudirect != Switch::kOff) options.receives *= 2;
  options.on_stranger = [logger = std::make_shared<Logger>(logger_options(config, who))](const std::string& text) {
    logger->log_limited(LogLevel::kWarning, "tcp.stranger", "refused a connection from outside the job: " + text);
  };
  return runtime::open_network(config, options, domain);
}

}  // namespace

Connections connect(const Config& config, const Placement& placement, HubClient& hub, Role role, std::uint32_t rank,
                    std::span<const std::string> fabric_search, Instant deadline, memory::Domain& domain,
                    const EndpointWrapper& wrap) {
  Connections result;
  OwnAddresses own;
  if (!placement.lanes.empty()) {
    result.network = open_network(config, placement, hub, role, rank, fabric_search, result.strangers, domain);
    if (result.network->takes_descriptors()) result.network->keep(claim_descriptors(placement, role, rank));
    const Opener opener{*result.network, domain, wrap};
    if (role == Role::kWorker) {
      const auto open = [&] {
        return open_endpoint(config, placement.workers, hub, PeerId{rank}, 0, result.damage, opener);
      };
      result.endpoint = open();
      // Its connections are made by the provider when the first message goes.
      result.peer_endpoint = open();
      own.worker = {result.endpoint->address(), result.peer_endpoint->address()};
    }
    open_lanes(config, placement, hub, role, rank, opener, result);
    for (const auto& lane : result.lanes) own.lanes.push_back(lane->address());
  }
  const OthersAddresses others = introduce(hub, settings_that_must_agree(config), own, deadline);
  for (std::uint32_t i = 0; result.peer_endpoint && i < placement.workers; ++i) {
    if (i != rank) result.peer_endpoint->add_peer(PeerId{i}, others.peers[i]);
  }
  std::vector<std::size_t> next(others.lanes_of.size(), 0);
  for (const LanePlace& lane : placement.lanes) {
    const std::size_t member = lane.embedded ? lane.owner : placement.workers + lane.owner;
    if (next[member] >= others.lanes_of[member].size()) {
      throw Error(Code::kProtocol, "member " + std::to_string(member) + " published too few lanes");
    }
    const transport::Address& address = others.lanes_of[member][next[member]++];
    if (result.endpoint) result.endpoint->add_peer(lane.peer, address);
  }
  for (const auto& lane : result.lanes) lane->open(others.workers);
  // A worker may send as soon as connect() returns: all lanes have posted their receives by then.
  hub.exchange("connected", {}, deadline, Wants::kNothing);
  return result;
}

std::string describe(const Config& config, const Placement& placement, bool has_arena,
                     const transport::Endpoint* endpoint) {
  if (placement.workers == 1 && placement.lanes.empty()) return "one process: nothing to exchange";
  std::string text;
  if (has_arena) text = "shared memory inside each host";
  if (endpoint == nullptr) return text;
  if (!text.empty()) text += ", then ";
  const auto embedded = static_cast<std::uint32_t>(std::ranges::count_if(placement.lanes, &LanePlace::embedded));
  return text + endpoint->description() + " through " + counted(placement.servers, "server") + " (" +
         std::to_string(embedded / config.lanes) + " embedded in workers)";
}

}  // namespace herring::runtime
