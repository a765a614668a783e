#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <variant>
#include <vector>

#include "collectives/tensor_spec.h"
#include "core/types.h"
#include "fusion_buffer/fusion_buffer.h"

/// Which tensors travel together. Pure: it is told the time, and what it wants done it returns.
namespace herring::collectives {

/// One tensor's reduction, from submit() to its end. Chosen by the caller, unlike any other's of its engine.
using Ticket = std::uint64_t;

struct FusionOptions {
  std::uint32_t index = 0;                ///< This rank's place in its group.
  std::uint64_t bucket_bytes = 16 << 20;  ///< Of rank 0 of the group: all use its value.
  Duration cycle =
      std::chrono::milliseconds(1);  ///< So long a tensor waits for others, and four times that where they keep coming.
  Duration patience = std::chrono::seconds(2);                 ///< Then a tensor that some rank lacks goes alone.
  Duration unknown_patience = std::chrono::milliseconds(250);  ///< The same, where rank 0 has never had it.
  Duration outside_patience = std::chrono::milliseconds(250);  ///< Then ranks hear of what is under way outside.
  std::uint32_t most_names = 1 << 16;                          ///< More go alone.
};

/// Of a tensor, on this rank.
struct Placement {
  /// Where it lies among others: those that follow each other there travel together, whatever their size. 0: by itself.
  std::uint64_t place = 0;
  bool goes_alone = false;  ///< Unlike what the plan says: it is large, and does not lie where it should.
};

/// What follows in a row after a tensor of so many bytes at this place.
std::uint64_t place_after(std::uint64_t place, std::uint64_t bytes);

/// Some tensors in one buffer, in the same order and at the same places on every rank.
struct Batch {
  struct Item {
    Ticket ticket = 0;
    TensorSlice slice;
  };
  DataType dtype = DataType::kFloat32;
  ReduceOp reduce = ReduceOp::kSum;
  std::uint64_t bytes = 0;
  std::vector<Item> items;
};

/// What the engine wants next.
struct FusionStep {
  /// A bitwise AND of these words over all ranks; then round_ended().
  struct Round {
    std::vector<std::uint64_t> words;
    bool is_patient = false;  ///< This rank waits for nothing: others may come to the round when they like.
  };
  /// A broadcast from rank 0 of the group, which has the bytes; then plan_came().
  struct Plan {
    std::vector<std::byte> bytes;
  };
  /// A reduction of each; when one has ended, batch_ended().
  struct Reduce {
    std::vector<Batch> batches;
  };
  /// Reductions of their own, by name; the engine knows these tickets no longer.
  struct Alone {
    std::vector<Ticket> tickets;
  };
  /// Nothing before this moment, or an event.
  struct Wait {
    Instant until;
  };
};
using Step = std::variant<FusionStep::Round, FusionStep::Plan, FusionStep::Reduce, FusionStep::Alone, FusionStep::Wait>;

/// One group's small reductions by name: in rounds, the ranks find out which tensors all of them have, and those travel
/// together (docs/adr/0015-fusion-rounds.md). Every rank calls one engine with what happens there; all see the same
/// rounds in the same order, and nothing else has to be the same. One thread at a time.
class FusionEngine final {
 public:
  explicit FusionEngine(FusionOptions options);

  /// A tensor of this rank is ready. False: it has to go alone, now; also where the name is under way on this rank.
  [[nodiscard]] bool submit(Ticket ticket, std::string_view name, const TensorSpec& spec, Instant now,
                            Placement placement = {});
  /// Rank 0 of the group: the next plan says where this tensor lies, which goes another way this time.
  void propose(std::string_view name, const TensorSpec& spec, std::uint64_t place);
  /// All ranks know that this tensor lies among others, there or elsewhere.
  bool knows_place(std::string_view name, const TensorSpec& spec) const;
  /// A reduction of this name has begun outside of the engine (it is large, or alone), and ended. Other ranks that wait
  /// for it here learn of it.
  void went_outside(std::string_view name, Instant now);
  void came_back(std::string_view name);
  bool is_outside(std::string_view name) const { return outside_.contains(name); }
  bool is_anything_outside() const noexcept { return !outside_.empty(); }
  /// Where has_ended(): some of it may be under way on all ranks. Of the rest, some rank has the end, or never calls
  /// it.
  bool is_anything_outside_everywhere() const;
  /// Somebody waits: what is there need not wait for more.
  void flush() noexcept { flush_ = pending_count_ > 0; }
  /// From a round on that is the same for all ranks everything goes alone, until resume(), which all ranks call when
  /// nothing is under way.
  void pause() noexcept { wants_pause_ = true; }
  void resume() noexcept { wants_pause_ = is_paused_ = false; }
  /// This rank submits nothing more, but for what follows upon what it has. `stays`: in the rounds until has_ended(),
  /// else while something is pending.
  void close(bool stays) noexcept {
    is_closing_ = true;
    stays_ = stays;
  }
  /// A round has shown that all ranks have closed, and that what is pending now will not come on all of them. It was
  /// the last one; what is still to go alone has to.
  bool has_ended() const noexcept { return has_ended_; }
  /// No more rounds: everything goes alone from now on, on this rank. Returns what has waited for one; the engine knows
  /// these tickets no longer.
  std::vector<Ticket> give_up();
  /// Those that a round has to bring, in the order of their tickets.
  std::vector<Ticket> pending() const;

