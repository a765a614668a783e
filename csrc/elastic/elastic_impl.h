#pragma once

#include <condition_variable>
#include <deque>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/log.h"
#include "elastic/cutoff.h"
#include "elastic/elastic_runtime.h"
#include "elastic/journal.h"
#include "elastic/lifecycle.h"
#include "elastic/rendezvous_client.h"
#include "elastic/reports.h"
#include "runtime/operation_order.h"
#include "runtime/pending.h"

namespace herring::elastic {

using Data = std::shared_ptr<const std::vector<std::byte>>;

/// An operation as its caller gave it, and what is kept of its data.
struct Operation {
  runtime::Request request;
  std::vector<std::byte> source;  ///< Elastic, in place: what the memory held.
  Data result;                    ///< Elastic: once complete, until settled.
  std::shared_ptr<runtime::PendingWork> work;
  std::uint64_t root = 0;  ///< Broadcast: id of the worker.
  std::uint64_t run = 0;   ///< The generation that it runs in; 0: in none.
  std::shared_ptr<runtime::OrderedCall> call;
  bool has_begun = false;  ///< Has waited for nobody, or for long enough.
};

/// What becomes of an operation that this rank has not submitted yet, where that was settled without it.
struct Outcome {
  Status status;
  Data result;
};

struct Group {
  GroupId id;
  std::vector<std::uint64_t> members;   ///< Ids, in group order.
  std::vector<std::uint32_t> ranks;     ///< Of those in the present generation.
  std::uint32_t index = 0;              ///< This worker among `ranks`.
  std::size_t most_members = 0;         ///< That it ever had.
  Status closed = {};                   ///< Why nothing can be called in it any more: somebody has aborted it.
  std::uint64_t first_of_messages = 0;  ///< Number of the first collective whose messages can meet in this generation.
};

/// What this worker did with a group that it has no more; those who go on in it hear of it in each generation.
struct Parting {
  GroupId id;
  Status abort;             ///< Ok: it has left.
  std::uint64_t calls = 0;  ///< So many without a name came before.
};

/// What is no Error of ours (no memory, no thread) ends an attempt as well, and not the process.
inline Status status_of(const std::exception& error) {
  const auto* const own = dynamic_cast<const Error*>(&error);
  return own != nullptr ? own->status() : Status(Code::kInternal, error.what());
}

inline constexpr const char* kOthersAreIn =
    ": its output has a block for each worker, and the workers have changed; call it again for the present workers";

/// Three kinds of threads: callers; those of the present Runtime, on which its operations end; and the supervisor,
/// which listens to the rendezvous and alone goes from one generation to the next. Everything is under one mutex but
/// copying of data, and what blocks.
class ElasticRuntime::Impl final {
 public:
  Impl(const Home& given, Instant deadline);
  ~Impl() { shutdown(); }

  std::string whom_it_waits_for();
  void add_group(GroupId id, std::span<const std::uint32_t> ranks);
  void leave_group(GroupId id);
  void remove_group(GroupId id);
  void end_left_behind(GroupId id, const Status& why);
  void tell_partings(bool is_planned) const;
  Status end_of(const OperationId& id, std::uint64_t run);
  void decide_doubtful();
  void doubts_are_over();
  void break_off(Operation& operation, const Status& status);
  std::shared_ptr<runtime::Work> submit(const runtime::Request& request);
  std::optional<std::uint64_t> take_number(GroupId id);
  /// The runtime that a message goes through, or why it does not go. Waits for the end of a switch.
  std::shared_ptr<runtime::Runtime> for_message(GroupId id, const runtime::Composed* collective, Status& status);
  std::shared_ptr<runtime::ReceiveWork> refused_message(const Status& why) const;
  std::shared_ptr<std::byte> allocate(std::size_t bytes);
  void abort(const std::string& reason);
  void abort_group(GroupId id, const std::string& reason);
  void give_up_pending(GroupId id, const std::string& reason);
  void shutdown();
  bool let_in(Instant deadline);
  void start_again(Instant deadline);
  void pass_boundary(std::unique_lock<std::mutex>& lock, Departure how, Instant deadline);
  void forget_everything();
  std::shared_ptr<runtime::Runtime> now() const {
    const std::scoped_lock lock(mutex);
    return present.runtime;
  }

  /// What all workers of a generation are asked for together: it may end meanwhile, and the job not.
  template <typename Question>
  auto ask(const Question& question) {
    try {
      return question(*now());
    } catch (const Error& error) {
      const std::scoped_lock lock(mutex);
      if (error.status().code() != Code::kShutdown || life.is_stopping()) throw;
      throw Error(Code::kPeerLost, "workers were lost or joined before it ended; call it again");
    }
  }

