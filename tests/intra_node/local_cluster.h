#pragma once

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "intra_node/arena_allocator.h"
#include "intra_node/engine.h"
#include "server/reduce.h"

namespace herring::intra_node::testing {

/// The ranks of one host in one process, under virtual time. Each rank's actions are carried out one by one, in
/// whatever order the schedule picks among the ranks, as if they were processes.
class LocalCluster final {
 public:
  struct Rank {
    std::vector<std::byte> arena;
    std::unique_ptr<ArenaAllocator> allocator;
    std::unique_ptr<Engine> engine;  // Its end frees staging memory.
    LocalActions actions;            // Taken, not carried out from `next` on.
    std::size_t next = 0;
    std::vector<std::pair<OpKey, std::span<std::byte>>> network;
    std::map<OpKey, Status> abandoned;  // Of these, those that are to be ended.
    std::map<OpKey, std::vector<Status>> completed;
    std::vector<std::string> warnings;
    bool alive = true;
    bool busy = false;  // Its thread does something else: the engine is not called, messages stay where they are.
  };

  std::function<void(std::uint32_t rank, const OpKey& key, const Status& status)> on_complete;

  LocalCluster(std::uint32_t size, std::size_t arena_bytes, std::uint32_t inline_bytes, bool check_finite = false)
      : ranks_(size), links_(size), links_of_all_(size) {
    for (Rank& rank : ranks_) {
      // Page-aligned room for offsets; the vector itself need not be.
      rank.arena.resize(arena_bytes);
      rank.allocator = std::make_unique<ArenaAllocator>(arena_bytes, arena_bytes, [](std::uint64_t, std::uint64_t) {});
    }
    for (std::uint32_t r = 0; r < size; ++r) {
      links_[r].resize(size);
      links_of_all_[r].resize(size);
      EngineConfig config;
      config.local_rank = r;
      config.local_size = size;
      config.inline_bytes = inline_bytes;
      config.check_finite = check_finite;
      config.stall_warning = std::chrono::seconds(3);
      for (Rank& rank : ranks_) config.arenas.emplace_back(rank.arena);
      config.allocate = [this, r](std::size_t bytes) { return allocate(r, bytes); };
      config.deallocate = [this, r](std::span<std::byte> memory) { deallocate(r, memory); };
      ranks_[r].engine = std::make_unique<Engine>(std::move(config));
    }
  }

  std::span<std::byte> allocate(std::uint32_t r, std::size_t bytes) {
    const auto offset = ranks_[r].allocator->allocate(bytes);
    return offset ? std::span(ranks_[r].arena).subspan(*offset, bytes) : std::span<std::byte>();
  }
  void deallocate(std::uint32_t r, std::span<std::byte> memory) {
    const bool known =
        ranks_[r].allocator->deallocate(static_cast<std::uint64_t>(memory.data() - ranks_[r].arena.data()));
    if (!known) throw std::logic_error("freed what was not allocated");
    // Whoever reads it now, reads garbage and is found out.
    std::ranges::fill(memory, std::byte{0xEE});
  }

  Rank& rank(std::uint32_t r) { return ranks_[r]; }
  std::uint32_t size() const { return static_cast<std::uint32_t>(ranks_.size()); }
  Instant now() const { return now_; }
  void advance_time(Duration by) { now_ += by; }
  using Link = std::deque<std::vector<std::byte>>;
  Link& link(std::uint32_t from, std::uint32_t to) { return links_[from][to]; }
  /// What a rank sent to all; among what it sent to each it has no place in the order.
  Link& link_of_all(std::uint32_t from, std::uint32_t to) { return links_of_all_[from][to]; }
  /// Where there is no room for that, it goes to each.
  void send_to_all(std::uint32_t from, const std::vector<std::byte>& bytes) {
    const bool has_room = order_() % 8 != 0;
    for (std::uint32_t to = 0; to < size(); ++to) {
      if (to != from) (has_room ? links_of_all_ : links_)[from][to].push_back(bytes);
    }
  }