  /// While a round or plan is out, only where has_late(). `more_follows`: later uses of names that were in a bucket are
  /// about to be submitted.
  Step next(Instant now, bool more_follows = false);
  /// What came while a patient round is out has waited for long enough for the others to come to it: it goes alone.
  bool has_late(Instant now) const { return round_is_out_ && now >= late_at_; }
  /// `words`: as many as Round had, ANDed over all ranks. False where they make no sense; the caller gives up.
  [[nodiscard]] bool round_ended(std::span<const std::uint64_t> words, Instant now);
  /// How many bytes the plan has that comes: rank 0 of the group has said it in the round before.
  std::uint64_t plan_bytes() const noexcept { return plan_bytes_; }
  [[nodiscard]] bool plan_came(std::span<const std::byte> plan, Instant now);
  void batch_ended() noexcept { --batches_out_; }

  /// When next() has something to do that it has not yet. Instant::max(): after an event.
  Instant next_look(Instant now) const;
  /// Nothing is pending, nor in a batch that has not ended, nor to go alone.
  bool is_idle() const noexcept {
    return pending_count_ == 0 && to_go_alone_.empty() && batches_.empty() && batches_out_ == 0;
  }
  /// Without anything new of this rank it wants nothing more, once a round that is out has ended.
  bool is_quiet() const noexcept { return !is_moving() && !wants_round() && !has_outside(); }
  /// next() has something to do at once, or batches are under way.
  bool is_moving() const noexcept { return has_step() || batches_out_ > 0; }
  /// Something waits for a round: the one that is out, or the next.
  bool wants_round() const noexcept {
    return !has_given_up_ && !is_paused_ && (pending_count_ > 0 || wants_pause_ || stays_);
  }
  /// Something is under way outside, of which other ranks may have to hear in a round.
  bool has_outside() const noexcept { return !outside_.empty() && !is_paused_ && !has_given_up_; }
  std::uint64_t rounds() const noexcept { return rounds_; }

 private:
  static constexpr std::uint32_t kNoId = 0xFFFF'FFFF;

  struct Entry {
    std::string name;
    TensorSpec spec;  // as rank 0 of the group said; before, as this rank did
    std::uint32_t id = kNoId;
    bool is_pending = false;
    bool is_proposed = false;          // rank 0 of the group: in proposals_
    std::uint64_t place = 0;           // as rank 0 of the group said
    std::uint64_t proposed_place = 0;  // rank 0 of the group: what it says next
    TensorSpec pending_spec;           // also where it is proposed
    Ticket ticket = 0;                 // the rest: where pending
    bool goes_alone = false;
    Instant since{};
    std::uint64_t since_round = 0;
  };
  struct Hash {
    using is_transparent = void;
    std::size_t operator()(std::string_view text) const noexcept { return std::hash<std::string_view>{}(text); }
  };
  template <class Value>
  using ByName = std::unordered_map<std::string, Value, Hash, std::equal_to<>>;

  Entry* find_or_make(std::string_view name);
  bool may_enter(Instant now) const;
  bool only_stays() const { return stays_ && pending_count_ == 0 && batches_out_ == 0; }
  Instant news_end() const;
  FusionStep::Round enter(Instant now, bool more_follows);
  std::vector<std::byte> encode_proposals();
  void set_bits(Entry& entry, bool ready, bool alone);
  Ticket take(Entry& entry);
  std::vector<Ticket> take_all();
  bool has_step() const { return !to_go_alone_.empty() || !batches_.empty() || plan_bytes_ > 0; }
  void lose_patience(Instant now);
  void take_late(Instant now);
  void make_batches(std::span<Entry* const> entries);
  void add_batches(DataType dtype, ReduceOp reduce, std::span<Entry* const> members);

  FusionOptions options_;
  ByName<Entry> entries_;
  std::vector<Entry*> ids_;                // by id
  std::vector<std::uint64_t> ready_;       // a bit for each id: pending here, as the plan says
  std::vector<std::uint64_t> alone_bits_;  // pending here, and has to go alone
  ByName<std::uint32_t> outside_;          // under way outside, and how often
  std::vector<Entry*> proposals_;          // of rank 0 of the group
  std::vector<std::byte> own_plan_;        // as said in the round that is out
  std::uint64_t plan_bytes_ = 0;           // above 0: a plan comes next
  std::vector<Ticket> to_go_alone_;
  std::vector<Batch> batches_;
  std::size_t pending_count_ = 0;
  std::uint64_t pending_bytes_ = 0;
  std::size_t batches_out_ = 0;
  std::size_t ids_in_round_ = 0;
  std::uint64_t rounds_ = 0;
  std::uint64_t outside_everywhere_ = 0;  // As in the last round.
  Instant first_news_{};
  Instant last_news_{};
  Instant not_before_{};  // after a round that brought nothing
  Duration pause_between_{};
  Instant outside_since_{};
  Duration outside_pause_{};
  bool has_news_ = false;
  bool flush_ = false;
  bool round_is_out_ = false;
  bool round_is_patient_ = false;
  Instant late_at_ = Instant::max();
  bool wants_pause_ = false;
  bool is_paused_ = false;
  bool is_closing_ = false;
  bool stays_ = false;
  bool has_ended_ = false;
  bool has_given_up_ = false;
};

}  // namespace herring::collectives
