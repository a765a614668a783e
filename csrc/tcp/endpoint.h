#pragma once

#include <deque>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/process.h"
#include "tcp/congestion.h"
#include "tcp/connection.h"
#include "tcp/events.h"
#include "tcp/interface.h"
#include "tcp/receiver.h"
#include "tcp/tcp.h"
#include "transport/limits.h"

namespace herring::tcp {

/// endpoint.cc: the contract. connect.cc: peers, connections, handshakes. send.cc: what leaves.
class TcpEndpoint final : public Endpoint {
 public:
  explicit TcpEndpoint(const Options& options);
  ~TcpEndpoint() override;

  const transport::Address& address() const override { return address_; }
  std::string description() const override { return description_; }
  const Stats& stats() const override { return stats_; }
  void add_peer(PeerId id, std::span<const std::byte> address) override;
  void remove_peer(PeerId id) override;
  Status post_send(PeerId to, Tag tag, std::span<const std::byte> first, std::span<const std::byte> second,
                   Token token) override;
  bool takes_sends() const override { return sends_ < transport::kMaxSends && posts() < transport::kMaxOperations; }
  Status post_receive(Tag tag, std::span<std::byte> first, std::span<std::byte> second, Token token) override;
  void cancel_receive(Token token) override;
  std::size_t poll(std::span<transport::Completion> completions) override;
  void wait(Instant deadline, std::span<const int> also) override;
  bool prepare_wait(std::vector<int>& descriptors, Instant& deadline) override;
  void wake() override { events_.wake(); }
  void shut_down() override;

 private:
  static constexpr std::uint64_t kListener = Events::kWake - 1;

  // endpoint.cc
  void handle_events();
  void read_some();
  void set_readable(Connection& connection);
  void run_timers();
  Instant next_timer() const;
  bool begin_wait(Instant& deadline);
  std::size_t posts() const { return receiver_.posted() + sends_; }

  // connect.cc
  void open_listener();
  void accept_some();
  bool make_room_in_lobby(const std::string& why);
  Connection* add_connection(int socket, Stage stage);
  Connection* find(std::uint64_t name);
  void ensure_connection(Peer& peer);
  void adopt(Connection& connection, Peer& peer);
  bool start_connection(Peer& peer);
  void on_connected(Connection& connection);
  /// False where the connection is gone.
  bool greet(Connection& connection);
  bool take_greeting(Connection& connection, std::span<const std::byte> greeting);
  void stand(Connection& connection);
  bool say(Connection& connection, std::span<const std::byte> bytes);
  void reject(Connection& connection, Counter StrangerCounters::*counter, const std::string& what);
  /// Closes it and completes what was on it. Sends of its peer wait for another where this one never stood.
  void close_connection(Connection& connection, const std::string& why);
  void wait_for_connection(Peer& peer, const std::string& why);
  void leave_waiting(Peer& peer);
  void run_connect_timers(Instant now);
  void run_handshake_timers(Instant now);
  Instant next_connect_timer() const;
  void farewell(Connection& connection);

  // send.cc
  void mark_dirty(Peer& peer);
  void flush_dirty();
  void flush(Peer& peer);
  std::size_t gather(const Peer& peer, std::span<iovec> parts, std::size_t& bytes) const;
  void advance(Peer& peer, std::size_t bytes);
  Send* pop_send(Peer& peer);
  void fail_sends(Peer& peer, Code code, const std::string& why);

  const Options options_;
  const CongestionControl congestion_;
  const ForkGuard guard_;
  const Duration connect_timeout_;
  Stats stats_;
  std::vector<Candidate> sources_;  // Where connections start; the first is own_.
  EndpointAddress own_;
  transport::Address address_;
  std::string description_;
  bool is_shut_ = false;

  Events events_{stats_};
  std::deque<transport::Completion> ready_;
  Receiver receiver_{ready_, stats_};
  int listener_ = -1;
  Instant accept_again_ = Instant::max();  // It looks away until then.
  BlockPool<Send> send_pool_;
  std::size_t sends_ = 0;
  std::unordered_map<std::uint32_t, std::unique_ptr<Peer>> peers_;
  std::vector<Peer*> dirty_;
  std::vector<Peer*> waiting_;
  std::vector<std::unique_ptr<Connection>> connections_;  // By index; null: free.
  std::vector<std::uint32_t> free_;
  std::vector<std::uint32_t> generations_;
  std::vector<Connection*> strangers_;  // Who connected and has proven nothing, oldest first.
  std::vector<std::uint64_t> readable_;
  std::size_t turns_ = 0;  // Polls that looked for no events, for there was something to read.
};

}  // namespace herring::tcp
