#include "collectives/fusion_engine.h"

#include <algorithm>
#include <bit>
#include <tuple>
#include <utility>

namespace herring::collectives {
namespace {

// The first words of a round: the size of rank 0's plan, which the others leave open, flags, and what is under way
// outside, a bit for each name: several may share one.
constexpr std::size_t kHeadWords = 3;
constexpr std::uint64_t kOpen = ~std::uint64_t{0};
constexpr std::uint64_t kNotPaused = 1;
constexpr std::uint64_t kCloses = 2;
constexpr std::uint64_t kAlignment = 64;
constexpr Duration kFirstPause = std::chrono::milliseconds(1);
constexpr Duration kLongestPause = std::chrono::milliseconds(16);
constexpr Duration kLongestOutsidePause = std::chrono::seconds(2);
// A tensor that some rank lacks: so many rounds have shown it.
constexpr std::uint64_t kRoundsToBeSure = 2;
// Shorter rows of tensors share a bucket with others: to copy them costs less than an operation.
constexpr std::uint64_t kLeastRowBytes = 1 << 20;

std::size_t words_for(std::size_t ids) { return (ids + 63) / 64; }
void set(std::vector<std::uint64_t>& bits, std::size_t index, bool value) {
  const std::uint64_t bit = std::uint64_t{1} << index % 64;
  bits[index / 64] = value ? bits[index / 64] | bit : bits[index / 64] & ~bit;
}

/// The same on every rank, unlike std::hash.
std::uint64_t bit_of(std::string_view name) {
  std::uint64_t hash = 0xCBF2'9CE4'8422'2325;
  for (const char letter : name) hash = (hash ^ static_cast<unsigned char>(letter)) * 0x100'0000'01B3;
  return std::uint64_t{1} << (hash >> 58);
}

}  // namespace

std::uint64_t place_after(std::uint64_t place, std::uint64_t bytes) {
  return (place + bytes + kAlignment - 1) / kAlignment * kAlignment;
}

FusionEngine::FusionEngine(FusionOptions options) : options_(options) {}

FusionEngine::Entry* FusionEngine::find_or_make(std::string_view name) {
  const auto found = entries_.find(name);
  if (found != entries_.end()) return &found->second;
  if (entries_.size() >= options_.most_names || name.size() > kMaxPlannedName) return nullptr;
  Entry& entry = entries_[std::string(name)];
  entry.name = name;
  return &entry;
}

bool FusionEngine::knows_place(std::string_view name, const TensorSpec& spec) const {
  const auto found = entries_.find(name);
  if (found == entries_.end()) return false;
  const Entry& entry = found->second;
  return entry.id != kNoId && entry.place != 0 && entry.spec == spec;
}

void FusionEngine::propose(std::string_view name, const TensorSpec& spec, std::uint64_t place) {
  if (options_.index != 0 || has_given_up_) return;
  Entry* const entry = find_or_make(name);
  if (entry == nullptr || entry->is_pending) return;
  entry->pending_spec = spec;
  entry->proposed_place = place;
  if (!std::exchange(entry->is_proposed, true)) proposals_.push_back(entry);
}

bool FusionEngine::submit(Ticket ticket, std::string_view name, const TensorSpec& spec, Instant now,
                          Placement placement) {
  if (is_paused_ || has_given_up_ || outside_.contains(name)) return false;
  Entry* const entry = find_or_make(name);
  if (entry == nullptr || entry->is_pending) return false;
  // Where it lies is rank 0's to say.
  const bool has_moved = options_.index == 0 && placement.place != 0 && entry->place != placement.place;
  const bool is_planned = entry->id != kNoId && entry->spec == spec && !has_moved;
  entry->is_pending = true;
  entry->goes_alone = placement.goes_alone;
  entry->ticket = ticket;
  entry->pending_spec = spec;
  entry->since = now;
  entry->since_round = rounds_;
  ++pending_count_;
  pending_bytes_ += spec.descriptor.op_bytes;
  if (is_planned) {
    set_bits(*entry, !placement.goes_alone, placement.goes_alone);
  } else if (options_.index == 0) {
    entry->proposed_place = placement.place;
    if (!std::exchange(entry->is_proposed, true)) proposals_.push_back(entry);
  } else if (entry->id != kNoId) {
    set_bits(*entry, false, true);
  }
  if (!std::exchange(has_news_, true)) first_news_ = now;
  last_news_ = now;
  if (round_is_out_ && round_is_patient_) late_at_ = std::min(late_at_, now + options_.patience);
  return true;
}

void FusionEngine::set_bits(Entry& entry, bool ready, bool alone) {
  if (entry.id == kNoId) return;
  set(ready_, entry.id, ready);
  set(alone_bits_, entry.id, alone);
}

void FusionEngine::went_outside(std::string_view name, Instant now) {
  if (outside_.empty()) {
    outside_since_ = now;
    outside_pause_ = options_.outside_patience;
  }
  const auto found = outside_.find(name);
  if (found != outside_.end()) {
    ++found->second;
  } else {
    outside_.emplace(name, 1);
  }
}

void FusionEngine::came_back(std::string_view name) {
  const auto found = outside_.find(name);
  if (found != outside_.end() && --found->second == 0) outside_.erase(found);
}

bool FusionEngine::is_anything_outside_everywhere() const {
  return std::ranges::any_of(outside_,
                             [this](const auto& each) { return (bit_of(each.first) & outside_everywhere_) != 0; });
}

std::vector<Ticket> FusionEngine::give_up() {
  has_given_up_ = true;
  round_is_out_ = false;
  plan_bytes_ = 0;
  return take_all();
}

std::vector<Ticket> FusionEngine::pending() const {
  std::vector<Ticket> tickets;
  for (const auto& [name, entry] : entries_) {
    if (entry.is_pending) tickets.push_back(entry.ticket);
  }
  std::ranges::sort(tickets);
  return tickets;
}

Ticket FusionEngine::take(Entry& entry) {
  set_bits(entry, false, false);
  entry.is_pending = false;
  --pending_count_;
  pending_bytes_ -= entry.pending_spec.descriptor.op_bytes;
  return entry.ticket;
}

std::vector<Ticket> FusionEngine::take_all() {
  std::vector<Ticket> tickets;
  for (auto& [name, entry] : entries_) {
    if (entry.is_pending) tickets.push_back(take(entry));
  }
  std::ranges::sort(tickets);
  return tickets;
}

// --- what comes next -------------------------------------------------------------------------------------------------

Step FusionEngine::next(Instant now, bool more_follows) {
  if (has_late(now)) take_late(now);
  if (!to_go_alone_.empty()) return FusionStep::Alone{std::exchange(to_go_alone_, {})};
  if (!batches_.empty()) {
    batches_out_ += batches_.size();
    return FusionStep::Reduce{std::exchange(batches_, {})};
  }
  if (plan_bytes_ > 0) return FusionStep::Plan{std::move(own_plan_)};
  if (may_enter(now)) return enter(now, more_follows);
  return FusionStep::Wait{next_look(now)};
}

bool FusionEngine::may_enter(Instant now) const {
  if (round_is_out_ || is_paused_ || has_ended_ || has_given_up_) return false;
  if (wants_pause_) return true;
  if (only_stays() && now >= not_before_) return true;
  if (pending_count_ > 0 && has_news_) {
    if (flush_ || pending_bytes_ >= options_.bucket_bytes) return true;
    if (batches_out_ == 0 && now >= news_end()) return true;
  }
  if (pending_count_ > 0 && !has_news_ && now >= not_before_) return true;
  return !outside_.empty() && now >= outside_since_ + outside_pause_;
}

/// A cycle after the first, or later where more keep coming: a program that starts a thousand in a row is not done yet.
Instant FusionEngine::news_end() const {
  const Instant pause = last_news_ + options_.cycle / 4;
  return std::clamp(pause, first_news_ + options_.cycle, first_news_ + 4 * options_.cycle);
}

Instant FusionEngine::next_look(Instant now) const {
  if (has_step() || may_enter(now)) return now;
  if (round_is_out_) return std::max(late_at_, now);
  if (is_paused_ || has_ended_ || has_given_up_) return Instant::max();
  Instant when = Instant::max();
  if (pending_count_ > 0 && has_news_ && batches_out_ == 0) when = news_end();
  if ((pending_count_ > 0 && !has_news_) || only_stays()) when = not_before_;
  if (!outside_.empty()) when = std::min(when, outside_since_ + outside_pause_);
  return std::max(when, now);
}

FusionStep::Round FusionEngine::enter(Instant now, bool more_follows) {
  FusionStep::Round round;
  round.is_patient = pending_count_ == 0;
  ids_in_round_ = ids_.size();
  const std::size_t words = words_for(ids_in_round_);
  round.words.reserve(kHeadWords + 2 * words);
  own_plan_ = encode_proposals();
  round.words.push_back(options_.index == 0 ? own_plan_.size() : kOpen);
  const bool closes = is_closing_ && batches_out_ == 0 && !more_follows;
  round.words.push_back((wants_pause_ ? 0 : kNotPaused) | (closes ? kCloses : 0));
  round.words.push_back(0);
  round.words.insert(round.words.end(), ready_.begin(), ready_.end());
  // Bits beyond the last id are the same on all ranks: set here, and never in `ready_`.
  for (const std::uint64_t alone : alone_bits_) round.words.push_back(~alone);
  for (const auto& [name, count] : outside_) {
    const auto entry = entries_.find(name);
    if (entry == entries_.end() || entry->second.id == kNoId) continue;
    const std::uint32_t id = entry->second.id;
    round.words[kHeadWords + words + id / 64] &= ~(std::uint64_t{1} << id % 64);
  }
  round_is_out_ = true;
  round_is_patient_ = round.is_patient;
  late_at_ = Instant::max();
  has_news_ = false;
  flush_ = false;
  for (const auto& [name, count] : outside_) round.words[2] |= bit_of(name);
  if (!outside_.empty()) {
    outside_since_ = now;
    outside_pause_ = std::min(2 * outside_pause_, kLongestOutsidePause);
  }
  return round;
}

std::vector<std::byte> FusionEngine::encode_proposals() {
  if (proposals_.empty()) return {};
  std::vector<std::byte> plan = begin_plan(options_.bucket_bytes);
  for (const Entry* entry : proposals_) {
    if (!append(plan, {entry->name, entry->pending_spec, entry->proposed_place}))
      break;  // The rest goes with the next plan.
  }
  return plan;
}

// --- what has come ---------------------------------------------------------------------------------------------------

bool FusionEngine::round_ended(std::span<const std::uint64_t> words, Instant now) {
  const std::size_t count = words_for(ids_in_round_);
  if (!round_is_out_ || words.size() != kHeadWords + 2 * count) return false;
  round_is_out_ = false;
  ++rounds_;
  const std::span<const std::uint64_t> ready = words.subspan(kHeadWords, count);
  const std::span<const std::uint64_t> together = words.subspan(kHeadWords + count, count);
  std::vector<Entry*> fused;
  bool has_moved = false;
  for (std::size_t word = 0; word < count; ++word) {
    for (std::uint64_t bits = ready[word] & together[word]; bits != 0; bits &= bits - 1) {
      const std::size_t id = word * 64 + static_cast<std::size_t>(std::countr_zero(bits));
      if (id >= ids_in_round_ || !ids_[id]->is_pending) return false;
      fused.push_back(ids_[id]);
    }
    for (std::uint64_t bits = ~together[word]; bits != 0; bits &= bits - 1) {
      const std::size_t id = word * 64 + static_cast<std::size_t>(std::countr_zero(bits));
      if (id >= ids_in_round_) return false;
      if (!ids_[id]->is_pending) continue;
      to_go_alone_.push_back(take(*ids_[id]));
      has_moved = true;
    }
  }
  has_moved = has_moved || !fused.empty();
  make_batches(fused);
  if ((words[1] & kNotPaused) == 0) {
    is_paused_ = true;
    const std::vector<Ticket> rest = take_all();
    to_go_alone_.insert(to_go_alone_.end(), rest.begin(), rest.end());
    return true;
  }
  plan_bytes_ = words[0] == kOpen ? 0 : words[0];
  if (plan_bytes_ > kMaxPlanBytes) return false;
  has_ended_ = (words[1] & kCloses) != 0 && fused.empty() && plan_bytes_ == 0;
  outside_everywhere_ = to_go_alone_.empty() ? words[2] : kOpen;
  if (has_moved || plan_bytes_ > 0) {
    pause_between_ = Duration::zero();
  } else {
    pause_between_ = std::clamp(2 * pause_between_, kFirstPause, kLongestPause);
    if (!has_ended_) lose_patience(now);
  }
  not_before_ = now + pause_between_;
  return true;
}

/// What some rank has lacked for long goes alone: where it never comes there, the reduction says so in its own words.
void FusionEngine::lose_patience(Instant now) {
  for (auto& [name, entry] : entries_) {
    if (!entry.is_pending || rounds_ < entry.since_round + kRoundsToBeSure) continue;
    if (options_.index == 0 && entry.is_proposed) continue;
    const Duration patience = entry.id == kNoId ? options_.unknown_patience : options_.patience;
    if (now >= entry.since + patience) to_go_alone_.push_back(take(entry));
  }
}

/// Others know nothing of it: it was not there when this rank entered the round.
void FusionEngine::take_late(Instant now) {
  late_at_ = Instant::max();
  for (auto& [name, entry] : entries_) {
    if (!entry.is_pending) continue;
    const Instant when = entry.since + options_.patience;
    if (now >= when) {
      to_go_alone_.push_back(take(entry));
    } else {
      late_at_ = std::min(late_at_, when);
    }
  }
  std::ranges::sort(to_go_alone_);
  if (pending_count_ == 0) has_news_ = false;
}

bool FusionEngine::plan_came(std::span<const std::byte> bytes, Instant now) {
  if (plan_bytes_ == 0 || bytes.size() != std::exchange(plan_bytes_, 0)) return false;
  const std::optional<PlanText> plan = read_plan(bytes);
  if (!plan) return false;
  options_.bucket_bytes = plan->bucket_bytes;
  for (const PlannedTensor& tensor : plan->tensors) {
    Entry* entry = find_or_make(tensor.name);
    if (entry == nullptr) {  // Others of this rank have taken the room: it has to know it all the same.
      entry = &entries_[std::string(tensor.name)];
      entry->name = tensor.name;
    }
    entry->spec = tensor.spec;
    entry->place = tensor.place;
    if (entry->id == kNoId) {
      entry->id = static_cast<std::uint32_t>(ids_.size());
      ids_.push_back(entry);
      ready_.resize(words_for(ids_.size()), 0);
      alone_bits_.resize(words_for(ids_.size()), 0);
    }
    const bool fits = entry->pending_spec == entry->spec && !entry->goes_alone;
    if (entry->is_pending) set_bits(*entry, fits, !fits);
  }
  for (std::size_t i = 0; i < plan->tensors.size() && i < proposals_.size(); ++i) proposals_[i]->is_proposed = false;
  const auto done = std::min(plan->tensors.size(), proposals_.size());
  proposals_.erase(proposals_.begin(), proposals_.begin() + static_cast<std::ptrdiff_t>(done));
  not_before_ = now;
  return true;
}

void FusionEngine::make_batches(std::span<Entry* const> entries) {
  // A bucket has one type and one operator. There are few of them.
  std::vector<std::pair<std::pair<DataType, ReduceOp>, std::vector<Entry*>>> kinds;
  for (Entry* const entry : entries) {
    const std::pair kind(entry->spec.descriptor.dtype, entry->spec.descriptor.reduce);
    auto place = std::ranges::find(kinds, kind, [](const auto& each) { return each.first; });
    if (place == kinds.end()) place = kinds.insert(kinds.end(), {kind, {}});
    place->second.push_back(entry);
  }
  for (auto& [kind, members] : kinds) {
    // Rows of what has a place; then the rest.
    const auto order = [](const Entry* entry) {
      return std::tuple(entry->place == 0, entry->place, entry->spec.descriptor.op_bytes > 0);
    };
    std::ranges::stable_sort(members, {}, order);
    std::vector<Entry*> rest;
    for (auto first = members.begin(), last = first; first != members.end(); first = last) {
      std::uint64_t bytes = 0;
      std::uint64_t next = (*first)->place;
      for (; last != members.end() && (*last)->place == next && next != 0; ++last) {
        bytes += (*last)->spec.descriptor.op_bytes;
        next = place_after(next, (*last)->spec.descriptor.op_bytes);
      }
      if (last == first) last = members.end();
      if (next != 0 && bytes >= kLeastRowBytes) {
        add_batches(kind.first, kind.second, {first, last});
      } else {
        rest.insert(rest.end(), first, last);
      }
    }
    add_batches(kind.first, kind.second, rest);
  }
}

void FusionEngine::add_batches(DataType dtype, ReduceOp reduce, std::span<Entry* const> members) {
  std::vector<std::uint64_t> sizes;
  sizes.reserve(members.size());
  for (const Entry* entry : members) sizes.push_back(entry->spec.descriptor.op_bytes);
  const BucketLayout layout = plan_buckets(sizes, options_.bucket_bytes, 0, kAlignment);
  const std::uint64_t unit = element_bytes(dtype);
  for (const Bucket& bucket : layout.buckets) {
    Batch& batch = batches_.emplace_back();
    batch.dtype = dtype;
    batch.reduce = reduce;
    batch.bytes = (bucket.bytes + unit - 1) / unit * unit;
    batch.items.reserve(bucket.tensor_count);
    for (std::uint32_t i = bucket.first_tensor; i < bucket.first_tensor + bucket.tensor_count; ++i) {
      batch.items.push_back({take(*members[i]), layout.slices[i]});
    }
  }
}

}  // namespace herring::collectives
