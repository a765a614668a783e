#include "runtime/peer_group.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <deque>
#include <map>
#include <span>
#include <thread>
#include <utility>

#include "core/clock.h"
#include "core/status.h"
#include "runtime/host_reduction.h"
#include "runtime/peer_agreement.h"
#include "runtime/peer_groups.h"
#include "runtime/peer_records.h"
#include "runtime/reduction_lanes.h"
#include "staging/peer_engine.h"

namespace herring::runtime {
namespace {

using staging::Piece;
using staging::PieceRange;
using Step = HostReduction::Step;

/// The communicator speaks of the operation that it carries out; people know the one that it is for.
Status spoken_of(const Status& status, const OpDescriptor& carried_out, const OpDescriptor& known) {
  std::string text = status.message();
  const std::string own = to_string(carried_out);
  if (const std::size_t at = text.find(own); at != std::string::npos) text.replace(at, own.size(), to_string(known));
  return {status.code(), std::move(text)};
}

class Peers final : public PeerGroup {
 public:
  explicit Peers(Options options)
      : options_(std::move(options)),
        members_(static_cast<std::uint32_t>(options_.places.neighbors.size())),
        pid_(getpid()),
        engine_(engine_options()),
        watch_(options_.watch) {}

  ~Peers() override {
    // The driver does not work in a forked child.
    if (getpid() != pid_) {
      keep_device();
      return;
    }
    leave();
    const Instant deadline = std::chrono::steady_clock::now() + kPatience;
    end_rounds(deadline);
    if (!device_) return;
    if (!end_copies(deadline)) {
      if (reduction_) reduction_->abort();
      // What a copy may still use stays, and so does the device, which would give it back.
      if (!end_copies(std::chrono::steady_clock::now() + kPatience)) {
        keep_device();
        if (host_) static_cast<void>(new std::shared_ptr<std::byte>(std::move(host_)));
        return;
      }
    }
    if (reduction_ && !reduction_->release(std::chrono::steady_clock::now() + kCourtesy)) keep_device();
  }

  void open() {
    if (!options_.groups) {
      options_.groups =
          std::make_shared<PeerGroups>(options_.runtime, options_.group, options_.places, options_.library != nullptr);
    }
    Status status;
    try {
      open_here();
    } catch (const Error& error) {
      status = error.status();
    }
    // Also where it went wrong here: the other hosts have to hear of it.
    if (has_network())
      agree_in(options_.groups->network(), options_.places.others, status, "cannot reduce on its GPU", {});
    if (!status.is_ok()) throw Error(status);
  }

  void close(const Status& why) override {
    staging::PeerActions actions;
    engine_.close(why, actions);
    act(actions);
  }

  void leave() override {
    if (options_.groups) options_.groups->leave();
  }

  Status submit(Instant now, Job job) override {
    const staging::PeerOperationId id{++last_operation_};
    const Instant deadline = deadline_after(now, job.timeout);
    const auto place = operations_.try_emplace(id, Operation{std::move(job)}).first;
    staging::PeerActions actions;
    const Status status = engine_.submit(id, place->second.job.tensor.bytes, deadline, actions);
    if (!status.is_ok()) operations_.erase(place);
    act(actions);
    note_calls();
    return status;
  }

  bool run(Instant now) override {
    staging::PeerActions actions;
    bool has_moved = look_at_device(actions);
    has_moved |= take_steps(actions);
    has_moved |= hear(now, actions);
    engine_.advance(now, actions);
    watch_over(now, actions);
    has_moved |= !actions.empty();
    act(actions);
    note_calls();
    return has_moved;
  }

  Awaited awaited() const override {
    if (rounds_.empty()) return {};
    const Round& first = rounds_.front();
    const auto found = operations_.find(first.piece.operation);
    if (found == operations_.end() || !first.work) return {};
    return {first.work.get(), to_string(found->second.job.descriptor), first.work};
  }

  const Status& status() const override { return engine_.status(); }

 private:
  static constexpr std::chrono::seconds kPatience{5};  ///< At the end, with what is still under way.
  static constexpr std::chrono::seconds kCourtesy{2};  ///< And for others to come to their end.

  static constexpr std::uint64_t kOpening = ~std::uint64_t{0};  ///< No piece's number.

  enum class Kind : std::uint8_t { kIn, kSummed, kRangeOut, kRangeBack, kLateResult, kResult };
  struct Watched {
    StreamHandle stream;
    Kind kind;
    Piece piece;
  };
  struct Operation {
    Job job;
    bool has_begun = false;
  };
  enum class RoundKind : std::uint8_t { kMeeting, kSharing, kExchange };
  /// An operation of the communicator, for a piece.
  struct Round {
    Round(RoundKind its_kind, const Piece& its_piece) : kind(its_kind), piece(its_piece) {}