  // Operations; `lock` is of mutex, held.
  void wait_for_room(std::unique_lock<std::mutex>& lock);
  void wait_for_plan(std::unique_lock<std::mutex>& lock);
  Status check(runtime::Request& request) const;
  bool begin(const OperationId& id, Operation& operation);
  void begin_ready();
  bool start(const OperationId& id, Operation& operation);
  bool take_outcome(const OperationId& id, Operation& operation);
  void finished(const OperationId& id, std::uint64_t run, const Status& status);
  bool close_operation(const OperationId& id, Operation& operation, const Status& status);
  void end_operation(const OperationId& id, Operation& operation, const Status& status);
  void forget(const OperationId& id);
  bool is_old(const OperationId& id) const;

  // The supervisor.
  void supervise();
  void stay_out();
  bool take_turn();
  bool is_ready_for_boundary() const;
  Lifecycle::Command obey(const Message& message);
  void settle(const Message& message);
  void report(const OperationId& id);
  void report_completed();
  void report_what_is_due();
  Instant next_report() const;
  /// Enough of it that what all have should be forgotten soon.
  bool is_journal_full() const { return kept_bytes > home.config.journal_bytes / 2; }
  void report_broken();
  void switch_over(const std::string& reason);
  std::optional<Message> await_go(Instant deadline);
  void leave_present(const std::string& reason);
  Status join(const Message& go, const std::string& reason, Instant deadline);
  void mark_start();
  Plan make_common_plan(Generation& next);
  std::vector<Data> deliver(const Generation& next, const Plan& plan);
  void install(Generation next, const Message& go, const Plan& plan, const std::vector<Data>& received,
               const std::string& reason);
  void apply(const Step& step, bool concerns_me, const Data& received);
  void adopt(Generation next, bool is_planned);
  void restart_operations();
  void tell_change(const Message& go, const std::vector<std::uint64_t>& before, const std::string& reason);
  void give_up(const Status& status);
  void build_beside(const Message& go);
  void drop_beside();
  void go_over();
  void fail_to_switch(const std::string& why);
  void retire_if_drained();
  void retire(std::shared_ptr<runtime::Runtime> runtime, std::uint64_t next);
  void count_in(const std::shared_ptr<runtime::Runtime>& runtime);
  void wait_for_retired();
  void send(MessageKind kind, std::uint64_t generation, const std::string& text = "", bool at_boundary = false);

  const Home home;
  const bool elastic;
  const Duration join_timeout;
  std::shared_ptr<runtime::CallbackPool> callbacks = std::make_shared<runtime::CallbackPool>();
  Logger logger;
  std::unique_ptr<RendezvousClient> rendezvous;

  mutable std::mutex mutex;
  std::condition_variable changed;
  // Guarded by mutex.
  Lifecycle life;
  Journal journal;
  std::map<OperationId, Operation> operations;  // Those of the journal.
  const std::shared_ptr<runtime::OperationOrder> order = std::make_shared<runtime::OperationOrder>();
  std::map<OperationId, Outcome> outcomes;
  std::map<OperationId, std::uint64_t> straddling;  // Broadcasts that others submitted before: their root's id.
  std::map<GroupId, Group> groups;
  std::deque<Parting> partings;
  std::map<GroupId, std::size_t> leaving;  // Groups that are being removed: how many members each has.
  struct Doubt {
    std::uint64_t run;
    Status status;
    Instant since;
  };
  std::map<OperationId, Doubt> doubtful;  // The end of their group, or of the generation: the news is on its way.
  Generation present;
  std::size_t unfinished = 0;    // Operations that have not ended.
  std::uint64_t kept_bytes = 0;  // Of results.
  std::uint64_t messages_used = 0;
  std::uint32_t newcomers = 0;
  Reports reports;
  Cutoff cutoff;   // Planned switch: what goes through the old generation.
  Generation old;  // It, while it drains.
  std::size_t old_unfinished = 0;
  runtime::RuntimeStats past;                 // Of generations that are over.
  std::shared_ptr<runtime::Runtime> retired;  // Drained, and about to be over.
  std::function<void(const Change&)> change_callback;

  std::uint64_t own_id = 0;

  // The supervisor's own.
  std::optional<Generation> beside;  // Planned: connected, not used yet.
  std::future<void> retiring;

  std::thread supervisor;
};

}  // namespace herring::elastic
