#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "server/engine_impl.h"

namespace herring::server {

/// What can be granted of a ready operation, by the slots that are free and the windows of the workers. Changes
/// nothing but Op::obstacle. Nobody but the server engine includes this.
class Engine::Impl::GrantPlan {
 public:
  /// What a process has to do for a chunk once it is granted.
  enum class Role : std::uint8_t { kNothing, kPush, kPull };

  explicit GrantPlan(Impl& engine) : engine_(engine) {}

  /// How many chunks go in one message.
  std::uint32_t run_length(const Op& op) const;
  /// What was in the way of the next chunks still is.
  bool is_blocked(const Op& op, std::uint32_t run) const;
  /// How many of the next chunks find a slot for each pusher, within the windows of all concerned; Op::obstacle says
  /// what is in the way of the rest.
  std::uint32_t count(Op& op, std::uint32_t run);
  /// Not for a chunk that all hold already.
  Role role_of(std::uint32_t contributor, const Participant& owner, std::uint32_t chunk, std::uint32_t source) const;
  /// Whether what it pushes is summed where it lies.
  bool lends(const Op& op, const Participant& participant, std::uint32_t bytes) const;

 private:
  std::optional<Obstacle> obstacle_to(const Op& op, std::uint32_t number, std::uint32_t run, std::size_t& free);
  bool is_small_one_hop(const Op& op) const;

  Impl& engine_;
};

}  // namespace herring::server