    RoundKind kind;
    Piece piece;
    Request request;
    std::unique_ptr<Records> said;  ///< Of a meeting.
    std::shared_ptr<Work> work;     ///< Null: it is over, so:
    Status status;
  };

  bool has_network() const { return options_.places.others.size() > 1; }
  /// Of a piece, at most.
  std::uint64_t range_bytes() const {
    return staging::range_of(slot_bytes(), 0, members_).bytes + staging::kRangeAlignment;
  }

  /// So that every rank's range of a whole slot is as large.
  std::uint64_t slot_bytes() const {
    const std::uint64_t unit = staging::kRangeAlignment * members_;
    return options_.memory_bytes / staging::kSlots / unit * unit;
  }

  staging::PeerOptions engine_options() const {
    staging::PeerOptions options{.members = members_, .slot_bytes = slot_bytes(), .has_network = has_network()};
    // A library's all-reduce is one round whatever the size.
    if (options_.library) options.together_bytes = options.slot_bytes;
    return options;
  }

  /// Until the process ends. Without a lock: in a forked child somebody who is not there may have it.
  void keep_device() {
    struct Kept {
      HostReduction* reduction;
      Device* device;
      Kept* next;
    };
    static std::atomic<Kept*> all = nullptr;
    auto* const kept = new Kept{reduction_.release(), device_.release(), all.load()};
    while (!all.compare_exchange_weak(kept->next, kept)) {
    }
  }

  /// The communicator uses their memory until they have ended, which leave() sees to.
  void end_rounds(Instant deadline) {
    for (Round& round : rounds_) {
      if (!round.work || round.work->wait(deadline)) continue;
      static_cast<void>(new Round(std::move(round)));
      if (host_) static_cast<void>(new std::shared_ptr<std::byte>(host_));
    }
  }

