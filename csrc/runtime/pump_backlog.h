#pragma once

#include <cstddef>
#include <deque>
#include <iterator>
#include <map>
#include <optional>
#include <span>
#include <utility>
#include <variant>

#include "core/types.h"
#include "wire/action.h"

namespace herring::runtime {

/// What an engine wants done, in the order in which it may be done: one action after the other. A send that finds no
/// room waits in its peer's line, with what goes to that peer after it, and holds up nobody else. A receive that finds
/// no room holds up all that follows, so no send overtakes a receive that its answer needs. Knows no transport: the
/// functions that it is given say false where there is no room, and may take more from the engine.
class PumpBacklog final {
 public:
  template <class Engine>
  void take_from(Engine& engine) {
    engine.take_actions(fresh_);
    for (Action& action : fresh_) queue_.push_back(std::move(action));
    fresh_.clear();
  }

  /// True where an action was carried out.
  template <class CarryOut>
  bool carry_out_all(const CarryOut& carry_out) {
    bool any = false;
    for (; !queue_.empty(); queue_.pop_front()) {
      Action& next = queue_.front();
      if (Line* line = line_of(next); line != nullptr) {
        line->push_back(std::move(next));
      } else if (carry_out(next)) {
        any = true;
      } else {
        const auto* send = std::get_if<SendAction>(&next);
        if (send == nullptr) break;
        lines_[send->to].push_back(std::move(next));
      }
    }
    return any;
  }

  /// Those who wait in the lines of `first`, then the others while `has_room()`: where the transport is full, each
  /// message among thousands of lines would cost a try of all. True where an action was carried out.
  template <class Peers, class HasRoom, class CarryOut>
  bool retry_lines(const Peers& first, const HasRoom& has_room, const CarryOut& carry_out) {
    if (lines_.empty()) return false;
    bool any = false;
    for (const auto& near : first) {
      if (auto line = lines_.find(near.peer); line != lines_.end()) any |= retry(line, carry_out);
    }
    for (auto line = lines_.begin(); line != lines_.end() && has_room();) any |= retry(line, carry_out);
    return any;
  }

  /// A receive that waits in a line need not be posted any more.
  void drop_receive(Token token) {
    for (auto line = lines_.begin(); line != lines_.end(); ++line) {
      const std::size_t count = std::erase_if(line->second, [token](const Action& action) {
        const auto* receive = std::get_if<PostReceiveAction>(&action);
        return receive != nullptr && receive->token == token;
      });
      if (count == 0) continue;
      if (line->second.empty()) lines_.erase(line);
      return;
    }
  }

  bool is_empty() const { return queue_.empty() && lines_.empty(); }

 private:
  using Line = std::deque<Action>;

  /// Where the action has to wait behind others; null where it need not.
  Line* line_of(const Action& action) {
    if (lines_.empty()) return nullptr;
    std::optional<PeerId> peer;
    if (const auto* send = std::get_if<SendAction>(&action)) peer = send->to;
    if (const auto* receive = std::get_if<PostReceiveAction>(&action)) peer = receive->behind;
    const auto found = peer ? lines_.find(*peer) : lines_.end();
    return found == lines_.end() ? nullptr : &found->second;
  }

  /// Goes on to the next line.
  template <class CarryOut>
  bool retry(std::map<PeerId, Line>::iterator& line, const CarryOut& carry_out) {
    const std::size_t before = line->second.size();
    while (!line->second.empty() && carry_out(line->second.front())) line->second.pop_front();
    const bool any = line->second.size() < before;
    line = line->second.empty() ? lines_.erase(line) : std::next(line);
    return any;
  }

  std::deque<Action> queue_;
  std::map<PeerId, Line> lines_;  // No empty ones.
  Actions fresh_;
};

}  // namespace herring::runtime
