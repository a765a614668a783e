#include "runtime/host_exchange.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "intra_node/pieces.h"
#include "runtime/durations.h"
#include "runtime/local_endpoint.h"
#include "runtime/part_size.h"
#include "runtime/validate.h"

namespace herring::runtime {
namespace {

// A copy or sum of this size takes longer than a neighbour's wake-up: it hears first.
constexpr std::size_t kFlushBytes = 32 << 10;

// So many messages in one turn, so that a chatty neighbour cannot starve the network.
constexpr int kMostMessages = 256;

intra_node::EngineConfig engine_config(const HostExchangeOptions& options) {
  intra_node::Neighborhood& neighborhood = *options.neighborhood;
  intra_node::EngineConfig config;
  config.local_size = static_cast<std::uint32_t>(options.ranks.size());
  for (std::uint32_t i = 0; i < config.local_size; ++i) {
    if (options.ranks[i] == options.rank) config.local_rank = i;
    config.arenas.push_back(neighborhood.arena(i));
  }
  config.check_finite = options.config.check_finite == Toggle::kOn;
  config.stall_warning = stall_warning(options.config);
  config.inline_bytes = local_inline_bytes(neighborhood.max_message_bytes());
  config.allocate = [&neighborhood](std::size_t bytes) { return neighborhood.allocate(bytes); };
  config.deallocate = [&neighborhood](std::span<std::byte> memory) { neighborhood.deallocate(memory); };
  return config;
}

}  // namespace

HostExchange::HostExchange(HostExchangeOptions options)
    : options_(std::move(options)),
      isa_(reduction_isa(options_.config)),
      writes_(isa_),
      engine_(std::make_unique<intra_node::Engine>(engine_config(options_))),
      neighbours_(options_.ranks.size()) {}

bool HostExchange::take_messages(Instant now) {
  intra_node::Neighborhood::Message message;
  bool any = false;
  for (int i = 0; i < kMostMessages && options_.neighborhood->receive(message); ++i) {
    any = true;
    if (!message.bytes.empty() && message.bytes.front() == kLocalEndpointChannel) {
      options_.on_message(message.from, message.bytes);
    } else if (engine_) {
      engine_->on_message(now, message.from, message.bytes);
    }
  }
  return any;
}

bool HostExchange::run_actions(Instant now) {
  if (!engine_) return false;
  bool any = false;
  intra_node::LocalActions actions;
  while (engine_) {
    actions.clear();
    engine_->take_actions(actions);
    if (actions.empty()) break;
    any = true;
    for (intra_node::LocalAction& action : actions) execute(now, action);
  }
  options_.neighborhood->flush();
  return any;
}

void HostExchange::execute(Instant now, intra_node::LocalAction& action) {
  if (auto* message = std::get_if<intra_node::SendLocal>(&action)) {
    if (message->to == intra_node::kEverybody) {
      send_to_all(message->bytes, {}, {});
    } else {
      send(message->to, message->bytes, {}, {});
    }
  } else if (auto* move = std::get_if<intra_node::CopyAction>(&action)) {
    if (move->to.size() >= kFlushBytes) options_.neighborhood->flush();
    writes_.copy(*move);
  } else if (auto* sum = std::get_if<intra_node::ReduceLocal>(&action)) {
    if (!sum->outputs.empty() && sum->outputs.front().size() >= kFlushBytes) options_.neighborhood->flush();
    writes_.reduce(*sum);
  } else {
    options_.on_action(now, action);
  }
}

void HostExchange::send(std::uint32_t to, std::span<const std::byte> first, std::span<const std::byte> second,
                        std::span<const std::byte> third) {
  Neighbour& neighbour = neighbours_[to];
  if (neighbour.is_gone) return;
  Status sent = Status::again();
  if (neighbour.backlog.empty()) {
    writes_.for_others(second.size(),
                       [&](bool streams) { sent = options_.neighborhood->send(to, first, second, third, streams); });
  }
  if (sent.is_again()) neighbour.backlog.push_back(intra_node::join_pieces(first, second, third));
}

/// To all other ranks of the host, the same.
void HostExchange::send_to_all(std::span<const std::byte> first, std::span<const std::byte> second,
                               std::span<const std::byte> third) {
  bool sent = false;
  writes_.for_others(second.size(),
                     [&](bool streams) { sent = options_.neighborhood->send_to_all(first, second, third, streams); });
  if (sent) return;
  for (std::uint32_t to = 0; to < neighbours_.size(); ++to) {
    if (options_.ranks[to] != options_.rank) send(to, first, second, third);
  }
  options_.neighborhood->flush();
}

bool HostExchange::has_backlog() const {
  return std::ranges::any_of(neighbours_, [](const Neighbour& each) { return !each.backlog.empty(); });
}

bool HostExchange::flush_backlog() {
  bool any = false;
  for (std::uint32_t to = 0; to < neighbours_.size(); ++to) {
    auto& backlog = neighbours_[to].backlog;
    while (!backlog.empty() && !options_.neighborhood->send(to, backlog.front()).is_again()) {
      backlog.pop_front();
      any = true;
    }
  }
  if (any) options_.neighborhood->flush();
  return any;
}

std::optional<intra_node::StallWarning> HostExchange::tick(Instant now) {
  if (!engine_ || now < engine_->next_deadline()) return std::nullopt;
  while (take_messages(now)) {
  }  // What has arrived in time counts as in time.
  engine_->on_tick(now);
  auto warning = engine_->take_warning();
  run_actions(now);
  return warning;
}

void HostExchange::end_without(Instant now, std::uint32_t rank, const std::string& why) {
  const auto neighbour = std::ranges::find(options_.ranks, rank);
  if (!engine_ || neighbour == options_.ranks.end()) return;
  engine_->on_peer_left(now, static_cast<std::uint32_t>(neighbour - options_.ranks.begin()), why);
  run_actions(now);
}

void HostExchange::rank_gone(std::uint32_t rank) {
  for (std::size_t i = 0; i < neighbours_.size(); ++i) {
    if (options_.ranks[i] == rank) neighbours_[i] = {true, {}};
  }
}

void HostExchange::close() {
  engine_.reset();
  for (Neighbour& each : neighbours_) each.backlog.clear();
}

}  // namespace herring::runtime
