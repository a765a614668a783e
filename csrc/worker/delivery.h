#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "wire/tag_batch.h"
#include "worker/engine_impl.h"

/// The two ways in which an operation gets its Results and ends. Nobody but the worker engine includes this.
namespace herring::worker {

/// What differs between them; the rest of the engine does not ask which one it is.
class Engine::Impl::Delivery {
 public:
  explicit Delivery(Impl& engine) : engine_(engine) {}
  virtual ~Delivery() = default;
  Delivery(const Delivery&) = delete;
  Delivery& operator=(const Delivery&) = delete;

  // -- an operation begins, and is gone
  virtual void prepare(LanePart& part) const = 0;  ///< It is planned.
  virtual void begin(Op& op) const = 0;            ///< Its parts are.
  virtual void forget(const Op& op) = 0;

  // -- an announce
  virtual std::uint32_t shard_of(const Item& item) const = 0;  ///< wire::Header::shard
  /// Takes what the announce needs, and says its flags: kFlagReady where all receives are posted, kFlagEager where
  /// there is room for data with it.
  virtual std::uint16_t reserve(const Op& op, LanePart& part) = 0;
  /// The receive of this expected Result is posted with its grant, not before.
  virtual bool waits_for_grant(const Op& op, const LanePart& part, std::uint32_t result) const = 0;

  // -- grants
  virtual void take_grant(const wire::Header& header, std::span<const std::byte> body) = 0;
  /// Something that this lane's grants may wait for has been given back.
  virtual void serve_grants(std::uint32_t lane) = 0;

  // -- pushes
  /// What is pushed of so many chunks: this worker's data, or the result where it has that.
  virtual std::span<const std::byte> source(const Op& op, const LanePart& part, std::uint32_t chunk,
                                            std::uint32_t run) const {
    return engine_.chunk_memory(op, part, chunk, run);
  }

  // -- Results
  /// They come to where the input still is.
  virtual bool lands_on_input(const Op& op) const = 0;
  /// Where this one is received; empty where it brings nothing.
  virtual std::span<std::byte> landing(const Op& op, const LanePart& part, const Receive& receive) const = 0;
  /// Whether it brings data.
  virtual bool brings_data(const Op& op, const LanePart& part, std::uint32_t chunk) const = 0;
  virtual void take(const Op& op, LanePart& part, const Receive& receive, std::uint64_t bytes) = 0;
  virtual void release(const LanePart& part, const Receive& receive) = 0;  ///< The receive is over.
  virtual void finish(LanePart& part) = 0;                                 ///< All of its receives are.
  virtual void report(const Op& op, LanePart& part) = 0;                   ///< All of its Results have come.

  // -- ends
  /// All Results are here. False: not yet for its user, who is told later.
  virtual bool may_complete(Op& op) = 0;
  virtual void handle_settled(Instant now, const wire::Header& header, std::span<const std::byte> body) = 0;

  // -- lanes die
  /// What this lane has can go to others.
  virtual bool may_move(std::uint32_t lane) const = 0;
  virtual void note_loss(std::uint32_t lane) = 0;
  virtual void move_lane(Instant now, std::uint32_t lane) = 0;
  virtual void say_moved(Lane& lane, std::size_t loss) = 0;
  /// Of a part of a failed operation whose lane is lost: it is over at once, whatever its receives do. False: not so.
  virtual bool abandon_lost(Op& op, LanePart& part) = 0;

  // -- time
  virtual Instant next_deadline() const = 0;
  virtual void on_sent_receipt(Instant now, std::uint32_t lane) = 0;
  virtual void on_tick(Instant now) = 0;
  /// Others need this worker even where nobody waits for an operation of its own.
  virtual bool is_needed() const = 0;