  /// False where some have not ended by then.
  bool end_copies(Instant deadline) {
    staging::PeerActions nobody_asks;
    while (!tickets_.empty() || !unwatched_.empty() || is_aborting()) {
      end_steps(nobody_asks);
      std::array<TicketDone, 16> done;
      const std::size_t count = device_->poll(done);
      for (std::size_t i = 0; i < count; ++i) tickets_.erase(done[i].ticket);
      Ticket ticket;
      if (!unwatched_.empty() && !device_->record(unwatched_.front().stream, ticket).is_again()) {
        tickets_[ticket] = unwatched_.front();
        unwatched_.pop_front();
      } else if (count == 0) {
        if (!device_->health().is_ok()) return true;  // Nothing is copied any more.
        if (std::chrono::steady_clock::now() > deadline) return false;
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
    }
    return true;
  }

  Status open_device() {
    try {
      device_ = options_.open(in_, back_);
      if (has_network()) host_ = options_.host_memory(staging::kSlots * range_bytes());
    } catch (const Error& error) {
      return {Code::kUnavailable, error.status().message()};
    }
    if (has_network() && !host_) return {Code::kUnavailable, "no host memory for copies; raise HERRING_ARENA_BYTES"};
    return Status::ok();
  }

  void open_here() {
    const Status ready = open_device();
    if (!ready.is_ok())
      agree_in(options_.groups->meeting(), options_.places.neighbors, ready, "", {});  // Tells the others, and throws.
    const auto make = options_.library ? make_library_reduction : make_peer_reduction;
    reduction_ = make(*device_, {.places = options_.places,
                                 .memory_bytes = options_.memory_bytes,
                                 .blocks = options_.blocks,
                                 .back = back_,
                                 .timeout = options_.timeout,
                                 .are_others_there = [this] { return ask_others(std::chrono::steady_clock::now()); },
                                 .library = options_.library});
    watch_.begin(kOpening, std::chrono::steady_clock::now(), Instant::max());
    reduction_->open([this](const Status& own, const char* what, const PeerNumbers& said) {
      return agree_in(options_.groups->meeting(), options_.places.neighbors, own, what, said);
    });
    watch_.end(kOpening);
  }

  PeerNumbers agree_in(GroupId group, const std::vector<std::uint32_t>& ranks, const Status& own, const char* what,
                       const PeerNumbers& said) {
    const std::uint32_t rank = options_.places.neighbors[options_.places.index];
    return agree(*options_.runtime, group, ranks, rank, options_.timeout, own, what, said);
  }

  /// What the device is doing leads to calls, whoever waits.
  void note_calls() {
    const bool will_call = !tickets_.empty() || !unwatched_.empty() || !lanes_.is_empty();
    if (will_call && !will_call_) will_call_ = options_.runtime->will_call();
    if (!will_call) will_call_.reset();
  }

  bool look_at_device(staging::PeerActions& actions) {
    std::array<TicketDone, 16> done;
    const std::size_t count = device_->poll(done);
    for (std::size_t i = 0; i < count; ++i) {
      const auto found = tickets_.find(done[i].ticket);
      if (found == tickets_.end()) continue;
      const Watched watched = found->second;
      tickets_.erase(found);
      answer(watched, done[i].status, actions);
    }
    bool has_recorded = false;
    while (!unwatched_.empty() && record(unwatched_.front(), actions)) {
      unwatched_.pop_front();
      has_recorded = true;
    }
    if (!device_->health().is_ok()) engine_.lose_device(device_->health(), actions);
    return count > 0 || has_recorded;
  }

  void answer(const Watched& watched, const Status& status, staging::PeerActions& actions) {
    const std::uint64_t number = watched.piece.number;
    switch (watched.kind) {
      case Kind::kIn:
        return engine_.on_copied_in(number, status, actions);
      case Kind::kSummed:
        watch_.end(number);
        return engine_.on_summed(number, status, actions);
      case Kind::kRangeOut:
        return on_range_out(watched.piece, status, actions);
      case Kind::kRangeBack:
        return engine_.on_exchanged(number, status, actions);
      case Kind::kLateResult:
        watch_.end(number);
        engine_.on_result_submitted(number, status, actions);
        return engine_.on_result(number, status, actions);
      case Kind::kResult:
        return engine_.on_result(number, status, actions);
    }
  }

  /// Where the work was submitted, its ticket is waited for; later where there is none just now.
  void watch(const Watched& watched, const Status& submitted, staging::PeerActions& actions) {
    if (!submitted.is_ok()) return answer(watched, submitted, actions);
    // In their order: a ticket that comes later covers more than it should.
    if (!unwatched_.empty() || !record(watched, actions)) unwatched_.push_back(watched);
  }

  /// False where there are too many.
  bool record(const Watched& watched, staging::PeerActions& actions) {
    Ticket ticket;
    const Status status = device_->record(watched.stream, ticket);
    if (status.is_again()) return false;
    if (status.is_ok()) {
      tickets_[ticket] = watched;
    } else {
      answer(watched, status, actions);
    }
    return true;
  }

  bool hear(Instant now, staging::PeerActions& actions) {
    bool has_heard = false;
    // Nothing else to look at: this thread moves the data.
    constexpr std::chrono::microseconds kShort{20};
    const bool is_free = tickets_.empty() && unwatched_.empty();
    for (auto round = rounds_.begin(); round != rounds_.end();) {
      if (is_free && round == rounds_.begin() && round->work && !round->work->is_done())
        round->work->wait(now + kShort);
      if (round->work && !round->work->is_done()) {
        ++round;
        continue;
      }
      Round over = std::move(*round);
      round = rounds_.erase(round);
      end(over, actions);
      has_heard = true;
    }
    return has_heard;
  }

  void end(const Round& round, staging::PeerActions& actions) {
    Status status = round.work ? round.work->status() : round.status;
    const auto found = operations_.find(round.piece.operation);
    if (found != operations_.end()) {
      const OpDescriptor& known = found->second.job.descriptor;
      if (!status.is_ok()) {
        status = spoken_of(status, round.request.descriptor, known);
      } else if (round.kind == RoundKind::kMeeting) {
        status = compare(*round.said, options_.places.neighbors, round.piece.operation.value, options_.group);
      }
    }
    switch (round.kind) {
      case RoundKind::kMeeting:
        return engine_.on_met(round.piece.number, status, actions);
      case RoundKind::kSharing:
        return engine_.on_shared(round.piece.number, status, actions);
      case RoundKind::kExchange:
        return on_exchanged(round.piece, status, actions);
    }
  }

  void act(staging::PeerActions& actions) {
    while (!actions.empty()) {
      staging::PeerActions more;
      for (const staging::PeerAction& action : actions) {
        std::visit([&](const auto& each) { perform(each, more); }, action);
      }
      actions.swap(more);
    }
  }

  DeviceSpan tensor_part(const Piece& piece) const {
    return operations_.at(piece.operation).job.tensor.subspan(piece.offset, piece.bytes);
  }

  void perform(const staging::CopyIn& action, staging::PeerActions& more) {
    const Piece& piece = action.piece;
    Operation& operation = operations_.at(piece.operation);
    if (!std::exchange(operation.has_begun, true) && operation.job.before) operation.job.before();
    const Status status = device_->copy_inside(in_, reduction_->slot(piece), tensor_part(piece));
    watch({in_, Kind::kIn, piece}, status, more);
  }

  void perform(const staging::Meet& action, staging::PeerActions& more) {
    const Job& job = operations_.at(action.piece.operation).job;
    Round round(RoundKind::kMeeting, action.piece);
    round.said = std::make_unique<Records>(members_, options_.places.index, record_of(job.descriptor, action.piece));
    round.request = round.said->request(options_.groups->meeting(), job.timeout);
    begin(std::move(round), more);
  }

  void perform(const staging::Share& action, staging::PeerActions& more) {
    Round round(RoundKind::kSharing, action.piece);
    round.request.group = options_.groups->sharing();
    round.request.descriptor.collective = Collective::kBarrier;
    round.request.timeout = operations_.at(action.piece.operation).job.timeout;
    begin(std::move(round), more);
  }

  void begin(Round round, staging::PeerActions& more) {
    round.request.is_waited_for = true;
    round.request.from_pool = true;
    round.work = options_.runtime->run(round.request, round.status);
    if (!round.work) return end(round, more);
    rounds_.push_back(std::move(round));
  }

  void take_step(Step step, const Piece& piece, staging::PeerActions& more) {
    const Job& job = operations_.at(piece.operation).job;
    if (reduction_->waits_on_device()) {
      const Instant now = std::chrono::steady_clock::now();
      watch_.begin(piece.number, now, deadline_after(now, job.timeout));
    }
    lanes_.add(step, piece, job.descriptor, tensor_part(piece));
    take_steps(more);
  }

  /// Whether any went.
  bool take_steps(staging::PeerActions& more) {
    if (!engine_.status().is_ok()) return end_steps(more);
    const std::vector<ReductionLanes::Taken> taken = lanes_.go_on(*reduction_);
    for (const ReductionLanes::Taken& each : taken) on_taken(each, more);
    return !taken.empty();
  }

  /// What is left of them was given up, but may still come to the device.
  bool is_aborting() const { return !engine_.status().is_ok() && !lanes_.is_empty(); }
  /// Whether any ended so.
  bool end_steps(staging::PeerActions& more) {
    if (!is_aborting() || !reduction_->has_aborted()) return false;
    for (const ReductionLanes::Taken& each : lanes_.give_up(engine_.status())) on_taken(each, more);
    return true;
  }

  void on_taken(const ReductionLanes::Taken& taken, staging::PeerActions& more) {
    const StreamHandle stream = reduction_->stream(taken.step);
    const Piece& piece = taken.piece;
    if (taken.step == Step::kSumOwn) return watch({stream, Kind::kSummed, piece}, taken.status, more);
    if (reduction_->waits_on_device()) return watch({stream, Kind::kLateResult, piece}, taken.status, more);
    engine_.on_result_submitted(piece.number, taken.status, more);
    if (taken.status.is_ok()) watch({stream, Kind::kResult, piece}, taken.status, more);
  }

  /// Steps that wait on the device for ranks which are gone are ended.
  void watch_over(Instant now, staging::PeerActions& actions) {
    if (watch_.has_any()) watch_.on_health(reduction_->health(), now);
    if (Status gone = ask_others(now); !gone.is_ok()) engine_.close(gone, actions);
  }
  /// Not Ok: what is under way does not end any more.
  Status ask_others(Instant now) {
    if (question_ && question_->is_done()) watch_.on_answer(std::exchange(question_, nullptr)->status(), now);
    staging::WatchActions wanted;
    watch_.advance(now, wanted);
    for (const staging::WatchAction& each : wanted) {
      if (std::holds_alternative<staging::GiveUp>(each)) return std::get<staging::GiveUp>(each).why;
      Request request;
      request.group = options_.groups->watching();
      request.descriptor.collective = Collective::kBarrier;
      request.is_patient = true;
      question_ = options_.runtime->submit(request);
    }
    return Status::ok();
  }

  PieceRange own_range_of(const Piece& piece) const { return reduction_->own_range(piece); }
  /// Our range in our slot.
  DeviceSpan own_range(const Piece& piece) const {
    const PieceRange range = own_range_of(piece);
    return reduction_->slot(piece).subspan(range.offset, range.bytes);
  }
  /// And where the host has it meanwhile.
  std::span<std::byte> host_range(const Piece& piece) const {
    return {host_.get() + piece.number % staging::kSlots * range_bytes(), own_range_of(piece).bytes};
  }

  void perform(const staging::SumOwn& action, staging::PeerActions& more) {
    take_step(Step::kSumOwn, action.piece, more);
  }

  void perform(const staging::Exchange& action, staging::PeerActions& more) {
    const Piece& piece = action.piece;
    // A piece so small that nothing of it is ours: nor is it of those at our place on the other hosts.
    if (own_range(piece).empty()) return engine_.on_exchanged(piece.number, Status::ok(), more);
    watch({in_, Kind::kRangeOut, piece}, device_->copy_to_host(in_, host_range(piece), own_range(piece)), more);
  }

  void on_range_out(const Piece& piece, const Status& status, staging::PeerActions& more) {
    const auto found = operations_.find(piece.operation);
    if (!status.is_ok() || found == operations_.end() || !engine_.status().is_ok()) {
      return engine_.on_exchanged(piece.number, status, more);
    }
    const Job& job = found->second.job;
    Round round(RoundKind::kExchange, piece);
    round.request.group = options_.groups->network();
    round.request.descriptor.dtype = job.descriptor.dtype;
    round.request.output = host_range(piece);
    round.request.input = round.request.output;
    const auto elements = static_cast<std::int64_t>(round.request.output.size() / element_bytes(job.descriptor.dtype));
    set_shape(round.request.descriptor, std::span(&elements, 1));
    round.request.timeout = job.timeout;
    // Ranks come to it in any order of pieces.
    round.request.key = kNamedKey | piece.number;
    begin(std::move(round), more);
  }

  void on_exchanged(const Piece& piece, const Status& status, staging::PeerActions& more) {
    if (!status.is_ok()) return engine_.on_exchanged(piece.number, status, more);
    watch({back_, Kind::kRangeBack, piece}, device_->copy_to_device(back_, own_range(piece), host_range(piece)), more);
  }

  void perform(const staging::SumAll& action, staging::PeerActions& more) {
    take_step(Step::kSumAll, action.piece, more);
  }

  void perform(const staging::CopyResult& action, staging::PeerActions& more) {
    take_step(Step::kGather, action.piece, more);
  }

  void perform(const staging::PeerComplete& action, staging::PeerActions&) {
    operations_.at(action.operation).job.complete(action.status);
  }

  void perform(const staging::PeerRelease& action, staging::PeerActions&) {
    const auto found = operations_.find(action.operation);
    const std::function<void()> release = std::move(found->second.job.release);
    operations_.erase(found);
    if (release) release();
  }

  void perform(const staging::Close& action, staging::PeerActions& more) {
    reduction_->abort();
    end_steps(more);
    options_.groups->abort(action.why.message());
  }

  Options options_;
  const std::uint32_t members_;
  std::unique_ptr<Device> device_;
  StreamHandle in_;
  StreamHandle back_;
  const pid_t pid_;
  std::unique_ptr<HostReduction> reduction_;
  staging::PeerEngine engine_;
  ReductionLanes lanes_;
  staging::CollectiveWatch watch_;
  std::shared_ptr<Work> question_;  ///< Whether the others are still there.
  std::map<staging::PeerOperationId, Operation> operations_;
  std::uint32_t last_operation_ = 0;
  std::map<Ticket, Watched> tickets_;
  std::deque<Watched> unwatched_;
  std::deque<Round> rounds_;
  std::shared_ptr<void> will_call_;
  std::shared_ptr<std::byte> host_;  ///< A range for each slot; several hosts.
};

}  // namespace

bool PeerGroup::takes(const OpDescriptor& descriptor, bool has_network) {
  if (descriptor.collective != Collective::kAllReduce || descriptor.op_bytes == 0) return false;
  if (descriptor.reduce != ReduceOp::kSum && (descriptor.reduce != ReduceOp::kAverage || has_network)) return false;
  switch (descriptor.dtype) {
    case DataType::kFloat32:
    case DataType::kFloat64:
    case DataType::kFloat16:
    case DataType::kBFloat16:
    case DataType::kInt32:
    case DataType::kInt64:
      return true;
    default:
      return false;
  }
}

std::unique_ptr<PeerGroup> PeerGroup::open(Options options) {
  auto peers = std::make_unique<Peers>(std::move(options));
  peers->open();
  return peers;
}

}  // namespace herring::runtime
