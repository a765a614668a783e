#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "runtime/peer_group.h"
#include "runtime/peer_records.h"

namespace herring::runtime {

PeerPlaces peer_places(std::span<const std::uint32_t> members, std::span<const std::uint32_t> hosts, std::uint32_t rank,
                       std::string& obstacle) {
  PeerPlaces places;
  std::vector<std::uint32_t> order;                        // Hosts as the group has them.
  std::map<std::uint32_t, std::vector<std::uint32_t>> of;  // Members of each.
  for (const std::uint32_t member : members) {
    if (member >= hosts.size()) {
      obstacle = "the job is elastic";
      return places;
    }
    std::vector<std::uint32_t>& there = of[hosts[member]];
    if (there.empty()) order.push_back(hosts[member]);
    there.push_back(member);
  }
  const std::size_t each = members.empty() ? 0 : of[order.front()].size();
  for (const auto& [host, there] : of) {
    if (there.size() != each) obstacle = "its hosts have different numbers of its ranks";
  }
  if (each < 2) obstacle = "no host has two of its ranks";
  if (each > PeerGroup::kMostMembers) {
    obstacle = std::to_string(each) + " of its ranks are on one host, and at most " +
               std::to_string(PeerGroup::kMostMembers) + " are taken";
  }
  if (order.size() * kGroupsOfHost > kFirstNetworkGroup) obstacle = "it has " + std::to_string(order.size()) + " hosts";
  if (!obstacle.empty()) return places;
  places.neighbors = of[hosts[rank]];
  places.index = static_cast<std::uint32_t>(std::ranges::find(places.neighbors, rank) - places.neighbors.begin());
  places.host = static_cast<std::uint32_t>(std::ranges::find(order, hosts[rank]) - order.begin());
  for (const std::uint32_t host : order) places.others.push_back(of[host][places.index]);
  return places;
}

}  // namespace herring::runtime