 protected:
  Impl& engine_;
};

/// Results land where they belong, and the last one ends the operation. A lane that dies fails what it takes part in.
class Engine::Impl::PlainDelivery final : public Delivery {
 public:
  using Delivery::Delivery;
  void prepare(LanePart&) const override {}
  void begin(Op&) const override {}
  void forget(const Op&) override {}
  std::uint32_t shard_of(const Item&) const override { return 0; }
  std::uint16_t reserve(const Op& op, LanePart& part) override;
  bool waits_for_grant(const Op& op, const LanePart& part, std::uint32_t result) const override;
  void take_grant(const wire::Header& header, std::span<const std::byte> body) override;
  void serve_grants(std::uint32_t) override {}
  bool lands_on_input(const Op& op) const override { return op.pushes() && op.pulls_data(); }
  std::span<std::byte> landing(const Op& op, const LanePart& part, const Receive& receive) const override;
  bool brings_data(const Op& op, const LanePart&, std::uint32_t) const override { return op.pulls_data(); }
  void take(const Op&, LanePart&, const Receive&, std::uint64_t) override {}
  void release(const LanePart&, const Receive&) override {}
  void finish(LanePart& part) override;
  void report(const Op&, LanePart&) override {}
  bool may_complete(Op&) override { return true; }
  void handle_settled(Instant, const wire::Header&, std::span<const std::byte>) override;
  bool may_move(std::uint32_t) const override { return false; }
  void note_loss(std::uint32_t) override {}
  void move_lane(Instant, std::uint32_t) override {}
  void say_moved(Lane&, std::size_t) override {}
  bool abandon_lost(Op&, LanePart&) override { return false; }
  Instant next_deadline() const override { return Instant::max(); }
  void on_sent_receipt(Instant, std::uint32_t) override {}
  void on_tick(Instant) override {}
  bool is_needed() const override { return engine_.one_way_ > 0; }
};

/// A lane's death costs nothing while another lives (docs/adr/0005-server-failover.md): Results land in slots, so that
/// the input stays whole until all have the result; each lane says when they have; and what a dead lane had moves.
class Engine::Impl::RecoverableDelivery final : public Delivery {
 public:
  /// Throws Error(kInvalidArgument) where the settings lack what it needs.
  explicit RecoverableDelivery(Impl& engine);
  void prepare(LanePart& part) const override;
  void begin(Op& op) const override { op.unsettled = op.open_parts; }
  void forget(const Op& op) override;
  std::uint32_t shard_of(const Item& item) const override { return item.id; }
  std::uint16_t reserve(const Op& op, LanePart& part) override;
  bool waits_for_grant(const Op& op, const LanePart& part, std::uint32_t result) const override;
  void take_grant(const wire::Header& header, std::span<const std::byte> body) override;
  void serve_grants(std::uint32_t lane) override;
  std::span<const std::byte> source(const Op& op, const LanePart& part, std::uint32_t chunk,
                                    std::uint32_t run) const override;
  bool lands_on_input(const Op&) const override { return false; }
  std::span<std::byte> landing(const Op& op, const LanePart& part, const Receive& receive) const override;
  bool brings_data(const Op& op, const LanePart& part, std::uint32_t chunk) const override {
    return op.pulls_data() && !is_held(part, chunk);
  }
  void take(const Op& op, LanePart& part, const Receive& receive, std::uint64_t bytes) override;
  void release(const LanePart& part, const Receive& receive) override;
  void finish(LanePart& part) override;
  void report(const Op& op, LanePart& part) override;
  bool may_complete(Op& op) override;
  void handle_settled(Instant now, const wire::Header& header, std::span<const std::byte> body) override;
  bool may_move(std::uint32_t lane) const override;
  void note_loss(std::uint32_t lane) override;
  void move_lane(Instant now, std::uint32_t lane) override;
  void say_moved(Lane& lane, std::size_t loss) override;
  bool abandon_lost(Op& op, LanePart& part) override;
  Instant next_deadline() const override;
  void on_sent_receipt(Instant now, std::uint32_t lane) override;
  void on_tick(Instant now) override;
  bool is_needed() const override { return !engine_.ops_.empty(); }

 private:
  struct Grant {
    wire::Header header;
    std::uint32_t run = 1;     // Chunks in one message.
    std::uint32_t served = 0;  // Of its chunks.
  };
  struct LaneState {
    SlotPool slots;
    std::vector<std::uint32_t> free_eager;
    std::size_t slots_at = 0;                     // Offset in EngineConfig::bounce.
    std::uint64_t next_grant = 0;                 // Grants below have come ...
    std::map<std::uint64_t, Grant> early_grants;  // ... and these.
    std::deque<Grant> grants;                     // To be served in this order.
    wire::TagBatch receipts;                      // Of announces all of whose Results are here.
    Instant receipts_due = Instant::max();
  };

  bool is_held(const LanePart& part, std::uint32_t chunk) const { return part.held[chunk - part.owned.first]; }
  bool may_serve(const Op& op, const LanePart& part, const Grant& grant, std::uint32_t chunk) const;
  bool serve_grant(LaneState& lane, Grant& grant);
  bool serve_run(LaneState& lane, Op& op, LanePart& part, const Grant& grant, std::uint32_t chunk);
  void send_ready(const Op& op, const LanePart& part, std::uint32_t chunk, std::uint32_t count);
  void flush_receipts(Instant now, std::uint32_t lane, bool is_due);
  void settle(Instant now, Op& op, LanePart& part);
  bool may_retain(const Op& op) const;
  void move_parts(Op& op, std::uint32_t lane);
  LanePart inherit(const Op& op, const LanePart& part, const Item& item, ByteRange shard) const;
  void write_off_sends(std::uint32_t lane);
  void abandon(Op& op, LanePart& part);

  std::vector<LaneState> lanes_;
  std::unordered_map<std::uint64_t, std::pair<std::uint64_t, std::uint32_t>> by_tag_;  // Unsettled: operation, part.
};

}  // namespace herring::worker
