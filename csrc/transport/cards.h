#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/numa.h"

/// Which of its network cards the processes of a host take. Pure: all of them come to the same answer.
namespace herring::transport {

struct CardUser {
  NumaNodes nodes = 0;          ///< Where the process may run.
  std::uint32_t endpoints = 1;  ///< So many cards it can make use of.
};

/// For each user the cards of its endpoints, in order: as many users on each card, as far as that goes; within that, on
/// cards of a user's own nodes; and for one user different ones. Where nothing speaks for another one they take them in
/// turns, from `first` on. `node_of_card`: kUnknownNode is near everybody; at least one card.
std::vector<std::vector<std::uint32_t>> deal_cards(std::span<const int> node_of_card, std::span<const CardUser> users,
                                                   std::uint32_t first);

}  // namespace herring::transport