  /// An engine is called only between two batches of actions.
  bool is_free(std::uint32_t r) const {
    return ranks_[r].alive && !ranks_[r].busy && ranks_[r].next == ranks_[r].actions.size();
  }
  void take(std::uint32_t r) {
    ranks_[r].actions.clear();
    ranks_[r].next = 0;
    ranks_[r].engine->take_actions(ranks_[r].actions);
  }
  void submit(std::uint32_t r, const LocalOperation& operation) {
    ranks_[r].engine->submit(now_, operation);
    take(r);
  }
  bool deliver(std::uint32_t from, std::uint32_t to) {
    Link* link = &links_[from][to];
    if (link->empty() || (!links_of_all_[from][to].empty() && order_() % 2 == 0)) link = &links_of_all_[from][to];
    if (link->empty() || !is_free(to)) return false;
    const auto bytes = std::move(link->front());
    link->pop_front();
    ranks_[to].engine->on_message(now_, from, bytes);
    take(to);
    return true;
  }
  void tick(std::uint32_t r) {
    ranks_[r].engine->on_tick(now_);
    if (auto warning = ranks_[r].engine->take_warning()) ranks_[r].warnings.push_back(std::move(warning->text));
    take(r);
  }
  void lose(std::uint32_t r, std::uint32_t lost) {
    ranks_[r].engine->on_peer_lost(now_, lost, "rank " + std::to_string(lost) + " died");
    take(r);
  }
  void finish_network(std::uint32_t r, std::size_t which, const Status& status) {
    const OpKey key = ranks_[r].network[which].first;
    ranks_[r].network.erase(ranks_[r].network.begin() + static_cast<std::ptrdiff_t>(which));
    ranks_[r].engine->on_network_done(now_, key, status);
    take(r);
  }

  /// Carries out one action of a rank; false where it has none.
  bool act(std::uint32_t r) {
    Rank& rank = ranks_[r];
    if (!rank.alive || rank.next == rank.actions.size()) return false;
    LocalAction& action = rank.actions[rank.next++];
    if (auto* send = std::get_if<SendLocal>(&action)) {
      if (send->to == kEverybody) {
        send_to_all(r, send->bytes);
      } else {
        links_[r][send->to].push_back(std::move(send->bytes));
      }
    } else if (auto* copy = std::get_if<CopyAction>(&action)) {
      if (copy->from.size() != copy->to.size()) throw std::logic_error("copy of different sizes");
      std::ranges::copy(copy->from, copy->to.begin());
    } else if (auto* reduce = std::get_if<ReduceLocal>(&action)) {
      server::reduce(reduce->spec, reduce->inputs, reduce->outputs);
    } else if (auto* network = std::get_if<NetworkAction>(&action)) {
      rank.network.emplace_back(network->key, network->part);
    } else if (auto* abandoned = std::get_if<AbandonNetwork>(&action)) {
      rank.abandoned[abandoned->key] = abandoned->why;
    } else if (auto* complete = std::get_if<CompleteLocal>(&action)) {
      rank.completed[complete->key].push_back(complete->status);
      if (on_complete) on_complete(r, complete->key, complete->status);
    }
    if (rank.next == rank.actions.size()) take(r);
    return true;
  }

  /// One step that a seed picks; false where nothing is left to do (time aside).
  bool step(std::mt19937& random) {
    const std::uint32_t n = size();
    const std::uint32_t first = random() % (n * n);
    for (std::uint32_t i = 0; i < n * n; ++i) {
      const std::uint32_t pick = (first + i) % (n * n);
      const std::uint32_t r = pick / n;
      if (ranks_[r].next < ranks_[r].actions.size() ? act(r) : deliver(pick % n, r)) return true;
    }
    return false;
  }
  void run(std::mt19937& random) {
    while (step(random)) {
    }
  }
  /// As run(), and on through all deadlines.
  void run_out(std::mt19937& random) {
    for (int rounds = 0; rounds < 1000; ++rounds) {
      run(random);
      Instant next = Instant::max();
      for (Rank& rank : ranks_) {
        if (rank.alive) next = std::min(next, rank.engine->next_deadline());
      }
      if (next == Instant::max()) return;
      now_ = std::max(now_, next);
      for (std::uint32_t r = 0; r < size(); ++r) {
        if (ranks_[r].alive) tick(r);
      }
    }
    throw std::logic_error("deadlines without end");
  }

 private:
  std::vector<Rank> ranks_;
  std::vector<std::vector<Link>> links_;  // [from][to]
  std::vector<std::vector<Link>> links_of_all_;
  std::minstd_rand order_{1};
  Instant now_ = Instant(std::chrono::hours(1));
};

}  // namespace herring::intra_node::testing
