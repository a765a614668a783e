#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <unordered_map>
#include <vector>

#include "server/engine_impl.h"
#include "wire/tag_batch.h"

/// The two ways in which Results are handed out and an operation ends; twin of worker/delivery.h. Nobody but the server
/// engine includes this.
namespace herring::server {

/// What differs between them; the rest of the engine does not ask which one it is.
class Engine::Impl::Delivery {
 public:
  explicit Delivery(Impl& engine) : engine_(engine) {}
  virtual ~Delivery() = default;
  Delivery(const Delivery&) = delete;
  Delivery& operator=(const Delivery&) = delete;

  // -- announces
  /// What an announce may say; `data` is what follows the body.
  virtual Status check(const wire::Header& header, const wire::Announce& announce,
                       std::span<const std::byte> data) const = 0;
  /// It is taken in, and the operation's last participant is whose it is.
  virtual void note(Op& op, const wire::Header& header, std::span<const std::byte> data) = 0;
  /// What it takes beside what every announce takes.
  virtual std::uint64_t record_bytes(const wire::Announce& announce) const = 0;
  /// A worker's announces up to some number are all here, or it has left.
  virtual void after_announces(Instant now) = 0;

  // -- grants
  virtual bool needs_grants(const Participant& participant) const = 0;
  /// Who pushes nothing has to post its receive for this chunk first, and says Ready.
  virtual bool has_to_post(const Participant& participant, std::uint32_t chunk) const = 0;
  /// What the Grant's body begins with.
  virtual void number(PeerId peer, std::vector<std::uint64_t>& body) = 0;
  /// What a worker in this process pushes may be summed where it lies.
  virtual bool may_lend() const = 0;
  virtual void handle_ready(Instant now, const wire::Header& header) = 0;

  // -- ends
  virtual void finish(Instant now, Op& op) = 0;        ///< All Results are handed out.
  virtual void after_sends(Instant now, Op& op) = 0;   ///< They are sent. May end the operation.
  virtual void on_timer(Instant now, Op& op) = 0;      ///< Of finish().
  virtual void on_peer_lost(Instant now, Op& op) = 0;  ///< Of an operation that is finishing. May end it.
  virtual void forget(const Op& op) = 0;
  virtual void handle_receipt(Instant now, const wire::Header& header, std::span<const std::byte> body) = 0;
  virtual void handle_moved(Instant now, const wire::Header& header) = 0;

  // -- time
  virtual Instant next_deadline() const = 0;
  virtual void on_sent_settled(PeerId peer) = 0;
  virtual void on_tick(Instant now) = 0;

 protected:
  Impl& engine_;
};

/// An operation is over when its Results are sent.
class Engine::Impl::PlainDelivery final : public Delivery {
 public:
  using Delivery::Delivery;
  Status check(const wire::Header& header, const wire::Announce& announce,
               std::span<const std::byte> data) const override;
  void note(Op&, const wire::Header&, std::span<const std::byte>) override {}
  std::uint64_t record_bytes(const wire::Announce&) const override { return 0; }
  void after_announces(Instant) override {}
  bool needs_grants(const Participant& participant) const override { return is_pusher(participant.announce); }
  bool has_to_post(const Participant&, std::uint32_t) const override { return false; }
  void number(PeerId, std::vector<std::uint64_t>&) override {}
  bool may_lend() const override { return true; }
  void handle_ready(Instant, const wire::Header&) override { ++engine_.stats_.messages_rejected; }
  void finish(Instant, Op& op) override { engine_.set_timer(op, Instant::max()); }
  void after_sends(Instant now, Op& op) override;
  void on_timer(Instant, Op&) override {}
  void on_peer_lost(Instant, Op&) override {}
  void forget(const Op&) override {}
  void handle_receipt(Instant, const wire::Header&, std::span<const std::byte>) override {
    ++engine_.stats_.messages_rejected;
  }
  void handle_moved(Instant, const wire::Header&) override { ++engine_.stats_.messages_rejected; }
  Instant next_deadline() const override { return Instant::max(); }
  void on_sent_settled(PeerId) override {}
  void on_tick(Instant) override {}
};

/// With failover (docs/adr/0005-server-failover.md): an operation is over when everybody has said to have all its
/// Results; and what a lane that died had moves here.
class Engine::Impl::RecoverableDelivery final : public Delivery {
 public:
  explicit RecoverableDelivery(Impl& engine) : Delivery(engine), workers_(engine.workers_.size()) {}
  Status check(const wire::Header& header, const wire::Announce& announce,
               std::span<const std::byte> data) const override;
  void note(Op& op, const wire::Header& header, std::span<const std::byte> data) override;
  std::uint64_t record_bytes(const wire::Announce& announce) const override;
  void after_announces(Instant now) override;
  bool needs_grants(const Participant&) const override { return true; }
  bool has_to_post(const Participant& participant, std::uint32_t chunk) const override {
    return !participant.ready && !participant.holds(chunk);
  }
  void number(PeerId peer, std::vector<std::uint64_t>& body) override {
    body.push_back(workers_[peer.value].next_grant++);
  }
  bool may_lend() const override { return false; }
  void handle_ready(Instant now, const wire::Header& header) override;
  void finish(Instant now, Op& op) override;
  void after_sends(Instant now, Op& op) override;
  void on_timer(Instant now, Op& op) override;
  void on_peer_lost(Instant now, Op& op) override { settle(now, op); }
  void forget(const Op& op) override;
  void handle_receipt(Instant now, const wire::Header& header, std::span<const std::byte> body) override;
  void handle_moved(Instant now, const wire::Header& header) override;
  Instant next_deadline() const override { return settled_due_; }
  void on_sent_settled(PeerId peer) override;
  void on_tick(Instant now) override;

 private:
  struct WorkerState {
    std::uint64_t next_grant = 0;
    std::unordered_map<std::uint64_t, std::uint64_t> unsettled;  // Tag of an announce -> operation.
    wire::TagBatch settled;
    std::map<std::uint32_t, std::uint64_t> moved;  // By loss: announces below this one were sent before Moved.
  };

  bool has_all_moved(std::uint32_t loss) const;
  void conclude(Instant now, std::uint32_t loss);
  void settle(Instant now, Op& op);
  void tell_settled(Instant now, Op& op);
  void flush_settled(PeerId peer, bool is_due);

  std::vector<WorkerState> workers_;
  std::set<std::uint32_t> concluded_;  // Losses whose moves are all here.
  Instant settled_due_ = Instant::max();
};

}  // namespace herring::server
