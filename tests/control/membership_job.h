#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <string>
#include <vector>

#include "control/membership.h"

namespace herring::control {

using namespace std::chrono_literals;
using Action = Membership::Action;

/// A membership under virtual time; remembers what each connection was sent.
class Job {
 public:
  Job(std::uint32_t workers, std::uint32_t servers)
      : workers_(workers), servers_(servers), membership({workers, servers, 100ms, 300ms, 77}) {}

  static Member worker(std::uint32_t rank) { return {Role::kWorker, rank, 100 + rank, "id", "node"}; }
  static Member server(std::uint32_t rank) { return {Role::kServer, rank, 200 + rank, "id", "node"}; }

  void join(ConnectionId connection, const Member& member) {
    membership.join(connection, Join{member, workers_, servers_}, now);
    collect();
  }
  /// Workers on connections 1.., then servers.
  void join_all() {
    ConnectionId connection = 0;
    for (std::uint32_t i = 0; i < workers_; ++i) join(++connection, worker(i));
    for (std::uint32_t i = 0; i < servers_; ++i) join(++connection, server(i));
    ASSERT_TRUE(membership.started());
    sent.clear();
  }
  void receive(ConnectionId connection, FrameType type, std::vector<std::byte> body = {}) {
    Frame frame;
    frame.type = type;
    frame.body = std::move(body);
    membership.receive(connection, frame, now);
    collect();
  }
  void exchange(ConnectionId connection, const std::string& name, std::string_view blob) {
    receive(connection, FrameType::kExchange, encode(Exchange{name, std::as_bytes(std::span(blob))}));
  }
  void disconnect(ConnectionId connection) {
    membership.disconnected(connection, "connection closed", now);
    collect();
  }
  void tick() {
    membership.tick(now);
    collect();
  }
  /// Lets time pass, ticking when asked to; the named connections answer each ping.
  void pass(Duration time, const std::vector<ConnectionId>& alive) {
    const Instant until = now + time;
    while (membership.next_wakeup() <= until) {
      now = std::max(now, membership.next_wakeup());
      tick();
      for (const ConnectionId id : alive) {
        if (membership.is_member(id)) receive(id, FrameType::kPong, encode_serial(1));
      }
    }
    now = until;
  }
  std::vector<Frame> frames(ConnectionId connection, FrameType type) const {
    std::vector<Frame> result;
    for (const auto& [id, frame] : sent) {
      if (id == connection && frame.type == type) result.push_back(frame);
    }
    return result;
  }
  std::vector<Event> events(ConnectionId connection) const {
    std::vector<Event> result;
    for (const Frame& frame : frames(connection, FrameType::kEvent)) result.push_back(decode_event(frame.body).value());
    return result;
  }
  std::string missing(ConnectionId connection, const std::string& name) {
    sent.clear();
    receive(connection, FrameType::kQuery, encode_text(name));
    const auto answers = frames(connection, FrameType::kMissing);
    return answers.size() == 1 ? decode_missing(answers[0].body).value().second : "no answer";
  }
  Refuse refusal(ConnectionId connection) const {
    const auto refusals = frames(connection, FrameType::kRefuse);
    return refusals.size() == 1 ? decode_refuse(refusals[0].body).value() : Refuse{RefuseCode::kVersion, "none"};
  }

 private:
  std::uint32_t workers_;
  std::uint32_t servers_;

 public:
  void collect() {
    for (const Action& action : membership.take_actions()) {
      if (action.kind == Action::Kind::kClose) {
        closed.push_back(action.connection);
        continue;
      }
      Frame frame;
      frame.type = action.type;
      frame.body.assign(action.body->bytes().begin(), action.body->bytes().end());
      sent.emplace_back(action.connection, std::move(frame));
    }
  }
  Instant now{1h};
  Membership membership;
  std::vector<std::pair<ConnectionId, Frame>> sent;
  std::vector<ConnectionId> closed;
};

}  // namespace herring::control
