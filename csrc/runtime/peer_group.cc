#include "runtime/peer_group.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <random>
#include <span>
#include <thread>
#include <utility>

#include "core/status.h"
#include "cuda/kernels/tables.h"
#include "intra_node/meeting.h"
#include "runtime/peer_records.h"
#include "staging/peer_engine.h"

namespace herring::runtime {
namespace {

using staging::Piece;
using staging::PieceRange;

/// The communicator speaks of the operation that it carries out; people know the one that it is for.
Status spoken_of(const Status& status, const OpDescriptor& carried_out, const OpDescriptor& known) {
  std::string text = status.message();
  const std::string own = to_string(carried_out);
  if (const std::size_t at = text.find(own); at != std::string::npos) text.replace(at, own.size(), to_string(known));
  return {status.code(), std::move(text)};
}

static_assert(PeerGroup::kMostMembers == cuda::kMostSources);

class Peers final : public PeerGroup {
 public:
  explicit Peers(Options options)
      : options_(std::move(options)),
        members_(static_cast<std::uint32_t>(options_.places.neighbors.size())),
        meeting_(peer_group(options_.group, options_.places.host * 2)),
        sharing_(peer_group(options_.group, options_.places.host * 2 + 1)),
        network_(peer_group(options_.group, kFirstNetworkGroup + options_.places.index)),
        pid_(getpid()),
        engine_({.members = members_, .slot_bytes = slot_bytes(), .has_network = has_network()}) {}

  ~Peers() override {
    // The driver does not work in a forked child.
    if (getpid() != pid_) {
      static_cast<void>(device_.release());
      return;
    }
    leave();
    const Instant deadline = std::chrono::steady_clock::now() + kPatience;
    end_rounds(deadline);
    if (!device_) return;
    // What a copy may still use stays, and so does the device, which would give it back.
    if (!end_copies(deadline)) {
      static_cast<void>(device_.release());
      if (host_) static_cast<void>(new std::shared_ptr<std::byte>(std::move(host_)));
      return;
    }
    for (const DeviceSpan memory : slots_) {
      if (!memory.empty()) static_cast<void>(device_->release(memory));
    }
  }

  void open() {
    for (const auto& [group, ranks] : groups()) options_.runtime->add_group(group, *ranks);
    are_groups_known_ = true;
    Status status;
    try {
      open_here();
    } catch (const Error& error) {
      status = error.status();
    }
    // Also where it went wrong here: the other hosts have to hear of it.
    if (has_network()) agree(network_, options_.places.others, status, "cannot reduce on its GPU");
    if (!status.is_ok()) throw Error(status);
  }

  void close(const Status& why) override {
    staging::PeerActions actions;
    engine_.close(why, actions);
    act(actions);
  }

  void leave() override {
    if (!std::exchange(are_groups_known_, false)) return;
    for (const auto& [group, ranks] : groups()) {
      options_.runtime->leave_group(group);
      options_.runtime->remove_group(group);
    }
  }

