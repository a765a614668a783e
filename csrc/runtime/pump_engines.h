#pragma once

#include <span>
#include <vector>

#include "core/types.h"
#include "wire/action.h"

/// What the engines that a Pump drives have, and not all of them.
namespace herring::runtime {

/// Servers' lanes: they ask for sums, and take what is lent.
template <class Engine>
concept Sums = requires(Engine& engine) {
  engine.on_reduced(Instant{}, Token{}, std::span<const NotFiniteInput>{});
};

/// Engines that hear of a copy's end.
template <class Engine>
concept Copies = requires(Engine& engine) {
  engine.on_copied(Instant{}, Token{});
};

/// Engines that may keep the body of a control message.
template <class Engine>
concept Keeps = Sums<Engine> || Copies<Engine>;

/// Engines that wait for peers; a server's lane answers only.
template <class Engine>
concept Waits = requires(const Engine& engine, std::vector<PeerId>& peers) {
  engine.is_waiting();
  engine.add_awaited(peers);
};

}  // namespace herring::runtime