  Status submit(Instant now, Job job) override {
    const staging::PeerOperationId id{++last_operation_};
    const Instant deadline = job.timeout > Instant::max() - now ? Instant::max() : now + job.timeout;
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
    has_moved |= hear(now, actions);
    engine_.advance(now, actions);
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
  /// At the end, with what is still under way.
  static constexpr std::chrono::seconds kPatience{5};

  enum class Kind : std::uint8_t { kIn, kSummed, kRangeOut, kRangeBack, kResult };
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
  std::vector<std::pair<GroupId, const std::vector<std::uint32_t>*>> groups() const {
    const PeerPlaces& places = options_.places;
    std::vector<std::pair<GroupId, const std::vector<std::uint32_t>*>> all{{meeting_, &places.neighbors},
                                                                           {sharing_, &places.neighbors}};
    if (has_network()) all.emplace_back(network_, &places.others);
    return all;
  }

  /// Of a piece, at most.
  std::uint64_t range_bytes() const {
    return staging::range_of(slot_bytes(), 0, members_).bytes + staging::kRangeAlignment;
  }

  std::uint64_t slot_bytes() const {
    return options_.memory_bytes / staging::kSlots / staging::kRangeAlignment * staging::kRangeAlignment;
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
    while (!tickets_.empty() || !unwatched_.empty()) {
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

  Status open_device(int& descriptor) {
    try {
      device_ = options_.open(in_, back_);
      if (has_network()) host_ = options_.host_memory(staging::kSlots * range_bytes());
    } catch (const Error& error) {
      return {Code::kUnavailable, error.status().message()};
    }
    if (has_network() && !host_) return {Code::kUnavailable, "no host memory for copies; raise HERRING_ARENA_BYTES"};
    return device_->allocate_shared(options_.memory_bytes, slots_[options_.places.index], descriptor);
  }

  void open_here() {
    const std::vector<std::uint32_t>& ranks = options_.places.neighbors;
    const std::uint32_t index = options_.places.index;
    slots_.resize(members_);
    int descriptor = -1;
    const Status allocated = open_device(descriptor);
    intra_node::SharedDescriptors own;
    own.arena = intra_node::FileDescriptor(descriptor);
    intra_node::MeetingOptions meeting;
    meeting.local_rank = index;
    meeting.local_size = members_;
    meeting.token = agree(meeting_, ranks, allocated, "cannot share memory of its GPU");
    meeting.arena_bytes = options_.memory_bytes;
    meeting.has_arena_alone = true;
    const std::vector<intra_node::SharedDescriptors> theirs = pass_on(meeting, own);
    Status imported;
    for (std::uint32_t i = 0; i < members_ && imported.is_ok(); ++i) {
      if (i == index) continue;
      imported = device_->import_shared(theirs[i].arena.get(), options_.memory_bytes, slots_[i]);
      if (imported.is_ok()) continue;
      imported = {imported.code(), "the memory of rank " + std::to_string(ranks[i]) + "'s GPU: " + imported.message()};
    }
    agree(meeting_, ranks, imported, "cannot reach the memory of another rank's GPU");
  }

  /// All ranks have come by now: who does not meet the others at once has died.
  static std::vector<intra_node::SharedDescriptors> pass_on(const intra_node::MeetingOptions& meeting,
                                                            const intra_node::SharedDescriptors& own) {
    constexpr std::chrono::seconds kLimit{20};
    try {
      return intra_node::meet(meeting, own, std::chrono::steady_clock::now() + kLimit);
    } catch (const Error& error) {
      if (error.status().code() != Code::kTimeout) throw;
      throw Error(Code::kTimeout, "a rank of this host did not share memory of its GPU within " +
                                      std::to_string(kLimit.count()) + " s; look at the output of the other ranks");
    }
  }

  /// All of a group say how it went; throws on all where it went wrong on one. A number that all know afterwards, and
  /// nobody else.
  std::uint64_t agree(GroupId group, const std::vector<std::uint32_t>& ranks, const Status& own, const char* what) {
    const auto self = std::ranges::find(ranks, options_.places.neighbors[options_.places.index]) - ranks.begin();
    Record record{};
    record[0] = 1 + static_cast<std::int64_t>(own.code());
    if (self == 0) {
      std::random_device random;
      record[1] = static_cast<std::int64_t>(std::uint64_t{random()} << 32 | random());
    }
    Records records(ranks.size(), static_cast<std::size_t>(self), record);
    const Request request = records.request(group, options_.timeout);
    const std::shared_ptr<Work> work = options_.runtime->submit(request);
    {
      const auto ask = [work] { return Awaited{work.get(), "the group's first all_reduce on GPUs", work}; };
      const std::shared_ptr<void> blocked = options_.runtime->block(ask, false);
      work->wait(Instant::max());
    }
    if (!own.is_ok()) throw Error(own);
    if (!work->status().is_ok()) {
      throw Error(work->status().code(),
                  "while ranks come together to reduce on their GPUs: " + work->status().message());
    }
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      if (records.of(i)[0] == 1 + static_cast<std::int64_t>(Code::kOk)) continue;
      throw Error(Code::kUnavailable, "rank " + std::to_string(ranks[i]) + " " + what + "; its own message says why");
    }
    return static_cast<std::uint64_t>(records.of(0)[1]);
  }

  /// What the device is doing leads to calls, whoever waits.
  void note_calls() {
    const bool will_call = !tickets_.empty() || !unwatched_.empty();
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
        return engine_.on_summed(number, status, actions);
      case Kind::kRangeOut:
        return on_range_out(watched.piece, status, actions);
      case Kind::kRangeBack:
        return engine_.on_exchanged(number, status, actions);
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
        status = compare(*round.said, round.piece);
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

  Status compare(const Records& said, const Piece& piece) const {
    const Record own = said.of(options_.places.index);
    std::uint32_t other = 0;
    while (other < members_ && said.of(other) == own) ++other;
    if (other == members_) return Status::ok();
    std::string text = "ranks disagree about operation " + std::to_string(piece.operation.value) +
                       " of process group " + std::to_string(options_.group.value - kFirstFrameworkGroup) +
                       " on GPUs: ";
    for (std::uint32_t i = 0; i < members_; ++i) {
      text += (i > 0 ? "; rank " : "rank ") + std::to_string(options_.places.neighbors[i]) + ": " +
              to_string(descriptor_of(said.of(i)));
    }
    return {Code::kMismatch, std::move(text)};
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
    const DeviceSpan slot = slots_[options_.places.index].subspan(piece.slot_offset, piece.bytes);
    const Status status = device_->copy_inside(in_, slot, tensor_part(piece));
    watch({in_, Kind::kIn, piece}, status, more);
  }

  void perform(const staging::Meet& action, staging::PeerActions& more) {
    const Job& job = operations_.at(action.piece.operation).job;
    Round round(RoundKind::kMeeting, action.piece);
    round.said = std::make_unique<Records>(members_, options_.places.index, record_of(job.descriptor, action.piece));
    round.request = round.said->request(meeting_, job.timeout);
    begin(std::move(round), more);
  }

  void perform(const staging::Share& action, staging::PeerActions& more) {
    Round round(RoundKind::kSharing, action.piece);
    round.request.group = sharing_;
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

  Status sum(const Piece& piece, PieceRange range, std::uint64_t target) {
    const OpDescriptor& descriptor = operations_.at(piece.operation).job.descriptor;
    if (range.bytes == 0) return Status::ok();
    cuda::SumParameters parameters;
    for (std::uint32_t i = 0; i < members_; ++i) {
      parameters.sources[i] = slots_[i].address + piece.slot_offset + range.offset;
    }
    parameters.target = target;
    parameters.elements = range.bytes / element_bytes(descriptor.dtype);
    parameters.source_count = members_;
    parameters.type = static_cast<cuda::Element>(descriptor.dtype);
    parameters.average_over = descriptor.reduce == ReduceOp::kAverage ? members_ : 1;
    // No more than have anything to do.
    constexpr std::uint64_t kElementsOfBlock = std::uint64_t{cuda::kSumThreads} * 4;
    const std::uint64_t useful = (parameters.elements + kElementsOfBlock - 1) / kElementsOfBlock;
    const auto blocks = static_cast<std::uint32_t>(std::min<std::uint64_t>(options_.blocks, useful));
    return device_->launch(back_, KernelId::kSum, std::as_bytes(std::span(&parameters, 1)), blocks);
  }

  PieceRange range_of(const Piece& piece, std::uint32_t member) const {
    return staging::range_of(piece.bytes, member, members_);
  }
  PieceRange own_range_of(const Piece& piece) const { return range_of(piece, options_.places.index); }
  /// Our range in our slot.
  DeviceSpan own_range(const Piece& piece) const {
    const PieceRange range = own_range_of(piece);
    return slots_[options_.places.index].subspan(piece.slot_offset + range.offset, range.bytes);
  }
  /// And where the host has it meanwhile.
  std::span<std::byte> host_range(const Piece& piece) const {
    return {host_.get() + piece.number % staging::kSlots * range_bytes(), own_range_of(piece).bytes};
  }

  void perform(const staging::SumOwn& action, staging::PeerActions& more) {
    const Piece& piece = action.piece;
    watch({back_, Kind::kSummed, piece}, sum(piece, own_range_of(piece), own_range(piece).address), more);
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
    round.request.group = network_;
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
    end_result(action.piece, sum(action.piece, {0, action.piece.bytes}, tensor_part(action.piece).address), more);
  }

  void perform(const staging::CopyResult& action, staging::PeerActions& more) {
    const DeviceSpan tensor = tensor_part(action.piece);
    Status status;
    for (std::uint32_t i = 0; i < members_ && status.is_ok(); ++i) {
      const PieceRange range = range_of(action.piece, i);
      const DeviceSpan slot = slots_[i].subspan(action.piece.slot_offset, action.piece.bytes);
      status = device_->copy_inside(back_, tensor.subspan(range.offset, range.bytes),
                                    slot.subspan(range.offset, range.bytes));
    }
    end_result(action.piece, status, more);
  }

  void end_result(const Piece& piece, const Status& status, staging::PeerActions& more) {
    engine_.on_result_submitted(piece.number, status, more);
    if (status.is_ok()) watch({back_, Kind::kResult, piece}, status, more);
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

  void perform(const staging::Close& action, staging::PeerActions&) {
    for (const auto& [group, ranks] : groups()) options_.runtime->abort_group(group, action.why.message());
  }

  Options options_;
  const std::uint32_t members_;
  std::unique_ptr<Device> device_;
  StreamHandle in_;
  StreamHandle back_;
  const GroupId meeting_;
  const GroupId sharing_;
  const GroupId network_;
  const pid_t pid_;
  bool are_groups_known_ = false;
  std::vector<DeviceSpan> slots_;  ///< All members' memory as it is mapped here.
  staging::PeerEngine engine_;
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
